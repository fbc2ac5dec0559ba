# SPDX-License-Identifier: Apache-2.0
"""Triton norms agree with the reference to the last bits, their bytes follow from their outputs."""

import pytest
import torch
from triton_support import DEVICE, REASON, assert_close, poison_empty, same_bytes

from transformer_engine.pytorch.backends import reference
from transformer_engine.pytorch.backends import triton as kernels
from transformer_engine.pytorch.formats.layout import Quantized

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

KINDS = ("LayerNorm", "RMSNorm")
CURRENT, DELAYED = "current,e4m3", "delayed,e5m2"
EPS = 1e-5


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_empty(monkeypatch)


@pytest.fixture
def short_blocks(monkeypatch):
    """Makes rows of 300 elements long ones, which are walked in chunks."""
    from transformer_engine.pytorch.backends.triton import rows

    monkeypatch.setattr(rows, "MAX_BLOCK", 128)
    monkeypatch.setattr(rows, "CHUNK", 64)


def inputs(rows, columns, dtype, kind, weight_dtype=None):
    torch.manual_seed(rows)
    x = (torch.randn(rows, columns, device=DEVICE) * 2 + 1).to(dtype)
    weight = torch.randn(columns, device=DEVICE).to(weight_dtype or dtype)
    bias = torch.randn(columns, device=DEVICE).to(weight.dtype) if kind == "LayerNorm" else None
    return x, weight, bias


def forward(
    backend, tensors, kind, quant="", want_output=False, zero_centered=False, columnwise=True
):
    scale = torch.tensor([1.0, 50.0], device=DEVICE)
    return backend.norm_forward(
        *tensors, EPS, zero_centered, kind, quant, scale, 1, True, columnwise, want_output
    )


def check_forward(tensors, kind, quant, want_output, zero_centered, columnwise=True):
    arguments = (tensors, kind, quant, want_output, zero_centered, columnwise)
    y, mean, rstd, *quantized = forward(kernels, *arguments)
    want = forward(reference, *arguments)
    assert [t is None for t in want] == [t is None for t in (y, mean, rstd, *quantized)]
    if y is not None:
        assert_close(y, want[0])
    if mean is not None:
        assert_close(mean, want[1])
    assert_close(rstd, want[2], ulps=8)
    if not quant:
        return
    check_bytes(tensors, kind, quant, want_output, zero_centered, Quantized(*quantized))


def check_bytes(tensors, kind, quant, want_output, zero_centered, got):
    """The bytes are those of the output: of the rounded one, or for fp32 of the output itself."""
    if "delayed" in quant and not want_output:  # quantized from fp32, which fp32 inputs return
        tensors = (tensors[0].float(), *tensors[1:])
    y = forward(kernels, tensors, kind, "", True, zero_centered)[0]
    scale = torch.tensor([1.0, 50.0], device=DEVICE)
    want = reference.quantize(y, quant, scale, 1, None, True, got.col is not None, None)
    same_bytes(got.row, want.row, quant.split(",")[1])
    if got.col is not None:
        same_bytes(got.col, want.col, quant.split(",")[1])
    assert torch.equal(got.scale_inv, want.scale_inv) and torch.equal(got.amax, want.amax)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "quant, want_output",
    [("", False), (CURRENT, False), (DELAYED, False), (CURRENT, True), (DELAYED, True)],
)
@pytest.mark.parametrize(
    "shape, dtype",
    [((37, 50), torch.bfloat16), ((5, 1030), torch.float32), ((1, 16), torch.float16)],
)
def test_forward(shape, dtype, quant, want_output, kind):
    check_forward(inputs(*shape, dtype, kind), kind, quant, want_output, zero_centered=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant", ["", CURRENT, DELAYED])
def test_forward_of_long_rows(short_blocks, quant, kind):
    check_forward(inputs(7, 300, torch.bfloat16, kind), kind, quant, False, zero_centered=True)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_weights_with_bf16_input(kind):
    tensors = inputs(20, 64, torch.bfloat16, kind, torch.float32)
    check_forward(tensors, kind, DELAYED, True, zero_centered=False, columnwise=False)
    check_forward(tensors, kind, DELAYED, False, zero_centered=False, columnwise=False)


def test_layernorm_without_bias():
    x, weight, _ = inputs(20, 64, torch.float32, "LayerNorm")
    check_forward((x, weight, None), "LayerNorm", CURRENT, False, zero_centered=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant", ["", CURRENT, DELAYED])
def test_no_rows(quant, kind):
    check_forward(inputs(0, 32, torch.bfloat16, kind), kind, quant, False, zero_centered=False)


def test_a_nan_row_stays_nan_and_leaves_the_amax():
    x, weight, bias = inputs(20, 64, torch.bfloat16, "LayerNorm")
    x[3, 5] = float("nan")
    for quant in (CURRENT, DELAYED):
        *_, row, col, _, _, amax, _ = forward(kernels, (x, weight, bias), "LayerNorm", quant)
        assert ((row[3] & 0x7F) == 0x7F).all() and ((col[:, 3] & 0x7F) == 0x7F).all()
        assert amax.isfinite() and amax > 0


def backward(backend, tensors, kind, dy, dy2, need_dx=True, need_dweight=True):
    x, weight = tensors[:2]
    _, mean, rstd, *_ = forward(reference, tensors, kind)
    return backend.norm_backward(dy, dy2, x, mean, rstd, weight, True, kind, need_dx, need_dweight)


def check_backward(tensors, kind, dy, dy2, need_dx=True, need_dweight=True):
    arguments = (tensors, kind, dy, dy2, need_dx, need_dweight)
    got, want = backward(kernels, *arguments), backward(reference, *arguments)
    rows = tensors[0].shape[0]
    for g, w, size in zip(got, want, (8.0, 4.0 * rows**0.5, 4.0 * rows**0.5)):
        assert (g is None) == (w is None)
        if w is not None:
            assert_close(g, w, scale=size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gradients", ["dy", "dy2", "both"])
@pytest.mark.parametrize(
    "shape, dtype",
    [((37, 50), torch.bfloat16), ((5, 1030), torch.float32), ((1, 16), torch.float16)],
)
def test_backward(shape, dtype, gradients, kind):
    tensors = inputs(*shape, dtype, kind)
    dy, dy2 = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
    check_backward(
        tensors, kind, None if gradients == "dy2" else dy, None if gradients == "dy" else dy2
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("need_dx, need_dweight", [(True, False), (False, True), (True, True)])
def test_backward_of_long_rows_and_only_what_is_needed(short_blocks, need_dx, need_dweight, kind):
    for columns in (300, 100):
        tensors = inputs(19, columns, torch.float32, kind)
        dy, dy2 = (torch.randn(19, columns, device=DEVICE) for _ in range(2))
        check_backward(tensors, kind, dy, dy2, need_dx, need_dweight)


@pytest.mark.parametrize("kind", KINDS)
def test_backward_of_no_rows(kind):
    tensors = inputs(0, 32, torch.bfloat16, kind)
    check_backward(tensors, kind, torch.randn(0, 32, device=DEVICE).bfloat16(), None)


def test_weight_gradients_are_reproducible():
    tensors = inputs(150, 96, torch.float32, "LayerNorm")
    dy = torch.randn(150, 96, device=DEVICE)
    first, second = (backward(kernels, tensors, "LayerNorm", dy, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
