# SPDX-License-Identifier: Apache-2.0
"""FP8 tensors as ONNX has them: a float8 tensor and fp32 scales, one for it or for each block.

A tensor is multiplied with the scale of its recipe and rounded to float8 by ``QuantizeLinear``
with scale 1, which makes the bytes that the kernels make: with the inverse scale it would divide,
and round some values that lie between two codes to the other one. ``DequantizeLinear`` takes
the inverse scale (operator set 19; 21 for scales of blocks). The scales are those of ``formats/``,
made with operators that every exporter knows: no bits are looked at. A NaN in a tensor makes its
scale NaN, where kernels ignore it.
"""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.ops import LIBRARY
from ..formats.blocks import float32
from ..formats.fp8 import FP8_MAX, FP8_TORCH_DTYPE, scale_from_amax
from ..formats.layout import BLOCK, MXFP8_BLOCK, NOTHING, Quantized, ceil_div
from ..formats.spec import QuantSpec, decode_quant

BLOCKS = {"block": BLOCK, "mxfp8": MXFP8_BLOCK}  # values per scale along a row
_NOT_EXPORTED = (
    "A tensor is to be quantized as {quant!r}, which te.onnx_export does not export: ONNX has no"
    " operators for {kind}. Recipes that export: none (high precision), DelayedScaling,"
    " Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, and a CustomRecipe of their"
    " quantizers."
)

LIBRARY.define("onnx_quantize(Tensor x, str fmt) -> Tensor")
LIBRARY.define("onnx_dequantize(Tensor data, Tensor scale, int block) -> Tensor")


def _quantize_linear(x: Tensor, fmt: str) -> Tensor:
    """What ``QuantizeLinear`` computes with scale 1, for running an exported program in torch."""
    return x.clamp(-FP8_MAX[fmt], FP8_MAX[fmt]).to(FP8_TORCH_DTYPE[fmt])


def _dequantize_linear(data: Tensor, scale: Tensor, block: int) -> Tensor:
    """What ``DequantizeLinear`` computes: fp32 [M, K]; ``scale`` [] or [M, ceil(K / block)]."""
    if block:
        scale = scale.repeat_interleave(block, 1)[:, : data.shape[1]]
    return data.float() * scale


def _fake_quantize(x: Tensor, fmt: str) -> Tensor:
    return torch.empty(x.shape, dtype=FP8_TORCH_DTYPE[fmt], device=x.device)


def _fake_dequantize(data: Tensor, scale: Tensor, block: int) -> Tensor:
    del scale, block
    return torch.empty(data.shape, dtype=torch.float32, device=data.device)


for _name, _body, _fake in (
    ("onnx_quantize", _quantize_linear, _fake_quantize),
    ("onnx_dequantize", _dequantize_linear, _fake_dequantize),
):
    LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"transformer_engine::{_name}", _fake, lib=LIBRARY)


def quantize_for_onnx(
    x: Tensor,
    quant: str,
    scale: Optional[Tensor],
    slot: int,
    amax: Optional[Tensor],
    rowwise: bool,
) -> Quantized:
    """``x [M, K]`` with ``row`` float8 [M, K] and ``scale_inv`` as ``QuantizeLinear`` takes it.

    There is nothing else: columnwise buffers are for training, and so is the amax of a tensor.
    Raises RuntimeError for formats that ONNX does not have.
    """
    spec = decode_quant(quant)
    if spec.kind == "nvfp4":
        kind = "NVFP4 with two levels of scales"
        raise RuntimeError(_NOT_EXPORTED.format(quant=quant, kind=kind))
    if not rowwise:
        return NOTHING
    values = x.float()
    if spec.kind == "delayed":
        used_scale = scale[slot]
    elif spec.kind == "current":
        amax = values.abs().amax((0, 1)) if amax is None else amax.reshape(())
        used_scale = _scale(amax, spec)
    else:
        used_scale = _block_scale(values, spec)
    scaled = _multiplied(values, used_scale, BLOCKS.get(spec.kind, 0))
    row = torch.ops.transformer_engine.onnx_quantize.default(scaled, spec.fmt)
    return NOTHING._replace(row=row, scale_inv=used_scale.reciprocal())


def _multiplied(values: Tensor, scale: Tensor, block: int) -> Tensor:
    """``values [M, K]`` times ``scale``: [], or [M, ceil(K / block)]."""
    if not block:
        return values * scale
    # The scales are cut, not the products: onnxruntime would move QuantizeLinear before the cut,
    # and has no operator that cuts float8.
    scale = scale.unsqueeze(2).expand(-1, -1, block).reshape(-1, scale.shape[1] * block)
    return values * scale[:, : values.shape[1]]


def _padded(values: Tensor, block: int) -> Tensor:
    """``values [M, K]`` with zeros up to whole blocks of columns."""
    rest = -values.shape[1] % block
    return F.pad(values, (0, rest)) if rest else values


def dequantized_for_onnx(data: Tensor, scale_inv: Tensor, quant: str) -> Tensor:
    """fp32 values [M, K] of what ``quantize_for_onnx`` made; RuntimeError for other buffers."""
    if data.dtype == torch.uint8:
        raise RuntimeError(
            "A weight that was quantized before (is_first_microbatch=False with a filled cache, or"
            f" te.quantized_model_init) is in a layout of this package ({quant!r}), which ONNX does"
            " not have. Export the module with parameters in high precision and without"
            " is_first_microbatch: the file then quantizes them."
        )
    block = BLOCKS.get(decode_quant(quant).kind, 0)
    return torch.ops.transformer_engine.onnx_dequantize.default(data, scale_inv, block)


def _block_scale(values: Tensor, spec: QuantSpec) -> Tensor:
    """Scales [M, ceil(K / block)] of fp32 values [M, K]; square blocks share theirs."""
    block, (rows, columns) = BLOCKS[spec.kind], values.shape
    count = ceil_div(columns, block)
    amax = _padded(values.abs(), block).reshape(-1, count, block).amax(2)
    if spec.dim == 2:
        # Not reshaped to bands of rows: a size of 1 or an unknown multiple would bind the batch.
        band = torch.arange(rows, device=amax.device) // block
        index = band.unsqueeze(1).expand(-1, count)
        amax = torch.zeros_like(amax).scatter_reduce(0, index, amax, "amax")[band]
    if spec.kind == "block":
        return _scale(amax, spec)
    # E8M0: the inverse scale is the smallest power of two that is not below amax / FP8_MAX.
    quotient = (amax * float32(1.0 / FP8_MAX[spec.fmt])).clamp(2.0**-127, 2.0**127)
    below = _power_of_two_below(quotient)
    return torch.where(below < quotient, below * 2.0, below).reciprocal()


def _scale(amax: Tensor, spec: QuantSpec) -> Tensor:
    """``scale_from_amax``, which rounds to powers of two by looking at bits."""
    scale = scale_from_amax(amax, spec.fmt, False, spec.eps)
    return _power_of_two_below(scale) if spec.pow2 else scale


def _power_of_two_below(v: Tensor) -> Tensor:
    """The largest power of two that is not above ``v``, positive and finite fp32."""
    # The logarithm of a value beside a power of two may round to the other side of it, and that of
    # the largest values to 128.
    power = torch.exp2(torch.floor(torch.log2(v)).clamp(max=127.0))
    power = torch.where(power > v, power * 0.5, power)
    return torch.where(power * 2.0 <= v, power * 2.0, power)
