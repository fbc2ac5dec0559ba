# SPDX-License-Identifier: Apache-2.0
"""Regions of ``te.autocast`` and ``torch.autocast`` in compiled functions and around them."""

from contextlib import nullcontext

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import fp8_global_state

from compile_support import (
    K,
    MODULES,
    Twins,
    build,
    graphs,
    plain,
    random,
    recipe_of,
    with_recipe,
)

# Every module and every format, but not all pairs.
CASES = [
    ("Linear", "none"),
    ("Linear", "delayed"),
    ("LayerNormLinear", "current"),
    ("LayerNormMLP", "current"),
    ("LayerNormMLP", "delayed"),
    ("LayerNorm", "none"),
    ("Linear", "block"),
    ("LayerNormLinear", "mxfp8"),
    ("LayerNormMLP", "nvfp4"),
    ("LayerNormMLP", "mxfp8_dq"),
    ("LayerNormMLP", "custom_two_formats"),
    ("LayerNormLinear", "custom_delayed"),
]

# --- autocast -------------------------------------------------------------------------------------


def nested(modules, x, outer, inner):
    """An inner region with another recipe (None: disabled) between two uses of the outer one."""
    with te.autocast(enabled=outer is not None, recipe=outer):
        a = modules[0](x)
        with te.autocast(enabled=inner is not None, recipe=inner):
            b = modules[1](x)
        return a + b + modules[2](x)


NESTED = [
    ("current", "none"),
    ("none", "current"),
    ("delayed", "none"),
    ("delayed", "current"),
    ("current", "delayed"),
    ("delayed", "delayed"),
    ("nvfp4", "mxfp8"),
    ("delayed", "nvfp4"),
    ("block", "custom_delayed"),
    ("custom_two_formats", "custom_from_dequantized"),
]


PLACES = [(*pair, "inside") for pair in NESTED]
PLACES += [(*pair, "around") for pair in (NESTED[0], NESTED[3], NESTED[6])]


@pytest.mark.parametrize("outer,inner,place", PLACES)
def test_nested_autocast(outer, inner, place, device):
    """The innermost region counts; delayed scales are renewed at the end of the outermost one."""
    # A width that fits all recipes.
    kinds = ("LayerNormLinear", "Linear", "Linear")
    modules = [build(kind, device, width=K, recipe="mxfp8") for kind in kinds]
    twins = Twins(torch.nn.ModuleList(modules), nested)
    outer, inner = recipe_of(outer), recipe_of(inner)
    for seed in range(3):
        x = random(16, K, device=device, seed=seed)
        if place == "inside":
            twins.step(x, outer, inner, seed=seed)
        else:
            with te.autocast(recipe=recipe_of("delayed")):
                forward = twins.forward(x, outer, inner)
            forward.backward(seed=seed)
        twins.zero_grad()
    assert graphs() == 1


@pytest.mark.parametrize("kind,recipe", CASES)
def test_autocast_around_the_compiled_function(kind, recipe, device):
    """Entered outside: one graph per recipe value, backward in or after the region."""
    options = {"recipe": recipe} if kind != "LayerNorm" else {}
    twins, counts = Twins(build(kind, device, **options), plain), []
    for seed in range(4):
        x, current = random(16, K, device=device, seed=seed), recipe_of(recipe)
        context = te.autocast(recipe=current) if current is not None else nullcontext()
        with context:
            forward = twins.forward(x)
            if seed % 2 == 0:
                forward.backward(seed=seed)
        if seed % 2 == 1:
            forward.backward(seed=seed)
        twins.zero_grad()
        counts.append(graphs())
    assert counts == [1] * 4


def test_disabled_autocast_reads_no_recipe(device, monkeypatch):
    """Without quantization nothing asks for a default recipe, in a trace or in eager."""

    def never():
        raise AssertionError("a default recipe was made")

    monkeypatch.setattr(fp8_global_state, "get_default_recipe", never)
    for kind in MODULES:
        twins = Twins(build(kind, device), with_recipe if kind == "Linear" else plain)
        twins.step(random(16, K, device=device))
        with te.autocast(enabled=False):
            twins.step(random(16, K, device=device))


def raising(module, x, recipe):
    """A region that ends with an exception, caught inside of the graph."""
    y = None
    try:
        with te.autocast(recipe=recipe):
            y = module(x)
            raise KeyError("on purpose")
    except KeyError:
        return y


def test_autocast_left_by_an_exception(device):
    """The state is restored, and scales are not renewed, in compiled code as in eager."""
    twins, recipe = Twins(build("Linear", device), raising), recipe_of("delayed")
    for seed in range(2):
        twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)
    assert not te.quantization.FP8GlobalStateManager.is_fp8_enabled()


# --- torch.autocast -----------------------------------------------------------------------------


def torch_autocast_inside(module, x, recipe):
    """torch.autocast as part of the graph."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return with_recipe(module, x, recipe)


@pytest.mark.feature("torch.autocast around or inside", modes=("eager", "compiled"))
@pytest.mark.parametrize("place", ("inside", "around", "around_backward_too"))
@pytest.mark.parametrize("kind,recipe", CASES)
def test_torch_autocast(kind, recipe, place, device):
    """fp32 parameters under bf16 torch.autocast: bf16 outputs, fp32 gradients."""
    call = torch_autocast_inside if place == "inside" else with_recipe
    options = {"recipe": recipe} if kind != "LayerNorm" else {}
    module = build(kind, device, dtype=torch.float32, **options)
    twins, recipe = Twins(module, call), recipe_of(recipe)
    for seed in range(2):
        x = random(16, K, device=device, seed=seed, dtype=torch.float32)
        around = torch.autocast(device, dtype=torch.bfloat16) if place != "inside" else None
        with around or nullcontext():
            forward = twins.forward(x, recipe)
            if place == "around_backward_too":
                forward.backward(seed=seed)
        if place != "around_backward_too":
            forward.backward(seed=seed)
        assert forward.outputs[0][0].dtype == torch.bfloat16
        assert all(p.grad.dtype == torch.float32 for p in twins.module.parameters())
        assert forward.inputs[0].grad.dtype == torch.float32
    assert graphs() == 1


def test_torch_autocast_switched(device):
    """With and without torch.autocast in turn: a graph each."""
    twins = Twins(build("LayerNormMLP", device, dtype=torch.float32))
    for seed, enabled in enumerate((True, False, True, False)):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
            x = random(16, K, device=device, seed=seed, dtype=torch.float32)
            y = twins.step(x, recipe_of("current"), seed=seed)[0]
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
    assert graphs() == 2


def test_torch_autocast_inductor(device):
    """The casts are fused by Inductor and change no bit."""
    module = build("LayerNormMLP", device, dtype=torch.float32)
    twins = Twins(module, torch_autocast_inside, backend="inductor")
    recipe = recipe_of("current")
    for seed in range(2):
        x = random(16, K, device=device, seed=seed, dtype=torch.float32)
        twins.step(x, recipe, seed=seed)
