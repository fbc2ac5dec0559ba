# SPDX-License-Identifier: Apache-2.0
"""The replays of two graphs as one step of autograd."""

from __future__ import annotations

from typing import Any, List, NamedTuple

import torch
from torch import Tensor

from ..core.delayed_scaling import update_backward
from ..first_order import first_order_only
from .scaling import UsedState
from .weight_gradients import mark


class Replay(NamedTuple):
    """One call: where it is replayed, and the states of delayed scaling that it uses."""

    stream: Any
    event: Any
    states: List[UsedState]


def copy_into(static: Tensor, tensor: Tensor) -> None:
    """Give ``static`` the values of ``tensor``, which may be the same memory."""
    if static.data_ptr() != tensor.data_ptr() or static.stride() != tensor.stride():
        static.data.copy_(tensor)


def check_backward(unit, number: int) -> None:
    """Raise RuntimeError unless what call ``number`` left for its backward pass is there."""
    name = type(unit.module).__name__
    if unit.backward_graph is None:
        raise RuntimeError(
            f"The CUDA graph of {name} has no backward pass (or was reset): nothing required a"
            " gradient when it was captured."
        )
    if number != unit.replays:
        raise RuntimeError(
            f"Call {number} of the graphed {name} can not go back any more: call {unit.replays} has"
            " overwritten what it kept for that. Call backward before the next call, or make a"
            " graph for each microbatch with _order."
        )


def check_order(unit) -> None:
    """Raise RuntimeError if a pass that was captured later has been replayed since the forward."""
    if unit.overwritten:
        raise RuntimeError(
            f"The backward pass of the graphed {type(unit.module).__name__} comes too late: one"
            " that was captured after it was replayed before it, and has overwritten what it kept."
            " Replay passes in the order of the capture: the oldest microbatch goes back first, and"
            " layers in reverse; or capture with another _order, or with"
            " retain_graph_in_backward=True."
        )


class GraphedStep(torch.autograd.Function):
    """Replays of a unit's two graphs, for autograd."""

    @staticmethod
    def forward(ctx, unit, replay: Replay, *tensors):
        for static, tensor in zip(unit.inputs, tensors):
            copy_into(static, tensor)
        unit.options.backend.replay(unit.forward_graph, replay.stream, replay.event)
        unit.write(forward=True)
        unit.replays += 1
        ctx.unit, ctx.replay, ctx.number = unit, replay, unit.replays
        ctx.set_materialize_grads(False)
        statics = [static for static in unit.static_outputs if static is not None]
        outputs = [static.detach() for static in statics]
        ctx.mark_non_differentiable(
            *(out for out, static in zip(outputs, statics) if not static.requires_grad)
        )
        return tuple(outputs)

    @staticmethod
    @first_order_only
    def backward(ctx, *grads):
        unit, replay = ctx.unit, ctx.replay
        check_backward(unit, ctx.number)
        check_order(unit)
        given = iter(grads)
        for out, static in zip(unit.static_outputs, unit.grad_outputs):
            grad = next(given) if out is not None else None
            if static is None:
                continue
            if grad is None:
                static.zero_()
            else:
                copy_into(static, grad)
        unit.options.backend.replay(unit.backward_graph, replay.stream, replay.event)
        unit.write(forward=False)
        unit.put_off_by = ctx.number
        mark(unit.fused)
        for state in replay.states:
            if state.rule is not None:
                update_backward(state.history, state.scale, state.rule)
        made = iter(
            None if grad is None else grad.clone() if owned else grad.detach()
            for grad, owned in zip(unit.grad_inputs, unit.owned)
        )
        inputs = [next(made) if x.requires_grad else None for x in unit.inputs]
        return (None, None, *inputs, *made)
