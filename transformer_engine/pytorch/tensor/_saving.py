# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors among the tensors that autograd saves for a backward pass."""

from __future__ import annotations

from typing import Iterable, Optional, Union

import torch
from torch import Tensor

from ._storage import QuantizedTensorStorage

Saveable = Union[None, Tensor, QuantizedTensorStorage]


def prepare_for_saving(
    *tensors: Saveable,
) -> tuple[list[Optional[Tensor]], list[Optional[QuantizedTensorStorage]]]:
    """Flatten ``tensors`` for ``ctx.save_for_backward``.

    Quantized tensors are taken apart, so that hooks on saved tensors see bytes and not values.

    Returns:
        the plain tensors, and one object per argument that ``restore_from_saved`` needs (None for
        an argument that is a tensor or None).
    """
    plain, objects = [], []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            buffers, twin = tensor.prepare_for_saving()
            plain.extend(buffers)
            objects.append(twin)
        else:
            plain.append(tensor)
            objects.append(None)
    return plain, objects


def restore_from_saved(
    objects: Iterable[Optional[QuantizedTensorStorage]],
    saved_tensors: Iterable[Optional[Tensor]],
    return_saved_tensors: bool = False,
) -> Union[list[Saveable], tuple[list[Saveable], list[Optional[Tensor]]]]:
    """The inverse of ``prepare_for_saving``; optionally also the tensors that were left over."""
    rest = list(saved_tensors)
    restored = []
    for twin in objects:
        if twin is None:
            restored.append(rest.pop(0))
        else:
            rest = twin.restore_from_saved(rest)
            restored.append(twin)
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: torch.autograd.function.FunctionCtx) -> list[Saveable]:
    """What a forward stored as ``ctx.tensor_objects`` and with ``ctx.save_for_backward``."""
    return restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
