# SPDX-License-Identifier: Apache-2.0
"""The forward and backward function of each module, composed from stages.

These functions are the whole implementation: eager execution calls them with the backends, a
compiler's fake tensors run through them for shapes, and compiled code calls them, or the leaf ops
into which they were traced (see ``dynamo/custom_op.py``). They are pure: fresh outputs, no state,
no ambient modes. Operands are 2-D and contiguous; an output that is absent is None.

Slots of the delayed-scaling vectors: forward ``[input, weight, output]`` and backward
``[grad_output, grad_input]``, once per GEMM.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..formats.layout import Quantized
from ..formats.spec import QuantSpec
from .activation import activate, activation_grad, activation_producer
from .linear import (
    columnwise_input,
    fprop,
    keeps_high_precision,
    kept_input,
    kept_weight,
    linear_grad,
    output_grad,
    restored_input,
    restored_weight,
    weight_operand,
)
from .norm import NormResult, norm_grad, norm_producer, normalize
from .operand import (
    Operand,
    part_amax,
    quantize_operand,
    quantized_leaf,
    recorded_draws,
    repeated_draws,
)

FC1_INPUT, FC1_WEIGHT, FC2_INPUT, FC2_WEIGHT = 0, 1, 3, 4
FC1_GRAD_OUTPUT, FC2_GRAD_OUTPUT = 0, 2
_NO_EXTRAS = (None,) * 7  # what layernorm_mlp_save adds with ``cfg.recompute``
_AMAX_ONLY = QuantSpec("current", "e4m3").encode()


def _recorded(k, cfg, gemm: int, operand, amax):
    """The amax of a forward operand if delayed scaling will record it, also when calibrating."""
    if gemm in cfg.calibrate:
        return amax_only(k, operand.hp)
    return amax if _delayed(cfg.gemms[gemm].x) else None


def amax_only(k, x):
    """The amax of ``x`` without its bytes."""
    return k.quantize(x, _AMAX_ONLY, None, 0, None, False, False, None)[4]


def _recorded_grad(cfg, gemm: int, amax):
    """The amax of an output gradient if delayed scaling will record it."""
    return amax if _delayed(cfg.gemms[gemm].g) else None


def _delayed(operand) -> bool:
    return operand.row.startswith("delayed") or operand.col.startswith("delayed")


# --- LayerNorm, RMSNorm --------------------------------------------------------------------------


def normalization_forward(k, cfg, x, ln_weight, ln_bias):
    """``y = norm(x)``; returns ``(y, mean, rstd)``."""
    norm = normalize(k, cfg, x, ln_weight, ln_bias, None, FC1_INPUT, False)
    return norm.operand.hp, *_saved_statistics(cfg, norm)


def normalization_save(cfg, inputs, outputs):
    """Tensors that ``normalization_backward`` takes after the output gradient."""
    del cfg
    return inputs[0], inputs[1], outputs[1], outputs[2]


def normalization_backward(k, cfg, dy, x, ln_weight, mean, rstd):
    """Returns ``(dx, dln_weight, dln_bias)``."""
    need_dln = cfg.needs("ln_weight", "ln_bias")
    return norm_grad(k, cfg, dy, None, x, mean, rstd, ln_weight, cfg.needs("x"), need_dln)


# --- Linear -------------------------------------------------------------------------------------


def linear_forward(k, cfg, x, weight, bias, *rest):
    """``y = x weight^T + bias``; ``rest`` are the weight's buffers (``Quantized``) and fwd_scale.

    Returns ``(y, x_data, x_scale_inv, x_amax, amax)``; the three are the part of the quantized
    input that backward reads.
    """
    *buffers, fwd_scale = rest
    need_dw = cfg.needs("weight")
    operand, amax = quantize_operand(
        k,
        cfg,
        cfg.gemms[0].x,
        x,
        "quantize",
        fwd_scale,
        FC1_INPUT,
        True,
        columnwise_input(cfg, 0, need_dw),
    )
    w = weight_operand(cfg, 0, weight, Quantized(*buffers))
    y = fprop(k, cfg, 0, operand, w, bias, x.dtype)
    return y, *kept_input(cfg, 0, operand, need_dw), _recorded(k, cfg, 0, operand, amax)


def linear_save(cfg, inputs, outputs):
    """Tensors that ``linear_backward`` takes after the output gradient."""
    x, weight, _, *buffers = inputs[:-1]
    need_dw = cfg.needs("weight")
    return (
        x if keeps_high_precision(cfg, 0, need_dw) else None,
        *outputs[1:4],
        *kept_weight(cfg, 0, weight, Quantized(*buffers), cfg.needs("x")),
    )


def linear_backward(k, cfg, dy, x, x_data, x_scale, x_amax, weight, *rest):
    """Returns ``(dx, dweight, dbias, amax)``; ``rest`` is the kept weight and bwd_scale."""
    *kept, bwd_scale = rest
    need_dx, need_dw = cfg.needs("x"), cfg.needs("weight")
    grad, dbias, amax = output_grad(
        k, cfg, 0, dy, bwd_scale, FC1_GRAD_OUTPUT, need_dx, need_dw, cfg.needs("bias")
    )
    w = restored_weight(k, cfg, 0, weight, tuple(kept))
    inputs = restored_input(cfg, 0, x, (x_data, x_scale, x_amax), dy.shape[0], "quantize")
    if cfg.save_input and need_dw and cfg.gemms[0].wgrad:
        spec = cfg.gemms[0].x
        inputs, _ = quantize_operand(k, cfg, spec, x, "quantize", None, FC1_INPUT, False, True)
    dx, dw = linear_grad(k, cfg, 0, grad, inputs, w, need_dx, need_dw, dy.dtype)
    return dx, dw, dbias, _recorded_grad(cfg, 0, amax)


# --- LayerNormLinear ----------------------------------------------------------------------------


def layernorm_linear_forward(k, cfg, x, ln_weight, ln_bias, weight, bias, *rest):
    """``y = norm(x) weight^T + bias``; ``rest`` as in ``linear_forward``.

    Returns ``(y, ln_out, mean, rstd, x_data, x_scale_inv, x_amax, amax)``; ``ln_out`` is there
    where the caller returns it or backward reads it.
    """
    *buffers, fwd_scale = rest
    need_dw = cfg.needs("weight")
    norm = normalize(
        k, cfg, x, ln_weight, ln_bias, fwd_scale, FC1_INPUT, columnwise_input(cfg, 0, need_dw)
    )
    w = weight_operand(cfg, 0, weight, Quantized(*buffers))
    y = fprop(k, cfg, 0, norm.operand, w, bias, x.dtype)
    return (
        y,
        _returned_norm(cfg, norm, need_dw),
        *_saved_statistics(cfg, norm),
        *kept_input(cfg, 0, norm.operand, need_dw),
        _recorded(k, cfg, 0, norm.operand, norm.amax),
    )


def _returned_norm(cfg, norm, need_dw: bool):
    """The norm output where the caller returns it or backward reads it."""
    wanted = cfg.want_norm_output or keeps_high_precision(cfg, 0, need_dw)
    return norm.operand.hp if wanted else None


def _saved_statistics(cfg, norm):
    """``(mean, rstd)`` where a backward will need them."""
    return (norm.mean, norm.rstd) if cfg.need else (None, None)


def _saved_norm(cfg, x, ln_weight, mean, rstd) -> tuple:
    """What the norm's backward reads, where it will run."""
    below = cfg.needs("x", "ln_weight", "ln_bias")
    return (x, ln_weight, mean, rstd) if below else (None, None, None, None)


