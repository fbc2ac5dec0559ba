# SPDX-License-Identifier: Apache-2.0
"""Bytes and scales of a tensor in MXFP8: FP8 with one E8M0 scale per 32 values."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ...constants import DType
from ...formats.layout import padded_rows
from .._quant_text import dtype_of, fp8_format
from .._quantizer import Quantizer
from .._shapes import matrix_shape, pad
from ._block_scaled import SwizzlableStorage, quant_of


class MXFP8TensorStorage(SwizzlableStorage):
    """An MXFP8 tensor of logical shape ``(*leading, K)`` with M rows in all.

    Args:
        rowwise_data: uint8 bytes of the logical shape, or None.
        rowwise_scale_inv: uint8 (E8M0) ``[up(M, 128), up(K/32, 4)]``.
        columnwise_data: uint8 bytes of the logical shape (not transposed), or None.
        columnwise_scale_inv: uint8 (E8M0) ``[up(M/32, 4), up(K, 128)]``.
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        quantizer: what ``quantize_`` uses.
        with_gemm_swizzled_scales: whether scales are in the order that Blackwell's GEMMs read.
        fake_dtype: the nominal dtype, which ``dequantize`` returns by default.
        shape: the logical shape; needed only where no data tell it.
        quant: encoded ``QuantSpec`` that the bytes were made with, instead of the flag.
        columnwise_padded: instead of ``columnwise_data`` the buffer as kernels make it, ``[Mp, K]``
            with M rounded up to 32.
    """

    kind = "mxfp8"
    transposed = False

    def __init__(
        self,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        fp8_dtype: DType,
        quantizer: Optional[Quantizer],
        with_gemm_swizzled_scales: bool = False,
        *,
        fake_dtype: torch.dtype = torch.float32,
        shape: Optional[tuple[int, ...]] = None,
        quant: Optional[str] = None,
        columnwise_padded: Optional[Tensor] = None,
    ) -> None:
        flags = {"swizzled": with_gemm_swizzled_scales}
        self._set(
            rowwise_data,
            columnwise_data,
            columnwise_padded,
            shape=shape,
            fake_dtype=fake_dtype,
            quantizer=quantizer,
            quant=quant or quant_of(quantizer, "mxfp8", fp8_format(fp8_dtype), **flags),
            _rowwise_scale_inv=rowwise_scale_inv,
            _columnwise_scale_inv=columnwise_scale_inv,
        )

    @property
    def _fp8_dtype(self) -> DType:
        """The type of the codes."""
        return dtype_of(self.quant)

    def _columnwise_shape(self, columnwise: Tensor) -> tuple:
        return tuple(columnwise.shape)

    def _shown(self, padded: Optional[Tensor]) -> Optional[Tensor]:
        if padded is None:
            return None
        rows, _ = matrix_shape(self._stored_shape)
        return (padded if padded.shape[0] == rows else padded[:rows]).view(self._stored_shape)

    def _padded(self, columnwise: Optional[Tensor]) -> Optional[Tensor]:
        if columnwise is None:
            return None
        rows, columns = matrix_shape(self._stored_shape)
        return pad(columnwise.reshape(rows, columns), 0, padded_rows(rows, "mxfp8"))

    def get_metadata(self) -> dict[str, Any]:
        return {
            **self._block_metadata(),
            "fp8_dtype": self._fp8_dtype,
            "with_gemm_swizzled_scales": self._with_gemm_swizzled_scales,
        }
