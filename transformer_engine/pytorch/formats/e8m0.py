# SPDX-License-Identifier: Apache-2.0
"""E8M0, the 8-bit format of block scales: byte ``e`` is the power of two ``2^(e-127)``, 255 is NaN.

Defined by the OCP microscaling (MX) formats specification 1.0, section 5.4. Bytes are ``uint8``.
"""

from __future__ import annotations

import torch

_INFINITY = 0x7F800000  # bits of fp32 infinity; bits above are NaNs
_LARGEST_POWER = 0x7F000000  # bits of 2^127
_SMALLEST_POWER = 0x00400000  # bits of 2^-127, a subnormal number


def e8m0_from_float(v: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below ``v``, saturating.

    Args:
        v: fp32 tensor of any shape, not negative.

    Returns:
        uint8 tensor of the same shape: 0 up to 2^-127 (zero included), 254 above 2^126 (infinity
        included), 255 for NaN.
    """
    bits = v.view(torch.int32) & 0x7FFFFFFF  # a NaN may have a sign
    # Adding a full mantissa carries into the exponent unless the mantissa is zero.
    exponent = (bits.clamp(max=_LARGEST_POWER) + 0x7FFFFF) >> 23
    exponent.masked_fill_(bits <= _SMALLEST_POWER, 0)
    return exponent.masked_fill_(bits > _INFINITY, 255).to(torch.uint8)


def e8m0_multiplier(e: torch.Tensor) -> torch.Tensor:
    """``2^(127-e)`` as fp32, what values are multiplied by when they are quantized; NaN for 255."""
    bits = (254 - e.to(torch.int32)) << 23
    return _power(bits, e == 254, e == 255)


def e8m0_to_float(e: torch.Tensor) -> torch.Tensor:
    """``2^(e-127)`` as fp32, what a scale byte stands for; NaN for 255."""
    bits = e.to(torch.int32) << 23
    return _power(bits, e == 0, e == 255)


def _power(bits: torch.Tensor, smallest: torch.Tensor, nan: torch.Tensor) -> torch.Tensor:
    """fp32 with these bits, but 2^-127 and NaN where said."""
    bits.masked_fill_(smallest, _SMALLEST_POWER).masked_fill_(nan, 0x7FC00000)
    return bits.view(torch.float32)
