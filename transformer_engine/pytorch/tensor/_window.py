# SPDX-License-Identifier: Apache-2.0
"""``narrow`` along the first dimension: a part of a quantized tensor that can be written to.

Slices of quantized tensors are high-precision copies (``_dispatch.py``). Distributed checkpoints
read and write by ``narrow``, when a tensor is loaded that was saved with other shards, and lose
what they write to a copy. So ``narrow`` gives a quantized part, which shares no memory with the
whole; what ``copy_`` writes to it is written to the whole as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.layout import Quantized, ceil_div
from ..formats.spec import decode_quant
from ._shapes import matrix_shape
from ._slice import compact, cuts_of, in_order
from ._storage import QuantizedTensorStorage
from ._update import written

# Formats whose scales depend on all of a tensor: a part alone does not know them.
_ONE_SCALE = ("current", "nvfp4")


class Window(NamedTuple):
    """Which rows of which tensor a part stands for, and where its first buffer is.

    Copies of the part inherit its attributes, but have other buffers, and are no windows.
    """

    whole: Any
    start: int
    address: int


class Windows:
    """``narrow``, a part of ``QuantizedTensor``."""

    # pylint: disable=no-member  # what it is a part of has the attributes

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """``length`` rows from ``start``, quantized, where ``dim`` is 0 and blocks allow it.

        ``copy_`` to the result writes to this tensor as well. Other parts are copies of values.
        """
        if dim not in (0, -self.ndim) or not 0 <= start <= start + length <= self.shape[0]:
            return super().narrow(dim, start, length)
        if length == self.shape[0]:
            return self.detach()
        part = self._part(start, start + length)
        if part is None:
            return super().narrow(dim, start, length)
        part._window = Window(self, start, _address(part))
        return part


def leaves(tensor: QuantizedTensorStorage) -> list[QuantizedTensorStorage]:
    """The tensors of which a hybrid one consists, or the tensor itself."""
    parts = [p for p in tensor._buffers().values() if isinstance(p, QuantizedTensorStorage)]
    return parts or [tensor]


def check_values(part: Any) -> None:
    """Raise a RuntimeError if ``part`` is a window into which values can not be quantized."""
    if not _is_window(part):
        return
    kinds = [decode_quant(leaf.quant).kind for leaf in leaves(part) if leaf.quant]
    if any(kind in _ONE_SCALE for kind in kinds):
        raise RuntimeError(
            f"{part.shape[0]} of {part._window.whole.shape[0]} rows of a tensor quantized as"
            f" {part.quant!r} were to be made from high-precision values, but its scale depends on"
            " all rows. Load this checkpoint with as many ranks as it was saved with, or into"
            " parameters in high precision."
        )


def write_through(part: Any) -> None:
    """After ``part`` was written to: if it is a window, write its bytes to the whole."""
    if not _is_window(part):
        return
    window = part._window
    with torch.no_grad():
        for inner, whole in zip(leaves(part), leaves(window.whole)):
            _write_rows(whole, window.start, inner)
    written(window.whole)


def _is_window(part: Any) -> bool:
    window = getattr(part, "_window", None)
    return window is not None and window.address == _address(part)


def _address(tensor: QuantizedTensorStorage) -> int:
    """Where the first buffer is."""
    return next(b.data_ptr() for b in tensor.prepare_for_saving()[0] if b is not None)


def _write_rows(whole: Any, start: int, part: Any) -> None:
    """Copy the bytes and scales of ``part`` over rows of ``whole``; blocks must not be cut."""
    if not part.quant:
        whole._hp_data.narrow(0, start, part.shape[0]).copy_(part._hp_data)
        return
    spec = decode_quant(part.quant)
    rows, _ = matrix_shape(part._shape)
    first = start * (rows // part.shape[0])
    cuts = cuts_of(spec)
    buffers = whole.operand_buffers()
    ordered = compact(buffers, spec)
    source = compact(part.operand_buffers(), spec)
    for field, target in ordered._asdict().items():
        values = getattr(source, field)
        if target is None or values is None:
            continue
        if field in cuts:
            dim, unit = cuts[field]
            low, count = first // unit, ceil_div(first + rows, unit) - first // unit
            target.narrow(dim, low, count).copy_(values.narrow(dim, 0, count))
        else:
            target.copy_(values)
    for target, values in zip(buffers, in_order(Quantized(*ordered), spec)):
        if target is not None and target is not values:
            target.copy_(values)
