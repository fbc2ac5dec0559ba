# SPDX-License-Identifier: Apache-2.0
"""Twins of a quantized tensor: shared, copied, under another shape, and without its buffers."""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ._shapes import resolve_shape
from ._slice import part_of


class Copies:
    """The part of ``QuantizedTensorStorage`` that makes other objects like it."""

    # pylint: disable=no-member  # what it is a part of has the attributes

    def _replace(self, **changes: Any) -> "Copies":
        """A twin with some attributes changed. Everything else is shared."""
        state = {**self.__dict__, **changes}
        state.pop("_is_param", None)
        return self._assemble(state, self.device)

    def _map_buffers(self, function: Callable, **changes: Any) -> "Copies":
        """A twin with ``function`` applied to every buffer."""
        buffers = {
            name: None if buffer is None else function(buffer)
            for name, buffer in self._buffers().items()
        }
        return self._replace(**buffers, **changes)

    @classmethod
    def make_like(
        cls,
        tensor: "Copies",
        *,
        shape: Optional[tuple] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> "Copies":
        """An object of this class around the buffers of ``tensor``.

        ``shape`` is legal where ``view`` to it is; ``dtype`` is the nominal one.
        """
        return cls._like(tensor, shape, dtype)

    @classmethod
    def _like(
        cls, tensor: "Copies", shape: Optional[tuple], dtype: Optional[torch.dtype]
    ) -> "Copies":
        if shape is not None and tuple(shape) != tuple(tensor._shape):
            tensor = tensor._viewed_or_raise(tuple(shape))
        state = {**tensor.__dict__, "_dtype": tensor._dtype if dtype is None else dtype}
        state.pop("_is_param", None)
        return cls._assemble(state, tensor.device)

    def detach(self) -> "Copies":
        """Another object around the same buffers."""
        return self._replace()

    def clone(self) -> "Copies":
        """A copy with buffers of its own."""
        return self._map_buffers(lambda buffer: buffer.clone())

    def view(self, *shape: int) -> "Copies":
        """The same buffers under another logical shape.

        Raises:
            RuntimeError: if the format can not express it. Formats with block scales need the last
                dimension unchanged.
        """
        return self._viewed_or_raise(resolve_shape(shape, self._shape))

    reshape = view

    def _viewed_or_raise(self, shape: tuple) -> "Copies":
        result = self._viewed(resolve_shape(shape, self._shape))
        if result is None:
            raise RuntimeError(
                f"A {type(self).__name__} of shape {tuple(self._shape)} can not be viewed as "
                f"{tuple(shape)}, because scales belong to blocks of the last dimension, which is "
                f"{self._stored_shape[-1]}. Keep that, or view the values: .dequantize().view(...)."
            )
        return result

    def _viewed(self, shape: tuple) -> Optional["Copies"]:
        """A twin of logical shape ``shape``; None if the format can not express it."""
        if not shape or shape[-1] != self._stored_shape[-1]:
            return None
        name = self.rowwise_buffers[0]
        row = getattr(self, name)
        if row is not None:
            row = row.view(*shape[:-1], shape[-1] // self.packing)
        return self._replace(**{name: row}, _shape=shape, _buffer_shape=None)

    def _viewed_by_values(self, shape: tuple) -> "Copies":
        """A twin of any logical shape, whose buffers keep theirs. Only its values can be used."""
        return self._replace(_shape=shape, _buffer_shape=self._stored_shape)

    def _part(self, start: int, end: int) -> Optional["Copies"]:
        """A quantized copy of ``self[start:end]``; None where that cuts through a block."""
        return part_of(self, start, end)

    def copy_from_storage(self, src: "Copies") -> "Copies":
        """Copy the bytes and scales of ``src`` into the existing buffers; nothing is rounded.

        Scales keep the order that they have here, because other tensors may share these buffers.

        Raises:
            RuntimeError: if ``src`` is of another format or shape, or lacks a layout.
        """
        reason = self._why_not_bytes_of(src)
        if reason:
            raise RuntimeError(
                f"Buffers can not be copied into this {type(self).__name__}: {reason}."
            )
        source = self._reordered_buffers(src)
        for name, buffer in self._buffers().items():
            theirs = source[name]
            if isinstance(buffer, Copies):
                buffer.copy_from_storage(theirs)
            elif buffer is not None and theirs is not None:
                buffer.copy_(theirs)
        self._take_options_of(src)
        return self

    def _reordered_buffers(self, src: "Copies") -> dict[str, Optional[Tensor]]:
        """The buffers of ``src``, scales in the order that they have here."""
        return src._buffers()

    def _take_options_of(self, src: "Copies") -> None:
        """What changes with the bytes when those of ``src`` were copied."""

    def _format(self) -> str:
        """What must be equal for bytes of one tensor to mean the same in another."""
        return self.quant

    def _why_not_bytes_of(self, src: Any) -> str:
        """Why the buffers of ``src`` can not be copied into this tensor; "" if they can."""
        if not isinstance(src, Copies) or type(self)._family() != src._family():
            return f"the source is a {type(src).__name__}"
        for theirs, ours in ((src._shape, self._shape), (src._stored_shape, self._stored_shape)):
            if tuple(theirs) != tuple(ours):
                return f"the source has shape {tuple(theirs)}, not {tuple(ours)}"
        if self._format() != src._format():
            return f"the source is quantized as {src._format()!r}, not {self._format()!r}"
        theirs = src.get_usages()
        for layout, present in self.get_usages().items():
            if present and not theirs[layout]:
                return f"the source has no {layout} data"
        return ""

    @classmethod
    def _family(cls) -> tuple:
        """The same for the storage and the tensor class of a format."""
        return tuple(cls.layout_fields)

    def clear(self) -> None:
        """Free the memory of the buffers, also where others refer to them."""
        for name, buffer in self._buffers().items():
            if isinstance(buffer, Copies):
                buffer.clear()
            elif buffer is not None:
                buffer.data = buffer.new_empty(0)
            setattr(self, name, None)

    # --- saving ----------------------------------------------------------------------------------

    def prepare_for_saving(self) -> tuple[list[Optional[Tensor]], "Copies"]:
        """The buffers, and a twin without buffers that ``restore_from_saved`` completes again."""
        plain: list[Optional[Tensor]] = []
        kept: dict[str, Any] = {}
        for name, buffer in self._buffers().items():
            kept[name] = None
            if isinstance(buffer, Copies):
                inner, kept[name] = buffer.prepare_for_saving()
                plain.extend(inner)
            else:
                plain.append(buffer)
        return plain, self._replace(**kept)

    def restore_from_saved(self, tensors: list[Optional[Tensor]]) -> list[Optional[Tensor]]:
        """Take the own buffers from the front of ``tensors`` and return the rest."""
        rest = list(tensors)
        for name, buffer in self._buffers().items():
            if isinstance(buffer, Copies):
                rest = buffer.restore_from_saved(rest)
            else:
                setattr(self, name, rest.pop(0))
        return rest
