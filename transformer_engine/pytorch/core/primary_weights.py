# SPDX-License-Identifier: Apache-2.0
"""Weights whose parameter is a quantized tensor: no high-precision copy exists.

A module op takes their buffers like those of any quantized weight. In the place of the weight
itself it gets a tensor without memory, whose only purpose is to receive the gradient; where a GEMM
needs values (outside of ``te.autocast``, for example) it gets the dequantized ones.
"""

from __future__ import annotations

import warnings
from typing import Optional

import torch
from torch import Tensor

from ..environment import constant_in_graphs
from ..formats.layout import Quantized
from ..formats.spec import decode_quant
from ..tensor import IdentityTensorStorage, QuantizedTensor
from .config import decode_config, decode_operand, has_columns
from .python_quantizers import is_python


class AsWeight(torch.autograd.Function):
    """``values``, whose gradient is that of ``weight``."""

    @staticmethod
    def forward(ctx, weight, values):
        del weight
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx, grad):
        del ctx
        return grad, None


def stand_in(
    weight: QuantizedTensor, spec: str, gemm: int, dtype: torch.dtype, warn: bool
) -> Tensor:
    """What a module op of activation dtype ``dtype`` takes as the weight of linear stage ``gemm``,
    for its gradient. ``warn``: say so where nothing is quantized.
    """
    needed = needed_values(spec, gemm)
    with torch.no_grad():
        if needed == "":
            # Nothing reads it; a zero gives compilers something to trace.
            zero = torch.zeros(1, dtype=dtype, device=weight.device)
            values = zero.expand(tuple(weight.shape))
        else:
            column = columnwise_values(weight) if needed == "col" else None
            values = (weight if column is None else column).dequantize(dtype=dtype)
    if warn and not spec and not torch.compiler.is_compiling():
        warnings.warn(
            "A module with quantized weights runs outside of te.autocast: it computes in high"
            " precision with the dequantized weights.",
            stacklevel=5,
        )
    return AsWeight.apply(weight, values)


@constant_in_graphs
def needed_values(spec: str, gemm: int) -> str:
    """Which values of the weight a GEMM of linear stage ``gemm`` reads in high precision.

    "" for none, "col" for those that belong to dgrad, "row" for others.
    """
    config = decode_config(spec).gemms[gemm]
    if config.keeps_weight() != "hp":
        return "" if config.fprop else "row"
    return "col" if config.fprop and not config.override else "row"


def columnwise_values(weight: QuantizedTensor) -> Optional[IdentityTensorStorage]:
    """The part of a hybrid weight that keeps columnwise values in high precision, if it has one."""
    part = getattr(weight, "columnwise_sub_storage", None)
    return part if isinstance(part, IdentityTensorStorage) else None


def primary_buffers(
    module, label: str, weight: QuantizedTensor, quant: str, columnwise: bool
) -> Quantized:
    """The buffers of ``weight``, which the active recipe wants quantized as the text ``quant``.

    Raises RuntimeError if it is of another format, or lacks the columnwise data that a training
    step needs and can not make them.
    """
    name = f"the {label} of {type(module).__name__} '{module.name}'"
    if is_python(quant) or formats_of(weight.quant) != formats_of(quant):
        raise RuntimeError(
            f"Recipe mismatch: {name} was made by quantized_model_init as {weight.quant!r}, but the"
            f" active recipe wants {quant!r}. Use the recipe of quantized_model_init in"
            " te.autocast, or make the module anew."
        )
    buffers = weight.operand_buffers()
    if not columnwise or buffers.col is not None or not has_columns(quant):
        return buffers
    if torch.compiler.is_compiling():
        reason = "a graph can not add them, but a training step in eager can, for some formats"
    else:
        reason = weight._why_no_columnwise()
    if reason:
        raise RuntimeError(
            f"A training step needs columnwise data of {name}, which was quantized without"
            f" gradients: {reason}. Make the module with gradients enabled."
        )
    weight.update_usage(columnwise_usage=True)
    return weight.operand_buffers()


@constant_in_graphs
def formats_of(quant: str) -> str:
    """Kind and format of each orientation that the text of an operand names."""
    operand = decode_operand(quant)
    specs = (decode_quant(operand.row), decode_quant(operand.col))
    return "|".join("" if spec is None else f"{spec.kind},{spec.fmt}" for spec in specs)
