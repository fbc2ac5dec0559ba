# SPDX-License-Identifier: Apache-2.0
"""The one layout predicate: which buffers a quantized ``[rows, columns]`` tensor consists of.

Fakes ask it for shapes and kernels allocate by it, so that what a compiler is told and what a
kernel writes cannot differ. Nobody else computes layouts.

The contracted dimension of a columnwise buffer is padded with zero bytes to what the GEMMs want, so
that any number of rows works. Padding of scale buffers is zero as well.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .spec import WHOLE_ROWS, QuantSpec

BLOCK = 128  # values per scale of "block"
MXFP8_BLOCK = 32
NVFP4_BLOCK = 16
# Rows of zeros fill a columnwise buffer up to a multiple of this.
_ROW_ALIGNMENT = {"delayed": 16, "current": 16, "block": 128, "mxfp8": 32, "nvfp4": 32}


class Layout(NamedTuple):
    """Shapes of the buffers of a quantized tensor; None where a buffer is absent."""

    row: Optional[tuple]
    col: Optional[tuple]
    scale_inv: Optional[tuple]
    col_scale_inv: Optional[tuple]
    amax: Optional[tuple]
    col_amax: Optional[tuple]
    scale_dtype: torch.dtype


class Quantized(NamedTuple):
    """The buffers of a quantized ``[rows, columns]`` tensor, as the leaf ops return them.

    ``row`` and ``col`` are uint8. Per-tensor FP8 has one ``scale_inv`` for both orientations; other
    kinds have ``scale_inv`` for ``row`` and ``col_scale_inv`` for ``col``, absent with it. ``amax``
    is that of the tensor: for per-tensor FP8 always there, for NVFP4 part of the representation.
    """

    row: Optional[Tensor]
    col: Optional[Tensor]
    scale_inv: Optional[Tensor]
    col_scale_inv: Optional[Tensor]
    amax: Optional[Tensor]
    col_amax: Optional[Tensor]


class ScaleAndHistory(NamedTuple):
    """What eager calls hand to leaf ops in place of the scales of delayed scaling.

    ``scale`` fp32 [n], ``history`` fp32 [L, n]. The leaf op then folds the amax that it finds into
    ``history[0, slot]``, which saves two launches, and returns none.
    """

    scale: Tensor
    history: Tensor

    def cell(self, slot: int) -> Tensor:
        """Where the amax goes, a view [1]."""
        return self.history[0, slot : slot + 1]


NOTHING = Quantized(None, None, None, None, None, None)


def ceil_div(value, by: int):
    """``value / by`` rounded up (int or SymInt)."""
    return (value + by - 1) // by


def round_up(value, multiple: int):
    """``value`` rounded up to a multiple (int or SymInt)."""
    return (value + multiple - 1) // multiple * multiple


def padded_rows(rows, kind: str = "current"):
    """``rows`` (int or SymInt) rounded up to the multiple that a columnwise buffer holds."""
    return round_up(rows, _ROW_ALIGNMENT[kind])


def quantized_layout(spec: QuantSpec, rows, columns, rowwise: bool, columnwise: bool) -> Layout:
    """Buffers of a quantized ``[rows, columns]`` tensor, with Mp = ``padded_rows(rows, kind)``.

    ======== ============== =============== ============================= ==========================
    kind     row            col             scale_inv                     col_scale_inv
    ======== ============== =============== ============================= ==========================
    delayed  [M, K]         [K, Mp]         [1]                           none
    current  [M, K]         [K, Mp]         [1]                           none
    block 1D [M, K]         [K, Mp]         [ceil(K/128), up(M, 4)]       [ceil(M/128), up(K, 4)]
    block 2D [M, K]         [K, Mp]         [ceil(M/128),                 [ceil(K/128),
                                            up(ceil(K/128), 4)]           up(ceil(M/128), 4)]
    mxfp8    [M, K]         [Mp, K]         [up(M, 128), up(K/32, 4)]     [up(M/32, 4), up(K, 128)]
    nvfp4    [M, K/2]       [K, Mp/2]       [up(M, 128), up(K/16, 4)]     [up(K, 128), up(M/16, 4)]
    ======== ============== =============== ============================= ==========================

    Columnwise buffers are transposed (but MXFP8's), because GEMMs of those formats contract over
    the last dimension of both operands. Scales are fp32; of MXFP8 and NVFP4 they are bytes, E8M0
    and E4M3. The amaxes of NVFP4 are [1], or [M] and [K] if it is row-scaled.
    """
    if spec.per_tensor:
        return Layout(
            row=(rows, columns) if rowwise else None,
            col=(columns, padded_rows(rows, spec.kind)) if columnwise else None,
            scale_inv=(1,),
            col_scale_inv=None,
            amax=(1,),
            col_amax=None,
            scale_dtype=torch.float32,
        )
    describe = {"block": _block_layout, "mxfp8": _mxfp8_layout, "nvfp4": _nvfp4_layout}[spec.kind]
    layout = describe(spec, rows, columns)
    if not rowwise:
        layout = layout._replace(row=None, scale_inv=None, amax=None)
    if not columnwise:
        layout = layout._replace(col=None, col_scale_inv=None, col_amax=None)
    return layout


def _block_layout(spec: QuantSpec, rows, columns) -> Layout:
    if spec.dim == 1:
        scale = (ceil_div(columns, BLOCK), round_up(rows, 4))
        col_scale = (ceil_div(rows, BLOCK), round_up(columns, 4))
    else:
        scale = (ceil_div(rows, BLOCK), round_up(ceil_div(columns, BLOCK), 4))
        col_scale = (ceil_div(columns, BLOCK), round_up(ceil_div(rows, BLOCK), 4))
    padded = padded_rows(rows, "block")
    return Layout((rows, columns), (columns, padded), scale, col_scale, None, None, torch.float32)


def _mxfp8_layout(spec: QuantSpec, rows, columns) -> Layout:
    del spec
    return Layout(
        (rows, columns),
        (padded_rows(rows, "mxfp8"), columns),
        (round_up(rows, 128), round_up(ceil_div(columns, MXFP8_BLOCK), 4)),
        (round_up(ceil_div(rows, MXFP8_BLOCK), 4), round_up(columns, 128)),
        None,
        None,
        torch.uint8,
    )


def _nvfp4_layout(spec: QuantSpec, rows, columns) -> Layout:
    return Layout(
        (rows, columns // 2),
        (columns, padded_rows(rows, "nvfp4") // 2),
        (round_up(rows, 128), round_up(ceil_div(columns, NVFP4_BLOCK), 4)),
        (round_up(columns, 128), round_up(ceil_div(rows, NVFP4_BLOCK), 4)),
        (rows,) if spec.row_scaled else (1,),
        (columns,) if spec.row_scaled else (1,),
        torch.uint8,
    )


# --- the order of block scales ------------------------------------------------------------------

PRODUCERS = ("quantize", "norm", "activation", "bias_grad", "weight")


class LayoutFlags(NamedTuple):
    """What the environment says about layouts; see ``environment.layout_flags``."""

    cudnn_norm: bool = False  # NVTE_NORM_FWD_USE_CUDNN
    rht_fusion: bool = True  # not NVTE_NVFP4_DISABLE_RHT_CAST_FUSION


@lru_cache(maxsize=None)
def _with(spec: QuantSpec, swizzled: bool, unrounded: int) -> QuantSpec:
    return replace(spec, swizzled=swizzled, unrounded=unrounded)


def produced_spec(
    spec: QuantSpec, producer: str, rows, columns, capability: tuple, flags: LayoutFlags
) -> QuantSpec:
    """What ``spec`` becomes when ``producer`` makes the tensor: are its scales swizzled?

    ``spec.swizzled`` is the wish of a quantizer (``optimize_for_gemm``). The result says what the
    kernel must write and what a consumer will find. It decides as the reference package does:

    * MXFP8: the wish is granted, except that a norm under ``cudnn_norm`` with rows and columns that
      are multiples of 128 leaves scales compact, and quantizes its unrounded fp32 result. A graph
      whose rows are unbacked leaves the latter to the kernel, and the order as it was wished.
    * NVFP4: a plain quantize grants the wish. Kernels that produce the values themselves do so on
      GPUs of compute capability 10.0 to 11.0 only: with a Hadamard transform if rows are a multiple
      of 64, columns of 128 and ``rht_fusion`` is on; without one for square blocks if both are
      multiples of 128.

    Args:
        producer: ``"quantize"``, ``"norm"``, ``"activation"`` (forward or backward),
            ``"bias_grad"`` (a quantize that also sums columns) or ``"weight"`` (a module's).
        rows, columns: shape of the tensor, ints or SymInts. They are looked at only where the
            answer depends on them.
        capability: compute capability of the tensor's device, (0, 0) for the CPU.
    """
    if spec.kind == "mxfp8":
        if not (flags.cudnn_norm and producer == "norm") or columns % 128 != 0:
            return _with(spec, spec.swizzled, 0)
        whole = rows % WHOLE_ROWS == 0
        if _is_unknown(whole):
            return _with(spec, spec.swizzled, 2)
        # This one decides about numbers, so a graph that can know the rows has to.
        return _with(spec, spec.swizzled and not whole, int(bool(whole)))
    if spec.kind != "nvfp4" or not spec.swizzled or producer == "quantize":
        return spec
    return _with(spec, emits_swizzled_scales(spec, rows, columns, capability, flags), 0)


def emits_swizzled_scales(
    spec: QuantSpec, rows, columns, capability: tuple, flags: LayoutFlags
) -> bool:
    """Whether an NVFP4 kernel writes swizzled scales itself, rather than a pass after it."""
    if not (10, 0) <= capability <= (11, 0):
        return False
    if spec.rht:
        return flags.rht_fusion and _multiples(rows, 64, columns, 128)
    square = spec.dim == 2 and not spec.row_scaled and not spec.four_over_six
    return square and _multiples(rows, 128, columns, 128)


def _is_unknown(condition) -> bool:
    """Whether a condition on sizes can not be decided while tracing, not even by a guard."""
    if isinstance(condition, bool):
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, has_free_unbacked_symbols

    return has_free_unbacked_symbols(condition) and not guard_or_false(condition)


def _multiples(rows, of_rows: int, columns, of_columns: int) -> bool:
    """Whether both sizes are known to be multiples; a size that a graph does not know is none."""
    fits = columns % of_columns == 0 and rows % of_rows == 0
    if isinstance(fits, bool):
        return fits
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(fits)
