# SPDX-License-Identifier: Apache-2.0
"""``parameters_split``: one linear layer whose weight is several parameters."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from ..core.ops import is_plain


def split_sizes(parameters_split, out_features: int, tp_size: int) -> tuple[list, list]:
    """Names and per-rank sizes of the pieces; one unnamed piece for None.

    Raises
    ------
    TypeError
        Not a tuple, list or dict, or a name is not a string.
    ValueError
        No piece, or the sizes do not add up to ``out_features``.
    RuntimeError
        A size is not divisible by ``tp_size`` (column parallelism).
    """
    if parameters_split is None:
        names, sizes = [""], [out_features]
    elif isinstance(parameters_split, dict):
        names, sizes = list(parameters_split), list(parameters_split.values())
    elif isinstance(parameters_split, (tuple, list)):
        names = list(parameters_split)
        sizes = [out_features // len(names)] * len(names) if names else []
    else:
        raise TypeError(
            "parameters_split must be a tuple or list of names, or a dict from name to size, not"
            f" {type(parameters_split).__name__}."
        )
    if not names:
        raise ValueError("parameters_split is empty; name at least one parameter, or pass None.")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"parameters_split has the entry {name!r}, which is not a string.")
    if len({name.rstrip("_") for name in names}) != len(names):
        raise ValueError(f"parameters_split names a parameter twice: {', '.join(names)}.")
    if sum(sizes) != out_features:
        raise ValueError(
            f"parameters_split has sizes {sizes}, which add up to {sum(sizes)}, but out_features is"
            f" {out_features}."
        )
    for name, size in zip(names, sizes):
        if size % tp_size != 0:
            raise RuntimeError(
                f"The piece {name!r} of parameters_split has size {size}, which is not divisible by"
                f" tp_size={tp_size}."
            )
    return names, [size // tp_size for size in sizes]


class _View(torch.autograd.Function):
    """One tensor over pieces that lie behind each other in memory."""

    @staticmethod
    def forward(ctx, *pieces):
        ctx.sizes = [piece.shape[0] for piece in pieces]
        # The view has a version counter of its own. Saving the pieces makes autograd notice a piece
        # that is changed in place before its backward, as it does for a weight in one piece.
        ctx.save_for_backward(*pieces)
        first = pieces[0].detach()
        shape = (sum(ctx.sizes), *first.shape[1:])
        return first.new_empty(0).set_(
            first.untyped_storage(), first.storage_offset(), shape, first.stride()
        )

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors  # checks the version counters
        return grad.split(ctx.sizes)


def share_buffer(pieces: Sequence[torch.nn.Parameter]) -> None:
    """Make plain parameters views of one contiguous buffer, in order, keeping their values."""
    if any(not is_plain(piece) or piece.is_meta for piece in pieces):
        return  # sharded pieces, or none that hold values yet
    buffer = torch.cat([piece.detach() for piece in pieces])
    for piece, part in zip(pieces, buffer.split([piece.shape[0] for piece in pieces])):
        piece.data = part


def concatenated(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces as one tensor; no copy in eager where they still share one buffer."""
    if not torch.compiler.is_compiling() and _adjacent(pieces):
        return _View.apply(*pieces)
    return torch.cat(list(pieces))


def _adjacent(pieces: Sequence[Tensor]) -> bool:
    """Whether each piece starts where the one before ends, in the same storage."""
    first = pieces[0]
    end = first.storage_offset()
    if not is_plain(first):
        return False
    for piece in pieces:
        if (
            not piece.is_contiguous()
            or piece.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or piece.storage_offset() != end
            or piece.dtype != first.dtype
        ):
            return False
        end += piece.numel()
    return True
