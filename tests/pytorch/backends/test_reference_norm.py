# SPDX-License-Identifier: Apache-2.0
"""The plain-torch norm leaves against float64 autograd."""

import pytest
import torch

import references
from transformer_engine.pytorch.backends import reference

KINDS = ["LayerNorm", "RMSNorm"]
EPS = 1e-3
# (x, weight)
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]
# A result differs from the exact one by its own rounding and a little fp32 noise.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 1e-5},
    torch.float16: {"rtol": 2**-11, "atol": 1e-5},
}

pytestmark = pytest.mark.usefixtures("poison_empty")


def operands(kind, dtypes, device, shape=(13, 48), mean=0.5, seed=0):
    """``x, weight, bias, dy, dy2``; bias is None for RMSNorm."""
    generator = torch.Generator().manual_seed(seed)
    x_dtype, w_dtype = dtypes

    def random(*size):
        return torch.randn(size, generator=generator)

    x = (random(*shape) * 2 + mean).to(x_dtype)
    weight, bias = random(shape[1]).to(w_dtype), random(shape[1]).to(w_dtype)
    dy, dy2 = random(*shape).to(x_dtype), random(*shape).to(x_dtype)
    tensors = (x, weight, bias if kind == "LayerNorm" else None, dy, dy2)
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def forward(x, weight, bias, kind, zero_centered=False, quant="", scale=None, want_output=True):
    """``norm_forward`` with all layouts if it quantizes."""
    q = bool(quant)
    return reference.norm_forward(
        x, weight, bias, EPS, zero_centered, kind, quant, scale, 0, q, q, want_output
    )


