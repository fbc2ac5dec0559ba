# SPDX-License-Identifier: Apache-2.0
"""Helpers around process groups, and what users look for beside them: recomputation and streams of
random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .activation_checkpoint import (
    activation_recompute_forward,
    checkpoint,
    get_activation_recompute_contexts,
    has_te_modules,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
    use_reentrant_activation_recompute,
)
from .fsdp1 import prepare_te_modules_for_fsdp, prepared_wrapper
from .parallel_chunks import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks
from .rng_states import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    set_all_rng_states,
)

__all__ = [
    "CudaRNGStatesTracker",
    "activation_recompute_forward",
    "checkpoint",
    "gather_split_1d_tensor",
    "get_activation_recompute_contexts",
    "get_all_rng_states",
    "get_distributed_rank",
    "get_distributed_world_size",
    "graph_safe_rng_available",
    "has_te_modules",
    "in_fp8_activation_recompute_phase",
    "is_fp8_activation_recompute_enabled",
    "is_graph_safe_rng_state",
    "prepare_te_modules_for_fsdp",
    "set_all_rng_states",
    "set_tensor_model_parallel_attributes",
    "split_tensor_into_1d_equal_chunks",
    "use_reentrant_activation_recompute",
]

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


def __getattr__(name: str):
    """FSDP1's class is made when it is asked for: importing FSDP takes a while."""
    if name != "FullyShardedDataParallel":
        raise AttributeError(f"Module {__name__!r} has no attribute {name!r}.")
    return globals().setdefault(name, prepared_wrapper())
