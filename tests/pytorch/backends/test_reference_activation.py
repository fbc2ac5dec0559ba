# SPDX-License-Identifier: Apache-2.0
"""The plain-torch activation leaves against float64 autograd."""

import pytest
import torch

import references
from transformer_engine.pytorch.backends import reference

PARAMETERS = (1.5, 1.3, 0.25)  # limit, alpha, offset of clamped_swiglu; small enough to matter
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-6},
    torch.float16: {"rtol": 2**-11, "atol": 1e-6},
}

pytestmark = pytest.mark.usefixtures("poison_empty")


def operands(act, dtype, device, rows=13, width=24, seed=0):
    """``x`` (with exact zeros and limits in it) and ``dy``."""
    generator = torch.Generator().manual_seed(seed)
    columns = width if act in references.UNGATED else 2 * width
    x = torch.randn(rows, columns, generator=generator) * 2
    if rows:
        x[0, 0] = x[0, width - 1] = 0.0
        x[1, 0] = x[1, -1] = PARAMETERS[0]
        x[2, -1] = -PARAMETERS[0]
    dy = torch.randn(rows, width, generator=generator)
    return x.to(dtype).to(device), dy.to(dtype).to(device)


def forward(x, act, quant="", scale=None, want_output=True):
    """``activation_forward`` with all layouts if it quantizes."""
    q = bool(quant)
    return reference.activation_forward(x, act, *PARAMETERS, quant, scale, 0, q, q, want_output)


def backward(dy, x, act, quant="", scale=None, want_output=True, want_bias_grad=True, rng=None):
    """``activation_backward`` with all layouts if it quantizes."""
    q = bool(quant)
    return reference.activation_backward(
        dy, x, act, *PARAMETERS, quant, scale, 0, q, q, want_output, want_bias_grad, rng
    )


def same(actual, expected):
    """Whether two tensors are equal, or both absent."""
    if actual is None or expected is None:
        return actual is expected
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


