# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors in compiled code: as parameters, as inputs, and made in the graph."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import pytest
import torch
from tensor_support import E4M3, E5M2, KINDS, QUANTIZERS, random, same_bytes

from transformer_engine.pytorch.formats.layout import Quantized
from transformer_engine.pytorch.tensor import (
    MXFP8Quantizer,
    QuantizedTensorStorage,
    hybrid_storage,
    storage_from_quantized,
)

SHAPE = (64, 96)
FORMATS = [n for n in QUANTIZERS if n != "identity" and not n.startswith("hybrid")]


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def parameter(name, device, seed=0):
    return torch.nn.Parameter(QUANTIZERS[name](device)(random(SHAPE, device, seed=seed)))


def read_buffers(w, x):
    """What a module reads of a weight: bytes, scales and metadata."""
    assert isinstance(w, QuantizedTensorStorage) and w.dtype == torch.bfloat16
    if w._quantizer.columnwise_usage:
        x = x + w.shape[0]
    out = [b + 1 for b in w.operand_buffers() if b is not None]
    if "|" in w.quant:
        out.append(w._rowwise_storage.operand_buffers().row + 1)
    elif "nvfp4" in w.quant:
        out.append(w._rowwise_data + 1)
        out.append(w._columnwise_data + 1)
    elif w._shape[1] == 96 and "current" in w.quant and w._transpose_padded is not None:
        out.append(w._transpose + 1)
    return (*out, x * 2)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_traced_code_reads_buffers(device, name):
    w, x = parameter(name, device), torch.ones(2, 96, device=device)
    for actual, expected in zip(compiled(read_buffers)(w, x), read_buffers(w, x), strict=True):
        assert torch.equal(actual, expected)


