# SPDX-License-Identifier: Apache-2.0
"""Kernels of the activations; ``activation.py`` launches them.

Each tile of the output is computed from one tile of the input (two if gated) and written in every
form asked for: high precision, bytes, transposed bytes, and in the backward its column sums.
Current scaling runs twice over the input, first for the amax, and never writes the high-precision
result.
"""

# pylint: disable=too-many-locals

from __future__ import annotations

import triton
import triton.language as tl

from .activation_math import activation_slope_tiles, activation_tile, row_length
from .common import (
    amax_of_tile,
    largest_magnitude,
    maximum_dropping_nan,
    prefetch_scale,
    quantization_scale,
)
from .launch import launched
from .tiles import rows_of_quads, store_fp8, store_tile, tile_rows_and_columns


@triton.jit
def half_of_dx(
    v, dx, row, col, sums, tile_row, quads, rn, first, s, M, F,
    GATED: tl.constexpr, CURRENT: tl.constexpr, WRITE_DX: tl.constexpr, QUANT: tl.constexpr,
    BIAS_GRAD: tl.constexpr, FMT: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
):  # fmt: skip
    """Write a gradient tile (four sub-tiles ``v``) into columns [first, first + F) of dx."""
    width = row_length(F, GATED)
    rounded = [u.to(dx.dtype.element_ty) for u in v]
    if WRITE_DX:
        rows = rows_of_quads(quads)
        for i in tl.static_range(4):
            store_tile(dx + first, rounded[i], rows[i], rn, width, M, F)
    if CURRENT or not QUANT:
        v = [u.to(tl.float32) for u in rounded]
    if BIAS_GRAD:
        out = sums + tile_row.to(tl.int64) * width + first + rn
        tl.store(out, tl.sum((v[0] + v[1]) + (v[2] + v[3]), 0), mask=rn < F)
    if QUANT:
        padded = (M + 15) // 16 * 16
        store_fp8(
            [u * s for u in v],
            row + first if ROW else row,
            col + tl.cast(first, tl.int64) * padded if COL else col,
            quads, rn, width, M, F, FMT, ROW, COL,
        )  # fmt: skip


