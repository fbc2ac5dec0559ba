# SPDX-License-Identifier: Apache-2.0
"""Quantization of one tile to FP8 with scales of 128 (kind "block") or 32 values (MXFP8).

A tile ``v [BM, BN]`` has the dtype of the tensor and is zero outside of it; ``tm`` and ``tn`` count
tiles. Programs cover the rows and columns up to multiples of 128, so they also write the padding.
The numbers are those of ``formats.blockwise`` and ``formats.mxfp8``.
"""

# pylint: disable=comparison-with-itself

from __future__ import annotations

import triton
import triton.language as tl

from .common import INTERPRETED, cast_to_fp8, scale_from_amax
from .tiles import cast_to_words, store_tile, store_words, widen


@triton.jit
def reciprocal(v):
    """1 / v, correctly rounded; cheaper than the division."""
    if INTERPRETED:
        r = 1.0 / v
    else:
        r = tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )
    return r


@triton.jit
def largest_along(v, AXIS: tl.constexpr):
    """Largest magnitude of fp32 ``v`` along an axis, NaN ignored; 0 if all are NaN."""
    m = tl.max(tl.abs(v), AXIS)
    return tl.where(m == m, m, 0.0)


@triton.jit
def spread_rows(m, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr):
    """[R * S, C]: each row of m [R, C] S times."""
    return tl.reshape(tl.broadcast_to(m[:, None, :], [R, S, C]), [R * S, C])


@triton.jit
def spread_columns(m, R: tl.constexpr, C: tl.constexpr, S: tl.constexpr):
    """[R, C * S]: each element of m [R, C] S times."""
    return tl.reshape(tl.broadcast_to(m[:, :, None], [R, C, S]), [R, C * S])


