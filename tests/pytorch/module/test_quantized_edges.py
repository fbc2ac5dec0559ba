# SPDX-License-Identifier: Apache-2.0
"""Quantized inputs, fp8_output, fp8_grad and save_original_input."""

import pytest
import torch
from feature_report import trained_feature

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPES = {
    "delayed": (lambda: DelayedScaling(amax_history_len=4), te.Float8Tensor),
    "current": (Float8CurrentScaling, te.Float8Tensor),
    "block": (Float8BlockScaling, te.Float8BlockwiseQTensor),
    "mxfp8": (MXFP8BlockScaling, te.MXFP8Tensor),
    "nvfp4": (lambda: NVFP4BlockScaling(disable_stochastic_rounding=True), te.NVFP4Tensor),
}
# How far a value may move when it is quantized, relative to the largest of its block.
STEP = {"delayed": 2**-3, "current": 2**-3, "block": 2**-3, "mxfp8": 2**-3, "nvfp4": 2**-1}


def linear(device, out=96, **options):
    """A ``te.Linear`` with weights that are always the same."""
    torch.manual_seed(1)
    return te.Linear(64, out, params_dtype=torch.bfloat16, device=device, **options)


def edge_module(kind, device):
    """One of the modules that have the options, with weights that are always the same."""
    torch.manual_seed(1)
    build = te.Linear if kind == "linear" else te.LayerNormLinear
    return build(64, 96, params_dtype=torch.bfloat16, device=device)


def data(device, rows=32):
    """An input that collects a gradient."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(rows, 64, generator=generator).to(device, torch.bfloat16)
    return x.requires_grad_()


@pytest.mark.feature(
    "fp8_output",
    modes=("eager",),
    modules=("Linear", "LayerNormLinear"),
    other_modules="the module has no such option",
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])
def test_fp8_output(recipe, kind, device):
    """The output is the quantized high-precision output; its gradient passes through."""
    make, cls = RECIPES[recipe]
    module = edge_module(kind, device)
    x = data(device)
    with te.autocast(recipe=make()):
        plain = module(x)
        (expected,) = torch.autograd.grad(plain.sum(), x)
    module._delayed_scaling = None  # the scales of the first step again
    with te.autocast(recipe=make()):
        y = module(x, fp8_output=True)
    assert isinstance(y, cls) and y.dtype == torch.bfloat16 and y.shape == plain.shape
    assert y.get_usages() == {"rowwise": True, "columnwise": False}
    error = (y.dequantize().double() - plain.double()).abs()
    assert error.max() <= STEP[recipe] * plain.double().abs().max()
    assert error.max() > 0
    (got,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(got, expected)


def test_fp8_output_records_the_amax_of_delayed_scaling(device):
    """Slot 2 of the forward history holds the largest output."""
    module = linear(device)
    with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
        y = module(data(device), fp8_output=True)
        plain = module(data(device))
    assert module._delayed_scaling.fwd_history[-1, 2].item() == plain.abs().max().float().item()
    assert y.dequantize().abs().max() > 0


@pytest.mark.feature(
    "fp8_grad",
    modes=("eager",),
    other_modules="the module has no such option",
    modules=("Linear", "LayerNormLinear"),
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])
def test_fp8_grad(recipe, kind, device):
    """The input's gradient arrives quantized, and the layer below takes it."""
    make, cls = RECIPES[recipe]
    module = edge_module(kind, device)
    seen = []

    class Probe(torch.autograd.Function):
        """Notes the gradient that arrives."""

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad)
            return grad.dequantize() if isinstance(grad, te.QuantizedTensor) else grad

    x = data(device)
    results = []
    for fp8_grad in (False, True):
        module._delayed_scaling = None
        with te.autocast(recipe=make()):
            y = module(Probe.apply(x), fp8_grad=fp8_grad)
        results.append(torch.autograd.grad((y * y).sum(), x)[0])
    assert isinstance(seen[1], cls) and not isinstance(seen[0], te.QuantizedTensor)
    error = (results[1].double() - results[0].double()).abs().max()
    assert 0 < error <= STEP[recipe] * results[0].double().abs().max()


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_tensors_between_modules(recipe, device):
    """A chain with fp8_output and fp8_grad trains like one without."""
    make, _ = RECIPES[recipe]
    below, above = linear(device, 64), linear(device)
    results = []
    for quantized in (False, True):
        below._delayed_scaling = above._delayed_scaling = None
        x = data(device)
        with te.autocast(recipe=make()):
            h = below(x, fp8_output=quantized)
            y = above(h, fp8_grad=quantized)
        y.sum().backward()
        results.append([y.detach(), x.grad, above.weight.grad, below.weight.grad])
        below.zero_grad()
        above.zero_grad()
    for got, expected in zip(results[1], results[0]):
        error = (got.double() - expected.double()).norm() / expected.double().norm()
        assert error < 2 * STEP[recipe]


