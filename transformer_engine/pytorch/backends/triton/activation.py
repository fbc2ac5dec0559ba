# SPDX-License-Identifier: Apache-2.0
"""activation_forward and activation_backward: which kernels run, and with what grid.

Bytes moved per element of a gated output F in bf16, both orientations: forward 6 delayed, 10
current; backward 10 delayed, 16 current.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ...formats.activations import ACTIVATIONS
from ...formats.layout import NOTHING, Quantized, ceil_div
from ...formats.spec import QuantSpec, decode_quant
from .activation_kernels import (
    activation_amax_kernel,
    activation_backward_kernel,
    activation_forward_kernel,
    activation_slope_amax_kernel,
)
from .block_scaled import Source, fuses, has_global_amax, quantize_source, source_of
from .common import (
    MAX_PARTIALS,
    activation_block,
    empty,
    format_code,
    padded_partials,
    quantization_buffers,
    runs_on_its_device,
    split_scale,
    tile_count,
)
from .reduce import sum_partials


class _Launch(NamedTuple):
    """Arguments that all kernels of one call share."""

    rows: int
    width: int
    parameters: tuple
    flags: dict
    grid: tuple


def _launch(x: Tensor, act: str, parameters: tuple, backward: bool) -> _Launch:
    if act not in ACTIVATIONS:
        raise ValueError(
            f"The activation {act!r} is not known. Use one of {', '.join(ACTIVATIONS)}."
        )
    nonlinearity, gated = ACTIVATIONS[act]
    rows, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    block_m, block_n, warps = activation_block(rows, width, backward)
    flags = {
        "ACT": nonlinearity,
        "GATED": gated,
        "CLAMPED": act == "clamped_swiglu",
        "BM": block_m,
        "BN": block_n,
        "num_warps": warps,
    }
    grid = (tile_count(rows, width, block_m, block_n),)
    return _Launch(rows, width, parameters, flags, grid)


def _partial_amaxes(kernel, inputs: tuple, launch: _Launch) -> Tensor:
    """The amax pass of current scaling: partial maxima, fp32."""
    programs = min(launch.grid[0], MAX_PARTIALS)
    partials = empty(inputs[0], (programs,), torch.float32)
    kernel[(programs,)](
        *inputs, partials, launch.rows, launch.width, *launch.parameters, **launch.flags
    )
    return partials


def _quantization_arguments(spec: Optional[QuantSpec], out, partials: Optional[Tensor]) -> dict:
    """Keyword arguments of the quantization of either kernel; nothing is read without a spec."""
    n_partials = 1 if partials is None else partials.numel()
    return {
        "partials": partials,
        "n_partials": n_partials,
        "amax": out.amax,
        "scale_inv": out.scale_inv,
        "eps": 0.0 if spec is None else spec.eps,
        "QUANT": spec is not None,
        "DELAYED": spec is not None and spec.kind == "delayed",
        "FMT": 0 if spec is None else format_code(spec),
        "POW2": spec is not None and spec.pow2,
        "ROW": out.row is not None,
        "COL": out.col is not None,
        "BP": padded_partials(n_partials),
    }


@runs_on_its_device
def activation_forward(
    x: Tensor,
    act: str,
    limit: float,
    alpha: float,
    offset: float,
    quant: str,
    scale: Optional[Tensor],
    slot: Optional[int],
    rowwise: bool,
    columnwise: bool,
    want_output: bool,
):
    """Activation of ``x [M, F]`` (gated: ``[M, 2F]``), optionally quantized.

    Args, results and numbers are those of ``reference_activation.activation_forward``:
    ``(y, *Quantized)``.
    """
    spec = decode_quant(quant)
    launch = _launch(x, act, (limit, alpha, offset), backward=False)
    rows, width = launch.rows, launch.width
    y = empty(x, (rows, width), x.dtype) if want_output or spec is None else None
    if spec is not None and not spec.per_tensor:
        source = _source("activation", x, width, launch)
        quantized = _quantize_with_block_scales(source, launch, y, spec, rowwise, columnwise)
        return y, *quantized[0]
    out, partials = NOTHING, None
    scale, cell = split_scale(scale, slot)
    if spec is not None:
        delayed = spec.kind == "delayed"
        out = quantization_buffers(x, spec, rows, width, rowwise, columnwise, delayed, cell)
        partials = None if delayed else _partial_amaxes(activation_amax_kernel, (x,), launch)
    _launch_forward(x, launch, y, out, spec, scale, slot, partials)
    return y, *(out if cell is None else out._replace(amax=None))


@runs_on_its_device
def activation_backward(
    dy: Tensor,
    x: Tensor,
    act: str,
    limit: float,
    alpha: float,
    offset: float,
    quant: str,
    scale: Optional[Tensor],
    slot: Optional[int],
    rowwise: bool,
    columnwise: bool,
    want_output: bool,
    want_bias_grad: bool,
    rng: Optional[Tensor],
):
    """Gradient of ``activation_forward`` with respect to ``x``, for ``dy [M, F]``.

    Args, results and numbers are those of ``reference_activation.activation_backward``:
    ``(dx, *Quantized, dbias)``.
    """
    spec = decode_quant(quant)
    launch = _launch(x, act, (limit, alpha, offset), backward=True)
    dx = empty(x, x.shape, x.dtype) if want_output or spec is None else None
    if spec is not None and not spec.per_tensor:
        source = _source("gradient", x, x.shape[1], launch, dy)
        out, dbias = _quantize_with_block_scales(
            source, launch, dx, spec, rowwise, columnwise, want_bias_grad, rng
        )
        return dx, *out, dbias
    out, partials = NOTHING, None
    scale, cell = split_scale(scale, slot)
    if spec is not None:
        delayed = spec.kind == "delayed"
        out = quantization_buffers(x, spec, *x.shape, rowwise, columnwise, delayed, cell)
        if not delayed:
            partials = _partial_amaxes(activation_slope_amax_kernel, (dy, x), launch)
    dbias = _launch_backward(dy, x, launch, dx, out, spec, scale, slot, partials, want_bias_grad)
    return dx, *(out if cell is None else out._replace(amax=None)), dbias


def _launch_forward(
    x: Tensor,
    launch: _Launch,
    y: Optional[Tensor],
    out: Quantized,
    spec: Optional[QuantSpec],
    scale: Optional[Tensor],
    slot: Optional[int],
    partials: Optional[Tensor],
) -> None:
    """Fill ``y`` and ``out``, as far as they are there; per-tensor FP8 or nothing."""
    limit, alpha, offset = launch.parameters
    activation_forward_kernel[launch.grid](
        x,
        x if y is None else y,
        out.row,
        out.col,
        scale,
        slot or 0,
        M=launch.rows,
        F=launch.width,
        limit=limit,
        alpha=alpha,
        offset=offset,
        WRITE_Y=y is not None,
        **_quantization_arguments(spec, out, partials),
        **launch.flags,
    )


def _launch_backward(
    dy: Tensor,
    x: Tensor,
    launch: _Launch,
    dx: Optional[Tensor],
    out: Quantized,
    spec: Optional[QuantSpec],
    scale: Optional[Tensor],
    slot: Optional[int],
    partials: Optional[Tensor],
    want_bias_grad: bool,
) -> Optional[Tensor]:
    """The same for the gradient; returns that of a bias, if wanted."""
    limit, alpha, offset = launch.parameters
    sums = None
    if want_bias_grad and launch.rows:
        tile_rows = max(1, ceil_div(launch.rows, launch.flags["BM"]))
        sums = empty(x, (1, tile_rows, x.shape[1]), torch.float32)
    activation_backward_kernel[launch.grid](
        dy,
        x,
        x if dx is None else dx,
        out.row,
        out.col,
        sums,
        scale,
        slot or 0,
        M=launch.rows,
        F=launch.width,
        limit=limit,
        alpha=alpha,
        offset=offset,
        WRITE_DX=dx is not None,
        BIAS_GRAD=sums is not None,
        **_quantization_arguments(spec, out, partials),
        **launch.flags,
    )
    return _bias_gradient(x, sums) if want_bias_grad else None


def _bias_gradient(x: Tensor, sums: Optional[Tensor]) -> Tensor:
    """The sum of partial sums of the columns; without any, zeros."""
    if sums is None:
        return torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    dbias = empty(x, (x.shape[1],), x.dtype)
    sum_partials(sums, dbias)
    return dbias


def _source(
    kind: str, x: Tensor, columns: int, launch: _Launch, dy: Optional[Tensor] = None
) -> Source:
    names = ("ACT", "GATED", "CLAMPED")
    flags = {name: launch.flags[name] for name in names}
    return Source(kind, x, launch.width, columns, {"dy": dy}, flags, launch.parameters)


def _quantize_with_block_scales(
    source: Source,
    launch: _Launch,
    values: Optional[Tensor],
    spec: QuantSpec,
    rowwise: bool,
    columnwise: bool,
    want_bias_grad: bool = False,
    rng: Optional[Tensor] = None,
) -> tuple[Quantized, Optional[Tensor]]:
    """Quantized activation or gradient, and the latter's column sums; ``values`` if it is there.

    In one pass after that for an amax, or from values that a kernel has written (``fuses``).
    """
    x, dy = source.x, source.tensors["dy"]
    partials = None
    if has_global_amax(spec) and launch.rows:
        kernel = activation_amax_kernel if dy is None else activation_slope_amax_kernel
        partials = _partial_amaxes(kernel, (x,) if dy is None else (dy, x), launch)
    if fuses(spec, source.width, source.columns):
        out, sums = quantize_source(
            source, spec, rowwise, columnwise, partials, rng, values, want_bias_grad
        )
        return out, _bias_gradient(x, sums) if want_bias_grad else None
    if values is None:
        values = empty(x, (launch.rows, source.columns), x.dtype)
    none = (NOTHING, None, None, None, None)
    if dy is None:
        _launch_forward(x, launch, values, *none)
        dbias = None
    else:
        dbias = _launch_backward(dy, x, launch, values, *none, want_bias_grad)
    out, _ = quantize_source(source_of(values), spec, rowwise, columnwise, partials, rng)
    return out, dbias
