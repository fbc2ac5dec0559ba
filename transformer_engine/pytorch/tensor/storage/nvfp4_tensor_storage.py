# SPDX-License-Identifier: Apache-2.0
"""Bytes and scales of a tensor in NVFP4: E2M1 with one E4M3 scale per 16 values and one fp32."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ...constants import DType
from ...formats.fp4 import pack_fp4, unpack_fp4
from ...formats.hadamard import hadamard_matrix
from ...formats.layout import NVFP4_BLOCK, Quantized, ceil_div, padded_rows, quantized_layout
from ...formats.spec import decode_quant
from ...formats.swizzle import swizzle_scales, unswizzle_scales
from .._quant_text import dtype_of, has_option, starts_option
from .._quantizer import Quantizer
from .._shapes import matrix_shape, pad
from ._block_scaled import SwizzlableStorage, quant_of


class NVFP4TensorStorage(SwizzlableStorage):
    """An NVFP4 tensor of logical shape ``(*leading, K)`` with M rows in all.

    Args:
        rowwise_data: uint8 ``(*leading, K/2)``, two codes per byte, the first one in the low half;
            or None.
        rowwise_scale_inv: uint8 (E4M3) ``[up(M, 128), up(K/16, 4)]``.
        columnwise_data: uint8 ``[K, M/2]``, of the transpose, or None.
        columnwise_scale_inv: uint8 (E4M3) ``[up(K, 128), up(M/16, 4)]``.
        amax_rowwise: fp32 [1], or [M] if row-scaled.
        amax_columnwise: fp32 [1], or [K] if row-scaled.
        fp4_dtype: ``DType.kFloat4E2M1``.
        quantizer: what ``quantize_`` uses.
        with_gemm_swizzled_scales: whether scales are in the order that Blackwell's GEMMs read.
        fake_dtype: the nominal dtype, which ``dequantize`` returns by default.
        row_scaled_nvfp4: whether each row has a global scale of its own.
        nvfp4_use_4over6: whether blocks chose between 4 and 6 as their largest code.
        nvfp4_e4m3_max: the largest block scale, 448 or with ``nvfp4_use_4over6`` 256.
        shape: the logical shape; needed only where no data tell it.
        quant: encoded ``QuantSpec`` that the bytes were made with, instead of the flags.
        columnwise_padded: instead of ``columnwise_data`` the buffer as kernels make it,
            ``[K, Mp/2]`` with M rounded up to 32.

    Columnwise values are Hadamard-transformed if ``quantizer`` (or ``quant``) says so.
    """

    layout_fields = {
        **SwizzlableStorage.layout_fields,
        "_amax_rowwise": "amax",
        "_amax_columnwise": "col_amax",
    }
    rowwise_buffers = (*SwizzlableStorage.rowwise_buffers, "_amax_rowwise")
    columnwise_buffers = (*SwizzlableStorage.columnwise_buffers, "_amax_columnwise")
    kind = "nvfp4"
    packing = 2

    _amax_rowwise: Optional[Tensor] = None
    _amax_columnwise: Optional[Tensor] = None

    def __init__(
        self,
        rowwise_data: Optional[Tensor],
        rowwise_scale_inv: Optional[Tensor],
        columnwise_data: Optional[Tensor],
        columnwise_scale_inv: Optional[Tensor],
        amax_rowwise: Optional[Tensor],
        amax_columnwise: Optional[Tensor],
        fp4_dtype: DType,
        quantizer: Optional[Quantizer],
        with_gemm_swizzled_scales: bool = False,
        *,
        fake_dtype: torch.dtype = torch.float32,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        shape: Optional[tuple[int, ...]] = None,
        quant: Optional[str] = None,
        columnwise_padded: Optional[Tensor] = None,
    ) -> None:
        del fp4_dtype  # there is one
        if not quant:
            mode = decode_quant(getattr(quantizer, "quant", "")) if quantizer else None
            error = getattr(mode, "four_over_six", "") or "mae"
            quant = quant_of(
                quantizer,
                "nvfp4",
                "e2m1",
                swizzled=with_gemm_swizzled_scales,
                row_scaled=row_scaled_nvfp4,
                four_over_six=error if nvfp4_use_4over6 else "",
                e4m3_max=nvfp4_e4m3_max,
            )
        self._set(
            rowwise_data,
            columnwise_data,
            columnwise_padded,
            shape=shape,
            fake_dtype=fake_dtype,
            quantizer=quantizer,
            quant=quant,
            _rowwise_scale_inv=rowwise_scale_inv,
            _columnwise_scale_inv=columnwise_scale_inv,
            _amax_rowwise=amax_rowwise,
            _amax_columnwise=amax_columnwise,
        )

    # --- metadata --------------------------------------------------------------------------------

    @property
    def _fp4_dtype(self) -> DType:
        """The type of the codes."""
        return dtype_of(self.quant)

    @property
    def _row_scaled_nvfp4(self) -> bool:
        """Whether each row has a global scale of its own."""
        return has_option(self.quant, "row_scaled=1")

    @property
    def _nvfp4_use_4over6(self) -> bool:
        """Whether blocks chose between 4 and 6 as their largest code."""
        return starts_option(self.quant, "four_over_six")

    @property
    def _nvfp4_e4m3_max(self) -> int:
        """The largest block scale."""
        return 256 if has_option(self.quant, "e4m3_max=256") else 448

    def _columnwise_shape(self, columnwise: Tensor) -> tuple:
        return (*columnwise.shape[1:-1], 2 * columnwise.shape[-1], columnwise.shape[0])

    def _shown(self, padded: Optional[Tensor]) -> Optional[Tensor]:
        if padded is None:
            return None
        length = ceil_div(matrix_shape(self._stored_shape)[0], 2)
        return padded if padded.shape[1] == length else padded[:, :length]

    def _padded(self, columnwise: Optional[Tensor]) -> Optional[Tensor]:
        if columnwise is None:
            return None
        rows, columns = matrix_shape(self._stored_shape)
        columnwise = columnwise.reshape(columns, ceil_div(rows, 2))
        return pad(columnwise, 1, padded_rows(rows, "nvfp4") // 2)

    def get_metadata(self) -> dict[str, Any]:
        return {
            **self._block_metadata(),
            "amax_rowwise": self._amax_rowwise,
            "amax_columnwise": self._amax_columnwise,
            "fp4_dtype": self._fp4_dtype,
            "with_gemm_swizzled_scales": self._with_gemm_swizzled_scales,
            "row_scaled_nvfp4": self._row_scaled_nvfp4,
            "nvfp4_use_4over6": self._nvfp4_use_4over6,
            "nvfp4_e4m3_max": self._nvfp4_e4m3_max,
        }

    # --- columnwise ------------------------------------------------------------------------------

    def _why_no_columnwise(self) -> str:
        if self._rowwise_data is None:
            return "it holds no rowwise data to make it from"
        if not has_option(self.quant, "dim=2"):
            return (
                "its blocks are rows of 16 values, whose scales do not serve columns (square "
                "blocks do: with_2d_quantization=True)"
            )
        return ""

    def _create_columnwise(self) -> None:
        """Square blocks: the transpose of the codes, and the scale of each block for 16 columns."""
        rows, columns = matrix_shape(self._stored_shape)
        swizzled = self._with_gemm_swizzled_scales
        codes = unpack_fp4(self._rowwise_data.reshape(rows, columns // 2))
        codes = pad(codes, 0, padded_rows(rows, "nvfp4")).t().contiguous()
        scales = self._rowwise_scale_inv
        scales = unswizzle_scales(scales) if swizzled else scales
        scales = scales[:rows:NVFP4_BLOCK, : columns // NVFP4_BLOCK].t()
        scales = scales.repeat_interleave(NVFP4_BLOCK, 0)
        layout = quantized_layout(decode_quant(self.quant), rows, columns, False, True)
        for dim, size in enumerate(layout.col_scale_inv):
            scales = pad(scales, dim, size)
        scales = scales.contiguous()
        self._columnwise_padded = pack_fp4(codes)
        self._columnwise_scale_inv = swizzle_scales(scales) if swizzled else scales
        self._amax_columnwise = self._amax_rowwise.clone()

    def _columnwise_matrix(self, buffers: Quantized, dtype: torch.dtype) -> Tensor:
        """Transformed values are transformed back, in fp32 and before they are rounded."""
        spec = decode_quant(self.quant)
        if not spec.rht:
            return super()._columnwise_matrix(buffers, dtype)
        values = super()._columnwise_matrix(buffers, torch.float32)
        inverse = hadamard_matrix(spec.sign_mask, values.device).float().t()
        blocks = values.view(values.shape[0], -1, NVFP4_BLOCK)
        return (blocks @ inverse).view(values.shape).to(dtype)
