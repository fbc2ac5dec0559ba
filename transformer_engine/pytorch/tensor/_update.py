# SPDX-License-Identifier: Apache-2.0
"""Writing newly quantized values into the buffers of an existing tensor."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..formats.layout import Quantized
from ._storage import QuantizedTensorStorage


def check_destination(quantizer: Any, src: Tensor, dst: Any) -> None:
    """Raise a ValueError unless ``quantizer`` can write ``src`` into ``dst``."""
    if not isinstance(dst, quantizer.storage_type):
        raise ValueError(
            f"{type(quantizer).__name__} can not write into a {type(dst).__name__}. "
            f"The destination must be a {quantizer.storage_type.__name__} or "
            f"{quantizer.tensor_type.__name__}."
        )
    if tuple(src.shape) != tuple(dst.shape):
        raise ValueError(
            f"The source has shape {tuple(src.shape)} and the quantized destination "
            f"{tuple(dst.shape)}. Both must be the same; make a new destination with "
            "make_empty() for another shape."
        )


def write_buffers(
    dst: QuantizedTensorStorage, new: Quantized, quant: str, keep: Optional[Tensor]
) -> None:
    """Make ``new`` the content of ``dst``: in place where there is a buffer.

    Where ``keep`` (bool [1]) is true, what is in such a buffer stays.
    """
    for name, field in dst.layout_fields.items():
        values, buffer = getattr(new, field), getattr(dst, name)
        if values is not None and field == "row":
            values = values.view(*dst._stored_shape[:-1], values.shape[-1])
        if values is not None and buffer is not None and buffer.shape == values.shape:
            if keep is not None:
                values = torch.where(keep, buffer, values)
            values = buffer.copy_(values)
        setattr(dst, name, values)
    for name, value in dst.default_options(new.col is not None).items():
        setattr(dst, name, value)
    dst.quant = quant
    written(dst)


def written(dst: QuantizedTensorStorage) -> None:
    """Tell autograd that the values of ``dst`` changed."""
    if isinstance(dst, Tensor) and not dst.is_inference():
        torch.autograd.graph.increment_version(dst)
