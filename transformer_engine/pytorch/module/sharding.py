# SPDX-License-Identifier: Apache-2.0
"""Parameters that FSDP2 (``torch.distributed.fsdp.fully_shard``) has sharded: DTensors.

Between passes a module holds them; during a pass FSDP2 puts gathered ones, which are ordinary
tensors, in their places.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..quantized_tensor import QuantizedTensor
from ..tensor import share_amax


class ShardedModule:
    """What modules know about FSDP around them; a mixin of the modules that contain GEMMs."""

    # pylint: disable=no-member  # what it is a part of has the attributes

    @property
    def is_fsdp2(self) -> bool:
        """Whether ``fully_shard`` (FSDP2) manages this module itself."""
        return any(cls.__name__ == "FSDPModule" for cls in type(self).__mro__)

    @property
    def weights_are_gathered(self) -> bool:
        """Whether FSDP, on this module or around it, gathers the weights for each pass."""
        return getattr(self, "_is_fsdp_managed_module", False)

    def register_load_state_dict_post_hook(self, hook):
        """As in ``torch.nn.Module``.

        FSDP2 calls it as soon as it has sharded a parameter. From then on the shards of a quantized
        parameter must agree on scales that depend on all of it, also while a checkpoint is loaded.
        """
        share_amaxes(self)
        return super().register_load_state_dict_post_hook(hook)

    def _refuse_shard(self, weight: Tensor) -> None:
        """Raise if ``weight`` is a DTensor, which no kernel reads."""
        if not hasattr(weight, "device_mesh"):
            return
        placements = ", ".join(str(placement) for placement in weight.placements)
        raise RuntimeError(
            f"A weight of {type(self).__name__} '{self.name}' is a DTensor with placements"
            f" ({placements}). Parameters that fully_shard has sharded are gathered while the"
            " module that it was called on runs: call that module, or its unshard(). Tensor"
            " parallelism is set up by tp_group and parallel_mode, not by DTensor parameters."
        )


def local_of(param: Tensor) -> Tensor:
    """The part of a DTensor that this rank holds; other tensors are their own."""
    return getattr(param, "_local_tensor", param)


def shard_group(param: Tensor) -> Optional[Any]:
    """The process group over which a DTensor is sharded; None if it is not, or over several."""
    if not hasattr(param, "device_mesh"):
        return None
    dims = [dim for dim, placement in enumerate(param.placements) if placement.is_shard()]
    return param.device_mesh.get_group(dims[0]) if len(dims) == 1 else None


def share_amaxes(module: torch.nn.Module) -> None:
    """Let the shards of each quantized parameter be quantized with the amax of the whole."""
    for param in module._parameters.values():
        local = None if param is None else local_of(param)
        if local is not param and isinstance(local, QuantizedTensor):
            group = shard_group(param)
            if group is not None:
                share_amax(local, group)


def like(param: torch.nn.Parameter, local: Tensor) -> torch.nn.Parameter:
    """A parameter with the local values ``local``: a DTensor as ``param`` is, or ``local``."""
    if hasattr(param, "device_mesh"):
        from torch.distributed.tensor import DTensor

        local = DTensor.from_local(
            local,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    return torch.nn.Parameter(local, requires_grad=param.requires_grad)
