# SPDX-License-Identifier: Apache-2.0
"""The GEMM leaf for MXFP8 and NVFP4 operands on Blackwell. Not run on hardware.

Signature, layouts and accumulation are those of ``cublas.py``. ``scaled_mm`` takes operands that
contract over their last dimension, with scales in the swizzled order: what MXFP8 keeps untransposed
is transposed here, and compact scales are swizzled here.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from ..formats.spec import decode_quant
from ..formats.swizzle import swizzle_columnwise_scales, swizzle_scales
from .cublas import TORCH_FP8, empty_contraction


def mxfp8_gemm(
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
    """MXFP8 operands: bytes with E8M0 scales of 32 values along the contraction."""
    del a_amax, b_amax, fast_accum
    a, a_scale = _mxfp8_operand(a, a_scale_inv, a_quant, layout == "NT")
    b, b_scale = _mxfp8_operand(b, b_scale_inv, b_quant, layout != "TN")
    if a.shape[0] == 0 or a.shape[1] == 0:
        return empty_contraction(a, a.shape[0], b.shape[0], bias, out_dtype)
    y = scaled_mm(
        a,
        b.t(),
        a_scale,
        ScalingType.BlockWise1x32,
        b_scale,
        ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=out_dtype,
    )
    return y if bias is None else y.add_(bias)


def _mxfp8_operand(data: Tensor, scale_inv: Tensor, quant: str, columnwise: bool):
    """``(data, scales)`` with the contracted dimension last and the scales swizzled."""
    spec = decode_quant(quant)
    if columnwise:
        scales = scale_inv if spec.swizzled else swizzle_columnwise_scales(scale_inv)
        data = data.t().contiguous()
    else:
        scales = scale_inv if spec.swizzled else swizzle_scales(scale_inv)
    return data.view(TORCH_FP8[spec.fmt]), scales.view(torch.float8_e8m0fnu).flatten()


def nvfp4_gemm(
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
    """NVFP4 operands: packed codes with E4M3 scales of 16 values along the contraction.

    The global scales multiply the fp32 result, so that scales per row work as well.
    """
    del layout, fast_accum
    rows, columns = a.shape[0], b.shape[0]
    depth = min(a.shape[1], b.shape[1])
    if rows == 0 or depth == 0:
        return empty_contraction(a, rows, columns, bias, out_dtype)
    y = scaled_mm(
        a[:, :depth].contiguous().view(torch.float4_e2m1fn_x2),
        b[:, :depth].contiguous().view(torch.float4_e2m1fn_x2).t(),
        _nvfp4_scales(a_scale_inv, a_quant),
        ScalingType.BlockWise1x16,
        _nvfp4_scales(b_scale_inv, b_quant),
        ScalingType.BlockWise1x16,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        output_dtype=torch.float32,
    )
    a_factor = a_amax * (1.0 / (6 * decode_quant(a_quant).e4m3_max))
    b_factor = b_amax * (1.0 / (6 * decode_quant(b_quant).e4m3_max))
    y *= a_factor.view(-1, 1) * b_factor
    if bias is not None:
        y += bias
    return y.to(out_dtype)


def _nvfp4_scales(scale_inv: Tensor, quant: str) -> Tensor:
    swizzled = scale_inv if decode_quant(quant).swizzled else swizzle_scales(scale_inv)
    return swizzled.view(torch.float8_e4m3fn).flatten()
