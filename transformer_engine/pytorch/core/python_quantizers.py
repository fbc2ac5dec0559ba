# SPDX-License-Identifier: Apache-2.0
"""Operands whose quantizer is a Python class of the user, which no kernel knows.

The operand is what the quantizer's result dequantizes to, and it is multiplied in high precision.
In a configuration it is ``python:<number of the quantizer>``; ``python:`` alone leaves values as
they are. Eager only: a graph can not contain a call of the user's class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..formats.layout import NOTHING, Quantized
from ..tensor import QuantizedTensorStorage, Quantizer

_KIND = "python:"
_QUANTIZERS: list[Quantizer] = []  # by number; a configuration may outlive its module


def is_python(quant: str) -> bool:
    """Whether the text of an operand, or of one orientation of it, names such a quantizer."""
    return _KIND in quant


def python_text(quantizer: Quantizer) -> str:
    """The text of one orientation that ``quantizer`` makes."""
    _QUANTIZERS.append(quantizer)
    return f"{_KIND}{len(_QUANTIZERS) - 1}"


def both_orientations(text: str = _KIND) -> str:
    """The text of an operand both of whose orientations hold the values of one call."""
    return f"{text}|{_KIND}|dq"


def python_quantized(x: Tensor, quant: str, rowwise: bool, columnwise: bool) -> Quantized:
    """``x [M, K]`` as high-precision buffers; columnwise ones are those of the transpose."""
    number = quant.removeprefix(_KIND)
    values = _values(_QUANTIZERS[int(number)], x) if number else x
    return NOTHING._replace(
        row=values if rowwise else None, col=values.t().contiguous() if columnwise else None
    )


def _values(quantizer: Quantizer, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Any = quantizer.quantize(x)
        if isinstance(result, QuantizedTensorStorage) or not isinstance(result, Tensor):
            result = result.dequantize(dtype=x.dtype)
    if result.shape != x.shape:
        raise ValueError(
            f"The {type(quantizer).__name__} of a CustomRecipe made values of shape"
            f" {tuple(result.shape)} of a tensor of shape {tuple(x.shape)}. Both must be the same."
        )
    return result.to(x.dtype)
