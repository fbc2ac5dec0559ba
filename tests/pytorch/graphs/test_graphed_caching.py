# SPDX-License-Identifier: Apache-2.0
"""Graphs with cached weights: ``is_first_microbatch`` decides whether a replay writes them anew."""

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
    random,
    recipe_of,
)
from graph_support import (
    FEW,
    ROWS,
    assert_same_results,
    graphed,
    prepare,
    region,
    sample_of,
    step,
)
from recipe_list import ALL_RECIPES

from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

FIRST = (True, False, False)


def entries_of(module):
    """The cached weights, and where their buffers are."""
    entries = list(module._fp8_workspaces.values())
    buffers = [buffer for entry in entries for buffer in entry.operand_buffers()]
    return entries, [buffer.data_ptr() for buffer in buffers if buffer is not None]


def scale_weights(modules, factor):
    """Make cached weights stale."""
    with torch.no_grad():
        for module in modules:
            for param in module.parameters():
                param.mul_(factor)


def microbatches(modules, recipe, device, minibatches=3):
    """The same on both modules, the first of which is graphed; weights change all the time."""
    for minibatch in range(minibatches):
        for m in modules:
            prepare(m)
        for i, first in enumerate(FIRST):
            x = random(ROWS, K, device=device, seed=3 * minibatch + i)
            results = [step(m, x, recipe, i, is_first_microbatch=first) for m in modules]
            assert_same_results(*results)
            scale_weights(modules, 0.97)  # seen from the next minibatch on
        assert_same_modules(*modules)


@pytest.mark.feature(
    "te.make_graphed_callables with fp8_weight_caching",
    modes=("eager",),
    needs="cuda",
    others="see te.make_graphed_callables",
)
@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_microbatches(kind, recipe, device):
    """The first one writes the cached weights, in place; the others read them."""
    module = build(kind, device, recipe=recipe)
    twin, kept = copy.deepcopy(module), recipe_of(recipe)
    graphed(module, (sample_of(device),), kept, cache_quantized_params=True)
    entries, pointers = entries_of(module)
    assert len(entries) == module.num_gemms
    microbatches((module, twin), kept, device, 3 if recipe in FEW else 2)
    now = entries_of(module)
    assert all(a is b for a, b in zip(entries, now[0])) and pointers == now[1]


@pytest.mark.parametrize("recipe", FEW)
def test_network(recipe, device):
    """Of modules, not all of which know the keyword: graphs ignore what they were not made with."""
    network = torch.nn.Sequential(
        build("LayerNormMLP", device, recipe=recipe),
        build("LayerNorm", device, seed=1),
        build("LayerNormMLP", device, recipe=recipe, seed=2, checkpoint=True),
    )

    class Twin(torch.nn.Sequential):
        """The same in eager, where the keyword must be handed on."""

        def forward(self, x, is_first_microbatch):
            """``x [rows, K]``."""
            for module in self:
                caches = hasattr(module, "_fp8_workspaces")
                x = module(x, is_first_microbatch=is_first_microbatch) if caches else module(x)
            return x

    twin, kept = Twin(*copy.deepcopy(network)), recipe_of(recipe)
    graphed(network, (sample_of(device),), kept, cache_quantized_params=True)
    microbatches((network, twin), kept, device)


@pytest.mark.parametrize("iterations", (0, 1))
@pytest.mark.parametrize("recipe", FEW)
def test_few_warmups(recipe, iterations, device):
    """The cache is made before the capture; a graph that makes it would always write it."""
    module, kept = build("LayerNormMLP", device), recipe_of(recipe)
    step(module, random(ROWS, K, device=device), kept)
    module.zero_grad()
    twin = copy.deepcopy(module)
    cached = []
    graphed(
        module,
        (sample_of(device),),
        kept,
        num_warmup_iters=iterations,
        cache_quantized_params=True,
        post_warmup_hook=lambda: cached.extend(module._fp8_workspaces),
    )
    assert cached == ["fc1_weight", "fc2_weight"]
    for m in (module, twin):
        step(m, random(ROWS, K, device=device), kept, is_first_microbatch=True)
    scale_weights((module, twin), -1)
    for seed in range(2):
        x = random(ROWS, K, device=device, seed=seed)
        results = [step(m, x, kept, is_first_microbatch=False) for m in (module, twin)]
        assert_same_results(*results)
    assert_same_modules(module, twin)
    microbatches((module, twin), kept, device, 1)


def test_flag_of_the_graph(device):
    """A graph reads the flag that it was captured with, whatever becomes of the global one."""
    module, recipe = build("Linear", device), recipe_of("current")
    twin = copy.deepcopy(module)
    graphed(module, (sample_of(device),), recipe, cache_quantized_params=True)
    for _ in range(2):
        FP8GlobalStateManager.reset()
        microbatches((module, twin), recipe, device, 1)
        FP8GlobalStateManager.reset()
        FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)  # another tensor


@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_pipelined_minibatches(recipe, device):
    """A graph for each microbatch; they share the cache, which all backward passes still need."""
    module, kept = build("LayerNormMLP", device), recipe_of(recipe)
    twin = copy.deepcopy(module)
    samples = ((sample_of(device),),) * 3
    order = [1, 1, 1, -1, -1, -1]
    units = graphed((module,), samples, kept, _order=order, cache_quantized_params=True)
    for minibatch in range(3):
        leaves, outputs = [], []
        for calls in (units, [twin] * 3):
            with region(kept):
                for i, first in enumerate(FIRST):
                    x = random(ROWS, K, device=device, seed=3 * minibatch + i).requires_grad_()
                    leaves.append(x)
                    outputs.append(calls[i](x, is_first_microbatch=first))
        for i, y in enumerate(outputs):
            y.backward(gradient(y, seed=i % 3))
        for i in range(3):
            assert_same_bits(outputs[i], outputs[i + 3], f"output {i}")
            assert_same_bits(leaves[i].grad, leaves[i + 3].grad, f"input gradient {i}")
        assert_same_modules(module, twin)
        scale_weights((module, twin), 1.1)


@pytest.mark.parametrize("flag", (None, 1, "yes"))
def test_cached_weights_need_the_keyword(flag, device):
    """A call without it, or with something else, is an error."""
    module = build("Linear", device)
    graphed(module, (sample_of(device),), Float8CurrentScaling(), cache_quantized_params=True)
    kwargs = {} if flag is None else {"is_first_microbatch": flag}
    with pytest.raises(ValueError, match="is_first_microbatch=True or False"):
        module(random(ROWS, K, device=device), **kwargs)
