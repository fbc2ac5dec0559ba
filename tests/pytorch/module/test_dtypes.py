# SPDX-License-Identifier: Apache-2.0
"""Which dtype comes out: torch.autocast, mixed inputs and parameters, and what is refused."""

import pytest
import torch
from eager_support import BF16, FP16, FP32, GEMM_MODULES, K, NORMS, UNIT, assert_near, build, random
import references

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

LOW = (BF16, FP16)


def torch_module(kind, device):
    """What a user of plain torch would write."""
    nn, options = torch.nn, {"device": device}
    if kind == "Linear":
        return nn.Linear(K, 48, **options)
    if kind == "LayerNormLinear":
        return nn.Sequential(nn.LayerNorm(K, **options), nn.Linear(K, 48, **options))
    mlp = (nn.Linear(K, 96, **options), nn.GELU(), nn.Linear(96, K, **options))
    return nn.Sequential(nn.LayerNorm(K, **options), *mlp)


def step(module, x, dtype, recipe=None):
    """Forward under torch.autocast, backward outside of it, as torch's documentation says."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=dtype):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x)
    y.float().square().sum().backward()
    return y, x.grad, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("x_dtype", (FP32, BF16))
def test_autocast_dtypes_are_torchs(kind, dtype, x_dtype, device):
    """fp32 parameters: output in the autocast dtype, gradients in that of what they belong to."""
    x = random(8, K, device=device, dtype=x_dtype)
    y, dx, grads = step(build(kind, device), x, dtype)
    y_torch, dx_torch, grads_torch = step(torch_module(kind, device), x, dtype)
    assert y.dtype == y_torch.dtype == dtype
    assert dx.dtype == dx_torch.dtype == x_dtype
    assert {g.dtype for g in grads.values()} == {g.dtype for g in grads_torch.values()} == {FP32}


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "recipe", (None, Float8CurrentScaling(), DelayedScaling()), ids=("none", "current", "delayed")
)
def test_autocast_computes_as_a_cast_module(kind, dtype, recipe, device):
    """fp32 parameters under autocast: the bits of a module whose parameters are in that dtype."""
    module, cast = build(kind, device), build(kind, device, dtype=dtype)
    x = random(8, K, device=device)
    for _ in range(2):
        y, dx, grads = step(module, x, dtype, recipe)
        cast.zero_grad()
        leaf = x.to(dtype).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            expected = cast(leaf)
        expected.float().square().sum().backward()
        assert torch.equal(y, expected) and torch.equal(dx, leaf.grad.float())
        for name, param in cast.named_parameters():
            assert torch.equal(grads[name], param.grad.float()), name


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("param_dtype", (FP32, BF16, FP16))
def test_autocast_beats_every_parameter_dtype(kind, param_dtype, device):
    """Nothing is refused inside of torch.autocast."""
    module = build(kind, device, dtype=param_dtype)
    for x_dtype in (FP32, BF16, FP16):
        y, dx, grads = step(module, random(8, K, device=device, dtype=x_dtype), BF16)
        assert y.dtype == BF16 and dx.dtype == x_dtype
        assert {g.dtype for g in grads.values()} == {param_dtype}


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
def test_all_outputs_are_in_the_autocast_dtype(kind, device):
    """The returned bias is cast, the norm output is in the compute dtype; both have gradients."""
    module = build(kind, device, return_bias=True, return_layernorm_output=True)
    x = random(8, K, device=device, grad=True)
    with torch.autocast(device, dtype=BF16):
        y, bias, ln_out = module(x)
    assert y.dtype == bias.dtype == ln_out.dtype == BF16
    (y.sum() + bias.sum() + ln_out.square().sum()).backward()
    assert x.grad.dtype == FP32
    assert {p.grad.dtype for p in module.parameters()} == {FP32}
    name = "bias" if kind == "LayerNormLinear" else "fc2_bias"
    assert (getattr(module, name).grad == 1.0).all()


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", LOW)
def test_norms_under_autocast(kind, dtype, device):
    """Output in the autocast dtype (torch gives fp32 on CUDA), gradients in the parameters'."""
    norm = build(kind, device)
    y, dx, grads = step(norm, random(8, K, device=device), dtype)
    assert y.dtype == dtype and dx.dtype == FP32 and {g.dtype for g in grads.values()} == {FP32}


