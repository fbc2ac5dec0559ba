# SPDX-License-Identifier: Apache-2.0
"""What leaf ops answer to a compiler: shapes, dtypes, devices, presence of each output.

These are the only shape-only functions of the package. Module ops have none: their fake is the
module function itself, run on fake tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.ops import GRAPH, LIBRARY
from ..formats.activations import activation_width
from ..formats.layout import NOTHING, Quantized, quantized_layout
from ..formats.spec import decode_quant


def _new(like: Tensor, shape, dtype: torch.dtype) -> Tensor:
    """A fresh contiguous tensor on the device of ``like``."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def fake_quantized(
    like: Tensor, rows, columns, quant: str, rowwise: bool, columnwise: bool
) -> Quantized:
    """The buffers of a quantized ``[rows, columns]`` tensor; Nones without ``quant``."""
    spec = decode_quant(quant)
    if spec is None:
        return NOTHING
    layout = quantized_layout(spec, rows, columns, rowwise, columnwise)
    dtypes = (torch.uint8, torch.uint8, *(layout.scale_dtype,) * 2, *(torch.float32,) * 2)
    return Quantized(
        *(
            None if shape is None else _new(like, shape, dtype)
            for shape, dtype in zip(layout, dtypes)
        )
    )


def fake_norm(x, kind: str, quant: str, rowwise: bool, columnwise: bool, want_output: bool):
    """``(output, mean, rstd, *Quantized)`` of a norm over the rows of ``x [M, K]``.

    Mean and rstd are fp32, one value per row, on the device of ``x``; RMSNorm has no mean. Shared
    by every module that contains a norm.
    """
    rows, columns = x.shape
    output = _new(x, (rows, columns), x.dtype) if want_output or not quant else None
    mean = _new(x, (rows,), torch.float32) if kind == "LayerNorm" else None
    rstd = _new(x, (rows,), torch.float32)
    return (
        output,
        mean,
        rstd,
        *fake_quantized(x, rows, columns, quant, rowwise, columnwise),
    )


def _quantize(x, quant, scale, slot, amax, rowwise, columnwise, rng):
    return fake_quantized(x, x.shape[0], x.shape[1], quant, rowwise, columnwise)


def _dequantize(data, scale_inv, amax, quant, columnwise, dtype):
    packed = 2 if decode_quant(quant).kind == "nvfp4" else 1
    return _new(data, (data.shape[0], data.shape[1] * packed), getattr(torch, dtype))


def _norm_forward(
    x,
    weight,
    bias,
    eps,
    zero_centered,
    kind,
    quant,
    scale,
    slot,
    rowwise,
    columnwise,
    want_output,
):
    return fake_norm(x, kind, quant, rowwise, columnwise, want_output)


def _norm_backward(dy, dy2, x, mean, rstd, weight, zero_centered, kind, need_dx, need_dweight):
    return (
        _new(x, x.shape, x.dtype) if need_dx else None,
        _new(weight, weight.shape, weight.dtype) if need_dweight else None,
        (
            _new(weight, weight.shape, weight.dtype)
            if need_dweight and kind == "LayerNorm"
            else None
        ),
    )


def _activation_forward(
    x, act, limit, alpha, offset, quant, scale, slot, rowwise, columnwise, want_output
):
    rows, columns = x.shape[0], activation_width(act, x.shape[1])
    output = _new(x, (rows, columns), x.dtype) if want_output or not quant else None
    return (output, *fake_quantized(x, rows, columns, quant, rowwise, columnwise))


def _activation_backward(
    dy,
    x,
    act,
    limit,
    alpha,
    offset,
    quant,
    scale,
    slot,
    rowwise,
    columnwise,
    want_output,
    want_bias_grad,
    rng,
):
    rows, columns = x.shape
    return (
        _new(x, (rows, columns), x.dtype) if want_output or not quant else None,
        *fake_quantized(x, rows, columns, quant, rowwise, columnwise),
        _new(x, (columns,), x.dtype) if want_bias_grad else None,
    )


def _bias_grad(dy):
    return _new(dy, (dy.shape[1],), dy.dtype)


def _gemm(
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
    rows = a.shape[1] if layout == "NT" else a.shape[0]
    columns = b.shape[0] if layout == "TN" else b.shape[1]
    return _new(a, (rows, columns), getattr(torch, out_dtype))


def _rng_state(like, previous=None, number=0):
    return _new(like, (2,), torch.int64)


def _after(x, other):
    return _new(x, x.shape, x.dtype)


def _rounded(x, dtype):
    return _new(x, x.shape, x.dtype)


def _nothing(*_):
    return None


FAKES = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "norm_forward": _norm_forward,
    "norm_backward": _norm_backward,
    "activation_forward": _activation_forward,
    "activation_backward": _activation_backward,
    "bias_grad": _bias_grad,
    "gemm": _gemm,
    "rng_state": _rng_state,
    "after": _after,
    "rounded": _rounded,
    "accumulate_": _nothing,
    "requantize_": _nothing,
    "record_amax_": _nothing,
    "delayed_scaling_update_": _nothing,
    "record_and_update_": _nothing,
}

for _leaf in vars(GRAPH):
    torch.library.register_fake(f"transformer_engine::{_leaf}", FAKES[_leaf], lib=LIBRARY)
