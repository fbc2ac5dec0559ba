# SPDX-License-Identifier: Apache-2.0
"""The forward and backward function of each module, composed from stages.

These functions are the whole implementation: eager execution calls them with the backends, a
compiler's fake tensors run through them for shapes, and AOTAutograd traces them into leaf ops (see
``dynamo/custom_op.py``). They are pure: fresh outputs, no state, no ambient modes. Operands are 2-D
and contiguous; an output that is absent is None.

Slots of the delayed-scaling vectors: forward ``[input, weight, output]`` and backward
``[grad_output, grad_input]``, once per GEMM.
"""

from __future__ import annotations

from ..formats.spec import QuantSpec
from .activation import activate, activation_grad
from .linear import (
    Kept,
    Operand,
    columnwise_input,
    fprop,
    keep_for_wgrad,
    linear_grad,
    output_grad,
    quantize_operand,
)
from .norm import norm_grad, normalize

FC1_INPUT, FC1_WEIGHT, FC2_INPUT, FC2_WEIGHT = 0, 1, 3, 4
FC1_GRAD_OUTPUT, FC2_GRAD_OUTPUT = 0, 2
_NO_KEPT = Kept(None, None, None, None)
_AMAX_ONLY = QuantSpec("current", "e4m3").encode()


def _recorded(k, cfg, operand: Operand, amax):
    """The amax of a forward operand if delayed scaling will record it, also when calibrating."""
    if cfg.calibrate:
        return amax_only(k, operand.hp)
    return amax if cfg.x.startswith("delayed") else None


def amax_only(k, x):
    """The amax of ``x`` without its bytes."""
    return k.quantize(x, _AMAX_ONLY, None, 0, None, False, False)[3]


def _recorded_grad(cfg, amax):
    """The amax of an output gradient if delayed scaling will record it."""
    return amax if cfg.g.startswith("delayed") else None


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


def linear_forward(k, cfg, x, weight, bias, w_row, w_col, w_scale_inv, fwd_scale):
    """``y = x weight^T + bias``; returns ``(y, x_row, x_col, x_scale_inv, amax)``."""
    need_dw = cfg.needs("weight")
    operand, amax = quantize_operand(
        k, cfg.x, x, fwd_scale, FC1_INPUT, True, columnwise_input(cfg, need_dw)
    )
    w = Operand(weight, w_row, w_col, w_scale_inv)
    y = fprop(k, cfg, operand, w, bias, x.dtype)
    kept = keep_for_wgrad(cfg, operand, need_dw) if cfg.quantized else _NO_KEPT
    return y, kept.row, kept.col, kept.scale_inv, _recorded(k, cfg, operand, amax)


def linear_save(cfg, inputs, outputs):
    """Tensors that ``linear_backward`` takes after the output gradient."""
    x, weight, _, w_row, w_col, w_scale_inv, _ = inputs
    _, x_row, x_col, x_scale_inv, _ = outputs
    keep_hp = not cfg.quantized or cfg.backward_override == "high_precision"
    return (
        x if keep_hp and cfg.needs("weight") else None,
        x_row,
        x_col,
        x_scale_inv,
        *_saved_weight(cfg, weight, w_row, w_col, w_scale_inv, cfg.needs("x")),
    )


def linear_backward(
    k, cfg, dy, x, x_row, x_col, x_scale_inv, weight, w_row, w_col, w_scale_inv, bwd_scale
):
    """Returns ``(dx, dweight, dbias, amax)``."""
    need_dx, need_dw = cfg.needs("x"), cfg.needs("weight")
    grad, dbias, amax = output_grad(
        k, cfg, dy, bwd_scale, FC1_GRAD_OUTPUT, need_dx, need_dw, cfg.needs("bias")
    )
    dx, dw = linear_grad(
        k,
        cfg,
        grad,
        Operand(x, x_row, x_col, x_scale_inv),
        Operand(weight, w_row, w_col, w_scale_inv),
        need_dx,
        need_dw,
        dy.dtype,
    )
    return dx, dw, dbias, _recorded_grad(cfg, amax)


def _saved_weight(cfg, weight, w_row, w_col, w_scale_inv, needed: bool):
    """``(weight, row, col, scale_inv)`` with only what dgrad reads."""
    if not needed:
        return None, None, None, None
    if not cfg.quantized or cfg.backward_override == "high_precision":
        return weight, None, None, None
    if cfg.backward_override == "dequantized":
        return None, w_row, None, w_scale_inv
    return None, None, w_col, w_scale_inv