@launched
@triton.jit(do_not_specialize=["M"])
def activation_amax_kernel(
    x,
    partials,
    M,
    F,
    limit,
    alpha,
    offset,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """partials[pid] = amax of the unrounded output over every num_programs-th tile."""
    limit = tl.cast(limit, tl.float32)
    alpha = tl.cast(alpha, tl.float32)
    offset = tl.cast(offset, tl.float32)
    pid = tl.program_id(0)
    biggest = 0.0
    for tile in range(pid, tl.cdiv(M, BM) * tl.cdiv(F, BN), tl.num_programs(0)):
        rm, rn = tile_rows_and_columns(tile, F, BM, BN)
        out = activation_tile(x, rm, rn, M, F, limit, alpha, offset, ACT, GATED, CLAMPED)
        biggest = tl.maximum(biggest, amax_of_tile(out))
    tl.store(partials + pid, biggest)


@launched
@triton.jit(do_not_specialize=["M"])
def activation_slope_amax_kernel(
    dy,
    x,
    partials,
    M,
    F,
    limit,
    alpha,
    offset,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The same for the gradient."""
    limit = tl.cast(limit, tl.float32)
    alpha = tl.cast(alpha, tl.float32)
    offset = tl.cast(offset, tl.float32)
    pid = tl.program_id(0)
    biggest = 0.0
    for tile in range(pid, tl.cdiv(M, BM) * tl.cdiv(F, BN), tl.num_programs(0)):
        rm, rn = tile_rows_and_columns(tile, F, BM, BN)
        da, dg = activation_slope_tiles(
            dy, x, rm, rn, M, F, limit, alpha, offset, ACT, GATED, CLAMPED
        )
        biggest = tl.maximum(biggest, amax_of_tile(da))
        if GATED:
            biggest = tl.maximum(biggest, amax_of_tile(dg))
    tl.store(partials + pid, biggest)


@launched
@triton.jit(do_not_specialize=["slot", "n_partials", "M"], do_not_specialize_on_alignment=["amax"])
def activation_forward_kernel(
    x,
    y,
    row,
    col,
    scale,
    slot,
    partials,
    n_partials,
    amax,
    scale_inv,
    eps,
    M,
    F,
    limit,
    alpha,
    offset,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WRITE_Y: tl.constexpr,
    QUANT: tl.constexpr,
    DELAYED: tl.constexpr,
    FMT: tl.constexpr,
    POW2: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of the output [M, F]. ``y`` gives the output dtype even if not written."""
    limit = tl.cast(limit, tl.float32)
    alpha = tl.cast(alpha, tl.float32)
    offset = tl.cast(offset, tl.float32)
    pid = tl.program_id(0)
    # After an amax pass the end of the input is in the L2 cache: begin there.
    tile = tl.num_programs(0) - 1 - pid if QUANT and not DELAYED else pid
    quads, rn = tile_rows_and_columns(tile, F, BM // 4, BN)
    rows = rows_of_quads(quads)
    if QUANT:
        p = prefetch_scale(scale, slot, partials, n_partials, DELAYED, BP)
    v = [activation_tile(x, rm, rn, M, F, limit, alpha, offset, ACT, GATED, CLAMPED) for rm in rows]
    rounded = [u.to(y.dtype.element_ty) for u in v]
    if WRITE_Y:
        for i in tl.static_range(4):
            store_tile(y, rounded[i], rows[i], rn, F, M, F)
    if QUANT:
        s = quantization_scale(
            p, partials, n_partials, amax, scale_inv, eps, pid == 0,
            DELAYED, not DELAYED, FMT, POW2, BP,
        )  # fmt: skip
        if not DELAYED:
            v = [u.to(tl.float32) for u in rounded]
        store_fp8([u * s for u in v], row, col, quads, rn, F, M, F, FMT, ROW, COL)
        if DELAYED:
            tl.atomic_max(amax, amax_of_tile(largest_magnitude(v)), sem="relaxed")


@launched
@triton.jit(do_not_specialize=["slot", "n_partials", "M"], do_not_specialize_on_alignment=["amax"])
def activation_backward_kernel(
    dy,
    x,
    dx,
    row,
    col,
    sums,
    scale,
    slot,
    partials,
    n_partials,
    amax,
    scale_inv,
    eps,
    M,
    F,
    limit,
    alpha,
    offset,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
    WRITE_DX: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    QUANT: tl.constexpr,
    DELAYED: tl.constexpr,
    FMT: tl.constexpr,
    POW2: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of dy [M, F]: one or two of dx, and their column sums in sums [tile rows, N]."""
    limit = tl.cast(limit, tl.float32)
    alpha = tl.cast(alpha, tl.float32)
    offset = tl.cast(offset, tl.float32)
    pid = tl.program_id(0)
    CURRENT: tl.constexpr = QUANT and not DELAYED
    tile = tl.num_programs(0) - 1 - pid if CURRENT else pid
    tile_row = tile // tl.cdiv(F, BN)
    quads, rn = tile_rows_and_columns(tile, F, BM // 4, BN)
    if QUANT:
        p = prefetch_scale(scale, slot, partials, n_partials, DELAYED, BP)
    pairs = [
        activation_slope_tiles(dy, x, rm, rn, M, F, limit, alpha, offset, ACT, GATED, CLAMPED)
        for rm in rows_of_quads(quads)
    ]
    da = [pair[0] for pair in pairs]
    dg = [pair[1] for pair in pairs]
    s = 1.0
    if QUANT:
        s = quantization_scale(
            p, partials, n_partials, amax, scale_inv, eps, pid == 0,
            DELAYED, CURRENT, FMT, POW2, BP,
        )  # fmt: skip
    half_of_dx(
        da, dx, row, col, sums, tile_row, quads, rn, 0, s, M, F,
        GATED, CURRENT, WRITE_DX, QUANT, BIAS_GRAD, FMT, ROW, COL,
    )  # fmt: skip
    if GATED:
        half_of_dx(
            dg, dx, row, col, sums, tile_row, quads, rn, F, s, M, F,
            GATED, CURRENT, WRITE_DX, QUANT, BIAS_GRAD, FMT, ROW, COL,
        )  # fmt: skip
    if DELAYED and QUANT:
        biggest = largest_magnitude(da)
        if GATED:
            biggest = maximum_dropping_nan(biggest, largest_magnitude(dg))
        tl.atomic_max(amax, amax_of_tile(biggest), sem="relaxed")
