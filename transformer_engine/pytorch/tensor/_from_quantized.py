# SPDX-License-Identifier: Apache-2.0
"""Storages around what leaf ops returned; compilers trace these functions."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ..formats.layout import NOTHING, Quantized
from ._quant_text import kind_of
from ._storage import QuantizedTensorStorage
from .storage import (
    Float8BlockwiseQTensorStorage,
    Float8TensorStorage,
    HybridQuantizedTensorStorage,
    MXFP8TensorStorage,
    NVFP4TensorStorage,
)

_STORAGES = {
    "delayed": Float8TensorStorage,
    "current": Float8TensorStorage,
    "block": Float8BlockwiseQTensorStorage,
    "mxfp8": MXFP8TensorStorage,
    "nvfp4": NVFP4TensorStorage,
}


def storage_from_quantized(
    buffers: Quantized,
    quant: str,
    dtype: torch.dtype,
    *,
    shape: Optional[tuple] = None,
    quantizer: Any = None,
) -> QuantizedTensorStorage:
    """The storage around ``buffers``.

    Args:
        quant: encoded ``QuantSpec`` that they were made with.
        dtype: the nominal dtype.
        shape: the logical shape, by default that of the rowwise data. Columnwise data do not tell
            it, because they are padded.
        quantizer: what ``quantize_`` of the storage uses.
    """
    storage_type = _STORAGES[kind_of(quant)]
    return storage_type.from_quantized(buffers, quant, dtype, shape=shape, quantizer=quantizer)


def hybrid_storage(
    buffers: Quantized,
    quant: str,
    dtype: torch.dtype,
    *,
    shape: Optional[tuple] = None,
    quantizer: Any = None,
) -> HybridQuantizedTensorStorage:
    """The storage around buffers whose orientations have formats of their own.

    ``quant`` is ``"row|column"`` or ``"row|column|dq"``. Without a format, or without its buffer,
    an orientation is absent. Without rowwise data and without ``shape`` the number of rows is that
    of the columnwise data, padding included.
    """
    row_quant, col_quant = quant.split("|")[:2]
    if shape is None:
        shape = _matrix_shape(buffers, row_quant, col_quant)
    row = col = None
    if buffers.row is not None and row_quant:
        made = NOTHING._replace(row=buffers.row, scale_inv=buffers.scale_inv, amax=buffers.amax)
        row = storage_from_quantized(made, row_quant, dtype, shape=shape)
    if buffers.col is not None and col_quant:
        made = NOTHING._replace(
            col=buffers.col, col_scale_inv=buffers.col_scale_inv, col_amax=buffers.col_amax
        )
        if kind_of(col_quant) in ("delayed", "current"):
            made = NOTHING._replace(col=buffers.col, scale_inv=buffers.col_scale_inv)
        col = storage_from_quantized(made, col_quant, dtype, shape=shape)
    return HybridQuantizedTensorStorage(
        rowwise_storage=row,
        columnwise_storage=col,
        quantizer=quantizer,
        fake_dtype=dtype,
        shape=shape,
        quant=quant,
    )


def _matrix_shape(buffers: Quantized, row_quant: str, col_quant: str) -> tuple:
    if buffers.row is not None and row_quant:
        packing = 2 if kind_of(row_quant) == "nvfp4" else 1
        return (buffers.row.shape[0], buffers.row.shape[1] * packing)
    if kind_of(col_quant) == "mxfp8":
        return tuple(buffers.col.shape)
    packing = 2 if kind_of(col_quant) == "nvfp4" else 1
    return (buffers.col.shape[1] * packing, buffers.col.shape[0])