# --- LayerNormLinear ----------------------------------------------------------------------------


def layernorm_linear_forward(
    k, cfg, x, ln_weight, ln_bias, weight, bias, w_row, w_col, w_scale_inv, fwd_scale
):
    """``y = norm(x) weight^T + bias``.

    Returns ``(y, ln_out, mean, rstd, x_row, x_col, x_scale_inv, amax)``; ``ln_out`` is there where
    the caller returns it or backward reads it.
    """
    need_dw = cfg.needs("weight")
    norm = normalize(
        k, cfg, x, ln_weight, ln_bias, fwd_scale, FC1_INPUT, columnwise_input(cfg, need_dw)
    )
    w = Operand(weight, w_row, w_col, w_scale_inv)
    y = fprop(k, cfg, norm.operand, w, bias, x.dtype)
    kept = keep_for_wgrad(cfg, norm.operand, need_dw)
    ln_out = norm.operand.hp if cfg.want_norm_output else kept.hp
    return (
        y,
        ln_out,
        *_saved_statistics(cfg, norm),
        kept.row,
        kept.col,
        kept.scale_inv,
        _recorded(k, cfg, norm.operand, norm.amax),
    )


def _saved_statistics(cfg, norm):
    """``(mean, rstd)`` where a backward will need them."""
    return (norm.mean, norm.rstd) if cfg.need else (None, None)


def layernorm_linear_save(cfg, inputs, outputs):
    """Tensors that ``layernorm_linear_backward`` takes after the output gradients."""
    x, ln_weight, _, weight, _, w_row, w_col, w_scale_inv, _ = inputs
    _, ln_out, mean, rstd, x_row, x_col, x_scale_inv, _ = outputs
    keep_hp = not cfg.quantized or cfg.backward_override == "high_precision"
    below = cfg.needs("x", "ln_weight", "ln_bias")
    return (
        x if below else None,
        ln_weight if below else None,
        mean if below else None,
        rstd if below else None,
        ln_out if keep_hp and cfg.needs("weight") else None,
        x_row,
        x_col,
        x_scale_inv,
        *_saved_weight(cfg, weight, w_row, w_col, w_scale_inv, below),
    )


def layernorm_linear_backward(
    k,
    cfg,
    dy,
    d_ln_out,
    x,
    ln_weight,
    mean,
    rstd,
    ln_out,
    x_row,
    x_col,
    x_scale_inv,
    weight,
    w_row,
    w_col,
    w_scale_inv,
    bwd_scale,
):
    """Returns ``(dx, dln_weight, dln_bias, dweight, dbias, amax)``."""
    need_dln = cfg.needs("ln_weight", "ln_bias")
    below, need_dw = cfg.needs("x") or need_dln, cfg.needs("weight")
    grad, dbias, amax = output_grad(
        k, cfg, dy, bwd_scale, FC1_GRAD_OUTPUT, below, need_dw, cfg.needs("bias")
    )
    dln, dw = linear_grad(
        k,
        cfg,
        grad,
        Operand(ln_out, x_row, x_col, x_scale_inv),
        Operand(weight, w_row, w_col, w_scale_inv),
        below,
        need_dw,
        dy.dtype,
    )
    dx, dln_weight, dln_bias = norm_grad(
        k, cfg, dln, d_ln_out, x, mean, rstd, ln_weight, cfg.needs("x"), need_dln
    )
    return dx, dln_weight, dln_bias, dw, dbias, _recorded_grad(cfg, amax)


# --- LayerNormMLP -------------------------------------------------------------------------------


def layernorm_mlp_forward(
    k,
    cfg,
    x,
    ln_weight,
    ln_bias,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    w1_row,
    w1_col,
    w1_scale_inv,
    w2_row,
    w2_col,
    w2_scale_inv,
    fwd_scale,
):
    """``y = activation(norm(x) fc1^T + b1) fc2^T + b2``.

    Returns ``(y, ln_out, mean, rstd, x_col, x_scale_inv, h, a, a_col, a_scale_inv, amax_x,
    amax_a)`` with ``h`` the fc1 output and ``a`` the activation output.
    """
    need_dw1, need_dw2 = cfg.needs("fc1_weight"), cfg.needs("fc2_weight")
    norm = normalize(
        k, cfg, x, ln_weight, ln_bias, fwd_scale, FC1_INPUT, columnwise_input(cfg, need_dw1)
    )
    w1 = Operand(fc1_weight, w1_row, w1_col, w1_scale_inv)
    h = fprop(k, cfg, norm.operand, w1, fc1_bias, x.dtype)
    act, amax_a = activate(k, cfg, h, fwd_scale, FC2_INPUT, columnwise_input(cfg, need_dw2))
    w2 = Operand(fc2_weight, w2_row, w2_col, w2_scale_inv)
    y = fprop(k, cfg, act, w2, fc2_bias, x.dtype)
    kept1, kept2 = keep_for_wgrad(cfg, norm.operand, need_dw1), keep_for_wgrad(cfg, act, need_dw2)
    return (
        y,
        norm.operand.hp if cfg.want_norm_output else kept1.hp,
        *_saved_statistics(cfg, norm),
        kept1.col,
        kept1.scale_inv,
        h if _below_activation(cfg) else None,
        kept2.hp,
        kept2.col,
        kept2.scale_inv,
        _recorded(k, cfg, norm.operand, norm.amax),
        _recorded(k, cfg, act, amax_a),
    )


