# SPDX-License-Identifier: Apache-2.0
"""Leaf ops: the only places that know about devices.

Each leaf has one Python signature, several backends (``backends/``) and one ``torch.library`` op.
``EAGER`` runs a backend directly, without the dispatcher; ``GRAPH`` calls the registered op, which
is what a compiler records. Module code receives one of the two as its first argument ``k`` and is
otherwise the same code (see ``dynamo/custom_op.py``).
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
from torch import Tensor

from ..backends.registry import Request, select

LIBRARY = torch.library.Library("transformer_engine", "DEF")

_QUANTIZED = "Tensor? row, Tensor? col, Tensor? scale_inv, Tensor? amax"
_QUANTIZE_ARGS = "str quant, Tensor? scale, int slot"
_ACTIVATION_ARGS = f"str act, float limit, float alpha, float offset, {_QUANTIZE_ARGS}"

SCHEMAS = {
    "quantize": f"(Tensor x, {_QUANTIZE_ARGS}, Tensor? amax, bool rowwise, bool columnwise)"
    " -> (Tensor? row, Tensor? col, Tensor scale_inv, Tensor amax_out)",
    "dequantize": "(Tensor data, Tensor scale_inv, str quant, ScalarType dtype) -> Tensor",
    "norm_forward": "(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered,"
    f" str kind, {_QUANTIZE_ARGS}, bool rowwise, bool columnwise, bool want_output)"
    f" -> (Tensor? y, Tensor? mean, Tensor rstd, {_QUANTIZED})",
    "norm_backward": "(Tensor? dy, Tensor? dy2, Tensor x, Tensor? mean, Tensor rstd, Tensor weight,"
    " bool zero_centered, str kind, bool need_dx, bool need_dweight)"
    " -> (Tensor? dx, Tensor? dweight, Tensor? dbias)",
    "activation_forward": f"(Tensor x, {_ACTIVATION_ARGS}, bool rowwise, bool columnwise,"
    f" bool want_output) -> (Tensor? y, {_QUANTIZED})",
    "activation_backward": f"(Tensor dy, Tensor x, {_ACTIVATION_ARGS}, bool rowwise,"
    " bool columnwise, bool want_output, bool want_bias_grad)"
    f" -> (Tensor? dx, {_QUANTIZED}, Tensor? dbias)",
    "bias_grad": "(Tensor dy) -> Tensor",
    "gemm": "(Tensor a, Tensor b, Tensor? bias, Tensor? a_scale_inv, Tensor? b_scale_inv,"
    " str a_quant, str b_quant, str layout, ScalarType out_dtype, bool fast_accum) -> Tensor",
    "record_amax_": "(Tensor(a!) history, Tensor[] amaxes, int[] slots) -> ()",
    "delayed_scaling_update_": "(Tensor(a!) history, Tensor(b!) scale, float fp8_max,"
    " float margin, str algo) -> ()",
}


def quantize(x, quant, scale, slot, amax, rowwise, columnwise):
    """Quantize ``x [M, K]``; see the backends for the numbers."""
    run = select(Request("quantize", x.device, x.dtype, quant)).run
    return run(x, quant, scale, slot, amax, rowwise, columnwise)


def dequantize(data, scale_inv, quant, dtype):
    """High-precision values of quantized ``data``."""
    run = select(Request("dequantize", data.device, data.dtype, quant)).run
    return run(data, scale_inv, quant, dtype)


def norm_forward(x, *args):
    """LayerNorm or RMSNorm of the rows of ``x``, optionally quantized."""
    return select(Request("norm_forward", x.device, x.dtype, args[5])).run(x, *args)


def norm_backward(dy, dy2, x, *args):
    """Gradients of ``norm_forward``."""
    return select(Request("norm_backward", x.device, x.dtype)).run(dy, dy2, x, *args)


def activation_forward(x, *args):
    """Activation of ``x``, gated or not, optionally quantized."""
    return select(Request("activation_forward", x.device, x.dtype, args[4])).run(x, *args)


def activation_backward(dy, x, *args):
    """Gradient of ``activation_forward`` with respect to ``x``, optionally quantized."""
    return select(Request("activation_backward", x.device, x.dtype, args[4])).run(dy, x, *args)


def bias_grad(dy):
    """Sum of ``dy`` over its rows."""
    return select(Request("bias_grad", dy.device, dy.dtype)).run(dy)


def gemm(a, b, bias, a_scale_inv, b_scale_inv, a_quant, b_quant, layout, out_dtype, fast_accum):
    """Matrix product in one of the layouts TN, NN, NT."""
    aligned = True
    if a_quant:
        # Only feature dimensions count: a row count must never choose the kernel. An operand whose
        # contracted dimension is the (padded) row count is aligned by construction.
        aligned = a.shape[1] % 16 == 0 and b.shape[0] % 16 == 0 and a.shape[1] == b.shape[1]
    request = Request("gemm", a.device, out_dtype, a_quant, aligned)
    return select(request).run(
        a, b, bias, a_scale_inv, b_scale_inv, a_quant, b_quant, layout, out_dtype, fast_accum
    )


def record_amax_(history, amaxes, slots):
    """Fold ``amaxes`` into row 0 of ``history``."""
    select(Request("record_amax_", history.device, history.dtype)).run(history, amaxes, slots)


def delayed_scaling_update_(history, scale, fp8_max, margin, algo):
    """Roll ``history`` and renew ``scale``, in place."""
    request = Request("delayed_scaling_update_", history.device, history.dtype)
    select(request).run(history, scale, fp8_max, margin, algo)


EAGER = SimpleNamespace(
    quantize=quantize,
    dequantize=dequantize,
    norm_forward=norm_forward,
    norm_backward=norm_backward,
    activation_forward=activation_forward,
    activation_backward=activation_backward,
    bias_grad=bias_grad,
    gemm=gemm,
    record_amax_=record_amax_,
    delayed_scaling_update_=delayed_scaling_update_,
)


def outside_autocast(run, *args):
    """``run(*args)`` where ``torch.autocast`` can not cast: every leaf states its dtypes."""
    if not torch._C._is_any_autocast_enabled():
        return run(*args)
    with torch._C._DisableAutocast():
        return run(*args)


def below_autograd(run, *args):
    """``run(*args)`` as the body of a registered op: no autograd, no ambient autocast."""
    with torch._C._AutoDispatchBelowAutograd():
        return outside_autocast(run, *args)


for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(
        _name,
        functools.partial(below_autograd, getattr(EAGER, _name)),
        "CompositeExplicitAutograd",
    )

GRAPH = SimpleNamespace(
    **{name: getattr(torch.ops.transformer_engine, name).default for name in SCHEMAS}
)


def through_dispatcher() -> bool:
    """Whether something watches torch's dispatcher, so that registered ops must be called."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def kernels() -> SimpleNamespace:
    """``GRAPH`` while a compiler or a dispatch mode is watching, ``EAGER`` otherwise."""
    return GRAPH if through_dispatcher() else EAGER


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor, not a subclass a kernel could not read."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)
