# SPDX-License-Identifier: Apache-2.0
"""What the quantizers with one scale per tensor share."""

from __future__ import annotations

import abc
import math
from typing import Iterable, Optional, Union

import torch
from torch import Tensor

from ..constants import DType
from ..formats.layout import padded_rows
from ..quantized_tensor import QuantizedTensorStorage, Quantizer
from .storage.float8_tensor_storage import Float8TensorStorage, storage_from_bytes

Device = Optional[Union[torch.device, str]]


class PerTensorQuantizer(Quantizer):
    """Everything but where the scale comes from."""

    dtype: DType
    quant: str  # encoded QuantSpec

    @abc.abstractmethod
    def _quantize(self, x: Tensor, rowwise: bool, columnwise: bool) -> tuple:
        """The leaf op ``quantize`` on ``x`` [M, K]: ``(row, col, scale_inv, amax)``."""

    def _record(self, amax: Tensor) -> None:
        """Take note of the amax (fp32 [1]) of a tensor that was quantized."""

    def quantize_impl(self, tensor: Tensor) -> Float8TensorStorage:
        """Quantize into fresh buffers, in the layouts of ``get_usages()``."""
        row, col, scale_inv, amax = self._quantize(
            _as_matrix(tensor), self.rowwise_usage, self.columnwise_usage
        )
        self._record(amax)
        return storage_from_bytes(
            row,
            col,
            scale_inv,
            self.quant,
            tensor.dtype,
            shape=tuple(tensor.shape),
            quantizer=self._for_result(),
        )

    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Optional[Tensor] = None,
    ) -> Float8TensorStorage:
        """Quantize ``src`` into the buffers of ``dst``, whose addresses stay the same.

        Missing buffers are allocated and those not asked for dropped. ``noop_flag`` (fp32, one
        element) is read on the device: if it is exactly 1, the values stay as they are.

        Raises:
            ValueError: if ``dst`` is of another format or shape.
        """
        if not isinstance(dst, Float8TensorStorage):
            raise ValueError(
                f"{type(self).__name__} can not write into a {type(dst).__name__}. "
                "The destination must be a Float8TensorStorage."
            )
        if tuple(src.shape) != tuple(dst.shape):
            raise ValueError(
                f"The source has shape {tuple(src.shape)} and the quantized destination "
                f"{tuple(dst.shape)}. Both must be the same; make a new destination with "
                "make_empty() for another shape."
            )
        with torch.no_grad():
            if noop_flag is not None:
                # The old bytes may be all there is in the end, so every layout starts from them.
                dst.update_usage(self.rowwise_usage, self.columnwise_usage)
            x = _as_matrix(src.to(dst.device))
            row, col, scale_inv, amax = self._for_destination(dst)._quantize(
                x, self.rowwise_usage, self.columnwise_usage
            )
            if noop_flag is not None:
                keep = noop_flag.view(1) == 1.0
                amax = torch.where(keep, 0.0, amax)
                scale_inv = torch.where(keep, dst._scale_inv, scale_inv)
                if row is not None:
                    row = torch.where(keep, dst._data.view_as(row), row)
                if col is not None:
                    col = torch.where(keep, dst._transpose_padded, col)
            self._record(amax)
            dst._data = _written(dst._data, None if row is None else row.view(src.shape))
            dst._transpose_padded = _written(dst._transpose_padded, col)
            dst._transpose_invalid = col is None
            dst._scale_inv.copy_(scale_inv)
        dst._fp8_dtype, dst.quant = self.dtype, self.quant
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Float8TensorStorage:
        """A tensor of ``shape`` with bytes and scale of undefined content.

        ``device`` is the current CUDA device by default, or the CPU where there is none.
        """
        if requires_grad:
            raise ValueError(
                "A Float8TensorStorage takes no part in autograd. Make it with requires_grad=False."
            )
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        shape = tuple(shape)
        options = {"device": device, "pin_memory": pin_memory}
        row = col = None
        if self.rowwise_usage:
            row = torch.empty(shape, dtype=torch.uint8, **options)
        if self.columnwise_usage:
            rows, columns = math.prod(shape[:-1]), shape[-1]
            col = torch.empty(columns, padded_rows(rows), dtype=torch.uint8, **options)
            col[:, rows:] = 0
        scale_inv = torch.empty(1, dtype=torch.float32, **options)
        return storage_from_bytes(
            row, col, scale_inv, self.quant, dtype, shape=shape, quantizer=self._for_result()
        )

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def _for_result(self) -> "PerTensorQuantizer":
        """The quantizer that a result keeps."""
        return self.copy()

    def _for_destination(self, dst: Float8TensorStorage) -> "PerTensorQuantizer":
        """The quantizer that writes into ``dst``."""
        del dst
        return self

    def _copy_settings_to(self, other: "PerTensorQuantizer") -> "PerTensorQuantizer":
        other.internal = self.internal
        return other


def _as_matrix(tensor: Tensor) -> Tensor:
    """``tensor`` as contiguous [M, K] without autograd, M the product of the leading dimensions."""
    if not tensor.is_floating_point() or tensor.ndim == 0:
        raise ValueError(
            f"A tensor of dtype {tensor.dtype} and {tensor.ndim} dimensions can not be quantized "
            "to FP8. Pass a floating-point tensor with at least one dimension."
        )
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    return tensor.detach().reshape(rows, columns).contiguous()


def _written(buffer: Optional[Tensor], values: Optional[Tensor]) -> Optional[Tensor]:
    """``buffer`` with ``values`` copied into it; None if there are none to hold."""
    if buffer is None or values is None:
        return values
    return buffer.copy_(values)
