# SPDX-License-Identifier: Apache-2.0
"""Amaxes of tensors in memory: of all values, of each row, of each column."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.layout import Quantized, ceil_div
from .common import MAX_PARTIALS, empty, maximum_dropping_nan, zero
from .launch import launched


@launched
@triton.jit
def amax_kernel(x, partials, numel, BLOCK: tl.constexpr):
    """partials[pid] = max |x| over every num_programs-th block of the flat tensor."""
    pid = tl.program_id(0)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(pid.to(tl.int64) * BLOCK, numel, step):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < numel, other=0.0).to(tl.float32)
        acc = maximum_dropping_nan(acc, tl.abs(v))
    tl.store(partials + pid, tl.max(acc, 0))


@launched
@triton.jit(do_not_specialize=["M"])
def row_amax_kernel(x, amax, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """amax[m] = max |x[m, :]|, NaN ignored; BM rows a program."""
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, N, BN):
        c = start + tl.arange(0, BN)
        mask = (r < M)[:, None] & (c < N)[None, :]
        v = tl.load(x + r[:, None] * N + c[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = maximum_dropping_nan(acc, tl.abs(v))
    tl.store(amax + r, tl.max(acc, 1), mask=r < M)


@launched
@triton.jit(do_not_specialize=["M", "rows_per_program"])
def column_amax_kernel(x, amax, M, N, rows_per_program, BM: tl.constexpr, BN: tl.constexpr):
    """amax[n] = max(amax[n], max |x[:, n]|), NaN ignored; grid (columns, chunks of rows)."""
    c = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    start = tl.program_id(1).to(tl.int64) * rows_per_program
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, rows_per_program, BM):
        r = start + i + tl.arange(0, BM)
        mask = (r < M)[:, None] & (c < N)[None, :]
        v = tl.load(x + r[:, None] * N + c[None, :], mask=mask, other=0.0).to(tl.float32)
        acc = maximum_dropping_nan(acc, tl.abs(v))
    tl.atomic_max(amax + c, tl.max(acc, 0), mask=c < N, sem="relaxed")


def partial_amaxes(x: Tensor) -> Tensor:
    """Partial maxima of |x|, fp32 [1 to MAX_PARTIALS]; any shape, contiguous."""
    numel = x.numel()
    block, warps = (2048, 4) if numel <= 1 << 22 else (8192, 8)
    programs = min(max(1, ceil_div(numel, block)), MAX_PARTIALS)
    partials = empty(x, (programs,), torch.float32)
    amax_kernel[(programs,)](x, partials, numel, BLOCK=block, num_warps=warps)
    return partials


def vector_amaxes(x: Tensor, out: Quantized) -> None:
    """Amaxes of the rows and columns of ``x``, where wanted."""
    rows, columns = x.shape
    if out.amax is not None:
        row_amax_kernel[(ceil_div(rows, 8),)](x, out.amax, rows, columns, BM=8, BN=256, num_warps=4)
    if out.col_amax is not None:
        zero(out.col_amax)
        rows_per_program = 256
        grid = (ceil_div(columns, 64), ceil_div(rows, rows_per_program))
        column_amax_kernel[grid](
            x, out.col_amax, rows, columns, rows_per_program, BM=32, BN=64, num_warps=4
        )
