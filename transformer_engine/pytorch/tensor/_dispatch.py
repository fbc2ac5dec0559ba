# SPDX-License-Identifier: Apache-2.0
"""What operations of torch do with quantized tensors.

``rule(*operators)`` registers what ``_dispatch_rules.py`` says; everything else runs on dequantized
values (``on_values``). A rule is called with the operator and its arguments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ._storage import QuantizedTensorStorage
from ._update import written

_RULES: dict[Any, Callable] = {}


def rule(*operators: Any) -> Callable:
    """Decorator: the function handles these operators."""

    def register(function: Callable) -> Callable:
        _RULES.update({operator: function for operator in operators})
        return function

    return register


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run operator ``func``, of whose arguments at least one is a quantized tensor."""
    handler = _RULES.get(func)
    if handler is not None:
        return handler(func, *args, **kwargs)
    if func.namespace == "c10d":
        return _collective(func, args, kwargs)
    if func._can_decompose():  # arrives as a whole in inference mode
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return on_values(func, args, kwargs)


def is_quantized(value: Any) -> bool:
    """Whether ``value`` is a quantized tensor."""
    return isinstance(value, QuantizedTensorStorage)


# --- everything else -----------------------------------------------------------------------------


@lru_cache(maxsize=None)
def _written_arguments(func: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator writes to."""
    arguments = func._schema.arguments
    return tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)


def on_values(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` on dequantized arguments, and quantize again those that it wrote to."""
    values: dict[int, Tensor] = {}  # by identity: an argument may be there twice

    def dequantized(value: Any) -> Any:
        if not is_quantized(value):
            return value
        if id(value) not in values:
            values[id(value)] = value._values()
        return values[id(value)]

    flat, structure = tree_flatten((args, kwargs))
    plain_args, plain_kwargs = tree_unflatten([dequantized(v) for v in flat], structure)
    result = func(*plain_args, **plain_kwargs)
    names = _written_arguments(func)
    if not names:
        return result
    by_name = dict(zip((a.name for a in func._schema.arguments), args))
    by_name.update(kwargs)
    changed = {}
    for target in tree_flatten([by_name.get(name) for name in names])[0]:
        if is_quantized(target):
            target.quantize_(values[id(target)])
            changed[id(values[id(target)])] = target
    return tree_map(lambda value: changed.get(id(value), value), result)


def _collective(func: Any, args: tuple, kwargs: dict) -> Any:
    """Collectives on quantized tensors: a broadcast of the bytes is the only one with a meaning."""
    if func is not torch.ops.c10d.broadcast_.default:
        raise TypeError(
            f"{func} can not communicate quantized tensors. Communicate tensor.dequantize(), or "
            "the buffers of the tensor one by one."
        )
    tensors, *rest = args
    buffers = [b for t in tensors for b in (flat_buffers(t) if is_quantized(t) else [t])]
    works = [func([buffer], *rest, **kwargs)[1] for buffer in buffers]
    for tensor in filter(is_quantized, tensors):
        written(tensor)
    # Collectives of one group complete in order.
    return list(tensors), works[-1]


def flat_buffers(tensor: QuantizedTensorStorage) -> list[Tensor]:
    """All buffers there are, those of nested tensors included."""
    return [buffer for buffer in tensor.prepare_for_saving()[0] if buffer is not None]
