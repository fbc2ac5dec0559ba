# SPDX-License-Identifier: Apache-2.0
"""In which order the forward and backward passes of several callables are captured."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence


class Event(NamedTuple):
    """One pass of the unit number ``unit``."""

    forward: bool
    unit: int


class Schedule(NamedTuple):
    """What is captured.

    A unit is one call: of a layer, for one microbatch. ``callables``: for each unit the position of
    its callable; ``events``: all passes in the order in which they are captured, and replayed.
    """

    callables: List[int]
    events: List[Event]


def plain_schedule(count: int) -> Schedule:
    """One unit for each of ``count`` callables: all forward passes, then back."""
    forward = [Event(True, unit) for unit in range(count)]
    backward = [Event(False, unit) for unit in reversed(range(count))]
    return Schedule(list(range(count)), forward + backward)


def pipelined_schedule(
    order: Sequence[int], count: int, layers_per_chunk: Optional[Sequence[int]], samples: int
) -> Schedule:
    """Units for each microbatch of each layer, in the order of an interleaved pipeline.

    ``order``: c is the forward pass of the next microbatch through the c-th chunk of layers
    (counted from 1), -c the backward pass of the oldest one. ``layers_per_chunk``: how many of the
    ``count`` callables each chunk has; None divides them evenly. Units, like the ``samples`` sample
    arguments, are ordered by chunk, in it by microbatch, in it by layer.

    Raises ValueError if these do not fit together.
    """
    chunks, microbatches = _check_order(order)
    layers = _layers(count, chunks, layers_per_chunk)
    if samples != count * microbatches:
        raise ValueError(
            f"_order has {microbatches} microbatches of {count} layers, so sample_args must have"
            f" {count * microbatches} entries (by chunk, microbatch, layer), but has {samples}."
        )
    first_layer = [sum(layers[:chunk]) for chunk in range(chunks)]
    callables = [
        first_layer[chunk] + layer
        for chunk in range(chunks)
        for _ in range(microbatches)
        for layer in range(layers[chunk])
    ]
    events: List[Event] = []
    done = {step: 0 for chunk in range(1, chunks + 1) for step in (chunk, -chunk)}
    for step in order:
        chunk, microbatch = abs(step) - 1, done[step]
        done[step] += 1
        start = first_layer[chunk] * microbatches + microbatch * layers[chunk]
        units = range(start, start + layers[chunk])
        events += [Event(step > 0, unit) for unit in (units if step > 0 else reversed(units))]
    return Schedule(callables, events)


def _check_order(order: Sequence[int]) -> tuple[int, int]:
    """``(chunks, microbatches)`` of a valid order."""
    if not order or any(not isinstance(step, int) or step == 0 for step in order):
        raise ValueError(
            f"_order must be a list of integers c and -c for the chunks c = 1, 2, ..., not {order}."
        )
    chunks, microbatches = max(order), list(order).count(1)
    if min(order) < -chunks:
        raise ValueError(f"_order has a backward pass of chunk {-min(order)}, but no forward pass.")
    for chunk in range(1, chunks + 1):
        forward, backward = list(order).count(chunk), list(order).count(-chunk)
        if forward != microbatches or backward != microbatches:
            raise ValueError(
                f"Chunk {chunk} has {forward} forward and {backward} backward passes in _order;"
                f" chunk 1 has {microbatches} forward passes, and all must have as many."
            )
    open_passes = [0] * (chunks + 1)
    for step in order:
        open_passes[abs(step)] += 1 if step > 0 else -1
        if open_passes[abs(step)] < 0:
            raise ValueError(f"_order has a backward pass of chunk {-step} before its forward one.")
    return chunks, microbatches


def _layers(count: int, chunks: int, layers_per_chunk: Optional[Sequence[int]]) -> List[int]:
    """How many callables each chunk has."""
    if layers_per_chunk is None:
        if count % chunks:
            raise ValueError(
                f"{count} callables can not be divided evenly into {chunks} chunks; give"
                " _num_layers_per_chunk."
            )
        return [count // chunks] * chunks
    if len(layers_per_chunk) != chunks or sum(layers_per_chunk) != count:
        raise ValueError(
            f"_num_layers_per_chunk is {list(layers_per_chunk)}, but there are {count} callables in"
            f" {chunks} chunks."
        )
    return list(layers_per_chunk)


def shared_buffers(schedule: Schedule, signatures: Sequence[Any]) -> List[int]:
    """For each unit the one whose input buffers it uses: itself, or one that is done with them.

    A unit may use those of an earlier one of the same callable and ``signatures`` (shapes and the
    like) whose backward pass comes before.
    """
    owner = list(range(len(schedule.callables)))
    free: dict = {}
    for event in schedule.events:
        unit = event.unit
        key = (schedule.callables[unit], signatures[unit])
        if event.forward and free.get(key):
            owner[unit] = free[key].pop(0)
        elif not event.forward:
            free.setdefault(key, []).append(owner[unit])
    return owner
