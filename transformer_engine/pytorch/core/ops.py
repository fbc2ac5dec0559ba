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

_QUANTIZED = (
    "Tensor? row, Tensor? col, Tensor? scale_inv, Tensor? col_scale_inv, Tensor? amax,"
    " Tensor? col_amax"
)
_QUANTIZE_ARGS = "str quant, Tensor? scale, int slot"
_ACTIVATION_ARGS = f"str act, float limit, float alpha, float offset, {_QUANTIZE_ARGS}"

SCHEMAS = {
    "quantize": f"(Tensor x, {_QUANTIZE_ARGS}, Tensor? amax, bool rowwise, bool columnwise,"
    f" Tensor? rng) -> ({_QUANTIZED.replace(' amax', ' amax_out')})",
    "dequantize": "(Tensor data, Tensor scale_inv, Tensor? amax, str quant, bool columnwise,"
    " str dtype) -> Tensor",
    "norm_forward": "(Tensor x, Tensor weight, Tensor? bias, float eps, bool zero_centered,"
    f" str kind, {_QUANTIZE_ARGS}, bool rowwise, bool columnwise, bool want_output)"
    f" -> (Tensor? y, Tensor? mean, Tensor rstd, {_QUANTIZED})",
    "norm_backward": "(Tensor? dy, Tensor? dy2, Tensor x, Tensor? mean, Tensor rstd, Tensor weight,"
    " bool zero_centered, str kind, bool need_dx, bool need_dweight)"
    " -> (Tensor? dx, Tensor? dweight, Tensor? dbias)",
    "activation_forward": f"(Tensor x, {_ACTIVATION_ARGS}, bool rowwise, bool columnwise,"
    f" bool want_output) -> (Tensor? y, {_QUANTIZED})",
    "activation_backward": f"(Tensor dy, Tensor x, {_ACTIVATION_ARGS}, bool rowwise,"
    " bool columnwise, bool want_output, bool want_bias_grad, Tensor? rng)"
    f" -> (Tensor? dx, {_QUANTIZED}, Tensor? dbias)",
    "bias_grad": "(Tensor dy) -> Tensor",
    "gemm": "(Tensor a, Tensor b, Tensor? bias, Tensor? a_scale_inv, Tensor? b_scale_inv,"
    " Tensor? a_amax, Tensor? b_amax, str a_quant, str b_quant, str layout, str out_dtype,"
    " bool fast_accum) -> Tensor",
    "rng_state": "(Tensor like, Tensor? previous=None, int number=0) -> Tensor",
    "after": "(Tensor x, Tensor other) -> Tensor",
    "rounded": "(Tensor x, str dtype) -> Tensor",
    "accumulate_": "(Tensor(a!) total, Tensor part, bool add) -> ()",
    "requantize_": "(Tensor x, str quant, Tensor? scale, int slot, Tensor? rng, Tensor keep,"
    " Tensor(a!)? row, Tensor(b!)? col, Tensor(c!)? scale_inv, Tensor(d!)? col_scale_inv,"
    " Tensor(e!)? amax, Tensor(f!)? col_amax, Tensor(g!)? taken) -> ()",
    "record_amax_": "(Tensor(a!) history, Tensor[] amaxes, int[] slots) -> ()",
    "delayed_scaling_update_": "(Tensor(a!) history, Tensor(b!) scale, float fp8_max,"
    " float margin, str algo) -> ()",
    "record_and_update_": "(Tensor(a!) history, Tensor(b!) scale, Tensor[] amaxes, int[] slots,"
    " float fp8_max, float margin, str algo) -> ()",
}

# Leaf ops that compiled graphs call often enough for a plan: ``plans.py`` registers their bodies.
PLANNED = (
    "quantize",
    "norm_forward",
    "norm_backward",
    "activation_forward",
    "activation_backward",
    "bias_grad",
    "record_amax_",
    "delayed_scaling_update_",
    "record_and_update_",
)


def quantize(x, quant, *args):
    """Quantize ``x [M, K]`` to a ``Quantized``; see the backends for the numbers."""
    return select(Request("quantize", x.device, x.dtype, quant)).run(x, quant, *args)


def dequantize(data, scale_inv, amax, quant, columnwise, dtype):
    """High-precision values of quantized ``data``, in the orientation of ``data``.

    ``columnwise`` says that ``data`` is a columnwise buffer. Where such buffers are transposed (all
    kinds but MXFP8) it is also the rowwise buffer of the transposed tensor.
    """
    run = select(Request("dequantize", data.device, data.dtype, quant)).run
    return run(data, scale_inv, amax, quant, columnwise, dtype)


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


