# SPDX-License-Identifier: Apache-2.0
"""The activation stage: fc1 output to the operand of the fc2 GEMM, and back."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from ..formats.activations import activation_width
from ..formats.layout import Quantized
from .config import ModuleConfig, OperandConfig
from .operand import Operand, draw, made_quant, operand_from, quantize_operand


def _fused(cfg: ModuleConfig, operand: OperandConfig) -> bool:
    """Whether the activation kernel quantizes its own result."""
    return bool(operand.row) and not operand.hybrid and not cfg.custom


def activation_producer(cfg: ModuleConfig) -> str:
    """Who quantizes the activation's output: the activation itself, or a quantize after it."""
    config = cfg.gemms[1]
    fused = _fused(cfg, config.x) and "stochastic" not in config.x.row
    return "activation" if fused and config.override != "high_precision" else "quantize"


def activate(
    k, cfg: ModuleConfig, h, scale, slot: int, columnwise: bool
) -> tuple[Operand, Optional[Tensor]]:
    """Activate ``h``; return the fc2 operand and its amax if it is known.

    ``operand.hp`` is there wherever the high-precision output was produced.
    """
    config = cfg.gemms[1]
    parameters = (cfg.activation, cfg.limit, cfg.alpha, cfg.offset)
    if activation_producer(cfg) == "quantize":
        y, *_ = k.activation_forward(h, *parameters, "", scale, slot, False, False, True)
        operand, amax = quantize_operand(
            k, cfg, config.x, y, "quantize", scale, slot, True, columnwise
        )
        return operand._replace(hp=y), amax
    width = activation_width(cfg.activation, h.shape[1])
    quant = made_quant(cfg, config.x.row, "activation", h.shape[0], width, h.device)
    y, *buffers = k.activation_forward(h, *parameters, quant, scale, slot, True, columnwise, False)
    buffers = Quantized(*buffers)
    return operand_from(buffers, quant, quant, y), buffers.amax


def activation_grad(
    k, cfg: ModuleConfig, da, h, scale, slot: int, rowwise: bool, columnwise: bool,
    want_bias_grad: bool,
):  # fmt: skip
    """Gradient with respect to ``h`` as an operand of the fc1 backward GEMMs.

    Returns ``(operand, bias_grad, amax)``.
    """
    config = cfg.gemms[0]
    parameters = (cfg.activation, cfg.limit, cfg.alpha, cfg.offset)
    quantized = not config.override
    if not quantized or not _fused(cfg, config.g):
        dh, *_, dbias = k.activation_backward(
            da, h, *parameters, "", scale, slot, False, False, True, want_bias_grad, None
        )
        if not quantized:
            return Operand(dh), dbias, None
        operand, amax = quantize_operand(
            k, cfg, config.g, dh, "quantize", scale, slot, rowwise, columnwise
        )
        return operand, dbias, amax
    quant = made_quant(cfg, config.g.row, "activation", *h.shape, h.device)
    _, *buffers, dbias = k.activation_backward(
        da,
        h,
        *parameters,
        quant,
        scale,
        slot,
        rowwise,
        columnwise,
        False,
        want_bias_grad,
        draw(k, quant, da),
    )
    buffers = Quantized(*buffers)
    return operand_from(buffers, quant, quant), dbias, buffers.amax
