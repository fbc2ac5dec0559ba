# SPDX-License-Identifier: Apache-2.0
"""The linear stage: one GEMM forward, two backward, on operands that may be quantized.

Every function takes the leaf namespace ``k`` (see ``core/ops.py``) and a ``ModuleConfig`` first.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor


class Operand(NamedTuple):
    """A GEMM operand: high-precision values, or quantized bytes in one or two orientations.

    ``row`` is ``[M, K]``, ``col`` its byte transpose ``[K, padded M]``; both share ``scale_inv``.
    """

    hp: Optional[Tensor] = None
    row: Optional[Tensor] = None
    col: Optional[Tensor] = None
    scale_inv: Optional[Tensor] = None


class Kept(NamedTuple):
    """The part of a forward operand that backward needs, as separate op outputs."""

    hp: Optional[Tensor]
    row: Optional[Tensor]
    col: Optional[Tensor]
    scale_inv: Optional[Tensor]


def quantize_operand(
    k, quant: str, x: Tensor, scale, slot: int, rowwise: bool, columnwise: bool
) -> tuple[Operand, Optional[Tensor]]:
    """``x`` as an operand, quantized if ``quant`` names a format; and its amax."""
    if not quant or not (rowwise or columnwise):
        return Operand(x), None
    row, col, scale_inv, amax = k.quantize(x, quant, scale, slot, None, rowwise, columnwise)
    return Operand(None, row, col, scale_inv), amax


def keep_for_wgrad(cfg, x: Operand, needed: bool) -> Kept:
    """What backward needs of the forward input ``x`` to compute the weight gradient."""
    if not needed:
        return Kept(None, None, None, None)
    if not cfg.quantized or cfg.backward_override == "high_precision":
        return Kept(x.hp, None, None, None)
    if cfg.backward_override == "dequantized":
        return Kept(None, x.row, None, x.scale_inv)
    return Kept(None, None, x.col, x.scale_inv)


def columnwise_input(cfg, needed: bool) -> bool:
    """Whether forward must produce the input's columnwise bytes for the weight gradient."""
    return needed and cfg.quantized_backward


def fprop(k, cfg, x: Operand, w: Operand, bias: Optional[Tensor], dtype: torch.dtype) -> Tensor:
    """``y = x w^T + bias``."""
    if not cfg.quantized:
        return k.gemm(x.hp, w.hp, bias, None, None, "", "", "TN", dtype, False)
    if bias is not None and bias.dtype == torch.float32:
        # As in the reference package: a quantized GEMM adds a bf16 bias.
        bias = bias.to(torch.bfloat16)
    return k.gemm(
        x.row, w.row, bias, x.scale_inv, w.scale_inv, cfg.x, cfg.w, "TN", dtype, cfg.fast_fprop
    )


def dgrad(k, cfg, dy: Operand, w: Operand, dtype: torch.dtype) -> Tensor:
    """``dx = dy w``."""
    if cfg.quantized_backward:
        return k.gemm(
            dy.row,
            w.col,
            None,
            dy.scale_inv,
            w.scale_inv,
            cfg.g,
            cfg.w,
            "TN",
            dtype,
            cfg.fast_dgrad,
        )
    weight = _high_precision(k, cfg.w, w, dtype)
    return k.gemm(dy.hp, weight, None, None, None, "", "", "NN", dtype, False)


def wgrad(k, cfg, dy: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
    """``dw = dy^T x``."""
    if cfg.quantized_backward:
        return k.gemm(
            dy.col,
            x.col,
            None,
            dy.scale_inv,
            x.scale_inv,
            cfg.g,
            cfg.x,
            "TN",
            dtype,
            cfg.fast_wgrad,
        )
    inputs = _high_precision(k, cfg.x, x, dtype)
    return k.gemm(dy.hp, inputs, None, None, None, "", "", "NT", dtype, False)


def _high_precision(k, quant: str, operand: Operand, dtype: torch.dtype) -> Tensor:
    """The operand's values for a GEMM that is not quantized (``backward_override``)."""
    if operand.hp is not None:
        return operand.hp
    return k.dequantize(operand.row, operand.scale_inv, quant, dtype)


def linear_grad(
    k, cfg, dy: Operand, x: Operand, w: Operand, need_dx: bool, need_dw: bool, dtype: torch.dtype
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """``(dx, dw)`` of one GEMM, each None where it is not needed."""
    return (
        dgrad(k, cfg, dy, w, dtype) if need_dx else None,
        wgrad(k, cfg, dy, x, dtype) if need_dw else None,
    )


def output_grad(
    k, cfg, dy: Tensor, scale, slot: int, rowwise: bool, columnwise: bool, want_bias_grad: bool
):
    """The incoming gradient as an operand; returns ``(operand, bias_grad, amax)``."""
    dbias = k.bias_grad(dy) if want_bias_grad else None
    quant = cfg.g if cfg.quantized_backward else ""
    operand, amax = quantize_operand(k, quant, dy, scale, slot, rowwise, columnwise)
    return operand, dbias, amax