@pytest.mark.parametrize("act", references.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(device, act, dtype):
    x, dy = operands(act, dtype, device)
    before = x.clone(), dy.clone()
    y, *rest = forward(x, act)
    dx, *backward_rest, dbias = backward(dy, x, act)
    assert rest == backward_rest == [None] * 6
    assert torch.equal(x, before[0]) and torch.equal(dy, before[1])
    x64 = references.leaf64(x)
    expected = references.activation(x64, act, *PARAMETERS)
    expected.backward(dy.double())
    assert y.dtype == dx.dtype == dbias.dtype == dtype and dx.shape == x.shape
    torch.testing.assert_close(y.double(), expected.detach(), **TOLERANCE[dtype])
    torch.testing.assert_close(dx.double(), x64.grad, **TOLERANCE[dtype])
    # The bias gradient is the fp32 sum of the rounded dx.
    torch.testing.assert_close(dbias.double(), dx.double().sum(0), **TOLERANCE[dtype])


@pytest.mark.parametrize("act", references.ACTIVATIONS)
def test_wide_range(device, act):
    """Large arguments saturate instead of overflowing; the negative tail keeps its precision."""
    x = torch.cat([torch.linspace(-80, 80, 1601), torch.tensor([-1e4, 1e4])]).view(1, -1)
    if act not in references.UNGATED:
        x = torch.cat([x, torch.ones_like(x)], dim=1)
    x = x.to(device)
    width = 1603
    x64 = references.leaf64(x)
    y64 = references.activation(x64, act, *PARAMETERS)
    y64.sum().backward()
    y = forward(x, act)[0]
    dx = backward(torch.ones(1, width, device=device), x, act)[0]
    assert y.isfinite().all() and dx.isfinite().all()
    torch.testing.assert_close(y.double(), y64.detach(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(dx.double(), x64.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("act", references.ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("want_output", [False, True])
def test_what_is_quantized(device, act, dtype, recipe, want_output):
    """Delayed scaling: the fp32 result; current scaling: the rounded one, with the fp32 amax."""
    x, dy = operands(act, dtype, device)
    quant, scale = f"{recipe},e5m2", torch.tensor([33.3], device=device)
    for run, inputs in ((forward, (x,)), (backward, (dy, x))):
        plain, *_ = run(*inputs, act)
        exact, *_ = run(*(tensor.float() for tensor in inputs), act)
        y, *quantized = run(*inputs, act, quant, scale, want_output)
        quantized, dbias = quantized[:6], quantized[6:]
        if want_output:
            assert torch.equal(y, plain)
        else:
            assert y is None
        source = exact if recipe == "delayed" else plain
        exact_amax = exact.abs().amax().view(1)
        expected = reference.quantize(source, quant, scale, 0, exact_amax, True, True, None)
        for actual, tensor in zip(quantized, expected, strict=True):
            assert same(actual, tensor)
        if dbias:
            assert torch.equal(dbias[0], source.sum(0, dtype=torch.float32).to(dtype))


BLOCKS = (
    "block,e5m2",
    "mxfp8,e4m3,swizzled=1",
    "nvfp4,e2m1",
    "nvfp4,e2m1,dim=2",
    "nvfp4,e2m1,rht=1",
    "nvfp4,e2m1,row_scaled=1",
    "nvfp4,e2m1,four_over_six=mae,e4m3_max=256",
)


@pytest.mark.parametrize("act", ["silu", "swiglu", "srelu"])
@pytest.mark.parametrize("quant", BLOCKS)
@pytest.mark.parametrize("want_output", [False, True])
def test_what_block_scaling_quantizes(device, act, quant, want_output):
    """The rounded result; the amax of NVFP4 is that of the fp32 result unless it is transformed or
    there is one per row.
    """
    x, dy = operands(act, torch.bfloat16, device, rows=33, width=64)
    for run, inputs in ((forward, (x,)), (backward, (dy, x))):
        plain, *_ = run(*inputs, act)
        exact, *_ = run(*(tensor.float() for tensor in inputs), act)
        assert exact.abs().max() != plain.abs().max()
        y, *quantized = run(*inputs, act, quant, None, want_output)
        assert torch.equal(y, plain) if want_output else y is None
        whole = quant.startswith("nvfp4") and "rht" not in quant and "row" not in quant
        amax = exact.abs().amax().view(1) if whole else None
        expected = reference.quantize(plain, quant, None, 0, amax, True, True, None)
        for actual, tensor in zip(quantized[:6], expected, strict=True):
            assert same(actual, tensor)
        for dbias in quantized[6:]:
            assert torch.equal(dbias, plain.sum(0, dtype=torch.float32).to(x.dtype))


def test_stochastic_rounding_of_a_gradient(device):
    """The random state that is handed over decides, as in ``quantize``."""
    x, dy = operands("gelu", torch.bfloat16, device, rows=32, width=64)
    quant, seeds = "nvfp4,e2m1,stochastic=1", torch.tensor([[3, 4], [3, 5]], device=device)
    plain = backward(dy, x, "gelu")[0]
    amax = backward(dy.float(), x.float(), "gelu")[0].abs().amax().view(1)
    rows = []
    for rng in seeds:
        _, *quantized, _ = backward(dy, x, "gelu", quant, None, False, True, rng)
        expected = reference.quantize(plain, quant, None, 0, amax, True, True, rng)
        assert all(map(same, quantized, expected))
        rows.append(quantized[0])
    assert not torch.equal(*rows)


@pytest.mark.parametrize("act", references.ACTIVATIONS)
@pytest.mark.parametrize("quant", ["", "current,e4m3", "delayed,e4m3"])
def test_no_rows(device, act, quant):
    x, dy = operands(act, torch.bfloat16, device, rows=0)
    scale = torch.ones(1, device=device)
    y, row, col, scale_inv, _, amax, _ = forward(x, act, quant, scale)
    dx, *_, dbias = backward(dy, x, act, quant, scale)
    assert y.shape == dy.shape and dx.shape == x.shape
    assert torch.equal(dbias, torch.zeros_like(x[:1].sum(0)))
    if quant:
        assert row.shape == dy.shape and col.shape == (dy.shape[1], 0)
        assert scale_inv.item() == 1.0 and amax.item() == 0.0


@pytest.mark.parametrize("act", references.ACTIVATIONS)
def test_nan_stays_nan(device, act):
    x, dy = operands(act, torch.float32, device)
    x[3, 4] = float("nan")
    y, row, _, scale_inv, _, amax, _ = forward(x, act, "current,e4m3")
    assert y[3, 4].isnan() and y.isnan().sum() == 1
    assert row[3, 4].item() & 0x7F == 0x7F
    assert amax.isfinite().all() and scale_inv.isfinite().all()
    dy[5, 6] = float("nan")
    dx = backward(dy, x, act)[0]
    assert set(dx.isnan().nonzero()[:, 0].tolist()) <= {3, 5}


@pytest.mark.parametrize("act", ["gelu", "swiglu"])
def test_bias_grad_on_request(device, act):
    x, dy = operands(act, torch.float32, device)
    assert backward(dy, x, act, want_bias_grad=False)[-1] is None


def test_errors_say_what_to_change(device):
    x = torch.zeros(2, 5, device=device)
    with pytest.raises(ValueError, match="swish.*swiglu"):
        forward(x, "swish")
    with pytest.raises(ValueError, match="5 columns.*even"):
        forward(x, "geglu")
