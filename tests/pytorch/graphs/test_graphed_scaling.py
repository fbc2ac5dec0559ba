# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling around replays of CUDA graphs."""

import copy

import pytest
import torch
from compile_support import (
    K,
    STATE,
    assert_same_modules,
    build,
    gradient,
    random,
    recipe_of,
)
from graph_support import ROWS, region, graphed, sample_of, step, train, assert_same_results

from transformer_engine.common.recipe import DelayedScaling


def test_scales_are_renewed_between_replays(device):
    """By the surrounding region and after backward, as in eager; not by calls outside of one."""
    module, recipe = build("Linear", device), recipe_of("delayed")
    graphed(module, (sample_of(device),), recipe)
    state = module._delayed_scaling
    before = {name: getattr(state, name).clone() for name in STATE}
    step(module, random(ROWS, K, device=device), None)
    assert torch.equal(state.fwd_scale, before["fwd_scale"])
    assert torch.equal(state.bwd_scale, before["bwd_scale"])
    step(module, random(ROWS, K, device=device), recipe)
    assert (state.fwd_scale[:2] != before["fwd_scale"][:2]).all()
    assert (state.bwd_scale[:1] != before["bwd_scale"][:1]).all()


def test_one_module_twice_in_a_region(device):
    """Two graphs of one module: its scales are renewed once for both."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    twin = copy.deepcopy(module)
    samples = ((sample_of(device),), (sample_of(device),))
    units = graphed((module,), samples, recipe, _order=[1, 1, -1, -1])
    assert len(units) == 2

    def twice(first, second, seed):
        x = [random(ROWS, K, device=device, seed=seed + i).requires_grad_() for i in range(2)]
        with region(recipe):
            y = first(x[0]), second(x[1])
        for i in (0, 1):  # as captured
            y[i].backward(gradient(y[i], seed=seed))
        return [*(out.detach().clone() for out in y), *(t.grad for t in x)]

    for seed in range(3):
        assert_same_results(twice(*units, seed), twice(twin, twin, seed))
        assert_same_modules(module, twin)


def test_another_history_length_is_refused(device):
    """The graph records in memory that a resize would leave behind."""
    module = build("Linear", device)
    graphed(module, (sample_of(device),), DelayedScaling(amax_history_len=3))
    with pytest.raises(RuntimeError, match="another length"):
        step(module, random(ROWS, K, device=device), DelayedScaling(amax_history_len=4))


def test_state_that_is_loaded_is_used(device):
    """``load_state_dict`` writes scales where the graph reads them."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    other = build("LayerNormMLP", device, seed=3)
    for seed in range(2):
        step(other, 5 * random(ROWS, K, device=device, seed=seed), recipe)
    graphed(module, (sample_of(device),), recipe)
    module.load_state_dict(other.state_dict())
    other.zero_grad()
    assert_same_results(*(train(m, m, recipe, device) for m in (module, other)))
    assert_same_modules(module, other)


def test_another_state_is_refused(device):
    """One that was loaded with another length, or moved: nothing is replayed, nothing marked."""
    module, recipe = build("Linear", device), DelayedScaling(amax_history_len=3)
    other = build("Linear", device)
    step(other, random(ROWS, K, device=device), DelayedScaling(amax_history_len=5))
    graphed(module, (sample_of(device),), recipe)
    module.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="is not the one that its CUDA graph records in"):
        step(module, random(ROWS, K, device=device), recipe)
    assert not module._delayed_scaling.pending


def test_region_of_another_recipe(device):
    """A graph without delayed scaling in a region with it leaves histories alone, and back."""
    module, delayed, current = build("Linear", device), recipe_of("delayed"), recipe_of("current")
    step(module, random(ROWS, K, device=device), delayed)
    twin = copy.deepcopy(module)
    graphed(module, (sample_of(device),), current)
    module.zero_grad()
    twin.zero_grad()
    x = random(ROWS, K, device=device, seed=1)
    assert_same_results(step(module, x, delayed), step(twin, x, current))
    assert_same_modules(module, twin)
