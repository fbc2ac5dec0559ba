# SPDX-License-Identifier: Apache-2.0
"""Runs a module op, with autograd and with the state of delayed scaling."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import torch

from ..core.config import decode_config
from ..backends.registry import force_backend
from ..core.delayed_scaling import finish_backward
from ..core.ops import EAGER, is_plain, kernels, outside_autocast, through_dispatcher
from ..core.plans import run_planned
from ..core.python_quantizers import runs_user_code
from ..core.wgrad import accumulate_fused, dummy_gradient
from ..first_order import first_order_only
from ..formats.layout import ScaleAndHistory
from ..torch_version import is_exporting
from .capability import forward_mode, function_transform
from .custom_op import OPS, materialized, save_plan, saved_tensors, unchecked_slots

_FREES = ("layernorm_mlp",)  # ops whose backward frees activations that forward kept, see cfg.free
_FREED = (
    "This call of LayerNormMLP has begun its backward pass before, which freed the activations that"
    " the forward pass had kept. Run the forward pass again; a backward pass that is to run twice"
    " needs retain_graph=True the first time."
)

_NO_BATCHES = (
    "torch.autograd.grad(is_grads_batched=True), which torch.autograd.functional.jacobian and"
    " hessian call with vectorize=True, is not supported: kernels know no batches of gradients."
    " Call torch.autograd.grad for one gradient at a time, with retain_graph=True, or leave"
    " vectorize out."
)


class ModuleFunction(torch.autograd.Function):
    """Autograd of a module call, in eager and under Dynamo.

    ``bwd_scale`` and ``bwd_history`` are the module's live backward state of delayed scaling. They
    are kept as plain attributes of the context, not as saved tensors: another backward may renew
    them in place before this one runs, and that is intended.
    """

    @staticmethod
    def forward(
        ctx,
        name,
        config,
        want,
        fwd_history,
        bwd_scale,
        bwd_history,
        slots,
        rule,
        fused,
        store,
        *tensors,
    ):
        op = OPS[name]
        tensors, main_grads = tensors[: len(op.inputs)], tensors[len(op.inputs) :]
        outputs = _run(op.forward_op, op.forward, config, tensors, fwd_history)
        ctx.set_materialize_grads(False)
        saved = saved_tensors(save_plan(name, config), tensors, outputs)
        ctx.held = ()
        if "inplace=1" in config:
            # Buffers that are rewritten in place: backward takes them as they are by then.
            held = unchecked_slots(name, config)
            ctx.held = [saved[i] for i in held]
            saved = [None if i in held else tensor for i, tensor in enumerate(saved)]
        ctx.save_for_backward(*saved)
        ctx.name, ctx.config = name, config
        ctx.bwd_scale, ctx.bwd_history = bwd_scale, bwd_history
        ctx.slots, ctx.rule = slots, rule
        ctx.folds = fwd_history is not None
        # Plain attributes as well: other backwards add to the same destinations.
        ctx.fused, ctx.main_grads, ctx.store = fused, main_grads, store
        ctx.frees = name in _FREES and store is None and _nobody_else_sees(config)
        ctx.freed = False
        # Compiled code always hands over a gradient, so the description of y is not needed there.
        compiling = torch.compiler.is_compiling()
        ctx.output = None if compiling else (outputs[0].shape, outputs[0].dtype, outputs[0].device)
        amaxes = outputs[len(outputs) - op.amaxes :]
        ctx.mark_non_differentiable(*[a for a in amaxes if a is not None])
        return _visible(op, outputs, want)

    @staticmethod
    def backward(ctx, *grads):
        if torch.compiler.is_compiling():
            return _backward(ctx, *grads)
        _refuse_batches(grads)
        return _eager_backward(ctx, *grads)


def _backward(ctx, *grads):
    op = OPS[ctx.name]
    saved = ctx.saved_tensors  # raises where torch has freed them
    if ctx.freed:
        raise RuntimeError(_FREED)
    grads = materialized(ctx.output, grads[: op.outputs])
    scale = (ctx.bwd_scale,) if op.takes_scale else ()
    if ctx.held:
        saved = list(saved)
        for i, tensor in zip(unchecked_slots(ctx.name, ctx.config), ctx.held):
            saved[i] = tensor
    arguments = (*grads, *saved, *scale)
    if ctx.store is None:
        history = ctx.bwd_history if ctx.folds else None
        free = ctx.frees and not _graph_is_kept()
        ctx.freed = free
        results = _run(op.backward_op, op.backward, ctx.config, arguments, history, free)
    else:
        results = _put_off(ctx.store, op, ctx.config, arguments, ctx.fused, ctx.output[2])
    if ctx.fused is not None and ctx.store is None:
        results = list(results)
        accumulate_fused(ctx.fused, ctx.main_grads, results)
    if ctx.bwd_history is not None:
        amaxes = results[len(results) - op.amaxes :]
        finish_backward(ctx.bwd_history, ctx.bwd_scale, amaxes, ctx.slots, ctx.rule)
    grads = [None if i is None else results[i] for i in op.gradient_index]
    return (*(None,) * 10, *grads, *(None,) * len(ctx.main_grads))


def _nobody_else_sees(config: str) -> bool:
    """Whether nobody but backward can hold what the running forward pass makes for it.

    Dispatch modes are shown all tensors, hooks what is saved, and quantizers that users write what
    they quantize; any of them may keep it.
    """
    if through_dispatcher() or runs_user_code(config):
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _graph_is_kept() -> bool:
    """Whether the running backward pass has ``retain_graph=True``, or is compiled."""
    if torch.compiler.is_compiling():  # compiled autograd: its graph does not free
        return True
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _refuse_batches(grads) -> None:
    """``torch.autograd.grad(is_grads_batched=True)`` calls backward with tensors that have no
    memory.
    """
    if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in grads):
        raise RuntimeError(_NO_BATCHES)


def _put_off(store, op, config: str, arguments, fused, device):
    """Backward without the weight gradients, whose operands go to ``store``."""
    held = []
    leaves = SimpleNamespace(**vars(kernels()), put_off=lambda *operands: held.append(operands))
    results = outside_autocast(op.backward, leaves, decode_config(config), *arguments)
    if held:
        store(held)
    results = list(results)
    for weight in fused or ():
        shape = (sum(weight.rows), weight.columns)
        results[weight.position] = dummy_gradient(weight, shape, device)
    return results


# Second derivatives are refused instead of being computed with statistics held constant.
_eager_backward = first_order_only(_backward)


def _visible(op, outputs, want_norm_output: bool):
    """``(y[, ln_out], *amaxes)``: what leaves the function; the rest is for backward only."""
    amaxes = outputs[len(outputs) - op.amaxes :]
    if op.outputs == 1:
        return (outputs[0], *amaxes)
    return (outputs[0], outputs[1] if want_norm_output else None, *amaxes)


def _run(registered, function, config: str, tensors, history=None, free: bool = False):
    """One reading of a module function: the registered op where the dispatcher is watched.

    A ``history`` (fp32 [L, n]) belongs to the scales, the last of ``tensors``: its first row gets
    the amaxes, unless they are returned. ``free``: the function may free what forward kept.
    """
    if through_dispatcher() or not is_plain(tensors[0]) or tensors[0].is_meta:
        return registered(*tensors, config)
    if free:
        config += ";free=1"
    cfg = decode_config(config)
    if function_transform() or forward_mode():
        # Kernels of ours know no batched or dual tensors; plain torch does.
        with force_backend("reference"):
            return outside_autocast(function, EAGER, cfg, *tensors)
    if history is None:
        return outside_autocast(run_planned, function, config, (cfg,), tensors)
    if not isinstance(function, FunctionType):  # one that takes notes (diagnostics)
        return outside_autocast(_folding, EAGER, function, cfg, *tensors, history)
    how = (function, config), (function, cfg)
    return outside_autocast(run_planned, _folding, *how, (*tensors, history))


def _folding(k, function, cfg, *tensors):
    *rest, scale, history = tensors
    return function(k, cfg, *rest, ScaleAndHistory(scale, history))


NO_TRANSFORM = (
    "Forward-mode differentiation and torch.func transforms are not supported inside of"
    " te.autocast: quantization has no such derivative. Leave te.autocast for this call."
)
_NO_TRANSFORM_WITH_GRADIENTS = (
    "torch.func transforms (grad, vjp, jvp, vmap and what is made of them) have no rule for modules"
    " that record a graph for backward. For gradients use y.backward() or torch.autograd.grad"
    " instead of torch.func.grad and torch.func.vjp; for torch.func.vmap and torch.func.jvp freeze"
    " the module first: module.requires_grad_(False)."
)


def _refuse_transforms(config: str, train: bool) -> None:
    """Quantization has no derivative that torch could push forward or batch over, and
    ``ModuleFunction`` none that torch.func could differentiate.
    """
    if function_transform():
        if train:
            raise RuntimeError(_NO_TRANSFORM_WITH_GRADIENTS)
        if "x=" in config:
            raise RuntimeError(NO_TRANSFORM)
    elif not train and "x=" in config and forward_mode():
        raise RuntimeError(NO_TRANSFORM)


def _distinct(tensors, count: int) -> tuple:
    """``tensors``, of which the first ``count`` are distinct objects.

    Dynamo of torch 2.13 refuses a Function that is given a tensor twice, as when both weights of a
    LayerNormMLP are one parameter. A view is another object, whose gradient is added as well.
    """
    distinct: list = []
    for tensor in tensors[:count]:
        if tensor is not None and any(tensor is other for other in distinct):
            tensor = tensor.view_as(tensor)
        distinct.append(tensor)
    return (*distinct, *tensors[count:])


def run_module_op(
    name: str,
    config: str,
    bwd_state,
    tensors,
    *,
    train: bool,
    want: bool = False,
    fwd_history=None,
    fused=None,
    main_grads=(),
    store=None,
):
    """Run module op ``name`` on ``tensors``.

    ``bwd_state`` is ``(scale, history, slots, rule)`` of delayed scaling's backward direction, with
    ``rule`` None except for the first use in a region, or Nones. ``train``: some gradient is
    wanted; ``want``: return the norm output. ``fwd_history``: eager calls fold amaxes into it, and
    into the backward one, and return none. ``fused`` says how weight gradients are added to
    ``main_grads``; ``store`` takes the operands of weight gradients that are put off. Returns
    ``(y[, ln_out], *amaxes)``; an amax is None unless delayed scaling records it.
    """
    _refuse_transforms(config, train)
    # An exported program holds the op itself, which has its own autograd: export would lose that of
    # a Function (strict), or trace what it saves.
    if train and not is_exporting():
        if torch.compiler.is_compiling():
            tensors = _distinct(tensors, len(OPS[name].gradients))
        return ModuleFunction.apply(
            name, config, want, fwd_history, *bwd_state, fused, store, *tensors, *main_grads
        )
    # Otherwise nothing needs a gradient: no autograd node, nothing kept.
    op = OPS[name]
    return _visible(op, _run(op.forward_op, op.forward, config, tensors, fwd_history), want)
