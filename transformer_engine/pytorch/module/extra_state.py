# SPDX-License-Identifier: Apache-2.0
"""``_extra_state``: delayed-scaling state as one flat uint8 tensor that is not a pickle.

Layout: the magic bytes, the length of a JSON header as 8 little-endian bytes, the header (names and
shapes), then the fp32 tensors one after another. An empty tensor means "no such state".
"""

from __future__ import annotations

import json
import math
import pickletools
import struct

import torch
from torch import Tensor

from ..core import delayed_scaling

MAGIC = b"TE-DELAYED-SCALING-1"
# Classes that a pickled state without scales may name.
STATELESS_CLASSES = frozenset(
    {
        "Float8BlockScaling",
        "Float8CurrentScaling",
        "Format",
        "MMParams",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "QParams",
        "_FormatHelper",
    }
)
FIELDS = ("fwd_scale", "fwd_history", "bwd_scale", "bwd_history")


class OptionalExtraState:
    """Lets checkpoints load that have no extra state, such as those of ``torch.nn.Linear``.

    Delayed scaling then starts, or goes on, with the scales that the module has.
    """

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + "_extra_state" in missing_keys:
            missing_keys.remove(prefix + "_extra_state")


def _as_bytes(tensor: Tensor) -> Tensor:
    """Its fp32 values as a flat uint8 tensor on the CPU (``bytes(tensor)`` takes seconds)."""
    return tensor.detach().to("cpu", torch.float32).contiguous().flatten().view(torch.uint8)


def encode_extra_state(module) -> Tensor:
    """The module's delayed-scaling state as CPU uint8 tensor; empty where there is none to keep.

    That is so without delayed scaling, and as long as nothing was recorded (tracing one module may
    make the state of others). Which recipe is in use now does not matter: the state outlives it.
    """
    scaling = module._delayed_scaling
    nothing = torch.empty(0, dtype=torch.uint8)
    if scaling is None:
        return nothing
    tensors = [getattr(scaling, field).detach().cpu() for field in FIELDS]
    if all(bool((tensor == start).all()) for tensor, start in zip(tensors, (1, 0, 1, 0))):
        return nothing
    shapes = {field: list(tensor.shape) for field, tensor in zip(FIELDS, tensors)}
    header = json.dumps(shapes).encode()
    header = MAGIC + struct.pack("<Q", len(header)) + header
    head = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return torch.cat([head, *map(_as_bytes, tensors)])


def decode_extra_state(module, state) -> None:
    """Restore what ``encode_extra_state`` made; None and empty tensors restore nothing.

    Raises
    ------
    RuntimeError
        The state is of another kind (for example a pickle, which could run code when loaded), or
        has another number of slots than the module.
    """
    if state is None or (isinstance(state, Tensor) and state.numel() == 0):
        return
    data = state.detach().cpu() if isinstance(state, Tensor) else torch.empty(0, dtype=torch.uint8)
    start = len(MAGIC) + 8
    head = bytes(data[:start].tolist()) if data.dtype == torch.uint8 else b""
    if not head.startswith(MAGIC):
        if data.dtype == torch.uint8 and holds_no_scales(bytes(data.tolist())):
            return
        raise RuntimeError(
            f"The _extra_state of '{module.name}' is not one that this package wrote; it may be a"
            " pickle that holds delayed-scaling state. Pickles are not loaded, because that can"
            " run any code (NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE of the reference package has no"
            " effect here). Drop the key from the checkpoint; delayed scaling then starts with"
            " scales of one."
        )
    try:
        (length,) = struct.unpack("<Q", head[len(MAGIC) :])
        shapes = json.loads(bytes(data[start : start + length].tolist()))
        expected = start + length + 4 * sum(math.prod(shapes[field]) for field in FIELDS)
    except (ValueError, KeyError, struct.error):
        expected = -1
    if data.numel() != expected:
        raise RuntimeError(
            f"The _extra_state of '{module.name}' is damaged: it has {data.numel()} bytes, but its"
            f" header {'can not be read' if expected < 0 else f'announces {expected}'}. Load"
            " another copy of the checkpoint, or drop the key; delayed scaling then starts anew."
        )
    forward, backward = module.delayed_slots()
    if shapes["fwd_scale"] != [forward] or shapes["bwd_scale"] != [backward]:
        raise RuntimeError(
            f"The _extra_state of '{module.name}' has {shapes['fwd_scale'][0]} forward and"
            f" {shapes['bwd_scale'][0]} backward slots, but the module has {forward} and"
            f" {backward}; the checkpoint is of another kind of module."
        )
    device = module.delayed_device() or torch.device("cpu")
    offset = start + length
    with delayed_scaling.ordinary_tensors():
        scaling = delayed_scaling.DelayedScalingState(
            forward, backward, shapes["fwd_history"][0], device
        )
        for field in FIELDS:
            target = getattr(scaling, field)
            size = target.numel() * 4
            # A copy of the bytes is aligned for fp32.
            chunk = data[offset : offset + size].clone().view(torch.float32)
            target.copy_(chunk.view(target.shape))
            offset += size
    module._delayed_scaling = scaling


def holds_no_scales(payload: bytes) -> bool:
    """Whether a pickle of the reference package holds nothing that this package would restore.

    True for pickles that name no class at all, or no class but those of recipes without state. The
    opcodes are read, nothing is executed.
    """
    named, strings = set(), []
    try:
        for opcode, argument, _ in pickletools.genops(payload):
            if opcode.name == "GLOBAL":
                named.add(tuple(argument.split(" ", 1)))
            elif opcode.name == "STACK_GLOBAL":
                named.add(tuple(strings[-2:]))
            elif isinstance(argument, str):
                strings.append(argument)
    except ValueError:
        return False
    recipes = {
        (module, name)
        for module, name in named
        if module.startswith("transformer_engine.") and name in STATELESS_CLASSES
    }
    return bool(payload) and named == recipes
