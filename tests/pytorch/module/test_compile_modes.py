# SPDX-License-Identifier: Apache-2.0
"""Compiled modules in changing modes and with changing recipes; several in one graph."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)

from compile_support import (
    FFN,
    GEMM_MODULES,
    K,
    NORMS,
    RECIPES,
    Twins,
    as_tuple,
    assert_same_bits,
    build,
    graphs,
    plain,
    random,
    recipe_of,
    with_recipe,
)

# Every module and every per-tensor recipe, but not all pairs.
FEW = [("Linear", "delayed"), ("LayerNormLinear", "current"), ("LayerNormMLP", "delayed")]
CASES = [*FEW, ("Linear", "none"), ("LayerNormMLP", "current"), ("LayerNorm", "none")]
OTHERS = [("LayerNormMLP", "nvfp4"), ("LayerNormLinear", "mxfp8"), ("Linear", "block")]
OTHERS += [("LayerNormMLP", "custom_two_formats"), ("LayerNormMLP", "custom_delayed")]
OTHERS += [("LayerNormMLP", "mxfp8_dq"), ("LayerNormLinear", "nvfp4_row_scaled")]
CASES += OTHERS
WITH_BACKEND = [(*case, "aot_eager") for case in CASES] + [("LayerNormMLP", "delayed", "inductor")]


def inference(twins, context, x, recipe):
    """One call of both without gradients."""
    for module in (twins.module, twins.eager):
        module.eval()
    with context():
        tested, eager = twins.compiled(x, recipe), twins.call(twins.eager, x, recipe)
    for a, b in zip(as_tuple(tested), as_tuple(eager)):
        assert_same_bits(a, b, "output")
        assert not a.requires_grad
    twins.compare()
    for module in (twins.module, twins.eager):
        module.train()


@pytest.mark.feature(
    "training and inference in turn",
    modes=("eager", "compiled"),
    others="not a property of an exported program",
)
@pytest.mark.parametrize("kind,recipe,backend", WITH_BACKEND)
def test_training_and_inference_in_turn(kind, recipe, backend, device):
    """train, no_grad, eval, inference_mode and train again: one graph per mode, none is stale."""
    options = {"return_layernorm_output": True} if kind.startswith("LayerNorm") else {}
    options = {} if kind in NORMS else {"recipe": recipe, **options}
    twins, kept = Twins(build(kind, device, **options), backend=backend), recipe_of(recipe)
    counts = []
    for turn in range(3):
        x = random(16, K, device=device, seed=turn)
        twins.step(x, kept, seed=turn)
        inference(twins, torch.no_grad, x, kept)
        inference(twins, torch.inference_mode, x, kept)
        twins.step(x * 2, kept, seed=turn, x_grad=False)
        counts.append(graphs())
    assert counts[0] <= 4
    assert counts == [counts[0]] * 3


def test_inference_first(device):
    """A compiled module whose first call is in inference mode can train afterwards."""
    for kind, recipe in FEW + OTHERS[:3]:
        twins, kept = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
        x = random(16, K, device=device)
        inference(twins, torch.inference_mode, x, kept)
        for seed in range(2):
            twins.step(x, kept, seed=seed)


# --- one module or several in one graph -----------------------------------------------------------


def twice_in_one_region(module, x, recipe):
    """Both uses belong to one step of delayed scaling."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x) + module(x * 3)


def twice_in_two_regions(module, x, recipe):
    """The scales are renewed between the uses."""
    return with_recipe(module, x, recipe) + with_recipe(module, x * 3, recipe)


def twice_in_a_row(module, x, recipe):
    """The second use takes the first one's output."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return module(module(x))


TWICE = [(*case, call) for case in FEW for call in (twice_in_one_region, twice_in_two_regions)]
TWICE += [("LayerNormMLP", recipe, twice_in_a_row) for recipe in RECIPES]
TWICE += [(*OTHERS[i], twice_in_one_region) for i in (0, 1, 3)]
TWICE += [("LayerNormMLP", r, twice_in_two_regions) for r in ("custom_delayed", "nvfp4")]


@pytest.mark.parametrize("kind,recipe,call", TWICE)
def test_same_module_twice(kind, recipe, call, device):
    """Gradients of both uses add up; scales and histories as in eager."""
    twins, recipe = Twins(build(kind, device, recipe=recipe), call), recipe_of(recipe)
    for seed in range(3):
        twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)
        twins.zero_grad()
    assert graphs() == 1


def in_turn(modules, x, order, recipe):
    """Several modules in the given order, their outputs side by side."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return torch.cat([modules[i](x) for i in order], 1)


@pytest.mark.parametrize("kind,recipe", CASES)
def test_instances_in_one_graph(kind, recipe, device):
    """Each instance keeps its own weights and options, whatever the order."""
    options = [{}, {"zero_centered_gamma": True, "eps": 0.1}, {"eps": 1e-3}]
    if kind == "Linear":
        options = [{}, {"bias": False}, {}]
    if kind == "LayerNormMLP":
        options[2].update(activation="swiglu", normalization="RMSNorm")
    options = [{"recipe": recipe, **opts} for opts in options] if kind not in NORMS else options
    modules = [build(kind, device, seed=i, **opts) for i, opts in enumerate(options)]
    twins, recipe = Twins(torch.nn.ModuleList(modules), in_turn), recipe_of(recipe)
    for seed, order in enumerate(((0, 1, 2), (2, 1, 0), (0, 1, 2), (2, 1, 0))):
        twins.step(random(16, K, device=device, seed=seed), order, recipe, seed=seed)
        twins.zero_grad()
    assert graphs() == 2


