# SPDX-License-Identifier: Apache-2.0
"""The one layout predicate: which buffers a quantized ``[rows, columns]`` tensor consists of.

Fakes ask it for shapes and kernels allocate by it, so that what a compiler is told and what a
kernel writes cannot differ. Nobody else computes layouts.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from .spec import QuantSpec

# FP8 GEMMs contract over multiples of 16; rows of zero bytes fill a columnwise buffer up to one.
ROW_ALIGNMENT = 16


class Layout(NamedTuple):
    """Shapes of the buffers of a quantized tensor; None where a buffer is absent."""

    row: Optional[tuple]
    col: Optional[tuple]
    scale_inv: tuple
    amax: tuple


def padded_rows(rows):
    """``rows`` (int or SymInt) rounded up to the multiple that a columnwise buffer holds."""
    return (rows + ROW_ALIGNMENT - 1) // ROW_ALIGNMENT * ROW_ALIGNMENT


def quantized_layout(spec: QuantSpec, rows, columns, rowwise: bool, columnwise: bool) -> Layout:
    """Buffers of a quantized ``[rows, columns]`` tensor.

    Per-tensor FP8 (``delayed``, ``current``): rowwise bytes ``[rows, columns]``; columnwise bytes
    ``[columns, padded_rows(rows)]``, the byte transpose, which Hopper's FP8 GEMMs need because they
    contract over the last dimension of both operands; one scale-inverse and one amax.
    """
    if spec.kind not in ("delayed", "current"):
        raise ValueError(
            f"Quantization kind {spec.kind!r} has no layout; known are 'delayed' and 'current'."
        )
    return Layout(
        row=(rows, columns) if rowwise else None,
        col=(columns, padded_rows(rows)) if columnwise else None,
        scale_inv=(1,),
        amax=(1,),
    )
