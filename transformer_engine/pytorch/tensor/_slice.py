# SPDX-License-Identifier: Apache-2.0
"""Parts of a quantized tensor along its first dimension, as sharding takes them."""

from __future__ import annotations

import math
from typing import Any, Optional

import torch
from torch import Tensor

from ..formats.layout import (
    BLOCK,
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    Quantized,
    ceil_div,
    quantized_layout,
)
from ..formats.spec import QuantSpec, decode_quant
from ..formats.swizzle import (
    swizzle_columnwise_scales,
    swizzle_scales,
    unswizzle_columnwise_scales,
    unswizzle_scales,
)
from ._shapes import matrix_shape, pad

BLOCKS = {"delayed": 1, "current": 1, "block": BLOCK, "mxfp8": MXFP8_BLOCK, "nvfp4": NVFP4_BLOCK}


def cuts_of(spec: QuantSpec) -> dict[str, tuple[int, int]]:
    """Per buffer, the dimension that runs along the rows, and how many rows one index means."""
    if spec.per_tensor:
        return {"row": (0, 1), "col": (1, 1)}
    if spec.kind == "block" and spec.dim == 1:
        scales = {"scale_inv": (1, 1), "col_scale_inv": (0, BLOCK)}
        return {"row": (0, 1), "col": (1, 1), **scales}
    if spec.kind == "block":
        scales = {"scale_inv": (0, BLOCK), "col_scale_inv": (1, BLOCK)}
        return {"row": (0, 1), "col": (1, 1), **scales}
    if spec.kind == "mxfp8":
        scales = {"scale_inv": (0, 1), "col_scale_inv": (0, MXFP8_BLOCK)}
        return {"row": (0, 1), "col": (0, 1), **scales}
    scales = {"scale_inv": (0, 1), "col_scale_inv": (1, NVFP4_BLOCK)}
    amax = {"amax": (0, 1)} if spec.row_scaled else {}
    return {"row": (0, 1), "col": (1, 2), **scales, **amax}


def compact(buffers: Quantized, spec: QuantSpec) -> Quantized:
    """``buffers`` with block scales in the order of the blocks."""
    columnwise = unswizzle_columnwise_scales if spec.kind == "mxfp8" else unswizzle_scales
    return _reordered(buffers, spec, unswizzle_scales, columnwise)


def in_order(buffers: Quantized, spec: QuantSpec) -> Quantized:
    """The inverse of ``compact``: compact scales in the order that ``spec`` says."""
    columnwise = swizzle_columnwise_scales if spec.kind == "mxfp8" else swizzle_scales
    return _reordered(buffers, spec, swizzle_scales, columnwise)


def _reordered(buffers: Quantized, spec: QuantSpec, rowwise, columnwise) -> Quantized:
    if not spec.swizzled:
        return buffers
    row, col = buffers.scale_inv, buffers.col_scale_inv
    return buffers._replace(
        scale_inv=None if row is None else rowwise(row),
        col_scale_inv=None if col is None else columnwise(col),
    )


def part_of(tensor: Any, start: int, end: int) -> Optional[Any]:
    """A quantized copy of ``tensor[start:end]`` with the same bytes and scales.

    None if the cut goes through a block. A part never shares memory with the whole: writing into it
    would change scales that other parts use as well.
    """
    spec = decode_quant(tensor.quant)
    rows, columns = matrix_shape(tensor._shape)
    inner = math.prod(tensor._shape[1:-1])
    first, last = start * inner, end * inner
    usages = tensor.get_usages()
    block = BLOCKS[spec.kind] if usages["columnwise"] or spec.dim == 2 else 1
    if len(tensor._shape) < 2 or tensor._buffer_shape is not None:
        return None
    if first % block or (last % block and last != rows):
        return None
    layout = quantized_layout(spec, last - first, columns, usages["rowwise"], usages["columnwise"])
    cuts = cuts_of(spec)
    parts = {}
    for field, buffer in compact(tensor.operand_buffers(), spec)._asdict().items():
        if buffer is not None and field in cuts:
            dim, unit = cuts[field]
            low, high = first // unit, ceil_div(last, unit)
            buffer = padded(buffer.narrow(dim, low, high - low), getattr(layout, field))
        parts[field] = buffer
    made = in_order(Quantized(**parts), spec)
    shape = (end - start, *tensor._shape[1:])
    made = Quantized(*(None if b is None else _copied(b) for b in made))
    return tensor._replace(
        **tensor.attributes_of(made, shape),
        **tensor.default_options(made.col is not None),
        _shape=shape,
    )


def padded(part: Tensor, shape: tuple) -> Tensor:
    """``part`` with zeros up to ``shape``."""
    for dim, size in enumerate(shape):
        part = pad(part, dim, size) if part.dim() == 2 else part
    return part


def _copied(buffer: Tensor) -> Tensor:
    return buffer.clone(memory_format=torch.contiguous_format)
