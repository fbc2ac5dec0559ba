# SPDX-License-Identifier: Apache-2.0
"""Registers a module op from its forward and its backward function.

One implementation, three readings:

* eager: ``ModuleFunction`` (``module_function.py``) calls the functions with the backends, no
  dispatcher between;
* fake: the registered fake is the same function, run on fake tensors, whose leaf ops answer with
  shapes;
* compiled: Dynamo records ``torch.ops.transformer_engine.<module>``, and Inductor calls it: one
  dispatcher call, whose body is that of eager. Where leaf ops are wanted (exports, draws of
  stochastic rounding, see `stays_whole`), AOTAutograd's functionalization replaces the op by them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Callable, Optional

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ..core import module_ops
from ..core.config import ModuleConfig, decode_config
from ..environment import constant_in_graphs
from ..core.ops import LIBRARY, below_autograd, recorded_leaves
from ..core.plans import run_planned
from ..quantized_tensor import QuantizedTensor
from . import draws, fake  # noqa: F401  # pylint: disable=unused-import  # what leaf ops register

_MANY_BYTES = 2**27  # where the host's time for leaf ops is short beside the device's
_GEMM_WEIGHTS = ("weight", "fc1_weight", "fc2_weight")


@dataclass(frozen=True, eq=False)
class ModuleOp:
    """A module's op pair.

    ``outputs``: number of leading forward outputs that users see and that are differentiable;
    ``amaxes``: number of trailing forward (and backward) outputs that delayed scaling records;
    ``gradients``: names of the inputs that have a gradient, in the order backward returns them.
    """

    forward_op: Callable
    backward_op: Callable
    forward: Callable
    backward: Callable
    save: Callable
    inputs: tuple
    gradients: tuple
    outputs: int
    amaxes: int
    forward_results: int
    takes_scale: bool  # of delayed scaling
    gradient_index: tuple  # per input the position of its gradient in backward's results, or None
    weight_positions: tuple  # positions of the GEMM weights' gradients in backward's results


def _registered(name: str, function: Callable, arguments: str, results: str) -> Callable:
    """Define one op whose every reading is ``function(k, config, *tensors)``."""
    schema = f"({arguments}, str config) -> ({results})"
    backward = name.endswith("_backward")

    def run(*args):
        config = args[-1]
        return below_autograd(run_planned, function, config, (decode_config(config),), args[:-1])

    def trace(*args):
        return function(recorded_leaves(), decode_config(args[-1]), *args[:-1])

    def functionalize(mode, func, types, args, kwargs):
        if stays_whole(name, *args):
            return mode.__torch_dispatch__(func if backward else packet.whole, types, args, kwargs)
        with mode:
            return trace(*args, **(kwargs or {}))

    # Compiled code calls an overload without a rule for autograd: the rule, which it does not need,
    # takes as long as the call itself.
    for overload in (name,) if backward else (name, f"{name}.whole"):
        LIBRARY.define(overload + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(overload, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"transformer_engine::{overload}", trace, lib=LIBRARY)
    torch.library.register_torch_dispatch(
        f"transformer_engine::{name}", FunctionalTensorMode, functionalize, lib=LIBRARY
    )
    packet = getattr(torch.ops.transformer_engine, name)
    return packet.default


def stays_whole(name: str, *args) -> bool:
    """Whether AOTAutograd leaves a module op as it is, instead of replacing it by its leaf ops.

    Only ``torch.compile`` does: what it compiles it runs here, where the op is one call instead of
    fifteen, and Inductor can do nothing with leaf ops but call them. AOTInductor's C++ code,
    ``run_decompositions`` and ONNX want leaf ops. So does every compiler where numbers are drawn
    for stochastic rounding: compilers merge and reorder what looks pure, so they have to see the
    draws (``draws.py``). And of a large LayerNormMLP the graph shows in backward when an activation
    has been used for the last time, so that its memory serves again; one call would hold them all.
    """
    from torch._inductor.virtualized import V  # pylint: disable=import-outside-toplevel

    if CompileContext.current_compile_id() is None or V.aot_compilation:
        return False
    backward = name.endswith("_backward")
    if name == "layernorm_mlp_backward" and _bytes(args[:-1]) > _MANY_BYTES:
        return False
    return not _draws(decode_config(args[-1]), backward)


def _bytes(tensors) -> int:
    """What tensors take at the sizes of the call that is traced; no graph is guarded by it."""
    total = 0
    for tensor in tensors:
        if tensor is not None:
            size = tensor.numel()
            hint = size if isinstance(size, int) else size.node.hint
            total += (hint or 0) * tensor.element_size()
    return total


def _draws(cfg: ModuleConfig, backward: bool) -> bool:
    """Whether an operand of the direction is rounded stochastically (weights are made before)."""
    operands = [gemm.x for gemm in cfg.gemms]  # in backward again with ``save_input``
    operands += [gemm.g for gemm in cfg.gemms if backward and not gemm.override]
    return any("stochastic" in operand.row + operand.col for operand in operands)


def _optional(names: str, required: tuple = ()) -> str:
    """Schema arguments: ``Tensor? name`` for each name, ``Tensor name`` for required ones."""
    return ", ".join(f"Tensor{'' if n in required else '?'} {n}" for n in names.split())


def _module_op(
    name: str, inputs: str, results: str, saved: str, gradients: str, *, outputs: int, amaxes: int
) -> ModuleOp:
    """Register ``name`` and ``name_backward`` from ``core/module_ops.py``."""
    forward = getattr(module_ops, f"{name}_forward")
    backward = getattr(module_ops, f"{name}_backward")
    save = getattr(module_ops, f"{name}_save")
    required = tuple(n for n in inputs.split() if n == "x" or n.endswith("weight"))
    grads = "dy" if outputs == 1 else "dy d_ln_out"
    amax_names = " ".join(f"amax{i}" for i in range(amaxes))
    scale = " bwd_scale" if "fwd_scale" in inputs else ""
    position = {n: i for i, n in enumerate(gradients.split())}
    op = ModuleOp(
        forward_op=_registered(
            name, forward, _optional(inputs, required), _optional(f"{results} {amax_names}", ("y",))
        ),
        backward_op=_registered(
            f"{name}_backward",
            backward,
            _optional(f"{grads} {saved}{scale}", ("dy",)),
            _optional(" ".join(f"grad_{n}" for n in gradients.split()) + f" {amax_names}"),
        ),
        forward=forward,
        backward=backward,
        save=save,
        inputs=tuple(inputs.split()),
        gradients=tuple(gradients.split()),
        outputs=outputs,
        amaxes=amaxes,
        takes_scale=bool(scale),
        forward_results=len(results.split()) + amaxes,
        gradient_index=tuple(position.get(n) for n in inputs.split()),
        weight_positions=tuple(position[n] for n in _GEMM_WEIGHTS if n in position),
    )
    _register_autograd(name, op)
    return op


def _register_autograd(name: str, op: ModuleOp) -> None:
    """Autograd of the op itself, for callers outside of ``ModuleFunction`` (``torch.export``)."""
    scale_input = op.inputs.index("fwd_scale") if op.takes_scale else None

    def setup_context(ctx, inputs, output):
        *tensors, config = inputs
        ctx.set_materialize_grads(False)
        ctx.config = config
        ctx.output = (output[0].shape, output[0].dtype, output[0].device)
        # Of a call that was told to keep nothing for backward, nothing is differentiable.
        fixed = output[op.outputs if decode_config(config).need else 0 :]
        ctx.mark_non_differentiable(*(t for t in fixed if t is not None))
        # Without a module there is no backward scale: delayed scaling then quantizes with ones.
        scale = None if scale_input is None else tensors[scale_input]
        scale = None if scale is None else torch.ones_like(scale)
        ctx.bwd_scale = (scale,) if op.takes_scale else ()
        ctx.save_for_backward(*saved_tensors(save_plan(name, config), tensors, output))

    def backward(ctx, *grads):
        grads = materialized(ctx.output, grads[: op.outputs])
        results = op.backward_op(*grads, *ctx.saved_tensors, *ctx.bwd_scale, ctx.config)
        return (*(None if i is None else results[i] for i in op.gradient_index), None)

    torch.library.register_autograd(
        f"transformer_engine::{name}", backward, setup_context=setup_context, lib=LIBRARY
    )


def materialized(output, grads) -> list[Optional[Tensor]]:
    """Contiguous plain gradients; a missing gradient of the GEMM output is zeros."""
    grads = [g.dequantize() if isinstance(g, QuantizedTensor) else g for g in grads]
    first = grads[0]
    if first is None:
        shape, dtype, device = output
        first = torch.zeros(shape, dtype=dtype, device=device)
    return [first.contiguous(), *(None if g is None else g.contiguous() for g in grads[1:])]


@constant_in_graphs
def save_plan(name: str, config: str) -> tuple:
    """Which tensors backward needs: ``("in" | "out", index)`` for each slot, None if absent.

    Dynamo calls this once while tracing and takes the result for a constant, so that no
    configuration is decoded in traced code.
    """
    return _save_plan(name, config)


@functools.lru_cache(maxsize=None)
def _save_plan(name: str, config: str) -> tuple:
    op = OPS[name]
    # ``save`` only selects: run it on markers in place of tensors.
    inputs = [("in", i) for i in range(len(op.inputs))]
    outputs = [("out", i) for i in range(op.forward_results)]
    return tuple(op.save(decode_config(config), inputs, outputs))


@constant_in_graphs
def unchecked_slots(name: str, config: str) -> tuple:
    """Slots of `save_plan` that hold buffers of a weight, which a CUDA graph rewrites in place."""
    inputs = OPS[name].inputs
    weights = {i for i, given in enumerate(inputs) if given.split("_")[0] in ("w", "w1", "w2")}
    plan = _save_plan(name, config)
    return tuple(
        i for i, slot in enumerate(plan) if slot and slot[0] == "in" and slot[1] in weights
    )


def saved_tensors(plan: tuple, inputs, outputs) -> list[Optional[Tensor]]:
    """The tensors that ``plan`` names."""
    sources = {"in": inputs, "out": outputs}
    return [None if slot is None else sources[slot[0]][slot[1]] for slot in plan]


# The buffers of a weight, in the order of ``Quantized``, and what backward keeps of an operand.
_BUFFERS = "{0}_row {0}_col {0}_scale_inv {0}_col_scale_inv {0}_amax {0}_col_amax"
_KEPT = "{0}_data {0}_scale_inv {0}_amax"

OPS = {
    "normalization": _module_op(
        "normalization",
        "x ln_weight ln_bias",
        "y mean rstd",
        "x ln_weight mean rstd",
        "x ln_weight ln_bias",
        outputs=1,
        amaxes=0,
    ),
    "linear": _module_op(
        "linear",
        f"x weight bias {_BUFFERS.format('w')} fwd_scale",
        f"y {_KEPT.format('x')}",
        f"x {_KEPT.format('x')} weight {_KEPT.format('w')}",
        "x weight bias",
        outputs=1,
        amaxes=1,
    ),
    "layernorm_linear": _module_op(
        "layernorm_linear",
        f"x ln_weight ln_bias weight bias {_BUFFERS.format('w')} fwd_scale",
        f"y ln_out mean rstd {_KEPT.format('x')}",
        f"x ln_weight mean rstd ln_out {_KEPT.format('x')} weight {_KEPT.format('w')}",
        "x ln_weight ln_bias weight bias",
        outputs=2,
        amaxes=1,
    ),
    "layernorm_mlp": _module_op(
        "layernorm_mlp",
        "x ln_weight ln_bias fc1_weight fc1_bias fc2_weight fc2_bias"
        f" {_BUFFERS.format('w1')} {_BUFFERS.format('w2')} fwd_scale",
        f"y ln_out mean rstd {_KEPT.format('x')} h a {_KEPT.format('a')} draws",
        f"x ln_weight mean rstd ln_out {_KEPT.format('x')} h a {_KEPT.format('a')}"
        f" fc1_weight {_KEPT.format('w1')} fc2_weight {_KEPT.format('w2')}"
        " ln_bias fc1_bias w1_row w1_row_scale_inv w1_row_amax fwd_scale draws",
        "x ln_weight ln_bias fc1_weight fc1_bias fc2_weight fc2_bias",
        outputs=2,
        amaxes=2,
    ),
}
