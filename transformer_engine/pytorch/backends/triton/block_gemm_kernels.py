# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel behind ``block_gemm.py``: FP8 operands with one scale per 128 values.

One persistent program per multiprocessor. A warp copies blocks of 128 contracted values into a ring
of stages with TMA; two warpgroups multiply. Tensor cores add up 128 products at a time, which is as
far as their accumulators are exact enough; each such partial sum is multiplied with its scales and
added to an fp32 sum in registers, while the other warpgroup has the tensor cores.

The sum of an element is made block after block, in the same order in every shape of tile, so it
does not depend on the number of rows or on the tile.

Written in Gluon, because Triton itself keeps neither the partial sums apart nor the warps.
"""

# pylint: disable=too-many-locals

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Registers per thread: 168 for each of the 3 x 128 threads of a program (the copying warp counts as
# four) are 24 for the copying warp and 240 for the others.
MAX_REGISTERS = 168
_COPY_REGISTERS = gl.constexpr(24)
_SUM_REGISTERS = gl.constexpr(240)


@gluon.jit
def _tile(i, m_tiles, n_tiles, GROUP: gl.constexpr):
    """Place of tile ``i``; tiles that run at the same time share rows of both operands."""
    in_group = GROUP * n_tiles
    first = i // in_group * GROUP
    height = min(m_tiles - first, GROUP)
    i = i % in_group
    return first + i % height, i // height


@gluon.jit
def _copy(
    sources,
    rings,
    sizes,
    MI: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    A_SQUARE: gl.constexpr,
    B_SQUARE: gl.constexpr,
):
    """The warp that fills the ring."""
    a, b, a_scales, b_scales = sources
    a_ring, b_ring, a_scale_ring, b_scale_ring, full, free = rings
    M, N, K, a_stride, b_stride = sizes
    HALF: gl.constexpr = 64 * MI
    BM: gl.constexpr = 2 * HALF
    BYTES: gl.constexpr = (
        (BM + BN) * 128 + (0 if A_SQUARE else 4 * BM) + (0 if B_SQUARE else 4 * BN)
    )
    m_tiles = gl.cdiv(M, BM)
    n_tiles = gl.cdiv(N, BN)
    blocks = gl.cdiv(K, 128)
    stage = 0
    phase = 1
    for i in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = _tile(i, m_tiles, n_tiles, GROUP)
        for k in range(blocks):
            mbarrier.wait(free.index(stage), phase)
            arrived = full.index(stage)
            mbarrier.expect(arrived, BYTES)
            for w in gl.static_range(2):
                row = m * BM + w * HALF
                slot = stage * 2 + w
                tma.async_copy_global_to_shared(a, [row, k * 128], arrived, a_ring.index(slot))
                if not A_SQUARE:
                    tma.async_copy_global_to_shared(
                        a_scales, [k * a_stride + row], arrived, a_scale_ring.index(slot)
                    )
            tma.async_copy_global_to_shared(b, [n * BN, k * 128], arrived, b_ring.index(stage))
            if not B_SQUARE:
                tma.async_copy_global_to_shared(
                    b_scales, [k * b_stride + n * BN], arrived, b_scale_ring.index(stage)
                )
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _add_scaled(total, part, a_scale, b_scale, A_SQUARE: gl.constexpr, B_SQUARE: gl.constexpr):
    """``total + part * a_scale * b_scale``; a scale is one number, or one per row or column."""
    if B_SQUARE:
        scale = a_scale * b_scale
    else:
        part = part * b_scale[None, :]
        scale = a_scale
    if not A_SQUARE:
        scale = scale[:, None]
    total = gl.fma(part, gl.zeros_like(part) + scale, total)
    # Nothing is in flight to be waited for. It keeps the compiler from adding only after it has
    # started the next product, for which there are no registers.
    return warpgroup_mma_wait(0, deps=(total,))


@gluon.jit
def _write(y, staging, total, row, column, WIDTH: gl.constexpr):
    """Write a tile by way of shared memory, ``WIDTH`` columns at a time."""
    if total.shape[1] > WIDTH:
        half: gl.constexpr = total.shape[1] // 2
        left, right = total.reshape([64, 2, half]).permute(0, 2, 1).split()
        _write(y, staging, left, row, column, WIDTH)
        _write(y, staging, right, row, column + half, WIDTH)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
        tma.store_wait(0)
        staging.store(gl.convert_layout(total, layout))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [row, column], staging)


@gluon.jit
def _sum(
    rings,
    results,
    scales,
    sizes,
    W: gl.constexpr,
    MI: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    A_SQUARE: gl.constexpr,
    B_SQUARE: gl.constexpr,
):
    """Warpgroup ``W``, which has the upper or the lower half of each tile."""
    a_ring, b_ring, a_scale_ring, b_scale_ring, full, free = rings
    y, stagings = results
    a_scale_ptr, b_scale_ptr = scales
    M, N, K, a_stride, b_stride = sizes
    HALF: gl.constexpr = 64 * MI
    BM: gl.constexpr = 2 * HALF
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    WIDTH: gl.constexpr = y.block_shape[1]
    m_tiles = gl.cdiv(M, BM)
    n_tiles = gl.cdiv(N, BN)
    blocks = gl.cdiv(K, 128)
    m_blocks = gl.cdiv(M, 128)
    staging = stagings.index(W)
    stage = 0
    phase = 0
    part = gl.zeros([64, BN], gl.float32, layout)
    for i in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m, n = _tile(i, m_tiles, n_tiles, GROUP)
        row = m * BM + W * HALF
        upper = gl.zeros([64, BN], gl.float32, layout)
        lower = gl.zeros([64, BN], gl.float32, layout)
        # Scales of 128 x 128 values are numbers of the next block that are asked for in time.
        a_at = a_scale_ptr + min(row // 128, m_blocks - 1).to(gl.int64) * a_stride
        b_at = b_scale_ptr + (n * BN // 128).to(gl.int64) * b_stride
        a_next = 1.0
        b_next = 1.0
        if A_SQUARE:
            a_next = gl.load(a_at)
        if B_SQUARE:
            b_next = gl.load(b_at)
        for k in range(blocks):
            a_scale = a_next
            b_scale = b_next
            after = min(k + 1, blocks - 1)
            if A_SQUARE:
                a_next = gl.load(a_at + after)
            if B_SQUARE:
                b_next = gl.load(b_at + after)
            mbarrier.wait(full.index(stage), phase)
            a_block = a_ring.index(stage * 2 + W)
            a_scales = a_scale_ring.index(0 if A_SQUARE else stage * 2 + W)
            b_block = b_ring.index(stage).permute((1, 0))
            if not B_SQUARE:
                b_scale = b_scale_ring.index(stage).load(columns)
            if not A_SQUARE:
                a_scale = a_scales.slice(0, 64).load(rows)
            token = warpgroup_mma(a_block.slice(0, 64), b_block, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(token,))
            upper = _add_scaled(upper, part, a_scale, b_scale, A_SQUARE, B_SQUARE)
            if MI == 2:
                if not A_SQUARE:
                    a_scale = a_scales.slice(64, 64).load(rows)
                token = warpgroup_mma(
                    a_block.slice(64, 64), b_block, part, use_acc=False, is_async=True
                )
                part = warpgroup_mma_wait(0, deps=(token,))
                mbarrier.arrive(free.index(stage))
                lower = _add_scaled(lower, part, a_scale, b_scale, A_SQUARE, B_SQUARE)
            else:
                mbarrier.arrive(free.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        _write(y, staging, upper.to(y.dtype), row, n * BN, WIDTH)
        if MI == 2:
            _write(y, staging, lower.to(y.dtype), row + 64, n * BN, WIDTH)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def block_gemm_kernel(
    a,
    b,
    a_scales,
    b_scales,
    y,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    K,
    a_stride,
    b_stride,
    MI: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    A_SQUARE: gl.constexpr,
    B_SQUARE: gl.constexpr,
):
    """``y [M, N] = a [M, K] @ b [N, K]^T`` in tiles of ``128 * MI`` by ``BN``.

    ``a_scales`` and ``b_scales`` describe the scales as one row, for scales of 1 x 128 values; the
    pointers are for scales of 128 x 128. Strides are those between rows of scales.
    """
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES * 2, 64 * MI, 128], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BN, 128], b.layout)
    a_scale_ring = gl.allocate_shared_memory(
        gl.float32, [1 if A_SQUARE else STAGES * 2, 64 * MI], a_scales.layout
    )
    b_scale_ring = gl.allocate_shared_memory(
        gl.float32, [1 if B_SQUARE else STAGES, BN], b_scales.layout
    )
    stagings = gl.allocate_shared_memory(y.dtype, [2, 64, y.block_shape[1]], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
        mbarrier.init(free.index(j), count=2)
    fence_async_shared()
    rings = (a_ring, b_ring, a_scale_ring, b_scale_ring, full, free)
    sizes = (M, N, K, a_stride, b_stride)
    sources = (a, b, a_scales, b_scales)
    results = (y, stagings)
    scales = (a_scale_ptr, b_scale_ptr)
    gl.warp_specialize(
        [
            (
                _sum,
                (rings, results, scales, sizes, 0, MI, BN, STAGES, GROUP, A_SQUARE, B_SQUARE),
            ),
            (
                _sum,
                (rings, results, scales, sizes, 1, MI, BN, STAGES, GROUP, A_SQUARE, B_SQUARE),
            ),
            (_copy, (sources, rings, sizes, MI, BN, STAGES, GROUP, A_SQUARE, B_SQUARE)),
        ],
        [4, 1],
        [_SUM_REGISTERS, _COPY_REGISTERS],
    )
