# SPDX-License-Identifier: Apache-2.0
"""The GEMM leaf: torch's matrix multiplications, and the emulation where hardware has no FP8 GEMM.

All functions share one signature. Layouts are written for row-major operands ``a`` and ``b``:

* ``TN``: ``a [M, K]``, ``b [N, K]`` -> ``a @ b^T (+ bias)``  (fprop, and every quantized GEMM)
* ``NN``: ``a [M, N]``, ``b [N, K]`` -> ``a @ b``  (dgrad)
* ``NT``: ``a [M, N]``, ``b [M, K]`` -> ``a^T @ b``  (wgrad)

Accumulation is in fp32 and the result is rounded once to ``out_dtype``.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..formats.spec import decode_quant
from . import reference

_TORCH_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def plain_gemm(
    a: Tensor,
    b: Tensor,
    bias: Optional[Tensor],
    a_scale_inv: Optional[Tensor],
    b_scale_inv: Optional[Tensor],
    a_quant: str,
    b_quant: str,
    layout: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """High-precision operands: ``torch.mm`` / ``torch.addmm``."""
    del a_scale_inv, b_scale_inv, a_quant, b_quant, fast_accum
    if layout == "TN":
        b = b.t()
    elif layout == "NT":
        a = a.t()
    y = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return y if y.dtype == out_dtype else y.to(out_dtype)


def scaled_gemm(
    a: Tensor,
    b: Tensor,
    bias: Optional[Tensor],
    a_scale_inv: Optional[Tensor],
    b_scale_inv: Optional[Tensor],
    a_quant: str,
    b_quant: str,
    layout: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """Per-tensor FP8 operands (uint8 bytes) on FP8 tensor cores through ``torch._scaled_mm``."""
    del layout
    rows, columns = a.shape[0], b.shape[0]
    if rows == 0 or a.shape[1] == 0:
        return _empty_contraction(a, rows, columns, bias, out_dtype)
    # cuBLASLt adds no bias to a float32 result.
    epilogue_bias = bias if out_dtype is not torch.float32 else None
    if epilogue_bias is not None and epilogue_bias.dtype != out_dtype:
        epilogue_bias = epilogue_bias.to(out_dtype)
    y = torch._scaled_mm(
        a.view(_TORCH_FP8[decode_quant(a_quant).fmt]),
        b.view(_TORCH_FP8[decode_quant(b_quant).fmt]).t(),
        a_scale_inv,
        b_scale_inv,
        bias=epilogue_bias,
        out_dtype=out_dtype,
        use_fast_accum=fast_accum,
    )
    if bias is not None and epilogue_bias is None:
        y += bias
    return y


def dequantized_gemm(
    a: Tensor,
    b: Tensor,
    bias: Optional[Tensor],
    a_scale_inv: Optional[Tensor],
    b_scale_inv: Optional[Tensor],
    a_quant: str,
    b_quant: str,
    layout: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """FP8 operands where no FP8 GEMM exists: multiply the exactly decoded codes, then scale.

    Every FP8 code is a bf16 (and an fp32) number, so the products are those of FP8 hardware; only
    the order of the fp32 additions differs.
    """
    del layout, fast_accum
    rows, columns = a.shape[0], b.shape[0]
    depth = min(a.shape[1], b.shape[1])
    if rows == 0 or depth == 0:
        return _empty_contraction(a, rows, columns, bias, out_dtype)
    # One operand may be padded with zero bytes along the contraction.
    a_codes = reference.fp8_matmul_operand(a[:, :depth], a_quant)
    b_codes = reference.fp8_matmul_operand(b[:, :depth], b_quant)
    y = torch.mm(a_codes.float(), b_codes.float().t())
    y *= a_scale_inv * b_scale_inv
    if bias is not None:
        y += bias
    return y.to(out_dtype)


def _empty_contraction(
    like: Tensor, rows: int, columns: int, bias: Optional[Tensor], out_dtype: torch.dtype
) -> Tensor:
    """Result of a product over nothing: zeros (plus the bias)."""
    y = torch.zeros((rows, columns), dtype=out_dtype, device=like.device)
    return y if bias is None else y + bias.to(out_dtype)