def layernorm_linear_save(cfg, inputs, outputs):
    """Tensors that ``layernorm_linear_backward`` takes after the output gradients."""
    x, ln_weight, _, weight, _, *buffers = inputs[:-1]
    _, ln_out, mean, rstd, *kept, _ = outputs
    below = cfg.needs("x", "ln_weight", "ln_bias")
    return (
        *_saved_norm(cfg, x, ln_weight, mean, rstd),
        ln_out if keeps_high_precision(cfg, 0, cfg.needs("weight")) else None,
        *kept,
        *kept_weight(cfg, 0, weight, Quantized(*buffers), below),
    )


def layernorm_linear_backward(
    k, cfg, dy, d_ln_out, x, ln_weight, mean, rstd, ln_out, x_data, x_scale, x_amax, weight, *rest
):
    """Returns ``(dx, dln_weight, dln_bias, dweight, dbias, amax)``."""
    *kept, bwd_scale = rest
    need_dln = cfg.needs("ln_weight", "ln_bias")
    below, need_dw = cfg.needs("x") or need_dln, cfg.needs("weight")
    grad, dbias, amax = output_grad(
        k, cfg, 0, dy, bwd_scale, FC1_GRAD_OUTPUT, below, need_dw, cfg.needs("bias")
    )
    w = restored_weight(k, cfg, 0, weight, tuple(kept))
    inputs = restored_input(
        cfg, 0, ln_out, (x_data, x_scale, x_amax), dy.shape[0], norm_producer(cfg)
    )
    dln, dw = linear_grad(k, cfg, 0, grad, inputs, w, below, need_dw, dy.dtype)
    dx, dln_weight, dln_bias = norm_grad(
        k, cfg, dln, d_ln_out, x, mean, rstd, ln_weight, cfg.needs("x"), need_dln
    )
    return dx, dln_weight, dln_bias, dw, dbias, _recorded_grad(cfg, 0, amax)


