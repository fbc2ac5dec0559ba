# SPDX-License-Identifier: Apache-2.0
"""The GEMM leaf on torch's own matrix multiplications.

All functions share one signature. Layouts are written for row-major operands ``a`` and ``b``:

* ``TN``: ``a [M, K]``, ``b [N, K]`` -> ``a @ b^T (+ bias)``  (fprop, and most quantized GEMMs)
* ``NN``: ``a [M, N]``, ``b [N, K]`` -> ``a @ b``  (dgrad)
* ``NT``: ``a [M, N]``, ``b [M, K]`` -> ``a^T @ b``  (wgrad)

Quantized operands whose columnwise buffers are transposed always come as ``TN``. MXFP8 does not
transpose: in ``NN`` the scales of ``b`` run along its columns, in ``NT`` those of both operands.

Accumulation is in fp32 and the result is rounded once to ``out_dtype``.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from ..formats.spec import QuantSpec, decode_quant

TORCH_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def plain_gemm(
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
    """High-precision operands: ``torch.mm`` / ``torch.addmm``."""
    del a_scale_inv, b_scale_inv, a_amax, b_amax, a_quant, b_quant, fast_accum
    if layout == "TN":
        b = b.t()
    elif layout == "NT":
        a = a.t()
    if out_dtype == torch.float32 and a.dtype != torch.float32:
        # The fp32 sums themselves, as weight gradients that are accumulated in fp32 want them.
        if a.is_cuda:
            y = torch.mm(a, b, out_dtype=torch.float32)
        else:
            y = torch.mm(a.float(), b.float())
        return y if bias is None else y.add_(bias)
    y = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return y if y.dtype == out_dtype else y.to(out_dtype)


def per_tensor_gemm(
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
    """Per-tensor FP8 operands (uint8 bytes) on FP8 tensor cores through ``torch._scaled_mm``."""
    del a_amax, b_amax, layout
    rows, columns = a.shape[0], b.shape[0]
    if rows == 0 or a.shape[1] == 0:
        return empty_contraction(a, rows, columns, bias, out_dtype)
    # cuBLASLt adds no bias to a float32 result.
    epilogue_bias = bias if out_dtype is not torch.float32 else None
    if epilogue_bias is not None and epilogue_bias.dtype != out_dtype:
        epilogue_bias = epilogue_bias.to(out_dtype)
    y = torch._scaled_mm(
        a.view(TORCH_FP8[decode_quant(a_quant).fmt]),
        b.view(TORCH_FP8[decode_quant(b_quant).fmt]).t(),
        a_scale_inv,
        b_scale_inv,
        bias=epilogue_bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )
    if bias is not None and epilogue_bias is None:
        y += bias
    return y


def block_gemm(
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
    """FP8 operands with scales of 128 values, on Hopper, through ``scaled_mm``."""
    del a_amax, b_amax, layout, fast_accum
    rows, columns = a.shape[0], b.shape[0]
    if rows == 0 or a.shape[1] == 0:
        return empty_contraction(a, rows, columns, bias, out_dtype)
    a_spec, b_spec = decode_quant(a_quant), decode_quant(b_quant)
    a_scale, a_kind = _block_scale(a_scale_inv, a_spec)
    b_scale, b_kind = _block_scale(b_scale_inv, b_spec)
    if rows % 4 and a_spec.dim == 1:
        # scaled_mm wants as many scales as rows, cuBLASLt scales in rows of whole 16 bytes.
        a = torch.nn.functional.pad(a, (0, 0, 0, -rows % 4))
    y = scaled_mm(
        a.view(TORCH_FP8[a_spec.fmt]),
        b.view(TORCH_FP8[b_spec.fmt]).t(),
        a_scale,
        a_kind,
        b_scale,
        b_kind,
        output_dtype=out_dtype,
    )
    y = y if y.shape[0] == rows else y[:rows].clone()
    return y if bias is None else y.add_(bias)


def _block_scale(scale_inv: Tensor, spec: QuantSpec):
    """Scales in the strides that ``scaled_mm`` wants, padding to multiples of 4 included."""
    kind = ScalingType.BlockWise1x128 if spec.dim == 1 else ScalingType.BlockWise128x128
    return scale_inv.t(), kind


def empty_contraction(
    like: Tensor, rows: int, columns: int, bias: Optional[Tensor], out_dtype: torch.dtype
) -> Tensor:
    """Result of a product over nothing: zeros (plus the bias)."""
    y = torch.zeros((rows, columns), dtype=out_dtype, device=like.device)
    return y if bias is None else y + bias.to(out_dtype)
