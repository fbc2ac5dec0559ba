# SPDX-License-Identifier: Apache-2.0
"""Kernels of the forward of LayerNorm and RMSNorm; ``norm.py`` launches them.

A row that fits a block is held in registers and read once. Longer rows are walked in chunks, once
for each sum; the repeated reads come from the caches. A program takes several rows and leaves one
partial amax.
"""

# pylint: disable=too-many-locals

from __future__ import annotations

import triton
import triton.language as tl

from .common import cast_to_fp8, maximum_dropping_nan, prefetch_scale, quantization_scale
from .launch import launched
from .tiles import load_tile, rows_of_quads, store_fp8, tile_rows_and_columns, widen


@triton.jit
def load_gain(w, c, mask, ZERO_CENTERED: tl.constexpr):
    """fp32 weight of columns c, plus one if zero-centred."""
    g = tl.load(w + c, mask=mask, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        g = g + 1.0
    return g


@triton.jit
def load_shift(b, c, mask, HAS_BIAS: tl.constexpr):
    """fp32 bias of columns c; zeros without a bias."""
    if HAS_BIAS:
        s = tl.load(b + c, mask=mask, other=0.0).to(tl.float32)
    else:
        s = tl.zeros(c.shape, tl.float32)
    return s


@triton.jit
def normalized_output(xhat, gain, shift, HAS_BIAS: tl.constexpr):
    """gain * xhat + shift as one fma, so that every kernel computes the same bits."""
    if HAS_BIAS:
        out = tl.fma(xhat, gain, shift)
    else:
        out = xhat * gain
    return out


@triton.jit
def reciprocal_std(mean_square, eps):
    """1 / sqrt(mean_square + eps), each step correctly rounded."""
    root = tl.sqrt_rn(mean_square + tl.cast(eps, tl.float32))
    return tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def store_norm_output(
    out, y, row, offsets, mask, valid, s, WRITE_Y: tl.constexpr, QUANT: tl.constexpr,
    AMAX: tl.constexpr, FMT: tl.constexpr,
):  # fmt: skip
    """Write y and bytes of ``out`` as asked for; return |value| whose maximum is the amax.

    AMAX: 0 none, 1 of the fp32 result, 2 of the result rounded to the dtype of y. Where ``valid``
    is false ``out`` may be other than 0 and does not count; elsewhere outside of ``mask`` it is 0.
    """
    rounded = out.to(y.dtype.element_ty)
    if WRITE_Y:
        tl.store(y + offsets, rounded, mask=mask)
    if QUANT:
        tl.store(row + offsets, cast_to_fp8(out * s, FMT), mask=mask)
    if AMAX == 2:
        out = rounded.to(tl.float32)
    return tl.where(valid, tl.abs(out), 0.0)


@launched
@triton.jit(do_not_specialize=["slot", "M", "rows_per_program"])
def norm_forward_kernel(
    x,
    w,
    b,
    y,
    row,
    mean,
    rstd,
    scale,
    slot,
    scale_inv,
    partials,
    M,
    K,
    eps,
    inv_k,
    rows_per_program,
    LAYER_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WRITE_Y: tl.constexpr,
    QUANT: tl.constexpr,
    AMAX: tl.constexpr,
    FMT: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
):
    """Rows of K <= BK elements, R at a time. ``y`` gives the output dtype even if not written."""
    pid = tl.program_id(0)
    c = tl.arange(0, BK)
    in_row = c < K
    gain = load_gain(w, c, in_row, ZERO_CENTERED)[None, :]
    shift = load_shift(b, c, in_row, HAS_BIAS)[None, :]
    inv_k = tl.cast(inv_k, tl.float32)
    s = 1.0
    if QUANT:
        s = quantization_scale(
            tl.load(scale + slot), partials, 1, None, scale_inv, eps, pid == 0,
            True, False, FMT, False, 1,
        )  # fmt: skip
    biggest = tl.zeros((R, BK), tl.float32)
    for i in range(0, rows_per_program, R):
        r = (pid * rows_per_program + i).to(tl.int64) + tl.arange(0, R)
        mask = (r < M)[:, None] & in_row[None, :]
        offsets = r[:, None] * K + c[None, :]
        v = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        if LAYER_NORM:
            mu = tl.sum(v, 1) * inv_k
            v = tl.where(in_row[None, :], v - mu[:, None], 0.0)
            tl.store(mean + r, mu, mask=r < M)
        rs = reciprocal_std(tl.sum(v * v, 1) * inv_k, eps)
        tl.store(rstd + r, rs, mask=r < M)
        out = normalized_output(v * rs[:, None], gain, shift, HAS_BIAS)
        # A row beyond M is the bias.
        a = store_norm_output(
            out, y, row, offsets, mask, (r < M)[:, None], s, WRITE_Y, QUANT, AMAX, FMT
        )
        if AMAX:
            biggest = maximum_dropping_nan(biggest, a)
    if AMAX:
        tl.store(partials + pid, tl.max(tl.max(biggest, 1), 0))


@launched
@triton.jit(do_not_specialize=["slot", "M", "rows_per_program"])
def norm_forward_long_kernel(
    x,
    w,
    b,
    y,
    row,
    mean,
    rstd,
    scale,
    slot,
    scale_inv,
    partials,
    M,
    K,
    eps,
    inv_k,
    rows_per_program,
    LAYER_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WRITE_Y: tl.constexpr,
    QUANT: tl.constexpr,
    AMAX: tl.constexpr,
    FMT: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
):
    """The same for rows of any length, in chunks of BK; R is 1."""
    pid = tl.program_id(0)
    inv_k = tl.cast(inv_k, tl.float32)
    s = 1.0
    if QUANT:
        s = quantization_scale(
            tl.load(scale + slot), partials, 1, None, scale_inv, eps, pid == 0,
            True, False, FMT, False, 1,
        )  # fmt: skip
    biggest = tl.zeros((BK,), tl.float32)
    for i in range(0, rows_per_program):
        r = (pid * rows_per_program + i).to(tl.int64)
        if r < M:
            mu = 0.0
            if LAYER_NORM:
                total = tl.zeros((BK,), tl.float32)
                for k in range(0, K, BK):
                    c = k + tl.arange(0, BK)
                    total += tl.load(x + r * K + c, mask=c < K, other=0.0).to(tl.float32)
                mu = tl.sum(total, 0) * inv_k
                tl.store(mean + r, mu)
            square = tl.zeros((BK,), tl.float32)
            for k in range(0, K, BK):
                c = k + tl.arange(0, BK)
                v = tl.load(x + r * K + c, mask=c < K, other=0.0).to(tl.float32)
                v = tl.where(c < K, v - mu, 0.0)
                square += v * v
            rs = reciprocal_std(tl.sum(square, 0) * inv_k, eps)
            tl.store(rstd + r, rs)
            for k in range(0, K, BK):
                c = k + tl.arange(0, BK)
                v = tl.load(x + r * K + c, mask=c < K, other=0.0).to(tl.float32)
                gain = load_gain(w, c, c < K, ZERO_CENTERED)
                shift = load_shift(b, c, c < K, HAS_BIAS)
                out = normalized_output((v - mu) * rs, gain, shift, HAS_BIAS)
                a = store_norm_output(
                    out, y, row, r * K + c, c < K, c < K, s, WRITE_Y, QUANT, AMAX, FMT
                )
                if AMAX:
                    biggest = maximum_dropping_nan(biggest, a)
    if AMAX:
        tl.store(partials + pid, tl.max(biggest, 0))


@triton.jit
def normalized_tile(
    x, mean, rstd, gain, shift, rm, rn, M, K, LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """``normalized`` rows rm and columns rn < K."""
    v = load_tile(x, rm, rn, K, M, K)
    return normalized(v, mean, rstd, gain, shift, rm, M, LAYER_NORM, HAS_BIAS)


@triton.jit
def normalized(v, mean, rstd, gain, shift, rm, M, LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr):
    """fp32 output from known statistics; +0 in rows beyond M."""
    v = widen(v)
    if LAYER_NORM:
        v = v - tl.load(mean + rm, mask=rm < M, other=0.0)[:, None]
    rs = tl.load(rstd + rm, mask=rm < M, other=0.0)
    out = normalized_output(v * rs[:, None], gain, shift, HAS_BIAS)
    return tl.where((rm < M)[:, None], out, 0.0)


@launched
@triton.jit(do_not_specialize=["n_partials", "M"])
def norm_apply_cast_kernel(
    x,
    w,
    b,
    mean,
    rstd,
    row,
    col,
    partials,
    n_partials,
    amax,
    scale_inv,
    scale_eps,
    M,
    K,
    LAYER_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    FMT: tl.constexpr,
    POW2: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Current scaling: normalize again with known statistics, round to the dtype of x, cast.

    Reading x twice is cheaper than writing and reading the rounded result.
    """
    pid = tl.program_id(0)
    quads, rn = tile_rows_and_columns(tl.num_programs(0) - 1 - pid, K, BM // 4, BN)
    p = prefetch_scale(None, 0, partials, n_partials, False, BP)
    gain = load_gain(w, rn, rn < K, ZERO_CENTERED)[None, :]
    shift = load_shift(b, rn, rn < K, HAS_BIAS)[None, :]
    out = [
        normalized_tile(x, mean, rstd, gain, shift, rm, rn, M, K, LAYER_NORM, HAS_BIAS)
        for rm in rows_of_quads(quads)
    ]
    out = [u.to(x.dtype.element_ty).to(tl.float32) for u in out]
    s = quantization_scale(
        p, partials, n_partials, amax, scale_inv, scale_eps, pid == 0, False, True, FMT, POW2, BP
    )  # fmt: skip
    store_fp8([u * s for u in out], row, col, quads, rn, K, M, K, FMT, ROW, COL)
