# SPDX-License-Identifier: Apache-2.0
"""Operands whose quantizer is no format that a kernel knows, multiplied in high precision.

A Python class of the user: the operand is what its result dequantizes to. In a configuration it is
``python:<number of the quantizer>``. Eager only: a graph can not contain a call of that class.

An ``IdentityQuantizer`` with a dtype: the operand is rounded to it, ``python:<name of the dtype>``.
``python:`` alone leaves values as they are. Graphs contain both.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from ..backends.recording import refuse
from ..formats.layout import NOTHING, Quantized
from ..tensor import QuantizedTensorStorage, Quantizer

_KIND = "python:"
_QUANTIZERS: list[Quantizer] = []  # by number; a configuration may outlive its module


def is_python(quant: str) -> bool:
    """Whether the text of an operand, or of one orientation of it, names such a quantizer."""
    return _KIND in quant


def runs_user_code(spec: str) -> bool:
    """Whether a configuration names a class of the user."""
    return re.search(_KIND + r"\d", spec) is not None


def rounding_text(dtype: torch.dtype) -> str:
    """The text of one orientation that is rounded to ``dtype``."""
    return _KIND + str(dtype).removeprefix("torch.")


def rounding_dtype(quant: str) -> str:
    """The name of the dtype in such a text, "" if it has none."""
    name = quant.removeprefix(_KIND)
    return "" if name.isdigit() else name


def beside_python(text: str) -> str:
    """The text of an operand in a module that has such operands: what a quantizer leaves alone is
    multiplied by them in the same way.
    """
    parts = text.split("|")
    if len(parts) == 1:
        return text or both_orientations()
    return "|".join([*(part or _KIND for part in parts[:2]), *parts[2:]])


def python_text(quantizer: Quantizer) -> str:
    """The text of one orientation that ``quantizer`` makes."""
    _QUANTIZERS.append(quantizer)
    return f"{_KIND}{len(_QUANTIZERS) - 1}"


def both_orientations(text: str = _KIND) -> str:
    """The text of an operand both of whose orientations hold the values of one call."""
    return f"{text}|{_KIND}|dq"


def python_quantized(k, x: Tensor, quant: str, rowwise: bool, columnwise: bool) -> Quantized:
    """``x [M, K]`` as high-precision buffers; columnwise ones are those of the transpose."""
    number = quant.removeprefix(_KIND)
    if number.isdigit():
        values = _values(_QUANTIZERS[int(number)], x)
    else:  # never x itself, because ops return no input
        values = k.rounded(x, number or str(x.dtype).removeprefix("torch."))
    return NOTHING._replace(
        row=values if rowwise else None, col=values.t().contiguous() if columnwise else None
    )


def _values(quantizer: Quantizer, x: Tensor) -> Tensor:
    refuse()  # it may count, draw, or hand on its argument
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
