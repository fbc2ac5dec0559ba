# SPDX-License-Identifier: Apache-2.0
"""activation_forward and activation_backward: which kernels run, and with what grid.

Bytes moved per element of a gated output F in bf16, both orientations: forward 6 delayed, 10
current; backward 10 delayed, 16 current.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
import triton
from torch import Tensor

from ...formats.activations import ACTIVATIONS
from ...formats.spec import QuantSpec, decode_quant
from .activation_kernels import (
    activation_amax_kernel,
    activation_backward_kernel,
    activation_forward_kernel,
    activation_slope_amax_kernel,
)
from .common import (
    MAX_PARTIALS,
    NO_BUFFERS,
    activation_block,
    empty,
    format_code,
    padded_partials,
    quantization_buffers,
    runs_on_its_device,
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
    ``(y, row, col, scale_inv, amax)``.
    """
    spec = decode_quant(quant)
    launch = _launch(x, act, (limit, alpha, offset), backward=False)
    rows, width = launch.rows, launch.width
    y = empty(x, (rows, width), x.dtype) if want_output or spec is None else None
    out, partials = NO_BUFFERS, None
    if spec is not None:
        delayed = spec.kind == "delayed"
        out = quantization_buffers(x, spec, rows, width, rowwise, columnwise, zero_amax=delayed)
        partials = None if delayed else _partial_amaxes(activation_amax_kernel, (x,), launch)
    activation_forward_kernel[launch.grid](
        x,
        x if y is None else y,
        out.row,
        out.col,
        scale,
        slot or 0,
        M=rows,
        F=width,
        limit=limit,
        alpha=alpha,
        offset=offset,
        WRITE_Y=y is not None,
        **_quantization_arguments(spec, out, partials),
        **launch.flags,
    )
    return y, *out


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
):
    """Gradient of ``activation_forward`` with respect to ``x``, for ``dy [M, F]``.

    Args, results and numbers are those of ``reference_activation.activation_backward``:
    ``(dx, row, col, scale_inv, amax, dbias)``.
    """
    spec = decode_quant(quant)
    launch = _launch(x, act, (limit, alpha, offset), backward=True)
    dx = empty(x, x.shape, x.dtype) if want_output or spec is None else None
    out, partials = NO_BUFFERS, None
    if spec is not None:
        delayed = spec.kind == "delayed"
        out = quantization_buffers(x, spec, *x.shape, rowwise, columnwise, zero_amax=delayed)
        if not delayed:
            partials = _partial_amaxes(activation_slope_amax_kernel, (dy, x), launch)
    dbias = sums = None
    if want_bias_grad and launch.rows == 0:
        dbias = torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    elif want_bias_grad:
        tile_rows = max(1, triton.cdiv(launch.rows, launch.flags["BM"]))
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
    if sums is not None:
        dbias = empty(x, (x.shape[1],), x.dtype)
        sum_partials(sums, dbias)
    return dx, *out, dbias
