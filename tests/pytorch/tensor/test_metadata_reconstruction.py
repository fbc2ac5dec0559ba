# SPDX-License-Identifier: Apache-2.0
"""What is said about a quantized tensor before it exists is what comes out.

For each quantizer, choice of layouts, kind of result and order of scales: specs and metadata,
``make_empty``, a quantized tensor, and a tensor rebuilt from its parts agree in shapes, dtypes,
flags and values.
"""

import pytest
import torch
from tensor_support import QUANTIZERS, buffers, parts, random, same_bytes

from transformer_engine.pytorch.tensor import QuantizedTensorStorage

SHAPES = [(64, 96), (2, 48, 160), (128, 256)]
USAGES = [(True, True), (True, False), (False, True)]
FLAGS = [
    *("_fp8_dtype", "_is_2D_scaled", "_with_gemm_swizzled_scales", "_fp4_dtype"),
    *("_row_scaled_nvfp4", "_nvfp4_use_4over6", "_nvfp4_e4m3_max", "_transpose_invalid"),
]
CASES = [
    (name, rowwise, columnwise)
    for name in QUANTIZERS
    for rowwise, columnwise in USAGES
    if rowwise or name != "nvfp4_row_scaled"  # which always has rowwise data
]


def quantizer_of(name, device, rowwise, columnwise, internal, swizzled):
    quantizer = QUANTIZERS[name](device)
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    quantizer.internal, quantizer.optimize_for_gemm = internal, swizzled
    return quantizer


def described(tensor):
    """Everything about a tensor but the values."""
    return [
        (
            type(part),
            part._shape,
            part._dtype,
            part.quant,
            part._quantizer,
            part.device.type,
            [(flag, getattr(part, flag)) for flag in FLAGS if hasattr(part, flag)],
            [
                (name, None if b is None else (tuple(b.shape), b.dtype))
                for name, b in part._buffers().items()
            ],
        )
        for part in parts(tensor)
    ]


def flattened(specs):
    return {name: (tuple(spec.shape), spec.dtype) for name, spec in specs.items()}


def actual_specs(tensor):
    """Shapes and dtypes of the buffers there are, by name."""
    out = {}
    for name, buffer in tensor._buffers().items():
        if isinstance(buffer, QuantizedTensorStorage):
            out |= {f"{name}.{inner}": spec for inner, spec in actual_specs(buffer).items()}
        elif buffer is not None:
            out[name] = (tuple(buffer.shape), buffer.dtype)
    return out


def forget_quantizers(description):
    """Delayed scaling shares state, so its quantizers are equal only to themselves."""
    return [(*entry[:4], *entry[5:]) for entry in description]


@pytest.mark.parametrize("name, rowwise, columnwise", CASES)
@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_reconstruction(device, name, rowwise, columnwise, internal, swizzled, shape):
    quantizer = quantizer_of(name, device, rowwise, columnwise, internal, swizzled)
    x = random(shape, device)
    made = quantizer(x)
    specs = quantizer.inner_tensor_specs(shape)
    if name == "identity":
        specs = quantizer.inner_tensor_specs(shape, dtype=x.dtype)
    assert flattened(specs) == actual_specs(made)
    metadata = quantizer.storage_metadata(shape, dtype=x.dtype)
    assert {n: getattr(made, n) for n in metadata if n != "_quantizer"} == {
        n: value for n, value in metadata.items() if n != "_quantizer"
    }
    empty = quantizer.make_empty(shape, dtype=x.dtype, device=device)
    same = described if name != "delayed" else lambda t: forget_quantizers(described(t))
    assert same(empty) == same(made)
    assert same_bytes(quantizer.update_quantized(x, empty), made)
    if internal:
        rebuilt = made.detach()
    else:
        names, context = made.__tensor_flatten__()
        inner = {n: getattr(made, n) for n in names}
        rebuilt = type(made).__tensor_unflatten__(inner, context, made.shape, made.stride())
        assert context == made.__tensor_flatten__()[1]
        assert hash(context) == hash(made.__tensor_flatten__()[1])
        assert rebuilt.shape == made.shape and rebuilt.dtype == made.dtype
    assert described(rebuilt) == described(made) and same_bytes(rebuilt, made)
    assert torch.equal(rebuilt.dequantize(), made.dequantize())


@pytest.mark.parametrize("name", QUANTIZERS)
def test_contexts_of_different_tensors_differ(device, name):
    """A compiler may reuse a graph only for a tensor that looks the same inside."""
    quantizer = QUANTIZERS[name](device)
    tensor = quantizer(random((64, 96), device))
    context = tensor.__tensor_flatten__()[1]
    other = quantizer(random((64, 96), device)).__tensor_flatten__()[1]
    assert context == other or name == "delayed"
    cast = type(tensor).make_like(tensor, dtype=torch.float32)
    assert context != cast.__tensor_flatten__()[1]
    changed = quantizer.copy()
    changed.internal = not changed.internal  # any setting
    tensor._quantizer = changed
    assert context != tensor.__tensor_flatten__()[1]


@pytest.mark.parametrize("name", QUANTIZERS)
def test_make_empty(device, name):
    quantizer = QUANTIZERS[name](device)
    tensor = quantizer.make_empty((64, 96), dtype=torch.bfloat16, device=device)
    assert tensor.device.type == device and tensor.dtype == torch.bfloat16
    assert not tensor.requires_grad and tensor.shape == (64, 96)
    assert quantizer.make_empty((64, 96), device=device, requires_grad=True).requires_grad
    quantizer.internal = True
    with pytest.raises(ValueError, match="requires_grad=False"):
        quantizer.make_empty((64, 96), device=device, requires_grad=True)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    assert quantizer.make_empty((64, 96)).device.type == default
    if torch.cuda.is_available():
        pinned = quantizer.make_empty((64, 96), device="cpu", pin_memory=True)
        assert all(b.is_pinned() for b in buffers(pinned) if b is not None)
