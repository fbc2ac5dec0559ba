# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors at the edges of a module: inputs, ``fp8_output`` and ``fp8_grad``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.config import gemm_text
from ..formats.spec import decode_quant
from ..quantized_tensor import QuantizedTensor, Quantizer
from ..tensor import Float8Quantizer
from ..tensor.from_spec import DTYPES, quantizer_from_spec

OUTPUT_SLOT, GRAD_INPUT_SLOT = 2, 1  # of the quantizers of one GEMM, forward and backward


class QuantizedGradient(torch.autograd.Function):
    """The identity, whose gradient is quantized."""

    @staticmethod
    def forward(ctx, x, quantizer):
        ctx.quantizer = quantizer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.quantizer(grad), None


def high_precision(x: Tensor) -> Tensor:
    """``x``, or the values of a quantized ``x``; differentiable."""
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def quantize_gradient_of(module, x: Tensor, spec: str, scaling) -> Tensor:
    """``x``, whose gradient will arrive quantized (``fp8_grad``)."""
    if "bwd=" in spec or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return QuantizedGradient.apply(x, edge_quantizer(module, spec, "g", scaling))


def edge_quantizer(module, spec: str, key: str, scaling) -> Quantizer:
    """The quantizer of the output ("x") or of the input's gradient ("g"), rowwise only.

    Raises ValueError if the recipe leaves such tensors in high precision.
    """
    row = gemm_text(spec, key, 0).partition("|")[0]
    if row == "":
        raise ValueError(
            f"{type(module).__name__} '{module.name}' was asked for a quantized tensor, but the"
            " active recipe leaves it in high precision. Leave fp8_output and fp8_grad off."
        )
    quant = decode_quant(row)
    if quant.kind == "delayed":
        forward = key == "x"
        scale = scaling.fwd_scale if forward else scaling.bwd_scale
        history = scaling.fwd_history if forward else scaling.bwd_history
        slot = OUTPUT_SLOT if forward else GRAD_INPUT_SLOT
        return Float8Quantizer(
            scale[slot : slot + 1],
            history[0, slot : slot + 1],
            DTYPES[quant.fmt],
            columnwise=False,
        )
    quantizer = quantizer_from_spec(quant)
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer
