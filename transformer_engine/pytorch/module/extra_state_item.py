# SPDX-License-Identifier: Apache-2.0
"""``_extra_state`` in distributed checkpoints (``torch.distributed.checkpoint``).

Those load into tensors that exist, and refuse one of another size. A fresh module has an empty
state, a used one has as many bytes as its amax history is long, so neither would load the other's.
Written as an object the state has no size; what is loaded takes the place of what was there.
"""

from __future__ import annotations

import sys

import torch


class ExtraStateItem(torch.Tensor):
    """A state, in a state dict while distributed checkpoints are in use; otherwise it is plain.

    Copies and pickles of it are ordinary tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __create_write_items__(self, fqn: str, value) -> list:
        """What DCP asks of values that say themselves how they are written."""
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        del value
        return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.as_subclass(torch.Tensor).clone()


class DistributedExtraState:
    """Puts ``ExtraStateItem`` into state dicts; a mixin of the modules that contain GEMMs."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = prefix + "_extra_state"
        if "torch.distributed.checkpoint" in sys.modules and key in destination:
            destination[key] = destination[key].as_subclass(ExtraStateItem)
