# SPDX-License-Identifier: Apache-2.0
"""NVFP4: E2M1 values with one E4M3 scale per 16 of them and one fp32 scale for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterable, Optional

import torch
from torch import Tensor

from ..constants import DType
from ..formats.blocks import padded_to
from ..formats.fp8 import amax_of
from ..formats.hadamard import hadamard_matrix, hadamard_transform_rows
from ..formats.layout import NOTHING, NVFP4_BLOCK, Quantized, padded_rows, quantized_layout
from ..formats.spec import RHT_SIGN_MASK, QuantSpec, decode_quant
from ._block_quantizer import BlockQuantizer
from ._buffer_quantizer import BufferQuantizer, ReducesAmax
from ._leaf import leaf, rng_state
from ._pickle import makes, rebuilt
from ._quantizer import default_device
from ._shapes import matrix_shape
from ._storage import QuantizedTensorStorage
from ._tensor import QuantizedTensor
from .storage.nvfp4_tensor_storage import NVFP4TensorStorage


class NVFP4Tensor(QuantizedTensor, NVFP4TensorStorage):
    """An NVFP4 tensor; see ``QuantizedTensor`` and ``NVFP4TensorStorage``."""

    storage_type = NVFP4TensorStorage


class NVFP4Quantizer(BlockQuantizer, ReducesAmax):
    """FP4 (E2M1) with one E4M3 scale per 16 values of a row or column, and a global fp32 scale.

    Args:
        fp4_dtype: ``DType.kFloat4E2M1``.
        rowwise, columnwise: the layouts of results.
        with_amax_reduction: use the largest amax in ``amax_reduction_group`` as the global one.
        with_rht: random Hadamard transform of the columnwise values; tensors must be bf16.
        with_post_rht_amax: must be True with ``with_rht``: the columnwise amax is that of the
            transformed values.
        with_2d_quantization: one scale per tile of 16 x 16, so that both layouts have equal values.
        stochastic_rounding: round codes up or down at random, without bias. The random numbers come
            from torch's generator of the device.
        row_scaled_nvfp4: one global scale per row.
        nvfp4_use_4over6: let each block choose whether its largest value becomes 4 or 6.
        nvfp4_e4m3_max: largest block scale, 448 or 256; always 448 without ``nvfp4_use_4over6``.
        nvfp4_4over6_err_mode: ``"MAE"`` or ``"MSE"``, the error that decides.
        with_random_sign_mask: signs of the transform; without, all are positive.

    The last dimension and the product of the others must be multiples of 16. Two such quantizers
    are equal if their settings are.

    Raises:
        ValueError: for other values, or options that exclude each other.
    """

    storage_type, tensor_type = NVFP4TensorStorage, NVFP4Tensor
    compatible_recipe = "NVFP4BlockScaling"
    block_len = NVFP4_BLOCK

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(
            rowwise=rowwise,
            columnwise=columnwise,
            with_amax_reduction=with_amax_reduction,
            amax_reduction_group=amax_reduction_group,
        )
        self.dtype = fp4_dtype
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode.upper()
        self.with_random_sign_mask = with_random_sign_mask
        self._check_settings()

    def _check_settings(self) -> None:
        if self.dtype != DType.kFloat4E2M1:
            raise ValueError(f"fp4_dtype is {self.dtype!r}; NVFP4 is DType.kFloat4E2M1.")
        if self.nvfp4_e4m3_max not in (448, 256):
            raise ValueError(f"nvfp4_e4m3_max is {self.nvfp4_e4m3_max}. Use 448 or 256.")
        if self.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            raise ValueError(
                f'nvfp4_4over6_err_mode is {self.nvfp4_4over6_err_mode!r}. Use "MAE" or "MSE".'
            )
        if self.row_scaled_nvfp4 and self.with_amax_reduction:
            raise ValueError(
                "Row-scaled NVFP4 has one amax per row, so there is none to reduce. Switch off "
                "row_scaled_nvfp4 or with_amax_reduction."
            )
        _ = self.quant  # refuses options that exclude each other

    @property
    def quant(self) -> str:
        four_over_six = self.nvfp4_4over6_err_mode.lower() if self.nvfp4_use_4over6 else ""
        return QuantSpec(
            "nvfp4",
            "e2m1",
            dim=2 if self.with_2d_quantization else 1,
            swizzled=self.optimize_for_gemm,
            rht=self.with_rht,
            sign_mask=self.rht_matrix_random_sign_mask_t if self.with_rht else RHT_SIGN_MASK,
            stochastic=self.stochastic_rounding,
            row_scaled=self.row_scaled_nvfp4,
            four_over_six=four_over_six,
            e4m3_max=self.nvfp4_e4m3_max,
        ).encode()

    @property
    def rht_matrix_random_sign_mask_t(self) -> int:
        """Signs of the Hadamard transform: bit i is set where row i of the matrix is negated."""
        return RHT_SIGN_MASK if self.with_random_sign_mask else 0

    @property
    def rht_matrix(self) -> Tensor:
        """The matrix of the transform, bf16 [16, 16], on the CUDA device if there is one."""
        return hadamard_matrix(self.rht_matrix_random_sign_mask_t, default_device(None))

    def _settings(self) -> dict[str, Any]:
        return {
            "fp4_dtype": self.dtype,
            "with_amax_reduction": self.with_amax_reduction,
            "with_rht": self.with_rht,
            "with_post_rht_amax": self.with_post_rht_amax,
            "with_2d_quantization": self.with_2d_quantization,
            "stochastic_rounding": self.stochastic_rounding,
            "row_scaled_nvfp4": self.row_scaled_nvfp4,
            "nvfp4_use_4over6": self.nvfp4_use_4over6,
            "nvfp4_e4m3_max": self.nvfp4_e4m3_max,
            "nvfp4_4over6_err_mode": self.nvfp4_4over6_err_mode,
            "with_random_sign_mask": self.with_random_sign_mask,
        }

    # --- quantizing ------------------------------------------------------------------------------

    def _check(self, shape: tuple, dtype: Optional[torch.dtype] = None) -> None:
        super()._check(shape, dtype)
        if dtype is None:
            return
        if self.with_rht and not self.with_post_rht_amax:
            raise ValueError(
                "NVFP4Quantizer has with_rht without with_post_rht_amax, but columnwise values are "
                "scaled by the amax that they have after the transform. Set both."
            )
        if self.with_rht and self.columnwise_usage and dtype != torch.bfloat16:
            raise ValueError(
                f"NVFP4Quantizer with with_rht transforms torch.bfloat16 tensors, not {dtype}. "
                "Cast the tensor, switch off the columnwise usage, or make a quantizer without RHT."
            )
        if self.row_scaled_nvfp4 and not self.rowwise_usage:
            raise ValueError(
                "Row-scaled NVFP4 needs the rowwise usage. Call set_usage(rowwise=True)."
            )

    def _given_rng(self, x: Tensor) -> Optional[Tensor]:
        return rng_state(x) if self.stochastic_rounding else None

    def _buffers_of(self, x: Tensor, quant: str, rowwise: bool, columnwise: bool) -> Quantized:
        if not (columnwise and self.with_rht and self.with_amax_reduction):
            return super()._buffers_of(x, quant, rowwise, columnwise)
        # The columnwise amax is known after the transform only, so the transform comes first; what
        # is left to do is a rowwise quantization of the transpose.
        out = super()._buffers_of(x, quant, True, False) if rowwise else NOTHING
        padded = padded_to(x, (padded_rows(x.shape[0], "nvfp4"), x.shape[1]))
        transformed = hadamard_transform_rows(padded, self.rht_matrix_random_sign_mask_t)
        transformed = transformed.t().contiguous()
        amax = self._reduced(amax_of(transformed))
        spec = replace(decode_quant(quant), rht=False, sign_mask=RHT_SIGN_MASK)
        text = spec.encode()
        run, rng = leaf("quantize", transformed, text), self._given_rng(x)
        made = Quantized(*run(transformed, text, None, 0, amax, True, False, rng))
        return out._replace(col=made.row, col_scale_inv=made.scale_inv, col_amax=made.amax)

    def _for_destination(self, dst: QuantizedTensorStorage) -> BufferQuantizer:
        """Row-scaled tensors have no amax of the whole, so none is reduced."""
        return self if self.row_scaled_nvfp4 else super()._for_destination(dst)

    def is_quantizable(self, tensor: Tensor) -> bool:
        """As for other block formats; never if row-scaled."""
        return not self.row_scaled_nvfp4 and super().is_quantizable(tensor)

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    # --- shapes ----------------------------------------------------------------------------------

    @staticmethod
    def get_columnwise_shape(shape: Iterable[int]) -> tuple[int, ...]:
        """``shape`` with the last dimension moved to the front."""
        *leading, last = shape
        return (last, *leading)

    @staticmethod
    def convert_shape_for_fp4(shape: Iterable[int]) -> tuple[int, ...]:
        """``shape`` in bytes: the last dimension halved."""
        *leading, last = shape
        return (*leading, last // 2)

    @staticmethod
    def get_scale_shape(  # pylint: disable=arguments-differ
        shape: Iterable[int], columnwise: bool
    ) -> tuple[int, ...]:
        """Shape of the block scales of a tensor of ``shape``, padding included."""
        layout = quantized_layout(QuantSpec("nvfp4", "e2m1"), *matrix_shape(shape), True, True)
        return layout.col_scale_inv if columnwise else layout.scale_inv


@makes(NVFP4Tensor)
def _make_nvfp4_tensor_in_reduce_ex(state: dict[str, Any]) -> NVFP4Tensor:
    """The tensor that was pickled as ``state``."""
    return rebuilt(NVFP4Tensor, state)


@makes(NVFP4TensorStorage)
def _make_nvfp4_storage_in_reduce_ex(state: dict[str, Any]) -> NVFP4TensorStorage:
    """The storage that was pickled as ``state``."""
    return rebuilt(NVFP4TensorStorage, state)
