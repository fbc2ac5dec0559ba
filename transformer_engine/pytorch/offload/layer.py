# SPDX-License-Identifier: Apache-2.0
"""The saved activations of one layer, on the device, on the CPU, or on their way."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

NOT_OFFLOADED = "not_offloaded"
OFFLOAD_STARTED = "offload_started"
OFFLOAD_FINISHED = "offload_finished"
RELOAD_STARTED = "reload_started"


class SavedActivation:
    """What autograd holds in the place of a tensor; dies with the node that saved it.

    ``original`` is there until the copy is complete, ``restored`` while backward needs it.
    """

    def __init__(self, tensor: Tensor, layer: "OffloadableLayerState") -> None:
        self.original: Optional[Tensor] = tensor
        self.copy: Optional[Tensor] = None
        self.restored: Optional[Tensor] = None
        self.device = tensor.device
        self.layer = layer

    def __del__(self) -> None:
        if self.copy is not None:
            self.layer.buffers.give_back(self.copy)


class SavedView(NamedTuple):
    """What autograd holds in the place of a view of a tensor that is copied as a whole."""

    whole: SavedActivation
    shape: tuple
    stride: tuple
    offset: int


class CpuBuffers:
    """Page-locked CPU memory, kept for the next iteration if ``retain`` says so."""

    def __init__(self, retain: bool) -> None:
        self._retain = retain
        self._free: dict[tuple, list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A buffer for a copy of ``like``, with its order of dimensions."""
        free = self._free.get(_layout(like))
        if free:
            return free.pop()
        return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda)

    def give_back(self, buffer: Tensor) -> None:
        """``buffer`` is not needed any more."""
        if self._retain:
            self._free.setdefault(_layout(buffer), []).append(buffer)


def _layout(tensor: Tensor) -> tuple:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tuple(tensor.shape), tuple(order), tensor.dtype