# --- LayerNormMLP -------------------------------------------------------------------------------


def layernorm_mlp_forward(
    k, cfg, x, ln_weight, ln_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, *rest
):
    """``y = activation(norm(x) fc1^T + b1) fc2^T + b2``.

    ``rest`` are the buffers of both weights and fwd_scale. Returns ``(y, ln_out, mean, rstd,
    x_data, x_scale_inv, x_amax, h, a, a_data, a_scale_inv, a_amax, draws, amax_x, amax_a)`` with
    ``h`` the fc1 output and ``a`` the activation output. With ``cfg.recompute`` backward makes all
    but ``y`` again, from ``draws`` where the rounding is stochastic.
    """
    buffers1, buffers2, fwd_scale = Quantized(*rest[:6]), Quantized(*rest[6:12]), rest[12]
    twice = cfg.recompute and bool(cfg.need)
    leaves, drawn = recorded_draws(k) if twice else (k, [])
    w1 = weight_operand(cfg, 0, fc1_weight, buffers1)
    hidden = _hidden(leaves, cfg, x, ln_weight, ln_bias, w1, fc1_bias, fwd_scale)
    w2 = weight_operand(cfg, 1, fc2_weight, buffers2)
    y = fprop(k, cfg, 1, hidden.act, w2, fc2_bias, x.dtype)
    kept = hidden.kept
    if twice:
        kept = (kept[0] if cfg.want_norm_output else None, *(None,) * (len(kept) - 1))
    return (
        y,
        *kept,
        torch.stack(drawn) if drawn else None,
        _recorded(k, cfg, 0, hidden.norm.operand, hidden.norm.amax),
        _recorded(k, cfg, 1, hidden.act, hidden.amax),
    )


class _Hidden(NamedTuple):
    """What the first three stages of LayerNormMLP produce.

    ``kept``: the tensors for backward; ``act``: the fc2 operand, with its ``amax`` if it is known.
    """

    kept: tuple
    norm: NormResult
    act: Operand
    amax: Optional[Tensor]


def _hidden(k, cfg, x, ln_weight, ln_bias, w1: Operand, fc1_bias, fwd_scale) -> _Hidden:
    """Norm, fc1 and activation."""
    need_dw1, need_dw2 = cfg.needs("fc1_weight"), cfg.needs("fc2_weight")
    norm = normalize(
        k, cfg, x, ln_weight, ln_bias, fwd_scale, FC1_INPUT, columnwise_input(cfg, 0, need_dw1)
    )
    h = fprop(k, cfg, 0, norm.operand, w1, fc1_bias, x.dtype)
    act, amax = activate(k, cfg, h, fwd_scale, FC2_INPUT, columnwise_input(cfg, 1, need_dw2))
    kept = (
        _returned_norm(cfg, norm, need_dw1),
        *_saved_statistics(cfg, norm),
        *kept_input(cfg, 0, norm.operand, need_dw1),
        h if _below_activation(cfg) else None,
        act.hp if keeps_high_precision(cfg, 1, need_dw2) else None,
        *kept_input(cfg, 1, act, need_dw2),
    )
    return _Hidden(kept, norm, act, amax)


def _hidden_again(k, cfg, dy, x, ln_weight, fc1_weight, extras) -> tuple:
    """``_Hidden.kept``, made a second time in backward, bit by bit as the first time.

    ``extras``: what ``layernorm_mlp_save`` keeps for this only.
    """
    ln_bias, fc1_bias, row, scale_inv, row_amax, fwd_scale, draws = extras
    buffers = Quantized(row, None, scale_inv, None, row_amax, None)
    if _quantizes_again(cfg):
        quant = cfg.gemms[0].w.row
        buffers = quantized_leaf(k, fc1_weight, quant, fwd_scale, FC1_WEIGHT, True, False)
    w1 = weight_operand(cfg, 0, fc1_weight, buffers)
    leaves = k if draws is None else repeated_draws(k, draws)
    # Compilers merge equal calls: without ``after`` they would keep the results of the forward.
    ln_weight = k.after(ln_weight, dy)
    ln_out, *kept = _hidden(leaves, cfg, x, ln_weight, ln_bias, w1, fc1_bias, fwd_scale).kept
    wanted = keeps_high_precision(cfg, 0, cfg.needs("fc1_weight"))
    return (ln_out if wanted else None, *kept)


def _quantizes_again(cfg) -> bool:
    """Whether recomputing fc1 starts from the weight itself."""
    return cfg.gemms[0].fprop and 0 in cfg.again


