# SPDX-License-Identifier: Apache-2.0
"""Kernels that quantize to MXFP8 and NVFP4; ``block_scaled.py`` launches them.

One kernel makes a tile in one of several ways (``producers.py``) and quantizes it to one of the
formats, in one or both orientations. Only NVFP4 needs to know something of the whole tensor first,
its amaxes.
"""

# One kernel takes what any source and any format need.
# pylint: disable=too-many-locals,too-many-arguments,too-many-positional-arguments

from __future__ import annotations

import triton
import triton.language as tl

from .block_tiles import quantize_mxfp8_tile
from .common import maximum_dropping_nan, reduce_partials
from .launch import launched
from .nvfp4_blocks import blocks_down_columns, hadamard_transform, largest_of_tiles
from .nvfp4_tiles import quantize_nvfp4_tile
from .producers import grouped_tile_position, source_tiles, tile_position
from .tiles import load_tile, store_tile, widen


@triton.jit
def finish_tile(
    v, x, y, sums, row, col, row_scale, col_scale, row_amax, col_amax, rng, tm, tn, first, M, N,
    limit_n, IN_MEMORY: tl.constexpr, WRITE_Y: tl.constexpr, BIAS_GRAD: tl.constexpr,
    KIND: tl.constexpr, FMT: tl.constexpr, DIM: tl.constexpr, SWIZZLED: tl.constexpr,
    RHT: tl.constexpr, SIGN_MASK: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROW_SCALED: tl.constexpr, FOUR_SIX: tl.constexpr, E4M3_MAX: tl.constexpr, ROW: tl.constexpr,
    COL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write a tile as it is, its column sums and its quantized forms, as far as asked for."""
    if WRITE_Y or BIAS_GRAD:
        rm = tm * BM + tl.arange(0, BM)
        rn = first + tn * BN + tl.arange(0, BN)
        if WRITE_Y:
            store_tile(y, v, rm, rn, N, M, limit_n)
        if BIAS_GRAD:
            tl.store(sums + tm * N + rn, tl.sum(widen(v), 0), mask=rn < limit_n)
    if KIND == "mxfp8":
        quantize_mxfp8_tile(
            v, row, col, row_scale, col_scale, tm, tn, first, M, N, limit_n,
            FMT, DIM, SWIZZLED, ROW, COL, BM, BN,
        )  # fmt: skip
    else:
        quantize_nvfp4_tile(
            v, x, row, col, row_scale, col_scale, row_amax, col_amax, rng, tm, tn, first, M, N,
            limit_n, IN_MEMORY, DIM, SWIZZLED, RHT, SIGN_MASK, STOCHASTIC, ROW_SCALED, FOUR_SIX,
            E4M3_MAX, ROW, COL, BM, BN,
        )  # fmt: skip


@triton.jit
def global_amax(partials, n_partials, amax, leads, WRITE: tl.constexpr, BP: tl.constexpr):
    """The maximum of the partials, which the program that ``leads`` writes to ``amax``."""
    a = reduce_partials(partials, n_partials, BP)
    if WRITE:
        if leads:
            tl.store(amax, a)
    return a


@launched
@triton.jit(do_not_specialize=["n_row_partials", "n_col_partials", "M"])
def quantize_tiles_kernel(
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
    row_amax,
    col_amax,
    row_partials,
    n_row_partials,
    col_partials,
    n_col_partials,
    rng,
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
    KIND: tl.constexpr,
    FMT: tl.constexpr,
    DIM: tl.constexpr,
    SWIZZLED: tl.constexpr,
    UNROUNDED: tl.constexpr,
    RHT: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    FOUR_SIX: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    ROW_BP: tl.constexpr,
    COL_BP: tl.constexpr,
    IN_MEMORY: tl.constexpr,
    GROUP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of [M, F] values. A gated gradient is [M, 2 F]: the tile in either half."""
    pid = tl.program_id(0)
    row_a = row_amax
    col_a = col_amax
    if KIND == "nvfp4" and not ROW_SCALED:
        if ROW or not RHT:
            row_a = global_amax(row_partials, n_row_partials, row_amax, pid == 0, ROW, ROW_BP)
        if RHT and COL:
            col_a = global_amax(col_partials, n_col_partials, col_amax, pid == 0, True, COL_BP)
        elif COL:
            col_a = row_a
            if pid == 0:
                tl.store(col_amax, col_a)
    # After another pass the end of the input is in the L2 cache: begin there.
    SECOND: tl.constexpr = KIND == "nvfp4" or SOURCE == "norm"
    tile = tl.num_programs(0) - 1 - pid if SECOND else pid
    if GROUP > 1:
        tm, tn = grouped_tile_position(tile, M, F, GROUP, BM, BN)
    else:
        tm, tn = tile_position(tile, F, BN)
    rm = tm * BM + tl.arange(0, BM)
    rn = tn * BN + tl.arange(0, BN)
    if SOURCE == "load":
        # With IN_MEMORY the formats load for themselves, and the compiler drops this.
        v = load_tile(x, rm, rn, F, M, F)
        second = v
    else:
        # The loop turns once. Without it the compiler would make the tile again in every layout in
        # which it is needed, instead of moving the finished tile through shared memory: Triton 3.6
        # thinks that cheaper, and looks into any statement but this one.
        v = tl.zeros((BM, BN), tl.float32 if UNROUNDED else x.dtype.element_ty)
        second = v
        turns = 0
        while turns < 1:
            v, second = source_tiles(
                x, dy, w, b, mean, rstd, limit, alpha, offset, rm, rn, M, F,
                SOURCE, LAYER_NORM, HAS_BIAS, ZERO_CENTERED, UNROUNDED, ACT, GATED, CLAMPED,
            )  # fmt: skip
            turns += 1
    HALVES: tl.constexpr = SOURCE == "gradient" and GATED
    N = F + F if HALVES else F
    finish_tile(
        v, x, y, sums, row, col, row_scale, col_scale, row_a, col_a, rng, tm, tn, 0, M, N, F,
        IN_MEMORY, WRITE_Y, BIAS_GRAD, KIND, FMT, DIM, SWIZZLED, RHT, SIGN_MASK, STOCHASTIC,
        ROW_SCALED, FOUR_SIX, E4M3_MAX, ROW, COL, BM, BN,
    )  # fmt: skip
    if HALVES:
        finish_tile(
            second, x, y, sums, row, col, row_scale, col_scale, row_a, col_a, rng, tm, tn, F, M, N,
            N, IN_MEMORY, WRITE_Y, BIAS_GRAD, KIND, FMT, DIM, SWIZZLED, RHT, SIGN_MASK, STOCHASTIC,
            ROW_SCALED, FOUR_SIX, E4M3_MAX, ROW, COL, BM, BN,
        )  # fmt: skip


@triton.jit
def fold_amaxes(plain, transformed, v, SIGN_MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The two maxima [BM / 16, BN] with the magnitudes of a tile, and of the transformed tile."""
    blocks = [widen(u) for u in blocks_down_columns(v, BM, BN)]
    plain = maximum_dropping_nan(plain, largest_of_tiles(blocks))
    blocks = hadamard_transform(blocks, SIGN_MASK)
    return plain, maximum_dropping_nan(transformed, largest_of_tiles(blocks))


@launched
@triton.jit(do_not_specialize=["M"])
def hadamard_amax_kernel(
    x,
    dy,
    w,
    b,
    mean,
    rstd,
    limit,
    alpha,
    offset,
    row_partials,
    col_partials,
    M,
    F,
    SOURCE: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    SIGN_MASK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Amaxes of every num_programs-th tile: of the values and of the transformed columns."""
    pid = tl.program_id(0)
    plain = tl.zeros((BM // 16, BN), tl.float32)
    transformed = plain
    tiles = tl.cdiv(M, BM) * (tl.cdiv(F, 128) * 128 // BN)
    for tile in range(pid, tiles, tl.num_programs(0)):
        tm, tn = tile_position(tile, F, BN)
        v, second = source_tiles(
            x, dy, w, b, mean, rstd, limit, alpha, offset, tm * BM + tl.arange(0, BM),
            tn * BN + tl.arange(0, BN), M, F,
            SOURCE, LAYER_NORM, HAS_BIAS, ZERO_CENTERED, False, ACT, GATED, CLAMPED,
        )  # fmt: skip
        plain, transformed = fold_amaxes(plain, transformed, v, SIGN_MASK, BM, BN)
        if SOURCE == "gradient" and GATED:
            plain, transformed = fold_amaxes(plain, transformed, second, SIGN_MASK, BM, BN)
    tl.store(row_partials + pid, tl.max(tl.max(plain, 1), 0))
    tl.store(col_partials + pid, tl.max(tl.max(transformed, 1), 0))
