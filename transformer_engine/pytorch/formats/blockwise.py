# SPDX-License-Identifier: Apache-2.0
"""FP8 with one fp32 scale for 128 values of a row or column, or for 128 x 128 values.

The recipe of "DeepSeek-V3 Technical Report" (2024, arXiv:2412.19437), section 3.3. The scale of a
block follows the rule of current scaling (``scale_from_amax``), applied to the amax of the block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import block_amax, multiply_blocks_, padded_to, padded_values
from .fp8 import FLOAT32_MAX, cast_to_fp8_, codes_to_float, scale_from_amax, transpose_bytes
from .layout import (
    BLOCK,
    NOTHING,
    Layout,
    Quantized,
    ceil_div,
    padded_rows,
    quantized_layout,
    round_up,
)
from .spec import QuantSpec


def quantize_block(x: Tensor, spec: QuantSpec, rowwise: bool, columnwise: bool) -> Quantized:
    """Quantize a matrix.

    Args:
        x: [M, K] of any floating-point dtype.
        spec: of kind ``"block"``.
        rowwise, columnwise: which orientations to make.

    Returns:
        Buffers of the shapes that ``quantized_layout`` states. The columnwise ones are the rowwise
        quantization of the transpose. An infinite value saturates, a NaN stays one and does not
        count for the scale. Padding is zero, of data and of scales.
    """
    layout = quantized_layout(spec, *x.shape, rowwise, columnwise)
    if spec.dim == 2:
        return _quantize_square(x, spec, layout)
    out = NOTHING
    if rowwise:
        out = _quantize_rows(x, spec, layout)
    if columnwise:
        col, scales = _quantize_columns(x, spec, layout)
        out = out._replace(col=col, col_scale_inv=scales)
    return out


def _quantize_rows(x: Tensor, spec: QuantSpec, layout: Layout) -> Quantized:
    """Blocks of 128 along rows; scales are stored transposed."""
    rows, columns = x.shape
    padded = round_up(columns, BLOCK)
    blocks = padded_values(x, rows, padded).view(rows, padded // BLOCK, BLOCK)
    scale = _scales(block_amax(blocks, 2), spec, x.dtype)
    data = cast_to_fp8_(blocks * scale.unsqueeze(2), spec.fmt).view(rows, padded)
    scale_inv = padded_to(scale.reciprocal().t(), layout.scale_inv)
    return NOTHING._replace(
        row=data[:, :columns].contiguous().view(layout.row), scale_inv=scale_inv
    )


def _quantize_columns(x: Tensor, spec: QuantSpec, layout: Layout) -> tuple[Tensor, Tensor]:
    """Blocks of 128 down columns; only bytes are transposed, which is cheaper than values."""
    rows, columns = x.shape
    padded = padded_rows(rows, "block")
    blocks = padded_values(x, padded, columns).view(padded // BLOCK, BLOCK, columns)
    scale = _scales(block_amax(blocks, 1), spec, x.dtype)
    data = cast_to_fp8_(blocks * scale.unsqueeze(1), spec.fmt).view(padded, columns)
    return transpose_bytes(data), padded_to(scale.reciprocal(), layout.col_scale_inv)


def _quantize_square(x: Tensor, spec: QuantSpec, layout: Layout) -> Quantized:
    """Blocks of 128 x 128: both orientations have the same bytes and scales."""
    rows, columns = x.shape
    padded = (padded_rows(rows, "block"), round_up(columns, BLOCK))
    blocks = padded_values(x, *padded).view(padded[0] // BLOCK, BLOCK, padded[1] // BLOCK, BLOCK)
    scale = _scales(block_amax(block_amax(blocks, 3), 1), spec, x.dtype)
    data = cast_to_fp8_(blocks * scale[:, None, :, None], spec.fmt).view(padded)[:, :columns]
    inverse = scale.reciprocal()
    out = NOTHING
    if layout.row is not None:
        scale_inv = padded_to(inverse, layout.scale_inv)
        out = out._replace(row=data[:rows].contiguous().view(layout.row), scale_inv=scale_inv)
    if layout.col is not None:
        scale_inv = padded_to(inverse.t(), layout.col_scale_inv)
        out = out._replace(col=transpose_bytes(data), col_scale_inv=scale_inv)
    return out


def _scales(amax: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Scales of blocks of values of ``dtype``, whose largest replaces a quotient that overflows."""
    largest = min(torch.finfo(dtype).max, FLOAT32_MAX)
    return scale_from_amax(amax, spec.fmt, spec.pow2, spec.eps, largest)


def dequantize_block(
    data: Tensor, scale_inv: Tensor, spec: QuantSpec, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values of bytes with block scales, in the orientation of the bytes.

    Args:
        data: uint8 [R, C], rowwise or columnwise bytes. Columns beyond those that the scales cover
            must be padding, that is zero.
        scale_inv: what belongs to ``data``: [ceil(C / 128), >= R], or for square blocks
            [ceil(R / 128), >= ceil(C / 128)].

    Returns:
        [R, C] in ``dtype``: the product of value and scale in fp32, rounded.
    """
    rows, columns = data.shape
    blocks = ceil_div(columns, BLOCK)
    if spec.dim == 2:
        scales = scale_inv.repeat_interleave(BLOCK, 0)[:rows]
    else:
        scales = scale_inv[:, :rows].t()
    scales = padded_to(scales[:, :blocks], (rows, blocks))
    values = codes_to_float(data, spec.fmt)
    return multiply_blocks_(values, scales, 1, BLOCK).to(dtype)
