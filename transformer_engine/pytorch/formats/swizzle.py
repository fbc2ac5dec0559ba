# SPDX-License-Identifier: Apache-2.0
"""The order in which Blackwell's GEMMs read the block scales of MXFP8 and NVFP4.

Scales ``s[i][j]``, with ``j`` the index of a block along the contracted dimension, are cut into
tiles of 128 x 4, stored one after the other, row by row. Within one, the scales of the rows ``i``,
``i + 32``, ``i + 64`` and ``i + 96`` lie side by side, so that ``s[i][j]`` is found at

    ((i // 128) * (C // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4

(cuBLAS documentation, "1D block scaling factors layout"). Buffers keep their shape.
"""

from __future__ import annotations

from torch import Tensor


def swizzle_scales(scales: Tensor) -> Tensor:
    """Compact scales [R, C], R a multiple of 128 and C of 4, in GEMM order; same shape.

    Raises:
        ValueError: if the shape is not padded.
    """
    rows, columns = _checked(scales, 128, 4)
    tiles = scales.reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzle_scales(scales: Tensor) -> Tensor:
    """The inverse of ``swizzle_scales``."""
    rows, columns = _checked(scales, 128, 4)
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def swizzle_columnwise_scales(scales: Tensor) -> Tensor:
    """Columnwise scales of MXFP8, [C, R] with C a multiple of 4 and R of 128, in GEMM order.

    The bytes are those of the swizzled transpose, the shape stays.
    """
    _checked(scales, 4, 128)
    return swizzle_scales(scales.t()).view(scales.shape)


def unswizzle_columnwise_scales(scales: Tensor) -> Tensor:
    """The inverse of ``swizzle_columnwise_scales``."""
    blocks, columns = _checked(scales, 4, 128)
    return unswizzle_scales(scales.reshape(columns, blocks)).t().contiguous()


def _checked(scales: Tensor, row_multiple: int, column_multiple: int) -> tuple:
    rows, columns = scales.shape
    if rows % row_multiple or columns % column_multiple:
        raise ValueError(
            f"scales have shape {list(scales.shape)}; their order can be changed only with rows "
            f"padded to a multiple of {row_multiple} and columns to one of {column_multiple}. "
            "Pad them with zeros, as quantized_layout() describes."
        )
    return rows, columns
