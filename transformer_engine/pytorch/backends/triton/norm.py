# SPDX-License-Identifier: Apache-2.0
"""norm_forward: which kernels run, and with what grid.

Launches, with the bytes moved per element of bf16 input and both orientations:

* no quantization: 1, 4 bytes
* delayed, output not wanted: 2 (norm to bytes, byte transpose), 5 bytes
* current, output not wanted: 2 (statistics and amax, normalize again and cast), 6 bytes
* quantized and output wanted: 2 (norm, cast), 8 bytes
* block scales, output not wanted: 2 (statistics, normalize again and cast), 6 bytes, NVFP4 5 (with
  a Hadamard transform 3 and 7)
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ...formats.layout import NOTHING, Quantized, ceil_div
from ...formats.spec import QuantSpec, decode_for_rows
from .block_scaled import Source, fuses, has_global_amax, quantize_source, source_of
from .cast import launch_cast, launch_transpose
from .common import (
    MAX_PARTIALS,
    cast_block,
    empty,
    format_code,
    padded_partials,
    quantization_buffers,
    runs_on_its_device,
    split_scale,
    tile_count,
)
from .norm_kernels import (
    norm_apply_cast_kernel,
    norm_forward_kernel,
    norm_forward_long_kernel,
)
from .rows import is_long, row_block, rows_per_program


class _Norm(NamedTuple):
    """Inputs of the forward that every launch passes on."""

    x: Tensor
    weight: Tensor
    bias: Optional[Tensor]
    eps: float
    zero_centered: bool
    mean: Optional[Tensor]
    rstd: Tensor


@runs_on_its_device
def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    eps: float,
    zero_centered: bool,
    kind: str,
    quant: str,
    scale: Optional[Tensor],
    slot: Optional[int],
    rowwise: bool,
    columnwise: bool,
    want_output: bool,
):
    """LayerNorm or RMSNorm of the rows of ``x [M, K]``, optionally quantized.

    Args, results and numbers are those of ``reference_norm.norm_forward``: ``(y, mean, rstd,
    *Quantized)``.
    """
    rows, columns = x.shape
    spec = decode_for_rows(quant, rows)
    y = empty(x, (rows, columns), x.dtype) if want_output or spec is None else None
    norm = _Norm(
        x,
        weight,
        bias if kind == "LayerNorm" else None,
        eps,
        zero_centered,
        empty(x, (rows,), torch.float32) if kind == "LayerNorm" else None,
        empty(x, (rows,), torch.float32),
    )
    if spec is None:
        _launch_rows(norm, y)
        return y, norm.mean, norm.rstd, *NOTHING
    if not spec.per_tensor:
        out = _quantize_with_block_scales(norm, y, spec, rowwise, columnwise)
        return y, norm.mean, norm.rstd, *out
    scale, cell = split_scale(scale, slot)
    out = quantization_buffers(x, spec, rows, columns, rowwise, columnwise, False, cell)
    if y is not None:
        # The cast itself accumulates into a cell.
        partials = _launch_rows(norm, y, amax=2 if cell is None else 0)
        launch_cast(y, out, spec, scale, slot, partials)
    elif spec.kind == "current":
        partials = _launch_rows(norm, None, amax=2)
        _launch_apply_cast(norm, out, spec, partials)
    else:
        row = empty(x, (rows, columns), torch.uint8) if out.row is None else out.row
        partials = _launch_rows(norm, None, 1, row, out.scale_inv, spec, scale, slot)
        launch_transpose(row, out.col, partials, out.amax, cell is not None)
    if cell is not None:
        out = out._replace(amax=None)
    return y, norm.mean, norm.rstd, *out


def _quantize_with_block_scales(
    norm: _Norm, y: Optional[Tensor], spec: QuantSpec, rowwise: bool, columnwise: bool
) -> Quantized:
    """Statistics, ``y`` if it is there, and the quantized result.

    The latter is made from ``y``, or from ``x`` once more: reading x twice is cheaper than writing
    and reading a result that nobody wants.
    """
    columns = norm.x.shape[1]
    if y is None and not fuses(spec, columns, columns):
        y = empty(norm.x, norm.x.shape, norm.x.dtype)
    partials = _launch_rows(norm, y, amax=2 if has_global_amax(spec) else 0)
    source = source_of(y) if y is not None and not spec.unrounded else _source(norm)
    return quantize_source(source, spec, rowwise, columnwise, partials)[0]


def _source(norm: _Norm) -> Source:
    """The normalized rows, from statistics that are known when the kernel runs."""
    tensors = {"w": norm.weight, "b": norm.bias, "mean": norm.mean, "rstd": norm.rstd}
    flags = {
        "LAYER_NORM": norm.mean is not None,
        "HAS_BIAS": norm.bias is not None,
        "ZERO_CENTERED": norm.zero_centered,
    }
    columns = norm.x.shape[1]
    return Source("norm", norm.x, columns, columns, tensors, flags)


def _launch_rows(
    norm: _Norm,
    y: Optional[Tensor],
    amax: int = 0,
    row: Optional[Tensor] = None,
    scale_inv: Optional[Tensor] = None,
    spec: Optional[QuantSpec] = None,
    scale: Optional[Tensor] = None,
    slot: Optional[int] = None,
) -> Optional[Tensor]:
    """Statistics, and what is not None of y and row (delayed scaling); returns partial amaxes."""
    rows, columns = norm.x.shape
    block = row_block(columns)
    per_program = rows_per_program(rows, MAX_PARTIALS, block.rows)
    programs = max(1, ceil_div(rows, per_program))
    partials = empty(norm.x, (programs,), torch.float32) if amax else None
    kernel = norm_forward_long_kernel if is_long(columns) else norm_forward_kernel
    kernel[(programs,)](
        norm.x,
        norm.weight,
        norm.bias,
        norm.x if y is None else y,
        row,
        norm.mean,
        norm.rstd,
        scale,
        slot or 0,
        scale_inv,
        partials,
        rows,
        columns,
        norm.eps,
        1.0 / columns,
        per_program,
        LAYER_NORM=norm.mean is not None,
        HAS_BIAS=norm.bias is not None,
        ZERO_CENTERED=norm.zero_centered,
        WRITE_Y=y is not None,
        QUANT=row is not None,
        AMAX=amax,
        FMT=0 if spec is None else format_code(spec),
        R=block.rows,
        BK=block.block,
        num_warps=block.warps,
    )
    return partials


def _launch_apply_cast(norm: _Norm, out: Quantized, spec: QuantSpec, partials: Tensor) -> None:
    """Current scaling without output: the bytes of the recomputed, rounded result."""
    rows, columns = norm.x.shape
    block_m, block_n, warps = cast_block(rows, columns)
    norm_apply_cast_kernel[(tile_count(rows, columns, block_m, block_n),)](
        norm.x,
        norm.weight,
        norm.bias,
        norm.mean,
        norm.rstd,
        out.row,
        out.col,
        partials,
        partials.numel(),
        out.amax,
        out.scale_inv,
        spec.eps,
        rows,
        columns,
        LAYER_NORM=norm.mean is not None,
        HAS_BIAS=norm.bias is not None,
        ZERO_CENTERED=norm.zero_centered,
        FMT=format_code(spec),
        POW2=spec.pow2,
        ROW=out.row is not None,
        COL=out.col is not None,
        BP=padded_partials(partials.numel()),
        BM=block_m,
        BN=block_n,
        num_warps=warps,
    )
