# SPDX-License-Identifier: Apache-2.0
"""Quantizers to E4M3 or E5M2 with one fp32 scale per tensor: delayed and current scaling."""

from __future__ import annotations

import warnings
from typing import Any, Optional

import torch
from torch import Tensor

from ..constants import DType
from ..formats import fp8
from ..formats.spec import QuantSpec
from ._leaf import leaf
from ._per_tensor import Device, PerTensorQuantizer
from .storage.float8_tensor_storage import Float8TensorStorage, fp8_format


class Float8Quantizer(PerTensorQuantizer):
    """Delayed scaling: the scale is given, and the amaxes seen are recorded for the next one.

    Args:
        scale: fp32, one element; read whenever a tensor is quantized.
        amax: fp32, one element; raised to the amax of every tensor that is quantized.
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        rowwise, columnwise: the layouts of results.
    """

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.scale = scale
        self.amax = amax
        self.dtype = fp8_dtype
        self.quant = QuantSpec("delayed", fp8_format(fp8_dtype)).encode()

    def _quantize(self, x: Tensor, rowwise: bool, columnwise: bool) -> tuple:
        run = leaf("quantize", x, self.quant)
        return run(x, self.quant, self.scale.view(1), 0, None, rowwise, columnwise)

    def _record(self, amax: Tensor) -> None:
        self.amax.copy_(torch.fmax(self.amax, amax.view(self.amax.shape)))

    def calibrate(self, tensor: Tensor) -> None:
        """Set the recorded amax to that of ``tensor``."""
        with torch.no_grad():
            self.amax.copy_(fp8.amax_of(tensor.detach()).view(self.amax.shape))

    def create_tensor_from_data(
        self, data: Tensor, fake_dtype: torch.dtype = torch.float32
    ) -> Float8TensorStorage:
        """The tensor whose bytes (uint8) were made with the present scale."""
        return Float8TensorStorage(
            data=data,
            fp8_scale_inv=self.scale.view(1).reciprocal(),
            fp8_dtype=self.dtype,
            fake_dtype=fake_dtype,
            quantizer=self._for_result(),
        )

    def copy(self) -> "Float8Quantizer":
        """A quantizer that shares scale and amax with this one."""
        return self._copy_settings_to(
            Float8Quantizer(
                self.scale,
                self.amax,
                self.dtype,
                rowwise=self.rowwise_usage,
                columnwise=self.columnwise_usage,
            )
        )

    def _get_compatible_recipe(self) -> Optional[type]:
        from ...common.recipe import DelayedScaling  # pylint: disable=import-outside-toplevel

        return DelayedScaling


class Float8CurrentScalingQuantizer(PerTensorQuantizer):
    """Current scaling: the scale maps the amax of the tensor itself to the largest FP8 value.

    Args:
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        device: ignored; tensors are quantized where they are.
        rowwise, columnwise: the layouts of results.
        with_amax_reduction: use the largest amax in ``amax_reduction_group``.
        force_pow_2_scales: round scales towards zero to a power of two.
        amax_epsilon: lower bound of the amax.
        use_existing_amax, scale, amax: deprecated and ignored.

    Two such quantizers are equal if their settings are.
    """

    def __init__(
        self,
        fp8_dtype: DType,
        device: Device = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: Optional[Tensor] = None,
        amax: Optional[Tensor] = None,
    ) -> None:
        del device
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            warnings.warn(
                "use_existing_amax, scale and amax of Float8CurrentScalingQuantizer are deprecated "
                "and ignored. Leave them out.",
                DeprecationWarning,
                stacklevel=2,
            )
        self.dtype = fp8_dtype
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    @property
    def quant(self) -> str:
        """Encoded ``QuantSpec`` of the present settings."""
        return QuantSpec(
            "current", fp8_format(self.dtype), self.force_pow_2_scales, self.amax_epsilon
        ).encode()

    def _quantize(self, x: Tensor, rowwise: bool, columnwise: bool) -> tuple:
        quant = self.quant
        run = leaf("quantize", x, quant)
        amax = None
        if self.with_amax_reduction:
            *_, amax = run(x, quant, None, 0, None, False, False)
            torch.distributed.all_reduce(
                amax, op=torch.distributed.ReduceOp.MAX, group=self.amax_reduction_group
            )
        return run(x, quant, None, 0, amax, rowwise, columnwise)

    def copy(self) -> "Float8CurrentScalingQuantizer":
        """An independent quantizer with the same settings."""
        return self._copy_settings_to(
            Float8CurrentScalingQuantizer(
                self.dtype,
                rowwise=self.rowwise_usage,
                columnwise=self.columnwise_usage,
                with_amax_reduction=self.with_amax_reduction,
                amax_reduction_group=self.amax_reduction_group,
                force_pow_2_scales=self.force_pow_2_scales,
                amax_epsilon=self.amax_epsilon,
            )
        )

    def _for_result(self) -> "Float8CurrentScalingQuantizer":
        """A copy that never communicates: updates of a result must not start collectives."""
        quantizer = self.copy()
        quantizer.with_amax_reduction = False
        quantizer.amax_reduction_group = None
        return quantizer

    def _for_destination(self, dst: Float8TensorStorage) -> "Float8CurrentScalingQuantizer":
        """With an attribute ``amax_reduction_group`` the destination asks for a reduction."""
        group = getattr(dst, "amax_reduction_group", None)
        if group is None:
            return self
        quantizer = self.copy()
        quantizer.with_amax_reduction = True
        quantizer.amax_reduction_group = group
        return quantizer

    def is_requantization_safe(self) -> bool:
        return True

    def _get_compatible_recipe(self) -> Optional[type]:
        from ...common.recipe import Float8CurrentScaling  # pylint: disable=import-outside-toplevel

        return Float8CurrentScaling

    def _key(self) -> tuple:
        return (
            self.quant,
            self.rowwise_usage,
            self.columnwise_usage,
            self.internal,
            self.with_amax_reduction,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Float8CurrentScalingQuantizer) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())
