# SPDX-License-Identifier: Apache-2.0
"""Cached weights that a flag on the device keeps or has written anew, in eager and compiled."""

import copy

import pytest
import torch
from compile_support import (
    GEMM_MODULES,
    K,
    assert_same_bits,
    assert_same_modules,
    build,
    gradient,
    graphs,
    random,
    recipe_of,
    reset,
)
from graph_support import FEW, ROWS, cuda_only, prepare
from recipe_list import ALL_RECIPES

import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

# Autograd itself refuses their backward passes once the weights have changed.
READS_WEIGHTS = ("current_hp", "mxfp8_hp", "custom_forward_only")


def under_flag(module, x, recipe, first, **kwargs):
    """One call whose cached weights the device decides about."""
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not first)
    flag = FP8GlobalStateManager.quantization_state
    flag.skip_fp8_weight_update_tensor = flag.skip_fp8_weight_update_tensor.to(x.device)
    with te.autocast(recipe=recipe, _graph=True):
        return module(x, **kwargs)


def gemm_weights(module):
    """What is cached: backward does not read the weights themselves."""
    return [getattr(module, name) for name in module.weight_names]


def contents(entry):
    """The buffers of a cached weight."""
    return [buffer for buffer in entry.operand_buffers() if buffer is not None]


@pytest.mark.feature(
    "weight caching decided by a flag on the device",
    modes=("eager",),
    others="training in replays; cached weights are constants of a program",
)
@pytest.mark.parametrize(
    "kind,recipe",
    [(kind, recipe) for kind in ("Linear", "LayerNormMLP") for recipe in ALL_RECIPES]
    + [("LayerNormLinear", recipe) for recipe in FEW],
)
def test_flag_in_eager(kind, recipe, device):
    """0 writes what a fresh quantization would make, 1 leaves it; amaxes count when written."""
    module, kept = build(kind, device, recipe=recipe), recipe_of(recipe)
    x = random(ROWS, K, device=device)
    under_flag(module, x.clone().requires_grad_(), kept, True)
    entries, pending = dict(module._fp8_workspaces), []
    for seed, first in enumerate((False, True, False, True)):
        with torch.no_grad():
            for weight in gemm_weights(module):
                weight.mul_(0.5 + seed)
        state = module._delayed_scaling
        old = {key: [b.clone() for b in contents(entry)] for key, entry in entries.items()}
        if state is not None:
            state.fwd_history.zero_()
        leaf = x.clone().requires_grad_()
        pending.append(under_flag(module, leaf, kept, first, is_first_microbatch=not first))
        assert all(module._fp8_workspaces[key] is entry for key, entry in entries.items())
        if recipe == "delayed":
            assert (state.fwd_history[0, 1] != 0).item() == first
        fresh = build(kind, device, recipe=recipe)
        fresh.load_state_dict(module.state_dict())
        under_flag(fresh, x.clone().requires_grad_(), kept, True)
        for key, entry in entries.items():
            made = contents(fresh._fp8_workspaces[key])
            for i, buffer in enumerate(contents(entry)):
                assert_same_bits(buffer, (made if first else old[key])[i], f"{key} buffer {i}")
    for y in (
        pending if recipe not in READS_WEIGHTS else ()
    ):  # backward after the bytes have changed: no error, the bytes of now
        y.backward(gradient(y))


def test_fused_accumulation(device):
    """Whether a microbatch is the first one the device knows: gradients are always added."""
    module, recipe = build("Linear", device, fuse_wgrad_accumulation=True), recipe_of("current")
    for first_use in (True, False):  # the cache is made, then written
        module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
        grads = []
        for _ in range(2):
            x = random(ROWS, K, device=device).requires_grad_()
            y = under_flag(module, x, recipe, first_use, is_first_microbatch=True)
            y.backward(gradient(y))
            grads.append(module.weight.main_grad.clone())
        assert_same_bits(grads[1], 2 * grads[0], "main_grad")


# --- compiled -------------------------------------------------------------------------------------

FLAGS = (True, False, False, True, False, False, True, True, False)


def assert_same_cache(module, twin):
    """The cached weights are equal bit by bit."""
    assert set(module._fp8_workspaces) == set(twin._fp8_workspaces)
    for key, entry in module._fp8_workspaces.items():
        pairs = zip(contents(entry), contents(twin._fp8_workspaces[key]))
        for i, (a, b) in enumerate(pairs):
            assert_same_bits(a, b, f"{key} buffer {i}")


