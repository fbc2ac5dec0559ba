# SPDX-License-Identifier: Apache-2.0
"""Provides a GEMM weight as a quantized operand: fresh, newly cached, or from the cache.

The module ops only see bytes and scales; whether these were made a moment ago or an hour ago is
decided here, for all modules, in eager and in traced code.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..tensor.float8_tensor import Float8TensorStorage, storage_from_bytes
from .linear import Operand
from .ops import kernels


def weight_operand(
    cache: dict,
    key: str,
    weight: Tensor,
    quant: str,
    scale: Optional[Tensor],
    slot: int,
    is_first_microbatch: Optional[bool],
    columnwise: bool,
) -> tuple[Operand, Optional[Tensor]]:
    """The operand of ``weight [N, K]`` and, if it was quantized now, its amax.

    ``is_first_microbatch``: None quantizes and leaves the cache alone; True quantizes and replaces
    the entry ``key`` (never in place: the backward of an earlier microbatch may still read the old
    one); False takes the entry, or makes it where there is none, or where it has another format or
    lacks the columnwise bytes that a training step needs.
    """
    if is_first_microbatch is False:
        entry = cache.get(key)
        if entry is not None and usable(entry, quant, columnwise):
            return Operand(None, entry._data, entry._transpose_padded, entry._scale_inv), None
    with torch.no_grad():
        row, col, scale_inv, amax = kernels().quantize(
            weight.detach(), quant, scale, slot, None, True, columnwise
        )
    if is_first_microbatch is not None:
        entry = storage_from_bytes(row, col, scale_inv, quant, weight.dtype)
        entry.without_grad = not torch.is_grad_enabled()
        cache[key] = entry
    return Operand(None, row, col, scale_inv), amax


def usable(entry: Float8TensorStorage, quant: str, columnwise: bool) -> bool:
    """Whether a cached weight fits the format asked for and holds the layouts needed.

    One that was made without gradients is not for training: tensors of inference mode can not be
    saved for a backward.
    """
    if entry.without_grad and torch.is_grad_enabled():
        return False
    return entry.quant == quant and (entry._transpose_padded is not None or not columnwise)
