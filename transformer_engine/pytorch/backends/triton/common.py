# SPDX-License-Identifier: Apache-2.0
"""What the Triton kernels share: FP8 casts, scales, and the host side of a quantization.

Conventions of all kernels here:

* addresses are int64, so tensors may hold more than 2^31 elements; every dimension is masked;
* the number of rows is never specialised, so a changing batch compiles nothing anew;
* float arguments are cast to fp32 in the kernel (a compiler may pass them as fp64);
* an amax is found without a zeroed buffer where the pass that casts comes later anyway: programs
  of the first pass write partial maxima, and each program of the second reduces them itself.
"""

# pylint: disable=comparison-with-itself

from __future__ import annotations

import functools
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._dynamo import guards

from ...formats.layout import Quantized, ScaleAndHistory, ceil_div, quantized_layout
from ...formats.spec import QuantSpec
from ..recording import Allocation, Zeros, note
from .launch import launched, next_power_of_2

# The interpreter's maximum propagates NaN and its FP8 cast truncates; kernels step around both.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)

_FORMAT_CODE = {"e4m3": 1, "e5m2": 2}  # values of the constexpr FMT

# A pass that finds an amax runs this many programs at most, so that the next can reduce their
# partial maxima in one load.
MAX_PARTIALS = 1024


# ---------------------------------------------------------------------------------------------
# Device functions


@triton.jit
def cast_to_fp8_by_bits(v, FMT: tl.constexpr):
    """Bytes of fp32 ``v`` by integer arithmetic: nearest even, saturating, NaN stays NaN."""
    mantissa: tl.constexpr = 3 if FMT == 1 else 2
    bias: tl.constexpr = 7 if FMT == 1 else 15
    limit: tl.constexpr = 448.0 if FMT == 1 else 57344.0
    min_normal: tl.constexpr = 2.0 ** (1 - bias)
    # Adding 2^23 subnormal steps makes the fp32 addition round to a whole number of steps.
    magic: tl.constexpr = 2.0 ** (1 - bias - mantissa + 23)
    shift: tl.constexpr = 23 - mantissa

    a = tl.abs(v)
    a = tl.where(a < limit, a, limit)
    bits = a.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift
    normal = rounded - ((127 - bias) << mantissa)
    subnormal = (a + magic).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(a < min_normal, subnormal, normal)
    code = code | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return tl.where(v != v, 0x7F, code).to(tl.uint8)


@triton.jit
def cast_to_fp8(v, FMT: tl.constexpr):
    """Bytes of fp32 ``v``: nearest even, saturating, NaN stays a NaN code.

    The PTX instruction behind ``.to`` (cvt.rn.satfinite) saturates by itself. A clamp before it
    would cost as much as the rest of a cast kernel, and a NaN-propagating one has made Triton store
    wrong bytes in transposed stores (triton-lang/triton#11111).
    """
    if INTERPRETED:
        q = cast_to_fp8_by_bits(v, FMT)
    elif FMT == 1:
        q = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        q = v.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return q


@triton.jit
def maximum_dropping_nan(acc, v):
    """``max(acc, v)`` where a NaN in ``v`` loses; ``acc`` holds no NaN."""
    if INTERPRETED:
        m = tl.where(v > acc, v, acc)
    else:
        m = tl.maximum(acc, v)
    return m


@triton.jit
def largest_magnitude(v):
    """Elementwise largest absolute value of four fp32 tiles, NaN ignored; 0 if all are NaN."""
    m = tl.zeros_like(v[0])
    for i in tl.static_range(4):
        m = maximum_dropping_nan(m, tl.abs(v[i]))
    return m


@triton.jit
def amax_of_tile(v):
    """Largest absolute value of a 2-D fp32 tile, NaN elements ignored; 0 if all are NaN."""
    m = tl.max(tl.max(tl.abs(v), 1), 0)
    return tl.where(m == m, m, 0.0)


@triton.jit
def scale_from_amax(
    amax, eps, FMT: tl.constexpr, POW2: tl.constexpr, LARGEST: tl.constexpr = FLOAT32_MAX
):
    """Scale of current and of block scaling; the rule is ``formats.fp8.scale_from_amax``.

    LARGEST takes the place of a quotient that overflows.
    """
    limit: tl.constexpr = 448.0 if FMT == 1 else 57344.0
    eps = tl.cast(eps, tl.float32)
    a = tl.where(amax < eps, eps, amax)
    # Only a correctly rounded quotient gives the reference's bytes; `/` is approximate.
    s = tl.div_rn(tl.full(a.shape, limit, tl.float32), a)
    s = tl.where(s == float("inf"), LARGEST, s)
    if POW2:
        s = (s.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((a == float("inf")) | (a == 0.0) | (a != a), 1.0, s)


@triton.jit
def reduce_partials(partials, n_partials, BP: tl.constexpr):
    """Maximum of ``n_partials <= BP`` values."""
    i = tl.arange(0, BP)
    return tl.max(tl.load(partials + i, mask=i < n_partials, other=0.0), 0)


@triton.jit
def prefetch_scale(scale, slot, partials, n_partials, DELAYED: tl.constexpr, BP: tl.constexpr):
    """What the scale depends on, loaded before the tile so that the two loads overlap."""
    if DELAYED:
        p = tl.load(scale + slot)
    else:
        i = tl.arange(0, BP)
        p = tl.load(partials + i, mask=i < n_partials, other=0.0)
    return p


@triton.jit
def quantization_scale(
    prefetched,
    partials,
    n_partials,
    amax,
    scale_inv,
    eps,
    leads,
    DELAYED: tl.constexpr,
    REDUCE: tl.constexpr,
    FMT: tl.constexpr,
    POW2: tl.constexpr,
    BP: tl.constexpr,
):
    """The scale of this quantization; the program that ``leads`` writes scale_inv and amax.

    DELAYED: the scale is given. REDUCE: the amax is that of ``partials``; otherwise the caller
    accumulates it. Without DELAYED the scale comes from the partials, and a single NaN stays NaN.
    """
    if DELAYED:
        s = prefetched
        if REDUCE:
            if leads:
                tl.store(amax, reduce_partials(partials, n_partials, BP))
    else:
        a = tl.max(prefetched, 0)
        s = scale_from_amax(a, eps, FMT, POW2)
        if leads:
            tl.store(amax, a)
    if leads:
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), s))
    return s


