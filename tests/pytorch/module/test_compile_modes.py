# SPDX-License-Identifier: Apache-2.0
"""Compiled modules in changing modes and with changing recipes; several in one graph."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Format, Float8CurrentScaling, MMParams, QParams

from compile_support import (
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

# Every module and every recipe, but not all pairs.
FEW = [("Linear", "delayed"), ("LayerNormLinear", "current"), ("LayerNormMLP", "delayed")]
CASES = [*FEW, ("Linear", "none"), ("LayerNormMLP", "current"), ("LayerNorm", "none")]
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


@pytest.mark.parametrize("kind,recipe,backend", WITH_BACKEND)
def test_training_and_inference_in_turn(kind, recipe, backend, device):
    """train, no_grad, eval, inference_mode and train again: one graph per mode, none is stale."""
    options = {"return_layernorm_output": True} if kind.startswith("LayerNorm") else {}
    options = {} if kind in NORMS else options
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
    for kind, recipe in FEW:
        twins, kept = Twins(build(kind, device)), recipe_of(recipe)
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


@pytest.mark.parametrize("kind,recipe,call", TWICE)
def test_same_module_twice(kind, recipe, call, device):
    """Gradients of both uses add up; scales and histories as in eager."""
    twins, recipe = Twins(build(kind, device), call), recipe_of(recipe)
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
