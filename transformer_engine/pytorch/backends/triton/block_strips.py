# SPDX-License-Identifier: Apache-2.0
"""Quantization to FP8 with scales of 128 values (kind "block") or of squares of 128 by 128.

Bytes moved per value that is read as bf16, scales aside: 2 and one for each orientation. Producers
read instead what they make values from, once (a norm has read it before, for the statistics).

A tile of 128 x 128, which holds whole blocks of both orientations, is made in four strips. Strip i
holds row i of every four adjacent rows: bytes that are adjacent in the transpose then sit in one
thread (``tiles.py``). Rows are complete in a strip, and written when it is made; of the columns
only the rounded values and the largest magnitudes are kept until all strips are there. That holds
few registers, and strips are loaded AHEAD of their turn. ``block_scaled.strip_options`` says how
many, and with how many warps.
"""

# One kernel takes what any source needs.
# pylint: disable=too-many-locals,too-many-arguments,too-many-positional-arguments
# pylint: disable=comparison-with-itself

from __future__ import annotations

import triton
import triton.language as tl

from .block_tiles import block_scale, largest_along, store_line, store_square_scale
from .common import cast_to_fp8, maximum_dropping_nan
from .launch import launched
from .producers import load_source, make_tiles, tile_position
from .tiles import cast_to_words, rows_of_quads, store_tile, store_words, widen


@triton.jit
def store_strip(
    v, y, row, row_scale, eps, rm, rn, kb, M, N, limit_n, FMT: tl.constexpr, POW2: tl.constexpr,
    LARGEST: tl.constexpr, WRITE_Y: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write a strip as it is and its rows' bytes and scales, as far as asked for."""
    if WRITE_Y:
        store_tile(y, v, rm, rn, N, M, limit_n)
    if ROW:
        u = widen(v)
        s, inverse = block_scale(largest_along(u, 1), eps, FMT, POW2, LARGEST)
        # The scales of one column of blocks form a line.
        store_line(row_scale, inverse, kb, rm, M, M)
        store_tile(row, cast_to_fp8(u * s[:, None], FMT), rm, rn, N, M, limit_n)


@triton.jit
def finish_strips(
    strips, rows, quads, sums, row, col, row_scale, col_scale, eps, tm, rn, kb, M, N, limit_n,
    BIAS_GRAD: tl.constexpr, FMT: tl.constexpr, POW2: tl.constexpr, LARGEST: tl.constexpr,
    DIM: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
):  # fmt: skip
    """Write what depends on all four strips."""
    if BIAS_GRAD:
        total = (widen(strips[0]) + widen(strips[1])) + (widen(strips[2]) + widen(strips[3]))
        tl.store(sums + tm * N + rn, tl.sum(total, 0), mask=rn < limit_n)
    if COL or DIM == 2:
        a = tl.abs(widen(strips[0]))
        a = tl.where(a == a, a, 0.0)
        for i in tl.static_range(1, 4):
            a = maximum_dropping_nan(a, tl.abs(widen(strips[i])))
        a = largest_along(a, 0)
        if DIM == 2:
            a = largest_along(a, 0)
        s, inverse = block_scale(a, eps, FMT, POW2, LARGEST)
        if DIM == 2:
            if ROW:
                store_square_scale(row_scale, inverse, tm, kb, tl.cdiv(N, 128))
                for i in tl.static_range(4):
                    q = cast_to_fp8(widen(strips[i]) * s, FMT)
                    store_tile(row, q, rows[i], rn, N, M, limit_n)
            if COL:
                store_square_scale(col_scale, inverse, kb, tm, tl.cdiv(M, 128))
        else:
            store_line(col_scale, inverse, tm, rn, limit_n, N)
            s = s[None, :]
        if COL:
            words = cast_to_words([widen(v) * s for v in strips], FMT)
            store_words(words, col, quads, rn, M, limit_n, 128)


@launched
@triton.jit(do_not_specialize=["M"])
def quantize_strips_kernel(
    x,
    dy,
    w,
    b,
    mean,
    rstd,
    limit,
    alpha,
    offset,
    y,
    sums,
    row,
    col,
    row_scale,
    col_scale,
    eps,
    M,
    F,
    SOURCE: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WRITE_Y: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    FMT: tl.constexpr,
    POW2: tl.constexpr,
    LARGEST: tl.constexpr,
    DIM: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One tile of [M, F] values. A gated gradient is [M, 2 F]: the tile in either half."""
    HALVES: tl.constexpr = SOURCE == "gradient" and GATED
    pid = tl.program_id(0)
    # After another pass the end of the input is in the L2 cache: begin there.
    tm, tn = tile_position(tl.num_programs(0) - 1 - pid if SOURCE == "norm" else pid, F, 128)
    quads = tm * 32 + tl.arange(0, 32)
    rows = rows_of_quads(quads)
    rn = tn * 128 + tl.arange(0, 128)
    N = F + F if HALVES else F
    eps = tl.cast(eps, tl.float32)
    loaded = ()
    for i in tl.static_range(AHEAD):
        loaded = loaded + (load_source(x, dy, rows[i], rn, M, F, SOURCE, GATED),)
    strips = ()
    seconds = ()
    for i in tl.static_range(4):
        if i + AHEAD < 4:
            loaded = loaded + (load_source(x, dy, rows[i + AHEAD], rn, M, F, SOURCE, GATED),)
        v, second = make_tiles(
            loaded[i], w, b, mean, rstd, limit, alpha, offset, rows[i], rn, M, F,
            x.dtype.element_ty,
            SOURCE, LAYER_NORM, HAS_BIAS, ZERO_CENTERED, False, ACT, GATED, CLAMPED,
        )  # fmt: skip
        store_strip(
            v, y, row, row_scale, eps, rows[i], rn, tn, M, N, F,
            FMT, POW2, LARGEST, WRITE_Y, ROW and DIM == 1,
        )  # fmt: skip
        strips = strips + (v,)
        if HALVES:
            store_strip(
                second, y, row, row_scale, eps, rows[i], F + rn, F // 128 + tn, M, N, N,
                FMT, POW2, LARGEST, WRITE_Y, ROW and DIM == 1,
            )  # fmt: skip
            seconds = seconds + (second,)
    finish_strips(
        strips, rows, quads, sums, row, col, row_scale, col_scale, eps, tm, rn, tn, M, N, F,
        BIAS_GRAD, FMT, POW2, LARGEST, DIM, ROW, COL,
    )  # fmt: skip
    if HALVES:
        finish_strips(
            seconds, rows, quads, sums, row, col, row_scale, col_scale, eps, tm, F + rn,
            F // 128 + tn, M, N, N, BIAS_GRAD, FMT, POW2, LARGEST, DIM, ROW, COL,
        )  # fmt: skip
