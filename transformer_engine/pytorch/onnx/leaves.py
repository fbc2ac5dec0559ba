# SPDX-License-Identifier: Apache-2.0
"""The leaf ops of a forward pass, written with operators that ONNX exporters know.

Arguments and results are those of ``core/ops.py``, but for the buffers of quantized tensors, which
are those of ``quantization.py``. Norms and activations are the reference bodies. A GEMM multiplies
dequantized operands in fp32; without quantization it multiplies in the dtype of the operands.
"""

from __future__ import annotations

from types import SimpleNamespace

from ..backends import reference_activation, reference_norm
from ..core.ops import GRAPH
from ..formats.layout import NOTHING
from ..formats.spec import decode_quant
from .quantization import dequantized_for_onnx, quantize_for_onnx


def quantize(x, quant, scale, slot, amax, rowwise, columnwise, rng):
    """The rowwise buffers of ``x [M, K]``."""
    del columnwise, rng
    return quantize_for_onnx(x, quant, scale, slot, amax, rowwise)


def dequantize(data, scale_inv, amax, quant, columnwise, dtype):
    """The values of rowwise ``data``."""
    del amax, columnwise
    return dequantized_for_onnx(data, scale_inv, quant).to(dtype)


def norm_forward(
    x, weight, bias, eps, zero_centered, kind, quant, scale, slot, rowwise, columnwise, want_output
):
    """A norm; computed in fp32, and quantized as the reference body does."""
    del columnwise
    out, mean, rstd, *_ = reference_norm.norm_forward(
        x.float(), weight, bias, eps, zero_centered, kind, "", None, 0, False, False, True
    )
    spec = decode_quant(quant)
    if spec is None:
        return out.to(x.dtype), mean, rstd, *NOTHING
    keep_fp32 = (spec.kind == "delayed" and not want_output) or spec.unrounded
    y = out if keep_fp32 else out.to(x.dtype)
    buffers = quantize_for_onnx(y, quant, scale, slot, None, rowwise)
    return y.to(x.dtype) if want_output else None, mean, rstd, *buffers


def activation_forward(
    x, act, limit, alpha, offset, quant, scale, slot, rowwise, columnwise, want_output
):
    """An activation; computed in fp32, and quantized as the reference body does."""
    del columnwise
    values, *_ = reference_activation.activation_forward(
        x.float(), act, limit, alpha, offset, "", None, 0, False, False, True
    )
    spec = decode_quant(quant)
    if spec is None:
        return values.to(x.dtype), *NOTHING
    source = values if spec.kind == "delayed" else values.to(x.dtype)
    amax = values.abs().amax((0, 1)) if spec.kind == "current" else None
    buffers = quantize_for_onnx(source, quant, scale, slot, amax, rowwise)
    return values.to(x.dtype) if want_output else None, *buffers


def gemm(a, b, bias, a_scale_inv, b_scale_inv, a_amax, b_amax, a_quant, b_quant, layout, dtype, _):
    """``a @ b^T (+ bias)``: the only layout of a forward pass."""
    del a_amax, b_amax, layout
    if a_quant:
        a = dequantized_for_onnx(a, a_scale_inv, a_quant)
    if b_quant:
        b = dequantized_for_onnx(b, b_scale_inv, b_quant)
    y = a @ b.t()
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(dtype)


ONNX = SimpleNamespace(**vars(GRAPH))
ONNX.quantize, ONNX.dequantize, ONNX.gemm = quantize, dequantize, gemm
ONNX.norm_forward, ONNX.activation_forward = norm_forward, activation_forward
