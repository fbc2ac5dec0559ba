# SPDX-License-Identifier: Apache-2.0
"""What ``make_graphed_callables`` may be given."""

from __future__ import annotations

import warnings
from typing import Any, List, Optional, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .hooks import capture_hooks


def renamed(old_name: str, old: Any, new_name: str, new: Any, default: Any) -> Any:
    """The value of an argument that has a former name."""
    if old is None:
        return default if new is None else new
    if new is not None:
        raise ValueError(f"{old_name} is the former name of {new_name}; give only {new_name}.")
    warnings.warn(f"{old_name} is deprecated; use {new_name}.", DeprecationWarning, stacklevel=3)
    return old


def one_for_each(enabled: Any, count: int) -> Tuple[bool, ...]:
    """``enabled`` of each callable; TypeError or ValueError if it is neither one nor many."""
    if isinstance(enabled, bool):
        return (enabled,) * count
    if not isinstance(enabled, tuple):
        raise TypeError(f"enabled must be a bool or a tuple of bools, not {enabled!r}.")
    if len(enabled) != count:
        raise ValueError(f"enabled has {len(enabled)} entries for {count} callables.")
    return enabled


def check_warmup(iterations: Any) -> None:
    """Raise ValueError unless ``iterations`` is a number."""
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 0:
        raise ValueError(
            f"num_warmup_iters must be a number of passes, 0 or more, not {iterations!r}."
        )


def check_modules(modules: tuple) -> None:
    """Raise TypeError or RuntimeError for what can not be captured as a module."""
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"Graphed callables must be torch.nn.Module objects, not {type(module).__name__}:"
                " their parameters are part of the graph. Wrap the function in a module."
            )
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if any((*hooks, module._backward_hooks, module._backward_pre_hooks)):
            raise RuntimeError(
                f"{type(module).__name__} has hooks, which would be captured once and not run"
                " again. Register them after make_graphed_callables."
            )
    if len({module.training for module in modules}) > 1:
        raise RuntimeError(
            "Some of the modules are in training mode and some are not. Call train() or eval() on"
            " all of them."
        )


def check_samples(sample_args: Any, sample_kwargs: Any, count: int) -> List[tuple]:
    """``(args, kwargs)`` for each unit; all leaves are tensors."""
    if sample_kwargs is None:
        sample_kwargs = ({},) * count
    for name, given in (("sample_args", sample_args), ("sample_kwargs", sample_kwargs)):
        if len(given) != count:
            raise ValueError(f"{name} has {len(given)} entries, but {count} are needed.")
    seen: set = set()
    return [_own_tensors(*sample, seen) for sample in zip(sample_args, sample_kwargs)]


def _own_tensors(args: Any, kwargs: dict, seen: set) -> tuple:
    """A sample without tensors that another one (in ``seen``) has: it would overwrite them."""
    leaves, structure = tree_flatten((args if isinstance(args, tuple) else (args,), dict(kwargs)))
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"Sample arguments must be tensors, but there is a {type(leaf).__name__}. Bind"
                " other values to the module before making a graph of it."
            )
        if id(leaf) in seen:
            leaves[i] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
    return tree_unflatten(leaves, structure)


def check_hooks(given: Optional[List[Optional[dict]]], count: int) -> list:
    """Capture-time hooks for each callable."""
    given = [None] * count if given is None else given
    if len(given) != count:
        raise ValueError(f"capture_time_hooks has {len(given)} entries for {count} callables.")
    return [capture_hooks(hooks) for hooks in given]


def check_torch_autocast() -> None:
    """Raise RuntimeError where ``torch.autocast`` keeps casts of weights across calls."""
    if torch.is_autocast_enabled() and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            "make_graphed_callables inside of torch.autocast needs cache_enabled=False: a graph"
            " must make its casts of the weights itself."
        )