def run_flag(module, recipe, device, deferred=False, **options):
    """Training steps of a compiled module and an eager twin; how many graphs there were.

    ``deferred``: backward passes wait until the next step that rewrites the cache.
    """
    twin = copy.deepcopy(module)
    for m in (module, twin):
        prepare(m)

    def call(m, x):
        with te.autocast(recipe=recipe, _graph=True):
            return m(x)

    compiled = torch.compile(lambda x: call(module, x), fullgraph=True, **options)
    waiting = []
    for seed, first in enumerate(FLAGS):
        if first:
            assert_backward(waiting)
            if device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            if seed:  # delayed scaling, as code that captures graphs must ask for
                FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
                FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
            assert_same_modules(module, twin)
        FP8GlobalStateManager.get_skip_fp8_weight_update_tensor().fill_(not first)
        with torch.no_grad():
            for weight in (*gemm_weights(module), *gemm_weights(twin)):
                weight.mul_(1.1)
        leaves = [random(ROWS, K, device=device, seed=seed).requires_grad_() for _ in range(2)]
        torch.manual_seed(seed)
        y = compiled(leaves[0])
        torch.manual_seed(seed)
        z = call(twin, leaves[1])
        assert_same_bits(y, z, "output")
        assert_same_cache(module, twin)
        waiting.append((seed, y, z, *leaves))
        if not deferred:
            assert_backward(waiting)
    assert_backward(waiting)
    assert_same_modules(module, twin)
    return graphs()


def assert_backward(waiting):
    """The backward passes of both, oldest first."""
    for seed, y, z, *leaves in waiting:
        for out in (y, z):
            torch.manual_seed(seed)
            out.backward(gradient(out))
        assert_same_bits(*(leaf.grad for leaf in leaves), "input gradient")
    waiting.clear()


def with_cache(kind, recipe, device):
    """A module that has run under the flag once."""
    reset()
    module = build(kind, device, recipe=recipe)
    under_flag(module, random(ROWS, K, device=device).requires_grad_(), recipe_of(recipe), True)
    return module


@pytest.mark.feature(
    "weight caching decided by a flag on the device",
    modes=("compiled",),
    others="training in replays; cached weights are constants of a program",
)
@pytest.mark.parametrize(
    "kind,recipe",
    [(kind, recipe) for kind in GEMM_MODULES[:2] for recipe in FEW]
    + [("LayerNormMLP", recipe) for recipe in ALL_RECIPES],
)
def test_flag_in_one_graph(kind, recipe, device):
    """Once the cache exists: the flag changes and the graph does not; late backward passes.

    (Whether one that comes after the next rewriting sees old or new bytes is up to the compiler.)
    """
    module = with_cache(kind, recipe, device)
    late = kind != "Linear" and recipe not in READS_WEIGHTS
    assert run_flag(module, recipe_of(recipe), device, late, backend="aot_eager") == 1


@pytest.mark.parametrize("kind,recipe", zip(GEMM_MODULES, ("current", "mxfp8", "delayed")))
def test_flag_in_one_graph_of_inductor(kind, recipe, device):
    """The same with the default backend."""
    module = with_cache(kind, recipe, device)
    assert run_flag(module, recipe_of(recipe), device, kind != "Linear", backend="inductor") == 1


@cuda_only
@pytest.mark.parametrize("kind,recipe", zip(GEMM_MODULES, ("current", "mxfp8", "delayed")))
def test_flag_in_cuda_graphs_of_inductor(kind, recipe):
    """The same with ``mode="reduce-overhead"``."""
    module = with_cache(kind, recipe, "cuda")
    assert run_flag(module, recipe_of(recipe), "cuda", True, mode="reduce-overhead") == 1


@pytest.mark.parametrize("kind,recipe", zip(GEMM_MODULES, ("delayed", "current", "mxfp8")))
def test_flag_without_a_cache(kind, recipe, device):
    """The first call makes it, in a graph of its own, whatever the flag says."""
    reset()
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
    state = FP8GlobalStateManager.quantization_state
    state.skip_fp8_weight_update_tensor = state.skip_fp8_weight_update_tensor.to(device)
    module = build(kind, device, recipe=recipe)
    assert run_flag(module, recipe_of(recipe), device, True, backend="aot_eager") <= 3
