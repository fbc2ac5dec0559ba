# SPDX-License-Identifier: Apache-2.0
"""The norm stage: module input to the operand of the following GEMM, and back."""

from __future__ import annotations

from typing import NamedTuple, Optional

from torch import Tensor

from ..formats.layout import Quantized
from .config import ModuleConfig
from .operand import Operand, made_quant, operand_from, quantize_operand


class NormResult(NamedTuple):
    """What a norm produced: the GEMM operand, the statistics and, if it is known, the amax.

    ``operand.hp`` is there wherever the high-precision output was produced.
    """

    operand: Operand
    mean: Optional[Tensor]
    rstd: Tensor
    amax: Optional[Tensor]


def norm_producer(cfg: ModuleConfig) -> str:
    """Who quantizes the norm's output: the norm itself, or a quantize after it."""
    config = cfg.gemms[0]
    fused = (
        config.fprop
        and not config.x.hybrid
        and not _wants_output(cfg)
        and "stochastic" not in config.x.row
    )
    return "norm" if fused else "quantize"


def _wants_output(cfg: ModuleConfig) -> bool:
    return cfg.want_norm_output or cfg.gemms[0].override == "high_precision"


def normalize(
    k, cfg: ModuleConfig, x, weight, bias, scale, slot: int, columnwise: bool
) -> NormResult:
    """Normalize the rows of ``x``; the operand is quantized if the forward GEMM wants it so.

    The high-precision output is produced where the caller asked for it, where a GEMM is not
    quantized, and where ``backward_override`` needs it in backward.
    """
    config = cfg.gemms[0]
    plain = not config.fprop or config.x.hybrid or "stochastic" in config.x.row
    quant = "" if plain else made_quant(cfg, config.x.row, norm_producer(cfg), *x.shape, x.device)
    y, mean, rstd, *buffers = k.norm_forward(
        x,
        weight,
        bias,
        cfg.eps,
        cfg.zero_centered,
        cfg.norm,
        quant,
        scale,
        slot,
        not plain,
        not plain and columnwise,
        plain or _wants_output(cfg),
    )
    if not plain:
        buffers = Quantized(*buffers)
        return NormResult(operand_from(buffers, quant, quant, y), mean, rstd, buffers.amax)
    operand, amax = quantize_operand(k, cfg, config.x, y, "quantize", scale, slot, True, columnwise)
    return NormResult(operand._replace(hp=y), mean, rstd, amax)


def norm_grad(k, cfg, dy, dy2, x, mean, rstd, weight, need_dx: bool, need_dweight: bool):
    """``(dx, dweight, dbias)``; ``dy2`` is the gradient of the returned norm output, if any."""
    if dy is None and dy2 is None or not (need_dx or need_dweight):
        return None, None, None
    return k.norm_backward(
        dy, dy2, x, mean, rstd, weight, cfg.zero_centered, cfg.norm, need_dx, need_dweight
    )
