# SPDX-License-Identifier: Apache-2.0
"""Values of tensors with block scales, in one pass over the data."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.blocks import float32
from ...formats.layout import ceil_div, round_up
from ...formats.spec import QuantSpec
from .block_tiles import scale_offset, spread_columns, spread_rows
from .common import empty
from .fp4_codes import fp4_code_to_float
from .launch import launched
from .nvfp4_scales import e4m3_to_float
from .producers import tile_position
from .tiles import load_tile, store_tile


@triton.jit
def e8m0_to_float(e):
    """2^(e - 127) as fp32 of int32 bytes, NaN for 255."""
    bits = tl.where(e == 0, 0x00400000, e << 23)
    return tl.where(e == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def fp8_to_float(q, FMT: tl.constexpr):
    """fp32 values of bytes."""
    if FMT == 1:
        v = q.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        v = q.to(tl.float8e5, bitcast=True).to(tl.float32)
    return v


@triton.jit
def scales_of_blocks(scales, i, j, I, J, columns, SWIZZLED: tl.constexpr):
    """int32 bytes of the scales (i, j), two index tensors that broadcast, 0 outside of [I, J]."""
    offsets = scale_offset(i, j, columns, SWIZZLED)
    return tl.load(scales + offsets, mask=(i < I) & (j < J), other=0).to(tl.int32)


@launched
@triton.jit(do_not_specialize=["R", "scale_rows", "scale_columns"])
def dequantize_tiles_kernel(
    data,
    scales,
    amax,
    y,
    R,
    C,
    scale_rows,
    scale_columns,
    inverse,
    KIND: tl.constexpr,
    FMT: tl.constexpr,
    DIM: tl.constexpr,
    SWIZZLED: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One tile of y [R, C]; data of NVFP4 is [R, C / 2]. BM and BN divide 128."""
    tm, tn = tile_position(tl.program_id(0), C, BN)
    r = tm * BM + tl.arange(0, BM)
    c = tn * BN + tl.arange(0, BN)
    if KIND == "block":
        v = fp8_to_float(load_tile(data, r, c, C, R, C), FMT)
        kb = tn * BN // 128
        if DIM == 2:
            offsets = (r // 128) * scale_columns + kb
        else:
            offsets = kb * scale_columns + r
        out = v * tl.load(scales + offsets, mask=r < R, other=0.0)[:, None]
    elif KIND == "mxfp8":
        v = fp8_to_float(load_tile(data, r, c, C, R, C), FMT)
        if COLUMNWISE:
            i = c[None, :]
            j = (tm * (BM // 32) + tl.arange(0, BM // 32))[:, None]
            if SWIZZLED:
                e = scales_of_blocks(scales, i, j, C, tl.cdiv(R, 32), scale_rows, True)
            else:
                e = scales_of_blocks(scales, j, i, tl.cdiv(R, 32), C, scale_columns, False)
            out = v * spread_rows(e8m0_to_float(e), BM // 32, BN, 32)
        else:
            i = r[:, None]
            j = (tn * (BN // 32) + tl.arange(0, BN // 32))[None, :]
            e = scales_of_blocks(scales, i, j, R, tl.cdiv(C, 32), scale_columns, SWIZZLED)
            out = v * spread_columns(e8m0_to_float(e), BM, BN // 32, 32)
    else:
        byte = tn * (BN // 2) + tl.arange(0, BN // 2)
        q = load_tile(data, r, byte, C // 2, R, C // 2).to(tl.int32)
        v = fp4_code_to_float(tl.reshape(tl.join(q & 15, q >> 4), [BM, BN]))
        i = r[:, None]
        j = (tn * (BN // 16) + tl.arange(0, BN // 16))[None, :]
        s = scales_of_blocks(scales, i, j, R, C // 16, scale_columns, SWIZZLED)
        if ROW_SCALED:
            a = tl.load(amax + r, mask=r < R, other=0.0)[:, None]
        else:
            a = tl.load(amax)
        f = e4m3_to_float(s.to(tl.uint32, bitcast=True)) * a * tl.cast(inverse, tl.float32)
        out = v * spread_columns(f, BM, BN // 16, 16)
    store_tile(y, out.to(y.dtype.element_ty), r, c, C, R, C)


def dequantize_blocks(
    data: Tensor,
    scale_inv: Tensor,
    amax: Optional[Tensor],
    spec: QuantSpec,
    columnwise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Values of ``data`` in its own orientation; ``formats`` defines them."""
    rows, columns = data.shape
    if spec.kind == "nvfp4":
        columns *= 2
    y = empty(data, (rows, columns), dtype)
    if y.numel() == 0:
        return y
    block_m, block_n = 32, 128
    tiles = ceil_div(rows, block_m) * (round_up(columns, 128) // block_n)
    dequantize_tiles_kernel[(tiles,)](
        data,
        scale_inv,
        amax,
        y,
        rows,
        columns,
        *scale_inv.shape,
        float32(1.0 / (6.0 * spec.e4m3_max)),
        KIND=spec.kind,
        FMT=1 if spec.fmt == "e4m3" else 2,
        DIM=spec.dim,
        SWIZZLED=spec.swizzled,
        COLUMNWISE=columnwise,
        ROW_SCALED=spec.row_scaled,
        BM=block_m,
        BN=block_n,
        num_warps=4,
    )
    return y
