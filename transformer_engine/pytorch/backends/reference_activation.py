# SPDX-License-Identifier: Apache-2.0
"""Activations in plain torch: fp32 arithmetic, one rounding.

Gated activations take ``x = [a | g]``, two halves along the last dimension, and give
``f(a) * g`` (``torch.nn.functional.glu`` activates the other half). With ``s`` the sigmoid:

======================  ==================================================================
``silu``, ``swiglu``    ``f(a) = a * s(a)``
``qgelu``, ``qgeglu``   ``f(a) = a * s(1.702 a)``
``gelu``, ``geglu``     ``f(a) = a * s(2 * 0.79788456 * a * (1 + 0.044715 a^2))``, the tanh
                        approximation of GELU (Hendrycks and Gimpel, 2016, arXiv:1606.08415)
                        rewritten with ``0.5 * (1 + tanh(u)) = s(2 u)``, which keeps its relative
                        precision where the tanh is close to -1
``glu``                 ``f(a) = s(a)``
``relu``, ``reglu``     ``f(a) = max(a, 0)``
``srelu``, ``sreglu``   ``f(a) = max(a, 0)^2``
``clamped_swiglu``      ``c * s(alpha * c) * (clamp(g, -limit, limit) + offset)``,
                        ``c = min(a, limit)``
======================  ==================================================================

A NaN input gives a NaN output. Masks in the backward are written as ``threshold_backward`` and
``hardtanh_backward``: one vectorized pass each, where ``torch.where`` takes twenty times as long
on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor

from ..formats.activations import ACTIVATIONS
from ..formats.fp8 import amax_of
from ..formats.layout import NOTHING
from ..formats.spec import decode_quant
from .reference_quantize import quantize_values

_GELU_LINEAR = 2 * 0.79788456  # 2 * sqrt(2 / pi)
_GELU_CUBIC = 2 * 0.03567741  # the same times 0.044715
_GELU_CUBIC_SLOPE = 2 * 0.1070322243  # the same times 3
_QGELU_ALPHA = 1.702


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
) -> tuple[Optional[Tensor], ...]:
    """Apply ``act`` to ``x`` [M, W] (W = 2 F if gated, else F) and quantize the result [M, F].

    ``limit``, ``alpha`` and ``offset`` are those of ``clamped_swiglu`` (ignored by the others).

    Returns:
        ``(y, *Quantized)``: y in the dtype of ``x``, None unless ``want_output`` or nothing is
        quantized; the rest as ``quantize`` returns them, or Nones. Delayed scaling quantizes the
        fp32 result, other kinds the result rounded to the dtype of ``x``; the amax of a whole
        tensor is that of the fp32 result (but for NVFP4 with ``rht`` or ``row_scaled``).
    """
    _check(act, x)
    values = _forward(x, act, limit, alpha, offset)
    results = _results(
        values, x.dtype, quant, scale, slot, rowwise, columnwise, want_output, False, None
    )
    return results[:-1]


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
    rng: Optional[Tensor],
) -> tuple[Optional[Tensor], ...]:
    """Gradient of ``activation_forward`` for ``dy`` [M, F], of the width of ``x``, quantized.

    Returns:
        ``(dx, *Quantized, dbias)``: as in the forward, with the random state ``rng``. ``dbias``
        (None unless wanted) is the fp32 sum of dx over the rows in the dtype of ``x``: of the fp32
        dx for delayed scaling, of the rounded dx otherwise.
    """
    _check(act, x)
    values = _backward(dy, x, act, limit, alpha, offset)
    return _results(
        values, x.dtype, quant, scale, slot, rowwise, columnwise, want_output, want_bias_grad, rng
    )


def _check(act: str, x: Tensor) -> None:
    """Raise if ``act`` is unknown or ``x`` has not two halves where it needs them."""
    if act not in ACTIVATIONS:
        raise ValueError(
            f"The activation {act!r} is unknown. Use one of {', '.join(sorted(ACTIVATIONS))}."
        )
    if ACTIVATIONS[act][1] and x.shape[1] % 2:
        raise ValueError(
            f"The input of the gated activation {act!r} has {x.shape[1]} columns. The last "
            "dimension holds two halves of equal width, so make it even."
        )


def _forward(x: Tensor, act: str, limit: float, alpha: float, offset: float) -> Tensor:
    """fp32 activation of ``x`` [M, W]."""
    nonlinearity, gated = ACTIVATIONS[act]
    if not gated:
        return _value(x.float(), nonlinearity, alpha)
    a, g = _halves(x)
    if act == "clamped_swiglu":
        a, g = a.clamp(max=limit), g.clamp(-limit, limit).add_(offset)
    return _value(a, nonlinearity, alpha).mul_(g)


def _backward(dy: Tensor, x: Tensor, act: str, limit: float, alpha: float, offset: float) -> Tensor:
    """fp32 gradient of the activation, of the shape of ``x``."""
    nonlinearity, gated = ACTIVATIONS[act]
    if not gated:
        return _value_and_gradient(dy.float(), x.float(), nonlinearity, alpha, want_value=False)[1]
    return _gated_backward(dy.float(), *_halves(x), act, limit, alpha, offset)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The activated and the multiplying half of [M, 2 F], in fp32 (views where ``x`` is)."""
    width = x.shape[1] // 2
    return x[:, :width].float(), x[:, width:].float()


