# SPDX-License-Identifier: Apache-2.0
"""Quantization of one tile to NVFP4, in both orientations by the same code.

The numbers are those of ``formats.nvfp4``, the random ones those of ``formats.philox``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .block_tiles import reciprocal, scale_offset
from .common import INTERPRETED
from .fp4_codes import fp4_word, stochastic_fp4_word
from .nvfp4_blocks import (
    blocks_along_rows,
    blocks_down_columns,
    hadamard_transform,
    largest_of_tiles,
    load_blocks_along_rows,
    load_blocks_down_columns,
)
from .nvfp4_scales import e4m3_code, encode_scale, four_or_six, share_in_square, value_multiplier
from .tiles import widen, widen_single


@triton.jit
def multiply_wide(a, B: tl.constexpr):
    """High and low word of uint32 a * B, by one instruction."""
    if INTERPRETED:
        product = a.to(tl.uint64) * B
        high = (product >> 32).to(tl.uint32)
        low = (product & 0xFFFFFFFF).to(tl.uint32)
    else:
        factor = tl.full(a.shape, B, tl.uint32)
        high, low = tl.inline_asm_elementwise(
            """{
            .reg .b64 product;
            mul.wide.u32 product, $2, $3;
            mov.b64 {$1, $0}, product;
            }""",
            "=r,=r,r,r",
            [a, factor],
            dtype=(tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    return high, low


@triton.jit
def noise_words(rng, block, stream):
    """Philox words of the blocks with these int64 numbers; see ``formats.philox``."""
    seed = tl.load(rng)
    offset = tl.load(rng + 1)
    c0 = (block & 0xFFFFFFFF).to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + (offset & 0xFFFFFFFF).to(tl.uint32)
    c3 = tl.zeros_like(c0) + tl.cast(stream, tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = multiply_wide(c0, 0xD2511F53)
        high2, low2 = multiply_wide(c2, 0xCD9E8D57)
        c0 = high2 ^ c1 ^ k0
        c1 = low2
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def quantize_blocks(
    v, amax, rng, block, stream, R: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr,
    DIM: tl.constexpr, STOCHASTIC: tl.constexpr, FOUR_SIX: tl.constexpr, E4M3_MAX: tl.constexpr,
    SCALAR: tl.constexpr,
):  # fmt: skip
    """uint32 scale bytes and uint64 packed codes, both [R, C], of blocks in 16 tiles [R, C].

    ``amax`` is the global one, a SCALAR or of a shape that broadcasts. AXIS is that along which 16
    neighbours form a square block.
    """
    b = largest_of_tiles(v)
    if DIM == 2:
        b = share_in_square(b, R, C, AXIS)
    encode = encode_scale(amax, E4M3_MAX)
    decode = reciprocal(encode)
    if FOUR_SIX != 0:
        code, r = four_or_six(
            v, b, encode, decode, amax, R, C, AXIS, DIM, FOUR_SIX, E4M3_MAX, SCALAR
        )
    else:
        code = e4m3_code(b * (encode * 0.1666666716337204))
        r = value_multiplier(code, decode)
    p = [u * r for u in v]
    if STOCHASTIC:
        n0, n1, n2, n3 = noise_words(rng, block, stream)
        low = stochastic_fp4_word(p[:8], n0, n1)
        high = stochastic_fp4_word(p[8:], n2, n3)
    else:
        low = fp4_word(p[:8])
        high = fp4_word(p[8:])
    return code, low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def store_scale_words(
    scales, code, i, first, words, limit, limit_i, SWIZZLED: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Store uint32 scale bytes ``code [R, C]`` four at a time.

    ``i`` are the indices of their rows, stored where below limit_i; ``first`` is the word of their
    first column in a row of ``words``, and those below ``limit`` are stored.
    """
    shift = 8 * tl.arange(0, 4)
    four = tl.sum(tl.reshape(code, [R, C // 4, 4]) << shift[None, None, :], 2)
    j = (first + tl.arange(0, C // 4))[None, :]
    offsets = scale_offset(i[:, None], j * 4, words * 4, SWIZZLED) // 4
    mask = (j < limit) & (i < limit_i)[:, None]
    tl.store(scales.to(tl.pointer_type(tl.uint32)) + offsets, four, mask=mask)


@triton.jit
def quantize_nvfp4_tile(
    v, x, row, col, row_scale, col_scale, row_amax, col_amax, rng, tm, tn, first, M, N, limit_n,
    IN_MEMORY: tl.constexpr, DIM: tl.constexpr, SWIZZLED: tl.constexpr, RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr, STOCHASTIC: tl.constexpr, ROW_SCALED: tl.constexpr,
    FOUR_SIX: tl.constexpr, E4M3_MAX: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Quantize ``v [BM, BN]``, of the dtype of the tensor, zero outside of it.

    With IN_MEMORY its values are those of ``x [M, N]`` and loaded from there, once for either
    orientation (the second time from a cache): that exchanges nothing between threads.
    Programs cover the rows and columns up to multiples of 128, so they also write the padding.
    ``first`` is added to the columns of the tile (a multiple of 16); they end at limit_n <= N. The
    amaxes are scalars, or with ROW_SCALED pointers to those of the rows and columns.
    """
    rm = tm * BM + tl.arange(0, BM)
    rn = first + tn * BN + tl.arange(0, BN)
    # Columns that another half of the tensor owns are zero in this one.
    owned = tl.where(limit_n == N, tl.cdiv(N, 128) * 128, limit_n)
    if ROW:
        R: tl.constexpr = BN // 16
        kb = (first // 16 + tn * R + tl.arange(0, R))[None, :]
        i = rm[:, None]
        if ROW_SCALED:
            a = tl.load(row_amax + rm, mask=rm < M, other=0.0)[:, None]
        else:
            a = row_amax
        if IN_MEMORY:
            blocks = load_blocks_along_rows(x, rm, tn * BN, M, N, BN)
        else:
            blocks = [widen_single(u) for u in blocks_along_rows(v, BM, BN)]
        code, words = quantize_blocks(
            blocks, a, rng, i * (N // 16) + kb, 0, BM, R, 0,
            DIM, STOCHASTIC, FOUR_SIX, E4M3_MAX, not ROW_SCALED,
        )  # fmt: skip
        words_of_row = row.to(tl.pointer_type(tl.uint64))
        tl.store(words_of_row + i * (N // 16) + kb, words, mask=(i < M) & (kb * 16 < limit_n))
        # Rows beyond M may belong to a square block.
        store_scale_words(
            row_scale, tl.where(i < M, code, 0), rm, first // 64 + tn * (R // 4), tl.cdiv(N, 64),
            tl.minimum(tl.cdiv(owned, 64), tl.cdiv(N, 64)), tl.cdiv(M, 128) * 128, SWIZZLED, BM, R,
        )  # fmt: skip
    if COL:
        G: tl.constexpr = BM // 16
        g = tm * G + tl.arange(0, G)
        if IN_MEMORY:
            blocks = [widen(u) for u in load_blocks_down_columns(x, tm * BM, rn, M, N, BM)]
        else:
            blocks = [widen_single(u) for u in blocks_down_columns(v, BM, BN)]
        if RHT:
            blocks = hadamard_transform(blocks, SIGN_MASK)
        if ROW_SCALED:
            a = tl.load(col_amax + rn, mask=rn < limit_n, other=0.0)[None, :]
        else:
            a = col_amax
        per_row = tl.cdiv(M, 32) * 2
        code, words = quantize_blocks(
            blocks, a, rng, rn[None, :] * per_row + g[:, None], 1, G, BN, 1,
            DIM, STOCHASTIC, FOUR_SIX, E4M3_MAX, not ROW_SCALED,
        )  # fmt: skip
        words_of_col = col.to(tl.pointer_type(tl.uint64))
        offsets = rn[:, None] * per_row + g[None, :]
        mask = (g < per_row)[None, :] & (rn < limit_n)[:, None]
        tl.store(words_of_col + offsets, tl.trans(words), mask=mask)
        code = tl.trans(tl.where((g * 16 < M)[:, None], code, 0))
        store_scale_words(
            col_scale, code, rn, tm * (G // 4), tl.cdiv(M, 64), tl.cdiv(M, 64), owned,
            SWIZZLED, BN, G,
        )  # fmt: skip
