# SPDX-License-Identifier: Apache-2.0
"""The linear stage: one GEMM forward, two backward, on operands that may be quantized.

Every function takes the leaf namespace ``k`` (see ``core/ops.py``) first. ``gemm`` is the index of
the linear stage within its module.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..formats.layout import Quantized
from .config import ModuleConfig
from .operand import (
    part_amax,
    Operand,
    Part,
    dequantized,
    made_quant,
    operand_from,
    quantize_operand,
    quantized_leaf,
)
from .python_quantizers import is_python

_NOTHING_KEPT = (None, None, None)


def weight_operand(cfg: ModuleConfig, gemm: int, hp: Tensor, buffers: Quantized) -> Operand:
    """The weight as an operand; its buffers were made outside of the op."""
    w = cfg.gemms[gemm].w
    return operand_from(buffers, w.row, w.col, hp)


def columnwise_input(cfg: ModuleConfig, gemm: int, needed: bool) -> bool:
    """Whether forward must produce the input's columnwise buffers, for the weight gradient."""
    return needed and cfg.gemms[gemm].keeps_input() == "col" and not cfg.save_input


def kept_input(cfg: ModuleConfig, gemm: int, x: Operand, needed: bool) -> tuple:
    """``(data, scale_inv, amax)`` of the part of the input that wgrad needs, or Nones."""
    if not needed or cfg.save_input:
        return _NOTHING_KEPT
    which = cfg.gemms[gemm].keeps_input()
    return _NOTHING_KEPT if which == "hp" else getattr(x, which)[:3]


def keeps_high_precision(cfg: ModuleConfig, gemm: int, needed: bool) -> bool:
    """Whether wgrad needs the input in high precision."""
    return needed and (cfg.save_input or cfg.gemms[gemm].keeps_input() == "hp")


def kept_weight(cfg: ModuleConfig, gemm: int, hp, buffers: Quantized, needed: bool) -> tuple:
    """``(hp, data, scale_inv, amax)`` of the weight with only what dgrad needs; selects only."""
    if not needed:
        return None, *_NOTHING_KEPT
    which = cfg.gemms[gemm].keeps_weight()
    if which == "hp":
        return hp, *_NOTHING_KEPT
    if gemm in cfg.again:  # the place of the columnwise scale has the one of delayed scaling
        return hp, None, buffers.col_scale_inv, None
    if which == "row":
        amax = part_amax(buffers.amax, cfg.gemms[gemm].w.row)
        return None, buffers.row, buffers.scale_inv, amax
    shared = cfg.gemms[gemm].w.shares_scale
    scale_inv = buffers.scale_inv if shared else buffers.col_scale_inv
    return None, buffers.col, scale_inv, buffers.col_amax


def restored_input(cfg: ModuleConfig, gemm: int, hp, kept: tuple, rows, producer: str) -> Operand:
    """The inverse of ``kept_input``, for an input of ``rows`` rows that ``producer`` made."""
    config = cfg.gemms[gemm]
    which = config.keeps_input()
    if which == "hp" or kept[0] is None:
        return Operand(hp)
    quant = getattr(config.x, which)
    columns = _columns(kept[0], quant, which)
    quant = made_quant(cfg, quant, producer, rows, columns, kept[0].device)
    return Operand(hp)._replace(**{which: Part(*kept, quant)})


def _columns(data: Tensor, quant: str, which: str):
    """Width of the tensor whose rowwise or columnwise buffer is ``data``."""
    if which == "col" and not quant.startswith("mxfp8"):
        return data.shape[0]
    return data.shape[1] * (2 if quant.startswith("nvfp4") else 1)


def restored_weight(k, cfg: ModuleConfig, gemm: int, hp, kept: tuple) -> Operand:
    """The inverse of ``kept_weight``."""
    config = cfg.gemms[gemm]
    which = config.keeps_weight()
    if gemm in cfg.again and which != "hp" and hp is not None:
        row, col = (config.w.row, "") if which == "row" else ("", config.w.col)
        made = quantized_leaf(k, hp, row or col, kept[1], 0, bool(row), bool(col))
        return operand_from(made, row, col)
    if which == "hp" or kept[0] is None:
        return Operand(hp)
    return Operand(hp)._replace(**{which: Part(*kept, getattr(config.w, which))})


