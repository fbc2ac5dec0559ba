# SPDX-License-Identifier: Apache-2.0
"""``_extra_state``: delayed-scaling state as one flat uint8 tensor that is not a pickle.

States of the reference package, which are pickles, are read, but never written.

Layout: the magic bytes, the length of a JSON header as 8 little-endian bytes, the header (names and
shapes), then the fp32 tensors one after another. An empty tensor means "no such state".
"""

from __future__ import annotations

import io
import json
import math
import struct

import torch
from torch import Tensor

from ..checkpoints import reference_state
from ..core import delayed_scaling
from .extra_state_item import DistributedExtraState

MAGIC = b"TE-DELAYED-SCALING-1"
FIELDS = ("fwd_scale", "fwd_history", "bwd_scale", "bwd_history")


class OptionalExtraState(DistributedExtraState):
    """Lets checkpoints load that have no extra state, such as those of ``torch.nn.Linear``.

    Delayed scaling then starts, or goes on, with the scales that the module has. The other way
    round, a module of ``torch.nn`` loads all keys of a state dict but those that end in
    ``_extra_state``, which have to be dropped (or ``strict=False``).
    """

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        key = prefix + "_extra_state"
        if getattr(self, "primary_weights_in_fp8", False) and key in state_dict:
            # Before the parameters: they are quantized with the scales that it holds.
            self.set_extra_state(state_dict[key])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in missing_keys:
            missing_keys.remove(key)


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

    Pickles that the reference package wrote (in uint8 tensors, ``bytes`` or ``io.BytesIO``) are
    read too, without executing anything in them; see ``checkpoints.reference_state``.

    Raises
    ------
    RuntimeError
        The state is of another kind, for example a pickle of other classes, or damaged, or has
        another number of slots than the module.
    """
    if state is None or (isinstance(state, Tensor) and state.numel() == 0):
        return
    name = f"{type(module).__name__} '{module.name}'"
    if isinstance(state, Tensor) and state.dtype == torch.uint8:
        data = state.detach().cpu().flatten()
        if bytes(data[: len(MAGIC)].tolist()) == MAGIC:
            _install(module, name, _decode(data, name))
            return
        state = bytes(data.tolist())
    elif not isinstance(state, (bytes, bytearray, io.BytesIO)):
        kind = f"tensor of {state.dtype}" if isinstance(state, Tensor) else type(state).__name__
        raise RuntimeError(
            f"The _extra_state of {name} is a {kind}, but must be a uint8 tensor, as"
            " get_extra_state gives it. Drop the key from the checkpoint: delayed scaling then"
            " starts with scales of one."
        )
    scales = reference_state.load(state, name)
    if scales is not None:
        _install(module, name, scales._asdict())


def _decode(data: Tensor, name: str) -> dict[str, Tensor]:
    """The fp32 tensors, by their names, in the bytes of a state that this package wrote."""
    start = len(MAGIC) + 8
    try:
        (length,) = struct.unpack("<Q", bytes(data[len(MAGIC) : start].tolist()))
        shapes = json.loads(bytes(data[start : start + length].tolist()))
        expected = -1
        if _plausible(*(shapes[field] for field in FIELDS)):
            expected = start + length + 4 * sum(math.prod(shapes[field]) for field in FIELDS)
    except (ValueError, KeyError, TypeError, struct.error):
        expected = -1
    if data.numel() != expected:
        raise RuntimeError(
            f"The _extra_state of {name} is damaged: it has {data.numel()} bytes, but its"
            f" header {'can not be read' if expected < 0 else f'announces {expected}'}. Load"
            " another copy of the checkpoint, or drop the key; delayed scaling then starts anew."
        )
    tensors, offset = {}, start + length
    for field in FIELDS:
        size = 4 * math.prod(shapes[field])
        # A copy of the bytes is aligned for fp32.
        chunk = data[offset : offset + size].clone().view(torch.float32)
        tensors[field] = chunk.view(shapes[field])
        offset += size
    return tensors


def _plausible(fwd_scale: list, fwd_history: list, bwd_scale: list, bwd_history: list) -> bool:
    """Whether these are the shapes of scales ``[slots]`` and histories ``[length, slots]``."""
    length = fwd_history[0]
    counts = (length, *fwd_scale, *bwd_scale)
    same = (fwd_history, bwd_history) == ([length, *fwd_scale], [length, *bwd_scale])
    return same and len(counts) == 3 and all(isinstance(n, int) and n > 0 for n in counts)


def _install(module, name: str, tensors: dict[str, Tensor]) -> None:
    """Make ``tensors`` the delayed-scaling state of the module."""
    slots = module.delayed_slots()
    found = len(tensors["fwd_scale"]), len(tensors["bwd_scale"])
    if found != slots:
        raise RuntimeError(
            f"The _extra_state of {name} has {found[0]} forward and {found[1]} backward slots, but"
            f" the module has {slots[0]} and {slots[1]}; the checkpoint is of another kind of"
            " module. Load it into a module of that kind, or drop the key: delayed scaling then"
            " starts with scales of one."
        )
    device = module.delayed_device() or torch.device("cpu")
    length, scaling = tensors["fwd_history"].shape[0], module._delayed_scaling
    with delayed_scaling.ordinary_tensors():
        # In place where it fits: graphs know the tensors.
        if scaling is None or scaling.fwd_history.shape[0] != length:
            scaling = delayed_scaling.DelayedScalingState(*slots, length, device)
        scaling.move(device)
        scaling.made_in = ""
        for field in FIELDS:
            getattr(scaling, field).copy_(tensors[field])
    module._delayed_scaling = scaling