def same(actual, expected):
    """Whether two tensors are equal, or both absent."""
    if actual is None or expected is None:
        return actual is expected
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_forward(device, kind, dtypes, zero_centered):
    x, weight, bias, _, _ = operands(kind, dtypes, device)
    y, mean, rstd, *rest = forward(x, weight, bias, kind, zero_centered)
    assert rest == [None] * 6 and y.dtype == x.dtype and y.shape == x.shape
    x64, w64 = x.double(), weight.double()
    b64 = None if bias is None else bias.double()
    expected = references.norm(x64, w64, b64, EPS, zero_centered, kind)
    torch.testing.assert_close(y.double(), expected, **TOLERANCE[x.dtype])
    assert rstd.dtype == torch.float32 and rstd.shape == (x.shape[0],)
    if kind == "LayerNorm":
        variance = x64.var(1, unbiased=False)
        torch.testing.assert_close(mean.double(), x64.mean(1), rtol=1e-6, atol=1e-6)
    else:
        assert mean is None
        variance = x64.square().mean(1)
    torch.testing.assert_close(rstd.double(), (variance + EPS).rsqrt(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("ways", ["dy", "dy2", "both"])
def test_backward(device, kind, dtypes, zero_centered, ways):
    x, weight, bias, dy, dy2 = operands(kind, dtypes, device, seed=1)
    dy, dy2 = None if ways == "dy2" else dy, None if ways == "dy" else dy2
    _, mean, rstd, *_ = forward(x, weight, bias, kind, zero_centered)
    dx, dweight, dbias = reference.norm_backward(
        dy, dy2, x, mean, rstd, weight, zero_centered, kind, True, True
    )
    x64, w64, b64 = map(references.leaf64, (x, weight, bias))
    grad = sum(part.double() for part in (dy, dy2) if part is not None)
    references.norm(x64, w64, b64, EPS, zero_centered, kind).backward(grad)
    assert dx.dtype == x.dtype and dweight.dtype == weight.dtype
    torch.testing.assert_close(dx.double(), x64.grad, **TOLERANCE[x.dtype])
    torch.testing.assert_close(dweight.double(), w64.grad, **TOLERANCE[weight.dtype])
    if bias is None:
        assert dbias is None
    else:
        assert dbias.dtype == weight.dtype
        torch.testing.assert_close(dbias.double(), b64.grad, **TOLERANCE[weight.dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_backward_computes_what_is_needed(device, kind):
    x, weight, bias, dy, _ = operands(kind, DTYPES[0], device)
    _, mean, rstd, *_ = forward(x, weight, bias, kind)
    arguments = (dy, None, x, mean, rstd, weight, False, kind)
    full = reference.norm_backward(*arguments, True, True)
    dx, dweight, dbias = reference.norm_backward(*arguments, True, False)
    assert torch.equal(dx, full[0]) and dweight is None and dbias is None
    dx, dweight, dbias = reference.norm_backward(*arguments, False, True)
    assert dx is None and torch.equal(dweight, full[1])
    assert dbias is None if kind == "RMSNorm" else torch.equal(dbias, full[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant", ["", "current,e4m3", "delayed,e4m3"])
def test_no_rows(device, kind, quant):
    x, weight, bias, dy, _ = operands(kind, DTYPES[1], device, shape=(0, 48))
    y, mean, rstd, row, col, scale_inv, _, amax, _ = forward(
        x, weight, bias, kind, False, quant, torch.ones(1, device=device)
    )
    assert y.shape == (0, 48) and rstd.shape == (0,)
    if quant:
        assert row.shape == (0, 48) and col.shape == (48, 0)
        assert scale_inv.item() == 1.0 and amax.item() == 0.0
    dx, dweight, dbias = reference.norm_backward(
        dy, None, x, mean, rstd, weight, False, kind, True, True
    )
    assert dx.shape == (0, 48) and dx.dtype == x.dtype
    assert torch.equal(dweight, torch.zeros_like(weight))
    assert dbias is None or torch.equal(dbias, torch.zeros_like(weight))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtypes", DTYPES[:3])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("want_output", [False, True])
def test_what_is_quantized(device, kind, dtypes, recipe, want_output):
    """The fp32 result for delayed scaling without an output, else the rounded result."""
    x, weight, bias, _, _ = operands(kind, dtypes, device)
    scale = torch.tensor([77.7], device=device)
    quant = f"{recipe},e4m3"
    y, mean, rstd, *quantized = forward(x, weight, bias, kind, True, quant, scale, want_output)
    plain, plain_mean, plain_rstd, *_ = forward(x, weight, bias, kind, True)
    assert torch.equal(rstd, plain_rstd) and (mean is None or torch.equal(mean, plain_mean))
    if want_output:
        assert torch.equal(y, plain)
    else:
        assert y is None
    source = plain
    if recipe == "delayed" and not want_output:
        source = forward(x.float(), weight, bias, kind, True)[0]
    expected = reference.quantize(source, quant, scale, 0, None, True, True, None)
    for actual, tensor in zip(quantized, expected, strict=True):
        assert same(actual, tensor)


# Options that decide what of a norm's result is quantized; formats are tested in tests/formats.
BLOCKS = (
    "block,e4m3,pow2=1",
    "mxfp8,e4m3,swizzled=1",
    "mxfp8,e4m3,dim=2,unrounded=1",
    "nvfp4,e2m1,rht=1",
    "nvfp4,e2m1,row_scaled=1",
    "nvfp4,e2m1,four_over_six=mse",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quant", BLOCKS)
@pytest.mark.parametrize("want_output", [False, True])
def test_what_block_scaling_quantizes(device, kind, quant, want_output):
    """The rounded result, or with ``unrounded`` the fp32 one."""
    x, weight, bias, _, _ = operands(kind, DTYPES[1], device, shape=(33, 64))
    y, _, rstd, *quantized = forward(x, weight, bias, kind, True, quant, None, want_output)
    plain, _, plain_rstd, *_ = forward(x, weight, bias, kind, True)
    exact = forward(x.float(), weight, bias, kind, True)[0]
    assert torch.equal(rstd, plain_rstd) and not torch.equal(plain.float(), exact)
    assert torch.equal(y, plain) if want_output else y is None
    source = exact if "unrounded" in quant else plain
    expected = reference.quantize(source, quant, None, 0, None, True, True, None)
    for actual, tensor in zip(quantized, expected, strict=True):
        assert same(actual, tensor)


@pytest.mark.parametrize("rows", [0, 64, 128, 200, 256])
def test_rows_decide_what_is_quantized(device, rows):
    """``unrounded=2``: the fp32 result where rows are a multiple of 128, otherwise the rounded."""
    x, weight, bias, _, _ = operands("RMSNorm", DTYPES[1], device, shape=(rows, 128))
    quantized = forward(x, weight, bias, "RMSNorm", True, "mxfp8,e4m3,unrounded=2", None)[3:]
    source = x.float() if rows % 128 == 0 else x
    source = forward(source, weight, bias, "RMSNorm", True)[0]
    expected = reference.quantize(source, "mxfp8,e4m3", None, 0, None, True, True, None)
    for actual, tensor in zip(quantized, expected, strict=True):
        assert same(actual, tensor)


def test_large_mean(device):
    x, weight, bias, _, _ = operands("LayerNorm", DTYPES[0], device, mean=1000.0)
    y = forward(x, weight, bias, "LayerNorm")[0]
    expected = references.layer_norm(x.double(), weight.double(), bias.double(), EPS)
    # The mean is an fp32 number: it is known to 3e-5.
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_mix(device, kind):
    x, weight, bias, _, _ = operands(kind, DTYPES[0], device)
    clean = forward(x, weight, bias, kind)[0]
    x[3, 5] = float("nan")
    x[7] = 0.0
    y = forward(x, weight, bias, kind)[0]
    assert y[3].isnan().all()
    if kind == "LayerNorm":
        torch.testing.assert_close(y[7], bias, rtol=0, atol=0)
    untouched = [row for row in range(x.shape[0]) if row not in (3, 7)]
    assert torch.equal(y[untouched], clean[untouched])
