# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors that are ``torch.Tensor`` subclasses: what all formats have in common."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ._dispatch import flat_buffers, run
from . import _dispatch_rules  # registers them, pylint: disable=unused-import
from ._fsdp import ShardedTensor
from ._pickle import deepcopied, reduced
from ._storage import QuantizedTensorStorage, describe


class TensorContext:
    """What ``__tensor_flatten__`` says beside the buffers; compared by value, never copied."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorContext) and self.options == other.options

    def __hash__(self) -> int:
        return hash(tuple(self.options.items()))

    def __deepcopy__(self, memo: dict) -> "TensorContext":
        return self  # compilers copy it to compare it later; quantizers may own live tensors


class QuantizedTensor(ShardedTensor, torch.Tensor):
    """A tensor whose values are quantized, reported under its logical shape and nominal dtype.

    The subclass of a format also inherits from its storage, which holds the buffers. An operation
    without a rule in ``_dispatch.py`` sees the dequantized values; one that writes into a quantized
    tensor quantizes the result again, with the quantizer of the tensor. Gradients are in high
    precision.

    The constructor takes the arguments of the storage, and:

    Args:
        shape: logical shape; may be left out where the data tell it.
        dtype: nominal dtype (of the storage: ``fake_dtype``).
        requires_grad: whether autograd records operations on it.
        device: where the buffers are; needed only if there are none.
    """

    storage_type: type = QuantizedTensorStorage

    # Results of operations are plain tensors unless a rule says otherwise.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        *args: Any,
        shape: Optional[tuple] = None,
        dtype: Optional[torch.dtype] = None,
        fake_dtype: Optional[torch.dtype] = None,
        requires_grad: bool = False,
        device: Optional[torch.device] = None,
        **kwargs: Any,
    ) -> "QuantizedTensor":
        dtype = dtype or fake_dtype
        if dtype is not None:
            kwargs["fake_dtype"] = dtype
        storage = cls.storage_type(*args, shape=shape, **kwargs)
        return cls.from_storage(storage, device=device, requires_grad=requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # all is done in __new__, as torch wants it

    @classmethod
    def from_storage(
        cls,
        storage: QuantizedTensorStorage,
        *,
        device: Optional[torch.device] = None,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        """The tensor around the buffers of ``storage``."""
        device = storage.device if device is None else device
        return cls._assemble(storage.__dict__, device, requires_grad=requires_grad)

    @classmethod
    def _assemble(
        cls, state: dict[str, Any], device: Optional[torch.device], requires_grad: bool = False
    ) -> "QuantizedTensor":
        for name in cls.layout_fields:
            if state[name] is not None:
                device = state[name].device
                break
        new = torch.Tensor._make_wrapper_subclass(
            cls,
            state["_shape"],
            dtype=state["_dtype"],
            device=device,
            requires_grad=requires_grad,
        )
        new.__dict__.update(state)
        return new

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensorStorage,
        *,
        shape: Optional[tuple] = None,
        dtype: Optional[torch.dtype] = None,
        requires_grad: bool = False,
    ) -> "QuantizedTensor":
        """A tensor around the buffers of ``tensor``; see ``QuantizedTensorStorage.make_like``."""
        return cls._like(tensor, shape, dtype).requires_grad_(requires_grad)

    # --- values ----------------------------------------------------------------------------------

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """Values computed in fp32 and rounded once to ``dtype`` (default: the nominal dtype).

        The gradient of the result is that of the tensor.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self._values(dtype)

    def _values(self, dtype: Optional[torch.dtype] = None) -> Tensor:
        """``dequantize`` without autograd."""
        return self.storage_type.dequantize(self, dtype=dtype)

    def float(self) -> Tensor:  # pylint: disable=arguments-differ
        """Values in fp32."""
        return self.dequantize(dtype=torch.float32)

    def half(self) -> Tensor:  # pylint: disable=arguments-differ
        """Values in fp16."""
        return self.dequantize(dtype=torch.float16)

    def bfloat16(self) -> Tensor:  # pylint: disable=arguments-differ
        """Values in bf16."""
        return self.dequantize(dtype=torch.bfloat16)

    def tolist(self) -> list:
        """Values as Python numbers."""
        return self.detach().dequantize().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Values as a numpy array; without ``force`` under the same conditions as in torch."""
        return self.dequantize().numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        """Values as a DLPack capsule; the tensor must not require a gradient."""
        return self.dequantize().__dlpack__(**options)

    def apply_(self, function: Callable) -> "QuantizedTensor":  # pylint: disable=arguments-differ
        """Quantize ``function(value)`` of each value as a Python number; on the CPU only."""
        return self.copy_(self.detach().dequantize().apply_(function))

    @property
    def data(self) -> Tensor:
        """The same buffers, detached. Assigning a quantized tensor takes its buffers over;
        assigning other values quantizes them, and an empty tensor frees the memory.
        """
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, self.storage_type):
            if value.numel() == 0 and self.numel() != 0:
                self.clear()
                return
            if value.dtype == self.dtype and value.device == self.device:
                self.quantize_(value.detach())
                return
            value = self._quantizer.quantize(value.detach())
        # pylint: disable-next=unnecessary-dunder-call  # a descriptor has no other setter
        torch.Tensor.data.__set__(self, value)
        self.__dict__.update(value._buffers(), **value._options(), _shape=value._shape)

    # --- torch -----------------------------------------------------------------------------------

    # The tensor itself has no memory that could be shared: torch would crash.

    def share_memory_(self) -> "QuantizedTensor":
        """Move the buffers to shared memory, where other processes change them too; on CUDA, and
        where they are shared already, nothing happens.
        """
        for buffer in flat_buffers(self):
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all buffers are in shared memory; always so on CUDA."""
        return all(buffer.is_shared() for buffer in flat_buffers(self))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        del types
        return run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], TensorContext]:
        names = [name for name, buffer in self._buffers().items() if buffer is not None]
        return names, TensorContext(self._options())

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: TensorContext, outer_size, outer_stride
    ) -> "QuantizedTensor":
        del outer_stride  # always contiguous
        state = {name: inner.get(name) for name in cls.layout_fields}
        state.update(context.options, _shape=tuple(outer_size))
        return cls._assemble(state, torch.device("cpu"))

    def __reduce_ex__(self, protocol) -> tuple:
        """Pickled by value, readable by ``torch.load(weights_only=True)``."""
        return reduced(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict) -> "QuantizedTensor":
        return deepcopied(self, memo)

    def __repr__(self, *, tensor_contents=None) -> str:  # pylint: disable=unused-argument
        # Reads no values: it may be called while a compiler traces, or on an accelerator.
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}({describe(self)}{grad})"


class _Dequantize(torch.autograd.Function):
    """Dequantization as the identity of autograd."""

    @staticmethod
    def forward(ctx, tensor, dtype):
        del ctx
        return tensor._values(dtype).detach()  # never the buffer itself

    @staticmethod
    def backward(ctx, grad):
        del ctx
        return grad, None
