# SPDX-License-Identifier: Apache-2.0
"""A tensor in high precision where a quantized one is expected."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ...formats.layout import NOTHING, Quantized
from .._quantizer import Quantizer
from .._storage import QuantizedTensorStorage


class IdentityTensorStorage(QuantizedTensorStorage):
    """High-precision values with the interface of a quantized tensor.

    Args:
        hp_data: the values.
        fake_dtype: the nominal dtype, by default that of the values.
        quantizer: what ``quantize_`` uses.
        shape: the logical shape; needed only without values.

    The one tensor serves as rowwise and as columnwise data, so usages never change anything.
    """

    layout_fields = {"_hp_data": "row"}
    rowwise_buffers = ("_hp_data",)
    columnwise_buffers = ("_hp_data",)

    def __init__(
        self,
        *,
        hp_data: Optional[Tensor],
        fake_dtype: Optional[torch.dtype] = None,
        quantizer: Optional[Quantizer] = None,
        shape: Optional[tuple[int, ...]] = None,
    ) -> None:
        if shape is None:
            if hp_data is None:
                raise ValueError(
                    f"A {type(self).__name__} without hp_data has no shape. Pass one of the two."
                )
            shape = hp_data.shape
        self._shape = tuple(shape)
        self._hp_data = hp_data
        self._quantizer = quantizer
        if fake_dtype is None:
            fake_dtype = torch.float32 if hp_data is None else hp_data.dtype
        self._dtype = fake_dtype
        self.quant = ""

    def operand_buffers(self) -> Quantized:
        """Nothing: a GEMM takes the values, ``dequantize()``."""
        return NOTHING

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        """Does nothing."""

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """The values themselves, in ``dtype`` (default: the nominal dtype)."""
        if self._hp_data is None:
            return super().dequantize(dtype=dtype)  # says what is missing
        return self._hp_data.to(self._dtype if dtype is None else dtype)

    def _viewed(self, shape: tuple) -> Optional["IdentityTensorStorage"]:
        data = None if self._hp_data is None else self._hp_data.reshape(shape)
        return self._replace(_hp_data=data, _shape=shape)

    def _part(self, start: int, end: int) -> Optional["IdentityTensorStorage"]:
        shape = (end - start, *self._shape[1:])
        return self._replace(_hp_data=self._hp_data[start:end].clone(), _shape=shape)

    def _format(self) -> str:
        return "identity"

    def get_metadata(self) -> dict[str, Any]:
        return {
            "hp_data": self._hp_data,
            "fake_dtype": self._dtype,
            "quantizer": self._quantizer,
            "shape": self._shape,
        }
