# SPDX-License-Identifier: Apache-2.0
"""Quantization with block scales ("block", MXFP8, NVFP4): which kernels run, and with what grid.

Bytes moved per element of bf16 input and both orientations, scales aside: "block" and MXFP8 4 (one
pass), NVFP4 5 (amax pass, cast pass; where the cast loads twice, the second time from the caches).
What makes the values (``Source``) may be part of the pass. Row-scaled and four-over-six NVFP4 take
their values from memory only (``fuses``).

Tiles and warps are the fastest of those that were tried on an H200; `strip_options` and
`block_tile` say why they are.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ...formats.layout import Quantized, ceil_div, round_up
from ...formats.spec import QuantSpec
from .amax import partial_amaxes, vector_amaxes
from .block_kernels import hadamard_amax_kernel, quantize_tiles_kernel
from .block_strips import quantize_strips_kernel
from .common import MAX_PARTIALS, empty, padded_partials, quantization_buffers, zero

_FORMAT_CODE = {"e4m3": 1, "e5m2": 2, "e2m1": 0}
_COLUMNS = {"block": 1, "mxfp8": 32, "nvfp4": 16}  # what the last dimension is a multiple of
_NO_TENSORS = dict.fromkeys(("dy", "w", "b", "mean", "rstd"))
_NO_FLAGS = {
    "LAYER_NORM": False,
    "HAS_BIAS": False,
    "ZERO_CENTERED": False,
    "ACT": "",
    "GATED": False,
    "CLAMPED": False,
}


class Source(NamedTuple):
    """What the values to quantize are made from; ``producers.py`` says how.

    ``width`` counts the columns of a tile row, half of ``columns`` for a gated gradient.
    """

    kind: str
    x: Tensor
    width: int
    columns: int
    tensors: dict
    flags: dict
    parameters: tuple = (0.0, 0.0, 0.0)  # limit, alpha, offset of the activation

    def arguments(self) -> dict:
        """Keyword arguments of a kernel, without the quantization."""
        limit, alpha, offset = self.parameters
        return {
            "x": self.x,
            "M": self.x.shape[0],
            "F": self.width,
            "limit": limit,
            "alpha": alpha,
            "offset": offset,
            "SOURCE": self.kind,
            **_NO_TENSORS,
            **self.tensors,
            **_NO_FLAGS,
            **self.flags,
        }


def source_of(x: Tensor) -> Source:
    """Values that lie in memory, ``x [M, K]``."""
    return Source("load", x, x.shape[1], x.shape[1], {}, {})


def fuses(spec: QuantSpec, width: int, columns: int) -> bool:
    """Whether one kernel can make and quantize values, of ``columns`` in parts of ``width``.

    The parts must not share a block.
    """
    return not (spec.row_scaled or spec.four_over_six) and (width == columns or width % 128 == 0)


def has_global_amax(spec: QuantSpec) -> bool:
    """Whether both orientations share one amax, which a producer may find before it rounds."""
    return spec.kind == "nvfp4" and not (spec.rht or spec.row_scaled)


def quantize_source(
    source: Source,
    spec: QuantSpec,
    rowwise: bool,
    columnwise: bool,
    partials: Optional[Tensor] = None,
    rng: Optional[Tensor] = None,
    y: Optional[Tensor] = None,
    want_sums: bool = False,
) -> tuple[Quantized, Optional[Tensor]]:
    """Quantize what a source gives.

    Args:
        partials: fp32, their maximum is the global amax (NVFP4, but not that of columnwise values
            that are transformed); None has it found, for values in memory.
        y: receives the values as well.
        want_sums: whether to sum columns.

    Returns:
        The buffers, and partial sums fp32 [1, P, columns] if wanted.
    """
    rows, columns = source.x.shape[0], source.columns
    _check(source, spec, rng)
    out = quantization_buffers(source.x, spec, rows, columns, rowwise, columnwise)
    if rows == 0:
        for amax in (out.amax, out.col_amax):
            if amax is not None:
                zero(amax)
        return out, None
    col_partials = None
    if spec.row_scaled:
        vector_amaxes(source.x, out)
    elif spec.kind == "nvfp4":
        if spec.rht and (columnwise or source.kind != "load"):
            found, col_partials = _hadamard_amaxes(source, spec)
            partials = found if partials is None else partials
        elif partials is None:
            partials = partial_amaxes(source.x)
    if spec.kind == "block":
        return out, _quantize_strips(source, spec, out, y, want_sums)
    return out, _quantize_tiles(source, spec, out, (partials, col_partials), rng, y, want_sums)


def _quantize_strips(
    source: Source, spec: QuantSpec, out: Quantized, y: Optional[Tensor], want_sums: bool
) -> Optional[Tensor]:
    """Kind "block"; returns partial sums."""
    tile_rows = ceil_div(source.x.shape[0], 128)
    sums = _sums(source, tile_rows) if want_sums else None
    ahead, warps, registers = strip_options(source)
    quantize_strips_kernel[(tile_rows * ceil_div(source.width, 128),)](
        **source.arguments(),
        **_outputs(spec, out, y, sums),
        eps=spec.eps,
        POW2=spec.pow2,
        LARGEST=torch.finfo(source.x.dtype).max,
        AHEAD=ahead,
        num_warps=warps,
        maxnreg=registers,
    )
    return sums


def _quantize_tiles(
    source: Source,
    spec: QuantSpec,
    out: Quantized,
    partials: tuple,
    rng: Optional[Tensor],
    y: Optional[Tensor],
    want_sums: bool,
) -> Optional[Tensor]:
    """MXFP8 and NVFP4; returns partial sums. ``partials`` are those of amaxes."""
    block_m, block_n, warps, group = block_tile(spec, source, out.col is not None)
    tile_rows = round_up(source.x.shape[0], 128) // block_m
    sums = _sums(source, tile_rows) if want_sums else None
    counts = [1 if found is None else found.numel() for found in partials]
    quantize_tiles_kernel[(tile_rows * ceil_div(round_up(source.width, 128), block_n),)](
        **source.arguments(),
        **_outputs(spec, out, y, sums),
        row_amax=out.amax,
        col_amax=out.col_amax,
        row_partials=partials[0],
        n_row_partials=counts[0],
        col_partials=partials[1],
        n_col_partials=counts[1],
        rng=rng,
        KIND=spec.kind,
        SWIZZLED=spec.swizzled,
        UNROUNDED=spec.unrounded,
        RHT=spec.rht,
        SIGN_MASK=spec.sign_mask if spec.rht else 0,
        STOCHASTIC=spec.stochastic,
        ROW_SCALED=spec.row_scaled,
        FOUR_SIX=("", "mae", "mse").index(spec.four_over_six),
        E4M3_MAX=spec.e4m3_max,
        ROW_BP=padded_partials(counts[0]),
        COL_BP=padded_partials(counts[1]),
        IN_MEMORY=loads_twice(spec, source),
        GROUP=group,
        BM=block_m,
        BN=block_n,
        num_warps=warps,
        enable_fp_fusion=not spec.four_over_six,
    )
    return sums


def _sums(source: Source, tile_rows: int) -> Tensor:
    """Memory for the column sums of each row of tiles."""
    return empty(source.x, (1, tile_rows, source.columns), torch.float32)


def _outputs(spec: QuantSpec, out: Quantized, y: Optional[Tensor], sums: Optional[Tensor]) -> dict:
    """Keyword arguments of either kernel: where it writes, and which formats."""
    return {
        "y": y,
        "sums": sums,
        "row": out.row,
        "col": out.col,
        "row_scale": out.scale_inv,
        "col_scale": out.col_scale_inv,
        "WRITE_Y": y is not None,
        "BIAS_GRAD": sums is not None,
        "FMT": _FORMAT_CODE[spec.fmt],
        "DIM": spec.dim,
        "ROW": out.row is not None,
        "COL": out.col is not None,
    }


def _check(source: Source, spec: QuantSpec, rng: Optional[Tensor]) -> None:
    if source.columns % _COLUMNS[spec.kind]:
        raise ValueError(
            f"The tensor to quantize has {source.columns} columns; {spec.kind} needs a multiple of "
            f"{_COLUMNS[spec.kind]}. Pad the last dimension."
        )
    if spec.rht and source.x.dtype != torch.bfloat16:
        raise ValueError(
            f"The random Hadamard transform is defined for torch.bfloat16, and x is "
            f"{source.x.dtype}. Use bf16 activations and parameters, or a recipe with "
            "disable_rht=True."
        )
    if spec.stochastic and rng is None:
        raise ValueError(
            "Stochastic rounding of NVFP4 needs random numbers, and rng is None. Pass an int64 "
            "tensor of a seed and an offset."
        )


def _hadamard_amaxes(source: Source, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Partial amaxes of the values and of their transformed columns."""
    block_m, block_n, warps = 64, 64, 4
    tiles = ceil_div(source.x.shape[0], block_m) * (round_up(source.width, 128) // block_n)
    programs = min(tiles, MAX_PARTIALS)
    partials = empty(source.x, (2, programs), torch.float32)
    hadamard_amax_kernel[(programs,)](
        **source.arguments(),
        row_partials=partials[0],
        col_partials=partials[1],
        SIGN_MASK=spec.sign_mask,
        BM=block_m,
        BN=block_n,
        num_warps=warps,
    )
    return partials[0], partials[1]


def strip_options(source: Source) -> tuple:
    """(AHEAD, num_warps, maxnreg) of the kernel of kind "block".

    Few warps exchange little, and three programs of 4 with 168 registers each share a
    multiprocessor. A gradient of both halves holds twice as many values.
    """
    if source.width % 16:
        return 1, 8, None  # without aligned rows every element needs registers for its address
    if source.width != source.columns:
        return 1, 8, 128  # two programs to a multiprocessor
    return 2 if source.kind == "load" else 1, 4, 168


def loads_twice(spec: QuantSpec, source: Source) -> bool:
    """Whether NVFP4 loads values once for each orientation instead of exchanging them.

    With the Hadamard transform or square blocks it was slower.
    """
    return spec.kind == "nvfp4" and source.kind == "load" and not spec.rht and spec.dim == 1


def block_tile(spec: QuantSpec, source: Source, columnwise: bool) -> tuple:
    """(BM, BN, num_warps, GROUP) of the kernel of MXFP8 and NVFP4; BM divides 128.

    MXFP8 takes few warps to a tile: the more rows of a block one thread holds, the less must be
    exchanged. GROUP rows of tiles are walked together, so that tiles which share sectors and pages
    of the columnwise buffers and of the scales are written at about the same time. NVFP4 takes 64
    rows, 32 bytes of a columnwise buffer and so a whole sector of memory.
    """
    if spec.kind == "mxfp8":
        if source.kind != "load":
            return 32, 128, 2, 4
        if spec.dim == 2 or not columnwise:
            return 32, 256, 2, 1
        return (32, 128, 1, 1) if spec.swizzled else (32, 128, 2, 16)
    if spec.four_over_six:
        return 64, 64, 4, 1
    if source.kind == "load" and not loads_twice(spec, source):
        return 64, 128, 4, 1
    return 64, 64, 2, 1
