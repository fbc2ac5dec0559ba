# SPDX-License-Identifier: Apache-2.0
"""Backward passes that have no derivative of their own."""

from __future__ import annotations

import functools
from typing import Callable

import torch

_MESSAGE = (
    b"A gradient that a module of transformer_engine computed is being differentiated. The modules"
    b" can not be differentiated twice: backward uses kernels and quantized values, which have no"
    b" derivative. For second derivatives (gradient penalties, Hessians) use modules of torch.nn."
)


def first_order_only(backward: Callable) -> Callable:
    """Decorate ``backward(ctx, *grads)`` of an autograd function: its results raise RuntimeError
    when they are differentiated.

    ``torch.autograd.function.once_differentiable`` does so only where a gradient that backward is
    given needs one itself. With ``create_graph=True`` and, say, ``y.sum()`` it does not, and what
    is computed from the results would silently have no gradient at all.
    """

    @functools.wraps(backward)
    def wrapped(ctx, *grads):
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        results = results if isinstance(results, tuple) else (results,)
        fails = torch._C._functions.DelayedError(_MESSAGE, len(results))
        return fails(*(None if r is None else r.detach().requires_grad_() for r in results))

    return wrapped
