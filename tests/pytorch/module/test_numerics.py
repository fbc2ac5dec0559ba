# SPDX-License-Identifier: Apache-2.0
"""Modules in high precision against float64 models: outputs and every gradient.

The limits are relative errors of a whole tensor. For bf16 and fp16 the model rounds where the
module stores a result, so what remains is about one rounding, whose relative error is below the
unit roundoff u = 2^-p, and a few results that fell to the other side. For fp32 the model does not
round: sixteen u cover sums of a hundred terms.
"""

import itertools

import pytest
import torch
from eager_support import (
    BF16,
    FP16,
    FP32,
    K,
    NORMS,
    UNIT,
    assert_product,
    assert_steps_near,
    build,
    model,
    random,
    run,
)
from references import ACTIVATIONS

DTYPES = (FP32, BF16, FP16)
LIMIT = {FP32: 16 * UNIT[FP32], BF16: 1.5 * UNIT[BF16], FP16: 1.5 * UNIT[FP16]}
ROWS = 24
FLAGS = tuple(
    dict(zip(("bias", "zero_centered_gamma", "return_bias", "return_layernorm_output"), values))
    for values in itertools.product((True, False), repeat=4)
)


def check(module, dtype, rows=ROWS, **arguments):
    """One step of the module and of its model agree."""
    device = next(module.parameters()).device
    x = random(rows, K, dtype=dtype, device=device)
    step = run(module, x, **arguments)
    want = model(module, x, step.dys, dtype=None if dtype == FP32 else dtype)
    assert_steps_near(step, want, LIMIT[dtype], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("return_bias", (True, False))
def test_linear(dtype, bias, return_bias, device):
    """Output, input gradient, weight gradient, bias gradient."""
    check(build("Linear", device, dtype=dtype, bias=bias, return_bias=return_bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_element_by_element(dtype, device):
    """Each of the three products is rounded once from a sum in fp32."""
    module = build("Linear", device, dtype=dtype)
    x, dy = random(ROWS, K, dtype=dtype, device=device), random(ROWS, 48, seed=1, dtype=dtype)
    step = run(module, x, dys=[dy.to(device)])
    x, dy, w = x.double(), dy.to(device).double(), module.weight.detach().double()
    assert_product(step.outputs[0], x, w, module.bias.detach().double(), fp8=False)
    assert_product(step.grads["x"], dy, w.t(), fp8=False)
    assert_product(step.grads["weight"], dy.t(), x.t(), fp8=False)
    ones = torch.ones(1, ROWS, dtype=torch.float64, device=device)
    assert_product(step.grads["bias"][None], ones, dy.t(), fp8=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_layernorm_linear(dtype, normalization, flags, device):
    """Every combination of flags."""
    check(
        build("LayerNormLinear", device, dtype=dtype, normalization=normalization, **flags), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_layernorm_mlp(dtype, normalization, flags, device):
    """Every combination of flags, with a gated activation."""
    options = {"normalization": normalization, "activation": "swiglu", **flags}
    check(build("LayerNormMLP", device, dtype=dtype, **options), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number,activation", list(enumerate(ACTIVATIONS)))
def test_activations(dtype, number, activation, device):
    """All twelve, each with another combination of norm and flags."""
    options = {"normalization": NORMS[number % 2], **FLAGS[(5 * number + 3) % len(FLAGS)]}
    check(build("LayerNormMLP", device, dtype=dtype, activation=activation, **options), dtype)


def test_activation_params(device):
    """The clamps of ``clamped_swiglu`` bite, in forward and backward, and can be changed."""
    params = {"limit": 0.5, "alpha": 1.1, "glu_linear_offset": 0.25}
    options = {"activation": "clamped_swiglu", "activation_params": params}
    module = build("LayerNormMLP", device, **options)
    check(module, FP32)
    default = build("LayerNormMLP", device, activation="clamped_swiglu")
    x = random(ROWS, K, device=device)
    assert not torch.allclose(run(module, x).outputs[0], run(default, x).outputs[0], atol=0.05)
    partial = build("LayerNormMLP", device, **{**options, "activation_params": {"limit": 0.5}})
    check(partial, FP32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("zero_centered_gamma", (False, True))
@pytest.mark.parametrize("eps", (1e-7, 1e-1))
def test_norms(dtype, kind, zero_centered_gamma, eps, device):
    """Output and all gradients."""
    options = {"zero_centered_gamma": zero_centered_gamma, "eps": eps}
    check(build(kind, device, dtype=dtype, **options), dtype)


@pytest.mark.parametrize("kind", ("LayerNorm", "LayerNormLinear", "LayerNormMLP"))
def test_layernorm_of_shifted_rows(kind, device):
    """A mean far from zero costs the digits it must and no more: it is subtracted first."""
    module = build(kind, device)
    x = random(ROWS, K, device=device) + 1000.0
    step = run(module, x)
    want = model(module, x, step.dys)
    # x itself is known to 1000 u only.
    assert_steps_near(step, want, 1000 * LIMIT[FP32], FP32)


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP", *NORMS))
def test_eps_reaches_the_norm(kind, device):
    """Rows of tiny values are governed by eps."""
    module = build(kind, device, eps=1e-2)
    x = random(ROWS, K, device=device) * 1e-4
    step = run(module, x)
    assert_steps_near(step, model(module, x, step.dys), LIMIT[FP32], FP32)


@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear", "LayerNormMLP"))
def test_is_first_microbatch_does_not_matter_in_high_precision(kind, device):
    """The argument is about quantized weights."""
    module = build(kind, device, dtype=BF16)
    x = random(ROWS, K, dtype=BF16, device=device)
    expected = run(module, x)
    for value in (True, False):
        step = run(module, x, is_first_microbatch=value)
        assert torch.equal(step.outputs[0], expected.outputs[0])
        assert torch.equal(step.grads["x"], expected.grads["x"])


@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear", "LayerNormMLP", *NORMS))
@pytest.mark.parametrize("dtype", (BF16, FP16))
def test_wide_and_many_rows(kind, dtype, device):
    """Long sums stay in fp32: an accumulation in half precision would miss the limit by far."""
    rows, width = 300, 512
    module = build(kind, device, dtype=dtype, width=width, out=64, ffn=128)
    x = random(rows, width, dtype=dtype, device=device)
    step = run(module, x)
    want = model(module, x, step.dys, dtype=dtype)
    assert_steps_near(step, want, LIMIT[dtype], dtype)
