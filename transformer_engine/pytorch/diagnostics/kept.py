# SPDX-License-Identifier: Apache-2.0
"""What autograd holds after a forward pass, tensor by tensor.

Two sources that must agree: the list of tensors that a module op selects for its backward, with
their names; and PyTorch's ``saved_tensors_hooks``, which see every tensor that autograd takes. What
the hooks hand to autograd is a small object, so that its death tells when autograd lets go.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Iterable, NamedTuple, Optional

import torch
from torch import Tensor

from .formula import Need, Sizes, needed
from .rows import SavedRow


class Place(NamedTuple):
    """Where something happens: a module by its qualified name, the number of its call (0 for one
    that is not ours), how many GEMMs it has and which of its weights are quantized parameters."""

    module: str = ""
    call: int = 0
    gemms: int = 1
    primary: tuple = ()


class OpCall:
    """One forward call of a module op that will have a backward."""

    def __init__(self, place: Place, op: str, cfg) -> None:
        self.place, self.op, self.cfg = place, op, cfg


class Planned(NamedTuple):
    """A tensor that a module op selected for its backward."""

    call: OpCall
    name: str
    shape: tuple
    dtype: torch.dtype
    bytes: int
    need: Need


class Held:
    """What autograd holds in the place of a tensor."""

    __slots__ = ("tensor", "call", "__weakref__")

    def __init__(self, tensor: Tensor, call: Optional[OpCall]) -> None:
        self.tensor, self.call = tensor, call


class Entry(NamedTuple):
    """A tensor that autograd took."""

    held: weakref.ref
    place: Place
    planned: Optional[Planned]


class Kept:
    """Collects `Entry` objects while a forward pass runs; ``rows`` reads them afterwards."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._expected: deque = deque()

    def plan(self, call: OpCall, op, inputs, outputs) -> None:
        """Note what module op ``op`` selects; autograd takes these tensors next."""
        self._expected.clear()
        sizes = _sizes(call, op, inputs)
        tensors = op.save(call.cfg, inputs, outputs)
        names = [a.name for a in op.backward_op._schema.arguments][op.outputs :]
        for name, tensor in zip(names, tensors):
            if tensor is not None:
                size = tensor.numel() * tensor.element_size()
                need = needed(name, call.cfg, sizes)
                self._expected.append(
                    Planned(call, name, tuple(tensor.shape), tensor.dtype, size, need)
                )

    def take(self, tensor: Tensor, place: Place) -> Held:
        """Autograd saves ``tensor``; returns what it gets in its place."""
        planned = None
        if self._expected and self._expected[0].shape == tuple(tensor.shape):
            planned = self._expected.popleft()
        held = Held(tensor, None if planned is None else planned.call)
        self.entries.append(Entry(weakref.ref(held), place, planned))
        return held

    def living(self) -> list[tuple[Entry, Tensor]]:
        """What autograd still holds."""
        found = ((entry, entry.held()) for entry in self.entries)
        return [(entry, held.tensor) for entry, held in found if held is not None]

    def rows(self, owners: dict) -> list[SavedRow]:
        """The rows of what autograd holds; ``owners``: kind by storage, for what exists anyway."""
        seen, rows = set(), []
        for entry, tensor in self.living():
            key = storage_keys(tensor)[0]
            kind = owners.get(key, "shared" if key in seen else "kept")
            seen.add(key)
            rows.append(_row(entry, tensor, kind))
        return rows


def _row(entry: Entry, tensor: Tensor, kind: str) -> SavedRow:
    storage = sum(part.untyped_storage().nbytes() for part in parts(tensor))
    planned = entry.planned
    if planned is None:
        shape, size = tuple(tensor.shape), sum(p.numel() * p.element_size() for p in parts(tensor))
        return SavedRow(
            *(entry.place.module, entry.place.call, "torch", "", kind),
            *(shape, tensor.dtype, size, storage, "an operation of PyTorch reads it"),
        )
    place, need = planned.call.place, planned.need
    return SavedRow(
        *(place.module, place.call, planned.call.op, planned.name, kind),
        *(planned.shape, planned.dtype, planned.bytes, storage),
        *(need.why, need.formula, need.bytes),
    )


def _sizes(call: OpCall, op, inputs) -> Sizes:
    """The letters of the formulas, read off the arguments of a module op."""
    by_name = dict(zip(op.inputs, inputs))
    x = by_name["x"]
    names = ("weight", "fc1_weight", "fc2_weight")
    weights = tuple(tuple(by_name[name].shape) for name in names if name in by_name)
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    return Sizes(rows, x.shape[-1], weights, x.element_size(), call.place.gemms)


# --- memory --------------------------------------------------------------------------------------


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that ``tensor`` consists of: itself, or those inside of a subclass."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [part for value in inner if isinstance(value, Tensor) for part in parts(value)]


def storage_keys(tensor: Tensor) -> list:
    """Identities of the storages that ``tensor`` lies in, while it is alive."""
    return [part.untyped_storage()._cdata for part in parts(tensor)] or [id(tensor)]


def owned(kinds: Iterable[tuple[str, Iterable[Tensor]]]) -> dict:
    """Kind by storage; of two kinds for one storage the first one counts."""
    owners: dict = {}
    for kind, tensors in kinds:
        for tensor in tensors:
            for key in storage_keys(tensor):
                owners.setdefault(key, kind)
    return owners