@pytest.mark.parametrize("kind", (*GEMM_MODULES, *NORMS))
def test_disabled_autocast_does_nothing(kind, device):
    """Also inside of an enabled one."""
    module, x = build(kind, device), random(8, K, device=device)
    with torch.autocast(device, dtype=BF16):
        with torch.autocast(device, enabled=False):
            y = module(x)
    assert y.dtype == FP32 and torch.equal(y, module(x))


def test_autocast_of_another_device_does_not_count():
    """A CPU module inside of an autocast for CUDA computes in its own dtype."""
    module, x = build("Linear"), random(8, K)
    with torch.autocast("cuda", dtype=BF16, enabled=torch.cuda.is_available()):
        assert module(x).dtype == FP32


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("x_dtype,param_dtype", ((FP32, BF16), (BF16, FP32), (FP16, BF16)))
def test_mismatch_is_refused(kind, x_dtype, param_dtype, device):
    """A TypeError that names the module, both dtypes, the parameter's shape and two cures."""
    module = build(kind, device, dtype=param_dtype, name="block.mlp")
    x = random(8, K, device=device, dtype=x_dtype)
    text = f"{kind} 'block.mlp' is {x_dtype}.*{param_dtype}.*Cast.*torch.autocast"
    with pytest.raises(TypeError, match=text):
        module(x)
    with te.autocast(recipe=Float8CurrentScaling()), pytest.raises(TypeError, match=text):
        module(x)
    # Also after a call that was right.
    assert module(x.to(param_dtype)).dtype == param_dtype
    with pytest.raises(TypeError, match=text):
        module(x)


@pytest.mark.parametrize("name", ("layer_norm_weight", "layer_norm_bias", "fc1_bias", "fc2_weight"))
def test_one_parameter_of_another_dtype_is_enough(name):
    """Every parameter is looked at."""
    module = build("LayerNormMLP")
    param = getattr(module, name)
    param.data = param.data.to(BF16)
    with pytest.raises(TypeError, match=f"{tuple(param.shape)}".replace("(", r"\(")[:-1]):
        module(random(8, K))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("x_dtype,param_dtype", ((FP32, BF16), (BF16, FP32), (FP16, BF16)))
def test_norms_cast_silently(kind, x_dtype, param_dtype, device):
    """The output has the dtype of the weight, gradients the dtype of what they belong to."""
    norm = build(kind, device, dtype=param_dtype)
    x = random(8, K, device=device, dtype=x_dtype, grad=True)
    y = norm(x)
    assert y.dtype == param_dtype
    assert torch.equal(y, norm(x.detach().to(param_dtype)))
    bias = norm.bias.double() if kind == "LayerNorm" else None
    want = references.norm(
        x.detach().to(param_dtype).double(), norm.weight.double(), bias, 1e-5, False, kind
    ).detach()
    assert_near(y.detach(), want, 8 * UNIT[FP32] + UNIT[param_dtype], "output")
    y.sum().backward()
    assert x.grad.dtype == x_dtype and {p.grad.dtype for p in norm.parameters()} == {param_dtype}


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", (Float8CurrentScaling, DelayedScaling))
@pytest.mark.parametrize("dtype", (FP32, BF16, FP16))
def test_fp8_output_and_gradients_keep_the_dtype(kind, recipe, dtype, device):
    """FP8 is inside only."""
    module = build(kind, device, dtype=dtype)
    x = random(8, K, device=device, dtype=dtype, grad=True)
    with te.autocast(recipe=recipe()):
        y = module(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert {p.grad.dtype for p in module.parameters()} == {dtype}


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_backward_inside_of_autocast_is_the_same(kind, device):
    """An ambient autocast in backward casts nothing."""
    results = []
    for inside in (False, True):
        module = build(kind, device)
        x = random(8, K, device=device, grad=True)
        y = module(x)
        with torch.autocast(device, dtype=BF16, enabled=inside):
            y.backward(torch.ones_like(y))
        results.append([x.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*results):
        assert a.dtype == b.dtype == FP32 and torch.equal(a, b)
