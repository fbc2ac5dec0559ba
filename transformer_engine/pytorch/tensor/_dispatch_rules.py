# SPDX-License-Identifier: Apache-2.0
"""The operations of torch that keep tensors quantized.

``view`` shares buffers; any other operation that would return a view of the values, a transpose
for example, returns a high-precision copy of them (``_dispatch.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._dispatch import flat_buffers, is_quantized, on_values, rule
from ._shapes import resolve_shape
from ._update import written
from ._window import check_values, write_through

aten = torch.ops.aten


# --- the same values -----------------------------------------------------------------------------


@rule(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(func, tensor):
    del func
    return tensor._replace()


@rule(aten.clone.default)
def _clone(func, tensor, *, memory_format=None):
    del func, memory_format
    return tensor._map_buffers(lambda buffer: buffer.clone())


@rule(aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)
def _view(func, tensor, shape, *strides):
    """Always a view. Where scales do not fit the shape, only its values know the shape."""
    del func, strides
    shape = resolve_shape(tuple(shape), tuple(tensor.shape))
    viewed = tensor._viewed(shape)
    return tensor._viewed_by_values(shape) if viewed is None else viewed


@rule(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _view_like(func, tensor, *args):
    return _view(func, tensor, func(torch.empty(tensor.shape, device="meta"), *args).shape)


@rule(aten._to_copy.default)
def _to_copy(
    func,
    tensor,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=None,
    non_blocking=False,
    memory_format=None,
):
    """Another device keeps the tensor quantized, another dtype does not."""
    if dtype is not None and dtype != tensor.dtype:
        return func(
            tensor._values(dtype),
            layout=layout,
            device=device,
            pin_memory=pin_memory,
            non_blocking=non_blocking,
            memory_format=memory_format,
        )
    return tensor._map_buffers(
        lambda buffer: func(buffer, device=device, pin_memory=pin_memory, non_blocking=non_blocking)
    )


@rule(aten._pin_memory.default)
def _pin_memory(func, tensor, device=None):
    return tensor._map_buffers(lambda buffer: func(buffer, device))


@rule(aten.is_pinned.default)
def _is_pinned(func, tensor, device=None):
    return all(func(buffer, device) for buffer in flat_buffers(tensor))


@rule(aten.record_stream.default)
def _record_stream(func, tensor, stream):
    for buffer in flat_buffers(tensor):
        func(buffer, stream)


# --- parts ---------------------------------------------------------------------------------------


@rule(aten.slice.Tensor)
def _slice(func, tensor, dim=0, start=None, end=None, step=1):
    size = tensor.shape[dim]
    start = 0 if start is None else start
    if start in (0, -size) and step == 1 and (end is None or end >= size):
        return tensor._replace()
    return on_values(func, (tensor, dim, start, end, step), {})


@rule(aten.as_strided.default)
def _as_strided(func, tensor, size, stride, storage_offset=None):
    """As sharded training calls it, for the whole."""
    if (tuple(size), tuple(stride)) == (
        tuple(tensor.shape),
        tensor.stride(),
    ) and not storage_offset:
        return tensor._replace()
    return on_values(func, (tensor, size, stride, storage_offset), {})


@rule(aten.split.Tensor)
def _split(func, tensor, size, dim=0):
    if dim not in (0, -tensor.ndim):
        return on_values(func, (tensor, size, dim), {})
    length = tensor.shape[0]
    sizes = [min(size, length - start) for start in range(0, length, size)] if size else [0]
    return _parts(func, (tensor, size, dim), sizes or [0])


@rule(aten.split_with_sizes.default)
def _split_with_sizes(func, tensor, sizes, dim=0):
    if dim not in (0, -tensor.ndim):
        return on_values(func, (tensor, sizes, dim), {})
    return _parts(func, (tensor, sizes, dim), sizes)


def _parts(func, args: tuple, sizes) -> list:
    """Quantized copies of consecutive parts, or values if scales do not fall apart like that."""
    parts, start = [], 0
    for size in sizes:
        part = args[0]._part(start, start + size)
        if part is None:
            return on_values(func, args, {})
        parts.append(part)
        start += size
    return parts


# --- new tensors ---------------------------------------------------------------------------------


@rule(aten.empty_like.default)
def _empty_like(
    func, tensor, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None
):
    """Quantized alike, for checkpoints and for copies on another device."""
    options = {"layout": layout, "device": device, "pin_memory": pin_memory}
    if dtype not in (None, tensor.dtype):
        return func(_stand_in(tensor), dtype=dtype, memory_format=memory_format, **options)
    return tensor._map_buffers(lambda buffer: func(buffer, **options))


@rule(aten.new_zeros.default, aten.new_empty.default)
def _new(func, tensor, size, *, dtype=None, layout=None, device=None, pin_memory=None):
    """Quantized where only the first dimension changes, as sharded training does it."""
    quantizer = tensor._quantizer
    size = tuple(size)
    same = len(size) == tensor.ndim and size[1:] == tuple(tensor.shape[1:])
    if same and dtype in (None, tensor.dtype) and quantizer is not None:
        try:
            new = quantizer._keeping_layouts_of(tensor).make_empty(
                size,
                dtype=tensor.dtype,
                device=tensor.device if device is None else device,
                pin_memory=bool(pin_memory),
            )
        except ValueError:  # a first dimension that does not fit the format
            new = None
        if new is not None:
            for buffer in flat_buffers(new):
                buffer.zero_()
            return new
    options = {"dtype": dtype, "layout": layout, "device": device, "pin_memory": pin_memory}
    return func(_stand_in(tensor), size, **options)


@rule(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def _like(func, tensor, *args, **kwargs):
    """In high precision: this is how optimizers make their state."""
    return func(_stand_in(tensor), *args, **kwargs)


def _stand_in(tensor: Tensor) -> Tensor:
    """A plain tensor with the metadata of ``tensor``, whose values are not looked at."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


# --- writing -------------------------------------------------------------------------------------


@rule(aten.copy_.default)
def _copy(func, dst, src, non_blocking=False):
    """Between equally quantized tensors bytes are copied, so that nothing is rounded twice."""
    if not is_quantized(dst):
        dtype = dst.dtype if dst.is_floating_point() else None
        return func(dst, src._values(dtype), non_blocking)
    if not dst._why_not_bytes_of(src):
        dst.copy_from_storage(src)
        written(dst)
    else:
        check_values(dst)
        values = src._values() if is_quantized(src) else src
        if not values.is_floating_point():
            values = values.to(dst.dtype)
        dst.quantize_(values.expand(dst.shape))
    write_through(dst)
    return dst
