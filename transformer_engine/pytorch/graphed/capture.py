# SPDX-License-Identifier: Apache-2.0
"""Warms up and captures units in the order of a schedule."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional, Sequence

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..fp8_global_state import FP8GlobalStateManager
from .schedule import Schedule, shared_buffers
from .unit import Unit
from .weight_gradients import main_grads_kept


class Capturing:
    """Whether graphs are being captured; one instance, `CAPTURING`."""

    def __init__(self) -> None:
        self.active = False


CAPTURING = Capturing()


@contextmanager
def capturing(caching: bool) -> Iterator[None]:
    """Mark a capture. Without ``caching`` the flag that controls cached weights is out of sight."""
    state = FP8GlobalStateManager.quantization_state
    before, flag = CAPTURING.active, state.skip_fp8_weight_update_tensor
    CAPTURING.active = True
    if caching:
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
    else:
        state.skip_fp8_weight_update_tensor = None
    try:
        yield
    finally:
        CAPTURING.active = before
        if not caching:
            state.skip_fp8_weight_update_tensor = flag


def share_inputs(units: Sequence[Unit], schedule: Schedule) -> None:
    """Let units whose inputs are needed at different times have the same static ones."""
    signatures = [
        tuple((tuple(x.shape), x.dtype, x.device, x.requires_grad) for x in unit.inputs)
        for unit in units
    ]
    for unit, owner in zip(units, shared_buffers(schedule, signatures)):
        unit.inputs = units[owner].inputs
        structure = tree_flatten((unit.args, unit.kwargs))[1]
        unit.args, unit.kwargs = tree_unflatten(unit.inputs, structure)


def warm_up(
    units: Sequence[Unit],
    iterations: int,
    before: Optional[Callable],
    after: Optional[Callable],
) -> None:
    """Run each callable ``iterations`` times, on the inputs of its first unit."""
    if before is not None:
        before()
    first: List[Unit] = []
    for unit in units:
        known = next((other for other in first if other.module is unit.module), None)
        if known is not None:
            unit.visited = known.visited
            continue
        first.append(unit)
        if unit.options.caching:
            unit.fill_caches()  # what follows rewrites them, as the graph will
            if iterations == 0:
                unit.fill_caches()
        for _ in range(iterations):
            unit.warm_up()
    if after is not None:
        after()


def capture_all(units: Sequence[Unit], schedule: Schedule, pool: Any) -> None:
    """Capture all passes in their order."""
    with no_collection():
        for position, event in enumerate(schedule.events):
            unit = units[event.unit]
            unit.positions[event.forward], unit.siblings = position, list(units)
            if event.forward:
                unit.capture_forward(pool)
            else:
                unit.capture_backward(pool)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python from finding garbage while a graph is captured.

    What it frees may be memory or a graph of CUDA, and that ends a capture with an error.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def unchanged(
    modules: Sequence[torch.nn.Module], save: Callable, restore: Callable, backend: Any
) -> Iterator[None]:
    """Whatever runs inside leaves scales, histories, gradients and random numbers as they were."""
    params = [param for module in modules for param in module.parameters()]
    grads = [param.grad for param in params]
    with backend.same_random_numbers(), main_grads_kept(params):
        saved = save(modules)
        try:
            yield
        finally:
            restore(modules, saved)
            for param, grad in zip(params, grads):
                param.grad = grad
