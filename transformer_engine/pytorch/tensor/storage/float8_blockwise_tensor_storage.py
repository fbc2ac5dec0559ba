# SPDX-License-Identifier: Apache-2.0
"""Bytes and scales of a tensor in FP8 with one fp32 scale per 128 values or 128 x 128 tile."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ...constants import DType
from ...formats.fp8 import transpose_bytes
from ...formats.layout import BLOCK, ceil_div, padded_rows, round_up
from .._quant_text import dtype_of, fp8_format, has_option
from .._quantizer import Quantizer
from .._shapes import matrix_shape, pad
from ._block_scaled import BlockScaledStorage, quant_of


class Float8BlockwiseQTensorStorage(BlockScaledStorage):
    """An FP8 tensor of logical shape ``(*leading, K)`` with M rows in all, with block scales.

    Args:
        rowwise_data: uint8 bytes of the logical shape, or None.
        rowwise_scale_inv: fp32, ``[ceil(K/128), up(M, 4)]``, or for square tiles
            ``[ceil(M/128), up(ceil(K/128), 4)]``.
        columnwise_data: uint8 bytes of shape ``(K, *leading)``, or None.
        columnwise_scale_inv: fp32, ``[ceil(M/128), up(K, 4)]``, or for square tiles
            ``[ceil(K/128), up(ceil(M/128), 4)]``.
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        quantizer: what ``quantize_`` uses.
        is_2D_scaled: whether blocks are 128 x 128 tiles.
        fake_dtype: the nominal dtype, which ``dequantize`` returns by default.
        shape: the logical shape; needed only where no data tell it.
        quant: encoded ``QuantSpec`` that the bytes were made with, instead of the flags.
        columnwise_padded: instead of ``columnwise_data`` the buffer as kernels make it, ``[K, Mp]``
            with M rounded up to 128.
    """

    kind = "block"
    must_keep_a_layout = True

    def __init__(
        self,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        fp8_dtype: DType,
        quantizer: Optional[Quantizer],
        is_2D_scaled: bool,
        *,
        fake_dtype: torch.dtype = torch.float32,
        shape: Optional[tuple[int, ...]] = None,
        quant: Optional[str] = None,
        columnwise_padded: Optional[Tensor] = None,
    ) -> None:
        dim = 2 if is_2D_scaled else 1
        self._set(
            rowwise_data,
            columnwise_data,
            columnwise_padded,
            shape=shape,
            fake_dtype=fake_dtype,
            quantizer=quantizer,
            quant=quant or quant_of(quantizer, "block", fp8_format(fp8_dtype), dim=dim),
            _rowwise_scale_inv=rowwise_scale_inv,
            _columnwise_scale_inv=columnwise_scale_inv,
        )

    @property
    def _fp8_dtype(self) -> DType:
        """The type of the codes."""
        return dtype_of(self.quant)

    @property
    def _is_2D_scaled(self) -> bool:
        """Whether blocks are 128 x 128 tiles."""
        return has_option(self.quant, "dim=2")

    def _why_no_columnwise(self) -> str:
        if self._rowwise_data is None:
            return "it holds no rowwise data to make it from"
        if not self._is_2D_scaled:
            return "its blocks are rows of 128 values, whose scales do not serve columns"
        return ""

    def _create_columnwise(self) -> None:
        """Square tiles: the transpose of bytes and scales."""
        rows, columns = matrix_shape(self._stored_shape)
        transpose = transpose_bytes(self._rowwise_data.reshape(rows, columns))
        self._columnwise_padded = pad(transpose, 1, padded_rows(rows, "block"))
        scales = self.operand_buffers().scale_inv[:, : ceil_div(columns, BLOCK)].t()
        length = round_up(ceil_div(rows, BLOCK), 4)
        self._columnwise_scale_inv = pad(scales, 1, length).contiguous()

    def get_metadata(self) -> dict[str, Any]:
        return {
            **self._block_metadata(),
            "fp8_dtype": self._fp8_dtype,
            "is_2D_scaled": self._is_2D_scaled,
        }
