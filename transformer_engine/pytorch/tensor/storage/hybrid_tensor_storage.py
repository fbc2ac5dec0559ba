# SPDX-License-Identifier: Apache-2.0
"""A tensor whose rowwise and columnwise data are in different formats."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ...formats.layout import NOTHING, Quantized
from .._quantizer import Quantizer
from .._storage import QuantizedTensorStorage


class HybridQuantizedTensorStorage(QuantizedTensorStorage):
    """Two quantized tensors of the same values, one of which serves as rowwise data.

    Args:
        rowwise_storage, columnwise_storage: quantized tensors or storages, or None.
        quantizer: what ``quantize_`` uses.
        fake_dtype: the nominal dtype, which ``dequantize`` returns by default.
        shape: the logical shape; needed only without both.
        quant: ``"row|column"``, the encoded ``QuantSpec`` of both; ``"row|column|dq"`` if the
            columnwise data are made from the dequantized rowwise data.
    """

    layout_fields = {"_rowwise_storage": "row", "_columnwise_storage": "col"}
    rowwise_buffers = ("_rowwise_storage",)
    columnwise_buffers = ("_columnwise_storage",)

    def __init__(
        self,
        *,
        rowwise_storage: Optional[QuantizedTensorStorage],
        columnwise_storage: Optional[QuantizedTensorStorage],
        quantizer: Optional[Quantizer] = None,
        fake_dtype: torch.dtype = torch.float32,
        shape: Optional[tuple[int, ...]] = None,
        quant: Optional[str] = None,
    ) -> None:
        parts = [part for part in (rowwise_storage, columnwise_storage) if part is not None]
        if shape is None:
            if not parts:
                raise ValueError(
                    f"A {type(self).__name__} without rowwise_storage and columnwise_storage has "
                    "no shape. Pass one of these two, or shape."
                )
            shape = parts[0]._shape
        self._rowwise_storage = rowwise_storage
        self._columnwise_storage = columnwise_storage
        self._quantizer = quantizer
        self._dtype = fake_dtype
        self._shape = tuple(shape)
        if quant is None:
            row, col = ("" if p is None else p.quant for p in (rowwise_storage, columnwise_storage))
            quant = getattr(quantizer, "quant", f"{row}|{col}")
        self.quant = quant

    @property
    def rowwise_sub_storage(self) -> Optional[QuantizedTensorStorage]:
        """What the rowwise data are, or None."""
        return self._rowwise_storage

    @property
    def columnwise_sub_storage(self) -> Optional[QuantizedTensorStorage]:
        """What the columnwise data are, or None."""
        return self._columnwise_storage

    def operand_buffers(self) -> Quantized:
        row, col = (
            NOTHING if part is None else part.operand_buffers()
            for part in (self._rowwise_storage, self._columnwise_storage)
        )
        # Per-tensor FP8 has one scale, which is the rowwise one of its buffers.
        col_scale_inv = col.scale_inv if col.col_scale_inv is None else col.col_scale_inv
        return Quantized(row.row, col.col, row.scale_inv, col_scale_inv, row.amax, col.col_amax)

    def _why_no_columnwise(self) -> str:
        return "the columnwise data are quantized separately"

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        part = self._rowwise_storage
        if part is None:
            part = self._columnwise_storage
        if part is None:
            return super().dequantize(dtype=dtype)  # says what is missing
        values = part.dequantize(dtype=self._dtype if dtype is None else dtype)
        return values.view(self._shape)

    def _viewed(self, shape: tuple) -> Optional["HybridQuantizedTensorStorage"]:
        return self._of_parts(lambda part: part._viewed(shape), shape)

    def _viewed_by_values(self, shape: tuple) -> "HybridQuantizedTensorStorage":
        return self._of_parts(lambda part: part._viewed_by_values(shape), shape)

    def _part(self, start: int, end: int) -> Optional["HybridQuantizedTensorStorage"]:
        shape = (end - start, *self._shape[1:])
        return self._of_parts(lambda part: part._part(start, end), shape)

    def _of_parts(self, function, shape: tuple) -> Optional["HybridQuantizedTensorStorage"]:
        """The hybrid of ``function(part)``; None if that is None for a part there is."""
        parts = {n: None if p is None else function(p) for n, p in self._buffers().items()}
        if any(parts[n] is None and p is not None for n, p in self._buffers().items()):
            return None
        return self._replace(**parts, _shape=shape)

    def _format(self) -> str:
        return "|".join("" if p is None else p._format() for p in self._buffers().values())

    def _renew_quant(self) -> None:
        """Make ``quant`` say what the parts say."""
        texts = self.quant.split("|")
        for index, part in enumerate(self._buffers().values()):
            if part is not None:
                texts[index] = part.quant
        self.quant = "|".join(texts)

    def get_metadata(self) -> dict[str, Any]:
        return {
            "rowwise_storage": self._rowwise_storage,
            "columnwise_storage": self._columnwise_storage,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
            "shape": self._shape,
            "quant": self.quant,
        }
