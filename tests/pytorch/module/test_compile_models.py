# SPDX-License-Identifier: Apache-2.0
"""Compiled modules in models: stacks, containers, layers compiled one by one, checkpoints."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te

from compile_support import (
    GEMM_MODULES,
    K,
    RECIPES,
    Twins,
    assert_same_bits,
    assert_same_modules,
    build,
    gradient,
    graphs,
    random,
    recipe_of,
    reset,
    with_recipe,
)


def stack(device, depth=3):
    """Blocks of all modules, each block from K features to K features."""
    layers = []
    for i in range(depth):
        seed = 10 * i
        layers += [
            build("LayerNormMLP", device, seed=seed, activation=("gelu", "swiglu")[i % 2]),
            torch.nn.ReLU(),
            te.Linear(K, K, params_dtype=torch.bfloat16, device=device),
            build("RMSNorm", device, seed=seed + 1),
            te.LayerNormLinear(K, K, params_dtype=torch.bfloat16, device=device),
        ]
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize(
    "recipe,backend", [(recipe, "aot_eager") for recipe in RECIPES] + [("delayed", "inductor")]
)
def test_sequential_compiled_whole(recipe, backend, device):
    """A deep model is one graph."""
    depth = 3 if recipe == "delayed" and backend == "aot_eager" else 2
    twins, recipe = Twins(stack(device, depth), backend=backend), recipe_of(recipe)
    for seed in range(3):
        twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)
    assert graphs() == 1
    assert not counters["graph_break"]


class Block(torch.nn.Module):
    """A residual block of a user, who passes options on and uses extra outputs."""

    def __init__(self, device, seed=0):
        super().__init__()
        self.qkv = build("LayerNormLinear", device, seed=seed, return_layernorm_output=True)
        self.down = te.Linear(48, K, params_dtype=torch.bfloat16, device=device)
        self.mlp = build("LayerNormMLP", device, seed=seed + 1, return_bias=True)
        self.scale = torch.nn.Parameter(torch.ones(K, dtype=torch.bfloat16, device=device))

    def forward(self, x, *, recipe=None, **kwargs):
        """``x [rows, K]``; ``kwargs`` reach the modules."""
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y, ln_out = self.qkv(x, **kwargs)
            x = x + self.down(torch.tanh(y), **kwargs) + ln_out * self.scale
            z, bias = self.mlp(x, **kwargs)
            return x + z + bias


class Model(torch.nn.Module):
    """Blocks in a ModuleList."""

    def __init__(self, device, depth=3):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(device, seed=10 * i) for i in range(depth)])

    def forward(self, x, **kwargs):
        """``x [rows, K]``."""
        for block in self.blocks:
            x = block(x, **kwargs)
        return x


def with_kwargs(module, x, recipe, **kwargs):
    """The model makes its own region."""
    return module(x, recipe=recipe, **kwargs)


@pytest.mark.parametrize("recipe,first", (("none", None), ("current", None), ("delayed", True)))
def test_user_model_compiled_whole(recipe, first, device):
    """Keyword arguments pass through user classes; the number of graphs does not grow."""
    twins, recipe = Twins(Model(device, depth=2), with_kwargs), recipe_of(recipe)
    for seed in range(4):
        kwargs = {} if first is None else {"is_first_microbatch": seed % 2 == 0}
        twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed, **kwargs)
    assert graphs() <= (1 if first is None else 3)


def train_both(tested, eager, recipe, device, steps=3):
    """Steps of two models that are compared, without one function around them."""
    counts = []
    for seed in range(steps):
        results = []
        for model in (tested, eager):
            x = random(16, K, device=device, seed=seed).requires_grad_()
            y = model(x, recipe=recipe)
            y.backward(gradient(y, seed=seed))
            results.append((y, x.grad))
        for i, pair in enumerate(zip(*results)):
            assert_same_bits(*pair, ("output", "input gradient")[i])
        assert_same_modules(tested, eager)
        counts.append(graphs())
    return counts


@pytest.mark.parametrize("recipe", RECIPES)
def test_blocks_compiled_one_by_one(recipe, device):
    """Equal blocks share their graph."""
    reset()
    tested = Model(device, depth=5)
    eager = copy.deepcopy(tested)
    for block in tested.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    assert train_both(tested, eager, recipe_of(recipe), device) == [1, 1, 1]


class Chain(torch.nn.Module):
    """Modules one after another in one region."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, recipe=None):
        """``x [rows, features of the first layer]``."""
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            for layer in self.layers:
                x = layer(x)
        return x


def square(kind, device, width=K, ffn=96):
    """A module from ``width`` features to ``width`` features."""
    size = ffn if kind == "LayerNormMLP" else width
    return getattr(te, kind)(width, size, params_dtype=torch.bfloat16, device=device)


def chains(layers, device):
    """A chain whose layers are compiled one by one, and an eager chain of equal weights."""
    reset()
    tested, eager = Chain(layers()), Chain(layers())
    eager.load_state_dict(tested.state_dict())
    for layer in tested.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    return tested, eager


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_equal_layers_compiled_one_by_one(kind, recipe, device):
    """Twelve layers of one shape in an eager region: one graph, also for delayed scaling."""
    tested, eager = chains(lambda: [square(kind, device) for _ in range(12)], device)
    assert train_both(tested, eager, recipe_of(recipe), device) == [1, 1, 1]


def test_different_layers_compiled_one_by_one(device):
    """A graph for each shape in the first step, none in later ones."""
    widths = [96 + 16 * i for i in range(10)]

    def layers():
        return [square("LayerNormMLP", device, ffn=ffn) for ffn in widths]

    with torch._dynamo.config.patch(recompile_limit=16):
        tested, eager = chains(layers, device)
        assert train_both(tested, eager, recipe_of("delayed"), device) == [10, 10, 10]


