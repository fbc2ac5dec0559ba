# SPDX-License-Identifier: Apache-2.0
"""What the quantizers of all formats have in common."""

from __future__ import annotations

import abc
import copy
from importlib import import_module
from typing import Any, Iterable, NamedTuple, Optional, Union

import torch
from torch import Tensor

from ._storage import QuantizedTensorStorage

Device = Optional[Union[torch.device, str]]


class TensorSpec(NamedTuple):
    """Shape and dtype of a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Quantizer(abc.ABC):
    """How a tensor is to be quantized, and in which layouts.

    Attributes:
        rowwise_usage, columnwise_usage: the layouts that results are made with.
        internal: whether results are bare storages instead of ``torch.Tensor`` subclasses.
        optimize_for_gemm: whether block scales come out in the order that GEMMs read.

    Quantizers without state are values: two of one class are equal if their settings are.
    """

    compatible_recipe: Optional[str] = None  # the class in common.recipe
    with_amax_reduction = False
    amax_reduction_group: Any = None

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    # --- quantizing ------------------------------------------------------------------------------

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

        ``dtype`` is the nominal dtype of the result, that of ``tensor`` by default. Unless the
        quantizer is ``internal``, the result takes part in autograd: the gradient of ``tensor`` is
        that of the result.
        """
        if out is not None:
            _check_nominal_dtype(out, dtype)
            self.update_quantized(tensor, out)
            if dtype is not None:
                out._dtype = dtype
            return out
        tracked = torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad
        if tracked and not self.internal:
            return _Quantize.apply(tensor, self, dtype)
        with torch.no_grad():
            return _quantized(tensor, self, dtype)

    def multi_quantize(self, tensors: Iterable[Tensor]) -> list[QuantizedTensorStorage]:
        """``quantize`` for each of ``tensors``."""
        return [self.quantize(tensor) for tensor in tensors]

    @abc.abstractmethod
    def quantize_impl(self, tensor: Tensor) -> QuantizedTensorStorage:
        """Quantize into fresh buffers, without autograd."""

    @abc.abstractmethod
    def update_quantized(
        self,
        src: Tensor,
        dst: QuantizedTensorStorage,
        *,
        noop_flag: Optional[Tensor] = None,
    ) -> QuantizedTensorStorage:
        """Quantize ``src`` into the buffers of ``dst``, whose addresses stay the same.

        ``dst`` ends with the layouts that this quantizer asks for: missing buffers are allocated,
        others dropped. ``noop_flag`` (fp32, one element) is read on the device: if it is exactly 1,
        the values stay as they are.

        Raises:
            ValueError: if ``dst`` is of another format or shape.
        """

    @abc.abstractmethod
    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensorStorage:
        """A quantized tensor with buffers of undefined content, for ``update_quantized``.

        ``dtype`` is the nominal one; ``device`` is the current CUDA device by default, or the CPU
        where there is none.
        """

    def calibrate(self, tensor: Tensor) -> None:
        """Take note of the range of ``tensor`` without quantizing it; only delayed scaling does."""

    # --- usages ----------------------------------------------------------------------------------

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

    def _keeping_layouts_of(self, dst: QuantizedTensorStorage) -> "Quantizer":
        """This quantizer, or a copy that keeps what ``dst`` has.

        A detached tensor shares buffers with others, which must not be left with old contents.
        """
        usages = dst.get_usages()
        usages = {name: usages[name] or wanted for name, wanted in self.get_usages().items()}
        swizzled = getattr(dst, "_with_gemm_swizzled_scales", self.optimize_for_gemm)
        if usages == self.get_usages() and swizzled == self.optimize_for_gemm:
            return self
        quantizer = self.copy()
        quantizer.set_usage(**usages)
        quantizer.optimize_for_gemm = swizzled
        return quantizer

    # --- properties of the format ----------------------------------------------------------------

    def is_quantizable(self, tensor: Tensor) -> bool:
        """Whether the shape of ``tensor`` fits the format, also as a shard of a larger tensor."""
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
        if self.compatible_recipe is None:
            return None
        return getattr(import_module("transformer_engine.common.recipe"), self.compatible_recipe)

    # --- as a value ------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """The constructor's arguments, usages and process group left out.

        What it holds must be picklable; a ``DType`` crosses as such.
        """
        raise TypeError(f"{type(self).__name__} must define _settings() or copy().")

    def copy(self) -> "Quantizer":
        """A quantizer with the same settings, which can be changed independently."""
        return _make_quantizer(type(self), self._state(), self.amax_reduction_group)

    def _state(self) -> dict[str, Any]:
        """What ``_make_quantizer`` builds an equal quantizer from; see there."""
        return {
            "settings": self._settings(),
            "usages": self.get_usages(),
            "internal": self.internal,
            "optimize_for_gemm": self.optimize_for_gemm,
        }

    def _key(self) -> Optional[tuple]:
        """Compared and hashed in place of the quantizer; None if it is no value."""
        settings = tuple(self._settings().items())
        usages = (self.rowwise_usage, self.columnwise_usage)
        return (*settings, usages, self.internal, self.optimize_for_gemm)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return False
        key = self._key()
        return key is not None and key == other._key()

    def __hash__(self) -> int:
        key = self._key()
        return object.__hash__(self) if key is None else hash(key)

    def __reduce_ex__(self, protocol) -> tuple:
        """Pickled by value. Process groups can not be, so the group is left out."""
        return _make_quantizer, (type(self), self._state())

    def __deepcopy__(self, memo: dict) -> "Quantizer":
        return _make_quantizer(
            type(self), copy.deepcopy(self._state(), memo), self.amax_reduction_group
        )

    def __repr__(self) -> str:
        settings = [f"{name}={_brief(value)}" for name, value in self._settings().items()]
        usages = [name for name, wanted in self.get_usages().items() if wanted]
        return f"{type(self).__name__}({', '.join([*settings, f'usages={usages}'])})"


def _brief(value: Any) -> str:
    """A setting as text, without looking at values of tensors."""
    return "<tensor>" if isinstance(value, Tensor) else repr(value)


def _make_quantizer(kind: type, state: dict[str, Any], group: Any = None) -> Quantizer:
    """The inverse of ``Quantizer._state``; also what pickles of quantizers call.

    Pickles of older versions must stay readable: entries may be added to ``state``, with defaults
    here, and never change their meaning.
    """
    quantizer = kind(**state["settings"])
    quantizer.set_usage(**state["usages"])
    quantizer.internal = state["internal"]
    quantizer.optimize_for_gemm = state["optimize_for_gemm"]
    if group is not None:
        quantizer.amax_reduction_group = group
    return quantizer


def _check_nominal_dtype(out: QuantizedTensorStorage, dtype: Optional[torch.dtype]) -> None:
    """A torch.Tensor has one dtype for life."""
    if dtype is not None and isinstance(out, Tensor) and out.dtype != dtype:
        raise ValueError(
            f"out has the nominal dtype {out.dtype} and dtype={dtype} was asked for, but the dtype "
            "of a tensor can not change. Leave dtype out, or quantize into a new tensor."
        )


def _quantized(
    tensor: Tensor, quantizer: Quantizer, dtype: Optional[torch.dtype]
) -> QuantizedTensorStorage:
    """A fresh quantized tensor of nominal dtype ``dtype``."""
    result = quantizer.quantize_impl(tensor)
    if dtype is not None and dtype != result._dtype:
        result = result.make_like(result, dtype=dtype)
    return result


class _Quantize(torch.autograd.Function):
    """Quantization as the identity of autograd."""

    @staticmethod
    def forward(ctx, tensor, quantizer, dtype):
        del ctx
        return _quantized(tensor, quantizer, dtype)

    @staticmethod
    def backward(ctx, grad):
        del ctx
        return grad, None, None


def default_device(device: Device) -> torch.device:
    """``device``, or the current CUDA device, or the CPU where there is none."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
