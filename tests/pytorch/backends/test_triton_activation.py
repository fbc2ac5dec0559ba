# SPDX-License-Identifier: Apache-2.0
"""Triton activations agree with the reference to the last bits, their bytes follow from outputs."""

import pytest
import torch
from triton_support import DEVICE, ON_GPU, REASON, assert_close, poison_empty, same_bytes

from transformer_engine.pytorch.backends import reference
from transformer_engine.pytorch.backends import triton as kernels

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

GATED = {
    "gelu": 1, "geglu": 2, "glu": 2, "qgelu": 1, "qgeglu": 2, "relu": 1, "reglu": 2, "srelu": 1,
    "sreglu": 2, "silu": 1, "swiglu": 2, "clamped_swiglu": 2,
}  # fmt: skip
CURRENT, DELAYED = "current,e4m3", "delayed,e5m2"
PARAMETERS = (2.0, 1.702, -1.0)  # limit, alpha, offset: clamping many, and negative to show -0


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_empty(monkeypatch)


def inputs(rows, width, act, dtype):
    torch.manual_seed(rows)
    x = (torch.randn(rows, width * GATED[act], device=DEVICE) * 3).to(dtype)
    return torch.randn(rows, width, device=DEVICE).to(dtype), x


def run(backend, tensors, act, quant, want_output, backward, bias_grad=True, columnwise=True):
    dy, x = tensors
    scale = torch.tensor([1.0, 20.0], device=DEVICE)
    arguments = (act, *PARAMETERS, quant, scale, 1, True, columnwise, want_output)
    if backward:
        return backend.activation_backward(dy, x, *arguments, bias_grad, None)
    return (*backend.activation_forward(x, *arguments), None)


def check(tensors, act, quant, want_output, backward, bias_grad=True, columnwise=True):
    arguments = (act, quant, want_output, backward, bias_grad, columnwise)
    got, want = run(kernels, tensors, *arguments), run(reference, tensors, *arguments)
    assert [g is None for g in got] == [w is None for w in want]
    y, row, col, scale_inv, _, amax, _, dbias = got
    rows = tensors[1].shape[0]
    if y is not None:
        assert_close(y, want[0], scale=8.0)
    if dbias is not None:
        assert_close(dbias, want[-1], scale=8.0 * max(rows, 1) ** 0.5)
    if not quant:
        return
    # Bytes, exactly, of the kernels' own values: fp32 ones are what fp32 inputs return.
    delayed = "delayed" in quant
    exact = tuple(t.float() for t in tensors)
    values = run(kernels, exact, act, "", True, backward, False)[0]
    wanted = reference.quantize(values, CURRENT, None, None, None, False, False, None)
    assert torch.equal(amax, wanted.amax)
    if not delayed:
        values = run(kernels, tensors, act, "", True, backward, False)[0]
    scale = torch.tensor([1.0, 20.0], device=DEVICE)
    expected = reference.quantize(values, quant, scale, 1, amax, True, columnwise, None)
    same_bytes(row, expected[0], quant.split(",")[1])
    if columnwise:
        same_bytes(col, expected[1], quant.split(",")[1])
    assert torch.equal(scale_inv, expected.scale_inv)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("quant", ["", CURRENT, DELAYED])
@pytest.mark.parametrize("act", GATED)
def test_activation(act, quant, backward):
    check(inputs(37, 80, act, torch.bfloat16), act, quant, False, backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("quant", [CURRENT, DELAYED])
@pytest.mark.parametrize("act", ["gelu", "clamped_swiglu"])
@pytest.mark.parametrize(
    "shape, dtype", [((64, 64), torch.float16), ((3, 130), torch.float32), ((1, 16), torch.float32)]
)
def test_output_and_bytes(shape, dtype, act, quant, backward):
    check(inputs(*shape, act, dtype), act, quant, True, backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("quant", ["", CURRENT, DELAYED])
@pytest.mark.parametrize("act", ["gelu", "swiglu"])
def test_no_rows(act, quant, backward):
    check(inputs(0, 150, act, torch.bfloat16), act, quant, False, backward)


@pytest.mark.parametrize("act", ["silu", "swiglu"])
def test_one_orientation_without_bias_gradient(act):
    check(inputs(20, 48, act, torch.bfloat16), act, DELAYED, False, True, False, columnwise=False)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("act", GATED)
def test_special_values(act, backward):
    """Zeros of both signs, infinities, NaN and large numbers end where the reference puts them."""
    specials = [
        0.0,
        -0.0,
        float("inf"),
        -float("inf"),
        float("nan"),
        90.0,
        -90.0,
        1e4,
        -1e4,
        2.0,
        -2.0,
    ]
    if backward and act == "clamped_swiglu":
        specials.remove(specials[4])  # the reference's gradient at NaN is 0 on a CPU, not on a GPU
    x = torch.tensor(specials, device=DEVICE)
    if GATED[act] == 2:
        a, g = torch.meshgrid(x, x, indexing="ij")
        x = torch.cat([a.reshape(1, -1), g.reshape(1, -1)], 1)
    else:
        x = x.view(1, -1)
    x = x.repeat(2, 1).contiguous()
    dy = torch.full((2, x.shape[1] // GATED[act]), 0.5, device=DEVICE)
    dy[1] = -1.0
    got = run(kernels, (dy, x), act, "", True, backward, False)[0]
    want = run(reference, (dy, x), act, "", True, backward, False)[0]
    torch.testing.assert_close(
        got, want, rtol=1e-5, atol=1e-30 if not backward else 1e-6, equal_nan=True
    )
    # torch.relu of -0 on a GPU, and products that underflow, are zeros of either sign.
    if ON_GPU if act in ("relu", "reglu", "srelu", "sreglu") else backward:
        return
    zero = want == 0
    assert torch.equal(got[zero].signbit(), want[zero].signbit())


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="The activation 'swish' is not known"):
        run(kernels, inputs(2, 16, "silu", torch.float32), "swish", "", True, False)


@pytest.mark.parametrize("quant", [CURRENT, DELAYED])
def test_results_are_reproducible(quant):
    tensors = inputs(70, 90, "swiglu", torch.bfloat16)
    first, second = (run(kernels, tensors, "swiglu", quant, True, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second) if a is not None)
