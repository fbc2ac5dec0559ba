# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm in plain torch: fp32 arithmetic, one rounding.

With ``g = weight`` (``1 + weight`` if zero-centred), ``K`` the row length:

* LayerNorm (Ba et al., 2016, arXiv:1607.06450): ``mean = sum(x) / K``,
  ``rstd = 1 / sqrt(sum((x - mean)^2) / K + eps)``, ``y = (x - mean) * rstd * g + bias``
* RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467): ``rstd = 1 / sqrt(sum(x^2) / K + eps)``,
  ``y = x * rstd * g``
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..formats.layout import NOTHING
from ..formats.spec import decode_for_rows
from .reference_quantize import quantize_values


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    eps: float,
    zero_centered: bool,
    kind: str,
    quant: str,
    scale: Optional[Tensor],
    slot: Optional[int],
    rowwise: bool,
    columnwise: bool,
    want_output: bool,
) -> tuple[Optional[Tensor], ...]:
    """Normalize the rows of ``x`` [M, K] and quantize the result.

    Returns:
        ``(y, mean, rstd, *Quantized)``. ``y`` has the dtype of ``x`` and is None
        unless ``want_output`` or nothing is quantized; ``mean`` (None for RMSNorm) and ``rstd``
        are fp32 [M]; the rest as ``quantize`` returns them, or None.

        What is quantized: the fp32 result itself for delayed scaling without ``want_output`` and
        for MXFP8 with ``unrounded``, otherwise the result rounded to the dtype of ``x``.
    """
    out, mean, rstd = _normalize(x.float(), weight, bias, eps, zero_centered, kind)
    spec = decode_for_rows(quant, x.shape[0])
    if spec is None:
        return out.to(x.dtype), mean, rstd, *NOTHING
    keep_fp32 = (spec.kind == "delayed" and not want_output) or spec.unrounded
    y = out if keep_fp32 else out.to(x.dtype)
    quantized = quantize_values(
        y, spec, scale, slot, None, rowwise, columnwise, may_clobber=not want_output
    )
    if not want_output:
        return None, mean, rstd, *quantized
    return y.to(x.dtype), mean, rstd, *quantized


def _normalize(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    eps: float,
    zero_centered: bool,
    kind: str,
) -> tuple[Tensor, Optional[Tensor], Tensor]:
    """Normalized fp32 ``x``, mean (LayerNorm only) and reciprocal standard deviation."""
    gain = _gain(weight, zero_centered)
    if kind == "RMSNorm":
        rstd = (x * x).mean(1, keepdim=True).add_(eps).rsqrt_()
        return (x * rstd).mul_(gain), None, rstd.view(-1)
    shift = None if bias is None else bias.float()
    out, mean, rstd = torch.native_layer_norm(x, (x.shape[1],), gain, shift, eps)
    return out, mean.view(-1), rstd.view(-1)


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
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Gradients of a norm over the rows of ``x`` [M, K].

    Args:
        dy, dy2: gradients of the output that arrive on two ways, added in fp32; one may be None.
        mean, rstd: what ``norm_forward`` returned.

    Returns:
        ``(dx, dweight, dbias)``: dx in the dtype of ``x``, the other two in that of ``weight``,
        summed over the rows in fp32; None where not needed, and dbias None for RMSNorm.
    """
    grad = _sum_of_gradients(dy, dy2)
    gain = _gain(weight, zero_centered)
    if kind == "RMSNorm":
        dx, dgain = _rms_norm_backward(grad, x.float(), rstd, gain, need_dx, need_dweight)
        dbias = None
    else:
        dx, dgain, dbias = _layer_norm_backward(
            grad, x.float(), mean, rstd, gain, need_dx, need_dweight
        )
    return (
        dx.to(x.dtype) if need_dx else None,
        dgain.to(weight.dtype) if need_dweight else None,
        dbias.to(weight.dtype) if need_dweight and dbias is not None else None,
    )


def _layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gain: Tensor,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """``dx = rstd * (gy - mean(gy) - xh * mean(gy * xh))`` with ``gy = dy * g`` and ``xh`` the
    normalized input; ``dg = sum(dy * xh)``, ``db = sum(dy)`` over rows. All fp32."""
    if x.shape[0] == 0:
        return torch.empty_like(x), torch.zeros_like(gain), torch.zeros_like(gain)
    # The last operand stands for the bias, of which only the presence matters.
    return torch.ops.aten.native_layer_norm_backward(
        dy,
        x,
        (x.shape[1],),
        mean.view(-1, 1),
        rstd.view(-1, 1),
        gain,
        gain,
        (need_dx, need_dweight, need_dweight),
    )


def _rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, gain: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """``dx = rstd * (gy - xh * mean(gy * xh))`` with ``gy = dy * g`` and ``xh = x * rstd``;
    ``dg = sum(dy * xh)`` over rows. All fp32."""
    rstd = rstd.view(-1, 1)
    normalized = x * rstd
    product = dy * normalized
    dgain = product.sum(0) if need_dweight else None
    dx = None
    if need_dx:
        projection = product.mul_(gain).mean(1, keepdim=True)
        dx = (dy * gain).sub_(normalized.mul_(projection)).mul_(rstd)
    return dx, dgain


def _gain(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def _sum_of_gradients(dy: Optional[Tensor], dy2: Optional[Tensor]) -> Tensor:
    if dy is None:
        return dy2.float()
    return dy.float() if dy2 is None else dy.float() + dy2.float()
