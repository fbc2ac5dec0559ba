# SPDX-License-Identifier: Apache-2.0
"""What storages of formats with one scale per block share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import torch
from torch import Tensor

from ...formats.spec import QuantSpec, decode_quant
from .._quant_text import has_option, kind_of, with_swizzled, without_options
from .._shapes import matrix_shape, padded_transpose, transposed_view
from .._slice import compact, in_order
from .._storage import QuantizedTensorStorage


class BlockScaledStorage(QuantizedTensorStorage):
    """Rowwise and columnwise data with scales of their own.

    ``_columnwise_data`` is what users see of ``_columnwise_padded``, the buffer that kernels read,
    which is padded with zeros along the rows of the tensor.
    """

    layout_fields = {
        "_rowwise_data": "row",
        "_columnwise_padded": "col",
        "_rowwise_scale_inv": "scale_inv",
        "_columnwise_scale_inv": "col_scale_inv",
    }
    rowwise_buffers = ("_rowwise_data", "_rowwise_scale_inv")
    columnwise_buffers = ("_columnwise_padded", "_columnwise_scale_inv")
    kind = ""

    _rowwise_data: Optional[Tensor] = None
    _columnwise_padded: Optional[Tensor] = None
    _rowwise_scale_inv: Optional[Tensor] = None
    _columnwise_scale_inv: Optional[Tensor] = None

    def _set(
        self,
        rowwise_data: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_padded: Optional[Tensor],
        *,
        shape: Optional[tuple],
        fake_dtype: torch.dtype,
        quantizer: Any,
        quant: str,
        **buffers: Optional[Tensor],
    ) -> None:
        """What the constructors do. Without ``shape`` the data tell it."""
        if shape is None:
            shape = self._shape_from(rowwise_data, columnwise_data)
        self._shape = tuple(shape)
        self._dtype = fake_dtype
        self._quantizer = quantizer
        self.quant = quant
        self._rowwise_data = rowwise_data
        if columnwise_padded is None:
            columnwise_padded = self._padded(columnwise_data)
        self._columnwise_padded = columnwise_padded
        for name, buffer in buffers.items():
            setattr(self, name, buffer)

    def _shape_from(self, rowwise: Optional[Tensor], columnwise: Optional[Tensor]) -> tuple:
        if rowwise is not None:
            return (*rowwise.shape[:-1], rowwise.shape[-1] * self.packing)
        if columnwise is None:
            raise ValueError(
                f"A {type(self).__name__} without rowwise_data and columnwise_data has no shape. "
                "Pass one of these two, or shape."
            )
        return self._columnwise_shape(columnwise)

    def _columnwise_shape(self, columnwise: Tensor) -> tuple:
        """The logical shape, from ``_columnwise_data``."""
        return (*columnwise.shape[1:], columnwise.shape[0])

    def _shown(self, padded: Optional[Tensor]) -> Optional[Tensor]:
        """The view of ``_columnwise_padded`` that users see."""
        return transposed_view(padded, self._stored_shape[:-1])

    def _padded(self, columnwise: Optional[Tensor]) -> Optional[Tensor]:
        """The inverse of ``_shown``."""
        return padded_transpose(columnwise, matrix_shape(self._stored_shape)[0], self.kind)

    @property
    def _columnwise_data(self) -> Optional[Tensor]:
        """Columnwise data as users know them, a view."""
        return self._shown(self._columnwise_padded)

    @_columnwise_data.setter
    def _columnwise_data(self, data: Optional[Tensor]) -> None:
        self._columnwise_padded = self._padded(data)

    def _format(self) -> str:
        # Bytes mean the same however their scales were found or values rounded.
        return without_options(self.quant, "swizzled", "unrounded", "stochastic", "pow2", "eps")

    def _block_metadata(self) -> dict[str, Any]:
        """The part of ``get_metadata`` that is the same for all."""
        return {
            "rowwise_data": self._rowwise_data,
            "rowwise_scale_inv": self._rowwise_scale_inv,
            "columnwise_data": self._columnwise_data,
            "columnwise_scale_inv": self._columnwise_scale_inv,
            "columnwise_padded": self._columnwise_padded,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
            "shape": self._shape,
            "quant": self.quant,
        }


class SwizzlableStorage(BlockScaledStorage):
    """Block scales are one byte each, compact or in the order that Blackwell's GEMMs read."""

    @property
    def _with_gemm_swizzled_scales(self) -> bool:
        """Whether scales are in that order."""
        return has_option(self.quant, "swizzled=1")

    @_with_gemm_swizzled_scales.setter
    def _with_gemm_swizzled_scales(self, swizzled: bool) -> None:
        self.quant = with_swizzled(self.quant, swizzled)

    def _reordered_buffers(self, src: "SwizzlableStorage") -> dict[str, Optional[Tensor]]:
        if src._with_gemm_swizzled_scales == self._with_gemm_swizzled_scales:
            return src._buffers()
        buffers = compact(src.operand_buffers(), decode_quant(src.quant))
        buffers = in_order(buffers, decode_quant(self.quant))
        return self.attributes_of(buffers, self._stored_shape)


def quant_of(quantizer: Any, kind: str, fmt: str, **flags: Any) -> str:
    """The encoded ``QuantSpec`` of a tensor that users construct.

    ``flags`` is what they said about it. The rest is what ``quantizer`` would do, where it is one
    for this kind.
    """
    own = getattr(quantizer, "quant", "")
    if kind_of(own) == kind:
        return replace(decode_quant(own), fmt=fmt, **flags).encode()
    return QuantSpec(kind, fmt, **flags).encode()
