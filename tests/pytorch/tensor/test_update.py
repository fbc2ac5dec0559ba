# SPDX-License-Identifier: Apache-2.0
"""Quantizing into existing tensors, copying between them, and saving them for a backward pass."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import warnings

import pytest
import torch
from tensor_support import (
    E4M3,
    E5M2,
    KINDS,
    QUANTIZERS,
    addresses,
    buffers,
    random,
    same_bytes,
)

from transformer_engine.pytorch.quantized_tensor import (
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from transformer_engine.pytorch.tensor import (
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

pytestmark = pytest.mark.usefixtures("poison_empty")
SHAPE = (64, 96)
INTERNAL = [False, True]


def made(name, device, internal=False, **usages):
    quantizer = QUANTIZERS[name](device)
    quantizer.internal = internal
    quantizer.set_usage(**usages)
    return quantizer


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("internal", INTERNAL)
def test_addresses_stay(device, name, internal):
    quantizer = made(name, device, internal)
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    tensor = quantizer(x.clone())
    before = addresses(tensor)
    assert quantizer.update_quantized(y, tensor) is tensor
    assert addresses(tensor) == before and same_bytes(tensor, quantizer(y))
    assert tensor.quantize_(x) is tensor and same_bytes(tensor, quantizer(x))
    assert quantizer(y, out=tensor) is tensor and same_bytes(tensor, quantizer(y))
    if name != "nvfp4_rht":  # the transform is defined for bf16
        assert quantizer.quantize(x.float(), out=tensor) is tensor
        assert same_bytes(tensor, quantizer(x if name == "identity" else x.float()))
    assert addresses(tensor) == before and tensor._dtype == x.dtype


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("skip", [0.0, 1.0, 0.5])
def test_noop_flag(device, name, skip):
    quantizer = made(name, device)
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    tensor = quantizer(x.clone())
    before, bytes_before = addresses(tensor), buffers(tensor)
    quantizer.update_quantized(y, tensor, noop_flag=torch.full((1,), skip, device=device))
    assert addresses(tensor) == before
    assert same_bytes(tensor, quantizer(x if skip == 1 else y))
    if skip == 1:
        assert all(a is None or torch.equal(a, b) for a, b in zip(buffers(tensor), bytes_before))


@pytest.mark.parametrize("name", ["block_1d", "block_2d", "mxfp8", "nvfp4", "nvfp4_2d", "hybrid"])
@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("present", ["rowwise", "columnwise"])
def test_noop_flag_with_a_missing_layout(device, name, skip, present):
    """The new layout holds the values that stay."""
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    only = {"rowwise": present == "rowwise", "columnwise": present == "columnwise"}
    tensor = made(name, device, **only)(x)
    old = tensor.dequantize()
    both = made(name, device)
    both.update_quantized(y, tensor, noop_flag=torch.full((1,), skip, device=device))
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    if not skip:
        assert same_bytes(tensor, both(y))
        return
    for usage in ("rowwise_usage", "columnwise_usage"):
        half = tensor.detach()
        half.update_usage(**{usage: False})
        error = (half.dequantize() - old).float().norm() / old.float().norm()
        assert error < (0.2 if "nvfp4" in name or name == "hybrid" else 0.05)


def test_noop_flag_keeps_the_order_of_scales(device):
    """Bytes that may stay decide how scales are ordered."""
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    for quantizer in (MXFP8Quantizer(E4M3), NVFP4Quantizer()):
        tensor = quantizer(x)
        wish = quantizer.copy()
        wish.optimize_for_gemm = True
        for skip, expected in ((1.0, x), (0.0, y)):
            flag = torch.full((1,), skip, device=device)
            wish.update_quantized(y, tensor, noop_flag=flag)
            assert not tensor._with_gemm_swizzled_scales
            assert same_bytes(tensor, quantizer(expected))
        wish.update_quantized(y, tensor)
        assert tensor._with_gemm_swizzled_scales and same_bytes(tensor, wish(y))


def test_noop_flag_with_another_format(device):
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    for skip in (0.0, 1.0):
        tensor = MXFP8Quantizer(E4M3)(x)
        values = tensor.dequantize()
        flag = torch.full((1,), skip, device=device)
        MXFP8Quantizer(E5M2).update_quantized(y, tensor, noop_flag=flag)
        assert tensor._fp8_dtype == E5M2
        assert same_bytes(tensor, MXFP8Quantizer(E5M2)(values if skip else y))


@pytest.mark.parametrize("name", KINDS)
def test_usages_follow_the_quantizer(device, name):
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    tensor = made(name, device)(x.clone())
    for usages in (
        {"columnwise": False},
        {"rowwise": False, "columnwise": True},
        {"rowwise": True},
    ):
        quantizer = made(name, device)
        quantizer.set_usage(**usages)
        quantizer.update_quantized(y, tensor)
        assert same_bytes(tensor, quantizer(y))


@pytest.mark.parametrize("name", [n for n in QUANTIZERS if n != "identity"])
def test_shared_buffers_are_never_left_with_old_values(device, name):
    """A detached tensor shares buffers, so writing to it writes all of them."""
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    tensor = made(name, device)(x)
    if "row_scaled" not in name:
        tensor._quantizer.set_usage(rowwise=False)
    tensor._quantizer.optimize_for_gemm = True
    tensor.detach().copy_(y)
    tensor._quantizer.optimize_for_gemm = False
    assert same_bytes(tensor, made(name, device)(y))
    tensor.data.copy_(x)
    assert same_bytes(tensor, made(name, device)(x))
    tensor.view(-1).copy_(y.view(-1))
    assert same_bytes(tensor, made(name, device)(y))


def test_what_can_not_be_written_to(device):
    x = random(SHAPE, device)
    tensor = MXFP8Quantizer(E4M3)(x)
    with pytest.raises(ValueError, match="NVFP4Quantizer can not write into a MXFP8Tensor"):
        NVFP4Quantizer().update_quantized(x, tensor)
    with pytest.raises(ValueError, match="can not write into a Tensor"):
        MXFP8Quantizer(E4M3).update_quantized(x, x)
    with pytest.raises(ValueError, match="shape"):
        tensor.quantize_(x[:32])
    with pytest.raises(ValueError, match="dtype"):
        MXFP8Quantizer(E4M3).quantize(x, out=tensor, dtype=torch.float16)
    tensor._quantizer = None
    with pytest.raises(RuntimeError, match="no quantizer"):
        tensor.quantize_(x)
    with pytest.warns(UserWarning, match="Quantizer is being updated"):
        tensor.update_quantizer(MXFP8Quantizer(E4M3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor.quantize_(2 * x)
    assert same_bytes(tensor, MXFP8Quantizer(E4M3)(2 * x))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("internal", INTERNAL)
def test_quantized_sources_are_dequantized(device, name, internal):
    x = random(SHAPE, device)
    source = Float8CurrentScalingQuantizer(E4M3)(x)
    quantizer = made(name, device, internal)
    values = source.dequantize()
    tensor = quantizer(source)
    assert same_bytes(tensor, quantizer(values))
    tensor = quantizer(x.clone())
    assert same_bytes(quantizer.update_quantized(source, tensor), quantizer(values))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("internal", INTERNAL)
def test_strided_sources(device, name, internal):
    x = random((96, 64), device).t()
    quantizer = made(name, device, internal)
    assert same_bytes(quantizer(x), quantizer(x.contiguous()))
    assert len(quantizer.multi_quantize([x, x])) == 2


@pytest.mark.parametrize("name", QUANTIZERS)
def test_nominal_dtype(device, name):
    quantizer, x = made(name, device), random(SHAPE, device)
    tensor = quantizer.quantize(x, dtype=torch.float16)
    assert tensor.dtype == tensor._dtype == tensor.dequantize().dtype == torch.float16
    assert same_bytes(tensor, quantizer(x))
    quantizer.internal = True
    storage = quantizer.quantize(x, dtype=torch.float16)
    assert storage.dequantize().dtype == torch.float16
    quantizer.quantize(x, out=storage, dtype=torch.float32)
    assert storage.dequantize().dtype == torch.float32


# --------------------------------------------------------------------------------- copies of bytes


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("internal", INTERNAL)
def test_copies(device, name, internal):
    quantizer = made(name, device, internal)
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    tensor, other = quantizer(x.clone()), quantizer(y.clone())
    shared, own = tensor.detach(), tensor.clone()
    assert addresses(shared) == addresses(tensor)
    assert not set(addresses(own)) & set(addresses(tensor)) - {None}
    like = type(tensor).make_like(tensor, shape=(2, 32, 96), dtype=torch.float16)
    assert like.shape == (2, 32, 96) and like._dtype == torch.float16
    assert torch.equal(like.dequantize(), tensor.dequantize(dtype=torch.float16).view(2, 32, 96))
    before = addresses(own)
    assert own.copy_from_storage(other) is own
    assert addresses(own) == before and same_bytes(own, other) and same_bytes(shared, quantizer(x))
    shared.clear()
    assert all(b is None or b.numel() == 0 for b in buffers(tensor))  # freed for everybody
    with pytest.raises(RuntimeError, match="no values"):
        shared.dequantize()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hybrid"])
def test_copied_scales_get_the_order_of_the_destination(device, name):
    """Others share the destination's buffers and go on reading them as they did."""
    compact, swizzled = made(name, device), made(name, device)
    swizzled.optimize_for_gemm = True
    x, y = random(SHAPE, device), random(SHAPE, device, seed=1)
    for ours, theirs in ((compact, swizzled), (swizzled, compact)):
        tensor = ours(x)
        tensor.detach().copy_(theirs(y))
        assert same_bytes(tensor, ours(y)) and tensor.quant == ours.quant
        tensor.copy_from_storage(theirs(x))
        assert same_bytes(tensor, ours(x))