def _below_activation(cfg) -> bool:
    """Whether a gradient is wanted of anything before the activation."""
    return cfg.needs("x", "ln_weight", "ln_bias", "fc1_weight", "fc1_bias")


def layernorm_mlp_save(cfg, inputs, outputs):
    """Tensors that ``layernorm_mlp_backward`` takes after the output gradients."""
    x, ln_weight, ln_bias, fc1_weight, fc1_bias, fc2_weight, _, *buffers = inputs[:-1]
    below = cfg.needs("x", "ln_weight", "ln_bias")
    buffers1 = Quantized(*buffers[:6])
    w1 = kept_weight(cfg, 0, fc1_weight, buffers1, below)
    w2 = kept_weight(cfg, 1, fc2_weight, Quantized(*buffers[6:]), _below_activation(cfg))
    if cfg.recompute:
        row_amax = part_amax(buffers1.amax, cfg.gemms[0].w.row)
        row = (buffers1.row, buffers1.scale_inv, row_amax)
        row = (None,) * 3 if _quantizes_again(cfg) else row
        hp = w1[0] if cfg.gemms[0].fprop and not _quantizes_again(cfg) else fc1_weight
        extras = (ln_bias, fc1_bias, *row, inputs[-1], outputs[12])
        return (x, ln_weight, *(None,) * 11, hp, *w1[1:], *w2, *extras)
    _, ln_out, mean, rstd, *kept1, h, a, a_data, a_scale_inv, a_amax, _, _, _ = outputs
    return (
        *_saved_norm(cfg, x, ln_weight, mean, rstd),
        ln_out if keeps_high_precision(cfg, 0, cfg.needs("fc1_weight")) else None,
        *kept1,
        h,
        a,
        a_data,
        a_scale_inv,
        a_amax,
        *w1,
        *w2,
        *_NO_EXTRAS,
    )


def layernorm_mlp_backward(
    k, cfg, dy, d_ln_out, x, ln_weight, mean, rstd, ln_out, x_data, x_scale, x_amax, h, a, *rest
):
    """Returns ``(dx, dln_w, dln_b, dfc1_w, dfc1_b, dfc2_w, dfc2_b, amax_dh, amax_dy)``."""
    kept_a, kept_w1, kept_w2 = rest[:3], rest[3:7], rest[7:11]
    extras, bwd_scale = rest[11:-1], rest[-1]
    if cfg.recompute:
        ln_out, mean, rstd, x_data, x_scale, x_amax, h, a, *kept_a = _hidden_again(
            k, cfg, dy, x, ln_weight, kept_w1[0], extras
        )
    need_dln = cfg.needs("ln_weight", "ln_bias")
    below = cfg.needs("x") or need_dln
    need_dw1, need_dw2 = cfg.needs("fc1_weight"), cfg.needs("fc2_weight")
    need_dh = _below_activation(cfg)

    grad2, db2, amax_dy = output_grad(
        k, cfg, 1, dy, bwd_scale, FC2_GRAD_OUTPUT, need_dh, need_dw2, cfg.needs("fc2_bias")
    )
    act = restored_input(cfg, 1, a, tuple(kept_a), dy.shape[0], activation_producer(cfg))
    w2 = restored_weight(k, cfg, 1, kept_w2[0], kept_w2[1:])
    da, dw2 = linear_grad(k, cfg, 1, grad2, act, w2, need_dh, need_dw2, dy.dtype)
    if cfg.free:
        k.release(a, kept_a[0])

    db1 = amax_dh = dln = dw1 = None
    if need_dh:
        grad1, db1, amax_dh = activation_grad(
            k, cfg, da, h, bwd_scale, FC1_GRAD_OUTPUT, below, need_dw1, cfg.needs("fc1_bias")
        )
        if cfg.free:
            k.release(h)
        kept = (x_data, x_scale, x_amax)
        inputs = restored_input(cfg, 0, ln_out, kept, dy.shape[0], norm_producer(cfg))
        w1 = restored_weight(k, cfg, 0, kept_w1[0], kept_w1[1:]) if below else Operand()
        dln, dw1 = linear_grad(k, cfg, 0, grad1, inputs, w1, below, need_dw1, dy.dtype)
    dx, dln_weight, dln_bias = norm_grad(
        k, cfg, dln, d_ln_out, x, mean, rstd, ln_weight, cfg.needs("x"), need_dln
    )
    return (
        dx,
        dln_weight,
        dln_bias,
        dw1,
        db1,
        dw2,
        db2,
        _recorded_grad(cfg, 0, amax_dh),
        _recorded_grad(cfg, 1, amax_dy),
    )
