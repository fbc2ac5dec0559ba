# SPDX-License-Identifier: Apache-2.0
"""Bytes and scale of a tensor in E4M3 or E5M2 with one fp32 scale for all of it."""

from __future__ import annotations

import copy
import math
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ...constants import DType, TE_DType
from ...formats.fp8 import transpose_bytes
from ...formats.layout import padded_rows
from ...formats.spec import QuantSpec
from ...quantized_tensor import QuantizedTensorStorage, Quantizer
from .._leaf import leaf

_DTYPE_OF_FORMAT = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}
_FORMAT_OF_DTYPE = {dtype: fmt for fmt, dtype in _DTYPE_OF_FORMAT.items()}


def fp8_format(fp8_dtype: Union[DType, torch.dtype, int]) -> str:
    """``"e4m3"`` or ``"e5m2"`` for a ``DType`` (or a torch float8 dtype)."""
    fmt = _FORMAT_OF_DTYPE.get(TE_DType.get(fp8_dtype, fp8_dtype))
    if fmt is None:
        raise ValueError(
            f"fp8_dtype is {fp8_dtype!r}, which is no 8-bit floating-point type. "
            "Use DType.kFloat8E4M3 or DType.kFloat8E5M2."
        )
    return fmt


class Float8TensorStorage(QuantizedTensorStorage):
    """An FP8 tensor of logical shape ``(*leading, K)``; its values are ``codes * scale_inv``.

    Args:
        data: uint8 bytes of the logical shape, or None.
        fp8_scale_inv: fp32 [1].
        fp8_dtype: ``DType.kFloat8E4M3`` or ``DType.kFloat8E5M2``.
        fake_dtype: the nominal dtype, which ``dequantize`` returns by default.
        data_transpose: uint8 bytes of shape ``(K, *leading)``, or None.
        quantizer: what ``quantize_`` uses.
        transpose_padded: instead of ``data_transpose`` the byte transpose as kernels make it, uint8
            ``[K, Mp]`` with M the product of the leading dimensions, Mp = M rounded up to 16 and
            zero bytes beyond M.
        shape: the logical shape; needed only where neither ``data`` nor ``data_transpose`` tells.
        quant: encoded ``QuantSpec`` that the bytes were made with.

    ``_transpose`` is the byte transpose as users know it, ``_transpose_padded`` the same memory as
    FP8 GEMMs read it.
    """

    def __init__(
        self,
        *,
        data: Optional[Tensor],
        fp8_scale_inv: Tensor,
        fp8_dtype: DType,
        fake_dtype: torch.dtype = torch.float32,
        data_transpose: Optional[Tensor] = None,
        quantizer: Optional[Quantizer] = None,
        transpose_padded: Optional[Tensor] = None,
        shape: Optional[tuple[int, ...]] = None,
        quant: Optional[str] = None,
    ) -> None:
        if shape is None:
            if data is not None:
                shape = tuple(data.shape)
            elif data_transpose is not None:
                shape = (*data_transpose.shape[1:], data_transpose.shape[0])
            else:
                raise ValueError(
                    "A Float8TensorStorage without data and data_transpose has no shape. "
                    "Pass one of these two, or shape."
                )
        self._shape = tuple(shape)
        self._data = data
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = fp8_dtype
        self._dtype = fake_dtype
        self._quantizer = quantizer
        self._transpose_padded = transpose_padded
        self._transpose_invalid = transpose_padded is None
        if data_transpose is not None:
            self._transpose = data_transpose
        if quant is None:
            quant = quantizer.quant if quantizer is not None else ""
        self.without_grad = False  # a cached weight made without gradients: not for training
        self.quant = quant or QuantSpec("current", fp8_format(fp8_dtype)).encode()

    @property
    def _transpose(self) -> Optional[Tensor]:
        """Byte transpose of shape ``(K, *leading)``, a view of ``_transpose_padded``."""
        padded = self._transpose_padded
        if padded is None:
            return None
        leading = self._shape[:-1]
        if not leading:
            return padded[:, 0]
        rows = math.prod(leading)
        transpose = padded if padded.shape[1] == rows else padded[:, :rows]
        return transpose if len(leading) == 1 else transpose.unflatten(1, leading)

    @_transpose.setter
    def _transpose(self, transpose: Optional[Tensor]) -> None:
        self._transpose_invalid = transpose is None
        self._transpose_padded = None
        if transpose is None:
            return
        columns, rows = transpose.shape[0], math.prod(self._shape[:-1])
        length = padded_rows(rows)
        padded = transpose.reshape(columns, rows)
        if rows != length:
            padded = torch.nn.functional.pad(padded, (0, length - rows))
        self._transpose_padded = padded

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return torch.Size(self._shape)

    def size(self, dim: Optional[int] = None) -> Union[torch.Size, int]:
        """Logical shape, or one dimension of it."""
        return self.shape if dim is None else self._shape[dim]

    @property
    def device(self) -> torch.device:
        """Where the buffers are."""
        return self._scale_inv.device

    def get_usages(self) -> dict[str, bool]:
        return {
            "rowwise": self._data is not None,
            "columnwise": self._transpose_padded is not None and not self._transpose_invalid,
        }

    def update_usage(
        self, rowwise_usage: Optional[bool] = None, columnwise_usage: Optional[bool] = None
    ) -> None:
        """Make a layout present (True) or drop it (False); None leaves it as it is.

        The columnwise bytes are an exact transpose of the rowwise ones, made when missing.

        Raises:
            RuntimeError: if a layout is asked for and the rowwise bytes are not there.
        """
        usages = self.get_usages()
        if rowwise_usage and not usages["rowwise"]:
            raise RuntimeError(
                "Rowwise usage of this FP8 tensor was requested, but it holds no rowwise data. "
                "Quantize with rowwise usage, or keep it when calling update_usage()."
            )
        if columnwise_usage and not usages["columnwise"]:
            self._create_transpose()
        if rowwise_usage is False:
            self._data = None
        if columnwise_usage is False:
            self._transpose = None

    def _create_transpose(self) -> None:
        """Fill ``_transpose_padded``, in place where the buffer exists."""
        if self._data is None:
            raise RuntimeError(
                "Columnwise usage of this FP8 tensor was requested, but it holds no rowwise data "
                "to make it from. Quantize with the usages that are needed."
            )
        transpose = transpose_bytes(self._data.reshape(-1, self._shape[-1]))
        if self._transpose_padded is None:
            self._transpose_padded = transpose
        else:
            self._transpose_padded.copy_(transpose)
        self._transpose_invalid = False

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """``codes * scale_inv`` in fp32, rounded once to ``dtype`` (default: the nominal dtype)."""
        dtype = self._dtype if dtype is None else dtype
        usages = self.get_usages()
        if usages["rowwise"]:
            data = self._data.reshape(math.prod(self._shape[:-1]), self._shape[-1])
        elif usages["columnwise"]:
            data = self._transpose.reshape(self._shape[-1], math.prod(self._shape[:-1]))
        else:
            raise RuntimeError(
                "This FP8 tensor holds neither rowwise nor columnwise data, so it has no values."
            )
        run = leaf("dequantize", data, self.quant)
        values = run(data.contiguous(), self._scale_inv, self.quant, dtype)
        if not usages["rowwise"]:
            values = values.t().contiguous()
        return values.view(self._shape)

    def prepare_for_saving(self) -> tuple[list[Optional[Tensor]], "Float8TensorStorage"]:
        twin = copy.copy(self)
        twin._data = twin._transpose_padded = twin._scale_inv = None
        return [self._data, self._transpose_padded, self._scale_inv], twin

    def restore_from_saved(self, tensors: list[Optional[Tensor]]) -> list[Optional[Tensor]]:
        self._data, self._transpose_padded, self._scale_inv = tensors[:3]
        return tensors[3:]

    def get_metadata(self) -> dict[str, Any]:
        """Keyword arguments that construct an equal object around the same buffers."""
        return {
            "data": self._data,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "fake_dtype": self._dtype,
            "quantizer": self._quantizer,
            "transpose_padded": None if self._transpose_invalid else self._transpose_padded,
            "shape": self._shape,
            "quant": self.quant,
        }

    def __repr__(self) -> str:
        # Reads no values: it may be called while a compiler traces, or on an accelerator.
        usages = [name for name, present in self.get_usages().items() if present]
        return (
            f"Float8TensorStorage(shape={self._shape}, format={self.quant.split(',')[1]}, "
            f"dtype={self._dtype}, usages={usages})"
        )


def storage_from_bytes(
    row: Optional[Tensor],
    col: Optional[Tensor],
    scale_inv: Tensor,
    quant: str,
    dtype: torch.dtype,
    shape: Optional[tuple[int, ...]] = None,
    quantizer: Optional[Quantizer] = None,
) -> Float8TensorStorage:
    """The storage around what the leaf op ``quantize`` returned.

    ``shape`` is the logical shape if it is not that of ``row``, ``dtype`` the nominal dtype.
    """
    if shape is not None and row is not None:
        row = row.view(shape)
    return Float8TensorStorage(
        data=row,
        fp8_scale_inv=scale_inv,
        fp8_dtype=_DTYPE_OF_FORMAT[quant.split(",")[1]],
        fake_dtype=dtype,
        quantizer=quantizer,
        transpose_padded=col,
        shape=shape,
        quant=quant,
    )
