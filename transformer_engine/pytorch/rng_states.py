# SPDX-License-Identifier: Apache-2.0
"""Named random number streams, for ranks that must draw alike in one place and apart in another."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator

import torch

# What `get_all_rng_states` returns: the generators of all trackers, by name.
_ALL_STATES: Dict[str, Any] = {}


def graph_safe_rng_available() -> bool:
    """Whether this torch has generators whose state a captured CUDA graph can follow."""
    return hasattr(torch.cuda.CUDAGraph, "register_generator_state") and hasattr(
        torch.Generator, "graphsafe_set_state"
    )


def is_graph_safe_rng_state(state: Any) -> bool:
    """Whether a state is a generator, as opposed to a tensor of bytes."""
    return isinstance(state, torch.Generator)


def get_all_rng_states() -> Dict[str, Any]:
    """The graph-safe states of all trackers, by name."""
    return _ALL_STATES


def set_all_rng_states(states: Dict[str, Any]) -> None:
    """Replace what `get_all_rng_states` returns."""
    _ALL_STATES.clear()
    _ALL_STATES.update(states)


def _generator() -> torch.Generator:
    """The default generator of the current CUDA device, or of the CPU where there is no CUDA."""
    if not torch.cuda.is_available():
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device()]


def _read() -> Any:
    """The state of the default generator: a generator on CUDA, where it can be, else bytes."""
    generator = _generator()
    if generator.device.type == "cuda" and graph_safe_rng_available():
        return generator.graphsafe_get_state()
    return generator.get_state()


def _write(state: Any) -> None:
    """Let the default generator go on from ``state``."""
    if is_graph_safe_rng_state(state):
        _generator().graphsafe_set_state(state)
    else:
        _generator().set_state(state)


class CudaRNGStatesTracker:
    """Random number streams of the current CUDA device by name (of the CPU where there is no CUDA).

    .. code-block:: python

        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", seed)
        with tracker.fork():
            ...  # draws from that stream

    On CUDA the streams are ``torch.Generator`` objects, which graphs of `make_graphed_callables`
    draw from anew at each replay.
    """

    def __init__(self) -> None:
        self.states_: Dict[str, Any] = {}
        self.seeds_: set = set()

    def reset(self) -> None:
        """Forget all streams."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> Dict[str, Any]:
        """The states by name; the generators themselves where they are generators."""
        return dict(self.states_)

    def set_states(self, states: Dict[str, Any]) -> None:
        """Replace all states by what `get_states` gave."""
        self.states_ = states
        for name, state in states.items():
            if is_graph_safe_rng_state(state):
                _ALL_STATES[name] = state

    def add(self, name: str, seed: int) -> None:
        """Add a stream that starts from ``seed``; RuntimeError if the name or seed is taken."""
        if seed in self.seeds_:
            raise RuntimeError(f"The seed {seed} is used by another stream; give each its own.")
        if name in self.states_:
            raise RuntimeError(f"There is a stream named {name!r} already; choose another name.")
        self.seeds_.add(seed)
        before = _read()
        if is_graph_safe_rng_state(before):
            state = before.clone_state()
            state.manual_seed(seed)
            _ALL_STATES[name] = state
        else:
            _generator().manual_seed(seed)
            state = _read()
            _write(before)
        self.states_[name] = state

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the stream ``name``; KeyError if there is none."""
        if name not in self.states_:
            raise KeyError(
                f"There is no random number stream named {name!r}; call add({name!r}, seed) first."
            )
        before = _read()
        _write(self.states_[name])
        try:
            yield
        finally:
            if not is_graph_safe_rng_state(self.states_[name]):
                self.states_[name] = _read()
            _write(before)


def frozen_states(tracker: Any) -> Dict[str, Any]:
    """The states of a tracker as they are now: generators go on, so they are copied."""
    return {
        name: state.clone_state() if is_graph_safe_rng_state(state) else state
        for name, state in tracker.get_states().items()
    }


@contextmanager
def tracked_from(tracker: Any, states: Dict[str, Any]) -> Iterator[None]:
    """Let ``tracker`` start from `frozen_states`, and give it back as it was."""
    before = tracker.get_states()
    fresh = {
        name: state.clone_state() if is_graph_safe_rng_state(state) else state
        for name, state in states.items()
    }
    tracker.set_states(fresh)
    try:
        yield
    finally:
        tracker.set_states(before)
