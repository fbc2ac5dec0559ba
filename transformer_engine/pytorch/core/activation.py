# SPDX-License-Identifier: Apache-2.0
"""The activation stage: fc1 output to the operand of the fc2 GEMM, and back."""

from __future__ import annotations

from .linear import Operand


def activate(k, cfg, h, scale, slot: int, columnwise: bool) -> tuple[Operand, object]:
    """Activate ``h``; return the fc2 operand and its amax (None without delayed scaling)."""
    y, row, col, scale_inv, amax = k.activation_forward(
        h,
        cfg.activation,
        cfg.limit,
        cfg.alpha,
        cfg.offset,
        cfg.x,
        scale,
        slot,
        cfg.quantized,
        cfg.quantized and columnwise,
        not cfg.quantized,
    )
    return Operand(y, row, col, scale_inv), amax


def activation_grad(
    k, cfg, da, h, scale, slot: int, rowwise: bool, columnwise: bool, want_bias_grad: bool
):
    """Gradient with respect to ``h`` as an operand of the fc1 backward GEMMs.

    Returns ``(operand, bias_grad, amax)``.
    """
    quantized = cfg.quantized_backward
    dh, row, col, scale_inv, amax, dbias = k.activation_backward(
        da,
        h,
        cfg.activation,
        cfg.limit,
        cfg.alpha,
        cfg.offset,
        cfg.g if quantized else "",
        scale,
        slot,
        quantized and rowwise,
        quantized and columnwise,
        not quantized,
        want_bias_grad,
    )
    return Operand(dh, row, col, scale_inv), dbias, amax