def test_what_bytes_can_not_be_copied(device):
    x = random(SHAPE, device)
    tensor = MXFP8Quantizer(E4M3)(x)
    for other, message in (
        (MXFP8Quantizer(E5M2)(x), "e5m2"),
        (MXFP8Quantizer(E4M3, columnwise=False)(x), "no columnwise data"),
        (MXFP8Quantizer(E4M3)(x[:32]), "shape"),
        (NVFP4Quantizer()(x), "NVFP4Tensor"),
        (x, "Tensor"),
    ):
        with pytest.raises(RuntimeError, match=message):
            tensor.copy_from_storage(other)


@pytest.mark.parametrize("name", KINDS)
def test_views_of_storages(device, name):
    tensor = made(name, device, internal=True)(random(SHAPE, device))
    view = tensor.view(2, -1, 96)
    assert view.shape == (2, 32, 96) and addresses(view) == addresses(tensor)
    assert torch.equal(view.dequantize(), tensor.dequantize().view(2, 32, 96))
    assert same_bytes(view.reshape(64, 96), tensor) and tensor.view((64, 96)).shape == SHAPE
    with pytest.raises(RuntimeError, match="number of elements"):
        tensor.view(5, 96)
    if name in ("current", "identity"):
        flat = tensor.view(-1)
        assert torch.equal(flat.dequantize(), tensor.dequantize().view(-1))
    else:
        with pytest.raises(RuntimeError, match="last dimension, which is 96"):
            tensor.view(-1)


