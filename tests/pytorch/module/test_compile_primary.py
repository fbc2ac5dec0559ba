# SPDX-License-Identifier: Apache-2.0
"""Modules with quantized primary weights under torch.compile, against eager twins, bit by bit."""

import copy

import pytest
import torch
from compile_support import GEMM_MODULES, Twins, graphs, plain, with_recipe
from eager_support import BF16, FP32, K, random
from primary_support import (
    QUANTIZED,
    RECIPES,
    initial,
    make,
    recipe_of,
    same_bytes,
    weights,
)

import transformer_engine.pytorch as te
from transformer_engine.pytorch.core import ops

OTHERS = ("nvfp4_plain", "custom_from_dequantized", "custom_forward_only", "custom_delayed")
OVERRIDES = ("current_hp", "mxfp8_dq", "nvfp4_dq")


def an_input(device, seed=0, dtype=BF16):
    """An input of a module."""
    return random(48, K, device=device, dtype=dtype, seed=seed)


class Training:
    """A compiled module, its eager twin, and an optimizer for each."""

    def __init__(self, module, recipe, call=with_recipe):
        self.twins, self.recipe = Twins(module, call), recipe
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.05) for m in (module, self.twins.eager)
        ]

    def step(self, seed=0, dtype=BF16):
        """One step of both; everything is compared, the bytes of the weights too."""
        module, eager = self.twins.module, self.twins.eager
        arguments = () if self.recipe is None else (self.recipe,)
        device = next(module.parameters()).device
        self.twins.step(an_input(device, seed, dtype), *arguments, seed=seed)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, a), (_, b) in zip(module.named_parameters(), eager.named_parameters()):
            assert same_bytes(a, b), name
        self.twins.compare()


CASES = [(recipe, kind) for recipe in RECIPES for kind in GEMM_MODULES]
CASES += [(recipe, "LayerNormMLP") for recipe in (*OTHERS, *OVERRIDES)]


@pytest.mark.feature("quantized primary weights", modes=("eager", "compiled"))
@pytest.mark.parametrize("recipe,kind", CASES)
def test_training(recipe, kind, device):
    """Three steps with an optimizer in one graph."""
    training = Training(make(kind, recipe, device), recipe_of(recipe))
    for seed in range(3):
        training.step(seed)
    assert graphs() == 1
    for weight in weights(training.twins.module).values():
        assert not torch.equal(weight.dequantize().cpu(), initial(weight.shape))


@pytest.mark.filterwarnings("ignore:A module with quantized weights")
@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ("mxfp8", "custom_two_formats"))
def test_outside_autocast(recipe, kind, device):
    """In high precision with the dequantized weights, which the optimizer changes."""
    training = Training(make(kind, recipe, device), None, plain)
    for seed in range(2):
        training.step(seed)
    assert graphs() == 1


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_torch_autocast(kind, device):
    """fp32 weights in a bf16 region of torch.autocast."""

    def call(module, x, recipe):
        with torch.autocast(device, BF16):
            return with_recipe(module, x, recipe)

    training = Training(make(kind, "mxfp8", device, FP32), recipe_of("mxfp8"), call)
    for seed in range(2):
        training.step(seed, FP32)


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ("delayed", "nvfp4", "custom_forward_only"))
def test_frozen_weights(recipe, kind, device):
    """No gradient of the weight is computed; all others are."""
    module = make(kind, recipe, device)
    for weight in weights(module).values():
        weight.requires_grad_(False)
    training = Training(module, recipe_of(recipe))
    for seed in range(2):
        training.step(seed)
    assert graphs() == 1


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_weights_are_read_anew(recipe, device):
    """What is loaded or written between calls of a graph counts in the next one."""
    training = Training(make("Linear", recipe, device), recipe_of(recipe))
    training.step()
    saved = copy.deepcopy(training.twins.module.state_dict())
    training.step(1)
    for module in (training.twins.module, training.twins.eager):
        module.load_state_dict(saved)
    training.step(2)
    for module in (training.twins.module, training.twins.eager):
        with torch.no_grad():
            module.weight.copy_(initial(module.weight.shape) * 2)
    training.step(3)
    assert graphs() == 1


# --- errors ---------------------------------------------------------------------------------------


def no_kernels(monkeypatch):
    """Fail if anything is computed."""

    def never(request):
        raise AssertionError(f"{request.leaf} ran")

    monkeypatch.setattr(ops, "select", never)


@pytest.mark.parametrize(
    "made,active,kind",
    (
        ("delayed", "current", "LayerNormMLP"),
        ("mxfp8", "nvfp4", "Linear"),
        ("custom_two_formats", "block", "LayerNormLinear"),
    ),
)
def test_recipe_mismatch(made, active, kind, device, monkeypatch):
    """A weight of another format is an error while tracing; the right recipe works afterwards."""
    module = make(kind, made, device, name="here")
    twins = Twins(module)
    match = f"Recipe mismatch: the {next(iter(weights(module)))} of {kind} 'here' was made"
    with monkeypatch.context() as patch:
        no_kernels(patch)
        with pytest.raises(Exception, match=match):
            twins.compiled(an_input(device), recipe_of(active))
    assert not te.quantization.FP8GlobalStateManager.is_fp8_enabled()
    twins.step(an_input(device), recipe_of(made))


@pytest.mark.parametrize("recipe", ("current", "block"))
def test_made_without_gradients(recipe, device):
    """Inference compiles; a graph can not add columnwise data, but uses those that eager added."""
    with torch.no_grad():
        module = make("Linear", recipe, device, name="here")
    twins, x = Twins(module), an_input(device)
    with torch.no_grad():
        twins.forward(x, recipe_of(recipe))
    with pytest.raises(Exception, match="'here', which was quantized without gradients.*in eager"):
        twins.compiled(x.clone().requires_grad_(), recipe_of(recipe))
    for one in (module, twins.eager):
        with_recipe(one, x.clone().requires_grad_(), recipe_of(recipe)).sum().backward()
    twins.zero_grad()
    twins.step(x, recipe_of(recipe))


# --- state of delayed scaling ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe,kind",
    (*(("delayed", kind) for kind in GEMM_MODULES), ("custom_delayed", "LayerNormMLP")),
)
def test_quantizers_stay_bound(recipe, kind, device):
    """Updates of the weights use and record in the state that the module has at that time, also
    when a graph that was compiled for an earlier state serves again."""
    training = Training(make(kind, recipe, device), recipe_of(recipe))
    module, eager = training.twins.module, training.twins.eager
    training.step()
    saved = copy.deepcopy(module.state_dict())
    for seed, change in enumerate(
        (
            lambda m: m.to("cpu").to(device),
            lambda m: m.load_state_dict(saved),
            lambda m: m.float().bfloat16(),
            lambda m: m.reset_fp8_meta_tensors(),
        )
    ):
        change(module)
        change(eager)
        training.step(seed)
        assert module._delayed_scaling.fwd_history.any()


def test_history_of_another_length(device):
    """Three lengths, the first one again at the end, when its graph is there already."""
    module = make("Linear", "delayed", device)
    training = Training(module, recipe_of("delayed"))
    for seed, length in enumerate((3, 5, 2, 3)):
        for one in (module, training.twins.eager):
            one.adjust_amax_history_length(length)
        training.recipe.amax_history_len = length
        training.step(seed)
        assert module._delayed_scaling.fwd_history.shape[0] == length
    assert graphs() == 3
