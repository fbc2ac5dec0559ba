# SPDX-License-Identifier: Apache-2.0
"""MXFP8: FP8 values with one E8M0 scale for 32 of them, along either dimension.

Defined by the OCP microscaling (MX) formats specification 1.0. A block holds 32 consecutive values
of a row or, columnwise, of a column; square blocks of 32 x 32 share a scale in both orientations.
Its scale is the smallest power of two by which no value of the block exceeds the largest FP8 value.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .blocks import (
    block_amax,
    float32,
    multiply_blocks_,
    padded_to,
    padded_values,
)
from .e8m0 import e8m0_from_float, e8m0_multiplier, e8m0_to_float
from .fp8 import FP8_MAX, cast_to_fp8_, codes_to_float
from .layout import MXFP8_BLOCK, NOTHING, Layout, Quantized, ceil_div, padded_rows, quantized_layout
from .spec import QuantSpec
from .swizzle import (
    swizzle_columnwise_scales,
    swizzle_scales,
    unswizzle_columnwise_scales,
    unswizzle_scales,
)


def quantize_mxfp8(x: Tensor, spec: QuantSpec, rowwise: bool, columnwise: bool) -> Quantized:
    """Quantize a matrix.

    Args:
        x: [M, K] of any floating-point dtype, K a multiple of 32.
        spec: of kind ``"mxfp8"``.
        rowwise, columnwise: which orientations to make.

    Returns:
        Buffers of the shapes that ``quantized_layout`` states. An infinite value saturates, a NaN
        stays one and does not count for the scale. Padding is zero, of data and of scales.
    """
    rows, columns = x.shape
    layout = quantized_layout(spec, rows, columns, rowwise, columnwise)
    padded = padded_rows(rows, "mxfp8")
    if spec.dim == 2:
        return _quantize_square(padded_values(x, padded, columns), spec, layout)
    out = NOTHING
    values = padded_values(x, padded if columnwise else rows, columns)
    if rowwise:
        blocks = values[:rows].unflatten(1, (columns // MXFP8_BLOCK, MXFP8_BLOCK))
        exponents = _exponents(block_amax(blocks, 2), spec)
        data = cast_to_fp8_(blocks * e8m0_multiplier(exponents).unsqueeze(2), spec.fmt)
        scales = _row_scales(exponents, spec, layout)
        out = out._replace(row=data.view(rows, columns), scale_inv=scales)
    if columnwise:
        blocks = values.view(padded // MXFP8_BLOCK, MXFP8_BLOCK, columns)
        exponents = _exponents(block_amax(blocks, 1), spec)
        data = cast_to_fp8_(blocks * e8m0_multiplier(exponents).unsqueeze(1), spec.fmt)
        scales = _column_scales(exponents, spec, layout)
        out = out._replace(col=data.view(padded, columns), col_scale_inv=scales)
    return out


def _quantize_square(values: Tensor, spec: QuantSpec, layout: Layout) -> Quantized:
    """Blocks of 32 x 32 of fp32 [Mp, K] values: both orientations have the same bytes."""
    padded, columns = values.shape
    grid = (padded // MXFP8_BLOCK, columns // MXFP8_BLOCK)
    amax = block_amax(values.view(padded, grid[1], MXFP8_BLOCK), 2)
    amax = block_amax(amax.view(grid[0], MXFP8_BLOCK, grid[1]), 1)
    exponents = _exponents(amax, spec)
    blocks = values.view(grid[0], MXFP8_BLOCK, grid[1], MXFP8_BLOCK)
    data = cast_to_fp8_(blocks * e8m0_multiplier(exponents)[:, None, :, None], spec.fmt)
    data = data.view(padded, columns)
    out = NOTHING
    if layout.row is not None:
        rows = layout.row[0]
        scales = _row_scales(exponents.repeat_interleave(MXFP8_BLOCK, 0)[:rows], spec, layout)
        out = out._replace(row=data[:rows], scale_inv=scales)
    if layout.col is not None:
        scales = _column_scales(exponents.repeat_interleave(MXFP8_BLOCK, 1), spec, layout)
        # Operators must not return the same memory twice.
        data = data.clone() if layout.row is not None else data
        out = out._replace(col=data, col_scale_inv=scales)
    return out


def _exponents(amax: Tensor, spec: QuantSpec) -> Tensor:
    """E8M0 scales of blocks with these amaxes."""
    return e8m0_from_float(amax * float32(1.0 / FP8_MAX[spec.fmt]))


def _row_scales(exponents: Tensor, spec: QuantSpec, layout: Layout) -> Tensor:
    scales = padded_to(exponents, layout.scale_inv)
    return swizzle_scales(scales) if spec.swizzled else scales


def _column_scales(exponents: Tensor, spec: QuantSpec, layout: Layout) -> Tensor:
    scales = padded_to(exponents, layout.col_scale_inv)
    return swizzle_columnwise_scales(scales) if spec.swizzled else scales


def dequantize_mxfp8(
    data: Tensor,
    scale_inv: Tensor,
    spec: QuantSpec,
    columnwise: bool,
    dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """The values of MXFP8 bytes.

    Args:
        data: uint8 [R, C], in the same orientation rowwise and columnwise.
        scale_inv: scales of 32 values along the rows, or with ``columnwise`` down the columns.
        spec: what the tensor was quantized with; it says whether scales are swizzled.
        dtype: of the result, fp32 by default.

    Returns:
        [R, C] in ``dtype``: the product of value and scale in fp32, rounded.
    """
    rows, columns = data.shape
    if columnwise:
        scales = unswizzle_columnwise_scales(scale_inv) if spec.swizzled else scale_inv
        scales = scales[: ceil_div(rows, MXFP8_BLOCK), :columns]
    else:
        scales = unswizzle_scales(scale_inv) if spec.swizzled else scale_inv
        scales = scales[:rows, : ceil_div(columns, MXFP8_BLOCK)]
    values = codes_to_float(data, spec.fmt)
    multiply_blocks_(values, e8m0_to_float(scales), 0 if columnwise else 1, MXFP8_BLOCK)
    return values if dtype is None else values.to(dtype)
