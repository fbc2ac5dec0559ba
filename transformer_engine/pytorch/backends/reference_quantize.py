# SPDX-License-Identifier: Apache-2.0
"""Quantization in plain torch: the definition of bytes, scales and amaxes of every format."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..formats import fp8
from ..formats.blockwise import dequantize_block, quantize_block
from ..formats.layout import Quantized, ScaleAndHistory
from ..formats.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from ..formats.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from ..formats.spec import QuantSpec, decode_quant


def quantize(
    x: Tensor,
    quant: str,
    scale: Optional[Tensor],
    slot: Optional[int],
    amax: Optional[Tensor],
    rowwise: bool,
    columnwise: bool,
    rng: Optional[Tensor],
) -> Quantized:
    """Quantize ``x`` [M, K], in one or both orientations.

    Args:
        quant: encoded ``QuantSpec``.
        scale: fp32 vector whose element ``slot`` is the scale (delayed scaling; else ignored).
        amax: fp32 [1] to take the place of ``max|x|``, or None (per-tensor FP8 and NVFP4).
        rng: int64 [2], the random state of stochastic rounding (NVFP4).

    Returns:
        The buffers that ``formats.layout.quantized_layout`` describes, padding being zero.
    """
    spec = decode_quant(quant)
    return quantize_values(
        x, spec, scale, slot, amax, rowwise, columnwise, may_clobber=False, rng=rng
    )


def quantize_values(
    x: Tensor,
    spec: QuantSpec,
    scale: Optional[Tensor],
    slot: Optional[int],
    amax: Optional[Tensor],
    rowwise: bool,
    columnwise: bool,
    may_clobber: bool,
    rng: Optional[Tensor] = None,
) -> Quantized:
    """``quantize`` for a decoded spec; with ``may_clobber`` an fp32 ``x`` is used as scratch."""
    if spec.kind == "block":
        return quantize_block(x, spec, rowwise, columnwise)
    if spec.kind == "mxfp8":
        return quantize_mxfp8(x, spec, rowwise, columnwise)
    if spec.kind == "nvfp4":
        return quantize_nvfp4(x, spec, rowwise, columnwise, amax, rng)
    amax = fp8.amax_of(x) if amax is None else amax.clone()
    if spec.kind == "current":
        used_scale = fp8.scale_from_amax(amax, spec.fmt, spec.pow2, spec.eps)
    else:
        slot = slot or 0
        if isinstance(scale, ScaleAndHistory):
            cell, scale = scale.cell(slot), scale.scale
            torch.fmax(cell, amax, out=cell)
            amax = None
        used_scale = scale[slot : slot + 1]
    row = col = None
    if rowwise or columnwise:
        if may_clobber and x.dtype == torch.float32:
            row = fp8.cast_to_fp8_(x.mul_(used_scale), spec.fmt)
        else:
            row = fp8.cast_to_fp8(x, used_scale, spec.fmt)
    if columnwise:
        col = fp8.transpose_bytes(row)
    return Quantized(row if rowwise else None, col, used_scale.reciprocal(), None, amax, None)


def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    amax: Optional[Tensor],
    quant: str,
    columnwise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Codes times scales, computed in fp32 and rounded once to ``dtype``; orientation of ``data``.

    ``columnwise`` says that ``data`` is a columnwise buffer, which only MXFP8 must know.
    """
    spec = decode_quant(quant)
    if spec.kind == "block":
        return dequantize_block(data, scale_inv, spec, dtype)
    if spec.kind == "mxfp8":
        return dequantize_mxfp8(data, scale_inv, spec, columnwise, dtype)
    if spec.kind == "nvfp4":
        return dequantize_nvfp4(data, scale_inv, amax, spec, dtype)
    return fp8.dequantize_fp8(data, scale_inv, spec.fmt, dtype)
