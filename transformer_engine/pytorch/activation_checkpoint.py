# SPDX-License-Identifier: Apache-2.0
"""``te.checkpoint``: keep the inputs of a function only, and run it again in backward.

``torch.utils.checkpoint`` does the work. What is added: the second pass sees ``te.autocast``, the
scales of delayed scaling and the streams of a random number tracker as the first did, also from
compiled code, which does not note its calls as modules in eager do (see ``recompute.py``).
"""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Callable, Iterator, NamedTuple, Optional

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from .core import delayed_scaling
from .core.phase import PHASE
from .dynamo.capability import leave_graph
from .fp8_global_state import FP8GlobalStateManager
from .graphed.capture import CAPTURING
from .graphed.random_numbers import DrawsNothing
from .parallel_chunks import chunked_argument
from .recompute import MARKED, backward_follows
from .rng_states import frozen_states, tracked_from

DELAYED_IN_GRAPH = (
    "te.checkpoint with DelayedScaling inside of a compiled function: a graph that computes twice"
    " would quantize with renewed scales. Call te.checkpoint outside of torch.compile, on compiled"
    " modules, or use LayerNormMLP(checkpoint=True)."
)


def checkpoint(
    function: Callable,
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    get_rng_state_tracker: Optional[Callable] = None,
    context_fn: Callable = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, of which only the inputs are kept for backward.

    Backward runs ``function`` a second time, with the same random numbers, under the
    ``torch.autocast`` and ``te.autocast`` of the first time, wherever it is called; it computes the
    same bits. Delayed scaling uses the scales of the first time and records nothing.

    * `use_reentrant`: the older way of PyTorch, in which at least one argument must require a
      gradient and ``torch.autograd.grad`` does not work; False for the newer one
    * `distribute_saved_activations`: keep only this rank's part of the first tensor argument, and
      gather it in backward over `tp_group` (reentrant only)
    * `get_rng_state_tracker`: returns an object like `CudaRNGStatesTracker`, whose streams are set
      back for the second pass
    * `context_fn`, `determinism_check`, `debug`: as in ``torch.utils.checkpoint.checkpoint``
      without reentrance; `context_fn` takes ``create_selective_checkpoint_contexts``

    In a compiled function this is ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``; an
    exported program has the computation of `function` once. In a callable that
    ``te.make_graphed_callables`` captures, it is the newer way too, and `function` draws no random
    numbers.

    Raises RuntimeError if `distribute_saved_activations` is set without torch.distributed, and for
    random numbers in a graphed callable.
    """
    args, distribute_saved_activations, get_rng_state_tracker, tp_group = _old_arguments(
        args, distribute_saved_activations, get_rng_state_tracker, tp_group
    )
    if torch.compiler.is_exporting():
        return function(*args, **kwargs)
    graphed, options = CAPTURING.active, {}
    if graphed:  # is captured by torch.autograd.grad, for which the older way is no good
        use_reentrant, get_rng_state_tracker = False, None
        options["preserve_rng_state"] = False  # a capture can not read generators
    if not use_reentrant or torch.compiler.is_compiling():
        options.update(determinism_check=determinism_check, debug=debug)
        if context_fn is not noop_context_fn:
            options["context_fn"] = context_fn
    if torch.compiler.is_compiling():
        if delayed_scaling.REGION.rule != "":
            return leave_graph(DELAYED_IN_GRAPH, checkpoint, function, *args, **kwargs)
        return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
    if not torch.is_grad_enabled():
        with context_fn()[0]:
            return function(*args, **kwargs)
    if isinstance(function, torch.nn.Module):
        if not has_te_modules(function) and not graphed:
            return torch_checkpoint(
                function, *args, use_reentrant=use_reentrant, **options, **kwargs
            )
        _forget_fsdp(function)
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    rerun = _Rerun(function, kwargs, tracker, use_reentrant, graphed)
    chunks = nullcontext()
    if distribute_saved_activations and use_reentrant:
        chunks = chunked_argument(args, tp_group)
    elif distribute_saved_activations:
        warnings.warn(
            "distribute_saved_activations has no effect with use_reentrant=False.", stacklevel=2
        )
    with chunks:
        return torch_checkpoint(rerun, *args, use_reentrant=use_reentrant, **options)


def _old_arguments(args: tuple, distribute: bool, tracker, group) -> tuple:
    """The arguments, which may be given in the former order ``(bool, tracker, group, *args)``."""
    old = len(args) > 2 and isinstance(args[0], bool)
    if not (old and (args[1] is None or callable(args[1]))):
        return args, distribute, tracker, group
    warnings.warn(
        "Positional distribute_saved_activations, get_rng_state_tracker and tp_group of"
        " te.checkpoint are deprecated; pass them by name.",
        DeprecationWarning,
        stacklevel=3,
    )
    return args[3:], args[0], args[1], args[2]


def has_te_modules(network: torch.nn.Module) -> bool:
    """Whether a network contains modules of this package."""
    package = __name__.partition(".")[0] + "."
    for module in network.modules():
        if any(kind.__module__.startswith(package) for kind in type(module).__mro__):
            return True
    return False


def _forget_fsdp(function: torch.nn.Module) -> None:
    """A module that is recomputed keeps no activations that FSDP1 could scatter."""
    if hasattr(function, "fsdp_group"):
        function.fsdp_wrapped, function.fsdp_group = False, None


# --- the two passes -------------------------------------------------------------------------------


class _First(NamedTuple):
    """What the first pass ran under: contexts, their depth, streams, states that graphs used."""

    contexts: tuple
    depth: int
    streams: Optional[dict]
    graphs: list


class _Rerun:
    """A function that `torch.utils.checkpoint` calls first in forward and then in backward."""

    def __init__(
        self, function: Callable, kwargs: dict, tracker: Any, reentrant: bool, graphed: bool
    ) -> None:
        self.function, self.kwargs, self.graphed = function, kwargs, graphed
        self.tracker, self.reentrant = tracker, reentrant
        self.first: Optional[_First] = None

    def __call__(self, *args: Any) -> Any:
        with self._first_pass() if self.first is None else self._second_pass(self.first):
            return self.function(*args, **self.kwargs)

    @contextmanager
    def _first_pass(self) -> Iterator[None]:
        contexts = FP8GlobalStateManager.snapshot()
        depth = FP8GlobalStateManager.quantization_state.autocast_depth
        streams = None if self.tracker is None else frozen_states(self.tracker)
        before = _marks()
        with (
            MARKED.region(True, False, False, self.reentrant),
            backward_follows(self.reentrant),
            _eager_uses(),
            DrawsNothing() if self.graphed else nullcontext(),
        ):
            yield
            graphs = _used_by_graphs(before)
        self.first = _First(contexts, depth, streams, graphs)

    @contextmanager
    def _second_pass(self, first: _First) -> Iterator[None]:
        state = FP8GlobalStateManager.quantization_state
        now = FP8GlobalStateManager.snapshot(), state.autocast_depth, PHASE.recomputing
        with ExitStack() as stack:
            if first.streams is not None:
                stack.enter_context(tracked_from(self.tracker, first.streams))
            if first.depth == 0 and now[1] > 0:
                stack.enter_context(delayed_scaling.region_aside())
            stack.enter_context(delayed_scaling.rewound_in_place(first.graphs))
            stack.enter_context(MARKED.region(True, True, False, self.reentrant))
            FP8GlobalStateManager.restore(first.contexts)
            state.autocast_depth, PHASE.recomputing = first.depth, True
            try:
                yield
            finally:
                FP8GlobalStateManager.restore(now[0])
                state.autocast_depth, PHASE.recomputing = now[1:]


@contextmanager
def _eager_uses() -> Iterator[None]:
    """Collect in `Phase.uses` the states that eager calls use."""
    before, PHASE.uses = PHASE.uses, set()
    try:
        yield
    finally:
        if before is not None:
            before |= PHASE.uses
        PHASE.uses = before


def _marks() -> dict:
    """Marks and versions of all states of delayed scaling, if there can be compiled code at all."""
    if "torch._dynamo" not in sys.modules:
        return {}
    return {
        id(state): (
            delayed_scaling.Remembered(None, state.pending, state.backward_pending, state.rule),
            state.fwd_history._version,
            state.fwd_scale._version,
        )
        for state in delayed_scaling.live_states()
    }


def _used_by_graphs(before: dict) -> list:
    """``(state, what the first pass read)`` of the states that compiled code has used since."""
    if "torch._dynamo" not in sys.modules:
        return []
    found = []
    for state in delayed_scaling.live_states():
        new = (delayed_scaling.Remembered(), 0, 0)
        marks, history, scale = before.get(id(state), new)
        if state.fwd_history._version == history or id(state) in PHASE.uses:
            continue
        if state.fwd_scale._version != scale:
            raise RuntimeError(
                "Compiled code in te.checkpoint opens te.autocast with DelayedScaling itself, and"
                " so renews the scales that backward would need. Open te.autocast around"
                " te.checkpoint instead."
            )
        remembered = delayed_scaling.remember(state)
        found.append((state, marks._replace(scale=remembered.scale)))
    return found


# --- for checkpoints of other packages ------------------------------------------------------------


def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False):
    """Context for a checkpoint of one's own, around each of its passes.

    With ``activation_recompute=True`` the modules called in the first pass (``recompute_phase=
    False``) note what they see, and see it again in the second (True), first in first out for each
    module.
    """
    return MARKED.region(activation_recompute, recompute_phase, True)


def get_activation_recompute_contexts() -> tuple:
    """``activation_recompute_forward`` of the first and of the second pass: a ``context_fn``."""
    return activation_recompute_forward(True, False), activation_recompute_forward(True, True)


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether this is part of a checkpoint, and ``te.autocast`` is enabled."""
    return MARKED.enabled and FP8GlobalStateManager.is_fp8_enabled()


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this is the second pass of a checkpoint."""
    return MARKED.enabled and MARKED.second_pass


def use_reentrant_activation_recompute() -> bool:
    """False inside of ``te.checkpoint(use_reentrant=False)``."""
    return MARKED.reentrant
