# SPDX-License-Identifier: Apache-2.0
"""The one place where quantizers and storages meet the kernels."""

from typing import Callable

from torch import Tensor


def leaf(name: str, tensor: Tensor, quant: str = "") -> Callable:
    """The implementation of leaf op ``name`` for ``tensor``, from the backend table."""
    # Imported here because backends may know about tensors, but not the other way round.
    from ..backends.registry import Request, select  # pylint: disable=import-outside-toplevel

    return select(Request(name, tensor.device, tensor.dtype, quant)).run
