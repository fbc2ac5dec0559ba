# SPDX-License-Identifier: Apache-2.0
"""What the formats with block scales share: padding, amaxes of blocks, products with scales."""

from __future__ import annotations

import struct
import torch

from .fp8 import _may_look_at_values

_INFINITY = 0x7F800000  # bits of fp32 infinity; bits above are NaNs


def float32(value: float) -> float:
    """``value`` rounded to fp32, as a Python number."""
    return struct.unpack("f", struct.pack("f", value))[0]


def divide(numerator, denominator) -> torch.Tensor:
    """The correctly rounded quotient of fp32 tensors; one of the two may be a number.

    ``number / tensor``, and on CUDA ``tensor / number``, multiply by a rounded reciprocal.
    """
    if not isinstance(numerator, torch.Tensor):
        numerator = torch.full((), numerator, dtype=torch.float32, device=denominator.device)
    if not isinstance(denominator, torch.Tensor):
        denominator = torch.full((), denominator, dtype=torch.float32, device=numerator.device)
    return torch.div(numerator, denominator)


def padded_values(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The [M, K] tensor ``x`` in fp32 and contiguous, with zeros up to [rows, columns].

    May be ``x`` itself: do not write to it.
    """
    if x.shape == (rows, columns):
        return x.contiguous().float()
    padded = torch.zeros(rows, columns, dtype=torch.float32, device=x.device)
    padded[: x.shape[0], : x.shape[1]].copy_(x)
    return padded


def padded_to(values: torch.Tensor, shape: tuple) -> torch.Tensor:
    """The matrix ``values`` in the corner of a contiguous one of ``shape``, zeros elsewhere."""
    if values.shape == shape:
        # A row of any stride counts as contiguous; a view has the strides that compilers expect.
        return values.contiguous().view(shape)
    padded = torch.zeros(shape, dtype=values.dtype, device=values.device)
    padded[: values.shape[0], : values.shape[1]].copy_(values)
    return padded


def block_amax(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Largest absolute value along ``dim`` of an fp32 tensor, that dimension removed.

    A NaN is ignored, an infinity gives infinity, nothing gives 0. Non-negative floats are ordered
    as their bits are, and the maximum of integers is faster on a CPU.
    """
    if values.shape[dim] == 0:
        return values.sum(dim)  # zeros of the right shape
    bits = values.view(torch.int32) & 0x7FFFFFFF
    if not _may_look_at_values(values):
        return bits.masked_fill_(bits > _INFINITY, 0).amax(dim).view(torch.float32)
    amax = bits.amax(dim)
    if amax.numel() and int(amax.max()) > _INFINITY:
        amax = bits.masked_fill_(bits > _INFINITY, 0).amax(dim)
    return amax.view(torch.float32)


def multiply_blocks_(
    values: torch.Tensor, scales: torch.Tensor, dim: int, block: int
) -> torch.Tensor:
    """Multiply each block of a matrix by its scale, in place; returns ``values``.

    Args:
        values: [R, C].
        scales: of each ``block`` consecutive values along ``dim`` one, so [R, ceil(C / block)] for
            ``dim`` 1 and [ceil(R / block), C] for ``dim`` 0. The last block may be short.
    """
    whole = values.shape[dim] // block
    rest = values.shape[dim] - whole * block
    blocks = values.narrow(dim, 0, whole * block).unflatten(dim, (whole, block))
    blocks.mul_(scales.narrow(dim, 0, whole).unsqueeze(dim + 1))
    if rest:
        values.narrow(dim, whole * block, rest).mul_(scales.narrow(dim, whole, 1))
    return values