# --- recipes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_recipes_switched_between_calls(kind, device):
    """Recipes of equal value share a graph; another value is never mistaken for it."""
    twins = Twins(build(kind, device))
    sequence = ["current", "current", "delayed", "none", "delayed", "current", "none", "delayed"]
    counts = []
    for seed, name in enumerate(sequence):
        # A new recipe object each time.
        twins.step(random(16, K, device=device, seed=seed), recipe_of(name), seed=seed)
        twins.zero_grad()
        counts.append(graphs())
    assert counts == [1, 1, 2, 3, 3, 3, 3, 3]


@pytest.mark.feature(
    "recipes switched between calls",
    modes=("eager", "compiled"),
    others="the recipe of the export is in the program",
)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_formats_switched_between_calls(kind, device):
    """The same over the formats, a custom recipe among them."""
    twins = Twins(build(kind, device, recipe="mxfp8"))
    names = ("block", "mxfp8", "nvfp4", "custom_two_formats", "mxfp8_2d", "custom_delayed")
    for seed, name in enumerate(names * 2):
        twins.step(random(16, K, device=device, seed=seed), recipe_of(name), seed=seed)
        twins.zero_grad()
        assert graphs() == min(seed + 1, len(names))


CHANGES = {
    "fp8_format": Format.E4M3,
    "use_power_2_scales": True,
    "fp8_quant_fwd_inp": QParams(power_2_scale=True),
    "fp8_quant_bwd_grad": QParams(amax_epsilon=64.0),
    "fp8_gemm_fprop": MMParams(use_split_accumulator=True),
    "backward_override": "high_precision",
}


CHANGED = [(field, "inside") for field in sorted(CHANGES)]
CHANGED += [("fp8_format", "outside"), ("backward_override", "outside")]


@pytest.mark.parametrize("field,where", CHANGED)
def test_recipe_changed_in_place(field, where, device):
    """An assigned field of a recipe counts from the next call on, and going back costs no graph."""
    twins = Twins(build("LayerNormLinear", device), with_recipe if where == "inside" else plain)
    recipe, x = Float8CurrentScaling(), random(16, K, device=device)
    old, counts = getattr(recipe, field), []

    def step(seed):
        if where == "inside":
            twins.step(x, recipe, seed=seed)
        else:
            with te.autocast(recipe=recipe):
                twins.step(x, seed=seed)
        twins.zero_grad()
        counts.append(graphs())

    for seed, value in enumerate((old, CHANGES[field], old, CHANGES[field])):
        setattr(recipe, field, value)
        step(seed)
    assert counts in ([1, 2, 2, 2], [1, 1, 1, 1])
    assert (counts[-1] == 1) == (field == "use_power_2_scales")  # only read by the constructor


BLOCK_CHANGES = [
    (Float8BlockScaling, "fp8_format", Format.HYBRID),
    (Float8BlockScaling, "w_block_scaling_dim", 1),
    (Float8BlockScaling, "fp8_quant_bwd_grad", QParams(power_2_scale=False)),
    (MXFP8BlockScaling, "enable_2d_quantization", True),
    (MXFP8BlockScaling, "backward_override", "dequantized"),
    (NVFP4BlockScaling, "row_scaled_activation", True),
    (NVFP4BlockScaling, "nvfp4_4over6", "weights"),
    (NVFP4BlockScaling, "fp4_quant_fwd_weight", QParams()),
]


@pytest.mark.parametrize("make,field,value", BLOCK_CHANGES)
def test_block_recipe_changed_in_place(make, field, value, device):
    """The same for recipes with scales of blocks."""
    module = build("LayerNormMLP", device)
    with torch.no_grad():  # rows of different size, so that blocks of rows are unlike square blocks
        module.fc1_weight *= 16.0 ** (torch.arange(FFN, device=device) % 4 - 2)[:, None]
    twins = Twins(module)
    recipe = make(disable_rht=True) if make is NVFP4BlockScaling else make()
    x, old, outputs = random(16, K, device=device), getattr(recipe, field), []
    for i, new in enumerate((old, value, old, value)):
        setattr(recipe, field, new)
        y, *_ = twins.step(x, recipe)
        outputs.append((y, *(param.grad for param in twins.module.parameters())))
        twins.zero_grad()
        assert graphs() == min(i + 1, 2)
    same = [[torch.equal(a, b) for a, b in zip(outputs[0], other)] for other in outputs[1:]]
    assert not all(same[0]) and all(same[1]) and same[2] == same[0]


@pytest.mark.parametrize(
    "field,value",
    (("margin", 2), ("amax_compute_algo", "most_recent"), ("fp8_format", Format.E4M3)),
)
def test_delayed_recipe_changed_in_place(field, value, device):
    """The update rule of delayed scaling is read anew in every region."""
    for call in (with_recipe, plain):
        twins, recipe = Twins(build("LayerNormMLP", device), call), recipe_of("delayed")
        for seed in range(6):
            if seed == 3:
                setattr(recipe, field, value)
            x = random(16, K, device=device, seed=seed) * (seed + 1)
            if call is with_recipe:
                twins.step(x, recipe, seed=seed)
            else:
                with te.autocast(recipe=recipe):
                    forward = twins.forward(x)
                forward.backward(seed=seed)
            twins.zero_grad()
        assert graphs() == 2
