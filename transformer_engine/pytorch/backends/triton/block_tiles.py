# SPDX-License-Identifier: Apache-2.0
"""Scales of 128 values (kind "block"), and quantization of one tile to MXFP8.

A tile ``v [BM, BN]`` has the dtype of the tensor and is zero outside of it; ``tm`` and ``tn`` count
tiles. Programs cover the rows and columns up to multiples of 128, so they also write the padding.
The numbers are those of ``formats.blockwise`` and ``formats.mxfp8``.
"""

# pylint: disable=comparison-with-itself

from __future__ import annotations

import triton
import triton.language as tl

from .common import INTERPRETED, cast_to_fp8, scale_from_amax
from .tiles import store_tile, widen


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


# ---------------------------------------------------------------------------------------------
# Kind "block"; ``block_strips.py`` quantizes


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
