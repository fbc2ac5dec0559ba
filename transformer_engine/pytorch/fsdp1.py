# SPDX-License-Identifier: Apache-2.0
"""FSDP1, ``torch.distributed.fsdp.FullyShardedDataParallel``, around our modules.

New code is better off with FSDP2 (``fully_shard``), which also shards quantized parameters.
"""

from __future__ import annotations

import torch


def prepare_te_modules_for_fsdp(fsdp_root: torch.nn.Module) -> None:
    """Tell the modules of this package inside of ``fsdp_root`` which FSDP1 unit shards them.

    Sets their ``fsdp_wrapped`` and ``fsdp_group``. Without it the quantized copy of a gathered
    weight is kept from the forward to the backward pass; with it backward quantizes the weight
    again, which FSDP gathers there anyway. Activations stay where they are: each rank has its own.

    Raises
    ------
    TypeError
        ``fsdp_root`` is not wrapped by FSDP1.
    RuntimeError
        A module inside has quantized parameters, which FSDP1 would turn into high precision.
    """
    wrapper = _wrapper()
    if not isinstance(fsdp_root, wrapper):
        raise TypeError(
            f"prepare_te_modules_for_fsdp was given a {type(fsdp_root).__name__}, but takes a"
            " model wrapped by torch.distributed.fsdp.FullyShardedDataParallel. With fully_shard"
            " nothing has to be prepared."
        )
    for unit in wrapper.fsdp_modules(fsdp_root):  # outer ones first
        for module in unit.modules():
            if "fsdp_group" in vars(module):  # FSDP's wrappers pretend to have it as well
                refuse_quantized_parameters(module)
                module.fsdp_wrapped, module.fsdp_group = True, unit.process_group


def refuse_quantized_parameters(root: torch.nn.Module) -> None:
    """Raise a RuntimeError if a module in ``root`` was made by ``quantized_model_init``."""
    for module in root.modules():
        if getattr(module, "primary_weights_in_fp8", False):
            raise RuntimeError(
                f"{type(module).__name__} '{module.name}' was made by te.quantized_model_init, but"
                " FSDP1 can not shard quantized parameters. Use torch.distributed.fsdp.fully_shard,"
                " or make the model without quantized_model_init."
            )


def _wrapper() -> type:
    """torch's class, which takes a while to import."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel


def prepared_wrapper() -> type:
    """``te.distributed.FullyShardedDataParallel``: torch's class, whose modules are prepared."""

    class FullyShardedDataParallel(_wrapper()):
        """``torch.distributed.fsdp.FullyShardedDataParallel``; then what
        ``prepare_te_modules_for_fsdp`` does is done for what is inside.
        """

        def __init__(self, module: torch.nn.Module, *args, **kwargs) -> None:
            refuse_quantized_parameters(module)
            super().__init__(module, *args, **kwargs)
            prepare_te_modules_for_fsdp(self)

    FullyShardedDataParallel.__module__ = "transformer_engine.pytorch.distributed"
    FullyShardedDataParallel.__qualname__ = "FullyShardedDataParallel"
    return FullyShardedDataParallel
