# SPDX-License-Identifier: Apache-2.0
"""One callable with static inputs: warmed up, captured, and called with other inputs."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Optional

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..core.delayed_scaling import enter_backward
from ..fp8_global_state import FP8GlobalStateManager
from .step import GraphedStep, Replay

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

    ``visited``: modules of ours that it runs; ``closed``: the graphs were freed.
    """

    def __init__(
        self, module: torch.nn.Module, args: tuple, kwargs: dict, options: Options, hooks
    ) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        self.options, self.hooks = options, hooks
        self.original, self.training = module.forward, module.training
        self.inputs: List[Tensor] = tree_flatten((args, kwargs))[0]
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.visited: List[torch.nn.Module] = []
        self.outputs: List[Any] = []  # with their autograd graph, as they were last computed
        self.static_outputs: List[Any] = []
        self.output_tree: Any = None
        self.grad_outputs: List[Optional[Tensor]] = []
        self.grad_inputs: List[Optional[Tensor]] = []
        self.owned: List[bool] = []  # per input: the caller gets a gradient of its own
        self.forward_graph = self.backward_graph = self.weight_graph = None
        self.weight_grads: list = []
        self.kept: list = []  # what graphs point to
        self.closed = False

    # --- running and capturing -------------------------------------------------------------------

    def run_forward(self) -> List[Optional[Tensor]]:
        """Run the callable on its static inputs; returns its tensors."""
        with self.options.enter():
            result = self.original(*self.args, **self.kwargs)
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
                allow_unused=self._may_lack_gradients(),
            )
        )

    def _may_lack_gradients(self) -> bool:
        """Whether a parameter may end up without a gradient from autograd."""
        return self.options.allow_unused or any(
            getattr(module, "fuse_wgrad_accumulation", False) or _puts_off(module)
            for module in self.visited
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
            self._compute_weight_gradients()

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

    def capture_backward(self, pool: Any) -> None:
        """Capture the backward pass, and the weight gradients that it puts off."""
        if not self.has_backward():
            return
        self.make_grad_outputs()
        self.backward_graph, self.grad_inputs = self.hooks.around_backward(
            self.module, lambda: self.options.backend.capture(self.run_backward, pool)
        )
        self.owned = [False] * (len(self.trained()) - len(self.params)) + [
            self.options.clone_param_grads and not getattr(param, "skip_backward_post_hook", False)
            for param in self.params
        ]
        if any(map(_puts_off, self.visited)):
            self.weight_graph, self.weight_grads = self.options.backend.capture(
                self._run_weight_gradients, pool
            )

    def _compute_weight_gradients(self) -> None:
        """What modules put off; by the method of the class, as the graphed module has another."""
        for module in filter(_puts_off, self.visited):
            type(module).backward_dw(module)

    def _run_weight_gradients(self) -> List[Optional[Tensor]]:
        """``backward_dw`` of the modules that put gradients off; what ``.grad`` becomes."""
        before = [param.grad for param in self.params]
        self._compute_weight_gradients()
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
        if self.module.training != self.training:
            return self.original(*args, **kwargs)
        stream = kwargs.pop("cuda_graph_stream", None)
        event = kwargs.pop("cuda_graph_event", None)
        if self.options.caching:
            self._decide_caching(kwargs)
        inputs = self._flattened(args, kwargs)
        replay = Replay(stream, event, self._used_states())
        outputs = iter(GraphedStep.apply(self, replay, *inputs, *self.params))
        whole = [next(outputs) if isinstance(out, Tensor) else out for out in self.static_leaves()]
        return tree_unflatten(whole, self.output_tree)

    def static_leaves(self) -> List[Any]:
        """The outputs as captured: static tensors, and whatever else there is."""
        return [
            static if static is not None else out
            for static, out in zip(self.static_outputs, self.outputs)
        ]

    @staticmethod
    def _decide_caching(kwargs: dict) -> None:
        """Tell the device whether this replay writes the cached weights anew."""
        first = kwargs.get(_FLAG)
        if not isinstance(first, bool):
            raise ValueError(
                f"Callables made with cache_quantized_params=True must be called with the keyword"
                f" {_FLAG}=True or False, not {first!r}."
            )
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not first)

    def _flattened(self, args: tuple, kwargs: dict) -> List[Tensor]:
        """The tensors of a call, in the order of the static ones."""
        missing = [key for key in self.kwargs if key not in kwargs]
        if missing:
            raise TypeError(
                f"The graphed {type(self.module).__name__} was captured with the keyword arguments"
                f" {', '.join(self.kwargs)}; {', '.join(missing)} must be given too."
            )
        given = tree_flatten((args, {key: kwargs[key] for key in self.kwargs}))[0]
        if len(given) != len(self.inputs):
            raise TypeError(
                f"The graphed {type(self.module).__name__} was captured with {len(self.inputs)}"
                f" tensors as input, but is called with {len(given)}."
            )
        for i, (static, tensor) in enumerate(zip(self.inputs, given)):
            if not isinstance(tensor, Tensor) or tensor.shape != static.shape:
                found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(
                    f"Input {i} of the graphed {type(self.module).__name__} must be a tensor of"
                    f" shape {tuple(static.shape)}, as captured, not {found}. A graph has one"
                    " shape; capture another graph for another one."
                )
        return given

    def _used_states(self) -> list:
        """Mark the states of delayed scaling as used in the region of this call, as modules do."""
        used = []
        for module in self.visited:
            captured = getattr(module, "_delayed_scaling", None)
            if captured is None or not FP8GlobalStateManager.is_fp8_enabled():
                continue
            history = captured.fwd_history
            _, state = module._precision()
            if state is not None and state.fwd_history is not history:
                raise RuntimeError(
                    f"The amax history of {type(module).__name__} '{module.name}' has another"
                    " length than when its CUDA graph was captured. Use the recipe of the capture."
                )
            if state is not None:
                trained = self.backward_graph is not None and torch.is_grad_enabled()
                used.append((state, enter_backward(state) if trained else None))
        return used

    def backward_dw(self) -> None:
        """Replay the weight gradients that the last backward put off."""
        if self.weight_graph is None:
            return
        self.options.backend.replay(self.weight_graph)
        for param, made in zip(self.params, self.weight_grads):
            if made is not None:
                param.grad = made.clone() if self.options.clone_param_grads else made

    def reset(self) -> None:
        """Free the graphs; calls raise from now on."""
        for graph in (self.forward_graph, self.backward_graph, self.weight_graph):
            if graph is not None:
                graph.reset()
        self.forward_graph = self.backward_graph = self.weight_graph = None
        self.outputs, self.static_outputs, self.kept = [], [], []
        self.grad_outputs, self.grad_inputs, self.weight_grads = [], [], []
        self.closed = True


def _puts_off(module) -> bool:
    """Whether a module leaves weight gradients to ``backward_dw``."""
    return hasattr(module, "need_backward_dw") and module.need_backward_dw()
