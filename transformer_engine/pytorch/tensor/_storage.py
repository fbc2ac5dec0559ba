# SPDX-License-Identifier: Apache-2.0
"""What the storages of all formats have in common."""

from __future__ import annotations

import warnings
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..formats.layout import NOTHING, Quantized
from ._copies import Copies
from ._leaf import explicit_dtypes, leaf
from ._pickle import reduced
from ._shapes import matrix_shape


class QuantizedTensorStorage(Copies):
    """Buffers of one quantized tensor: a plain Python object, not a ``torch.Tensor``.

    Every buffer and every piece of metadata is a plain attribute, so that a compiler can build and
    read a storage in a traced function. A format says with three class attributes which ones:

    * ``layout_fields``: for each buffer, in the order in which autograd saves them, the attribute
      that holds it and its name in ``formats.layout.Quantized``;
    * ``rowwise_buffers``, ``columnwise_buffers``: what is dropped with a layout. The first one
      tells whether the layout is there.

    Everything else that makes up the tensor is ``quant`` (an encoded ``QuantSpec``), ``_shape``
    (logical), ``_dtype`` (nominal), ``_quantizer`` and what ``extra_options`` names.
    """

    layout_fields: dict[str, str] = {}
    rowwise_buffers: tuple[str, ...] = ()
    columnwise_buffers: tuple[str, ...] = ()
    extra_options: tuple[str, ...] = ()
    transposed = True  # whether columnwise buffers are those of the transpose
    packing = 1  # values per byte
    must_keep_a_layout = False

    without_grad = False  # a cached weight made without gradients: not for training

    _shape: tuple[int, ...]
    _buffer_shape: Optional[tuple[int, ...]] = None  # where the buffers are those of another shape
    _dtype: torch.dtype
    _quantizer: Optional[Any]
    quant: str

    # --- construction ----------------------------------------------------------------------------

    @classmethod
    def _assemble(
        cls, state: dict[str, Any], device: Optional[torch.device], requires_grad: bool = False
    ) -> "QuantizedTensorStorage":
        """The object with exactly these attributes.

        A tensor needs the device where there are no buffers, and takes part in autograd.
        """
        del device, requires_grad
        new = cls.__new__(cls)
        for name, value in state.items():
            setattr(new, name, value)
        return new

    @classmethod
    def from_quantized(
        cls,
        buffers: Quantized,
        quant: str,
        dtype: torch.dtype,
        *,
        shape: Optional[tuple] = None,
        quantizer: Any = None,
    ) -> "QuantizedTensorStorage":
        """The storage around what a leaf op returned.

        ``dtype`` is the nominal dtype. ``shape``, the logical shape, is that of the matrix by
        default; columnwise buffers alone do not tell it, because they are padded.
        """
        row = buffers.row
        if shape is None:
            if row is None:
                raise ValueError(
                    f"A {cls.__name__} without rowwise data has no known shape. Pass shape."
                )
            shape = (row.shape[0], row.shape[1] * cls.packing)
        shape = tuple(shape)
        state = cls.attributes_of(buffers, shape)
        options = cls.default_options(buffers.col is not None)
        state.update(_shape=shape, _dtype=dtype, _quantizer=quantizer, quant=quant, **options)
        return cls._assemble(state, None)

    @classmethod
    def attributes_of(cls, buffers: Quantized, shape: tuple) -> dict[str, Optional[Tensor]]:
        """The attributes that hold ``buffers`` in a tensor of logical shape ``shape``."""
        state = {name: getattr(buffers, field) for name, field in cls.layout_fields.items()}
        name = cls.rowwise_buffers[0]
        if state[name] is not None:
            state[name] = state[name].view(*shape[:-1], shape[-1] // cls.packing)
        return state

    @classmethod
    def default_options(cls, columnwise: bool) -> dict[str, Any]:
        """``extra_options`` of a tensor just quantized, with columnwise data or without."""
        del columnwise
        return {}

    # --- metadata --------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return torch.Size(self._shape)

    def size(self, dim: Optional[int] = None) -> Union[torch.Size, int]:
        """Logical shape, or one dimension of it."""
        return self.shape if dim is None else self._shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """Nominal dtype."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the buffers are; the CPU if there are none."""
        for buffer in self._buffers().values():
            if buffer is not None:
                return buffer.device
        return torch.device("cpu")

    @property
    def _stored_shape(self) -> tuple[int, ...]:
        """The logical shape of the tensor whose buffers these are."""
        return self._shape if self._buffer_shape is None else self._buffer_shape

    def _buffers(self) -> dict[str, Optional[Tensor]]:
        """All buffers by attribute name, None where absent."""
        return {name: self.__dict__[name] for name in self.layout_fields}

    def _options(self) -> dict[str, Any]:
        """What is no buffer and no shape, but part of the tensor."""
        names = ("_dtype", "_quantizer", "quant", "_buffer_shape", *self.extra_options)
        return {name: getattr(self, name) for name in names}

    def operand_buffers(self) -> Quantized:
        """The buffers as kernels read them: matrices, columnwise data padded; absent ones None."""
        fields = {}
        for name, field in self.layout_fields.items():
            buffer = getattr(self, name)
            if field == "row" and buffer is not None:
                rows, columns = matrix_shape(self._stored_shape)
                buffer = buffer.reshape(rows, columns // self.packing)
            fields[field] = buffer
        return NOTHING._replace(**fields)

    # --- layouts ---------------------------------------------------------------------------------

    def get_usages(self) -> dict[str, bool]:
        """Which of the layouts ``"rowwise"`` and ``"columnwise"`` are present."""
        return {
            "rowwise": getattr(self, self.rowwise_buffers[0]) is not None,
            "columnwise": getattr(self, self.columnwise_buffers[0]) is not None,
        }

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        """Make a layout present (True) or drop it (False); None leaves it as it is.

        Raises:
            RuntimeError: if a layout is asked for that is missing and can not be made from the
                other one, or if none would be left of a format that needs one.
        """
        usages = self.get_usages()
        rowwise = usages["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = usages["columnwise"] if columnwise_usage is None else columnwise_usage
        if self.must_keep_a_layout and any(usages.values()) and not (rowwise or columnwise):
            raise RuntimeError(
                f"Both layouts of this {type(self).__name__} were to be dropped. Keep one of "
                "rowwise_usage and columnwise_usage, or call clear() to free its memory."
            )
        if rowwise and not usages["rowwise"]:
            raise RuntimeError(
                f"Rowwise usage of this {type(self).__name__} was requested, but it holds no "
                "rowwise data. Quantize with rowwise usage, or keep it when calling "
                "update_usage()."
            )
        if columnwise and not usages["columnwise"]:
            reason = self._why_no_columnwise()
            if reason:
                raise RuntimeError(
                    f"Columnwise usage of this {type(self).__name__} was requested, but {reason}. "
                    "Quantize with the usages that are needed."
                )
            self._create_columnwise()
        if not rowwise:
            self._drop(self.rowwise_buffers)
        if not columnwise:
            self._drop(self.columnwise_buffers)

    def _drop(self, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(self, name, None)

    def _why_no_columnwise(self) -> str:
        """Why missing columnwise data can not be made; "" if they can."""
        if not self.get_usages()["rowwise"]:
            return "it holds no rowwise data to make it from"
        return "this format can not make columnwise data from rowwise data"

    def _create_columnwise(self) -> None:
        """Make the columnwise buffers from the rowwise ones."""

    # --- values ----------------------------------------------------------------------------------

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """Values computed in fp32 and rounded once to ``dtype`` (default: the nominal dtype).

        They come from the rowwise data, or from the columnwise ones where there are no others.

        Raises:
            RuntimeError: if there are none.
        """
        dtype = self._dtype if dtype is None else dtype
        usages = self.get_usages()
        if not any(usages.values()):
            raise RuntimeError(
                f"This {type(self).__name__} holds neither rowwise nor columnwise data, so it has "
                "no values."
            )
        if 0 in self._shape:
            return torch.empty(self._shape, dtype=dtype, device=self.device)
        with explicit_dtypes():
            buffers = self.operand_buffers()
            if usages["rowwise"]:
                data = buffers.row.contiguous()
                run = leaf("dequantize", data, self.quant)
                values = run(data, buffers.scale_inv, buffers.amax, self.quant, False, dtype)
            else:
                values = self._columnwise_values(buffers, dtype)
        return values.reshape(self._shape)

    def _columnwise_values(self, buffers: Quantized, dtype: torch.dtype) -> Tensor:
        """[M, K] values from the columnwise data."""
        values = self._columnwise_matrix(buffers, dtype)
        rows, _ = matrix_shape(self._stored_shape)
        return values[:, :rows].t() if self.transposed else values[:rows]

    def _columnwise_matrix(self, buffers: Quantized, dtype: torch.dtype) -> Tensor:
        """Values of the columnwise data in their orientation, padding included."""
        scale_inv = buffers.col_scale_inv
        if scale_inv is None:
            scale_inv = buffers.scale_inv
        run = leaf("dequantize", buffers.col, self.quant)
        return run(buffers.col, scale_inv, buffers.col_amax, self.quant, True, dtype)

    def quantize_(
        self, tensor: Tensor, *, noop_flag: Optional[Tensor] = None
    ) -> "QuantizedTensorStorage":
        """Quantize ``tensor`` into the existing buffers, with the tensor's own quantizer.

        Layouts that are present stay present and keep the order of their scales; the ones that the
        quantizer asks for are added. ``noop_flag``: see ``Quantizer.update_quantized``.
        """
        quantizer = self._get_quantizer()._keeping_layouts_of(self)
        quantizer.update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def _get_quantizer(self) -> Any:
        """The quantizer that this tensor is quantized with again; RuntimeError if it has none."""
        if self._quantizer is None:
            raise RuntimeError(
                f"This {type(self).__name__} has no quantizer, so it can not be quantized again. "
                "Attach one with update_quantizer(), or call quantizer.update_quantized()."
            )
        return self._quantizer

    def update_quantizer(self, quantizer: Any) -> None:
        """Quantize with ``quantizer`` from now on; warns, because scales or formats may change."""
        warnings.warn("Quantizer is being updated, this may affect model behavior")
        self._quantizer = quantizer

    def get_metadata(self) -> dict[str, Any]:
        """Keyword arguments that construct an equal object around the same buffers."""
        raise TypeError(f"{type(self).__name__} does not define get_metadata().")

    def __reduce_ex__(self, protocol) -> tuple:
        """Pickled by value, readable by ``torch.load(weights_only=True)``."""
        return reduced(self)

    def __repr__(self) -> str:
        # Reads no values: it may be called while a compiler traces, or on an accelerator.
        return f"{type(self).__name__}({describe(self)})"


def describe(tensor: QuantizedTensorStorage) -> str:
    """Shape, format, nominal dtype, layouts and device of a quantized tensor."""
    usages = [name for name, present in tensor.get_usages().items() if present]
    return (
        f"shape={tuple(tensor._shape)}, quant={tensor.quant!r}, dtype={tensor._dtype}, "
        f"usages={usages}, device={tensor.device}"
    )