def _below_activation(cfg) -> bool:
    """Whether a gradient is wanted of anything before the activation."""
    return cfg.needs("x", "ln_weight", "ln_bias", "fc1_weight", "fc1_bias")


def layernorm_mlp_save(cfg, inputs, outputs):
    """Tensors that ``layernorm_mlp_backward`` takes after the output gradients."""
    x, ln_weight, _, fc1_weight, _, fc2_weight, _ = inputs[:7]
    w1_row, w1_col, w1_scale_inv, w2_row, w2_col, w2_scale_inv, _ = inputs[7:]
    _, ln_out, mean, rstd, x_col, x_scale_inv, h, a, a_col, a_scale_inv, _, _ = outputs
    below = cfg.needs("x", "ln_weight", "ln_bias")
    _, _, w1_col, w1_scale_inv = w1 = _saved_weight(
        cfg, fc1_weight, w1_row, w1_col, w1_scale_inv, below
    )
    _, _, w2_col, w2_scale_inv = w2 = _saved_weight(
        cfg, fc2_weight, w2_row, w2_col, w2_scale_inv, _below_activation(cfg)
    )
    return (
        x if below else None,
        ln_weight if below else None,
        mean if below else None,
        rstd if below else None,
        ln_out if not cfg.quantized and cfg.needs("fc1_weight") else None,
        x_col,
        x_scale_inv,
        h,
        a,
        a_col,
        a_scale_inv,
        w1[0],
        w1_col,
        w1_scale_inv,
        w2[0],
        w2_col,
        w2_scale_inv,
    )


def layernorm_mlp_backward(
    k,
    cfg,
    dy,
    d_ln_out,
    x,
    ln_weight,
    mean,
    rstd,
    ln_out,
    x_col,
    x_scale_inv,
    h,
    a,
    a_col,
    a_scale_inv,
    fc1_weight,
    w1_col,
    w1_scale_inv,
    fc2_weight,
    w2_col,
    w2_scale_inv,
    bwd_scale,
):
    """Returns ``(dx, dln_w, dln_b, dfc1_w, dfc1_b, dfc2_w, dfc2_b, amax_dh, amax_dy)``."""
    need_dln = cfg.needs("ln_weight", "ln_bias")
    below = cfg.needs("x") or need_dln
    need_dw1, need_dw2 = cfg.needs("fc1_weight"), cfg.needs("fc2_weight")
    need_dh = _below_activation(cfg)

    grad2, db2, amax_dy = output_grad(
        k, cfg, dy, bwd_scale, FC2_GRAD_OUTPUT, need_dh, need_dw2, cfg.needs("fc2_bias")
    )
    act = Operand(a, None, a_col, a_scale_inv)
    w2 = Operand(fc2_weight, None, w2_col, w2_scale_inv)
    da, dw2 = linear_grad(k, cfg, grad2, act, w2, need_dh, need_dw2, dy.dtype)

    db1 = amax_dh = dln = dw1 = None
    if need_dh:
        grad1, db1, amax_dh = activation_grad(
            k, cfg, da, h, bwd_scale, FC1_GRAD_OUTPUT, below, need_dw1, cfg.needs("fc1_bias")
        )
        inputs = Operand(ln_out, None, x_col, x_scale_inv)
        w1 = Operand(fc1_weight, None, w1_col, w1_scale_inv)
        dln, dw1 = linear_grad(k, cfg, grad1, inputs, w1, below, need_dw1, dy.dtype)
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
        _recorded_grad(cfg, amax_dh),
        _recorded_grad(cfg, amax_dy),
    )
