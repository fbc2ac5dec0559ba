# SPDX-License-Identifier: Apache-2.0
"""norm_backward: which kernels run, and with what grid.

One pass of 6 bytes per bf16 element (8 with a second gradient) and the sum of the partial weight
gradients; rows that do not fit a block take a second pass for the weight gradients.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ...formats.layout import ceil_div
from .common import empty, processors, runs_on_its_device
from .norm_gradient_kernels import (
    norm_backward_kernel,
    norm_dweight_long_kernel,
    norm_dx_long_kernel,
)
from .reduce import sum_partials
from .rows import is_long, row_block, rows_per_program

PROGRAMS_PER_PROCESSOR = 2  # more would write more partial sums than they gain


@runs_on_its_device
def norm_backward(
    dy: Optional[Tensor],
    dy2: Optional[Tensor],
    x: Tensor,
    mean: Optional[Tensor],
    rstd: Tensor,
    weight: Tensor,
    zero_centered: bool,
    kind: str,
    need_dx: bool,
    need_dweight: bool,
):
    """Gradients of ``norm_forward``: ``(dx, dweight, dbias)``, None where not needed.

    Args, results and numbers are those of ``reference_norm.norm_backward``. The sums over rows have
    a fixed order: partial sums of each program, then their sum.
    """
    if dy is None:
        dy, dy2 = dy2, None
    layer_norm = kind == "LayerNorm"
    dx = empty(x, x.shape, x.dtype) if need_dx else None
    if x.shape[0] == 0:
        zeros = [torch.zeros_like(weight) for _ in range(2)] if need_dweight else [None, None]
        return dx, zeros[0], zeros[1] if layer_norm else None
    gradients = (dy, dy2, x, mean, rstd, weight)
    launch = _launch_backward_long if is_long(x.shape[1]) else _launch_backward
    partials = launch(gradients, dx, zero_centered, layer_norm, need_dweight)
    if not need_dweight:
        return dx, None, None
    dweight = empty(x, weight.shape, weight.dtype)
    dbias = empty(x, weight.shape, weight.dtype) if layer_norm else None
    sum_partials(partials, dweight, dbias)
    return dx, dweight, dbias


def _launch_backward(
    gradients: tuple,
    dx: Optional[Tensor],
    zero_centered: bool,
    layer_norm: bool,
    need_dweight: bool,
) -> Optional[Tensor]:
    """One pass; returns partial sums [1 or 2, programs, K] of dweight and dbias."""
    dy, dy2, x, mean, rstd, weight = gradients
    rows, columns = x.shape
    block = row_block(columns)
    per_program = rows_per_program(rows, PROGRAMS_PER_PROCESSOR * processors(x.device), block.rows)
    programs = ceil_div(rows, per_program)
    partials = None
    if need_dweight:
        partials = empty(x, (1 + layer_norm, programs, columns), torch.float32)
    norm_backward_kernel[(programs,)](
        dy,
        dy2,
        x,
        mean,
        rstd,
        weight,
        dx,
        partials,
        rows,
        columns,
        1.0 / columns,
        per_program,
        LAYER_NORM=layer_norm,
        ZERO_CENTERED=zero_centered,
        HAS_DY2=dy2 is not None,
        NEED_DX=dx is not None,
        NEED_DWEIGHT=need_dweight,
        R=block.rows,
        BK=block.block,
        num_warps=block.warps,
    )
    return partials


def _launch_backward_long(
    gradients: tuple,
    dx: Optional[Tensor],
    zero_centered: bool,
    layer_norm: bool,
    need_dweight: bool,
) -> Optional[Tensor]:
    """Long rows: dx by rows and weight gradients by columns, in two passes."""
    dy, dy2, x, mean, rstd, weight = gradients
    rows, columns = x.shape
    block = row_block(columns)
    flags = {"LAYER_NORM": layer_norm, "HAS_DY2": dy2 is not None}
    if dx is not None:
        norm_dx_long_kernel[(rows,)](
            dy,
            dy2,
            x,
            mean,
            rstd,
            weight,
            dx,
            columns,
            1.0 / columns,
            ZERO_CENTERED=zero_centered,
            BK=block.block,
            num_warps=block.warps,
            **flags,
        )
    if not need_dweight:
        return None
    per_program = 256
    chunks = ceil_div(rows, per_program)
    partials = empty(x, (1 + layer_norm, chunks, columns), torch.float32)
    norm_dweight_long_kernel[(ceil_div(columns, 64), chunks)](
        dy,
        dy2,
        x,
        mean,
        rstd,
        partials,
        rows,
        columns,
        per_program,
        BM=16,
        BN=64,
        num_warps=4,
        **flags,
    )
    return partials
