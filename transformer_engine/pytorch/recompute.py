# SPDX-License-Identifier: Apache-2.0
"""Modules that are called again in backward, to recompute activations.

A recomputation runs when ``te.autocast`` has ended and delayed scaling has renewed its scales. So
each call of a module in a checkpointed forward pass is noted, with the recipe and the scale that it
sees, and the same call in the recomputation sees them again; what it records is forgotten.

The calls are kept with the checkpoint that they belong to. ``torch.utils.checkpoint`` has no public
way to ask for it: this file knows where its two implementations keep theirs (torch 2.11 to 2.15),
and no other file does. Where they are not found, modules compute under what is active at the time.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, NamedTuple, Optional

import torch

from .core import delayed_scaling
from .core.phase import PHASE
from .fp8_global_state import FP8GlobalStateManager

_CHECKPOINT = "torch.utils.checkpoint"
_FIRST_PASS = "_checkpoint_hook.__init__.<locals>.pack_hook"
_SECOND_PASS = "_recomputation_hook.__init__.<locals>.pack_hook"
_CALLS, _POSITION = "_te_module_calls", "_te_next_call"


class ModuleCall:
    """What a module saw when it was called in a forward pass."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.contexts = FP8GlobalStateManager.snapshot()
        self.scaling = None
        state = FP8GlobalStateManager.quantization_state
        if state.kind.startswith("custom") or delayed_scaling.REGION.rule != "":
            self.scaling = delayed_scaling.remember(getattr(module, "_delayed_scaling", None))

    @contextmanager
    def again(self):
        """Let the module see it again; afterwards nothing has happened."""
        now = FP8GlobalStateManager.snapshot(), PHASE.recomputing
        state = getattr(self.module, "_delayed_scaling", None)
        FP8GlobalStateManager.restore(self.contexts)
        PHASE.recomputing = True
        try:
            if self.scaling is None or state is None:
                yield
            else:
                with delayed_scaling.rewound(state, self.scaling):
                    yield
        finally:
            FP8GlobalStateManager.restore(now[0])
            PHASE.recomputing = now[1]


class Surroundings(NamedTuple):
    """The checkpoints that a call is part of.

    ``sinks``: where the call is noted, one list per first pass; ``following``: gives the call to
    repeat, None unless this is a second pass; ``backward_follows``: see `Phase`.
    """

    sinks: list
    following: Optional[Callable[[torch.nn.Module], Optional[ModuleCall]]]
    backward_follows: bool


def run_in_eager(forward: Callable, module: torch.nn.Module, *args, **kwargs):
    """``forward(module, ...)`` as part of the checkpoints around it, if there are any."""
    found = _surroundings(module)
    if found is None:
        return forward(module, *args, **kwargs)
    call = None if found.following is None else found.following(module)
    noted = ModuleCall(module) if call is None else call
    for sink in found.sinks:
        sink.append(noted)
    with backward_follows(found.backward_follows):
        if call is None:
            result = forward(module, *args, **kwargs)
        else:
            with call.again():
                result = forward(module, *args, **kwargs)
    if PHASE.uses is not None:
        PHASE.uses.add(id(getattr(module, "_delayed_scaling", None)))
    return result


@contextmanager
def backward_follows(value: bool) -> Iterator[None]:
    """Set `Phase.backward_follows` where `value` is True."""
    before = PHASE.backward_follows
    PHASE.backward_follows = before or value
    try:
        yield
    finally:
        PHASE.backward_follows = before


def recomputation_is_known() -> bool:
    """Whether what runs is a recomputation whose forward pass was noted."""
    if PHASE.recomputing:
        return True
    found = _surroundings(None)
    return found is not None and found.following is not None


def in_reentrant_checkpoint() -> bool:
    """Whether the first pass of a reentrant ``torch.utils.checkpoint`` is running."""
    return bool(_reentrant_contexts())


# --- marked by hand -------------------------------------------------------------------------------


