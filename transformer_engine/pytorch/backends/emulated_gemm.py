# SPDX-License-Identifier: Apache-2.0
"""The GEMM leaf where the hardware has none for a format: multiply the decoded values.

Codes and block scales are decoded to fp32, or to bf16 on a GPU where bf16 holds them exactly; what
scales a whole tensor or row is applied to the fp32 result. The products are those of hardware that
has the format; only the order of the fp32 additions differs.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..formats import fp4, fp8
from ..formats.layout import NVFP4_BLOCK
from ..formats.spec import QuantSpec, decode_quant
from ..formats.swizzle import unswizzle_scales
from .cublas import empty_contraction
from .registry import Request, select


def dequantized_gemm(
    a: Tensor,
    b: Tensor,
    bias: Optional[Tensor],
    a_scale_inv: Optional[Tensor],
    b_scale_inv: Optional[Tensor],
    a_amax: Optional[Tensor],
    b_amax: Optional[Tensor],
    a_quant: str,
    b_quant: str,
    layout: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Quantized operands of any formats; see the module's docstring and ``cublas.py``."""
    del fast_accum
    a_values, a_factor = _decoded(a, a_scale_inv, a_amax, a_quant, layout == "NT")
    b_values, b_factor = _decoded(b, b_scale_inv, b_amax, b_quant, layout != "TN")
    if a_values.dtype != b_values.dtype:
        a_values, b_values = a_values.float(), b_values.float()
    # One operand may be padded with zeros along the contraction.
    if layout == "TN":
        depth = min(a_values.shape[1], b_values.shape[1])
        a_values, b_values = a_values[:, :depth], b_values[:, :depth].t()
    elif layout == "NT":
        depth = min(a_values.shape[0], b_values.shape[0])
        a_values, b_values = a_values[:depth].t(), b_values[:depth]
    rows, columns = a_values.shape[0], b_values.shape[1]
    if rows == 0 or a_values.shape[1] == 0:
        return empty_contraction(a, rows, columns, bias, out_dtype)
    if a_values.dtype == torch.float32:
        y = torch.mm(a_values, b_values)
    else:
        y = torch.mm(a_values, b_values, out_dtype=torch.float32)
    if a_factor is not None and b_factor is not None:
        y *= a_factor.view(-1, 1) * b_factor
    elif a_factor is not None:
        y *= a_factor.view(-1, 1)
    elif b_factor is not None:
        y *= b_factor
    if bias is not None:
        y += bias
    return y.to(out_dtype)


def _decoded(
    data: Tensor, scale_inv: Tensor, amax: Optional[Tensor], quant: str, columnwise: bool
) -> tuple[Tensor, Optional[Tensor]]:
    """``(values, factor)`` of an operand: factor is a scale, one per row, or None."""
    spec = decode_quant(quant)
    if spec.per_tensor:
        return fp8.fp8_matmul_operand(data, spec.fmt), scale_inv
    exact = spec.kind != "block" or spec.pow2
    dtype = torch.bfloat16 if data.is_cuda and exact else torch.float32
    if spec.kind == "nvfp4":
        return _nvfp4_values(data, scale_inv, spec, dtype), amax * (1.0 / (6 * spec.e4m3_max))
    run = select(Request("dequantize", data.device, data.dtype, quant)).run
    return run(data, scale_inv, amax, quant, columnwise, dtype), None


def _nvfp4_values(data: Tensor, scale_inv: Tensor, spec: QuantSpec, dtype: torch.dtype) -> Tensor:
    """Codes times block scales, without the global scale: exact in bf16 as well as in fp32."""
    if spec.swizzled:
        scale_inv = unswizzle_scales(scale_inv)
    rows, columns = data.shape[0], data.shape[1] * 2
    blocks = columns // NVFP4_BLOCK
    scales = fp8.codes_to_float(scale_inv[:rows, :blocks].contiguous(), "e4m3").to(dtype)
    codes = fp4.fp4_to_float(fp4.unpack_fp4(data)).to(dtype)
    return (codes.view(rows, blocks, NVFP4_BLOCK) * scales.unsqueeze(-1)).view(rows, columns)
