# SPDX-License-Identifier: Apache-2.0
"""What the quantizers and the quantized tensors of all formats have in common."""

from __future__ import annotations

import abc
import warnings
from typing import Any, Iterable, Optional, Union

import torch
from torch import Tensor


class QuantizedTensorStorage(abc.ABC):
    """Buffers of one quantized tensor: a plain Python object, not a ``torch.Tensor``.

    Subclasses keep every buffer and every piece of metadata in a plain attribute, so that a
    compiler can build and read one in a traced function, and so that ``pickle`` and ``deepcopy``
    need no help.
    """

    _quantizer: Optional["Quantizer"]
    _dtype: torch.dtype

    @abc.abstractmethod
    def get_usages(self) -> dict[str, bool]:
        """Which of the layouts ``"rowwise"`` and ``"columnwise"`` are present."""

    @abc.abstractmethod
    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        """Make a layout present (True) or drop it (False); None leaves it as it is."""

    @abc.abstractmethod
    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """Values computed in fp32 and rounded once to ``dtype`` (default: the nominal dtype)."""

    @abc.abstractmethod
    def prepare_for_saving(self) -> tuple[list[Optional[Tensor]], "QuantizedTensorStorage"]:
        """The buffers, and a twin without buffers that ``restore_from_saved`` completes again."""

    @abc.abstractmethod
    def restore_from_saved(self, tensors: list[Optional[Tensor]]) -> list[Optional[Tensor]]:
        """Take the own buffers from the front of ``tensors`` and return the rest."""

    @abc.abstractmethod
    def get_metadata(self) -> dict[str, Any]:
        """Keyword arguments that construct an equal object around the same buffers."""

    def quantize_(
        self, tensor: Tensor, *, noop_flag: Optional[Tensor] = None
    ) -> "QuantizedTensorStorage":
        """Quantize ``tensor`` into the existing buffers; see ``Quantizer.update_quantized``."""
        if self._quantizer is None:
            raise RuntimeError(
                f"This {type(self).__name__} has no quantizer, so it can not be quantized again. "
                "Attach one with update_quantizer(), or call quantizer.update_quantized()."
            )
        self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def update_quantizer(self, quantizer: "Quantizer") -> None:
        """Quantize with ``quantizer`` from now on; warns, because scales or formats may change."""
        warnings.warn("Quantizer is being updated, this may affect model behavior")
        self._quantizer = quantizer


class Quantizer(abc.ABC):
    """How a tensor is to be quantized, and in which layouts.

    Attributes:
        rowwise_usage, columnwise_usage: the layouts that results are made with.
        internal: whether results are bare storages, for use inside this package only.
        optimize_for_gemm: whether block scales may come out in the order that GEMMs read.
    """

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def __call__(
        self,
        tensor: Tensor,
        *,
        out: Optional[QuantizedTensorStorage] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> QuantizedTensorStorage:
        """The same as ``quantize``."""
        return self.quantize(tensor, out=out, dtype=dtype)

    def quantize(
        self,
        tensor: Tensor,
        *,
        out: Optional[QuantizedTensorStorage] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> QuantizedTensorStorage:
        """Quantize ``tensor``, into ``out`` if given.

        ``dtype`` is the nominal dtype of the result, that of ``tensor`` by default.
        """
        with torch.no_grad():
            if out is None:
                out = self.quantize_impl(tensor)
            else:
                self.update_quantized(tensor, out)
        if dtype is not None:
            out._dtype = dtype
        return out

    def multi_quantize(self, tensors: Iterable[Tensor]) -> list[QuantizedTensorStorage]:
        """``quantize`` for each of ``tensors``."""
        return [self.quantize(tensor) for tensor in tensors]

    @abc.abstractmethod
    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        """Quantize into fresh buffers."""

    @abc.abstractmethod
    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Optional[Tensor] = None,
    ) -> QuantizedTensorStorage:
        """Quantize ``src`` into the buffers of ``dst``, whose addresses stay the same.

        ``dst`` ends with the layouts that this quantizer asks for. ``noop_flag`` (fp32, one
        element) is read on the device: if it is exactly 1, the values stay as they are.
        """

    @abc.abstractmethod
    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Optional[Union[torch.device, str]] = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensorStorage:
        """A quantized tensor with buffers of undefined content, for ``update_quantized``."""

    @abc.abstractmethod
    def copy(self) -> "Quantizer":
        """An independent quantizer with the same settings."""

    def calibrate(self, tensor: Tensor) -> None:
        """Take note of the range of ``tensor`` without quantizing it; only delayed scaling does."""

    def set_usage(
        self, *, rowwise: Optional[bool] = None, columnwise: Optional[bool] = None
    ) -> None:
        """Choose the layouts of results; None leaves a choice as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """The layouts that results are made with."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def is_quantizable(self, tensor: Tensor) -> bool:
        """Whether the shape of ``tensor`` fits the format."""
        del tensor
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether a gathered tensor can rebuild its columnwise layout from the rowwise one."""
        return False

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same values again gives the same result."""
        return False

    def _get_compatible_recipe(self) -> Optional[type]:
        """The recipe class under which results can be used as parameters, if there is one."""
        return None


Saveable = Union[None, Tensor, QuantizedTensorStorage]


def prepare_for_saving(
    *tensors: Saveable,
) -> tuple[list[Optional[Tensor]], list[Optional[QuantizedTensorStorage]]]:
    """Flatten ``tensors`` for ``ctx.save_for_backward``.

    Returns:
        the plain tensors, and one object per argument that ``restore_from_saved`` needs (None for
        an argument that is a tensor or None).
    """
    plain, objects = [], []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, Tensor):
            plain.append(tensor)
            objects.append(None)
        else:
            buffers, twin = tensor.prepare_for_saving()
            plain.extend(buffers)
            objects.append(twin)
    return plain, objects


def restore_from_saved(
    objects: Iterable[Optional[QuantizedTensorStorage]],
    saved_tensors: Iterable[Optional[Tensor]],
    return_saved_tensors: bool = False,
) -> Union[list[Saveable], tuple[list[Saveable], list[Optional[Tensor]]]]:
    """The inverse of ``prepare_for_saving``; optionally also the tensors that were left over."""
    rest = list(saved_tensors)
    restored = []
    for twin in objects:
        if twin is None:
            restored.append(rest.pop(0))
        else:
            rest = twin.restore_from_saved(rest)
            restored.append(twin)
    return (restored, rest) if return_saved_tensors else restored


def restore_from_func_ctx(ctx: torch.autograd.function.FunctionCtx) -> list[Saveable]:
    """What a forward stored as ``ctx.tensor_objects`` and with ``ctx.save_for_backward``."""
    return restore_from_saved(ctx.tensor_objects, ctx.saved_tensors)