# ----------------------------------------------------------------------------- saving for backward

SAVED = {"current": 3, "block_1d": 4, "mxfp8": 4, "nvfp4": 6, "identity": 1, "hybrid": 10}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("internal", INTERNAL)
def test_saving(device, name, internal):
    x = random(SHAPE, device)
    quantizer = made(name, device, internal)
    tensor = quantizer(x)
    plain, objects = prepare_for_saving(x, tensor, None)
    assert len(plain) == 2 + SAVED[name] and objects[0] is objects[2] is None
    assert all(b is None for b in objects[1].prepare_for_saving()[0])
    assert same_bytes(tensor, quantizer(x))  # is left alone
    (first, restored, nothing), rest = restore_from_saved(objects, (*plain, x), True)
    assert first is x and nothing is None and rest == [x]
    assert type(restored) is type(tensor) and same_bytes(restored, tensor)
    assert torch.equal(restored.dequantize(), tensor.dequantize())


ORDER = {
    "block_1d": ["_rowwise_data", "_columnwise_padded", "_rowwise_scale_inv"],
    "nvfp4": [
        *("_rowwise_data", "_columnwise_padded", "_rowwise_scale_inv", "_columnwise_scale_inv"),
        *("_amax_rowwise", "_amax_columnwise"),
    ],
    "current": ["_data", "_transpose_padded", "_scale_inv"],
}


@pytest.mark.parametrize("name", ORDER)
def test_order_of_saved_tensors(device, name):
    tensor = made(name, device)(random(SHAPE, device))
    saved = tensor.prepare_for_saving()[0]
    for buffer, attribute in zip(saved, ORDER[name]):
        assert buffer is getattr(tensor, attribute)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("internal", INTERNAL)
def test_autograd_sees_bytes(device, name, internal):
    """Hooks on saved tensors get the buffers, and writing to one in between is found out."""
    quantizer = made(name, device, internal)

    class Multiply(torch.autograd.Function):
        """Saves a quantized tensor."""

        @staticmethod
        def forward(ctx, x, quantized):
            tensors, ctx.tensor_objects = prepare_for_saving(quantized, None)
            ctx.save_for_backward(*tensors)
            return x * quantized.dequantize()

        @staticmethod
        def backward(ctx, dy):
            return dy * restore_from_func_ctx(ctx)[0].dequantize(), None

    x = random(SHAPE, device).requires_grad_()
    quantized = quantizer(random(SHAPE, device, seed=1))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = Multiply.apply(x, quantized)
    assert len(packed) == sum(b is not None for b in buffers(quantized))
    y.sum().backward()
    assert torch.equal(x.grad, quantized.dequantize())
    y = Multiply.apply(x, quantized)
    quantized.quantize_(random(SHAPE, device, seed=2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
