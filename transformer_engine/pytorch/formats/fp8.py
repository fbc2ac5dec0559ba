# SPDX-License-Identifier: Apache-2.0
"""The 8-bit floating-point formats E4M3 and E5M2 with one fp32 scale per tensor.

Formats: "FP8 Formats for Deep Learning" (Micikevicius et al., 2022, arXiv:2209.05433) and the OCP
8-bit floating point specification. E4M3 is the variant without infinities (``float8_e4m3fn``).
Bytes are ``uint8`` tensors everywhere; the float8 dtypes of torch appear in this file only.

A quantized value is ``q = saturate(round(x * scale))`` and stands for ``q * scale_inv`` with
``scale_inv = 1 / scale``; rounding is to nearest even.
"""

from __future__ import annotations

import torch

from .layout import padded_rows

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
FP8_TORCH_DTYPE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FLOAT32_MAX = torch.finfo(torch.float32).max


def _may_look_at_values(x: torch.Tensor) -> bool:
    """Whether a Python branch may depend on values: never on an accelerator, which would stall."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest absolute value of ``x`` as an fp32 tensor of shape [1].

    A NaN element is ignored, an infinite one gives infinity, an empty tensor gives 0. The value is
    exact: it is found in the dtype of ``x`` and then widened.
    """
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    if _may_look_at_values(x):
        low, high = torch.aminmax(x)
        amax = torch.maximum(high, -low).abs().float().view(1)
        if not torch.isnan(amax):
            return amax
    return torch.where(torch.isnan(x), 0.0, x).abs().amax().float().view(1)


def scale_from_amax(
    amax: torch.Tensor,
    fmt: str,
    pow2: bool = False,
    eps: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> torch.Tensor:
    """Quantization scale that maps ``amax`` to the largest finite value of the format.

    Args:
        amax: fp32 tensor of any shape, non-negative.
        fmt: ``"e4m3"`` or ``"e5m2"``.
        pow2: clear the mantissa of the scale (round towards zero to a power of two).
        eps: smaller amaxes are raised to this value.
        value_for_inf: the scale where the quotient overflows fp32 (amax below about 1e-36).

    Returns:
        fp32 tensor of the shape of ``amax``: ``fp8_max / amax`` rounded to nearest, and 1 where
        the amax is 0, infinite or NaN.
    """
    amax = torch.where(amax < eps, eps, amax)
    # A true division: `number / tensor` would be reciprocal-then-multiply, which rounds twice.
    scale = torch.div(torch.full_like(amax, FP8_MAX[fmt]), amax)
    scale = torch.where(torch.isinf(scale), value_for_inf, scale)
    if pow2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(amax) & (amax != 0), scale, 1.0)


def cast_to_fp8_(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """Bytes of fp32 ``values``, round to nearest even, saturating; clobbers ``values``.

    Values beyond the largest finite one, infinities included, become it. A NaN stays a NaN code
    (of either sign). The sign of zero is kept.
    """
    limit = FP8_MAX[fmt]
    # Without the clamp E5M2 would overflow to infinity, and what E4M3 does is up to the version.
    return values.clamp_(-limit, limit).to(FP8_TORCH_DTYPE[fmt]).view(torch.uint8)


def cast_to_fp8(x: torch.Tensor, scale: torch.Tensor, fmt: str) -> torch.Tensor:
    """Bytes (uint8, shape of ``x``) of ``x * scale``, the product in fp32; see ``cast_to_fp8_``."""
    scaled = x * scale if x.dtype == torch.float32 else x.float().mul_(scale)
    return cast_to_fp8_(scaled, fmt)


def codes_to_float(data: torch.Tensor, fmt: str) -> torch.Tensor:
    """The fp32 values of FP8 bytes, without any scale; exact, NaN codes become NaN.

    On the CPU the bits are moved into place by integer operations: this is several times faster
    than torch's own conversion, which works element by element.
    """
    if not _may_look_at_values(data):
        return data.view(FP8_TORCH_DTYPE[fmt]).to(torch.float32)
    if fmt == "e5m2":  # the upper byte of fp16
        return data.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
    if data.numel() and int((data & 0x7F).amax()) == 0x7F:
        # The shift below would read the two NaN codes as 480.
        return data.view(FP8_TORCH_DTYPE[fmt]).to(torch.float32)
    # s eeee mmm -> s 0eeee mmm0000000: an fp16 with the same fields, whose bias is larger by 8.
    # Sign extension puts the sign at bit 15 and a copy of it at bit 14, which the mask removes.
    bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4001)
    return bits.view(torch.float16).float().mul_(256.0)


def fp8_matmul_operand(
    data: torch.Tensor, fmt: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """FP8 bytes as values (without scale) in ``dtype``, for a GEMM that multiplies these instead.

    fp32, bf16 and fp16 all represent every code exactly.
    """
    if dtype != torch.float32 and not _may_look_at_values(data):
        return data.view(FP8_TORCH_DTYPE[fmt]).to(dtype)
    return codes_to_float(data, fmt).to(dtype)


def dequantize_fp8(
    data: torch.Tensor, scale_inv: torch.Tensor, fmt: str, dtype: torch.dtype
) -> torch.Tensor:
    """``round(codes * scale_inv)`` to ``dtype``, the product in fp32; shape of ``data``."""
    return codes_to_float(data, fmt).mul_(scale_inv).to(dtype)


def transpose_bytes(data: torch.Tensor) -> torch.Tensor:
    """Byte transpose [K, Mp] of [M, K], Mp = ``padded_rows(M)``, the bytes beyond M being zero.

    Zero bytes are zeros in both formats, so a GEMM may contract over all of Mp.
    """
    rows, cols = data.shape
    length = padded_rows(rows)
    out = torch.empty(cols, length, dtype=torch.uint8, device=data.device)
    if rows != length:
        out[:, rows:].zero_()
    if _has_whole_words(data):
        # Moving eight bytes at a time and sorting them afterwards halves the time on a CPU.
        # Flat first: a single row counts as contiguous whatever its stride.
        words = data.reshape(-1).view(torch.int64).view(rows, cols // 8)
        words = words.t().contiguous().view(-1).view(torch.uint8)
        eight_columns = words.view(cols // 8, rows, 8).transpose(1, 2)
        out.view(cols // 8, 8, length)[:, :, :rows].copy_(eight_columns)
    else:
        out[:, :rows].copy_(data.t())
    return out


def _has_whole_words(data: torch.Tensor) -> bool:
    """Whether the rows of ``data`` can be read as 64-bit words, on the CPU."""
    return (
        data.device.type == "cpu"
        and data.shape[1] % 8 == 0
        and data.numel() > 0
        and data.is_contiguous()
        and data.storage_offset() % 8 == 0
    )
