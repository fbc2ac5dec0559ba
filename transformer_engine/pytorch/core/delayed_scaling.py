# SPDX-License-Identifier: Apache-2.0
"""The state of delayed scaling and its life, the same in eager and inside a compiled graph.

Each module owns one `DelayedScalingState`: scale and amax history of its forward and of its
backward slots, as plain tensors. A *region* is the outermost ``autocast``. In it,

1. the module's first use is marked (`enter`), every use records its amaxes in row 0 of the history;
2. the backward of that first use, which is the last of the module's backwards of this region,
   renews the backward scales (`update_backward`);
3. the end of the region renews the forward scales of all modules used in it (`finish_region`).

The reference package renews all backward scales together, at the end of the backward of the first
module. Renewing each module's own is equivalent, because nobody reads them in between, and needs no
list of modules in the graph.

An exported program (`torch.export`) is for inference and owns no state: it keeps the scales of the
moment of its export as constants, and records and renews nothing.

A region that begins inside a trace keeps the list of its states in `REGION.states`, which is traced
too. Otherwise the end of the region, which is eager then, looks for states that are `pending`. So
compiled modules inside an eager region read no global list, and modules of one class share one
graph.

State belongs to the process, not to a thread.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterable, List, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from ..environment import constant_in_graphs
from ..torch_version import is_exporting
from .ops import kernels, through_dispatcher
from .plans import run_planned
from .update_rule import PYTHON_RULE_IN_GRAPH, UpdateRule, decode_rule, unfused_update
from .weak_list import WeakList

_MODULES = WeakList()
_STATES = WeakList()


class Region:
    """What the current region says; one instance, `REGION`, because traced code can write to it.

    * `rule`: string (or `UpdateRule`) of the active recipe's update, "" where delayed scaling is
      off
    * `states`: states used in a region that began in a trace; None for eager regions and outside of
      regions
    """

    def __init__(self) -> None:
        self.rule: Union[str, UpdateRule] = ""
        self.states: Optional[list] = None


REGION = Region()


class DelayedScalingState:
    """Scales and amax histories of one module, fp32.

    `fwd_scale` ``[n_fwd]``, `fwd_history` ``[length, n_fwd]``, `bwd_scale` ``[n_bwd]``,
    `bwd_history`` [length, n_bwd]``. Row 0 of a history is the row in use. `pending` is True
    between the module's first use in a region and the region's end, `backward_pending` between its
    first use that will have a backward and that end; `rule` is the update rule of the region.
    """

    def __init__(self, n_fwd: int, n_bwd: int, length: int, device: torch.device) -> None:
        self.fwd_scale = _static(torch.ones(n_fwd, dtype=torch.float32, device=device))
        self.fwd_history = _static(torch.zeros(length, n_fwd, dtype=torch.float32, device=device))
        self.bwd_scale = _static(torch.ones(n_bwd, dtype=torch.float32, device=device))
        self.bwd_history = _static(torch.zeros(length, n_bwd, dtype=torch.float32, device=device))
        self.pending = False
        self.backward_pending = False
        self.rule: Union[str, UpdateRule] = ""
        self.made_in = ""  # the compilation that made it, if one did
        _STATES.add(self)

    def __setstate__(self, state: dict) -> None:
        # A copy (copy.deepcopy of the module, or unpickling) is a state of its own, outside of any
        # region.
        self.__dict__.update(state)
        for tensor in (self.fwd_scale, self.fwd_history, self.bwd_scale, self.bwd_history):
            _static(tensor)
        self.forget_region()
        self.rule = ""
        _STATES.add(self)

    def move(self, device: Optional[torch.device]) -> None:
        """Move the tensors to `device`; None leaves them where they are."""
        if device is None or self.fwd_scale.device == device:
            return
        with ordinary_tensors():
            self.fwd_scale = _static(self.fwd_scale.to(device))
            self.fwd_history = _static(self.fwd_history.to(device))
            self.bwd_scale = _static(self.bwd_scale.to(device))
            self.bwd_history = _static(self.bwd_history.to(device))

    def resize(self, length: int) -> None:
        """Give the histories `length` rows: the first ones stay, new ones are zero."""
        if self.fwd_history.shape[0] == length:
            return
        with ordinary_tensors():
            self.fwd_history = _with_rows(self.fwd_history, length)
            self.bwd_history = _with_rows(self.bwd_history, length)

    def forget_region(self) -> None:
        """The region that used the module has ended."""
        self.pending = False
        self.backward_pending = False


def _static(tensor: Tensor) -> Tensor:
    """Keep Dynamo from making the sizes of `tensor` symbols.

    With ``dynamic=True`` it would take a batch of as many rows as the history for the same symbol,
    and so fix it. Same mark as ``torch._dynamo.mark_static`` sets; that function does nothing while
    Dynamo traces, when most states are made.
    """
    tensor._dynamo_static_indices = set(range(tensor.dim()))
    return tensor


def _with_rows(history: Tensor, length: int) -> Tensor:
    resized = history.new_zeros(length, history.shape[1])
    kept = min(length, history.shape[0])
    resized[:kept] = history[:kept]
    return _static(resized)


@contextmanager
def ordinary_tensors():
    """Make real tensors that training may change, whatever the caller is in the middle of.

    Dispatch modes would make fake tensors, functorch wrapped ones, and inference mode tensors that
    can never be changed outside of it; export's function mode would write it into the graph.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C._DisableFuncTorch(), torch._C.DisableTorchFunction():
        with torch.inference_mode(False), torch.no_grad():
            yield


# --- states of modules ----------------------------------------------------------------------------


def register(module: torch.nn.Module) -> None:
    """Let states of `module` be made while a graph that uses it is traced. Call it when the module
    is made or copied.

    The module has an attribute `_delayed_scaling`, None at first, and methods `delayed_slots() ->
    (n_fwd, n_bwd)` and `delayed_device() -> torch.device or None` (None while its parameters are on
    the meta device).
    """
    _MODULES.add(module)


def state_of(module: torch.nn.Module, rule: Union[str, UpdateRule]) -> DelayedScalingState:
    """The state of `module` for an update rule: made, moved or resized if need be."""
    length = rows_of(rule)
    if torch.compiler.is_compiling():
        # Before the trace looks at the attribute, so that the graph is bound to a state that
        # exists.
        _prepare_all(length)
    else:
        _prepare(module, length)
    state = module._delayed_scaling
    if state is None:
        raise RuntimeError(
            f"Delayed scaling of {type(module).__name__} has nowhere to keep its scales, because"
            " the parameters of the module are on the meta device. Call its reset_parameters()"
            " before its first use."
        )
    if state.fwd_history.shape[0] != length:  # only while tracing
        raise RuntimeError(
            f"The amax history of {type(module).__name__} has {state.fwd_history.shape[0]} rows,"
            f" but the recipe asks for {length}. A graph can not resize it: call the module's"
            f" adjust_amax_history_length({length}) first, or run it once in eager."
        )
    return state


def rows_of(rule: Union[str, UpdateRule]) -> int:
    """Rows of the amax history under `rule`."""
    return int(rule.partition(",")[0]) if isinstance(rule, str) else rule.length


def _refuse_mixed_lengths(state: DelayedScalingState, module: torch.nn.Module) -> None:
    if state.pending:
        raise RuntimeError(
            f"{type(module).__name__} is used under two recipes with different amax_history_len in"
            " one te.autocast region. Give both recipes the same length, or leave the region in"
            " between."
        )


@constant_in_graphs
def _prepare_all(length: int) -> bool:
    """Make the missing states of all registered modules; Dynamo runs this for real while it traces.

    Histories in use keep their length, which another recipe may have given them. What an earlier
    trace made and nobody used gets the length of this one; what this trace made it may have read.
    """
    trace = str(torch._guards.CompileContext.current_compile_id())
    for module in _MODULES.live():
        if module._delayed_scaling is None:
            _make_or_move(module, length)
            if module._delayed_scaling is not None:
                module._delayed_scaling.made_in = trace
            continue
        _make_or_move(module, length)
        state = module._delayed_scaling
        if state.made_in not in ("", trace) and state.rule == "" and _unused(state.fwd_history):
            state.resize(length)
    return True


def _unused(history: Tensor) -> bool:
    """Whether no amax was ever recorded."""
    with ordinary_tensors():
        return not history.any()


def _prepare(module: torch.nn.Module, length: int) -> None:
    _make_or_move(module, length)
    state = module._delayed_scaling
    if state is not None and state.fwd_history.shape[0] != length:
        _refuse_mixed_lengths(state, module)
        state.resize(length)


def _make_or_move(module: torch.nn.Module, length: int) -> None:
    state = module._delayed_scaling
    device = module.delayed_device()
    if state is not None:
        state.move(device)
    elif device is not None:
        with ordinary_tensors():
            module._delayed_scaling = DelayedScalingState(*module.delayed_slots(), length, device)


# --- recording ------------------------------------------------------------------------------------


def enter(state: DelayedScalingState, rule: Union[str, UpdateRule]) -> bool:
    """Mark a use of the module under `rule`; True if it is the first one in this region."""
    if torch.compiler.is_compiling() and not isinstance(rule, str):
        raise RuntimeError(PYTHON_RULE_IN_GRAPH)
    if state.pending:
        return False
    state.pending = True
    state.rule = rule
    if REGION.states is not None:
        REGION.states.append(state)
    return True


def enter_backward(state: DelayedScalingState) -> Optional[Union[str, UpdateRule]]:
    """Announce the backward of a use that was entered; what it hands to `update_backward`, or None.

    Of several uses in a region that have a backward, only the first one's, which runs last, renews
    the scales: uses without gradients, such as a teacher's pass, do not count.
    """
    rule = backward_rule(state)
    state.backward_pending = True
    return rule


def backward_rule(state: DelayedScalingState) -> Optional[Union[str, UpdateRule]]:
    """What `enter_backward` would return, if nobody knows yet whether the use will succeed."""
    return None if state.backward_pending else state.rule


def record_forward(
    state: DelayedScalingState, amaxes: Sequence[Optional[Tensor]], slots: Sequence[int]
) -> None:
    """Fold amaxes (fp32 ``[1]``, None is skipped) into their slots of the forward history."""
    record_backward(state.fwd_history, amaxes, slots)


def record_backward(
    history: Tensor, amaxes: Sequence[Optional[Tensor]], slots: Sequence[int]
) -> None:
    """As `record_forward`, for a history that is given as the tensor ``[length, n]`` itself."""
    found, used = _found(amaxes, slots)
    if found and not is_exporting():
        if through_dispatcher():
            kernels().record_amax_(history, found, used)
        else:
            run_planned(_record, tuple(used), (used,), (history, *found))


def _found(amaxes: Sequence[Optional[Tensor]], slots: Sequence[int]) -> tuple[list, list]:
    """The amaxes that are there, and their slots."""
    found = [amax for amax in amaxes if amax is not None]
    return found, [slot for amax, slot in zip(amaxes, slots) if amax is not None]


def finish_backward(
    history: Tensor,
    scale: Tensor,
    amaxes: Sequence[Optional[Tensor]],
    slots: Sequence[int],
    rule: Union[str, UpdateRule, None],
) -> None:
    """`record_backward`, and `update_backward` unless ``rule`` is None: in a graph one op."""
    if rule is not None and through_dispatcher() and not is_exporting():
        found, used = _found(amaxes, slots)
        how = decode_rule(rule)
        if found and how.group == "" and not (how.unfused or how.recipe is not None):
            kernels().record_and_update_(
                history, scale, found, used, how.bwd_max, how.margin, how.algo
            )
            return
    record_backward(history, amaxes, slots)
    if rule is not None:
        update_backward(history, scale, rule)


def _record(k, slots: List[int], history: Tensor, *amaxes: Tensor) -> None:
    k.record_amax_(history, list(amaxes), slots)


def update_backward(history: Tensor, scale: Tensor, rule: Union[str, UpdateRule]) -> None:
    """Renew the backward `scale` ``[n]`` from `history` ``[length, n]``, in place.

    `rule` is what `enter_backward` gave in the forward pass of the module's first such use in the
    region.
    """
    rule = decode_rule(rule)
    _reduce([history[0]], rule.group)
    _update(history, scale, rule.bwd_max, rule)


def update_forward(states: Iterable[DelayedScalingState]) -> None:
    """Renew the forward scales of `states`, in place, each by the rule of its last use."""
    states = [state for state in states if state.rule != ""]
    rows: dict = {}
    for state in states:
        rows.setdefault(decode_rule(state.rule).group, []).append(state.fwd_history[0])
    for group, members in rows.items():
        _reduce(members, group)
    for state in states:
        rule = decode_rule(state.rule)
        _update(state.fwd_history, state.fwd_scale, rule.fwd_max, rule)


def _update(history: Tensor, scale: Tensor, fp8_max: float, rule: UpdateRule) -> None:
    if rule.unfused or rule.recipe is not None:
        unfused_update(history, scale, fp8_max, rule)
        return
    how = (fp8_max, rule.margin, rule.algo)
    if through_dispatcher():
        _renew(kernels(), *how, history, scale)
    else:
        run_planned(_renew, how, how, (history, scale))


def _renew(k, fp8_max: float, margin: float, algo: str, history: Tensor, scale: Tensor) -> None:
    k.delayed_scaling_update_(history, scale, fp8_max, margin, algo)


def _reduce(rows: List[Tensor], group: str) -> None:
    """Maximum of each of `rows` over the ranks of the process group named `group` ("" for none), in
    place.
    """
    if group == "":
        return
    collectives = torch.ops._c10d_functional
    largest = collectives.all_reduce.default(torch.cat(rows), "max", group)
    largest = collectives.wait_tensor.default(largest)
    for row, part in zip(rows, torch.split(largest, [row.shape[0] for row in rows])):
        row.copy_(part)


# --- recomputation --------------------------------------------------------------------------------


class Remembered(NamedTuple):
    """What a forward pass reads of a state; ``scale`` is None where the state did not exist yet."""

    scale: Optional[Tensor] = None
    pending: bool = False
    backward_pending: bool = False
    rule: Union[str, UpdateRule] = ""


def remember(state: Optional[DelayedScalingState]) -> Remembered:
    """A copy of the forward scale of `state`, and its marks, for a recomputation."""
    if state is None:
        return Remembered()
    with ordinary_tensors():
        scale = state.fwd_scale.clone()
    return Remembered(scale, state.pending, state.backward_pending, state.rule)


@contextmanager
def rewound(state: DelayedScalingState, then: Remembered):
    """Put what a forward pass read in the place of the present; what happens to it is forgotten.

    The tensors of `state` are exchanged, which compiled code does not see. `REGION.rule` is that of
    the forward pass.
    """
    names = "fwd_scale", "fwd_history", "pending", "backward_pending", "rule"
    now = [getattr(state, name) for name in names]
    rows = rows_of(REGION.rule) if REGION.rule else now[1].shape[0]
    with ordinary_tensors():
        state.fwd_history = now[1].new_zeros(rows, now[1].shape[1])
        state.fwd_scale = torch.ones_like(now[0]) if then.scale is None else then.scale
    state.pending, state.backward_pending, state.rule = then[1:]
    try:
        yield
    finally:
        for name, value in zip(names, now):
            setattr(state, name, value)


def _set(scale: Tensor, value: Optional[Tensor]) -> None:
    """Write a remembered scale in place."""
    if value is None:
        scale.fill_(1.0)
    else:
        scale.copy_(value)


@contextmanager
def rewound_in_place(remembered: Iterable[tuple]):
    """The same for several ``(state, then)``, by copies: for graphs, which know the tensors."""
    saved = []
    for state, then in remembered:
        now = remember(state)
        saved.append((state, now, state.fwd_history.clone()))
        with torch.no_grad():
            _set(state.fwd_scale, then.scale)
        state.pending, state.backward_pending, state.rule = then[1:]
    try:
        yield
    finally:
        for state, now, history in saved:
            with torch.no_grad():
                state.fwd_scale.copy_(now.scale)
                state.fwd_history.copy_(history)
            state.pending, state.backward_pending, state.rule = now[1:]


@contextmanager
def region_aside():
    """Room for a region of a recomputation while another one is open."""
    marks = [(s, s.pending, s.backward_pending, s.rule) for s in live_states()]
    states = REGION.states
    try:
        yield
    finally:
        for state, *then in marks:
            state.pending, state.backward_pending, state.rule = then
        REGION.states = states


# --- regions --------------------------------------------------------------------------------------


def begin_region() -> None:
    """The outermost autocast begins."""
    # Uses outside of a region (a checkpoint that recomputes in backward) leave states pending.
    _forget_pending()
    REGION.states = [] if torch.compiler.is_compiling() else None


def finish_region(update: bool) -> None:
    """The outermost autocast ends; with `update`, the forward scales of the modules used in it are
    renewed.
    """
    states = REGION.states
    if states is None:
        states = [state for state in _STATES.live() if state.pending]
    if update and not is_exporting():
        update_forward(states)
    for state in states:
        state.forget_region()
    REGION.states = None


@constant_in_graphs
def _forget_pending() -> bool:
    for state in _STATES.live():
        state.forget_region()
    return True


def live_states() -> List[DelayedScalingState]:
    """All states that exist, in the order in which they were made."""
    return _STATES.live()


def live_modules() -> List[torch.nn.Module]:
    """All modules that were registered and still exist."""
    return _MODULES.live()
