# SPDX-License-Identifier: Apache-2.0
"""One callable with static inputs: warmed up, captured, and called with other inputs."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..dynamo.capability import leave_graph
from ..fp8_global_state import FP8GlobalStateManager
from .given import Place, check_places, given_tensors, places
from .scaling import CapturedState, captured_states, used_states
from .step import GraphedStep, Replay, check_backward
from .weight_gradients import (
    backward_dw,
    call_hooks_of,
    fused,
    mark,
    may_lack_gradients,
    owned_gradients,
    puts_off,
)

_FLAG = "is_first_microbatch"


@dataclass(frozen=True)
class Options:
    """What is the same for all units, and what ``te.autocast`` gets while this one is captured.

    ``enter`` makes the context that a callable is captured in.
    """

    enter: Callable
    backend: Any
    caching: bool
    allow_unused: bool
    retain_graph: bool
    clone_param_grads: bool


class Unit:  # pylint: disable=too-many-instance-attributes
    """A callable and the static tensors of one of its calls.

    ``training``: the mode in which it is replayed; in the other one the original forward runs.
    ``visited``: modules of ours that it runs; ``closed``: the graphs were freed.
    """

    def __init__(
        self, module: torch.nn.Module, args: tuple, kwargs: dict, options: Options, hooks
    ) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        self.options, self.hooks = options, hooks
        self.original = module.forward
        self.training: Optional[bool] = module.training
        self.inputs: List[Tensor] = tree_flatten((args, kwargs))[0]
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.visited: List[torch.nn.Module] = []
        self.closed = False
        self.replays = 0  # of the forward graph
        self.put_off_by = 0  # the replay whose backward left weight gradients to `backward_dw`
        self.siblings: List[Unit] = []  # that were captured together, and share memory
        self.positions: dict = (
            {}
        )  # in the order of capture, of the forward (True) and backward pass
        self.pending = False  # a forward pass waits for its backward pass
        self.overwritten = False  # and will find other values than it kept
        self._forget()

    def _forget(self) -> None:
        """No graphs, and nothing that they read or write."""
        self.forward_graph = self.backward_graph = self.weight_graph = None
        self.outputs: List[Any] = []  # with their autograd graph, as they were last computed
        self.static_outputs: List[Any] = []
        self.output_tree: Any = None
        self.grad_outputs: List[Optional[Tensor]] = []
        self.grad_inputs: List[Optional[Tensor]] = []
        self.owned: List[bool] = []  # per input: the caller gets a gradient of its own
        self.weight_grads: list = []
        self.fused: List[Tensor] = []  # parameters that the backward graph adds to main_grad
        self.put_off_fused: List[Tensor] = []  # that the graph of `backward_dw` does
        self.states: List[CapturedState] = []
        self.places: List[Place] = []
        self.flag: Optional[Tensor] = None  # whether to keep cached weights
        self.kept: list = []  # what graphs point to

    # --- running and capturing -------------------------------------------------------------------

    def run_forward(self) -> List[Optional[Tensor]]:
        """Run the callable on its static inputs; returns its tensors."""
        with self.options.enter():
            result = self.original(*self.args, **self.kwargs)
            self.states = captured_states(self.visited)
        self.outputs, self.output_tree = tree_flatten(result)
        return [out if isinstance(out, Tensor) else None for out in self.outputs]

    def differentiable(self) -> List[Tensor]:
        """The outputs that have a gradient."""
        return [out for out in self.outputs if isinstance(out, Tensor) and out.requires_grad]

    def trained(self) -> List[Tensor]:
        """The inputs, then the parameters, that have a gradient."""
        return [x for x in self.inputs if x.requires_grad] + self.params

    def run_backward(self) -> List[Optional[Tensor]]:
        """Gradients of ``trained`` for the static output gradients."""
        grads = [grad for grad in self.grad_outputs if grad is not None]
        return list(
            torch.autograd.grad(
                self.differentiable(),
                self.trained(),
                grads,
                retain_graph=self.options.retain_graph,
                only_inputs=True,
                allow_unused=self.options.allow_unused or may_lack_gradients(self.visited),
            )
        )

    def has_backward(self) -> bool:
        """Whether there is anything to differentiate."""
        return bool(self.differentiable()) and bool(self.trained())

    def make_grad_outputs(self) -> None:
        """Static memory for the gradients of the outputs."""
        self.grad_outputs = [
            torch.zeros_like(out) if isinstance(out, Tensor) and out.requires_grad else None
            for out in self.outputs
        ]

    def warm_up(self) -> None:
        """One forward and backward pass as they will be captured."""
        with self._watching():
            self.hooks.around_forward(self.module, self.run_forward)
        if self.has_backward():
            self.make_grad_outputs()
            self.hooks.around_backward(self.module, self.run_backward)
            backward_dw(self.visited, call_hooks=False)

    def fill_caches(self) -> None:
        """A forward pass that makes the cached weights, which graphs only rewrite."""
        with self._watching():
            self.run_forward()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Collect in ``visited`` the modules of ours that run, the callable included."""
        if hasattr(self.module, "fp8_meta"):
            self._note(self.module)
        handles = [
            module.register_forward_hook(self._note)
            for module in self.module.modules()
            if hasattr(module, "fp8_meta")
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, module, *_) -> None:
        if module not in self.visited:
            self.visited.append(module)

    def capture_forward(self, pool: Any) -> None:
        """Capture the forward pass."""
        with self._watching():
            self.forward_graph, self.static_outputs = self.hooks.around_forward(
                self.module, lambda: self.options.backend.capture(self.run_forward, pool)
            )
        self.kept = [dict(module._fp8_workspaces) for module in self.visited]
        self.flag = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
        self.places = places(self.params, self.visited)

    def capture_backward(self, pool: Any) -> None:
        """Capture the backward pass, and the weight gradients that it puts off."""
        if not self.has_backward():
            return
        self.make_grad_outputs()
        with fused(self.params) as self.fused:
            self.backward_graph, self.grad_inputs = self.hooks.around_backward(
                self.module, lambda: self.options.backend.capture(self.run_backward, pool)
            )
        late = list(filter(puts_off, self.visited))
        self.owned = [False] * (len(self.trained()) - len(self.params))
        self.owned += owned_gradients(self.params, late, self.options.clone_param_grads)
        if late:
            # Graphs that are captured later, but may be replayed before, must not use this memory.
            self.kept += [list(module.wgrad_store.context) for module in late]
            with fused(self.params) as self.put_off_fused:
                self.weight_graph, self.weight_grads = self.options.backend.capture(
                    self._run_weight_gradients, pool
                )

    def _run_weight_gradients(self) -> List[Optional[Tensor]]:
        """``backward_dw`` of the modules that put gradients off; what ``.grad`` becomes."""
        before = [param.grad for param in self.params]
        backward_dw(self.visited, call_hooks=False)
        made = [
            None if param.grad is old else param.grad for param, old in zip(self.params, before)
        ]
        for param, old in zip(self.params, before):
            param.grad = old
        return made

    # --- replaying -------------------------------------------------------------------------------

    def __call__(self, *args, **kwargs):
        """Replay the forward graph on other inputs."""
        if self.closed:
            raise RuntimeError(
                f"The CUDA graph of {type(self.module).__name__} was reset and can not be replayed."
                " Make a new one with make_graphed_callables."
            )
        stream = kwargs.pop("cuda_graph_stream", None)
        event = kwargs.pop("cuda_graph_event", None)
        if self.module.training != self.training:
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            reason = "a callable of make_graphed_callables replays a CUDA graph of its own."
            return leave_graph(reason, self._replay, stream, event, args, kwargs)
        return self._replay(stream, event, args, kwargs)

    def _replay(self, stream: Any, event: Any, args: tuple, kwargs: dict):
        if self.options.caching and not isinstance(kwargs.get(_FLAG), bool):
            raise ValueError(
                f"Callables made with cache_quantized_params=True must be called with the keyword"
                f" {_FLAG}=True or False, not {kwargs.get(_FLAG)!r}."
            )
        inputs = given_tensors(self, args, kwargs)
        check_places(self)
        trained = self.backward_graph is not None and torch.is_grad_enabled()
        replay = Replay(stream, event, used_states(self.states, trained))
        if self.options.caching:
            # The one that the graph reads, also if another one was made since.
            FP8GlobalStateManager.quantization_state.skip_fp8_weight_update_tensor = self.flag
            FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not kwargs[_FLAG])
        outputs = iter(GraphedStep.apply(self, replay, *inputs, *self.params))
        whole = [next(outputs) if isinstance(out, Tensor) else out for out in self.static_leaves()]
        return tree_unflatten(whole, self.output_tree)

    def write(self, forward: bool) -> None:
        """A pass is replayed: it writes where passes captured before it had given memory back."""
        for other in self.siblings:
            given_back = other.positions.get(False, len(self.siblings) * 2)
            if other.pending and not other.options.retain_graph:
                other.overwritten |= given_back < self.positions[forward]
        self.pending = forward
        if forward:
            self.overwritten = False

    def static_leaves(self) -> List[Any]:
        """The outputs as captured: static tensors, and whatever else there is."""
        return [
            static if static is not None else out
            for static, out in zip(self.static_outputs, self.outputs)
        ]

    def backward_dw(self) -> None:
        """Replay the weight gradients that the last backward put off."""
        if self.module.training != self.training:  # nor did its forward pass replay a graph
            backward_dw(self.visited, call_hooks=True)
            return
        if self.weight_graph is None:
            return
        if self.put_off_by == 0:
            raise RuntimeError(
                "No weight gradient is waiting: backward_dw() was called more often than backward."
            )
        check_backward(self, self.put_off_by)
        self.put_off_by = 0
        self.options.backend.replay(self.weight_graph)
        mark(self.put_off_fused)
        for param, made in zip(self.params, self.weight_grads):
            if made is not None:
                param.grad = made.clone() if self.options.clone_param_grads else made
        call_hooks_of(self.visited)

    def reset(self) -> None:
        """Free the graphs; calls raise from now on."""
        for graph in (self.forward_graph, self.backward_graph, self.weight_graph):
            if graph is not None:
                graph.reset()
        self._forget()
        self.args, self.kwargs, self.inputs = (), {}, []
        self.closed = True

    # --- copies ----------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> Unit:
        # A graph is about the parameters of one module: the copy of that runs in eager.
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin._forget()
        twin.training, twin.closed = None, False
        twin.args, twin.kwargs, twin.inputs = (), {}, []
        for name in ("module", "original", "visited", "params"):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"The graphed {type(self.module).__name__} can not be pickled, since CUDA graphs can"
            " not. Save its state_dict() and load that into a new module."
        )
