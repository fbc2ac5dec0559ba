# SPDX-License-Identifier: Apache-2.0
"""Per-tensor FP8 quantization in plain torch: the definition of bytes, scales and amaxes."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..formats import fp8
from ..formats.spec import QuantSpec, decode_quant


def quantize(
    x: Tensor,
    quant: str,
    scale: Optional[Tensor],
    slot: Optional[int],
    amax: Optional[Tensor],
    rowwise: bool,
    columnwise: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Tensor, Tensor]:
    """Quantize ``x`` [M, K] to FP8 bytes and, if asked for, their transpose.

    Args:
        quant: encoded ``QuantSpec``.
        scale: fp32 vector whose element ``slot`` is the scale (delayed scaling; else ignored).
        amax: fp32 [1] to take the place of ``max|x|``, or None.

    Returns:
        ``(row [M, K], col [K, Mp], scale_inv [1], amax [1])``; ``row`` and ``col`` are None if not
        asked for, Mp is M rounded up to 16 and the bytes beyond M are zero.
    """
    return quantize_values(
        x, decode_quant(quant), scale, slot, amax, rowwise, columnwise, may_clobber=False
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
) -> tuple[Optional[Tensor], Optional[Tensor], Tensor, Tensor]:
    """``quantize`` for a decoded spec; with ``may_clobber`` an fp32 ``x`` is used as scratch."""
    amax = fp8.amax_of(x) if amax is None else amax.clone()
    if spec.kind == "current":
        used_scale = fp8.scale_from_amax(amax, spec.fmt, spec.pow2, spec.eps)
    else:
        slot = slot or 0
        used_scale = scale[slot : slot + 1]
    row = col = None
    if rowwise or columnwise:
        if may_clobber and x.dtype == torch.float32:
            row = fp8.cast_to_fp8_(x.mul_(used_scale), spec.fmt)
        else:
            row = fp8.cast_to_fp8(x, used_scale, spec.fmt)
    if columnwise:
        col = fp8.transpose_bytes(row)
    return row if rowwise else None, col, used_scale.reciprocal(), amax


def dequantize(data: Tensor, scale_inv: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    """``codes * scale_inv`` computed in fp32 and rounded once to ``dtype``; shape of ``data``."""
    return fp8.dequantize_fp8(data, scale_inv, decode_quant(quant).fmt, dtype)


def fp8_matmul_operand(data: Tensor, quant: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The codes of ``data`` as exact fp32 (or bf16) values without scale, for an emulated GEMM."""
    return fp8.fp8_matmul_operand(data, decode_quant(quant).fmt, dtype)
