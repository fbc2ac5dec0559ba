# SPDX-License-Identifier: Apache-2.0
"""MXFP8: FP8 with one E8M0 scale per 32 values."""

from __future__ import annotations

from typing import Any

from ..constants import DType
from ..formats.layout import MXFP8_BLOCK
from ..formats.spec import QuantSpec
from ._block_quantizer import BlockQuantizer
from ._pickle import makes, rebuilt
from ._quant_text import fp8_format
from ._tensor import QuantizedTensor
from .storage.mxfp8_tensor_storage import MXFP8TensorStorage


class MXFP8Tensor(QuantizedTensor, MXFP8TensorStorage):
    """An MXFP8 tensor; see ``QuantizedTensor`` and ``MXFP8TensorStorage``."""

    storage_type = MXFP8TensorStorage


class MXFP8Quantizer(BlockQuantizer):
    """FP8 with one power-of-two scale per 32 values of a row and, independently, of a column.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        rowwise, columnwise: the layouts of results.
        with_2d_quantization: one scale per tile of 32 x 32, so that both layouts have equal values.

    The last dimension and the product of the others must be multiples of 32. Two such quantizers
    are equal if their settings are.
    """

    storage_type, tensor_type = MXFP8TensorStorage, MXFP8Tensor
    compatible_recipe = "MXFP8BlockScaling"
    block_len = MXFP8_BLOCK

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        fp8_format(fp8_dtype)  # names a wrong type
        self.dtype = fp8_dtype
        self.with_2d_quantization = with_2d_quantization

    @property
    def quant(self) -> str:
        return QuantSpec(
            "mxfp8",
            fp8_format(self.dtype),
            dim=2 if self.with_2d_quantization else 1,
            swizzled=self.optimize_for_gemm,
        ).encode()

    def _settings(self) -> dict[str, Any]:
        return {"fp8_dtype": self.dtype, "with_2d_quantization": self.with_2d_quantization}

    def is_requantization_safe(self) -> bool:
        return True


@makes(MXFP8Tensor)
def _make_mxfp8_tensor_in_reduce_ex(state: dict[str, Any]) -> MXFP8Tensor:
    """The tensor that was pickled as ``state``."""
    return rebuilt(MXFP8Tensor, state)


@makes(MXFP8TensorStorage)
def _make_mxfp8_storage_in_reduce_ex(state: dict[str, Any]) -> MXFP8TensorStorage:
    """The storage that was pickled as ``state``."""
    return rebuilt(MXFP8TensorStorage, state)
