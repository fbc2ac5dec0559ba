# SPDX-License-Identifier: Apache-2.0
"""Tiles of the Triton kernels: their indices, loads, and stores in one or both orientations.

Bytes are never transposed. A tile that is stored in both orientations is computed as four
interleaved sub-tiles: row i of every quad of adjacent rows belongs to sub-tile i. Four bytes that
are adjacent in the transpose then sit in one thread and move as one 32-bit word. Moving single
bytes between threads takes four times as many shared-memory operations, and Triton 3.6 stored wrong
bytes on Hopper where it put them together again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import INTERPRETED, cast_to_fp8


@triton.jit
def tile_rows_and_columns(tile, N, BM: tl.constexpr, BN: tl.constexpr):
    """Row and column indices (int64) of tile number ``tile``, counted along the columns first."""
    across = tl.cdiv(N, BN)
    rm = (tile // across).to(tl.int64) * BM + tl.arange(0, BM)
    rn = (tile % across).to(tl.int64) * BN + tl.arange(0, BN)
    return rm, rn


@triton.jit
def rows_of_quads(quads):
    """Row indices of the four sub-tiles of a tile, 4 * quads + 0 to 3.

    Written so that no sub-tile looks better aligned than another if a row has an odd length: the
    compiler would give each its own layout, and convert between them.
    """
    last = 4 * quads + 3
    return last ^ 3, last ^ 2, last ^ 1, last


@triton.jit
def load_tile(x, rm, rn, stride, M, N):
    """Elements of rows rm and columns rn < N, zero outside."""
    mask = (rm < M)[:, None] & (rn < N)[None, :]
    return tl.load(x + rm[:, None] * stride + rn[None, :], mask=mask, other=0)


@triton.jit
def store_tile(x, v, rm, rn, stride, M, N):
    """Store rows rm and columns rn < N."""
    mask = (rm < M)[:, None] & (rn < N)[None, :]
    tl.store(x + rm[:, None] * stride + rn[None, :], v, mask=mask)


@triton.jit
def widen_single(v):
    """``widen`` for bf16 tiles that were taken apart: of pairs, the compiler moves the halves."""
    if v.dtype == tl.bfloat16:
        bits = v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        w = bits.to(tl.float32, bitcast=True)
    else:
        w = v.to(tl.float32)
    return w


@triton.jit
def widen(v):
    """fp32 of ``v``, exactly; an interpreter converts bf16 by a shift without error."""
    if v.dtype != tl.bfloat16:
        w = v.to(tl.float32)
    elif INTERPRETED:
        bits = v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        w = bits.to(tl.float32, bitcast=True)
    else:
        # One instruction a value; the compiler moves every second one before it shifts it.
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=r,=r,r",
            [v],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        w = bits.to(tl.float32, bitcast=True)
    return w


@triton.jit
def pack_bytes(q):
    """32-bit words whose byte i is that of the tile ``q[i]``, bytes that were loaded."""
    a, b, c, d = [u.to(tl.uint32) for u in q]
    if INTERPRETED:
        words = a | (b << 8) | (c << 16) | (d << 24)
    else:
        # In assembly, lest LLVM rebuilds the words from vectors of bytes with undefined lanes.
        words = tl.inline_asm_elementwise(
            """{
            .reg .b32 lo, hi;
            prmt.b32 lo, $1, $2, 0x0040;
            prmt.b32 hi, $3, $4, 0x0040;
            prmt.b32 $0, lo, hi, 0x5410;
            }""",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def cast_to_words(v, FMT: tl.constexpr):
    """32-bit words whose byte i is the FP8 cast of the fp32 tile ``v[i]``.

    Two conversions and a move: no single byte is ever taken out of the result of a conversion,
    which came out wrong on Hopper.
    """
    if INTERPRETED:
        words = pack_bytes([cast_to_fp8(u, FMT) for u in v])
    elif FMT == 1:
        words = tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
            }""",
            "=r,f,f,f,f",
            [v[0], v[1], v[2], v[3]],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    else:
        words = tl.inline_asm_elementwise(
            """{
            .reg .b16 lo, hi;
            cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3;
            mov.b32 $0, {lo, hi};
            }""",
            "=r,f,f,f,f",
            [v[0], v[1], v[2], v[3]],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def store_words(words, col, quads, rn, M, N, ALIGNMENT: tl.constexpr = 16):
    """Store words of four rows each into the columnwise buffer, ``[N, padded M]`` bytes.

    They are zero in rows beyond M: the buffer is padded with them to a multiple of ALIGNMENT.
    """
    # Written as a multiple of 4, so that the compiler knows 16-byte stores to be aligned.
    per_row = (M + ALIGNMENT - 1) // ALIGNMENT * (ALIGNMENT // 4)
    col = col.to(tl.pointer_type(tl.uint32))
    store_tile(col, tl.trans(words), rn, quads, per_row, N, per_row)


@triton.jit
def store_fp8(
    v, row, col, quads, rn, row_stride, M, N, FMT: tl.constexpr, ROW: tl.constexpr,
    COL: tl.constexpr,
):  # fmt: skip
    """Cast the four scaled fp32 sub-tiles ``v`` and store them in one or both orientations.

    They are zero in rows beyond M. ``rn`` are columns of the buffers; N bounds them.
    """
    if ROW:
        rows = rows_of_quads(quads)
        for i in tl.static_range(4):
            store_tile(row, cast_to_fp8(v[i], FMT), rows[i], rn, row_stride, M, N)
    if COL:
        store_words(cast_to_words(v, FMT), col, quads, rn, M, N)
