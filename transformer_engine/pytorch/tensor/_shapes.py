# SPDX-License-Identifier: Apache-2.0
"""Shapes of quantized tensors, and how users see the padded columnwise buffers of the kernels."""

from __future__ import annotations

import math
from typing import Iterable, Optional

import torch
from torch import Tensor

from ..formats.layout import padded_rows


def matrix_shape(shape: Iterable[int]) -> tuple[int, int]:
    """``(M, K)`` of a tensor: M is the product of the leading dimensions, K the last one."""
    shape = tuple(shape)
    return math.prod(shape[:-1]), shape[-1]


def as_matrix(tensor: Tensor) -> Tensor:
    """``tensor`` as contiguous [M, K] values without autograd.

    Raises:
        ValueError: if it is no floating-point tensor with at least one dimension.
    """
    if not tensor.is_floating_point() or tensor.ndim == 0:
        raise ValueError(
            f"A tensor of dtype {tensor.dtype} and {tensor.ndim} dimensions can not be quantized. "
            "Pass a floating-point tensor with at least one dimension."
        )
    return tensor.detach().reshape(matrix_shape(tensor.shape)).contiguous()


def resolve_shape(shape: tuple, old: tuple) -> tuple:
    """The shape that ``view(*shape)`` of a tensor of shape ``old`` has.

    Raises:
        RuntimeError: if the number of elements differs.
    """
    if len(shape) == 1 and not isinstance(shape[0], (int, torch.SymInt)):
        shape = tuple(shape[0])
    numel = math.prod(old)
    if shape.count(-1) == 1:
        known = math.prod(size for size in shape if size != -1)
        missing = numel // known if known else 0
        shape = tuple(missing if size == -1 else size for size in shape)
    if math.prod(shape) != numel or -1 in shape:
        raise RuntimeError(
            f"A tensor of shape {tuple(old)} can not be viewed as {tuple(shape)}: the number of "
            "elements differs."
        )
    return tuple(shape)


# --- columnwise buffers that are the transpose ---------------------------------------------------


def transposed_view(padded: Optional[Tensor], leading: tuple) -> Optional[Tensor]:
    """What users see of a buffer ``[K, Mp]``: a view of shape ``(K, *leading)``."""
    if padded is None:
        return None
    if not leading:
        return padded[:, 0]
    rows = math.prod(leading)
    view = padded if padded.shape[1] == rows else padded[:, :rows]
    return view if len(leading) == 1 else view.unflatten(1, leading)


def padded_transpose(transpose: Optional[Tensor], rows: int, kind: str) -> Optional[Tensor]:
    """The inverse of ``transposed_view``: ``[K, Mp]`` with zero bytes beyond ``rows``."""
    if transpose is None:
        return None
    return pad(transpose.reshape(transpose.shape[0], rows), 1, padded_rows(rows, kind))


def pad(data: Tensor, dim: int, size: int) -> Tensor:
    """``data`` with zeros appended along ``dim`` (0 or 1 of 2) up to ``size``."""
    missing = size - data.shape[dim]
    if missing == 0:
        return data
    return torch.nn.functional.pad(data, (0, missing) if dim == 1 else (0, 0, 0, missing))
