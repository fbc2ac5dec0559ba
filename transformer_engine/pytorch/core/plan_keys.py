# SPDX-License-Identifier: Apache-2.0
"""Which calls have the same steps, for plans (``plans.py``).

Writing a key for twenty tensors takes longer than many a kernel, so a key is remembered together
with one of the guards with which PyTorch's compiled code checks its inputs: a single call tells
whether other tensors have the same types, dtypes, devices, sizes and strides.
"""

from __future__ import annotations

from operator import itemgetter
from types import FunctionType
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch._C._dynamo.guards import TensorGuards

from ..backends.registry import forced_backends
from . import ops

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SELECT = ops.select
_LEAVES = dict(vars(ops.EAGER))
_KNOWN: dict = {}
_MOST_KNOWN = 512  # kinds of calls whose keys are remembered
_MOST_OF_A_KIND = 8


class _Known(NamedTuple):
    """A key, and what tensors must be like to have it."""

    check: Callable  # of the tensors that are there
    present: Callable  # the tensors that are there, taken from all
    absent: Callable  # the others
    nones: Any  # what ``absent`` gives if nothing is there
    aligned: list  # of the tensors that are there
    key: tuple


def plan_key(function: Callable, static: Any, tensors: tuple) -> Optional[tuple]:
    """What the steps of ``function(k, *..., *tensors)`` depend on; None where nothing may be taken
    for granted.

    The first item is the index of the device, -1 for the CPU. ``static`` is hashable.
    """
    if not (isinstance(function, FunctionType) and _undisturbed()):
        return None
    kind = (function, static, len(tensors), *forced_backends())
    known = _KNOWN.get(kind)
    key = None
    if known is not None:
        key = _remembered(known, tensors)
    if key is None:
        key = _written(kind, tensors)
        if key is None:
            return None
        _remember(kind, tensors, key)
    device = key[0]
    if device >= 0 and (device != torch._C._cuda_getDevice() or _profiled()):
        return None
    return key


def _written(kind: tuple, tensors: tuple) -> Optional[tuple]:
    """The key, written down item by item."""
    key = [*kind]
    devices = set()
    for tensor in tensors:
        if tensor is None:
            key.append(None)
        elif type(tensor) in _PLAIN and tensor.is_contiguous():
            key += (tensor.shape, tensor.dtype, tensor.data_ptr() % 16 == 0)
            devices.add(tensor.get_device())
        else:
            return None
    if len(devices) != 1:
        return None  # let the leaf ops say what is wrong
    return (devices.pop(), *key)


def _remembered(known: list, tensors: tuple) -> Optional[tuple]:
    """The key of earlier tensors that were like these, if there is one."""
    for entry in known:
        present = entry.present(tensors)
        if (
            entry.check(*present)
            and entry.absent(tensors) == entry.nones
            and [tensor.data_ptr() % 16 == 0 for tensor in present] == entry.aligned
        ):
            return entry.key
    return None


def _remember(kind: tuple, tensors: tuple, key: tuple) -> None:
    known = _KNOWN.get(kind, ())
    if len(known) == _MOST_OF_A_KIND:
        return
    there = [i for i, tensor in enumerate(tensors) if tensor is not None]
    given = [tensors[i] for i in there]
    guards = TensorGuards(
        *given,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in given],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in given],
    )
    absent = _picked([i for i, tensor in enumerate(tensors) if tensor is None])
    entry = _Known(
        guards.check,
        _picked(there),
        absent,
        absent(tensors),
        [tensor.data_ptr() % 16 == 0 for tensor in given],
        key,
    )
    if len(_KNOWN) >= _MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN[kind] = (entry, *known)


def _picked(places: list) -> Callable:
    """A function that takes the items at ``places`` out of a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple(items[i] for i in places)


def _undisturbed() -> bool:
    """Whether leaf ops and backends are the package's own, and no transform is at work."""
    return (
        ops.select is _SELECT
        and vars(ops.EAGER) == _LEAVES
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def captured(device: int) -> bool:
    """Whether a CUDA graph is being captured, which would keep forever what a recording keeps."""
    return device >= 0 and torch._C._cuda_isCurrentStreamCapturing()


def _profiled() -> bool:
    """Whether a profiler wants to be told of launches by Triton itself."""
    from ..backends.triton.launch import watched  # pylint: disable=import-outside-toplevel

    return watched()