@triton.jit
def rows_of_four(v, BM: tl.constexpr, BN: tl.constexpr):
    """Four tiles [BM / 4, BN] that hold row 0 to 3 of every four adjacent rows.

    Four bytes adjacent in the transpose then sit in one thread and move as one word (``tiles.py``).
    """
    v = tl.permute(tl.reshape(v, [BM // 4, 2, 2, BN]), [0, 3, 1, 2])
    even, odd = tl.split(v)
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


# ---------------------------------------------------------------------------------------------
# Kind "block"; a tile is 128 x 128


@triton.jit
def store_line(scales, s, line, rn, n, N):
    """scales[line, rn] = s for rn < n, and 0 up to the row length, N padded to a multiple of 4."""
    per_line = (N + 3) // 4 * 4
    tl.store(scales + line * per_line + rn, tl.where(rn < n, s, 0.0), mask=rn < per_line)


@triton.jit
def store_square_scale(scales, s, i, j, columns):
    """scales[i, j] = s; the last of the columns also writes zeros up to a multiple of 4."""
    per_line = (columns + 3) // 4 * 4
    c = j + tl.arange(0, 4)
    mask = (c == j) | ((j == columns - 1) & (c < per_line))
    tl.store(scales + i * per_line + c, tl.where(c == j, s, 0.0), mask=mask)


@triton.jit
def block_scale(amax, eps, FMT: tl.constexpr, POW2: tl.constexpr, LARGEST: tl.constexpr):
    """``scale_from_amax``, and its inverse."""
    if POW2:
        # Both formats have the largest value 1.75 * 2^n. The power of two in 1.75 * 2^n / (m * 2^e)
        # is 2^(n - e), or half of that if m > 1.75: what carries into the exponent in the sum.
        n: tl.constexpr = 8 if FMT == 1 else 15
        overflow: tl.constexpr = 142 if LARGEST < 1e38 else 254
        amax = tl.where(amax < eps, eps, amax)
        bits = amax.to(tl.int32, bitcast=True)
        exponent = 254 + n - ((bits + 0x1FFFFF) >> 23)
        exponent = tl.where(exponent > 254, overflow, exponent)
        exponent = tl.where((bits == 0) | (bits >= 0x7F800000), 127, exponent)
        s = (exponent << 23).to(tl.float32, bitcast=True)
        # The inverse of 2^127 is subnormal.
        bits = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
        inverse = bits.to(tl.float32, bitcast=True)
    else:
        s = scale_from_amax(amax, eps, FMT, POW2, LARGEST)
        inverse = reciprocal(s)
    return s, inverse


@triton.jit
def quantize_block_tile(
    v, row, col, row_scale, col_scale, eps, tm, tn, first, M, N, limit_n,
    FMT: tl.constexpr, POW2: tl.constexpr, LARGEST: tl.constexpr, DIM: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr,
):  # fmt: skip
    """``first``, a multiple of 128, is added to the tile's columns; they end at limit_n <= N."""
    B: tl.constexpr = 128
    rm = tm * B + tl.arange(0, B)
    rn = first + tn * B + tl.arange(0, B)
    kb = first // B + tn
    u = widen(v)
    eps = tl.cast(eps, tl.float32)
    if DIM == 2:
        amax = largest_along(largest_along(u, 1), 0)
        s, inverse = block_scale(amax, eps, FMT, POW2, LARGEST)
        row_s = s
        col_s = s
    if ROW:
        if DIM == 2:
            store_square_scale(row_scale, inverse, tm, kb, tl.cdiv(N, B))
        else:
            row_s, inverse = block_scale(largest_along(u, 1), eps, FMT, POW2, LARGEST)
            # The scales of one column of blocks form a line.
            store_line(row_scale, inverse, kb, rm, M, M)
            row_s = row_s[:, None]
        store_tile(row, cast_to_fp8(u * row_s, FMT), rm, rn, N, M, limit_n)
    if COL:
        if DIM == 2:
            store_square_scale(col_scale, inverse, kb, tm, tl.cdiv(M, B))
        else:
            col_s, inverse = block_scale(largest_along(u, 0), eps, FMT, POW2, LARGEST)
            store_line(col_scale, inverse, tm, rn, limit_n, N)
            col_s = col_s[None, :]
        quads = tm * (B // 4) + tl.arange(0, B // 4)
        parts = [widen(part) * col_s for part in rows_of_four(v, B, B)]
        store_words(cast_to_words(parts, FMT), col, quads, rn, M, limit_n, B)


# ---------------------------------------------------------------------------------------------
# MXFP8; a tile is a multiple of 32 in both dimensions


@triton.jit
def e8m0_from_float(v):
    """int32 bytes of fp32 v >= 0, no NaN; the rule is ``formats.e8m0.e8m0_from_float``."""
    bits = v.to(tl.int32, bitcast=True)
    rounded = (tl.minimum(bits, 0x7F000000) + 0x7FFFFF) >> 23
    return tl.where(bits <= 0x00400000, 0, rounded)


@triton.jit
def e8m0_multiplier(e):
    """2^(127 - e) as fp32, for e up to 254."""
    return tl.where(e == 254, 0x00400000, (254 - e) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_offset(i, j, columns, SWIZZLED: tl.constexpr):
    """Where the scale (i, j) lies in a buffer of ``columns`` (a multiple of 4) per row.

    i counts along the kept, j along the contracted dimension. See ``formats.swizzle``.
    """
    if SWIZZLED:
        tile = (i // 128) * (columns // 4) + j // 4
        offset = tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    else:
        offset = i * columns + j
    return offset


@triton.jit
def quantize_mxfp8_tile(
    v, row, col, row_scale, col_scale, tm, tn, first, M, N, limit_n,
    FMT: tl.constexpr, DIM: tl.constexpr, SWIZZLED: tl.constexpr, ROW: tl.constexpr,
    COL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """``first``, a multiple of 32, is added to the tile's columns; they end at limit_n <= N."""
    S: tl.constexpr = 32
    # fp32 of 1 / 448 and of 1 / 57344.
    inverse: tl.constexpr = 0.002232142956927419 if FMT == 1 else 1.743861685099546e-05
    rm = tm * BM + tl.arange(0, BM)
    rn = first + tn * BN + tl.arange(0, BN)
    u = widen(v)
    # Columns that another half of the tensor owns are zero in this one.
    owned = tl.where(limit_n == N, tl.cdiv(N, 128) * 128, limit_n)
    if ROW or DIM == 2:
        blocks = tl.reshape(u, [BM, BN // S, S])
        a = largest_along(blocks, 2)
        if DIM == 2:
            square = largest_along(tl.reshape(a, [BM // S, S, BN // S]), 1)
            a = spread_rows(square, BM // S, BN // S, S)
    if ROW:
        e = e8m0_from_float(a * inverse)
        q = cast_to_fp8(blocks * e8m0_multiplier(e)[:, :, None], FMT)
        store_tile(row, tl.reshape(q, [BM, BN]), rm, rn, N, M, limit_n)
        kb = first // S + tn * (BN // S) + tl.arange(0, BN // S)
        columns = tl.cdiv(tl.cdiv(N, S), 4) * 4
        offsets = scale_offset(rm[:, None], kb[None, :], columns, SWIZZLED)
        mask = (kb < columns) & (kb * S < owned)
        # Rows beyond M may belong to a square block.
        e = tl.where((rm < M)[:, None], e, 0).to(tl.uint8)
        tl.store(row_scale + offsets, e, mask=mask[None, :])
    if COL:
        blocks = tl.reshape(u, [BM // S, S, BN])
        if DIM == 2:
            a = spread_columns(square, BM // S, BN // S, S)
        else:
            a = largest_along(blocks, 1)
        e = e8m0_from_float(a * inverse)
        q = cast_to_fp8(blocks * e8m0_multiplier(e)[:, None, :], FMT)
        padded = tl.cdiv(M, S) * S
        store_tile(col, tl.reshape(q, [BM, BN]), rm, rn, N, padded, limit_n)
        mb = tm * (BM // S) + tl.arange(0, BM // S)
        if SWIZZLED:
            rows = tl.cdiv(tl.cdiv(M, S), 4) * 4
            offsets = scale_offset(rn[None, :], mb[:, None], rows, SWIZZLED)
        else:
            offsets = mb[:, None] * (tl.cdiv(N, 128) * 128) + rn[None, :]
        tl.store(col_scale + offsets, e.to(tl.uint8), mask=(rn < owned)[None, :])