def gemm(
    a,
    b,
    bias,
    a_scale_inv,
    b_scale_inv,
    a_amax,
    b_amax,
    a_quant,
    b_quant,
    layout,
    out_dtype,
    fast_accum,
):
    """Matrix product in one of the layouts TN, NN, NT; see ``backends/cublas.py``."""
    return gemm_backend(a, b, a_quant, b_quant, layout, out_dtype)(
        a,
        b,
        bias,
        a_scale_inv,
        b_scale_inv,
        a_amax,
        b_amax,
        a_quant,
        b_quant,
        layout,
        out_dtype,
        fast_accum,
    )


def gemm_backend(a, b, a_quant, b_quant, layout, out_dtype):
    """The function that multiplies these operands."""
    alignment = gemm_alignment(a, b, a_quant, layout)
    return select(Request("gemm", a.device, out_dtype, a_quant, b_quant, alignment)).run


def gemm_alignment(a, b, quant, layout) -> int:
    """Largest of 128, 32, 16 and 1 that divides every feature dimension of a quantized GEMM.

    Only feature dimensions count: a row count must never choose the kernel. An operand whose
    contracted dimension is the row count is padded to what the format wants.
    """
    if not quant:
        return 1
    packed = 2 if quant.startswith("nvfp4") else 1
    sizes = {"TN": (a.shape[1] * packed, b.shape[0]), "NN": (a.shape[1], b.shape[1])}
    features = sizes.get(layout, (a.shape[1], b.shape[1]))
    if layout == "TN" and a.shape[1] != b.shape[1]:
        return 1  # one operand is padded
    for multiple in (128, 32, 16):
        if features[0] % multiple == 0 and features[1] % multiple == 0:
            return multiple
    return 1


def rng_state(like, previous=None, number=0):
    """``(seed, offset)``, int64 [2], of a stochastic rounding, drawn from torch's generator.

    ``like`` is the tensor to be rounded: it gives the device, and lets a compiler see when the draw
    can happen. The other arguments are not for callers, and no numbers depend on them: they keep
    the draws of a graph apart and in order, and tracing fills them in (``dynamo/draws.py``).
    """
    del previous, number
    return torch.randint(0, 1 << 62, (2,), dtype=torch.int64, device=like.device)


def accumulate_(total, part, add):
    """Add ``part`` to ``total``, or write it there."""
    select(Request("accumulate_", total.device, total.dtype)).run(total, part, add)


def after(x, other):
    """A copy of ``x`` that can not exist before ``other``, and that no compiler drops.

    What is computed from it is neither merged with what was computed from ``x`` nor moved before
    ``other``: recomputation stays recomputation.
    """
    del other
    return x.clone()


def requantize_(
    x, quant, scale, slot, rng, keep, row, col, scale_inv, col_scale_inv, amax, col_amax, taken
):
    """Write ``x`` into the buffers of a quantized tensor, unless ``keep`` (fp32 [1]) is 1.

    Of the layouts whose buffer is given. ``taken`` (fp32 [1]) gets the amax of ``x``, or 0 where
    nothing is written. Written past autograd: whoever kept the buffers for a backward pass wants
    them as they are then.
    """
    new = quantize(x, quant, scale, slot, None, row is not None, col is not None, rng)
    kept = keep.view(1) == 1.0
    buffers = (row, col, scale_inv, col_scale_inv, amax, col_amax)
    for buffer, values in zip(buffers, new):
        if buffer is not None and values is not None:
            buffer.data.copy_(torch.where(kept, buffer, values))
    if taken is not None and new[4] is not None:
        taken.data.copy_(torch.where(kept, 0.0, new[4]))


def rounded(x, dtype):
    """A copy of ``x``, of its dtype, whose values were rounded to that of the name ``dtype``.

    An op of its own, because compilers drop a cast there and back.
    """
    y = x.to(getattr(torch, dtype)).to(x.dtype)
    return x.clone() if y is x else y


def release(*tensors):
    """Free the memory of ``tensors``, although others refer to them: the backward node, frames.

    Only eager backward passes do so (``cfg.free``), with tensors that nobody else can see.
    Compiled graphs know when a tensor is used for the last time.
    """
    for tensor in tensors:
        if tensor is not None:
            tensor.untyped_storage().resize_(0)