class Marked:
    """The region of `activation_recompute_forward`; one instance, `MARKED`.

    ``by_hand``: the caller's own checkpoint runs, whose calls are kept per module, first in first
    out; ``reentrant``: gradients are off in its first pass.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.second_pass = False
        self.by_hand = False
        self.reentrant = True
        self.queues: Any = weakref.WeakKeyDictionary()

    @contextmanager
    def region(
        self, enabled: bool, second_pass: bool, by_hand: bool, reentrant: bool = True
    ) -> Iterator[None]:
        """Enter one, or leave all with ``enabled=False``."""
        before = dict(vars(self))
        self.enabled, self.second_pass = enabled, second_pass
        self.by_hand, self.reentrant = by_hand, reentrant
        try:
            yield
        finally:
            vars(self).update(before)

    def surroundings(self, module) -> Surroundings:
        """Those of a call of ``module`` in a region that was marked by hand."""
        queue = self.queues.setdefault(module, deque()) if module is not None else deque()
        if self.second_pass:
            return Surroundings([], lambda module: queue.popleft() if queue else None, False)
        return Surroundings([queue], None, not torch.is_grad_enabled())


MARKED = Marked()


# --- torch.utils.checkpoint -----------------------------------------------------------------------


def _surroundings(module) -> Optional[Surroundings]:
    """The checkpoints around a call; None, quickly, for most calls."""
    if MARKED.enabled and MARKED.by_hand:
        return MARKED.surroundings(module)
    training = torch.is_grad_enabled()
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is None and training and torch._C._current_graph_task_id() == -1:
        return None
    sinks: List[list] = []
    following = None
    for pack in [] if top is None else _pack_hooks():
        frame, second = _frame_of(pack)
        if second and hasattr(frame, _CALLS):
            following = _next_call(getattr(frame, _CALLS), pack, None)
            break
        if frame is not None and not second:
            sinks.append(_calls(frame))
    if following is None:
        following = _reentrant_calls()
    outer = [] if training or torch.is_inference_mode_enabled() else _reentrant_contexts()
    sinks += [_calls(ctx) for ctx in outer]
    if not sinks and following is None:
        return None
    return Surroundings(sinks, following, bool(outer))


def _calls(owner) -> list:
    """The calls noted with a checkpoint, which live as long as it."""
    if not hasattr(owner, _CALLS):
        setattr(owner, _CALLS, [])
    return getattr(owner, _CALLS)


def _next_call(calls: list, owner, run) -> Callable[[torch.nn.Module], ModuleCall]:
    """Gives the calls one by one; ``owner`` counts them, from 0 for each ``run``."""

    def following(module: torch.nn.Module) -> ModuleCall:
        seen, position = getattr(owner, _POSITION, (run, 0))
        position = position if seen == run else 0
        if position == len(calls) or calls[position].module is not module:
            raise RuntimeError(
                f"The recomputation of a checkpoint calls {type(module).__name__}"
                f" '{getattr(module, 'name', '')}' as module number {position}, but its forward"
                " pass did not. A checkpointed function must do the same each time it runs."
            )
        setattr(owner, _POSITION, (run, position + 1))
        return calls[position]

    return following


def _pack_hooks() -> list:
    """The active saved-tensor hooks that pack, innermost first, without their wrappers."""
    autograd, pairs = torch._C._autograd, []
    top = autograd._top_saved_tensors_default_hooks(True)
    while top is not None:
        pairs.append(top)
        autograd._pop_saved_tensors_default_hooks()
        top = autograd._top_saved_tensors_default_hooks(True)
    for pair in reversed(pairs):
        autograd._push_saved_tensors_default_hooks(*pair)
    return [inspect.unwrap(pack) for pack, _ in pairs]


def _frame_of(pack) -> tuple:
    """``(frame, is it recomputed)`` of a checkpoint without reentrance, by its hook; or None."""
    name = getattr(pack, "__qualname__", "")
    if getattr(pack, "__module__", "") != _CHECKPOINT or name not in (_FIRST_PASS, _SECOND_PASS):
        return None, False
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or ()))
    if name == _FIRST_PASS:
        return (cells["frame"].cell_contents if "frame" in cells else None), False
    reference = cells.get("target_frame_ref")
    return (None if reference is None else reference.cell_contents()), True


def _reentrant_calls():
    """Gives the calls of the reentrant checkpoint that backward is recomputing; or None."""
    task = torch._C._current_graph_task_id()
    node = torch._C._current_autograd_node() if task != -1 else None
    if hasattr(node, "run_function") and hasattr(node, _CALLS):
        return _next_call(getattr(node, _CALLS), node, task)
    return None


def _reentrant_contexts() -> list:
    """The reentrant checkpoints whose first pass is running, from the stack of Python."""
    module = sys.modules.get(_CHECKPOINT)
    code = None if module is None else module.CheckpointFunction.forward.__code__
    found, frame = [], sys._getframe()
    while frame is not None and code is not None:
        if frame.f_code is code and "ctx" in frame.f_locals:
            found.append(frame.f_locals["ctx"])
        frame = frame.f_back
    return found
