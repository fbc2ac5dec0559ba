# SPDX-License-Identifier: Apache-2.0
"""Helpers around process groups."""

from __future__ import annotations

import torch
from torch import Tensor

_TENSOR_PARALLEL_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Mark ``tensor`` as split along ``dim`` over the ranks of a tensor-parallel group.

    Raises
    ------
    RuntimeError
        The tensor already has one of the attributes.
    """
    values = (is_parallel, dim, stride)
    for attribute in _TENSOR_PARALLEL_ATTRIBUTES:
        if hasattr(tensor, attribute):
            raise RuntimeError(
                f"The tensor of shape {tuple(tensor.shape)} already has the attribute"
                f" '{attribute}'; tensor-parallel attributes are set once."
            )
    for attribute, value in zip(_TENSOR_PARALLEL_ATTRIBUTES, values):
        setattr(tensor, attribute, value)


def get_distributed_world_size(group=None) -> int:
    """Number of ranks in ``group``; 1 without torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size(group=group)


def get_distributed_rank(group=None) -> int:
    """Rank in ``group``; 0 without torch.distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    return torch.distributed.get_rank(group=group)
