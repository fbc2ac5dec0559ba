# SPDX-License-Identifier: Apache-2.0
"""High-precision tensors where quantized ones are expected."""

from __future__ import annotations

from typing import Any, Iterable, Optional

import torch
from torch import Tensor

from ._buffer_quantizer import assembled, values_of
from ._pickle import makes, rebuilt
from ._quantizer import Device, Quantizer, TensorSpec, default_device
from ._storage import QuantizedTensorStorage
from ._tensor import QuantizedTensor
from ._update import check_destination, written
from .storage.identity_tensor_storage import IdentityTensorStorage


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """A high-precision tensor; see ``QuantizedTensor`` and ``IdentityTensorStorage``."""

    storage_type = IdentityTensorStorage


class IdentityQuantizer(Quantizer):
    """Leaves tensors in high precision, for parts of a ``CustomRecipe``.

    Args:
        dtype: what tensors are cast to; None leaves them as they are.
        rowwise, columnwise: remembered, without effect.

    The result shares memory with the tensor, unless that is cast.
    """

    storage_type, tensor_type = IdentityTensorStorage, IdentityTensor
    compatible_recipe = "CustomRecipe"
    quant = ""

    def __init__(
        self,
        *,
        dtype: Optional[torch.dtype] = None,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def _settings(self) -> dict[str, Any]:
        return {"dtype": self.dtype}

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        """Detach and cast."""
        values = values_of(tensor).detach()
        values = values if self.dtype is None else values.to(self.dtype)
        metadata = self.storage_metadata(values.shape, dtype=values.dtype)
        return assembled(self, {"_hp_data": values, **metadata}, values.device, False)

    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Optional[Tensor] = None,
    ) -> QuantizedTensorStorage:
        """Copy ``src`` into ``dst``; see ``Quantizer.update_quantized``."""
        check_destination(self, src, dst)
        with torch.no_grad():
            values, data = values_of(src).detach(), dst._hp_data
            if data is None:
                dst._hp_data = values.to(dst._dtype, copy=True)
            else:
                values = values.to(data.device, data.dtype)
                if noop_flag is not None:
                    values = torch.where(noop_flag.view(1) == 1.0, data, values)
                data.copy_(values)
        written(dst)
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensorStorage:
        """A tensor of ``shape`` of undefined content."""
        shape, device = tuple(shape), default_device(device)
        dtype = self.dtype or dtype
        buffers = self.alloc_tensors(shape, device=device, pin_memory=pin_memory, dtype=dtype)
        state = {**buffers, **self.storage_metadata(shape, dtype=dtype)}
        return assembled(self, state, device, requires_grad)

    def inner_tensor_specs(
        self, shape: Iterable[int], *, dtype: torch.dtype = torch.float32
    ) -> dict[str, TensorSpec]:
        """Shape and dtype of the values of a tensor of ``shape``."""
        return {"_hp_data": TensorSpec(tuple(shape), self.dtype or dtype)}

    def storage_metadata(
        self, shape: Iterable[int], *, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """The attributes of a tensor of ``shape`` that are no buffers, by name."""
        options = {"_dtype": self.dtype or dtype, "_quantizer": self.copy(), "quant": ""}
        return {"_shape": tuple(shape), **options}

    def alloc_tensors(
        self,
        shape: Iterable[int],
        *,
        device: Device = None,
        pin_memory: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Tensor]:
        """Fresh memory for the values of a tensor of ``shape``."""
        spec = self.inner_tensor_specs(shape, dtype=dtype)["_hp_data"]
        options = {"device": default_device(device), "pin_memory": pin_memory}
        return {"_hp_data": torch.empty(spec.shape, dtype=spec.dtype, **options)}

    def is_requantization_safe(self) -> bool:
        return True


@makes(IdentityTensor)
def _make_identity_tensor_in_reduce_ex(state: dict[str, Any]) -> IdentityTensor:
    """The tensor that was pickled as ``state``."""
    return rebuilt(IdentityTensor, state)


@makes(IdentityTensorStorage)
def _make_identity_storage_in_reduce_ex(state: dict[str, Any]) -> IdentityTensorStorage:
    """The storage that was pickled as ``state``."""
    return rebuilt(IdentityTensorStorage, state)
