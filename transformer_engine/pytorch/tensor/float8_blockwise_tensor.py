# SPDX-License-Identifier: Apache-2.0
"""FP8 with one fp32 scale per 128 values, or per tile of 128 x 128."""

from __future__ import annotations

from typing import Any

from ..constants import DType
from ..formats.layout import BLOCK
from ..formats.spec import QuantSpec
from ._block_quantizer import BlockQuantizer
from ._pickle import makes, rebuilt
from ._quant_text import fp8_format
from ._tensor import QuantizedTensor
from .storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage


class Float8BlockwiseQTensor(QuantizedTensor, Float8BlockwiseQTensorStorage):
    """An FP8 tensor with block scales; see ``QuantizedTensor`` and the storage."""

    storage_type = Float8BlockwiseQTensorStorage


class Float8BlockQuantizer(BlockQuantizer):
    """FP8 with one fp32 scale per 128 values of a row or column, or per tile of 128 x 128.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        rowwise, columnwise: the layouts of results.
        amax_epsilon: lower bound of the amax of a block.
        force_pow_2_scales: round scales towards zero to a power of two.
        block_scaling_dim: 1 for rows of 128 values, 2 for tiles.

    Shapes need not divide into blocks. Two such quantizers are equal if their settings are.

    Raises:
        ValueError: for another ``block_scaling_dim`` or an ``fp8_dtype`` that is none.
    """

    storage_type, tensor_type = Float8BlockwiseQTensorStorage, Float8BlockwiseQTensor
    compatible_recipe = "Float8BlockScaling"
    block_len = BLOCK
    needs_whole_blocks = False

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(
                f"block_scaling_dim is {block_scaling_dim!r}. Use 1 for blocks of 128 values of a "
                "row or column, or 2 for tiles of 128 x 128."
            )
        self.dtype = fp8_dtype
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim
        fp8_format(fp8_dtype)  # names a wrong type

    @property
    def quant(self) -> str:
        return QuantSpec(
            "block",
            fp8_format(self.dtype),
            pow2=self.force_pow_2_scales,
            eps=float(self.amax_epsilon),
            dim=self.block_scaling_dim,
        ).encode()

    def _settings(self) -> dict[str, Any]:
        return {
            "fp8_dtype": self.dtype,
            "rowwise": self.rowwise_usage,
            "columnwise": self.columnwise_usage,
            "amax_epsilon": self.amax_epsilon,
            "force_pow_2_scales": self.force_pow_2_scales,
            "block_scaling_dim": self.block_scaling_dim,
        }

    def is_requantization_safe(self) -> bool:
        return True


@makes(Float8BlockwiseQTensor)
def _make_float8_blockwise_tensor_in_reduce_ex(state: dict[str, Any]) -> Float8BlockwiseQTensor:
    """The tensor that was pickled as ``state``."""
    return rebuilt(Float8BlockwiseQTensor, state)


@makes(Float8BlockwiseQTensorStorage)
def _make_float8_blockwise_storage_in_reduce_ex(
    state: dict[str, Any],
) -> Float8BlockwiseQTensorStorage:
    """The storage that was pickled as ``state``."""
    return rebuilt(Float8BlockwiseQTensorStorage, state)