def record_amax_(history, amaxes, slots):
    """Fold ``amaxes`` into row 0 of ``history``."""
    select(Request("record_amax_", history.device, history.dtype)).run(history, amaxes, slots)


def delayed_scaling_update_(history, scale, fp8_max, margin, algo):
    """Roll ``history`` and renew ``scale``, in place."""
    request = Request("delayed_scaling_update_", history.device, history.dtype)
    select(request).run(history, scale, fp8_max, margin, algo)


def record_and_update_(history, scale, amaxes, slots, fp8_max, margin, algo):
    """``record_amax_`` and ``delayed_scaling_update_``, one call of a compiled graph."""
    record_amax_(history, amaxes, slots)
    delayed_scaling_update_(history, scale, fp8_max, margin, algo)


EAGER = SimpleNamespace(
    quantize=quantize,
    dequantize=dequantize,
    norm_forward=norm_forward,
    norm_backward=norm_backward,
    activation_forward=activation_forward,
    activation_backward=activation_backward,
    bias_grad=bias_grad,
    gemm=gemm,
    rng_state=rng_state,
    after=after,
    rounded=rounded,
    accumulate_=accumulate_,
    requantize_=requantize_,
    release=release,
    record_amax_=record_amax_,
    delayed_scaling_update_=delayed_scaling_update_,
    record_and_update_=record_and_update_,
)


def outside_autocast(run, *args):
    """``run(*args)`` where ``torch.autocast`` can not cast: every leaf states its dtypes."""
    if not torch._C._is_any_autocast_enabled():
        return run(*args)
    with torch._C._DisableAutocast():
        return run(*args)


def below_autograd(run, *args):
    """``run(*args)`` as the body of a registered op: no autograd, no ambient autocast.

    Raises RuntimeError in forward-mode differentiation: torch calls the body without the tangents,
    and takes the results for constants.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode differentiation (torch.func.jvp) has no rule for this package's ops in a"
            " compiled or exported program. Use y.backward() or torch.autograd.grad."
        )
    with torch._C._AutoDispatchBelowAutograd():
        return outside_autocast(run, *args)


# A dtype crosses the dispatcher by its name, because AOTInductor of torch 2.11 hands the wrong
# ScalarType to custom ops (it takes the number of the exported file for that of C++).


def _dequantize_by_name(*args):
    return dequantize(*args[:-1], getattr(torch, args[-1]))


def _gemm_by_name(*args):
    return gemm(*args[:10], getattr(torch, args[10]), args[11])


def _dequantize_op(*args):
    name = str(args[-1])[6:]  # without "torch."
    return torch.ops.transformer_engine.dequantize.default(*args[:-1], name)


def _gemm_op(*args):
    name = str(args[10])[6:]
    return torch.ops.transformer_engine.gemm.default(*args[:10], name, args[11])


_BODIES = {**vars(EAGER), "dequantize": _dequantize_by_name, "gemm": _gemm_by_name}


for _name, _schema in SCHEMAS.items():
    _tags = (torch.Tag.pt2_compliant_tag,)
    if _name == "rng_state":
        _tags += (torch.Tag.nondeterministic_seeded,)
    LIBRARY.define(_name + _schema, tags=_tags)
    if _name not in PLANNED:
        _body = functools.partial(below_autograd, _BODIES[_name])
        LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")

GRAPH = SimpleNamespace(
    **{name: getattr(torch.ops.transformer_engine, name).default for name in SCHEMAS}
)
GRAPH.dequantize, GRAPH.gemm = _dequantize_op, _gemm_op


_recorded = GRAPH  # the leaves of which graphs consist


def recorded_leaves() -> SimpleNamespace:
    """The leaves of which graphs consist: ``GRAPH``, but for exports to other formats."""
    return _recorded


def record_leaves(leaves: SimpleNamespace) -> None:
    """Let graphs consist of ``leaves``, which may be functions of ops that the exporter knows."""
    global _recorded  # pylint: disable=global-statement
    _recorded = leaves


def through_dispatcher() -> bool:
    """Whether something watches torch's dispatcher, so that registered ops must be called."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def kernels() -> SimpleNamespace:
    """``GRAPH`` while a compiler or a dispatch mode is watching, ``EAGER`` otherwise."""
    return _recorded if through_dispatcher() else EAGER


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` is an ordinary tensor, not a subclass a kernel could not read."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)