@pytest.mark.feature(
    "quantized inputs",
    modes=("eager", "compiled"),
    modules=("Linear", "LayerNormLinear", "LayerNormMLP"),
)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "mlp"])
def test_quantized_input_of_any_module(kind, compiled, device):
    """Modules take the values of a quantized input, with and without a recipe, also in a graph."""
    torch.manual_seed(1)
    build = {"linear": te.Linear, "layernorm_linear": te.LayerNormLinear, "mlp": te.LayerNormMLP}
    module = build[kind](64, 96, params_dtype=torch.bfloat16, device=device)
    quantized = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(data(device).detach())
    for recipe in (None, Float8CurrentScaling()):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            run = module
            if compiled:
                torch._dynamo.reset()
                run = torch.compile(module, fullgraph=True, backend="aot_eager")
            results = []
            for call, x in ((run, quantized), (module, quantized.dequantize())):
                module.zero_grad()
                y = call(x)
                y.sum().backward()
                results.append([y, *(p.grad for p in module.parameters())])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_nothing_is_quantized_outside_of_autocast(device):
    """fp8_output and fp8_grad do nothing there."""
    module, x = linear(device), data(device)
    y = module(x, fp8_output=True, fp8_grad=True)
    y.sum().backward()
    assert not any(isinstance(t, te.QuantizedTensor) for t in (y, x.grad))


@pytest.mark.feature(
    "fp8_grad",
    modes=("compiled",),
    modules=("Linear", "LayerNormLinear"),
    no="graphs and programs have plain tensors as results and gradients",
    other_modules="the module has no such option",
)
@pytest.mark.feature(
    "fp8_output",
    modes=("compiled",),
    modules=("Linear", "LayerNormLinear"),
    no="graphs and programs have plain tensors as results and gradients",
    other_modules="the module has no such option",
)
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear"])
def test_compiled_code_falls_back_with_the_reason(kind, device):
    """With fullgraph the reason is in the exception, otherwise in a warning."""
    module, x = edge_module(kind, device), data(device)
    for option in ("fp8_output", "fp8_grad"):
        options = {option: True}
        with te.autocast(recipe=Float8CurrentScaling()):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=option):
                torch.compile(module, fullgraph=True, backend="aot_eager")(x, **options)
            torch._dynamo.reset()
            with pytest.warns(UserWarning, match=f"Falling back to eager.*{option}"):
                y = torch.compile(module, backend="aot_eager")(x, **options)
            expected = module(x, **options)
        if option == "fp8_output":
            y, expected = y.dequantize(), expected.dequantize()
        assert torch.equal(y, expected)


@trained_feature(
    "save_original_input", modules=("Linear",), other_modules="the module has no such option"
)
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("compiled", [False, True])
def test_save_original_input_gives_the_same_bits(recipe, compiled, device):
    """It only decides what is kept."""
    results, kept = [], []
    for save in (False, True):
        module = linear(device, save_original_input=save)
        run = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        x = data(device)
        saved = []

        def pack(tensor, save=saved.append):
            save(tensor.untyped_storage().data_ptr())
            return tensor

        with te.autocast(recipe=RECIPES[recipe][0]()):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = run(x)
        y.sum().backward()
        results.append([y.detach(), x.grad, module.weight.grad, module.bias.grad])
        kept.append(x.untyped_storage().data_ptr() in saved)
    assert all(torch.equal(a, b) for a, b in zip(*results))
    if not compiled:  # a compiler chooses itself what it keeps
        assert kept == [False, True]


def test_save_original_input_refuses_delayed_scaling(device):
    """Its scales will have changed."""
    module = linear(device, save_original_input=True)
    with te.autocast(recipe=DelayedScaling()), pytest.raises(ValueError, match="delayed scaling"):
        module(data(device))
