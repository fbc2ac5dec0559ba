# SPDX-License-Identifier: Apache-2.0
"""NVFP4: E2M1 values with one E4M3 scale for 16 of them and one fp32 scale for all.

"Pretraining Large Language Models with NVFP4" (2025, arXiv:2509.25149). A value stands for
``code * scale * amax / (6 * 448)``: the scale of a block is the largest magnitude in it, relative
to that of the tensor (the global amax), in units that use the range of E4M3.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .blocks import block_amax, float32, multiply_blocks_, padded_to, padded_values
from .four_over_six import choose_four_or_six
from .fp4 import FP4_MAX, cast_to_fp4, pack_fp4, packed_fp4_to_float, stochastic_cast_to_fp4
from .fp8 import amax_of, codes_to_float, transpose_bytes
from .hadamard import hadamard_transform_rows
from .layout import NOTHING, NVFP4_BLOCK, Layout, Quantized, padded_rows, quantized_layout
from .nvfp4_scales import cast_scales_, encode_scale, spread, square_max, value_multiplier
from .philox import philox_noise
from .spec import QuantSpec
from .swizzle import swizzle_scales, unswizzle_scales

_SIXTH = float32(1.0 / FP4_MAX)


class _Codes(NamedTuple):
    """Codes of a matrix, one per byte, and its scales, in the orientation of the input."""

    codes: Tensor
    scales: Tensor


def quantize_nvfp4(
    x: Tensor,
    spec: QuantSpec,
    rowwise: bool,
    columnwise: bool,
    amax: Optional[Tensor] = None,
    rng: Optional[Tensor] = None,
) -> Quantized:
    """Quantize a matrix.

    Args:
        x: [M, K] of any floating-point dtype, K a multiple of 16. What is Hadamard-transformed is
            rounded to bf16 first.
        spec: of kind ``"nvfp4"``.
        rowwise, columnwise: which orientations to make.
        amax: fp32 [1], global amax to use instead of that of ``x``; not for the columnwise values
            if those are transformed.
        rng: int64 [2], seed and offset for stochastic rounding.

    Returns:
        Buffers of the shapes that ``quantized_layout`` states. The columnwise ones are the rowwise
        quantization of the (Hadamard-transformed) transpose. An infinite value saturates; a NaN
        becomes 6 and does not count for the scale. Padding is zero, of data and of scales.

    Raises:
        ValueError: if K does not fit, ``rng`` is missing, or ``amax`` is given for row scales.
    """
    _check(x, spec, amax, rng)
    rows, columns = x.shape
    layout = quantized_layout(spec, rows, columns, rowwise, columnwise)
    padded = padded_rows(rows, "nvfp4")
    whole = spec.dim == 2 or (columnwise and not spec.rht)
    values = padded_values(x, padded if whole else rows, columns) if rowwise or whole else None
    if amax is None and not spec.row_scaled and (rowwise or not spec.rht):
        amax = amax_of(x)
    out, made = NOTHING, None
    if rowwise:
        row_amax = block_amax(values[:rows], 1) if spec.row_scaled else amax
        made = _encode_rows(values if spec.dim == 2 else values[:rows], row_amax, spec, rng)
        out = _with_rows(made, row_amax, spec, layout)
    if columnwise:
        if spec.rht:
            # The transform is defined for bf16; other values are rounded to it first.
            source = padded_to(x.to(torch.bfloat16), (padded, columns))
            transformed = hadamard_transform_rows(source, spec.sign_mask)
            values, col_amax = transformed.float(), amax_of(transformed)
        else:
            col_amax = block_amax(values, 0) if spec.row_scaled else amax
        # Codes of square blocks are the same in both orientations, unless chance or the order of a
        # sum decides about them.
        if made is None or spec.dim == 1 or spec.stochastic or spec.four_over_six:
            made = _encode_columns(values, col_amax, spec, rng)
        else:
            made = _Codes(made.codes, spread(made.scales[::NVFP4_BLOCK], 1))
        out = _with_columns(out, made, col_amax, spec, layout)
    # Operators return fresh memory: neither an input nor the same tensor twice.
    return out._replace(
        amax=None if out.amax is None else out.amax.clone(),
        col_amax=None if out.col_amax is None else out.col_amax.clone(),
    )


def _check(x: Tensor, spec: QuantSpec, amax: Optional[Tensor], rng: Optional[Tensor]) -> None:
    if x.shape[1] % NVFP4_BLOCK:
        raise ValueError(
            f"x has {x.shape[1]} columns; NVFP4 quantizes blocks of {NVFP4_BLOCK}, so it needs a "
            f"multiple of {NVFP4_BLOCK}. Pad the last dimension."
        )
    if spec.stochastic and rng is None:
        raise ValueError(
            "Stochastic rounding of NVFP4 needs random numbers, and rng is None. Pass an int64 "
            "tensor of a seed and an offset."
        )
    if spec.row_scaled and amax is not None:
        raise ValueError(
            "amax is given, but row-scaled NVFP4 takes the amax of each row. Pass amax=None."
        )


def _encode_rows(values: Tensor, amax: Tensor, spec: QuantSpec, rng: Optional[Tensor]) -> _Codes:
    """Blocks along the rows of [R, K]: codes [R, K], scales [R, K / 16]."""
    rows, columns = values.shape
    blocks = values.view(rows, columns // NVFP4_BLOCK, NVFP4_BLOCK)
    amaxes = block_amax(blocks, 2)
    if spec.dim == 2:
        amaxes = square_max(amaxes, 0)
    noise = None
    if spec.stochastic:
        noise = philox_noise(rng, 0, amaxes.numel()).view(blocks.shape)
    amax = amax[:, None] if spec.row_scaled else amax
    codes, scales = _encode(blocks, 2, amaxes, amax, spec, noise)
    return _Codes(codes.view(rows, columns), scales)


def _encode_columns(values: Tensor, amax: Tensor, spec: QuantSpec, rng: Optional[Tensor]) -> _Codes:
    """Blocks down the columns of [R, K]: codes [R, K], scales [R / 16, K]."""
    rows, columns = values.shape
    blocks = values.view(rows // NVFP4_BLOCK, NVFP4_BLOCK, columns)
    amaxes = block_amax(blocks, 1)
    if spec.dim == 2:
        amaxes = square_max(amaxes, 1)
    noise = None
    if spec.stochastic:
        noise = philox_noise(rng, 1, amaxes.numel()).view(columns, rows)
        noise = transpose_bytes(noise).view(blocks.shape)
    codes, scales = _encode(blocks, 1, amaxes, amax, spec, noise)
    return _Codes(codes.view(rows, columns), scales)


def _encode(
    blocks: Tensor,
    dim: int,
    amaxes: Tensor,
    amax: Tensor,
    spec: QuantSpec,
    noise: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """Codes of the shape of ``blocks``, scales of that of ``amaxes``."""
    if spec.four_over_six:
        return choose_four_or_six(blocks, dim, amaxes, amax, spec)
    encode = encode_scale(amax)
    scales = cast_scales_(amaxes * (encode * _SIXTH))
    scaled = blocks * value_multiplier(scales, encode.reciprocal()).unsqueeze(dim)
    codes = cast_to_fp4(scaled) if noise is None else stochastic_cast_to_fp4(scaled, noise)
    return codes, scales


def _with_rows(made: _Codes, amax: Tensor, spec: QuantSpec, layout: Layout) -> Quantized:
    rows = layout.row[0]
    scales = padded_to(made.scales[:rows], layout.scale_inv)
    scales = swizzle_scales(scales) if spec.swizzled else scales
    return NOTHING._replace(row=pack_fp4(made.codes[:rows]), scale_inv=scales, amax=amax)


def _with_columns(
    out: Quantized, made: _Codes, amax: Tensor, spec: QuantSpec, layout: Layout
) -> Quantized:
    pairs = made.codes.view(made.codes.shape[0] // 2, 2, made.codes.shape[1])
    packed = pairs[:, 0] | (pairs[:, 1] << 4)
    scales = padded_to(made.scales.t(), layout.col_scale_inv)
    scales = swizzle_scales(scales) if spec.swizzled else scales
    return out._replace(col=transpose_bytes(packed), col_scale_inv=scales, col_amax=amax)


def dequantize_nvfp4(
    data: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    spec: QuantSpec,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values of NVFP4 bytes, in the orientation of the bytes.

    Args:
        data: uint8 [R, C / 2], rowwise or columnwise.
        scale_inv: what belongs to ``data``: E4M3 bytes [>= R, >= C / 16].
        amax: fp32 [1], or [R] if row-scaled.
        spec: what the tensor was quantized with; it says whether scales are swizzled. Columnwise
            values come out Hadamard-transformed if they were.

    Returns:
        [R, C] in ``dtype``: the product of code, scale, amax and ``1 / (6 * e4m3_max)`` in fp32,
        the last three multiplied first, rounded.
    """
    rows, columns = data.shape[0], 2 * data.shape[1]
    scales = unswizzle_scales(scale_inv) if spec.swizzled else scale_inv
    scales = codes_to_float(scales[:rows, : columns // NVFP4_BLOCK], "e4m3")
    factors = scales.mul_(amax.view(-1, 1)).mul_(float32(1.0 / (FP4_MAX * spec.e4m3_max)))
    return multiply_blocks_(packed_fp4_to_float(data), factors, 1, NVFP4_BLOCK).to(dtype)