def fprop(
    k, cfg: ModuleConfig, gemm: int, x: Operand, w: Operand, bias: Optional[Tensor], dtype
) -> Tensor:
    """``y = x w^T + bias``."""
    if not cfg.gemms[gemm].fprop:
        return _plain(k, x.hp, w.hp, bias, "TN", dtype)
    if bias is not None and bias.dtype == torch.float32 and not is_python(x.row.quant):
        # As in the reference package: a quantized GEMM adds a bf16 bias.
        bias = bias.to(torch.bfloat16)
    return _scaled(k, x.row, w.row, bias, "TN", dtype, cfg.fast_fprop)


def dgrad(k, cfg: ModuleConfig, gemm: int, dy: Operand, w: Operand, dtype) -> Tensor:
    """``dx = dy w``."""
    config = cfg.gemms[gemm]
    if config.dgrad:
        layout = "NN" if _untransposed(w.col) else "TN"
        return _scaled(k, dy.row, w.col, None, layout, dtype, cfg.fast_dgrad)
    return _plain(k, dy.hp, _high_precision(k, w, dy.hp.dtype), None, "NN", dtype)


def wgrad(k, cfg: ModuleConfig, gemm: int, dy: Operand, x: Operand, dtype) -> Tensor:
    """``dw = dy^T x``."""
    config = cfg.gemms[gemm]
    if config.wgrad:
        layout = "NT" if _untransposed(x.col) else "TN"
        return _scaled(k, dy.col, x.col, None, layout, dtype, cfg.fast_wgrad)
    return _plain(k, dy.hp, _high_precision(k, x, dy.hp.dtype), None, "NT", dtype)


def _untransposed(part: Part) -> bool:
    """Whether columnwise buffers of this format keep the orientation of the tensor."""
    return part.quant.startswith("mxfp8")


def _plain(k, a: Tensor, b: Tensor, bias, layout: str, dtype) -> Tensor:
    return k.gemm(a, b, bias, None, None, None, None, "", "", layout, dtype, False)


def _scaled(k, a: Part, b: Part, bias, layout: str, dtype, fast: bool) -> Tensor:
    if is_python(a.quant):
        return _plain(k, a.data, b.data, bias, layout, dtype)
    return k.gemm(
        a.data,
        b.data,
        bias,
        a.scale_inv,
        b.scale_inv,
        a.amax,
        b.amax,
        a.quant,
        b.quant,
        layout,
        dtype,
        fast,
    )


def _high_precision(k, operand: Operand, dtype: torch.dtype) -> Tensor:
    """The operand's values for a GEMM that is not quantized."""
    return dequantized(k, operand.row, dtype) if operand.hp is None else operand.hp


def linear_grad(
    k,
    cfg: ModuleConfig,
    gemm: int,
    dy: Operand,
    x: Operand,
    w: Operand,
    need_dx: bool,
    need_dw: bool,
    dtype: torch.dtype,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """``(dx, dw)`` of one GEMM, each None where it is not needed, or dw if it is put off."""
    dx = dgrad(k, cfg, gemm, dy, w, dtype) if need_dx else None
    if not need_dw:
        return dx, None
    dtype = wgrad_dtype(cfg, dtype)
    if cfg.delay_wgrad:
        k.put_off(gemm, cfg, dy, x, dtype)
        return dx, None
    return dx, wgrad(k, cfg, gemm, dy, x, dtype)


def wgrad_dtype(cfg: ModuleConfig, dtype: torch.dtype) -> torch.dtype:
    """Dtype of weight gradients: ``dtype``, that of the activations, unless the config says."""
    return getattr(torch, cfg.wgrad_dtype) if cfg.wgrad_dtype else dtype


def output_grad(
    k,
    cfg: ModuleConfig,
    gemm: int,
    dy: Tensor,
    scale,
    slot: int,
    rowwise: bool,
    columnwise: bool,
    want_bias_grad: bool,
):
    """The incoming gradient as an operand; returns ``(operand, bias_grad, amax)``."""
    config = cfg.gemms[gemm]
    dbias = k.bias_grad(dy) if want_bias_grad else None
    if config.override:
        return Operand(dy), dbias, None
    producer = "bias_grad" if want_bias_grad else "quantize"
    operand, amax = quantize_operand(
        k, cfg, config.g, dy, producer, scale, slot, rowwise, columnwise
    )
    return operand, dbias, amax
