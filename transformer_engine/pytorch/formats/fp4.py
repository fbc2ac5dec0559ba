# SPDX-License-Identifier: Apache-2.0
"""The 4-bit floating-point format E2M1.

Codes 0 to 7 are the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6; 8 to 15 are their negatives, -0 included.
Defined by the OCP microscaling (MX) formats specification 1.0, section 5.3.3. There is neither
infinity nor NaN. Codes are ``uint8`` tensors, and two of them make a byte.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .fp8 import _may_look_at_values

FP4_MAX = 6.0
_SIX = 0x40C00000  # bits of fp32 6
_ONE = 0x3F800000
_EXPONENT = 0x7F800000
_MINUS_INFINITY = -0x800000  # bits of fp32 -infinity as int32; bits above it are negative NaNs


def _magnitude(v: torch.Tensor) -> torch.Tensor:
    """Bits of ``min(|v|, 6)``, 6 for NaN; fresh memory."""
    return (v.view(torch.int32) & 0x7FFFFFFF).clamp_(max=_SIX)


def _with_sign(codes: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``codes`` with the sign bits of ``v``, in place; a NaN counts as positive."""
    negative = v.view(torch.int32) <= _MINUS_INFINITY
    return codes.bitwise_or_(negative.view(torch.uint8).bitwise_left_shift_(3))


def cast_to_fp4(v: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, shape of ``v``) of fp32 values: round to nearest even, saturating.

    The sign of a zero result is that of the value. A NaN becomes 6, code 7.
    """
    magnitude = _magnitude(v)
    # Adding a power of two whose last mantissa bit is the spacing of E2M1 at this magnitude lets
    # the addition round to that spacing, ties to even, and leaves the multiple in the last bits.
    # The spacing is 0.5 below 2, 1 below 4 and 2 above: 2^-1 times the power of two below, or 1.
    power = magnitude.bitwise_and(_EXPONENT).clamp_(min=_ONE).add_(22 << 23)
    magnitude.view(torch.float32).add_(power.view(torch.float32))
    # 1, 2 and 4 have the codes 2, 4 and 6, while they are the multiples 2, 2 and 2.
    codes = magnitude.sub_(power).add_(power.bitwise_right_shift_(22)).to(torch.uint8)
    # (exponent of `power`) << 1 is 298 for values below 2.
    return _with_sign(codes.sub_(298 % 256), v)


def stochastic_cast_to_fp4(v: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Codes of fp32 values, rounded up or down at random.

    The probability of the neighbour away from zero is the distance from the other in units of the
    spacing, to a resolution of 1/256: ``|v| + noise / 256 * spacing`` is rounded towards zero. The
    spacing is 0.5 for ``|v| < 2``, 1 below 4, and 2 above.

    Args:
        v: fp32 tensor.
        noise: uint8 tensor of the same shape, uniformly distributed.

    Returns:
        uint8 codes; saturating, a NaN becomes 6, and the sign is that of the value.
    """
    magnitude = _magnitude(v)
    power = magnitude.bitwise_and(_EXPONENT).clamp_(min=_ONE)
    spacing = power.view(torch.float32) * 0.5
    total = noise.float().mul_(1 / 256).mul_(spacing).add_(magnitude.view(torch.float32))
    multiple = total.div_(spacing).floor_()  # by a power of two: exact; 6 stays below 8
    codes = multiple.to(torch.int32).add_(power.sub_(_ONE).bitwise_right_shift_(22))
    return _with_sign(codes.to(torch.uint8), v)


def fp4_to_float(codes: torch.Tensor) -> torch.Tensor:
    """The fp32 values of codes (uint8, bits above the fourth are ignored)."""
    # s eem -> s 000ee m000000000: an fp16 with the same fields, whose bias is larger by 14.
    bits = codes.to(torch.int16)
    bits = ((bits & 7) << 9) | ((bits & 8) << 12)
    return bits.view(torch.float16).float().mul_(2.0**14)


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., C] as bytes [..., C / 2], C even: an even index is the low half of a byte."""
    # Flat first: a single row counts as contiguous whatever its stride.
    flat = codes.contiguous().reshape(-1)
    flat = flat.clone() if flat.storage_offset() % 2 else flat
    pairs = flat.view(torch.int16)  # low byte first
    pairs = (pairs | (pairs >> 4)).to(torch.uint8)
    return pairs.view(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_fp4(data: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_fp4``: codes [..., 2 C] of bytes [..., C]."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def packed_fp4_to_float(data: torch.Tensor) -> torch.Tensor:
    """The fp32 values [..., 2 C] of packed codes [..., C]."""
    if not _may_look_at_values(data):
        return fp4_to_float(unpack_fp4(data))
    # A pair of values moves as one 64-bit word.
    words = _pair_table().index_select(0, data.reshape(-1).int())
    return words.view(torch.float32).view(*data.shape[:-1], 2 * data.shape[-1])


@lru_cache(maxsize=None)
def _pair_table() -> torch.Tensor:
    """The two values of each byte as one double-sized word, on the CPU."""
    with torch.inference_mode(False):
        codes = unpack_fp4(torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8))
        return fp4_to_float(codes).view(torch.int64)
