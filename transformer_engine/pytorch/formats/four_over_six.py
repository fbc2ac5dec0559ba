# SPDX-License-Identifier: Apache-2.0
"""NVFP4 whose blocks choose whether their largest value becomes 6 or 4.

"Four Over Six: More Accurate NVFP4 Quantization with Adaptive Block Scaling" (2025,
arXiv:2512.02010). E2M1 has no 5, so values just below the largest are coarse if that becomes 6.
Each block is quantized both ways, and the one with the smaller error is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import divide
from .fp4 import FP4_MAX, cast_to_fp4, fp4_to_float
from .fp8 import codes_to_float
from .layout import NVFP4_BLOCK
from .nvfp4_scales import cast_scales_, encode_scale, spread, value_multiplier
from .spec import QuantSpec


def choose_four_or_six(
    blocks: Tensor, dim: int, amaxes: Tensor, amax: Tensor, spec: QuantSpec
) -> tuple[Tensor, Tensor]:
    """Quantize blocks of 16 values.

    Args:
        blocks: fp32, [R, B, 16] with ``dim`` 2 or [B, 16, C] with ``dim`` 1.
        amaxes: fp32, of the blocks (of the square blocks, if ``spec.dim`` is 2): [R, B] or [B, C].
        amax: fp32, the global amax, of a shape that broadcasts to that of ``amaxes``.

    Returns:
        Codes of the shape of ``blocks`` and E4M3 bytes of the shape of ``amaxes``. Errors that are
        equal, or no numbers, choose 6.
    """
    encode = encode_scale(amax, spec.e4m3_max)
    base = divide(amaxes, FP4_MAX).mul_(encode)
    decode = encode.reciprocal()
    scales4, scales6 = cast_scales_(base * 1.5), cast_scales_(base)
    codes4, codes6 = (
        cast_to_fp4(blocks * value_multiplier(scales, decode).unsqueeze(dim))
        for scales in (scales4, scales6)
    )
    error4 = _error(blocks, dim, codes4, scales4, amax, spec)
    error6 = _error(blocks, dim, codes6, scales6, amax, spec)
    four = error4 < error6
    return (
        torch.where(four.unsqueeze(dim), codes4, codes6),
        torch.where(four, scales4, scales6),
    )


def _error(
    blocks: Tensor, dim: int, codes: Tensor, scales: Tensor, amax: Tensor, spec: QuantSpec
) -> Tensor:
    """Absolute or squared errors of each block, added up in the order of its values.

    Those of square blocks are the sums of their 16 rows (columns), given to all of these.
    """
    values = fp4_to_float(codes).mul_(codes_to_float(scales, "e4m3").unsqueeze(dim))
    values.mul_(amax.expand(scales.shape).unsqueeze(dim))
    errors = divide(values, FP4_MAX * spec.e4m3_max).sub_(blocks)
    errors = errors.abs_() if spec.four_over_six == "mae" else errors.square_()
    total = errors.select(dim, 0).clone()
    for index in range(1, NVFP4_BLOCK):
        total += errors.select(dim, index)
    # Across a square runs, in the shape of the scales, the dimension that blocks do not take.
    return _square_error(total, 2 - dim) if spec.dim == 2 else total


def _square_error(errors: Tensor, dim: int) -> Tensor:
    """Sums of 16 entries along ``dim``, as a tree of distances 8, 4, 2, 1, given to all of them."""
    sums = errors.unflatten(dim, (errors.shape[dim] // NVFP4_BLOCK, NVFP4_BLOCK))
    for distance in (8, 4, 2, 1):
        sums = sums.narrow(dim + 1, 0, distance) + sums.narrow(dim + 1, distance, distance)
    return spread(sums.squeeze(dim + 1), dim)
