# SPDX-License-Identifier: Apache-2.0
"""quantize and dequantize, and the launches of per-tensor FP8 that other leaves share with them.

Memory traffic of per-tensor FP8 per element of bf16 input with both orientations: delayed 4 bytes
(one pass), current 6 bytes (amax pass, cast pass). The cast pass walks the tensor backwards,
because the amax pass has just left its end in the L2 cache. ``block_scaled.py`` has the other
formats.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.layout import Quantized, ceil_div
from ...formats.spec import QuantSpec, decode_quant
from .amax import partial_amaxes
from .block_dequantize import dequantize_blocks
from .block_scaled import quantize_source, source_of
from .common import (
    amax_of_tile,
    cast_block,
    empty,
    finish_amax_kernel,
    format_code,
    largest_magnitude,
    padded_partials,
    prefetch_scale,
    quantization_buffers,
    quantization_scale,
    reduce_partials,
    runs_on_its_device,
    split_scale,
    store_amax,
    tile_count,
)
from .launch import launched
from .tiles import (
    load_tile,
    pack_bytes,
    rows_of_quads,
    store_fp8,
    store_words,
    tile_rows_and_columns,
)


@launched
@triton.jit(do_not_specialize=["slot", "n_partials", "M"], do_not_specialize_on_alignment=["amax"])
def cast_kernel(
    x,
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
    N,
    DELAYED: tl.constexpr,
    REDUCE: tl.constexpr,
    FMT: tl.constexpr,
    POW2: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Bytes of x[M, N] in one or both orientations; without REDUCE also its amax (atomic)."""
    pid = tl.program_id(0)
    tile = tl.num_programs(0) - 1 - pid if REDUCE else pid
    quads, rn = tile_rows_and_columns(tile, N, BM // 4, BN)
    p = prefetch_scale(scale, slot, partials, n_partials, DELAYED, BP)
    v = [load_tile(x, rm, rn, N, M, N).to(tl.float32) for rm in rows_of_quads(quads)]
    s = quantization_scale(
        p, partials, n_partials, amax, scale_inv, eps, pid == 0, DELAYED, REDUCE, FMT, POW2, BP
    )  # fmt: skip
    store_fp8([u * s for u in v], row, col, quads, rn, N, M, N, FMT, ROW, COL)
    if not REDUCE:
        tl.atomic_max(amax, amax_of_tile(largest_magnitude(v)), sem="relaxed")


@launched
@triton.jit(do_not_specialize=["n_partials", "M"], do_not_specialize_on_alignment=["amax"])
def transpose_bytes_kernel(
    row,
    col,
    partials,
    n_partials,
    amax,
    M,
    N,
    FOLD: tl.constexpr,
    BP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """col[N, Mp] = transpose of row[M, N], zero padded; amax[0] = maximum of the partials."""
    pid = tl.program_id(0)
    if pid == 0:
        store_amax(amax, reduce_partials(partials, n_partials, BP), FOLD)
    quads, rn = tile_rows_and_columns(pid, N, BM // 4, BN)
    q = [load_tile(row, rm, rn, N, M, N) for rm in rows_of_quads(quads)]
    store_words(pack_bytes(q), col, quads, rn, M, N)


@launched
@triton.jit
def dequantize_kernel(data, scale_inv, y, numel, BLOCK: tl.constexpr):
    """y = fp32(data) * scale_inv over the flat tensor."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(data + i, mask=i < numel, other=0.0).to(tl.float32)
    tl.store(y + i, (v * tl.load(scale_inv)).to(y.dtype.element_ty), mask=i < numel)


def launch_cast(
    x: Tensor, out: Quantized, spec: QuantSpec, scale: Optional[Tensor], slot, partials
) -> None:
    """Fill ``out`` from ``x [M, K]``. ``partials`` hold the amax, or None: it is accumulated."""
    rows, columns = x.shape
    block_m, block_n, warps = cast_block(rows, columns)
    n_partials = 1 if partials is None else partials.numel()
    cast_kernel[(tile_count(rows, columns, block_m, block_n),)](
        x,
        out.row,
        out.col,
        scale,
        slot or 0,
        partials,
        n_partials,
        out.amax,
        out.scale_inv,
        spec.eps,
        rows,
        columns,
        DELAYED=spec.kind == "delayed",
        REDUCE=partials is not None,
        FMT=format_code(spec),
        POW2=spec.pow2,
        ROW=out.row is not None,
        COL=out.col is not None,
        BP=padded_partials(n_partials),
        BM=block_m,
        BN=block_n,
        num_warps=warps,
    )


def launch_transpose(
    row: Tensor, col: Optional[Tensor], partials: Tensor, amax: Tensor, fold: bool
) -> None:
    """col = byte transpose of row, if there is a col; amax = maximum of the partials.

    ``fold``: and of itself.
    """
    n_partials = partials.numel()
    block_p = padded_partials(n_partials)
    if col is None:
        finish_amax_kernel[(1,)](partials, amax, n_partials, FOLD=fold, BP=block_p)
        return
    rows, columns = row.shape
    block_m, block_n, warps = cast_block(rows, columns)
    transpose_bytes_kernel[(tile_count(rows, columns, block_m, block_n),)](
        row,
        col,
        partials,
        n_partials,
        amax,
        rows,
        columns,
        FOLD=fold,
        BP=block_p,
        BM=block_m,
        BN=block_n,
        num_warps=warps,
    )


@runs_on_its_device
def quantize(
    x: Tensor,
    quant: str,
    scale: Optional[Tensor],
    slot: Optional[int],
    amax: Optional[Tensor],
    rowwise: bool,
    columnwise: bool,
    rng: Optional[Tensor],
) -> Quantized:
    """Quantize ``x [M, K]``, in one or both orientations.

    Args:
        x: contiguous, fp32, bf16 or fp16; M may be 0.
        quant: encoded ``QuantSpec``.
        scale, slot: fp32 vector and the index of the element to use (delayed scaling).
        amax: fp32 [1], used instead of the amax of ``x`` (current scaling, NVFP4).
        rowwise, columnwise: the orientations to write.
        rng: int64 [2], seed and offset (stochastic rounding).

    Returns:
        Buffers of the shapes of ``formats.layout.quantized_layout``, with zero padding.
    """
    spec = decode_quant(quant)
    if not spec.per_tensor:
        partials = amax if spec.kind == "nvfp4" else None
        return quantize_source(source_of(x), spec, rowwise, columnwise, partials, rng)[0]
    delayed = spec.kind == "delayed"
    scale, cell = split_scale(scale, slot)
    out = quantization_buffers(x, spec, *x.shape, rowwise, columnwise, delayed, cell)
    if delayed:
        partials = None
    else:
        partials = partial_amaxes(x) if amax is None else amax
    launch_cast(x, out, spec, scale, slot, partials)
    return out if cell is None else out._replace(amax=None)


@runs_on_its_device
def dequantize(
    data: Tensor,
    scale_inv: Tensor,
    amax: Optional[Tensor],
    quant: str,
    columnwise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Codes times scales in fp32, rounded to ``dtype``, in the orientation of ``data`` (uint8).

    ``columnwise`` says that ``data`` is a columnwise buffer, which only MXFP8 must know; only NVFP4
    has an ``amax`` (fp32 [1], or that of each row).
    """
    spec = decode_quant(quant)
    if not spec.per_tensor:
        return dequantize_blocks(data, scale_inv, amax, spec, columnwise, dtype)
    e4m3 = spec.fmt == "e4m3"
    y = empty(data, data.shape, dtype)
    if data.numel():
        values = data.view(torch.float8_e4m3fn if e4m3 else torch.float8_e5m2)
        grid = (ceil_div(data.numel(), 4096),)
        dequantize_kernel[grid](values, scale_inv, y, data.numel(), BLOCK=4096, num_warps=4)
    return y
