# SPDX-License-Identifier: Apache-2.0
"""When the layers of a model are offloaded and reloaded."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..quantized_tensor import QuantizedTensor
from .layer import (
    OFFLOAD_FINISHED,
    OFFLOAD_STARTED,
    CpuBuffers,
    OffloadableLayerState,
    SavedActivation,
    SavedView,
)
from .rules import is_offloaded, weight_addresses


class ForwardPass:
    """The layers of one forward pass, of which several may wait for their backward."""

    def __init__(self) -> None:
        self.layers: list[OffloadableLayerState] = []
        self.backward_began = False
        self.weights = weight_addresses()


class OffloadSynchronizer:
    """Hands saved tensors to the state of the layer that runs; offloads nothing by itself.

    ``num_layers``: of the model; after as many layers, or once a backward pass has begun, the next
    layer begins a new forward pass. 0: only the latter.
    """

    def __init__(
        self, num_layers: int, retain_pinned_cpu_buffers: bool = False, offload_stream: Any = None
    ) -> None:
        self.num_layers = num_layers
        self._retain = retain_pinned_cpu_buffers
        self._stream = offload_stream
        self._buffers: list[CpuBuffers] = []
        self.current: Optional[ForwardPass] = None

    # --- forward ---------------------------------------------------------------------------------

    def begin_layer(self) -> None:
        """The next layer begins; it saves tensors from now on."""
        current = self.current
        full = current is not None and len(current.layers) >= self.num_layers > 0
        if current is None or full or current.backward_began:
            self.current = current = ForwardPass()
        number = len(current.layers)
        while len(self._buffers) <= number:
            self._buffers.append(CpuBuffers(self._retain))
        current.layers.append(
            OffloadableLayerState(self._stream, self._buffers[number], f"layer {number}")
        )

    def forget_pass(self) -> None:
        """A layer failed: the next one begins a new forward pass."""
        self.current = None

    def fwd_step(self) -> tuple[ForwardPass, int]:
        """The layer that runs has ended; where it is."""
        if self.current is None:
            raise RuntimeError(
                "There is no layer whose output this could be. Enter the CPU offload context around"
                " a layer first."
            )
        return self.current, len(self.current.layers) - 1

    def push_tensor(self, tensor: Tensor) -> Any:
        """What autograd shall hold in the place of a tensor that it saves."""
        if isinstance(tensor, QuantizedTensor) and not isinstance(tensor, torch.nn.Parameter):
            buffers, twin = tensor.prepare_for_saving()
            return twin, [None if b is None else self.push_tensor(b) for b in buffers]
        if is_offloaded(tensor, self.current.weights):
            return self.current.layers[-1].push_tensor(tensor)
        # A node must not hold its own results, which hold the node.
        return tensor if tensor.is_leaf else tensor.detach()

    def start_early(self, tensors: list[Tensor], whole: bool) -> None:
        """Tensors of the layer that runs are complete; see ``cpu_offload.start_offload``."""

    # --- backward --------------------------------------------------------------------------------

    def bwd_step(self, forward: ForwardPass, number: int) -> None:
        """The backward pass of a layer is about to begin: that of the layer after it has ended."""
        forward.backward_began = True
        for layer in forward.layers[number + 1 :]:
            layer.release_all_memory()

    def pop_tensor(self, held: Any) -> Tensor:
        """The tensor in whose place ``push_tensor`` gave ``held``."""
        if isinstance(held, SavedActivation):
            return held.layer.pop_tensor(held)
        if isinstance(held, SavedView):
            return held.whole.layer.pop_tensor(held)
        if isinstance(held, tuple):
            twin, buffers = held
            whole = twin.detach()
            whole.restore_from_saved([None if b is None else self.pop_tensor(b) for b in buffers])
            return whole
        return held


class DefaultOffloadSynchronizer(OffloadSynchronizer):
    """Offloads the first ``num_offloaded`` of ``num_layers`` layers; the last ones are needed soon.

    A layer is copied to the CPU while later layers run, and back while their backward runs. Of
    ``n`` offloaded layers of ``m``, layer ``i`` has left the device at the latest, and comes back,
    with layer ``ceil((i + 1) m / n) - 1``: so copies are spread over the whole pass.
    """

    def __init__(
        self,
        num_layers: int,
        num_offloaded: int,
        retain_pinned_cpu_buffers: bool = False,
        offload_stream: Any = None,
    ) -> None:
        super().__init__(num_layers, retain_pinned_cpu_buffers, offload_stream)
        self.num_offloaded = num_offloaded

    def _deadline(self, number: int) -> int:
        return -(-(number + 1) * self.num_layers // self.num_offloaded) - 1

    def fwd_step(self) -> tuple[ForwardPass, int]:
        forward, number = super().fwd_step()
        layers = forward.layers
        if number < self.num_offloaded:
            layers[number].start_offload()
        for i, layer in enumerate(layers[: self.num_offloaded]):
            late = self._deadline(i) <= number
            if layer.state == OFFLOAD_STARTED and (late or layer.is_copied()):
                layer.release_activation_forward_gpu_memory()
        return forward, number

    def start_early(self, tensors: list[Tensor], whole: bool) -> None:
        layers = self.current.layers
        if len(layers) <= self.num_offloaded:
            for tensor in tensors:
                layers[-1].start_early(tensor, whole)

    def bwd_step(self, forward: ForwardPass, number: int) -> None:
        super().bwd_step(forward, number)
        for i in reversed(range(min(self.num_offloaded, len(forward.layers)))):
            layer = forward.layers[i]
            if self._deadline(i) >= number >= i and layer.state == OFFLOAD_FINISHED:
                layer.start_reload()


class ManualOffloadSynchronizer(OffloadSynchronizer):
    """The user says when. Layers are numbered from 0 in each forward pass.

    On CUDA the three methods return at once: copies run on the offload stream, and what is computed
    after them waits for them where it must.
    """

    def start_offload_layer(self, layer_id: int) -> None:
        """Begin to copy what layer ``layer_id`` of the last forward pass saved to the CPU."""
        self._layer(layer_id).start_offload()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Let go of the device memory of what ``start_offload_layer`` copied."""
        self._layer(layer_id).release_activation_forward_gpu_memory()

    def start_reload_layer(self, layer_id: int) -> None:
        """Begin to copy it back."""
        self._layer(layer_id).start_reload()

    def _layer(self, layer_id: int) -> OffloadableLayerState:
        layers = [] if self.current is None else self.current.layers
        if not 0 <= layer_id < len(layers):
            raise ValueError(
                f"Layer {layer_id} was asked for, but {len(layers)} layers have run inside of the"
                " offload context in the present forward pass. Pass a number from 0 to one less."
            )
        return layers[layer_id]
