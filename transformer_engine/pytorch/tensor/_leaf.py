# SPDX-License-Identifier: Apache-2.0
"""The one place where quantizers and storages meet the kernels."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Callable

import torch
from torch import Tensor


def leaf(name: str, tensor: Tensor, quant: str = "") -> Callable:
    """The implementation of leaf op ``name`` for ``tensor``.

    It comes from the backend table. While a compiler or a dispatch mode is watching, it is the
    registered op instead, which they can record.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        op = getattr(torch.ops.transformer_engine, name).default
        return _dequantize_op if name == "dequantize" else op
    # Imported here because backends may know about tensors, but not the other way round.
    from ..backends.registry import Request, select  # pylint: disable=import-outside-toplevel

    return select(Request(name, tensor.device, tensor.dtype, quant)).run


def _dequantize_op(*args) -> Tensor:
    """The registered op, whose schema holds the name of the dtype."""
    return torch.ops.transformer_engine.dequantize.default(*args[:-1], str(args[-1])[6:])


def rng_state(like: Tensor) -> Tensor:
    """Seed and offset, int64 [2], for rounding ``like`` stochastically."""
    return torch.ops.transformer_engine.rng_state.default(like)


def explicit_dtypes():
    """Context in which ``torch.autocast`` casts nothing: quantization states its dtypes.

    The registered ops that a compiler records do that themselves.
    """
    if torch.compiler.is_compiling() or not torch._C._is_any_autocast_enabled():
        return nullcontext()
    return torch._C._DisableAutocast()
