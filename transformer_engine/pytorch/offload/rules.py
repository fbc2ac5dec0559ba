# SPDX-License-Identifier: Apache-2.0
"""Which saved tensors are offloaded: activations of some size, never weights."""

from __future__ import annotations

from typing import Iterable, Union

import torch
from torch import Tensor

from ..core import delayed_scaling
from ..core.ops import is_plain
from ..quantized_tensor import QuantizedTensorStorage
from .state import ACTIVE

# Smaller ones are not worth the latency of two copies.
MINIMUM_BYTES = 256 * 1024

_KEEP, _OFFLOAD = "_te_not_offloaded", "activation_offloading"

Markable = Union[None, Tensor, QuantizedTensorStorage]


def flat_tensors(tensors: Iterable[Markable]) -> list[Tensor]:
    """Tensors as autograd saves them: those that a quantized one consists of, Nones left out."""
    flat = []
    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            flat += [buffer for buffer in tensor.prepare_for_saving()[0] if buffer is not None]
        elif tensor is not None:
            flat.append(tensor)
    return flat


def mark_not_offload(*tensors: Markable) -> None:
    """Keep ``tensors`` where they are, such as weights that are alive anyway."""
    for tensor in flat_tensors(tensors):
        setattr(tensor, _KEEP, True)


def keep_weights(*tensors: Markable) -> None:
    """Keep what a module takes beside its input, if an offload context is active.

    Parameters stay in any case, and need no mark, which would be pickled with them.
    """
    if ACTIVE.context is not None and not torch.compiler.is_compiling():
        mark_not_offload(*[t for t in tensors if not isinstance(t, torch.nn.Parameter)])


def mark_activation_offload(*tensors: Markable) -> None:
    """Offload ``tensors`` when autograd saves them, however small they are."""
    for tensor in flat_tensors(tensors):
        setattr(tensor, _OFFLOAD, True)


def weight_addresses() -> set[int]:
    """Where the weights of all modules of this package are, cached quantized ones included.

    Saved tensors of a compiled function may be aliases of them, which carry no marks.
    """
    tensors: list[Markable] = []
    for module in delayed_scaling.live_modules():
        tensors.extend(module._parameters.values())
        tensors.extend(module._fp8_workspaces.values())
    addresses = {_address(tensor) for tensor in flat_tensors(tensors)}
    return addresses - {0}


def is_offloaded(tensor: Tensor, weights: set[int]) -> bool:
    """Whether a saved tensor goes to the CPU; ``weights``: what ``weight_addresses`` found."""
    if isinstance(tensor, torch.nn.Parameter) or getattr(tensor, _KEEP, False):
        return False
    # Expanded tensors are smaller than they look, and what others hold is not known.
    if not is_plain(tensor) or tensor.layout != torch.strided or 0 in tensor.stride():
        return False
    if tensor.device.type not in ("cpu", "cuda"):
        return False
    base = tensor._base
    if base is not None and (isinstance(base, torch.nn.Parameter) or getattr(base, _KEEP, False)):
        return False
    if not getattr(tensor, _OFFLOAD, False) and tensor.numel() * tensor.itemsize < MINIMUM_BYTES:
        return False
    return _address(tensor) not in weights


def _address(tensor: Tensor) -> int:
    """Where the memory starts that a tensor is a view of; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # without storage, such as DTensors
        return 0
