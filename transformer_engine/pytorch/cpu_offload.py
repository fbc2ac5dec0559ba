# SPDX-License-Identifier: Apache-2.0
"""Activation offload: what autograd saves waits for its backward pass on the CPU.

::

    context, sync = te.get_cpu_offload_context(enabled=True, num_layers=6, model_layers=12)
    for layer in layers:
        with context:
            x = layer(x)
        x = sync(x)

Saved tensors are moved as they are: a module of this package that computes in FP8 saves bytes, and
bytes are what is copied. Results are those without offload, bit by bit.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext
from typing import Any, Callable

import torch
from torch import Tensor

from .dynamo.capability import leave_graph
from .offload.layer import OffloadableLayerState
from .offload.rules import flat_tensors, mark_activation_offload, mark_not_offload
from .offload.state import ACTIVE
from .offload.synchronizer import (
    DefaultOffloadSynchronizer,
    ManualOffloadSynchronizer,
    OffloadSynchronizer,
)

__all__ = [
    "DefaultOffloadSynchronizer",
    "ManualOffloadSynchronizer",
    "OffloadSynchronizer",
    "OffloadableLayerState",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_activation_offload",
    "mark_not_offload",
    "start_offload",
]

IN_GRAPH = (
    "activation offload decides in Python what is moved, and when. Enter its context around the"
    " call of a compiled layer, and call its function on the output there."
)


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple:
    """``(context, sync)``: enter ``context`` around each layer, call ``sync`` on its output.

    Parameters
    ----------
    enabled : bool
        False gives a context and a function that do nothing.
    num_layers, model_layers : int
        The first ``num_layers`` of ``model_layers`` layers are offloaded; at most all but one.
    offload_activations : bool
        There is nothing else that could be offloaded.
    offload_weights, double_buffering : bool
        Deprecated, without effect.
    manual_synchronization : bool
        Offload when the third result, a ``ManualOffloadSynchronizer``, is told to. ``num_layers``
        does not matter then.
    retain_pinned_cpu_buffers : bool
        Keep page-locked memory, which is slow to get, from one iteration to the next.
    offload_stream : torch.cuda.Stream, optional
        The stream of the copies, with manual synchronization. By default there is one per device.

    Returns
    -------
    ``(context, sync)``, or ``(context, sync, controller)`` with ``manual_synchronization``
    (``controller`` is None unless ``enabled``). ``sync(tensor)`` returns the same values.

    Raises
    ------
    ValueError
        Nothing is selected, ``num_layers`` is too large, or ``offload_stream`` was given without
        manual synchronization. Later, ``sync`` of a tensor that needs no gradient.
    RuntimeError
        Later, if the context is entered twice without ``sync`` in between.
    """
    deprecated = {"offload_weights": offload_weights, "double_buffering": double_buffering}
    for name in [name for name, given in deprecated.items() if given]:
        warnings.warn(
            f"{name} is deprecated and has no effect; leave it out.",
            DeprecationWarning,
            stacklevel=2,
        )
    if not enabled:
        disabled = (nullcontext(), _identity)
        return (*disabled, None) if manual_synchronization else disabled
    if not offload_activations:
        raise ValueError(
            "CPU offload is enabled, but offload_activations is False, so there is nothing to"
            " offload. Set offload_activations=True, or enabled=False."
        )
    if manual_synchronization:
        controller = ManualOffloadSynchronizer(
            model_layers if model_layers > 1 else 0, retain_pinned_cpu_buffers, offload_stream
        )
        context = OffloadContext(controller)
        return context, context.sync, controller
    _check_layers(num_layers, model_layers, offload_stream)
    context = OffloadContext(
        DefaultOffloadSynchronizer(model_layers, num_layers, retain_pinned_cpu_buffers)
    )
    return context, context.sync


def _check_layers(num_layers: int, model_layers: int, offload_stream: Any) -> None:
    if offload_stream is not None:
        raise ValueError(
            "offload_stream is for manual_synchronization=True. Set it, or leave the stream out."
        )
    if not 0 < num_layers < model_layers:
        raise ValueError(
            f"num_layers is {num_layers} and model_layers is {model_layers}, but between 1 and"
            f" model_layers - 1 = {model_layers - 1} layers can be offloaded: the last one is"
            " needed as soon as the forward pass ends."
        )
    if num_layers == model_layers - 1:
        warnings.warn(
            f"All but one of {model_layers} layers are offloaded: each has only the time of the"
            " next layer for its copies. Offload fewer layers if the device waits for them.",
            stacklevel=3,
        )


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def is_cpu_offload_enabled() -> bool:
    """Whether a layer runs inside of an offload context."""
    return ACTIVE.context is not None


def start_offload(*tensors: Tensor, offload_base_tensor: bool = False) -> None:
    """Begin to copy ``tensors`` to the CPU now, inside of an offload context.

    For tensors that autograd will save soon and that are complete already, however small. With
    ``offload_base_tensor`` a view is copied together with what it is a view of, which views that
    share it then share. With manual synchronization, or in a layer that is not offloaded, nothing
    begins before its time. Outside of a context nothing happens.
    """
    if ACTIVE.context is not None:
        mark_activation_offload(*tensors)
        ACTIVE.context.synchronizer.start_early(flat_tensors(tensors), offload_base_tensor)


class OffloadContext:
    """The context manager of ``get_cpu_offload_context``; one for all layers of a model."""

    def __init__(self, synchronizer: OffloadSynchronizer) -> None:
        self.synchronizer = synchronizer
        self._hooks = ExitStack()
        self._outer: Any = None
        self._unsynchronized = False

    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            leave_graph(IN_GRAPH, self._enter)
        else:
            self._enter()

    def _enter(self) -> None:
        if self._unsynchronized:
            raise RuntimeError(
                "The CPU offload context was entered again, but the function that was returned with"
                " it was not called on the output of the layer before. Call it after each layer."
            )
        self._unsynchronized = True
        self.synchronizer.begin_layer()
        self._hooks.enter_context(
            torch.autograd.graph.saved_tensors_hooks(
                self.synchronizer.push_tensor, self.synchronizer.pop_tensor
            )
        )
        self._outer, ACTIVE.context = ACTIVE.context, self

    def __exit__(self, kind, error, trace) -> None:
        ACTIVE.context = self._outer
        self._hooks.close()
        if kind is not None:
            self._unsynchronized = False
            self.synchronizer.forget_pass()

    def sync(self, tensor: Tensor) -> Tensor:
        """The layer before has ended with ``tensor``; the same values, to go on with."""
        if torch.compiler.is_compiling():
            return leave_graph(IN_GRAPH, self._sync, tensor)
        return self._sync(tensor)

    def _sync(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            raise ValueError(
                "The output of a layer needs no gradient, so there will be no backward pass to"
                " offload activations for. Leave the offload context out, or give gradients to the"
                " input or to parameters of the layer."
            )
        self._unsynchronized = False
        return _LayerBoundary.apply(tensor, self.synchronizer, *self.synchronizer.fwd_step())


class _LayerBoundary(torch.autograd.Function):
    """The identity; its backward runs right before that of the layer."""

    @staticmethod
    def forward(ctx, tensor, synchronizer, forward_pass, number):
        ctx.step: Callable = lambda: synchronizer.bwd_step(forward_pass, number)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        ctx.step()
        return grad, None, None, None
