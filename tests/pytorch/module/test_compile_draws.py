# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding in compiled code: as many draws as in eager, and in the same order."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.pytorch.core.ops import EAGER

from compile_support import K, Twins, build, random
from recipe_list import CustomRecipe, NVFP4Quantizer

# One that changes nothing, one that merges equal calls, one that also reorders.
BACKENDS = ("aot_eager", "aot_eager_decomp_partition", "inductor")


def parallel(modules, x, recipe):
    """Branches of different depth; some receive the same gradient, and none waits for another."""
    a, b, c, d, e = modules
    with te.autocast(recipe=recipe):
        return a(b(x)) + c(d(x)) + (e(x) + a(-x)) + c(e(x))


def stochastic_everywhere(role):
    """Stochastic operands in the forward pass as well."""
    del role
    return NVFP4Quantizer(stochastic_rounding=True)


RECIPES = {
    "gradients": NVFP4BlockScaling,
    "all": lambda: CustomRecipe(stochastic_everywhere),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_parallel_branches(recipe, backend, device):
    """Equal output gradients are rounded with different noise, and that of eager."""
    modules = torch.nn.ModuleList(
        te.Linear(K, K, bias=False, params_dtype=torch.float32, device=device) for _ in range(5)
    )
    twins = Twins(modules, parallel, backend)
    for seed in range(2):
        # fp32, because Inductor rounds fused sums of bf16 once, whatever is drawn.
        x = random(16, K, device=device, seed=seed, dtype=torch.float32)
        twins.step(x, RECIPES[recipe](), seed=seed)
        twins.zero_grad()


def siblings(modules, x, recipe):
    """Two layers with one input and one output gradient."""
    with te.autocast(recipe=recipe):
        return modules[0](x) + modules[1](x)


def test_siblings_have_noise_of_their_own(device, monkeypatch):
    """Compiled code draws as often as eager code does, so that equal layers differ."""
    modules = torch.nn.ModuleList(build("Linear", device, recipe="nvfp4") for _ in range(2))
    twins, drawn = Twins(modules, siblings, "aot_eager_decomp_partition"), []
    draw = EAGER.rng_state
    monkeypatch.setattr(EAGER, "rng_state", lambda like: drawn.append(like) or draw(like))
    twins.step(random(16, K, device=device), NVFP4BlockScaling())
    assert len(drawn) == 2, "the eager twin"
    gradients = [module.weight.grad for module in modules]
    assert not torch.equal(*gradients)