@triton.jit
def store_amax(amax, found, FOLD: tl.constexpr):
    """amax[0] = ``found``, or with FOLD the larger of both; of one program."""
    if FOLD:
        found = tl.maximum(found, tl.load(amax))
    tl.store(amax, found)


@launched
@triton.jit(do_not_specialize=["n_partials"], do_not_specialize_on_alignment=["amax"])
def finish_amax_kernel(partials, amax, n_partials, FOLD: tl.constexpr, BP: tl.constexpr):
    """amax[0] = maximum of the partial maxima; one program."""
    store_amax(amax, reduce_partials(partials, n_partials, BP), FOLD)


# ---------------------------------------------------------------------------------------------
# Host functions


def empty(like: Tensor, shape, dtype: torch.dtype) -> Tensor:
    """Uninitialised contiguous tensor on the device of ``like``, which is the current one."""
    if not like.is_cuda:
        return torch.empty(shape, dtype=dtype, device=like.device)
    # What Inductor's code calls: a quarter of the time of torch.empty.
    shape = tuple(shape)  # of torch.Size it takes none
    strides = _strides(shape)
    tensor = guards._empty_strided_cuda(shape, strides, dtype)
    note(Allocation(tensor, strides))
    return tensor


def zero(tensor: Tensor) -> Tensor:
    """Fill memory that `empty` gave."""
    note(Zeros(tensor))
    return tensor.zero_()


@functools.lru_cache(maxsize=None)
def _strides(shape: tuple) -> tuple:
    """Strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides))


def split_scale(scale, slot: Optional[int]) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """The scales, and the cell of the history that gets the amax, if there is one."""
    if isinstance(scale, ScaleAndHistory):
        return scale.scale, scale.cell(slot)
    return scale, None


def quantization_buffers(
    like: Tensor,
    spec: QuantSpec,
    rows,
    columns,
    rowwise,
    columnwise,
    zero_amax: bool = False,
    cell: Optional[Tensor] = None,
) -> Quantized:
    """Outputs of a quantization of ``[rows, columns]``; ``zero_amax`` if kernels accumulate it.

    A ``cell`` takes the place of the amax.
    """
    shapes = _layout(spec, rows, columns, rowwise, columnwise)
    row, col, scale_inv, col_scale_inv, amax, col_amax, scale_dtype = shapes
    return Quantized(
        None if row is None else empty(like, row, torch.uint8),
        None if col is None else empty(like, col, torch.uint8),
        None if scale_inv is None else empty(like, scale_inv, scale_dtype),
        None if col_scale_inv is None else empty(like, col_scale_inv, scale_dtype),
        cell if cell is not None or amax is None else _amax(like, amax, zero_amax),
        None if col_amax is None else empty(like, col_amax, torch.float32),
    )


_layout = functools.lru_cache(maxsize=4096)(quantized_layout)


def _amax(like: Tensor, shape: tuple, zeroed: bool) -> Tensor:
    amax = empty(like, shape, torch.float32)
    return zero(amax) if zeroed else amax


def format_code(spec: QuantSpec) -> int:
    """The constexpr FMT of a quantization."""
    return _FORMAT_CODE[spec.fmt]


def padded_partials(n_partials: int) -> int:
    """The block size BP that holds ``n_partials``."""
    return next_power_of_2(n_partials)


@functools.lru_cache(maxsize=None)
def processors(device: torch.device) -> int:
    """Number of streaming multiprocessors, to size grids of looping programs; 4 on a CPU."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_count(rows: int, columns: int, block_m: int, block_n: int) -> int:
    """Grid of a tile kernel: at least one program, which writes the scalars of an empty one."""
    return max(1, ceil_div(rows, block_m) * ceil_div(columns, block_n))


def cast_block(rows: int, columns: int) -> tuple:
    """(BM, BN, num_warps) of kernels that read one tensor and write bytes.

    Small tensors take small tiles to fill the GPU; large ones tiles of full cache lines, if their
    rows are aligned: otherwise the address of every element takes registers.
    """
    if rows * columns <= 1 << 21 or columns % 16:
        return 32, 64, 4
    return 64, 128, 4


def activation_block(rows: int, columns: int, backward: bool) -> tuple:
    """(BM, BN, num_warps) of activation kernels, which hold two to five tiles in registers."""
    if columns % 16:
        return 32, 64, 8 if backward else 4
    if rows * columns <= 1 << 21:
        return 32, 64, 4
    return 64, 64, 8 if backward else 4


def runs_on_its_device(leaf):
    """Launch with the device of the first tensor argument as the current one.

    Triton launches on the current device, which need not be the one that holds the tensors.
    """

    @functools.wraps(leaf)
    def run(*args):
        for x in args:
            if isinstance(x, Tensor):
                if x.is_cuda and x.device.index != torch._C._cuda_getDevice():
                    with torch.cuda.device(x.device):
                        return leaf(*args)
                break
        return leaf(*args)

    return run
