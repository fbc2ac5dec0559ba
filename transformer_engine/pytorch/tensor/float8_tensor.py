# SPDX-License-Identifier: Apache-2.0
"""FP8 (E4M3 or E5M2) with one fp32 scale per tensor: tensors, delayed and current scaling."""

from __future__ import annotations

import warnings
from typing import Any, Optional

import torch
from torch import Tensor

from ..constants import DType
from ..formats import fp8
from ..formats.spec import QuantSpec
from ._buffer_quantizer import BufferQuantizer, ReducesAmax
from ._pickle import makes, rebuilt
from ._quant_text import fp8_format
from ._quantizer import Device
from ._storage import QuantizedTensorStorage
from ._tensor import QuantizedTensor
from .storage.float8_tensor_storage import Float8TensorStorage


class Float8Tensor(QuantizedTensor, Float8TensorStorage):
    """An FP8 tensor with one scale; see ``QuantizedTensor`` and ``Float8TensorStorage``.

    ``Float8Tensor(shape=..., dtype=..., data=..., fp8_scale_inv=..., fp8_dtype=...)``.
    """

    storage_type = Float8TensorStorage


class Float8Quantizer(BufferQuantizer):
    """Delayed scaling: the scale is given, and the amaxes seen are recorded for the next one.

    Args:
        scale: fp32, one element; read whenever a tensor is quantized.
        amax: fp32, one element; raised to the amax of every tensor that is quantized.
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        rowwise, columnwise: the layouts of results.

    Such quantizers share live state, so two of them are equal only if they are the same object.
    """

    storage_type, tensor_type = Float8TensorStorage, Float8Tensor
    compatible_recipe = "DelayedScaling"
    reduces_amax = True

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
        fp8_format(fp8_dtype)  # names a wrong type
        self.scale = scale
        self.amax = amax
        self.dtype = fp8_dtype

    @property
    def quant(self) -> str:
        return QuantSpec("delayed", fp8_format(self.dtype)).encode()

    def _settings(self) -> dict[str, Any]:
        return {"scale": self.scale, "amax": self.amax, "fp8_dtype": self.dtype}

    def _key(self) -> Optional[tuple]:
        return None

    def _given_scale(self, x: Tensor) -> Tensor:
        return self.scale.view(1).to(x.device)  # elsewhere if the tensor was moved

    def _given_amax(self, x: Tensor) -> None:
        return None

    def _for_destination(self, dst: QuantizedTensorStorage) -> BufferQuantizer:
        """For a part of a sharded tensor, one that records the amax of the whole.

        So the state is the same on all ranks at all times, and a checkpoint needs that of one.
        """
        group = getattr(dst, "amax_reduction_group", None)
        if group is None:
            return self
        quantizer = self.copy()
        quantizer.amax_reduction_group = group
        return quantizer

    def _record(self, amax: Tensor) -> None:
        with torch.no_grad():
            if self.amax_reduction_group is not None:
                amax = self._reduced(amax.clone())
            amax = amax.view(self.amax.shape).to(self.amax.device)
            self.amax.copy_(torch.fmax(self.amax, amax))

    def calibrate(self, tensor: Tensor) -> None:
        """Set the recorded amax to that of ``tensor``."""
        with torch.no_grad():
            self.amax.copy_(fp8.amax_of(tensor.detach()).view(self.amax.shape))

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: Optional[bool] = None,
    ) -> QuantizedTensorStorage:
        """The tensor whose bytes (uint8, rowwise) were made with the present scale.

        It is a bare storage if ``internal`` (by default that of the quantizer).
        """
        storage = Float8TensorStorage(
            data=data,
            fp8_scale_inv=self.scale.view(1).reciprocal(),
            fp8_dtype=self.dtype,
            fake_dtype=fake_dtype,
            quantizer=self._for_result(),
        )
        if self.internal if internal is None else internal:
            return storage
        return Float8Tensor.from_storage(storage, requires_grad=requires_grad)

    def supports_only_rowwise_all_gather(self) -> bool:
        return True


class Float8CurrentScalingQuantizer(ReducesAmax):
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

    storage_type, tensor_type = Float8TensorStorage, Float8Tensor
    compatible_recipe = "Float8CurrentScaling"

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
        super().__init__(
            rowwise=rowwise,
            columnwise=columnwise,
            with_amax_reduction=with_amax_reduction,
            amax_reduction_group=amax_reduction_group,
        )
        if use_existing_amax or scale is not None or amax is not None:
            warnings.warn(
                "use_existing_amax, scale and amax of Float8CurrentScalingQuantizer are deprecated "
                "and ignored. Leave them out.",
                DeprecationWarning,
                stacklevel=2,
            )
        self.dtype = fp8_dtype
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon

    @property
    def quant(self) -> str:
        fmt = fp8_format(self.dtype)
        return QuantSpec("current", fmt, self.force_pow_2_scales, self.amax_epsilon).encode()

    def _settings(self) -> dict[str, Any]:
        return {
            "fp8_dtype": self.dtype,
            "with_amax_reduction": self.with_amax_reduction,
            "force_pow_2_scales": self.force_pow_2_scales,
            "amax_epsilon": self.amax_epsilon,
        }

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def is_requantization_safe(self) -> bool:
        return True


@makes(Float8Tensor)
def _make_float8_tensor_in_reduce_ex(state: dict[str, Any]) -> Float8Tensor:
    """The tensor that was pickled as ``state``."""
    return rebuilt(Float8Tensor, state)


@makes(Float8TensorStorage)
def _make_float8_storage_in_reduce_ex(state: dict[str, Any]) -> Float8TensorStorage:
    """The storage that was pickled as ``state``."""
    return rebuilt(Float8TensorStorage, state)
