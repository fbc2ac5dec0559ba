# SPDX-License-Identifier: Apache-2.0
"""What the running torch can compile of this package, with reasons, and the fallback to eager."""

from __future__ import annotations

import functools
import warnings
from typing import Callable

import torch

from ..core import delayed_scaling
from ..environment import constant_in_graphs
from ..recompute import run_in_eager
from ..torch_version import torch_version
from .cache_key import tag_cache_keys

FALLBACK = "Falling back to eager execution under torch.compile: "
NO_PROGRAM = "torch.export can not make a program of this call, which needs eager execution: "
MINIMUM_TORCH = (2, 11)


@constant_in_graphs
def torch_obstacle() -> str:
    """Why this torch can not compile module ops; empty if it can."""
    if torch_version()[:2] < MINIMUM_TORCH:
        return (
            f"torch {torch.__version__} is older than {MINIMUM_TORCH[0]}.{MINIMUM_TORCH[1]}, the"
            " first version whose custom ops and guards the module ops rely on; upgrade torch."
        )
    return ""


@constant_in_graphs
def forward_mode() -> bool:
    """Whether forward-mode differentiation is going on; Dynamo asks for real."""
    return torch.autograd.forward_ad._current_level >= 0


@constant_in_graphs
def function_transform() -> bool:
    """Whether a transform of torch.func is active; Dynamo, which enters it for real, asks for
    real.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


@constant_in_graphs
def compiled_autograd_is_set() -> bool:
    """Whether new calls of torch.compile will trace the backward pass as well."""
    return torch._dynamo.config.compiled_autograd


def compiled_autograd() -> bool:
    """Whether Dynamo traces the backward pass as well; graphs are guarded on its context."""
    return torch._dynamo.compiled_autograd.compiled_autograd_enabled or compiled_autograd_is_set()


def compile_obstacle(module, inp, *args, **kwargs) -> str:
    """Why this call of ``module`` can not be part of a compiled graph; empty if it can."""
    reason = torch_obstacle()
    if reason:
        return reason
    if not isinstance(inp, torch.Tensor):
        return f"the input is a {type(inp).__name__}, not a torch.Tensor."
    if forward_mode():
        return "forward-mode differentiation (torch.func.jvp) has no rule for the module ops."
    if function_transform():
        # Of torch.func.grad Dynamo would make a constant: a second derivative of it would be 0.
        return "torch.func transforms (grad, vjp, vmap, ...) have no rule for the module ops."
    # Of a compiled forward pass compiled autograd loses the tensors that backward changes (torch
    # 2.11, 2.13).
    fused = getattr(module, "fuse_wgrad_accumulation", None)  # None: a norm, whatever the recipe
    changes = fused or (fused is not None and delayed_scaling.REGION.rule != "")
    if changes and torch.is_grad_enabled() and compiled_autograd():
        return (
            "compiled autograd passes on no tensors that a compiled backward pass changes:"
            " scales of DelayedScaling, and main_grad of fuse_wgrad_accumulation=True."
        )
    return module.call_obstacle(*args, **kwargs)


def compiled_or_eager(forward: Callable) -> Callable:
    """Wrap a module's ``forward``: in a trace, leave what can not be compiled to eager, and say so.

    Without ``fullgraph`` the graph breaks at the module, a warning names the reason and the module
    runs in eager; with ``fullgraph=True`` Dynamo raises an exception that carries the reason.
    """

    @functools.wraps(forward)
    def wrapper(self, inp, *args, **kwargs):
        if torch.compiler.is_compiling():
            prepare_for_dynamo()
            reason = compile_obstacle(self, inp, *args, **kwargs)
            if reason:
                _break_graph(reason)
                return _outside["run"](forward, reason, self, inp, *args, **kwargs)
            return forward(self, inp, *args, **kwargs)
        return run_in_eager(forward, self, inp, *args, **kwargs)

    # Dynamo counts recompilations per code object: each class gets its own.
    wrapper.__code__ = wrapper.__code__.replace(co_name="forward")
    return wrapper


def _break_graph(reason: str) -> None:
    """Break the graph of Dynamo; raise RuntimeError where torch.export traces without it."""
    if not torch.compiler.is_dynamo_compiling():
        raise RuntimeError(NO_PROGRAM + reason)
    torch._dynamo.graph_break(FALLBACK + reason)


def leave_graph(reason: str, function: Callable, *args, **kwargs):
    """In a trace: break the graph (an error with ``fullgraph=True``), and run in eager."""
    prepare_for_dynamo()
    _break_graph(reason)
    return _outside["any"](function, reason, *args, **kwargs)


def _any_in_eager(function: Callable, reason: str, *args, **kwargs):
    """Run ``function`` outside of the graph."""
    warnings.warn(FALLBACK + reason, UserWarning, stacklevel=2)
    return function(*args, **kwargs)


def _run_in_eager(forward: Callable, reason: str, *args, **kwargs):
    """Run ``forward`` outside of the graph."""
    warnings.warn(FALLBACK + reason, UserWarning, stacklevel=2)
    return run_in_eager(forward, *args, **kwargs)


# Filled when the first module is traced: importing Dynamo takes seconds that eager users save.
_outside: dict[str, Callable] = {}


@constant_in_graphs
def prepare_for_dynamo() -> bool:
    """Called while a module is traced; Dynamo runs it for real and takes its result for a
    constant.

    torch 2.11 and 2.12 skip tensor guards while a module's dict is untouched, and so miss that a
    parameter was frozen or unfrozen after compilation. The shortcut is switched off there.
    """
    tag_cache_keys()  # again for each trace: the environment may have changed
    if _outside:
        return True
    _outside["run"] = torch.compiler.disable(_run_in_eager, reason=FALLBACK + "see the warning.")
    _outside["any"] = torch.compiler.disable(_any_in_eager, reason=FALLBACK + "see the warning.")
    if torch_version()[:2] < (2, 13):
        torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False
    return True
