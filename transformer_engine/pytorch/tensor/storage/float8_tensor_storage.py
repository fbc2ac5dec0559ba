# SPDX-License-Identifier: Apache-2.0
"""Bytes and scale of a tensor in E4M3 or E5M2 with one fp32 scale for all of it."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from ...constants import DType
from ...formats.fp8 import transpose_bytes
from ...formats.layout import Quantized
from ...formats.spec import QuantSpec
from .._quant_text import dtype_of, fp8_format, kind_of
from .._quantizer import Quantizer
from .._shapes import matrix_shape, padded_transpose, resolve_shape, transposed_view
from .._storage import QuantizedTensorStorage


class Float8TensorStorage(QuantizedTensorStorage):
    """An FP8 tensor of logical shape ``(*leading, K)``; its values are ``codes * scale_inv``.

    Args:
        data: uint8 bytes of the logical shape, or None.
        fp8_scale_inv: fp32 [1].
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        fake_dtype: the nominal dtype, which ``dequantize`` returns by default.
        data_transpose: uint8 bytes of shape ``(K, *leading)``, or None.
        quantizer: what ``quantize_`` uses.
        transpose_padded: instead of ``data_transpose`` the byte transpose as kernels make it, uint8
            ``[K, Mp]`` with M the product of the leading dimensions, Mp = M rounded up to 16 and
            zero bytes beyond M.
        shape: the logical shape; needed only where neither ``data`` nor ``data_transpose`` tells.
        quant: encoded ``QuantSpec`` that the bytes were made with.

    ``_transpose`` is the byte transpose as users know it, ``_transpose_padded`` the same memory as
    FP8 GEMMs read it. It counts only while ``_transpose_invalid`` is False.
    """

    layout_fields = {"_data": "row", "_transpose_padded": "col", "_scale_inv": "scale_inv"}
    rowwise_buffers = ("_data",)
    columnwise_buffers = ("_transpose_padded",)
    extra_options = ("_transpose_invalid",)

    def __init__(
        self,
        *,
        data: Optional[Tensor],
        fp8_scale_inv: Tensor,
        fp8_dtype: DType,
        fake_dtype: torch.dtype = torch.float32,
        data_transpose: Optional[Tensor] = None,
        quantizer: Optional[Quantizer] = None,
        transpose_padded: Optional[Tensor] = None,
        shape: Optional[tuple[int, ...]] = None,
        quant: Optional[str] = None,
    ) -> None:
        if shape is None:
            if data is not None:
                shape = tuple(data.shape)
            elif data_transpose is not None:
                shape = (*data_transpose.shape[1:], data_transpose.shape[0])
            else:
                raise ValueError(
                    f"A {type(self).__name__} without data and data_transpose has no shape. "
                    "Pass one of these two, or shape."
                )
        self._shape = tuple(shape)
        self._data = data
        self._scale_inv = fp8_scale_inv
        self._dtype = fake_dtype
        self._quantizer = quantizer
        self._transpose_padded = transpose_padded
        self._transpose_invalid = transpose_padded is None
        if data_transpose is not None and transpose_padded is None:
            self._transpose = data_transpose
        if not quant:
            quant = QuantSpec("current", fp8_format(fp8_dtype)).encode()
            own = getattr(quantizer, "quant", "")
            if kind_of(own) in ("delayed", "current") and dtype_of(own) == dtype_of(quant):
                quant = own
        self.quant = quant

    @property
    def _fp8_dtype(self) -> DType:
        """The type of the codes."""
        return dtype_of(self.quant)

    @property
    def _transpose(self) -> Optional[Tensor]:
        """Byte transpose of shape ``(K, *leading)``, a view of ``_transpose_padded``."""
        return transposed_view(self._transpose_padded, self._stored_shape[:-1])

    @_transpose.setter
    def _transpose(self, transpose: Optional[Tensor]) -> None:
        rows = math.prod(self._stored_shape[:-1])
        self._transpose_padded = padded_transpose(transpose, rows, "current")
        self._transpose_invalid = transpose is None

    @classmethod
    def default_options(cls, columnwise: bool) -> dict[str, Any]:
        return {"_transpose_invalid": not columnwise}

    def operand_buffers(self) -> Quantized:
        buffers = super().operand_buffers()
        return buffers._replace(col=None) if self._transpose_invalid else buffers

    def get_usages(self) -> dict[str, bool]:
        return {
            "rowwise": self._data is not None,
            "columnwise": self._transpose_padded is not None and not self._transpose_invalid,
        }

    def _drop(self, names: tuple[str, ...]) -> None:
        super()._drop(names)
        self._transpose_invalid = self._transpose_invalid or self._transpose_padded is None

    def _why_no_columnwise(self) -> str:
        return "" if self._data is not None else "it holds no rowwise data to make it from"

    def _create_columnwise(self) -> None:
        """The exact byte transpose of the rowwise data, in place where the buffer exists."""
        transpose = transpose_bytes(self._data.reshape(matrix_shape(self._stored_shape)))
        if self._transpose_padded is None:
            self._transpose_padded = transpose
        else:
            self._transpose_padded.copy_(transpose)
        self._transpose_invalid = False

    def _viewed(self, shape: tuple) -> Optional["Float8TensorStorage"]:
        """Rowwise data alone can have any shape."""
        if not shape or self._data is None or self._transpose_padded is not None:
            return super()._viewed(shape)
        return self._replace(_data=self._data.view(shape), _shape=shape, _buffer_shape=None)

    def _viewed_or_raise(self, shape: tuple) -> "Float8TensorStorage":
        """Columnwise data stay where the last dimension does."""
        shape = resolve_shape(shape, self._shape)
        tensor = self
        if shape and shape[-1] != self._stored_shape[-1] and self._data is not None:
            tensor = self._replace(_transpose_padded=None, _transpose_invalid=True)
        return super(Float8TensorStorage, tensor)._viewed_or_raise(shape)

    def _format(self) -> str:
        return self.quant.split(",")[1]

    def _take_options_of(self, src: QuantizedTensorStorage) -> None:
        # How the scale was found is this tensor's own affair.
        self._transpose_invalid = self._transpose_padded is None or src._transpose_invalid

    def get_metadata(self) -> dict[str, Any]:
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "fake_dtype": self._dtype,
            "quantizer": self._quantizer,
            "transpose_padded": None if self._transpose_invalid else self._transpose_padded,
            "shape": self._shape,
            "quant": self.quant,
        }