def _key(tensor: Tensor) -> tuple:
    """The same for tensors that share all of their memory."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class OffloadableLayerState:
    """The tensors that one layer saved in one forward pass.

    Its methods are called in this order: ``push_tensor`` in forward; ``start_offload``;
    ``release_activation_forward_gpu_memory``; ``start_reload``; ``pop_tensor`` in backward. Steps
    may be left out: ``pop_tensor`` gives a tensor from wherever it is.
    """

    def __init__(
        self, offload_stream: Any = None, buffers: Optional[CpuBuffers] = None, name: str = ""
    ) -> None:
        self.state = NOT_OFFLOADED
        self.buffers = CpuBuffers(False) if buffers is None else buffers
        self.name = name
        self._stream = offload_stream
        self._event: Any = None  # behind the copies that were started last
        self._saved: list = []  # weak references: autograd owns the entries
        self._known: dict[tuple, Any] = {}
        self._early: list = []  # entries that autograd may still save
        self._bases: set[tuple] = set()  # keys of those among them that views refer to

    def push_tensor(self, tensor: Tensor) -> Union[SavedActivation, SavedView]:
        """Take note of a tensor that autograd saves; what it shall hold instead.

        A tensor that is saved several times is copied once.
        """
        base = tensor._base
        if base is not None and _key(base) in self._bases:
            offset = tensor.storage_offset() - base.storage_offset()
            return SavedView(self._entry(base), tuple(tensor.shape), tensor.stride(), offset)
        return self._entry(tensor)

    def _entry(self, tensor: Tensor) -> SavedActivation:
        key = _key(tensor)
        known = self._known.get(key)
        entry = None if known is None else known()
        if entry is None or entry.original is None or entry.original._version != tensor._version:
            # Detached: the entry belongs to a node that the tensor may be the result of.
            entry = SavedActivation(tensor.detach(), self)
            self._saved.append(weakref.ref(entry))
            self._known[key] = self._saved[-1]
        return entry

    def start_early(self, tensor: Tensor, whole: bool) -> None:
        """Begin to copy one tensor before the rest; it is kept if autograd saves it as well.

        ``whole``: copy what it is a view of, and let all views that are saved refer to that.
        """
        base = tensor._base
        if whole and base is not None and base.is_contiguous():
            self._bases.add(_key(base))
            tensor = base
        entry = self._entry(tensor)
        if entry.copy is None:
            self._early.append(entry)
            self._copy([(entry.original, self._buffer_of(entry))])

    def start_offload(self) -> None:
        """Begin to copy everything to the CPU, on the offload stream."""
        self._expect("start_offload", NOT_OFFLOADED)
        self._early.clear()
        entries = [entry for entry in self._entries() if entry.copy is None]
        self._copy([(entry.original, self._buffer_of(entry)) for entry in entries])
        self.state = OFFLOAD_STARTED

    def is_copied(self) -> bool:
        """Whether the copies that were started are complete; does not wait."""
        return self._event is None or self._event.query()

    def release_activation_forward_gpu_memory(self) -> None:
        """Let go of the device memory; what is computed from now on waits for the copies."""
        self._expect("release_activation_forward_gpu_memory", OFFLOAD_STARTED)
        self._wait()
        for entry in self._entries():
            entry.original = None
        self._known.clear()
        self._bases.clear()
        self.state = OFFLOAD_FINISHED

    def start_reload(self) -> None:
        """Begin to copy everything back, on the offload stream."""
        self._expect("start_reload", OFFLOAD_FINISHED)
        pairs = []
        for entry in self._entries():
            # Allocated for the current stream, which will free it.
            entry.restored = torch.empty_like(entry.copy, device=entry.device)
            pairs.append((entry.copy, entry.restored))
        self._copy(pairs)
        self.state = RELOAD_STARTED

    def pop_tensor(self, entry: Union[SavedActivation, SavedView]) -> Tensor:
        """The tensor that ``push_tensor`` was given, or a copy of it on its device."""
        if isinstance(entry, SavedView):
            whole = self.pop_tensor(entry.whole)
            return whole.as_strided(
                entry.shape, entry.stride, whole.storage_offset() + entry.offset
            )
        if entry.original is not None:
            return entry.original
        if entry.restored is None:
            # Not reloaded yet, or used up by a backward pass that retained its graph.
            self.state = OFFLOAD_FINISHED
            self.start_reload()
        self._wait()
        return entry.restored

    def release_all_memory(self) -> None:
        """Let go of device memory after a backward pass; the CPU keeps what its graph retains."""
        for entry in self._entries():
            if entry.copy is not None:
                entry.restored = None
        if self.state == RELOAD_STARTED:
            self.state = OFFLOAD_FINISHED

    def get_offloaded_total_size_mb(self) -> float:
        """Size of the copies on the CPU in MiB."""
        copies = [entry.copy for entry in self._entries() if entry.copy is not None]
        return sum(copy.numel() * copy.itemsize for copy in copies) / 2**20

    # --- copying ---------------------------------------------------------------------------------

    def _entries(self) -> list[SavedActivation]:
        entries = [reference() for reference in self._saved]
        return [entry for entry in entries if entry is not None]

    def _buffer_of(self, entry: SavedActivation) -> Tensor:
        entry.copy = self.buffers.take(entry.original)
        return entry.copy

    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy each first tensor into the second one, beside what the device computes."""
        device = next((t.device for pair in pairs for t in pair if t.is_cuda), None)
        if device is None:
            for source, target in pairs:
                target.copy_(source)
            return
        computing, stream = torch.cuda.current_stream(device), self._stream
        stream = copying_stream(device) if stream is None else stream
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self._event = stream.record_event()

    def _wait(self) -> None:
        """Let what is computed from now on come after the copies."""
        if self._event is not None:
            self._event.wait()

    def _expect(self, method: str, state: str) -> None:
        if self.state != state:
            raise RuntimeError(
                f"{method}() of {self.name or 'a layer'} was called while it is {self.state!r}, but"
                f" must be {state!r}. The order is start_offload, release of the forward memory,"
                " start_reload, once each per forward pass."
            )


_STREAMS: dict[torch.device, Any] = {}


def copying_stream(device: torch.device) -> Any:
    """The stream that copies beside the computation where the user gave none, one per device."""
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]
