# SPDX-License-Identifier: Apache-2.0
"""Sums over rows in a fixed order: bias gradients and the partial sums other kernels leave."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.layout import ceil_div
from .common import empty, runs_on_its_device
from .launch import launched, next_power_of_2


@launched
@triton.jit(do_not_specialize=["M", "rows_per_program"])
def column_sum_kernel(x, out, M, N, rows_per_program, BM: tl.constexpr, BN: tl.constexpr):
    """out[chunk, n] = sum of x[m, n] over the rows of a chunk; grid (columns, chunks)."""
    c = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    chunk = tl.program_id(1).to(tl.int64)
    acc = tl.zeros((BM, BN), tl.float32)
    for i in range(0, rows_per_program, BM):
        r = chunk * rows_per_program + i + tl.arange(0, BM)
        mask = (r < M)[:, None] & (c < N)[None, :]
        acc += tl.load(x + r[:, None] * N + c[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + chunk * N + c, tl.sum(acc, 0).to(out.dtype.element_ty), mask=c < N)


@launched
@triton.jit(do_not_specialize=["P"])
def sum_partials_kernel(partials, first, second, P, N, BP: tl.constexpr, BN: tl.constexpr):
    """first[n] = sum of partials[0, p, n] over p, second[n] of partials[1]; grid (columns, 1-2)."""
    which = tl.program_id(1)
    c = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    acc = tl.zeros((BP, BN), tl.float32)
    for i in range(0, P, BP):
        p = i + tl.arange(0, BP)
        mask = (p < P)[:, None] & (c < N)[None, :]
        p = (which * P + p).to(tl.int64)
        acc += tl.load(partials + p[:, None] * N + c[None, :], mask=mask, other=0.0)
    total = tl.sum(acc, 0).to(first.dtype.element_ty)
    if which == 0:
        tl.store(first + c, total, mask=c < N)
    elif second is not None:
        tl.store(second + c, total, mask=c < N)


def sum_partials(partials: Tensor, first: Tensor, second: Optional[Tensor] = None) -> None:
    """Sum fp32 ``partials`` [1 or 2, P, N] over P into ``first`` [N] and ``second`` [N]."""
    count, columns = partials.shape[1:]
    # Narrow columns: all partial sums of one are under way at once, a loop would wait for each.
    grid = (ceil_div(columns, 16), 1 if second is None else 2)
    block = min(256, max(16, next_power_of_2(count)))
    sum_partials_kernel[grid](partials, first, second, count, columns, BP=block, BN=16, num_warps=4)


@runs_on_its_device
def bias_grad(dy: Tensor) -> Tensor:
    """fp32 sum of ``dy [M, N]`` over its rows, rounded once to the dtype of ``dy``; shape [N].

    Two passes over chunks of rows that depend on the shape only, so the result is reproducible.
    """
    rows, columns = dy.shape
    out = empty(dy, (columns,), dy.dtype)
    if rows <= 128:
        _column_sums(dy, out, 1, rows)
        return out
    rows_per_program = 128 if rows <= 8192 else 256
    chunks = ceil_div(rows, rows_per_program)
    partials = empty(dy, (1, chunks, columns), torch.float32)
    _column_sums(dy, partials, chunks, rows_per_program)
    sum_partials(partials, out)
    return out


def _column_sums(x: Tensor, out: Tensor, chunks: int, rows_per_program: int) -> None:
    """``out`` [chunks, N] = sums over chunks of ``rows_per_program`` rows of ``x``."""
    rows, columns = x.shape
    block_n = 128 if columns >= 4096 else 64
    grid = (ceil_div(columns, block_n), chunks)
    column_sum_kernel[grid](x, out, rows, columns, rows_per_program, BM=32, BN=block_n, num_warps=4)
