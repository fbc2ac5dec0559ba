# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that autograd does not return to a graph: put off, or in ``main_grad``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List, Sequence

from torch import Tensor

_MARK = "grad_added_to_main_grad"


def puts_off(module: Any) -> bool:
    """Whether a module leaves weight gradients to ``backward_dw``."""
    return hasattr(module, "need_backward_dw") and module.need_backward_dw()


def may_lack_gradients(modules: Sequence[Any]) -> bool:
    """Whether autograd may find no gradient for weights of ``modules``."""
    return any(
        getattr(module, "fuse_wgrad_accumulation", False) or puts_off(module) for module in modules
    )


def owned_gradients(params: Sequence[Tensor], late: Sequence[Any], clone: bool) -> List[bool]:
    """For each parameter whether autograd gets a gradient of its own: a copy of the static one.

    With ``clone`` all but those marked ``skip_backward_post_hook``, whose owner reads the static
    one. Modules that put off weight gradients (``late``) mark their biases too, but autograd adds
    these up.
    """
    summed = {id(param) for module in late for param in module.parameters(recurse=False)}
    return [
        clone and (id(param) in summed or not getattr(param, "skip_backward_post_hook", False))
        for param in params
    ]


def backward_dw(modules: Sequence[Any], call_hooks: bool) -> None:
    """What ``modules`` put off; by the method of the class, as a graphed module has another.

    ``call_hooks``: whether their ``wgrad_accumulation_and_reduce_hooks`` are called as well.
    """
    for module in filter(puts_off, modules):
        hooks = module.wgrad_accumulation_and_reduce_hooks
        if not call_hooks:
            module.wgrad_accumulation_and_reduce_hooks = []
        try:
            type(module).backward_dw(module)
        finally:
            module.wgrad_accumulation_and_reduce_hooks = hooks


def call_hooks_of(modules: Sequence[Any]) -> None:
    """Call the hooks of modules whose weight gradients were computed by a replay."""
    for module in filter(puts_off, modules):
        for hook in module.wgrad_accumulation_and_reduce_hooks:
            hook()


@contextmanager
def fused(params: Sequence[Tensor]) -> Iterator[List[Tensor]]:
    """The parameters that what runs inside marks: their gradient was added to ``main_grad``.

    Replays mark them again. The marks are given back as they were.
    """
    marked = [param for param in params if hasattr(param, _MARK)]
    before = [param.grad_added_to_main_grad for param in marked]
    found: List[Tensor] = []
    for param in marked:
        param.grad_added_to_main_grad = False
    try:
        yield found
    finally:
        found += [param for param in marked if param.grad_added_to_main_grad]
        for param, mark_before in zip(marked, before):
            param.grad_added_to_main_grad = mark_before


def mark(params: Sequence[Tensor]) -> None:
    """Mark ``params`` as modules do in backward, for frameworks that reset the mark."""
    for param in params:
        param.grad_added_to_main_grad = True


@contextmanager
def main_grads_kept(params: Sequence[Tensor]) -> Iterator[None]:
    """Give back every ``main_grad``, and the mark, as they were."""
    targets = [getattr(param, "main_grad", None) for param in params]
    targets = [target for target in targets if isinstance(target, Tensor)]
    # They are usually zero, and large.
    copies = [target.clone() if target.any() else None for target in targets]
    with fused(params):
        try:
            yield
        finally:
            for target, copy in zip(targets, copies):
                if copy is None:
                    target.detach().zero_()
                else:
                    target.detach().copy_(copy)
