# SPDX-License-Identifier: Apache-2.0
"""Tensors whose rowwise and columnwise data are in different formats."""

from __future__ import annotations

from typing import Any, Iterable, Optional

import torch
from torch import Tensor

from ._buffer_quantizer import assembled, values_of
from ._pickle import makes, rebuilt
from ._quantizer import Device, Quantizer, TensorSpec, _make_quantizer, default_device
from ._storage import QuantizedTensorStorage
from ._tensor import QuantizedTensor
from ._update import check_destination, written
from .storage.hybrid_tensor_storage import HybridQuantizedTensorStorage

_SOURCES = ("original", "rowwise_dequantized")


class HybridQuantizedTensor(QuantizedTensor, HybridQuantizedTensorStorage):
    """A tensor made of two quantized tensors; see ``QuantizedTensor`` and the storage."""

    storage_type = HybridQuantizedTensorStorage


class HybridQuantizer(Quantizer):
    """One quantizer for the rowwise data and another one for the columnwise data.

    Args:
        rowwise_quantizer, columnwise_quantizer: two different objects; their usages are set to
            rowwise only and columnwise only.
        columnwise_source: ``"original"``, or ``"rowwise_dequantized"`` to quantize the columnwise
            data from the values that the rowwise data have.

    Raises:
        ValueError: for another source, or one object given twice.
        TypeError: for something that is no quantizer.
    """

    storage_type, tensor_type = HybridQuantizedTensorStorage, HybridQuantizedTensor
    compatible_recipe = "CustomRecipe"

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None:
        for name, quantizer in (
            ("rowwise_quantizer", rowwise_quantizer),
            ("columnwise_quantizer", columnwise_quantizer),
        ):
            if not isinstance(quantizer, Quantizer):
                raise TypeError(
                    f"{name} is a {type(quantizer).__name__}. Pass a quantizer; requests for "
                    "managed state can not be part of a hybrid one."
                )
        if rowwise_quantizer is columnwise_quantizer:
            raise ValueError(
                "rowwise_quantizer and columnwise_quantizer are the same object, but each has "
                "usages of its own. Pass a copy()."
            )
        if columnwise_source not in _SOURCES:
            raise ValueError(f"columnwise_source is {columnwise_source!r}. Use one of {_SOURCES}.")
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source
        optimize = rowwise_quantizer.optimize_for_gemm or columnwise_quantizer.optimize_for_gemm
        super().__init__(rowwise=True, columnwise=True)
        self.optimize_for_gemm = optimize
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    # --- settings that belong to the parts -------------------------------------------------------

    def _parts(self) -> dict[str, Quantizer]:
        """The quantizers of the parts, by the attribute of the storage."""
        return {
            "_rowwise_storage": self.rowwise_quantizer,
            "_columnwise_storage": self.columnwise_quantizer,
        }

    def _wanted(self) -> dict[str, bool]:
        """Which parts results have."""
        return {
            "_rowwise_storage": self.rowwise_usage,
            "_columnwise_storage": self.columnwise_usage,
        }

    @property
    def dtype(self) -> Any:
        """Type of the rowwise codes."""
        return self.rowwise_quantizer.dtype

    @property
    def quant(self) -> str:
        """``"row|column"``, what the parts are quantized as; with ``"|dq"`` see the storage."""
        row, column = (getattr(part, "quant", "") for part in self._parts().values())
        return f"{row}|{column}|dq" if self._from_row and row else f"{row}|{column}"

    @property
    def _from_row(self) -> bool:
        return self.columnwise_source == "rowwise_dequantized"

    @property
    def optimize_for_gemm(self) -> bool:
        """Whether block scales come out in the order that GEMMs read, of both parts."""
        return self._optimize_for_gemm

    @optimize_for_gemm.setter
    def optimize_for_gemm(self, value: bool) -> None:
        self._optimize_for_gemm = value
        for part in self._parts().values():
            part.optimize_for_gemm = value

    @property
    def with_amax_reduction(self) -> bool:
        """Whether a part uses the largest amax in ``amax_reduction_group``."""
        return any(part.with_amax_reduction for part in self._parts().values())

    @with_amax_reduction.setter
    def with_amax_reduction(self, value: bool) -> None:
        for part in self._parts().values():
            part.with_amax_reduction = value

    @property
    def amax_reduction_group(self) -> Any:
        """The group of a part that has one."""
        groups = [part.amax_reduction_group for part in self._parts().values()]
        return groups[0] if groups[0] is not None else groups[1]

    @amax_reduction_group.setter
    def amax_reduction_group(self, value: Any) -> None:
        for part in self._parts().values():
            part.amax_reduction_group = value

    def _settings(self) -> dict[str, Any]:
        return {
            "rowwise_quantizer": self.rowwise_quantizer,
            "columnwise_quantizer": self.columnwise_quantizer,
            "columnwise_source": self.columnwise_source,
        }

    def copy(self) -> "HybridQuantizer":
        """A quantizer made of copies of the parts."""
        state = self._state()
        state["settings"]["rowwise_quantizer"] = self.rowwise_quantizer.copy()
        state["settings"]["columnwise_quantizer"] = self.columnwise_quantizer.copy()
        return _make_quantizer(type(self), state)

    def _for_result(self) -> "HybridQuantizer":
        quantizer = self.copy()
        quantizer.with_amax_reduction = False
        quantizer.amax_reduction_group = None
        return quantizer

    def _keeping_layouts_of(self, dst: QuantizedTensorStorage) -> "HybridQuantizer":
        quantizer = super()._keeping_layouts_of(dst).copy()
        row, column = dst._rowwise_storage, dst._columnwise_storage
        if row is not None:
            quantizer.rowwise_quantizer = quantizer.rowwise_quantizer._keeping_layouts_of(row)
        if column is not None:
            kept = quantizer.columnwise_quantizer._keeping_layouts_of(column)
            quantizer.columnwise_quantizer = kept
        return quantizer

    # --- quantizing ------------------------------------------------------------------------------

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        """Quantize into fresh buffers, in the layouts of ``get_usages()``."""
        tensor = values_of(tensor)
        parts = self._made(tensor.detach(), dict.fromkeys(self._parts()), None)
        state = {**parts, **self.storage_metadata(tensor.shape, dtype=tensor.dtype)}
        return assembled(self, state, tensor.device, False)

    def _made(self, x: Tensor, old: dict[str, Any], noop_flag: Optional[Tensor]) -> dict[str, Any]:
        """The parts of ``x``: new ones, or ``old`` ones written to."""
        new: dict[str, Any] = dict.fromkeys(old)
        wanted = self._wanted()
        from_row = self._from_row and self.columnwise_usage
        for name, quantizer in self._parts().items():
            quantizer.internal = self.internal
            if name == "_columnwise_storage" and from_row:
                x = new["_rowwise_storage"].dequantize(dtype=x.dtype)
            if not (wanted[name] or (from_row and name == "_rowwise_storage")):
                continue
            if old[name] is None:
                new[name] = quantizer.quantize_impl(x)
            else:
                new[name] = quantizer.update_quantized(x, old[name], noop_flag=noop_flag)
        return {name: part if wanted[name] else None for name, part in new.items()}

    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Optional[Tensor] = None,
    ) -> QuantizedTensorStorage:
        """Quantize ``src`` into the buffers of ``dst``; see ``Quantizer.update_quantized``."""
        check_destination(self, src, dst)
        with torch.no_grad():
            old = dst._buffers()
            x = values_of(src).detach()
            x = x.to(dst.device) if any(dst.get_usages().values()) else x
            missing = [n for n, wanted in self._wanted().items() if wanted and old[n] is None]
            if noop_flag is not None and missing:
                x = torch.where(noop_flag.view(1) == 1.0, dst.dequantize(dtype=x.dtype), x)
            for name, part in self._made(x, old, noop_flag).items():
                setattr(dst, name, part)
        dst._renew_quant()
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
        """A tensor of ``shape`` with buffers of undefined content (padding is zero)."""
        shape, device = tuple(shape), default_device(device)
        parts = self.alloc_tensors(shape, device=device, pin_memory=pin_memory, dtype=dtype)
        state = {**parts, **self.storage_metadata(shape, dtype=dtype)}
        return assembled(self, state, device, requires_grad)

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, TensorSpec]:
        """Shapes and dtypes of the buffers of a tensor of ``shape``, named ``part.buffer``."""
        return {
            f"{name}.{inner}": spec
            for name, part in self._parts().items()
            for inner, spec in part.inner_tensor_specs(shape).items()
            if self._wanted()[name]
        }

    def storage_metadata(
        self, shape: Iterable[int], *, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """The attributes of a tensor of ``shape`` that are no buffers, by name."""
        return {
            "_shape": tuple(shape),
            "_dtype": dtype,
            "_quantizer": self._for_result(),
            "quant": self.quant,
        }

    def alloc_tensors(
        self,
        shape: Iterable[int],
        *,
        device: Device = None,
        pin_memory: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Optional[QuantizedTensorStorage]]:
        """Fresh parts of a tensor of ``shape``, by attribute name; None for those not used."""
        made: dict[str, Optional[QuantizedTensorStorage]] = {}
        for name, part in self._parts().items():
            part.internal = self.internal
            options = {"dtype": dtype, "device": device, "pin_memory": pin_memory}
            made[name] = part.make_empty(shape, **options) if self._wanted()[name] else None
        return made

    def calibrate(self, tensor: Tensor) -> None:
        for part in self._parts().values():
            part.calibrate(tensor)

    # --- properties of the format ----------------------------------------------------------------

    def is_quantizable(self, tensor: Tensor) -> bool:
        """Whether the shape of ``tensor`` fits both parts."""
        return all(part.is_quantizable(tensor) for part in self._parts().values())

    def is_requantization_safe(self) -> bool:
        wanted = self._wanted()
        wanted["_rowwise_storage"] |= self.columnwise_usage and self._from_row
        return all(p.is_requantization_safe() for n, p in self._parts().items() if wanted[n])

    def supports_only_rowwise_all_gather(self) -> bool:
        """True if the rowwise quantizer says so, or the columnwise format is NVFP4."""
        columnwise = getattr(self.columnwise_quantizer, "quant", "")
        return self.rowwise_quantizer.supports_only_rowwise_all_gather() or columnwise.startswith(
            "nvfp4"
        )


@makes(HybridQuantizedTensor)
def _make_hybrid_quantized_tensor_in_reduce_ex(state: dict[str, Any]) -> HybridQuantizedTensor:
    """The tensor that was pickled as ``state``."""
    return rebuilt(HybridQuantizedTensor, state)


@makes(HybridQuantizedTensorStorage)
def _make_hybrid_quantized_storage_in_reduce_ex(
    state: dict[str, Any],
) -> HybridQuantizedTensorStorage:
    """The storage that was pickled as ``state``."""
    return rebuilt(HybridQuantizedTensorStorage, state)
