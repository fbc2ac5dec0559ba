# SPDX-License-Identifier: Apache-2.0
"""Tiles taken apart into the values of their blocks of 16, and the Hadamard transform of blocks.

Sixteen tiles hold value 0 to 15 of every block, along the rows or down the columns. All values of a
block then sit in one thread: its amax, its scale, its codes and the sum of its errors need no
exchange, and come in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import INTERPRETED, maximum_dropping_nan
from .tiles import load_tile, widen


@triton.jit
def split_blocks(v):
    """The 16 tiles v[:, :, b3, b2, b1, b0] of ``v [A, B, 2, 2, 2, 2]``, by increasing number."""
    even, odd = tl.split(v)
    b00, b10 = tl.split(even)
    b01, b11 = tl.split(odd)
    b000, b100 = tl.split(b00)
    b010, b110 = tl.split(b10)
    b001, b101 = tl.split(b01)
    b011, b111 = tl.split(b11)
    v0, v8 = tl.split(b000)
    v1, v9 = tl.split(b001)
    v2, v10 = tl.split(b010)
    v3, v11 = tl.split(b011)
    v4, v12 = tl.split(b100)
    v5, v13 = tl.split(b101)
    v6, v14 = tl.split(b110)
    v7, v15 = tl.split(b111)
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15


@triton.jit
def blocks_along_rows(v, BM: tl.constexpr, BN: tl.constexpr):
    """16 tiles [BM, BN / 16] of the tile [BM, BN]: columns 16 * j + 0 to 15."""
    return split_blocks(tl.reshape(v, [BM, BN // 16, 2, 2, 2, 2]))


@triton.jit
def blocks_down_columns(v, BM: tl.constexpr, BN: tl.constexpr):
    """16 tiles [BM / 16, BN] of the tile [BM, BN]: rows 16 * i + 0 to 15."""
    return split_blocks(tl.permute(tl.reshape(v, [BM // 16, 2, 2, 2, 2, BN]), [0, 5, 1, 2, 3, 4]))


@triton.jit
def load_blocks_along_rows(x, rm, first, M, N, BN: tl.constexpr):
    """16 fp32 tiles [rows, BN / 16] from memory: columns first + 16 * j + 0 to 15.

    A thread loads a block of 16-bit values in pieces of 16 bytes, so that nothing is exchanged.
    """
    j = first + 16 * tl.arange(0, BN // 16)
    mask = ((rm < M)[:, None] & (j < N)[None, :])[:, :, None]
    begin = rm[:, None, None] * N + j[None, :, None]
    out = ()
    for piece in tl.static_range(2):
        offsets = begin + (8 * piece + tl.arange(0, 8))[None, None, :]
        v = widen(tl.load(x + offsets, mask=mask, other=0))
        even, odd = tl.split(tl.reshape(v, [v.shape[0], BN // 16, 2, 2, 2]))
        v00, v10 = tl.split(even)
        v01, v11 = tl.split(odd)
        v0, v4 = tl.split(v00)
        v1, v5 = tl.split(v01)
        v2, v6 = tl.split(v10)
        v3, v7 = tl.split(v11)
        out = out + (v0, v1, v2, v3, v4, v5, v6, v7)
    return out


@triton.jit
def load_blocks_down_columns(x, first, rn, M, N, BM: tl.constexpr):
    """16 tiles [BM / 16, columns] from memory: rows first + 16 * i + 0 to 15."""
    rm = first + 16 * tl.arange(0, BM // 16)
    out = ()
    for i in tl.static_range(16):
        out = out + (load_tile(x, rm + i, rn, N, M, N),)
    return out


@triton.jit
def butterfly(v, D: tl.constexpr):
    """One stage of the Hadamard transform: sums and differences of tiles D apart."""
    out = ()
    for i in tl.static_range(16):
        if i & D:
            out = out + (v[i - D] - v[i],)
        else:
            out = out + (v[i] + v[i + D],)
    return out


@triton.jit
def round_to_bf16(a, b):
    """The fp32 tiles a and b with values rounded to bf16."""
    if INTERPRETED:
        a = a.to(tl.bfloat16).to(tl.float32)
        b = b.to(tl.bfloat16).to(tl.float32)
    else:
        # One conversion for two values; the compiler takes a slower instruction for single ones.
        bits_a, bits_b = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xFFFF0000;
            }""",
            "=r,=r,f,f",
            [a, b],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        a = bits_a.to(tl.float32, bitcast=True)
        b = bits_b.to(tl.float32, bitcast=True)
    return a, b


@triton.jit
def hadamard_transform(v, SIGN_MASK: tl.constexpr):
    """16 fp32 tiles transformed as ``formats.hadamard`` says, in its order of the sums."""
    u = ()
    for i in tl.static_range(16):
        if (SIGN_MASK >> i) & 1:
            u = u + (v[i] * -0.25,)
        else:
            u = u + (v[i] * 0.25,)
    u = butterfly(butterfly(butterfly(butterfly(u, 8), 4), 2), 1)
    out = ()
    for i in tl.static_range(0, 16, 2):
        out = out + round_to_bf16(u[i], u[i + 1])
    return out


@triton.jit
def largest_of_tiles(v):
    """Elementwise largest magnitude of 16 fp32 tiles, NaN ignored."""
    m = tl.zeros_like(v[0])
    for i in tl.static_range(16):
        m = maximum_dropping_nan(m, tl.abs(v[i]))
    return m
