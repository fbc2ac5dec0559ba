# SPDX-License-Identifier: Apache-2.0
"""Quantizers whose results are the buffers of one leaf op ``quantize``."""

from __future__ import annotations

from typing import Any, Iterable, Optional

import torch
from torch import Tensor

from ..constants import DType
from ..formats.fp8 import amax_of
from ..formats.layout import Quantized, padded_rows, quantized_layout
from ..formats.spec import decode_quant
from ._leaf import explicit_dtypes, leaf
from ._quant_text import has_option, kind_of, with_swizzled
from ._quantizer import Device, Quantizer, TensorSpec, default_device
from ._shapes import as_matrix, matrix_shape
from ._storage import QuantizedTensorStorage
from ._update import check_destination, write_buffers


class BufferQuantizer(Quantizer):
    """Everything but what a format is.

    A format names its classes, has the property ``quant``, and may give the leaf op a scale, an
    amax or random state.
    """

    storage_type: type
    tensor_type: type
    dtype: DType
    reduces_amax = False  # whether parts of one tensor must know its amax

    @property
    def quant(self) -> str:
        """Encoded ``QuantSpec`` of the present settings."""
        raise TypeError(f"{type(self).__name__} does not define quant.")

    # --- what formats may do differently ---------------------------------------------------------

    def _check(self, shape: tuple, dtype: Optional[torch.dtype] = None) -> None:
        """Raise a ValueError if a tensor of this shape (and dtype) can not be quantized."""

    def _given_scale(self, x: Tensor) -> Optional[Tensor]:
        """The scale (fp32 [1]) for ``x``, where it does not come from ``x``."""

    def _given_amax(self, x: Tensor) -> Optional[Tensor]:
        """The amax (fp32 [1]) to use instead of that of ``x``."""
        return self._reduced(amax_of(x)) if self.with_amax_reduction else None

    def _reduced(self, amax: Tensor) -> Tensor:
        """The largest ``amax`` in the group."""
        torch.distributed.all_reduce(
            amax, op=torch.distributed.ReduceOp.MAX, group=self.amax_reduction_group
        )
        return amax

    def _given_rng(self, x: Tensor) -> Optional[Tensor]:
        """Random state (int64 [2]) for rounding ``x``."""

    def _record(self, amax: Tensor) -> None:
        """Take note of the amax (fp32 [1]) of a tensor that was quantized."""

    def _buffers_of(self, x: Tensor, quant: str, rowwise: bool, columnwise: bool) -> Quantized:
        """The leaf op ``quantize`` on ``x`` [M, K]."""
        run = leaf("quantize", x, quant)
        scale, amax, rng = self._given_scale(x), self._given_amax(x), self._given_rng(x)
        return Quantized(*run(x, quant, scale, 0, amax, rowwise, columnwise, rng))

    # --- the protocol ----------------------------------------------------------------------------

    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        """Quantize into fresh buffers, in the layouts of ``get_usages()``."""
        tensor = values_of(tensor)
        self._check(tensor.shape, tensor.dtype)
        quant = self.quant
        with explicit_dtypes():
            buffers = self._buffers_of(
                as_matrix(tensor), quant, self.rowwise_usage, self.columnwise_usage
            )
        if buffers.amax is not None:
            self._record(buffers.amax)
        storage = self.storage_type.from_quantized(
            buffers, quant, tensor.dtype, shape=tensor.shape, quantizer=self._for_result()
        )
        return storage if self.internal else self.tensor_type.from_storage(storage)

    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Optional[Tensor] = None,
    ) -> QuantizedTensorStorage:
        """Quantize ``src`` into the buffers of ``dst``; see ``Quantizer.update_quantized``."""
        check_destination(self, src, dst)
        with torch.no_grad(), explicit_dtypes():
            src = values_of(src).reshape(dst._stored_shape)
            self._check(src.shape, src.dtype)
            x = as_matrix(src.to(dst.device) if any(dst.get_usages().values()) else src)
            quant, usages, keep = self.quant, self.get_usages().values(), None
            if noop_flag is not None:
                flag = keep = noop_flag.view(1) == 1.0
                # The old bytes may be all there is in the end, so they decide about the order.
                quant = with_swizzled(quant, has_option(dst.quant, "swizzled=1"))
                if not _can_keep(dst, quant, *usages):
                    x = torch.where(flag, as_matrix(dst.dequantize(dtype=x.dtype)), x)
                    keep = None
            quantizer = self._for_destination(dst)
            new = quantizer._buffers_of(x, quant, *usages)
            if new.amax is not None:
                quantizer._record(
                    new.amax if noop_flag is None else torch.where(flag, 0.0, new.amax)
                )
            write_buffers(dst, new, quant, keep)
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
        """A tensor of ``shape`` with buffers of undefined content (padding is zero).

        Raises:
            ValueError: if the shape does not fit the format, or ``requires_grad`` is asked of an
                ``internal`` quantizer.
        """
        device = default_device(device)
        buffers = self.alloc_tensors(shape, device=device, pin_memory=pin_memory)
        state = {**buffers, **self.storage_metadata(shape, dtype=dtype)}
        return assembled(self, state, device, requires_grad)

    def inner_tensor_specs(self, shape: Iterable[int]) -> dict[str, TensorSpec]:
        """Shapes and dtypes of the buffers of a tensor of ``shape``, by attribute name."""
        shape = tuple(shape)
        self._check(shape)
        layout = quantized_layout(
            decode_quant(self.quant),
            *matrix_shape(shape),
            self.rowwise_usage,
            self.columnwise_usage,
        )
        specs = {}
        for name, field in self.storage_type.layout_fields.items():
            size = getattr(layout, field)
            if size is None:
                continue
            if field == "row":
                size = (*shape[:-1], size[-1])
            specs[name] = TensorSpec(tuple(size), _DTYPES.get(field, layout.scale_dtype))
        return specs

    def storage_metadata(
        self, shape: Iterable[int], *, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """The attributes of a tensor of ``shape`` that are no buffers, by name."""
        return {
            "_shape": tuple(shape),
            "_dtype": dtype,
            "_quantizer": self._for_result(),
            "quant": self.quant,
            **self.storage_type.default_options(self.columnwise_usage),
        }

    def alloc_tensors(
        self, shape: Iterable[int], *, device: Device = None, pin_memory: bool = False
    ) -> dict[str, Optional[Tensor]]:
        """Fresh buffers of a tensor of ``shape``, by attribute name; None for those not used."""
        rows, _ = matrix_shape(shape)
        padding = padded_rows(rows, kind_of(self.quant)) != rows
        options = {"device": default_device(device), "pin_memory": pin_memory}
        specs = self.inner_tensor_specs(shape)
        tensors: dict[str, Optional[Tensor]] = {}
        for name, field in self.storage_type.layout_fields.items():
            spec = specs.get(name)
            allocate = torch.zeros if field == "col" and padding else torch.empty
            tensors[name] = (
                None if spec is None else allocate(spec.shape, dtype=spec.dtype, **options)
            )
        return tensors

    def _for_result(self) -> "BufferQuantizer":
        """The quantizer that a result keeps: updates of results never start collectives."""
        quantizer = self.copy()
        quantizer.with_amax_reduction = False
        quantizer.amax_reduction_group = None
        return quantizer

    def _for_destination(self, dst: QuantizedTensorStorage) -> "BufferQuantizer":
        """The quantizer that writes into ``dst``."""
        del dst
        return self


_DTYPES = {
    "row": torch.uint8,
    "col": torch.uint8,
    "amax": torch.float32,
    "col_amax": torch.float32,
}


class ReducesAmax(BufferQuantizer):
    """For formats with a scale per tensor that comes from its amax: one amax for a whole group."""

    reduces_amax = True

    def __init__(
        self,
        *,
        rowwise: bool,
        columnwise: bool,
        with_amax_reduction: bool,
        amax_reduction_group: Any,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group

    def _for_destination(self, dst: QuantizedTensorStorage) -> BufferQuantizer:
        """With an attribute ``amax_reduction_group`` the destination asks for a reduction."""
        group = getattr(dst, "amax_reduction_group", None)
        if group is None:
            return self
        quantizer = self.copy()
        quantizer.with_amax_reduction = True
        quantizer.amax_reduction_group = group
        return quantizer


def values_of(tensor: Any) -> Tensor:
    """High-precision values of a tensor that may be quantized already."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensorStorage) else tensor


def assembled(
    quantizer: Any, state: dict[str, Any], device: torch.device, requires_grad: bool
) -> QuantizedTensorStorage:
    """The storage or tensor that ``make_empty`` of ``quantizer`` returns."""
    if not quantizer.internal:
        return quantizer.tensor_type._assemble(state, device, requires_grad)
    if requires_grad:
        raise ValueError(
            f"A {quantizer.storage_type.__name__} takes no part in autograd. Make it with "
            "requires_grad=False, or set internal=False to get a tensor."
        )
    return quantizer.storage_type._assemble(state, device)


def _can_keep(dst: QuantizedTensorStorage, quant: str, rowwise: bool, columnwise: bool) -> bool:
    """Whether the present bytes of ``dst`` will do as values in the layouts asked for.

    A missing columnwise layout is made from the rowwise one where the format can do so.
    """
    if dst.quant != quant:
        return False
    usages = dst.get_usages()
    if columnwise and not usages["columnwise"] and not dst._why_no_columnwise():
        dst.update_usage(columnwise_usage=True)
        usages = dst.get_usages()
    return (usages["rowwise"] or not rowwise) and (usages["columnwise"] or not columnwise)
