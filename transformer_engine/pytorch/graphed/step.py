# SPDX-License-Identifier: Apache-2.0
"""The replays of two graphs as one step of autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..core.delayed_scaling import update_backward


class Replay(NamedTuple):
    """One call: where it is replayed, and the states of delayed scaling that it uses.

    ``states``: pairs of a state and the rule by which backward renews its scales, None if another
    use of the region does that.
    """

    stream: Any
    event: Any
    states: list


class GraphedStep(torch.autograd.Function):
    """Replays of a unit's two graphs, for autograd."""

    @staticmethod
    def forward(ctx, unit, replay: Replay, *tensors):
        for static, tensor in zip(unit.inputs, tensors):
            if static.data_ptr() != tensor.data_ptr():
                static.data.copy_(tensor)
        unit.options.backend.replay(unit.forward_graph, replay.stream, replay.event)
        ctx.unit, ctx.replay = unit, replay
        ctx.set_materialize_grads(False)
        outputs = [out.detach() for out in unit.static_outputs if out is not None]
        fixed = [
            out
            for out, static in zip(outputs, filter(lambda t: t is not None, unit.static_outputs))
            if not static.requires_grad
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        unit, replay = ctx.unit, ctx.replay
        if unit.backward_graph is None:
            raise RuntimeError(
                f"The CUDA graph of {type(unit.module).__name__} has no backward pass (or was"
                " reset): nothing required a gradient when it was captured."
            )
        given = iter(grads)
        for out, static in zip(unit.static_outputs, unit.grad_outputs):
            grad = next(given) if out is not None else None
            if static is None:
                continue
            if grad is None:
                static.zero_()
            elif grad.data_ptr() != static.data_ptr():
                static.copy_(grad)
        unit.options.backend.replay(unit.backward_graph, replay.stream, replay.event)
        for state, rule in replay.states:
            if rule is not None:
                update_backward(state.bwd_history, state.bwd_scale, rule)
        made = iter(
            None if grad is None else grad.clone() if owned else grad.detach()
            for grad, owned in zip(unit.grad_inputs, unit.owned)
        )
        inputs = [next(made) if x.requires_grad else None for x in unit.inputs]
        return (None, None, *inputs, *made)