def test_classes_do_not_share_the_recompile_limit(device):
    """Each class has its own count towards ``recompile_limit``, which is 8 by default."""
    kinds = (*GEMM_MODULES, "LayerNorm", "RMSNorm")
    reset()
    with torch._dynamo.config.patch(recompile_limit=3):
        for kind in kinds:
            module = torch.compile(build(kind, device), fullgraph=True, backend="aot_eager")
            for recipe in RECIPES:
                kept = recipe_of(recipe)
                with te.autocast(enabled=kept is not None, recipe=kept):
                    module(random(16, K, device=device)).sum().backward()


# --- checkpoint ----------------------------------------------------------------------------------


def checkpointed(module, x, recipe):
    """The module recomputed in backward, in a region around the checkpoint."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return checkpoint(module, x, use_reentrant=False)


@pytest.mark.feature(
    "torch.utils.checkpoint",
    modes=("eager", "compiled"),
    others="part of training, not of an exported program",
)
@pytest.mark.parametrize("place", ("inside", "around"))
@pytest.mark.parametrize("recipe", ("none", "current"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_checkpoint_in_the_graph(kind, recipe, place, device):
    """A checkpoint in a graph changes no bit; the region may be in the graph or around it."""
    reset()
    tested, eager, recipe = build(kind, device), build(kind, device), recipe_of(recipe)
    enabled = recipe is not None

    def step(x):
        if place == "inside":
            return checkpointed(tested, x, recipe)
        return checkpoint(tested, x, use_reentrant=False)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        x = random(16, K, device=device, seed=seed).requires_grad_()
        wanted = x.detach().clone().requires_grad_()
        with te.autocast(enabled=enabled and place == "around", recipe=recipe):
            y = compiled(x)
        z = with_recipe(eager, wanted, recipe)
        y.backward(gradient(y, seed=seed))
        z.backward(gradient(z, seed=seed))
        assert_same_bits(y, z, "output")
        assert_same_bits(x.grad, wanted.grad, "input gradient")
        assert_same_modules(tested, eager)
    assert graphs() == 1


def test_checkpoint_with_delayed_scaling_is_refused(device):
    """A graph that would quantize again with renewed scales is not made."""
    reset()
    module, recipe = build("Linear", device), recipe_of("delayed")
    compiled = torch.compile(
        lambda x: checkpointed(module, x, recipe), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Exception, match="checkpoint"):
        compiled(random(16, K, device=device).requires_grad_())


def test_checkpoint_of_a_compiled_module(device):
    """Eager checkpoint around compiled layers."""

    class Checkpointed(torch.nn.Module):
        """Runs its layer in a checkpoint, inside of a region."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x, recipe=None):
            """``x [rows, K]``."""
            return checkpoint(with_recipe, self.layer, x, recipe, use_reentrant=False)

    for kind in GEMM_MODULES:
        reset()
        tested, eager = Checkpointed(build(kind, device)), Checkpointed(build(kind, device))
        tested.layer.compile(fullgraph=True, backend="aot_eager")
        for recipe in ("none", "current"):
            train_both(tested, eager, recipe_of(recipe), device, steps=2)


# --- copies --------------------------------------------------------------------------------------


COPIES = [("LayerNormMLP", recipe) for recipe in RECIPES]
COPIES += [("Linear", "delayed"), ("LayerNormLinear", "delayed")]


@pytest.mark.feature("deepcopy and pickle", modes=("compiled",), others="copied before the export")
@pytest.mark.parametrize("how", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))))
@pytest.mark.parametrize("kind,recipe", COPIES)
def test_copies_are_compiled_like_originals(kind, recipe, how, device):
    """A deep copy and a copy of a used module, each compiled without an eager call before."""
    original = build(kind, device)
    for used in (False, True):
        if used:
            kept = recipe_of(recipe)
            with_recipe(original, random(16, K, device=device), kept).sum().backward()
        duplicate = how(original)
        twins, kept = Twins(duplicate), recipe_of(recipe)
        for seed in range(3):
            twins.step(random(16, K, device=device, seed=seed), kept, seed=seed)
        assert graphs() == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_module_made_after_compilation(recipe, device):
    """A layer that is swapped in later is compiled and keeps its own state."""
    twins, recipe = Twins(stack(device, depth=1)), recipe_of(recipe)
    twins.step(random(16, K, device=device), recipe)
    for module in (twins.module, twins.eager):
        module[0] = build("LayerNormMLP", device, seed=5)
    twins.zero_grad()
    for seed in range(2):
        twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)


@pytest.mark.feature(
    "made on the meta device", modes=("compiled",), others="materialised before the export"
)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_deferred_initialisation(kind, device):
    """A module made on meta is initialised, then compiled."""
    module = getattr(te, kind)(K, 96, params_dtype=torch.bfloat16, device="meta")
    module.reset_parameters()
    module.to(device)
    twins = Twins(module)
    for seed in range(2):
        twins.step(random(16, K, device=device, seed=seed), recipe_of("delayed"), seed=seed)


def test_compiled_module_object(device):
    """``torch.compile(module)`` keeps the module's attributes and state dict reachable."""
    reset()
    module = build("LayerNormLinear", device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with te.autocast(recipe=recipe_of("delayed")):
        compiled(random(16, K, device=device), is_first_microbatch=True).sum().backward()
    assert module.weight.grad is not None
    keys = {key.removeprefix("_orig_mod.") for key in compiled.state_dict()}
    assert keys == set(module.state_dict())
    assert "weight" in module._fp8_workspaces