def _sigmoid_gate(a: Tensor, nonlinearity: str, alpha: float) -> Tensor:
    """``s(z(a))`` of the activations that contain a sigmoid."""
    if nonlinearity in ("sigmoid", "silu"):
        return torch.sigmoid(a)
    if nonlinearity == "gelu":
        return (a * a).mul_(_GELU_CUBIC).add_(_GELU_LINEAR).mul_(a).sigmoid_()
    return (a * (_QGELU_ALPHA if nonlinearity == "qgelu" else alpha)).sigmoid_()


def _value(a: Tensor, nonlinearity: str, alpha: float) -> Tensor:
    """``f(a)``, a fresh tensor."""
    if nonlinearity in ("relu", "srelu"):
        value = torch.relu(a)
        return value.mul_(value) if nonlinearity == "srelu" else value
    gate = _sigmoid_gate(a, nonlinearity, alpha)
    return gate if nonlinearity == "sigmoid" else gate.mul_(a)


def _value_and_gradient(
    grad: Tensor, a: Tensor, nonlinearity: str, alpha: float, want_value: bool
) -> tuple[Optional[Tensor], Tensor]:
    """``f(a)`` (may be None unless wanted) and ``f'(a) * grad``, fresh tensors."""
    if nonlinearity == "relu":
        value = torch.relu(a) if want_value else None
        return value, torch.ops.aten.threshold_backward(grad, a, 0.0)
    if nonlinearity == "srelu":
        root = torch.relu(a)
        return root * root if want_value else None, (root * grad).mul_(2.0)
    if nonlinearity == "silu" and not want_value:
        return None, torch.ops.aten.silu_backward(grad, a)
    gate = _sigmoid_gate(a, nonlinearity, alpha)
    if nonlinearity == "sigmoid":
        return gate, torch.ops.aten.sigmoid_backward(grad, gate)
    value = gate * a if want_value else None
    # d/da [a * s(z)] = s + (a * z') * s * (1 - s)
    if nonlinearity == "silu":
        slope = torch.ops.aten.sigmoid_backward(a, gate)
    else:
        if nonlinearity == "gelu":
            slope = (a * a).mul_(_GELU_CUBIC_SLOPE).add_(_GELU_LINEAR).mul_(a)
        else:
            slope = a * (_QGELU_ALPHA if nonlinearity == "qgelu" else alpha)
        torch.ops.aten.sigmoid_backward.grad_input(slope, gate, grad_input=slope)
    return value, slope.add_(gate).mul_(grad)


def _gated_backward(
    grad: Tensor, a: Tensor, g: Tensor, act: str, limit: float, alpha: float, offset: float
) -> Tensor:
    """fp32 gradient [M, 2 F] of ``f(a) * g`` for fp32 ``grad`` and halves."""
    width = a.shape[1]
    values = torch.empty(a.shape[0], 2 * width, dtype=torch.float32, device=a.device)
    da, dg = values[:, :width], values[:, width:]
    clamped = act == "clamped_swiglu"
    kept_a, kept_g = (
        (a.clamp(max=limit), g.clamp(-limit, limit).add_(offset)) if clamped else (a, g)
    )
    value, grad_a = _value_and_gradient(grad, kept_a, ACTIVATIONS[act][0], alpha, want_value=True)
    if clamped:
        # Both masks let the limit itself pass; hardtanh_backward stops at its bounds.
        bound = _next_float32(limit)
        hardtanh_backward = torch.ops.aten.hardtanh_backward.grad_input
        hardtanh_backward(grad_a.mul_(kept_g), a, -float("inf"), bound, grad_input=da)
        hardtanh_backward(value.mul_(grad), g, -bound, bound, grad_input=dg)
    else:
        torch.mul(grad_a, g, out=da)
        torch.mul(value, grad, out=dg)
    return values


@lru_cache(maxsize=None)
def _next_float32(value: float) -> float:
    """The smallest float32 number above ``value``."""
    value, infinity = (
        torch.tensor(number, dtype=torch.float32, device="cpu") for number in (value, float("inf"))
    )
    return torch.nextafter(value, infinity).item()


def _results(
    values: Tensor,
    dtype: torch.dtype,
    quant: str,
    scale: Optional[Tensor],
    slot: Optional[int],
    rowwise: bool,
    columnwise: bool,
    want_output: bool,
    want_bias_grad: bool,
    rng: Optional[Tensor],
) -> tuple[Optional[Tensor], ...]:
    """Round fp32 ``values`` to ``dtype``, sum their rows and quantize them."""
    spec = decode_quant(quant)
    delayed = spec is not None and spec.kind == "delayed"
    y = None if delayed and not want_output else values.to(dtype)
    source = values if delayed else y
    dbias = source.sum(0, dtype=torch.float32).to(dtype) if want_bias_grad else None
    if spec is None:
        return y, *NOTHING, dbias
    kept = y if want_output else None
    whole = spec.per_tensor or (spec.kind == "nvfp4" and not (spec.rht or spec.row_scaled))
    amax = amax_of(values) if whole else None
    clobber = source is not kept
    quantized = quantize_values(
        source, spec, scale, slot, amax, rowwise, columnwise, may_clobber=clobber, rng=rng
    )
    return kept, *quantized, dbias
