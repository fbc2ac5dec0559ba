# SPDX-License-Identifier: Apache-2.0
"""Runs a module for `explain` and `memory_report`: once, observed, without a trace of it left."""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..module.base import TransformerEngineBaseModule
from .kept import owned, parts, storage_keys
from .recorder import Recorder
from .rows import SavedRow
from .state import unchanged


class Recorded(NamedTuple):
    """What one call did. ``no_backward``: why no backward pass ran, "" if one did.

    ``autograd_total``: bytes of the storages that autograd held after the forward pass and that
    exist for it alone; ``after_backward`` the same after the backward pass, None without one.
    """

    recorder: Recorder
    saved: list[SavedRow]
    autograd_total: int
    after_backward: Optional[int]
    no_backward: str


def recorded(module: torch.nn.Module, inputs: tuple, kwargs: dict) -> Recorded:
    """Call ``module`` and differentiate what it returns."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "te.explain and te.memory_report can not be part of compiled code: they run a module"
            " and look at it. Call them outside, with the module or its compiled version."
        )
    root = unwrapped(module)
    if not inputs and not kwargs and _takes_inputs(root):
        raise TypeError(
            "te.explain and te.memory_report run the module, so they need what it is called with:"
            f" te.explain(module, x) for this {type(root).__name__}."
        )
    inputs, kwargs = pytree.tree_map_only(Tensor, _leaf, (inputs, kwargs))
    recorder = Recorder(root)
    with unchanged(root), _eager(), recorder.watching():
        with recorder.saving():
            outputs = root(*inputs, **kwargs)
        owners = owned(_owners(root, (inputs, kwargs)))
        saved, total = recorder.kept.rows(owners), _held(recorder, owners)
        obstacle = _differentiate(recorder, outputs, (inputs, kwargs))
        after = None if obstacle else _held(recorder, owners)
        return Recorded(recorder, saved, total, after, obstacle)


def _takes_inputs(module: torch.nn.Module) -> bool:
    """Whether ``module()`` lacks an argument."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in needed and p.default is p.empty for p in parameters)


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside of ``torch.compile`` and ``DistributedDataParallel``."""
    while isinstance(module, torch.nn.Module):
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._modules["_orig_mod"]
        else:
            return module
    raise TypeError(
        f"te.explain and te.memory_report take a torch.nn.Module, not a {type(module).__name__}."
        " Pass the module that the function calls."
    )


def _leaf(tensor: Tensor) -> Tensor:
    """``tensor`` as a leaf of autograd, so that the backward pass ends at the module."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _eager():
    """Context in which what ``torch.compile`` wrapped runs in eager."""
    if "torch._dynamo" not in sys.modules:  # then nothing has been compiled
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _owners(root: torch.nn.Module, inputs) -> list:
    """What is there anyway: pairs of a kind and its tensors."""
    cached = [
        buffer
        for module in root.modules()
        if isinstance(module, TransformerEngineBaseModule)
        for entry in module._fp8_workspaces.values()
        for buffer in entry.operand_buffers()
        if buffer is not None
    ]
    given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return [
        ("parameter", root.parameters()),
        ("buffer", (*root.buffers(), *_scales(root))),
        ("input", given),
        ("cache", cached),
    ]


def _scales(root: torch.nn.Module) -> list[Tensor]:
    """The state of delayed scaling, which the modules keep."""
    states = [getattr(module, "_delayed_scaling", None) for module in root.modules()]
    names = ("fwd_scale", "fwd_history", "bwd_scale", "bwd_history")
    return [getattr(state, name) for state in states if state is not None for name in names]


def _held(recorder: Recorder, owners: dict) -> int:
    """Bytes of all storages that autograd holds, of those that nobody else owns."""
    storages = {}
    for _, tensor in recorder.kept.living():
        for key, part in zip(storage_keys(tensor), parts(tensor)):
            if key not in owners:
                storages[key] = part.untyped_storage().nbytes()
    return sum(storages.values())


def _differentiate(recorder: Recorder, outputs, inputs) -> str:
    """Run the backward pass with gradients of ones; returns why not, "" if it ran.

    ``torch.autograd.grad`` writes no ``.grad`` and runs no hooks that wait for it.
    """
    outputs = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    if not outputs:
        return "no output requires a gradient"
    given = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
    sources = [t for t in (*recorder.root.parameters(), *given) if t.requires_grad]
    if not sources:
        return "neither a parameter nor an input requires a gradient"
    ones = [torch.ones(t.shape, dtype=t.dtype, device=t.device) for t in outputs]
    recorder.backward_runs = True
    try:
        torch.autograd.grad(outputs, sources, ones, allow_unused=True)
    except RuntimeError as error:
        return f"it failed: {error}"
    finally:
        recorder.backward_runs = False
    return ""
