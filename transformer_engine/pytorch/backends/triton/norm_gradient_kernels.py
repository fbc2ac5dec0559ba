# SPDX-License-Identifier: Apache-2.0
"""Kernels of the backward of LayerNorm and RMSNorm; ``norm_gradients.py`` launches them.

With ``xhat`` the normalized input and ``g`` the output gradient times the gain:
``dx = rstd * (g - xhat * mean(g * xhat) - mean(g))``, the last term for LayerNorm only.
"""

# pylint: disable=too-many-locals

from __future__ import annotations

import triton
import triton.language as tl

from .launch import launched
from .norm_kernels import load_gain


@triton.jit
def load_gradient(dy, dy2, offsets, mask, HAS_DY2: tl.constexpr):
    """fp32 sum of the gradients that arrive on one or two ways."""
    g = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DY2:
        g += tl.load(dy2 + offsets, mask=mask, other=0.0).to(tl.float32)
    return g


@launched
@triton.jit(do_not_specialize=["M", "rows_per_program"])
def norm_backward_kernel(
    dy,
    dy2,
    x,
    mean,
    rstd,
    w,
    dx,
    partials,
    M,
    K,
    inv_k,
    rows_per_program,
    LAYER_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HAS_DY2: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DWEIGHT: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
):
    """dx, and partials[0, pid] of dweight and partials[1, pid] of dbias, [2, programs, K]."""
    pid = tl.program_id(0)
    c = tl.arange(0, BK)
    in_row = c < K
    gain = load_gain(w, c, in_row, ZERO_CENTERED)[None, :]
    inv_k = tl.cast(inv_k, tl.float32)
    dgain = tl.zeros((R, BK), tl.float32)
    dshift = tl.zeros((R, BK), tl.float32)
    for i in range(0, rows_per_program, R):
        r = (pid * rows_per_program + i).to(tl.int64) + tl.arange(0, R)
        mask = (r < M)[:, None] & in_row[None, :]
        offsets = r[:, None] * K + c[None, :]
        v = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        g = load_gradient(dy, dy2, offsets, mask, HAS_DY2)
        rs = tl.load(rstd + r, mask=r < M, other=0.0)[:, None]
        if LAYER_NORM:
            mu = tl.load(mean + r, mask=r < M, other=0.0)[:, None]
            v = tl.where(mask, v - mu, 0.0)
        xhat = v * rs
        if NEED_DWEIGHT:
            dgain += g * xhat
            if LAYER_NORM:
                dshift += g
        if NEED_DX:
            g = g * gain
            m2 = (tl.sum(g * xhat, 1) * inv_k)[:, None]
            inner = g - m2 * xhat
            if LAYER_NORM:
                inner = inner - (tl.sum(g, 1) * inv_k)[:, None]
            tl.store(dx + offsets, (rs * inner).to(dx.dtype.element_ty), mask=mask)
    if NEED_DWEIGHT:
        out = partials + pid.to(tl.int64) * K + c
        tl.store(out, tl.sum(dgain, 0), mask=in_row)
        if LAYER_NORM:
            tl.store(out + tl.num_programs(0).to(tl.int64) * K, tl.sum(dshift, 0), mask=in_row)


@launched
@triton.jit
def norm_dx_long_kernel(
    dy,
    dy2,
    x,
    mean,
    rstd,
    w,
    dx,
    K,
    inv_k,
    LAYER_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    HAS_DY2: tl.constexpr,
    BK: tl.constexpr,
):
    """dx of one row of any length, in chunks of BK."""
    r = tl.program_id(0).to(tl.int64)
    rs = tl.load(rstd + r)
    inv_k = tl.cast(inv_k, tl.float32)
    mu = 0.0
    if LAYER_NORM:
        mu = tl.load(mean + r)
    total = tl.zeros((BK,), tl.float32)
    projection = tl.zeros((BK,), tl.float32)
    for k in range(0, K, BK):
        c = k + tl.arange(0, BK)
        v = tl.load(x + r * K + c, mask=c < K, other=0.0).to(tl.float32)
        g = load_gradient(dy, dy2, r * K + c, c < K, HAS_DY2)
        g = g * load_gain(w, c, c < K, ZERO_CENTERED)
        total += g
        projection += g * ((v - mu) * rs)
    m2 = tl.sum(projection, 0) * inv_k
    m1 = 0.0
    if LAYER_NORM:
        m1 = tl.sum(total, 0) * inv_k
    for k in range(0, K, BK):
        c = k + tl.arange(0, BK)
        v = tl.load(x + r * K + c, mask=c < K, other=0.0).to(tl.float32)
        g = load_gradient(dy, dy2, r * K + c, c < K, HAS_DY2)
        g = g * load_gain(w, c, c < K, ZERO_CENTERED)
        inner = g - m2 * ((v - mu) * rs) - m1
        tl.store(dx + r * K + c, (rs * inner).to(dx.dtype.element_ty), mask=c < K)


@launched
@triton.jit(do_not_specialize=["M", "rows_per_program"])
def norm_dweight_long_kernel(
    dy,
    dy2,
    x,
    mean,
    rstd,
    partials,
    M,
    K,
    rows_per_program,
    LAYER_NORM: tl.constexpr,
    HAS_DY2: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Partial dweight and dbias of BN columns and rows_per_program rows; grid (columns, chunks)."""
    c = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    chunk = tl.program_id(1).to(tl.int64)
    dgain = tl.zeros((BM, BN), tl.float32)
    dshift = tl.zeros((BM, BN), tl.float32)
    for i in range(0, rows_per_program, BM):
        r = chunk * rows_per_program + i + tl.arange(0, BM)
        mask = (r < M)[:, None] & (c < K)[None, :]
        offsets = r[:, None] * K + c[None, :]
        v = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
        g = load_gradient(dy, dy2, offsets, mask, HAS_DY2)
        if LAYER_NORM:
            v = v - tl.load(mean + r, mask=r < M, other=0.0)[:, None]
            dshift += g
        dgain += g * (v * tl.load(rstd + r, mask=r < M, other=0.0)[:, None])
    out = partials + chunk * K + c
    tl.store(out, tl.sum(dgain, 0), mask=c < K)
    if LAYER_NORM:
        tl.store(out + tl.num_programs(1).to(tl.int64) * K, tl.sum(dshift, 0), mask=c < K)
