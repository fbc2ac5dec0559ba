# SPDX-License-Identifier: Apache-2.0
"""``is_first_microbatch`` in eager: which weight a call multiplies with, and what is stored."""

import pytest
import torch
from eager_support import BF16, GEMM_MODULES, K, OTHER_CASES, assert_equal, build, random, run
from recipe_list import recipe_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

CACHE_KEYS = {
    "Linear": ["weight"],
    "LayerNormLinear": ["weight"],
    "LayerNormMLP": ["fc1_weight", "fc2_weight"],
}


CASES = [(kind, recipe) for kind in GEMM_MODULES for recipe in ("current", "delayed")]
CASES += OTHER_CASES


@pytest.mark.parametrize("kind,recipe", CASES)
def test_cached_weights(kind, recipe, device):
    """True stores, False takes what is stored, None neither reads nor writes."""
    module = build(kind, device, dtype=BF16, recipe=recipe, bias=False)
    recipe = DelayedScaling() if recipe == "delayed" else recipe_of(recipe)
    x = random(16, K, dtype=BF16, device=device)
    run(module, x, recipe)
    run(module, x, recipe)  # the scales of delayed scaling are settled now
    fresh = run(module, x, recipe).outputs[0]
    assert not module._fp8_workspaces
    assert torch.equal(run(module, x, recipe, is_first_microbatch=True).outputs[0], fresh)
    assert list(module._fp8_workspaces) == CACHE_KEYS[kind]
    with torch.no_grad():
        for name in CACHE_KEYS[kind]:
            getattr(module, name).mul_(-1)
    cached = run(module, x, recipe, is_first_microbatch=False)
    assert torch.equal(cached.outputs[0], fresh)
    changed = run(module, x, recipe).outputs[0]
    if kind != "LayerNormMLP":
        assert torch.equal(changed, -fresh)
    assert not torch.equal(changed, fresh)
    assert torch.equal(run(module, x, recipe, is_first_microbatch=False).outputs[0], fresh)
    assert torch.equal(run(module, x, recipe, is_first_microbatch=True).outputs[0], changed)
    assert torch.equal(run(module, x, recipe, is_first_microbatch=False).outputs[0], changed)


COMPLETED = [(kind, "current") for kind in GEMM_MODULES]
COMPLETED += [case for case in OTHER_CASES if case[1] != "custom_delayed"]


@pytest.mark.parametrize("kind,recipe", COMPLETED)
def test_cache_made_without_gradients_is_completed(kind, recipe, device):
    """Inference stores no columnwise bytes; a training step that needs them makes them."""
    module = build(kind, device, dtype=BF16, recipe=recipe)
    recipe = recipe_of(recipe)
    x = random(16, K, dtype=BF16, device=device)
    expected = run(module, x, recipe)
    with torch.no_grad(), te.autocast(recipe=recipe):
        module(x, is_first_microbatch=True)
    step = run(module, x, recipe, is_first_microbatch=False)
    assert_equal(
        [*step.outputs, *step.grads.values()], [*expected.outputs, *expected.grads.values()]
    )


def test_a_reused_weight_leaves_its_history_alone(device):
    """Delayed scaling does not roll the column of a weight that was not quantized."""
    module, recipe = build("Linear", device), DelayedScaling(amax_history_len=4)
    x = random(16, K, device=device)
    run(module, x, recipe, is_first_microbatch=True)
    history = module._delayed_scaling.fwd_history.clone()
    scale = module._delayed_scaling.fwd_scale.clone()
    with torch.no_grad():
        module.weight.mul_(4)
    run(module, 2 * x, recipe, is_first_microbatch=False)
    state = module._delayed_scaling
    assert torch.equal(state.fwd_history[:, 1], history[:, 1]) and state.fwd_scale[1] == scale[1]
    assert state.fwd_scale[0] == scale[0] / 2 and state.fwd_history[2, 0] == history[3, 0]


def test_an_earlier_microbatch_keeps_its_weight(device):
    """Replacing the cache does not change what an outstanding backward multiplies with."""
    module, recipe = build("Linear", device, bias=False), Float8CurrentScaling()
    x = random(16, K, device=device)
    expected = run(module, x, recipe)
    first, second = (x.clone().requires_grad_() for _ in range(2))
    with te.autocast(recipe=recipe):
        y = module(first, is_first_microbatch=True)
    with torch.no_grad():
        module.weight.mul_(3)
    with te.autocast(recipe=recipe):
        module(second, is_first_microbatch=True)
    y.backward(expected.dys[0])
    assert torch.equal(first.grad, expected.grads["x"])