class Linear(torch.nn.Module):
    """A layer with a quantized weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_layers(device, name):
    """Forward and backward, in one graph for every batch, after updates of the weight as well."""
    layer = Linear(parameter(name, device))
    twin = Linear(torch.nn.Parameter(layer.weight.detach().clone()))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(layer, backend=counter, fullgraph=True)
    for step in range(3):
        x = random((4, 96), device, seed=step).requires_grad_()
        y, expected = run(x), twin(x)
        assert torch.equal(y, expected)
        dy = random(y.shape, device, seed=10 + step)
        (dx,) = torch.autograd.grad(expected, x, dy, retain_graph=True)
        expected.backward(dy)
        x.grad = None
        y.backward(dy)
        assert torch.equal(x.grad, dx)
        assert type(layer.weight.grad) is torch.Tensor
        assert torch.equal(layer.weight.grad, twin.weight.grad)
        for module in (layer, twin):
            with torch.no_grad():
                module.weight.add_(module.weight.grad, alpha=-0.1)
            module.weight.grad = None
    assert counter.frame_count == 1 and same_bytes(layer.weight, twin.weight)


@pytest.mark.parametrize("name", KINDS)
def test_operations_of_the_graph(device, name):
    w, x = parameter(name, device), random((2, 96), device)
    for function in (
        lambda w, x: (w.dequantize() * 2, x + 1),
        lambda w, x: (w + x[:1], w.t() @ w),
        lambda w, x: (w.view(2, 32, 96) * 3, x),
        lambda w, x: (w.float() + 1, x.float()),
        lambda w, x: (w.detach(), x * 2),
        lambda w, x: (w.clone(), x * 2),
    ):
        torch._dynamo.reset()
        for actual, expected in zip(compiled(function)(w, x), function(w, x), strict=True):
            assert type(actual) is type(expected) and torch.equal(actual, expected)
    clone = compiled(lambda w, x: (w.clone(), x * 2))(w, x)[0]
    assert same_bytes(clone, w) and clone._quantizer == w._quantizer


def test_graphs_are_for_one_quantization(device):
    """Metadata are guarded: another order of scales is another graph."""
    calls = []

    def function(w):
        return w._rowwise_scale_inv + (1 if w._with_gemm_swizzled_scales else 2)

    counter = torch._dynamo.testing.CompileCounter()
    run = torch.compile(function, backend=counter, fullgraph=True)
    for swizzled in (False, True, False):
        quantizer = MXFP8Quantizer(E4M3)
        quantizer.optimize_for_gemm = swizzled
        w = quantizer(random(SHAPE, device))
        calls.append(counter.frame_count)
        assert torch.equal(run(w), function(w))
    assert counter.frame_count == 2 and calls == [0, 1, 2]


@pytest.mark.parametrize("name", FORMATS)
def test_storages_made_in_the_graph(device, name):
    """A compiler may make a storage, keep it in a cache and read it in a later call."""
    quantizer = QUANTIZERS[name](device)
    expected = quantizer(random(SHAPE, device))
    cache = {}

    def step(buffers, first):
        if first:
            cache["weight"] = storage_from_quantized(
                Quantized(*buffers), expected_quant, torch.bfloat16, shape=SHAPE
            )
        entry = cache["weight"]
        assert entry.quant == expected_quant and not entry.without_grad
        return [b + 1 for b in entry.operand_buffers() if b is not None]

    expected_quant = expected.quant
    buffers = tuple(expected.operand_buffers())
    run = compiled(step)
    for first in (True, False):
        results = run(buffers, first)
        present = [b for b in buffers if b is not None]
        for actual, wanted in zip(results, present, strict=True):
            assert torch.equal(actual, wanted + 1)
    assert type(cache["weight"]) is expected.storage_type
    assert torch.equal(cache["weight"].dequantize(), expected.dequantize())


@pytest.mark.parametrize("name", ["hybrid", "hybrid_from_row", "hybrid_per_tensor"])
def test_hybrid_storages_made_in_the_graph(device, name):
    expected = QUANTIZERS[name](device)(random(SHAPE, device))
    quant, buffers, cache = expected.quant, tuple(expected.operand_buffers()), {}

    def step(buffers):
        cache["weight"] = hybrid_storage(Quantized(*buffers), quant, torch.bfloat16)
        cache["weight"].without_grad = not torch.is_grad_enabled()
        return [b + 1 for b in cache["weight"].operand_buffers() if b is not None]

    results = compiled(step)(buffers)
    for actual, wanted in zip(results, [b for b in buffers if b is not None], strict=True):
        assert torch.equal(actual, wanted + 1)
    entry = cache["weight"]
    assert entry.quant == quant and same_bytes(entry, expected)
    entry.update_usage(rowwise_usage=False)
    expected.update_usage(rowwise_usage=False)
    assert torch.equal(entry.dequantize(), expected.dequantize())


@pytest.mark.parametrize("name", [n for n in QUANTIZERS if n != "delayed"])
def test_fake_tensors(name):
    """Shapes and metadata under a fake tensor mode are the real ones."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    real = QUANTIZERS[name]("cpu")(random(SHAPE))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
        made = QUANTIZERS[name]("cpu")(torch.empty(SHAPE, dtype=torch.bfloat16))
        for tensor in (fake, made):
            assert type(tensor) is type(real) and tensor.quant == real.quant
            assert (tensor + 1).shape == SHAPE and tensor.view(-1).shape == (64 * 96,)
            for a, b in zip(tensor.prepare_for_saving()[0], real.prepare_for_saving()[0]):
                assert (a is None) == (b is None)
                assert a is None or (isinstance(a, FakeTensor) and a.shape == b.shape)
                assert a is None or a.dtype == b.dtype


@pytest.mark.parametrize("name", ["current", "block_1d", "mxfp8", "nvfp4"])
def test_quantizing_in_the_graph(device, name):
    """``internal`` quantizers trace."""
    quantizer = QUANTIZERS[name](device)
    quantizer.internal = True
    x = random(SHAPE, device)

    def function(x):
        storage = quantizer(x * 2)
        return [b + 1 for b in storage.operand_buffers() if b is not None]

    for autocast in (False, True):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            for actual, expected in zip(compiled(function)(x), function(x), strict=True):
                assert torch.equal(actual, expected)


def test_formats_of_the_same_layout_differ(device):
    x = random(SHAPE, device)
    run = compiled(lambda w: w.dequantize())
    for fp8_dtype in (E4M3, E5M2):
        w = MXFP8Quantizer(fp8_dtype)(x)
        assert torch.equal(run(w), w.dequantize())
