# SPDX-License-Identifier: Apache-2.0
"""The GEMM leaf for FP8 operands with scales of 128 values on Hopper, by a kernel of this package.

Beside ``cublas.block_gemm`` it takes E5M2 operands, two operands with blocks of 128 x 128, and CUDA
releases whose cuBLASLt has no block scaling; see ``block_gemm_kernels.py`` for how it computes.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...formats.layout import BLOCK, ceil_div
from ...formats.spec import decode_quant
from ..cublas import TORCH_FP8, empty_contraction
from .block_gemm_kernels import MAX_REGISTERS, block_gemm_kernel
from .common import empty, processors, runs_on_its_device
from .launch import launched

_KERNEL = launched(block_gemm_kernel)
# (rows / 128, columns, stages, cycles for 128 contracted values) of the tiles. All give the same
# bits; the small ones are there to fill the GPU where large ones are too few.
_TILES = ((2, 128, 4, 1024), (1, 128, 6, 600), (1, 32, 8, 250))
_GROUP = 8  # tiles that share columns, and run at the same time
_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@runs_on_its_device
def block_gemm(
    a: Tensor,
    b: Tensor,
    bias: Optional[Tensor],
    a_scale_inv: Optional[Tensor],
    b_scale_inv: Optional[Tensor],
    a_amax: Optional[Tensor],
    b_amax: Optional[Tensor],
    a_quant: str,
    b_quant: str,
    layout: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """``a [M, K] @ b [N, K]^T (+ bias)``; see ``cublas.py`` for the signature.

    N and K are multiples of 16. Products of a block of 128 are added up on tensor cores, blocks in
    fp32, one after the other.
    """
    del a_amax, b_amax, layout, fast_accum
    rows, columns, depth = a.shape[0], b.shape[0], a.shape[1]
    if rows == 0 or depth == 0:
        return empty_contraction(a, rows, columns, bias, out_dtype)
    a_spec, b_spec = decode_quant(a_quant), decode_quant(b_quant)
    a, b, a_scale_inv, b_scale_inv = map(_aligned, (a, b, a_scale_inv, b_scale_inv))
    y = empty(a, (rows, columns), out_dtype)
    m, n, stages = tile_shape(rows, columns, processors(a.device))
    a_layout, b_layout, scale_layout, y_layout, width = _layouts(m, n, out_dtype)
    a_fp8, b_fp8 = a.view(TORCH_FP8[a_spec.fmt]), b.view(TORCH_FP8[b_spec.fmt])
    programs = min(processors(a.device), ceil_div(rows, 128 * m) * ceil_div(columns, n))
    _KERNEL[(programs,)](
        TensorDescriptor(a_fp8, [rows, depth], [depth, 1], [64 * m, BLOCK], a_layout),
        TensorDescriptor(b_fp8, [columns, depth], [depth, 1], [n, BLOCK], b_layout),
        TensorDescriptor(a_scale_inv, [a_scale_inv.numel()], [1], [64 * m], scale_layout),
        TensorDescriptor(b_scale_inv, [b_scale_inv.numel()], [1], [n], scale_layout),
        TensorDescriptor(y, [rows, columns], [columns, 1], [64, width], y_layout),
        a_scale_inv,
        b_scale_inv,
        rows,
        columns,
        depth,
        a_scale_inv.stride(0),
        b_scale_inv.stride(0),
        MI=m,
        BN=n,
        STAGES=stages,
        GROUP=_GROUP,
        A_SQUARE=a_spec.dim == 2,
        B_SQUARE=b_spec.dim == 2,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )
    return y if bias is None else y.add_(bias)


def tile_shape(rows: int, columns: int, multiprocessors: int) -> tuple[int, int, int]:
    """``(rows / 128, columns, stages)`` of the tiles with which the result is done first."""

    def time(tile):
        count = ceil_div(rows, 128 * tile[0]) * ceil_div(columns, tile[1])
        return ceil_div(count, multiprocessors) * tile[3]

    return min(_TILES, key=time)[:3]


@functools.lru_cache(maxsize=None)
def _layouts(m: int, n: int, out_dtype: torch.dtype) -> tuple:
    """Layouts in shared memory of ``a``, ``b``, scales and ``y``, and columns written at once."""
    width = min(n, 128 // out_dtype.itemsize)
    of = gl.NVMMASharedLayout.get_default_for
    return (
        of([64 * m, BLOCK], gl.float8e4nv),
        of([n, BLOCK], gl.float8e4nv),
        gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1),
        of([64, width], _GLUON[out_dtype]),
        width,
    )


def _aligned(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy where the copy engine could not read it."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
