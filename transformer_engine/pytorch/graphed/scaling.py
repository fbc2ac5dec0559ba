# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling of graphed modules: a graph records amaxes, and replays have scales renewed."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Union

from torch import Tensor

from ..core.delayed_scaling import DelayedScalingState, enter, enter_backward, rows_of
from ..core.update_rule import UpdateRule
from ..fp8_global_state import FP8GlobalStateManager


class CapturedState(NamedTuple):
    """A state of delayed scaling that a graph reads and records in, and its tensors by then."""

    module: Any
    state: DelayedScalingState
    tensors: tuple


class UsedState(NamedTuple):
    """A state that a call uses; ``rule``: by which backward renews its scale.

    None if another use of the region does that. ``scale`` and ``history`` are those of backward.
    """

    scale: Tensor
    history: Tensor
    rule: Optional[Union[str, UpdateRule]]


def captured_states(modules: Sequence[Any]) -> List[CapturedState]:
    """The states that ``modules`` have used in the region that is open."""
    states = [(module, module._delayed_scaling) for module in modules]
    return [
        CapturedState(module, state, _tensors(state))
        for module, state in states
        if state is not None and state.pending
    ]


def _tensors(state: DelayedScalingState) -> tuple:
    return state.fwd_scale, state.fwd_history, state.bwd_scale, state.bwd_history


def used_states(captured: Sequence[CapturedState], trained: bool) -> List[UsedState]:
    """Mark states as used in the region of a call, as modules do; ``trained``: backward follows.

    Outside of a region none is. Raises RuntimeError if a state is not the captured one any more.
    """
    if not captured or not FP8GlobalStateManager.is_fp8_enabled():
        return []
    rules = [module._recipe_and_rule()[1] for module, *_ in captured]
    for (module, state, tensors), rule in zip(captured, rules):
        same = module._delayed_scaling is state
        same = same and all(now is then for now, then in zip(_tensors(state), tensors))
        if not same or (rule != "" and rows_of(rule) != state.fwd_history.shape[0]):
            raise RuntimeError(
                f"The delayed-scaling state of {type(module).__name__} '{module.name}' is not the"
                " one that its CUDA graph records in: an amax history of another length was asked"
                " for or loaded, or the module was moved. Use the recipe of the capture, or call"
                " make_graphed_callables again."
            )
    used = []
    for (_, state, _), rule in zip(captured, rules):
        if rule != "":
            enter(state, rule)
            backward_rule = enter_backward(state) if trained else None
            used.append(UsedState(state.bwd_scale, state.bwd_history, backward_rule))
    return used
