# SPDX-License-Identifier: Apache-2.0
"""A tensor of which each rank of a process group keeps one part."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, tp_group: Any, new_buffer: bool = False
) -> Tensor:
    """This rank's part of the flattened ``tensor``, a view unless ``new_buffer``.

    The number of values must be a multiple of the number of ranks.
    """
    ranks = torch.distributed.get_world_size(tp_group)
    size = tensor.numel() // ranks
    if size * ranks != tensor.numel():
        raise ValueError(
            f"A tensor of shape {tuple(tensor.shape)} has {tensor.numel()} values, which do not"
            f" divide into equal parts for {ranks} ranks. Pad it, or keep it whole."
        )
    start = torch.distributed.get_rank(tp_group) * size
    chunk = tensor.detach().reshape(-1)[start : start + size]
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor: Tensor, tp_group: Any) -> Tensor:
    """The flat tensor whose parts the ranks hold, by rank."""
    ranks = torch.distributed.get_world_size(tp_group)
    whole = tensor.new_empty(ranks * tensor.numel())
    torch.distributed.all_gather_into_tensor(whole, tensor.contiguous(), group=tp_group)
    return whole


class _Chunk:
    """What autograd keeps in the place of a tensor."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        self.shape, self.group = tensor.shape, group
        self.part = split_tensor_into_1d_equal_chunks(tensor, group, new_buffer=True)

    def whole(self) -> Tensor:
        """The tensor."""
        return gather_split_1d_tensor(self.part, self.group).view(self.shape)


@contextmanager
def chunked_argument(args: Sequence, tp_group: Any) -> Iterator[None]:
    """Let autograd keep only this rank's part of the first tensor among ``args``."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            "distribute_saved_activations needs torch.distributed, which is not initialized. Call"
            " torch.distributed.init_process_group first, or leave the option off."
        )
    first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)

    def pack(tensor: Tensor):
        same = first is not None and tensor.data_ptr() == first.data_ptr()
        return _Chunk(tensor, tp_group) if same and tensor.shape == first.shape else tensor

    def unpack(kept):
        return kept.whole() if isinstance(kept, _Chunk) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
