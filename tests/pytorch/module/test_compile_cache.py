# SPDX-License-Identifier: Apache-2.0
"""Cached quantized weights (``is_first_microbatch``) in compiled modules, against eager twins.

True quantizes and replaces the cache, False takes what is there, None neither reads nor writes it.
"""

import pytest
import torch
from torch._dynamo.utils import counters

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.formats.layout import Quantized

from compile_support import (
    GEMM_MODULES,
    K,
    OTHER_RECIPES,
    RECIPES,
    Twins,
    assert_same_bits,
    build,
    graphs,
    random,
    recipe_of,
    same_bits,
    with_recipe,
)

MICROBATCHES = (True, False, False)
# What does not need the whole matrix: every module, both per-tensor recipes, both backward amaxes
# of the MLP; each format of blocks, and one weight whose orientations differ.
PAIRS = [
    ("Linear", "current"),
    ("LayerNormLinear", "delayed"),
    ("LayerNormMLP", "current"),
    ("LayerNormMLP", "delayed"),
    ("LayerNormLinear", "block"),
    ("LayerNormMLP", "mxfp8_2d"),
    ("Linear", "nvfp4"),
    ("LayerNormMLP", "custom_two_formats"),
]


def call(module, x, recipe, first):
    """The call that gets compiled."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x, is_first_microbatch=first)


def make(kind, device, recipe="none"):
    """A module with all gradients; the MLP with a gated activation."""
    options = {"activation": "swiglu"} if kind == "LayerNormMLP" else {}
    return build(kind, device, recipe=recipe, **options)


def weights_of(kind):
    """Names of the cached weights."""
    return ("fc1_weight", "fc2_weight") if kind == "LayerNormMLP" else ("weight",)


def cache_of(module):
    """The cached entries, by weight name."""
    return dict(module._fp8_workspaces)


def assert_same_cache(twins):
    """Compiled and eager module cached the same bytes, in storages of the same kind."""
    tested, eager = cache_of(twins.module), cache_of(twins.eager)
    assert set(tested) == set(eager)
    for name, entry in tested.items():
        assert type(entry) is type(eager[name]) and entry.quant == eager[name].quant
        buffers = entry.operand_buffers(), eager[name].operand_buffers()
        assert any(buffer is not None for buffer in buffers[0])
        for field, *pair in zip(Quantized._fields, *buffers, strict=True):
            assert_same_bits(*pair, f"{name} {field}")


def step_all(twins, optimizers):
    """Optimizer step on both, so that cached weights become stale; clipped, or they would soon be
    infinite.
    """
    for optimizer in optimizers:
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    twins.compare()


def run_regression(kind, recipe, modes, device, backend="aot_eager", **options):
    """For each of ``modes`` (whether backward passes are deferred until all forward passes of the
    minibatch are done) five minibatches of three microbatches, an optimizer step after each.
    """
    twins, quantized = Twins(make(kind, device, recipe), call, backend, **options), recipe != "none"
    recipe = recipe_of(recipe)
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.5) for module in (twins.module, twins.eager)
    ]
    previous, counts = {}, []
    for minibatch, deferred in enumerate(mode for mode in modes for _ in range(5)):
        if device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        waiting = []
        for i, first in enumerate(MICROBATCHES):
            seed = 10 * minibatch + i
            forward = twins.forward(random(16, K, device=device, seed=seed), recipe, first)
            current = cache_of(twins.module)
            assert set(current) == (set(weights_of(kind)) if quantized else set())
            for name, entry in current.items():
                assert (entry is previous.get(name)) == (not first)
            previous = current
            assert_same_cache(twins)
            if deferred:
                waiting.append((forward, seed))
            else:
                forward.backward(seed=seed)
        for forward, seed in waiting:
            forward.backward(seed=seed)
        assert_same_cache(twins)
        step_all(twins, optimizers)
        counts.append(graphs())
    assert all(param.isfinite().all() for param in twins.module.parameters())
    assert counts[-1] <= 3
    assert counts[1:] == [counts[1]] * (len(counts) - 1)


def modes_of(kind):
    """Immediate and deferred backward passes with the same graphs; either may be the first."""
    return (False, True) if kind == "LayerNormLinear" else (True, False)


@pytest.mark.feature("weight caching (is_first_microbatch)", modes=("eager", "compiled"))
@pytest.mark.parametrize("deferred", (False, True), ids=("immediate", "deferred"))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_microbatches(kind, recipe, deferred, device):
    """The cache is replaced exactly on the first microbatch; everything equals eager."""
    run_regression(kind, recipe, (deferred,), device)


@pytest.mark.parametrize("recipe", OTHER_RECIPES)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_microbatches_of_other_recipes(kind, recipe, device):
    """The same for every other recipe."""
    run_regression(kind, recipe, modes_of(kind), device)


@pytest.mark.parametrize("kind,recipe", (*PAIRS, ("LayerNormMLP", "mxfp8_dq")))
def test_microbatches_inductor(kind, recipe, device):
    """The same with the default backend."""
    run_regression(kind, recipe, modes_of(kind), device, backend="inductor")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes too long without a CUDA device")
@pytest.mark.parametrize("recipe", (*RECIPES, *OTHER_RECIPES))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_microbatches_inductor_on_cuda(kind, recipe):
    """The whole matrix with the default backend, which makes other kernels there."""
    run_regression(kind, recipe, modes_of(kind), "cuda", backend="inductor")


@pytest.mark.feature(
    "CUDA graphs of Inductor with weight caching",
    modes=("compiled",),
    needs="cuda",
    others="a mode of torch.compile",
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("deferred", (False, True), ids=("immediate", "deferred"))
@pytest.mark.parametrize("recipe", (*RECIPES, *OTHER_RECIPES))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_microbatches_cuda_graphs(kind, recipe, deferred):
    """CUDA graphs from the first call on: nothing is skipped, nothing overwritten."""
    run_regression(kind, recipe, (deferred,), "cuda", backend=None, mode="reduce-overhead")
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.feature(
    "torch.compile, mode=reduce-overhead",
    modes=("compiled",),
    needs="cuda",
    others="a mode of torch.compile",
)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
@pytest.mark.parametrize("recipe", (*RECIPES, *OTHER_RECIPES))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_cold_cuda_graphs(kind, recipe):
    """No eager call before: four training calls without a cache, all equal to eager."""
    module = make(kind, "cuda", recipe)
    twins = Twins(module, with_recipe, backend=None, mode="reduce-overhead")
    recipe = recipe_of(recipe)
    for step in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        twins.step(random(16, K, device="cuda", seed=step), recipe, seed=step)
        twins.zero_grad()
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert graphs() == 1


@pytest.mark.feature(
    "torch.compile, mode=max-autotune", modes=("compiled",), others="a mode of torch.compile"
)
@pytest.mark.parametrize("kind,recipe", zip(GEMM_MODULES, ("current", "delayed", "mxfp8")))
def test_max_autotune(kind, recipe, device):
    """Inductor tries out kernels for what lies between the ops; CUDA graphs on CUDA. Cold."""
    twins = Twins(make(kind, device, recipe), with_recipe, backend=None, mode="max-autotune")
    recipe = recipe_of(recipe)
    for step in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        twins.step(random(16, K, device=device, seed=step), recipe, seed=step)
        twins.zero_grad()
    assert device == "cpu" or counters["inductor"]["cudagraph_skips"] == 0
    assert graphs() == 1


@pytest.mark.parametrize("kind,recipe", PAIRS)
def test_stale_by_design(kind, recipe, device):
    """False after a change of the weights uses the old bytes; True then takes the new weights."""
    twins, kept = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    x = random(16, K, device=device)
    twins.step(x, kept, True)
    stale = cache_of(twins.module)
    with torch.no_grad():
        for module in (twins.module, twins.eager):
            for name in weights_of(kind):
                getattr(module, name).neg_()
    old = twins.step(x, kept, False)[0].clone()
    assert cache_of(twins.module) == stale
    new = twins.step(x, kept, True)[0]
    assert not same_bits(old, new)
    assert all(cache_of(twins.module)[name] is not entry for name, entry in stale.items())


@pytest.mark.parametrize("kind,recipe", PAIRS)
def test_none_leaves_the_cache_alone(kind, recipe, device):
    """None computes from the weights as they are, and the next False finds the old cache."""
    twins, recipe = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    x = random(16, K, device=device)
    twins.step(x, recipe, None)
    assert not cache_of(twins.module)
    twins.step(x, recipe, True)
    kept = cache_of(twins.module)
    contents = {name: entry.operand_buffers().row.clone() for name, entry in kept.items()}
    with torch.no_grad():
        for module in (twins.module, twins.eager):
            for name in weights_of(kind):
                getattr(module, name).mul_(-3)
    for first in (None, False, None):
        twins.step(x, recipe, first)
        assert cache_of(twins.module) == kept
        assert_same_cache(twins)
    for name, entry in kept.items():
        assert same_bits(entry.operand_buffers().row, contents[name])
    assert graphs() <= 4


@pytest.mark.parametrize("kind,recipe", PAIRS)
def test_false_without_a_cache(kind, recipe, device):
    """The very first call may say False: a cache is made, and kept from then on."""
    twins, recipe = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    for seed in range(3):
        twins.step(random(16, K, device=device, seed=seed), recipe, False)
        assert set(cache_of(twins.module)) == set(weights_of(kind))
        assert_same_cache(twins)
        if seed:
            assert cache_of(twins.module) == kept
        kept = cache_of(twins.module)
    assert graphs() <= 2


@pytest.mark.parametrize("kind,recipe", PAIRS)
def test_cache_made_in_inference_is_completed(kind, recipe, device):
    """A cache made without gradients lacks what backward reads: training makes it anew."""
    context = torch.inference_mode if kind != "Linear" and recipe == "current" else torch.no_grad
    twins, recipe = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    x = random(16, K, device=device)
    for module in (twins.module, twins.eager):
        module.eval()
    for first in (True, False):
        with context():
            results = [
                function(x, recipe, first)
                for function in (twins.compiled, lambda *args: call(twins.eager, *args))
            ]
        assert_same_bits(*results, "output")
    lacking = cache_of(twins.module)
    assert all(entry.operand_buffers().col is None for entry in lacking.values())
    for module in (twins.module, twins.eager):
        module.train()
    for seed in range(3):
        twins.step(x, recipe, False, seed=seed)
        assert_same_cache(twins)
        completed = cache_of(twins.module)
        assert all(entry.operand_buffers().col is not None for entry in completed.values())
        assert not seed or completed == kept
        kept = completed
    with context():  # and inference goes on with the complete cache
        twins.compiled(x, recipe, False)
        call(twins.eager, x, recipe, False)
    assert cache_of(twins.module) == kept


@pytest.mark.parametrize("kind,recipe", PAIRS)
def test_mixing_eager_and_compiled_calls(kind, recipe, device):
    """One cache serves both: whoever makes it, the other uses it."""
    order = (True, False) if recipe == "current" else (False, True)
    twins, recipe = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    for minibatch in range(2):
        for i, first in enumerate(MICROBATCHES):
            before = cache_of(twins.module)
            x = random(16, K, device=device, seed=10 * minibatch + i)
            twins.step(x, recipe, first, eager_only=order[i % 2])
            assert_same_cache(twins)
            assert first or cache_of(twins.module) == before
        with torch.no_grad():
            for module in (twins.module, twins.eager):
                for param in module.parameters():
                    param.mul_(1.5)
        twins.zero_grad()


def test_cache_of_another_recipe_is_not_used(device):
    """A cache that another format was made for is made anew, in both directions."""
    twins = Twins(make("LayerNormMLP", device), call)
    x = random(16, K, device=device)
    recipes = [recipe_of("current"), recipe_of("current"), recipe_of("delayed")]
    recipes[1].fp8_quant_fwd_weight = type(recipes[1].fp8_quant_fwd_weight)(power_2_scale=True)
    for i in (0, 1, 0, 2, 1):
        twins.step(x, recipes[i], False)
        assert_same_cache(twins)


@pytest.mark.parametrize("other", ("mxfp8", "mxfp8_2d", "nvfp4", "custom_two_formats"))
@pytest.mark.parametrize("one", ("delayed", "block"))
def test_cache_of_another_format_is_not_used(one, other, device):
    """The same between formats, and between options of one."""
    twins = Twins(make("LayerNormMLP", device), call)
    x, recipes = random(16, K, device=device), (recipe_of(one), recipe_of(other))
    for recipe in (*recipes, *recipes):
        twins.step(x, recipe, False)
        assert_same_cache(twins)
        kept = cache_of(twins.module)
        twins.step(x, recipe, False)
        assert cache_of(twins.module) == kept


@pytest.mark.parametrize("override", (None, "dequantized"))
def test_what_becomes_of_a_cache_from_inference_mode(override, device):
    """Such tensors can not be saved for backward: eager and compiled code renew them alike."""
    twins = Twins(make("LayerNormLinear", device), call)
    recipe = Float8CurrentScaling(backward_override=override)
    x = random(16, K, device=device)
    for context in (torch.no_grad, torch.enable_grad):
        with torch.inference_mode():
            twins.compiled(x, recipe, True)
            call(twins.eager, x, recipe, True)
        with torch.no_grad():
            for module in (twins.module, twins.eager):
                module.weight.neg_()
        for seed in range(2):
            with context():
                forward = twins.forward(x, recipe, False)
            forward.backward(seed=seed)
            for entries in zip(
                *(cache_of(module).values() for module in (twins.module, twins.eager))
            ):
                rows = [entry.operand_buffers().row for entry in entries]
                assert_same_bits(*rows, "cached bytes")


def test_recipe_change_keeps_the_cache(device):
    """A call with another class of recipe and without caching leaves the cache as it is."""
    twins = Twins(make("LayerNormMLP", device), call)
    x, current, delayed = random(16, K, device=device), recipe_of("current"), recipe_of("delayed")
    twins.step(x, current, True)
    kept = cache_of(twins.module)
    twins.step(x, delayed, None)
    twins.step(x, None, None)
    with torch.no_grad():
        for module in (twins.module, twins.eager):
            module.fc1_weight.neg_()
    twins.step(x, current, False)
    assert cache_of(twins.module) == kept
    assert_same_cache(twins)


def test_dynamic_batch(device):
    """Microbatches of different sizes add no graph."""
    twins, recipe = Twins(make("LayerNormMLP", device), call, dynamic=True), recipe_of("current")
    rows = iter((16, 24, 5, 33, 8, 16, 7, 9, 11))
    for minibatch in range(3):
        for first in MICROBATCHES:
            twins.step(random(next(rows), K, device=device, seed=minibatch), recipe, first)
    assert graphs() <= 3


def test_one_layer_used_twice(device):
    """True for the first use and False for the second within one graph: both gradients count."""

    def twice(module, x, recipe):
        with te.autocast(recipe=recipe):
            y = module(x, is_first_microbatch=True)
            return y + module(x * 2, is_first_microbatch=False)

    for recipe in ("current", "delayed"):
        twins = Twins(make("LayerNormMLP", device), twice)
        kept = recipe_of(recipe)
        for seed in range(3):
            twins.step(random(16, K, device=device, seed=seed), kept, seed=seed)
            assert_same_cache(twins)
