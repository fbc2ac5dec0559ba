# SPDX-License-Identifier: Apache-2.0
"""Scales of NVFP4: the one of a tensor, those of blocks, and what values are multiplied by.

In the notation of "Pretraining Large Language Models with NVFP4" (2025, arXiv:2509.25149), appendix
C. All of it is fp32 arithmetic, each operation rounded to nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import divide
from .fp4 import FP4_MAX
from .fp8 import FLOAT32_MAX, cast_to_fp8_, codes_to_float
from .layout import NVFP4_BLOCK


def encode_scale(amax: Tensor, e4m3_max: int = 448) -> Tensor:
    """The scale of a tensor (or of each row) that maps its ``amax`` to ``e4m3_max * 6``.

    1 for an amax that is zero or infinite; limited to the largest fp32 number.
    """
    # A NaN can only come from outside; it counts as tiny, as the minimum on a GPU drops NaNs.
    scale = divide(e4m3_max * FP4_MAX, amax).nan_to_num_(nan=FLOAT32_MAX, posinf=FLOAT32_MAX)
    return scale.masked_fill_((amax == 0) | (scale == 0), 1.0)


def cast_scales_(scales: Tensor) -> Tensor:
    """E4M3 bytes of non-negative fp32 scales of blocks; clobbers them."""
    return cast_to_fp8_(scales, "e4m3")


def value_multiplier(scales: Tensor, decode: Tensor) -> Tensor:
    """What the values of a block are multiplied by before they become codes, fp32.

    Args:
        scales: E4M3 bytes of blocks.
        decode: reciprocal of ``encode_scale``, of a shape that broadcasts.
    """
    return (codes_to_float(scales, "e4m3") * decode).reciprocal_().clamp_(max=FLOAT32_MAX)


def square_max(grid: Tensor, dim: int) -> Tensor:
    """Maximum over each 16 consecutive entries of a matrix along ``dim``, given to all of them."""
    return spread(grid.unflatten(dim, (-1, NVFP4_BLOCK)).amax(dim + 1), dim)


def spread(grid: Tensor, dim: int) -> Tensor:
    """Each entry of a matrix 16 times in a row along ``dim``."""
    return torch.repeat_interleave(grid, NVFP4_BLOCK, dim)
