# SPDX-License-Identifier: Apache-2.0
"""The norm stage: module input to the operand of the following GEMM, and back."""

from __future__ import annotations

from typing import NamedTuple, Optional

from torch import Tensor

from .linear import Operand


class NormResult(NamedTuple):
    """What a norm produced: the GEMM operand, the statistics and, for delayed scaling, the amax."""

    operand: Operand
    mean: Optional[Tensor]
    rstd: Tensor
    amax: Optional[Tensor]


def normalize(k, cfg, x, weight, bias, scale, slot: int, columnwise: bool) -> NormResult:
    """Normalize the rows of ``x``; the operand is quantized if the forward GEMM wants it so.

    The high-precision output is produced where the caller asked for it, where the GEMM is not
    quantized, and where ``backward_override`` needs it in backward.
    """
    keep = cfg.want_norm_output or cfg.backward_override == "high_precision"
    y, mean, rstd, row, col, scale_inv, amax = k.norm_forward(
        x,
        weight,
        bias,
        cfg.eps,
        cfg.zero_centered,
        cfg.norm,
        cfg.x,
        scale,
        slot,
        cfg.quantized,
        cfg.quantized and columnwise,
        keep or not cfg.quantized,
    )
    return NormResult(Operand(y, row, col, scale_inv), mean, rstd, amax)


def norm_grad(k, cfg, dy, dy2, x, mean, rstd, weight, need_dx: bool, need_dweight: bool):
    """``(dx, dweight, dbias)``; ``dy2`` is the gradient of the returned norm output, if any."""
    if dy is None and dy2 is None or not (need_dx or need_dweight):
        return None, None, None
    return k.norm_backward(
        dy, dy2, x, mean, rstd, weight, cfg.zero_centered, cfg.norm, need_dx, need_dweight
    )
