# SPDX-License-Identifier: Apache-2.0
"""torch.func: parameters from outside work; transforms work, or are refused with a reason."""

import copy

import pytest
import torch

import transformer_engine.pytorch as te

from compile_support import (
    DRAWS,
    GEMM_MODULES,
    K,
    assert_same_bits,
    build,
    gradient,
    random,
    recipe_of,
    reset,
    with_recipe,
)
from composition_support import assert_equal

TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), device=x.device)),
    "vmap": lambda f, x: torch.func.vmap(f)(x.view(2, 16, K)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "grad_of_grad": lambda f, x: torch.func.grad(
        lambda v: torch.func.grad(f)(v).float().square().sum()
    )(x),
}
NO_RULE = "torch.func has no rule for the module ops: use y.backward() or torch.autograd.grad"


@pytest.mark.feature("torch.func.grad, vjp, jvp, vmap", modes=("eager", "compiled"), no=NO_RULE)
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("recipe", ("none", "delayed"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_transforms_are_refused(kind, recipe, compiled, device):
    """An error instead of a derivative of something else (torch.compile makes zeros of the second
    derivative of a Function); the module works afterwards, with the state that it had.
    """
    module, kept = build(kind, device, recipe=recipe), recipe_of(recipe)
    twin = copy.deepcopy(module)
    x = random(32, K, device=device)

    def loss(x):
        return with_recipe(module, x, kept).float().square().sum()

    for name, transform in TRANSFORMS.items():
        reset()
        run = transform
        if compiled:
            run = torch.compile(transform, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="torch.func transforms|forward-mode") as error:
            run(loss, x)
        if not compiled:
            assert error.type is RuntimeError, name
    results = []
    for model in (module, twin):
        leaf = x.clone().requires_grad_()
        with_recipe(model, leaf, kept).float().square().sum().backward()
        results.append(leaf.grad)
    assert_equal(results, "gradient after refused transforms")


@pytest.mark.parametrize("recipe", ("current", "delayed"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_transforms_of_frozen_modules(kind, recipe, device):
    """High precision has rules for vmap and jvp, quantization has none, and says so."""
    module = build(kind, device, dtype=torch.float32).requires_grad_(False)
    x, v = (random(3, 8, K, device=device, seed=i, dtype=torch.float32) for i in range(2))
    torch.testing.assert_close(torch.func.vmap(module)(x), module(x))
    _, tangent = torch.func.jvp(module, (x,), (v,))
    # The transposed product is what backward computes.
    leaf, dy = x.clone().requires_grad_(), random(*tangent.shape, device=device, seed=2).float()
    module(leaf).backward(dy)
    torch.testing.assert_close((tangent * dy).sum(), (leaf.grad * v).sum(), rtol=1e-4, atol=1e-3)
    kept, x = recipe_of(recipe), random(32, K, device=device, dtype=torch.float32)
    for transform in ("vmap", "jvp"):
        with pytest.raises(RuntimeError, match="not supported inside of te.autocast"):
            TRANSFORMS[transform](lambda x: with_recipe(module, x, kept).sum(), x)


@pytest.mark.feature("torch.func.functional_call", modes=("eager", "compiled"))
@pytest.mark.parametrize("recipe", ("none", "delayed", "nvfp4"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_functional_call(kind, recipe, device):
    """Parameters from outside, compiled, with gradients of theirs."""
    reset()
    module, kept = build(kind, device, recipe=recipe), recipe_of(recipe)
    eager = copy.deepcopy(module)

    def call(module, parameters, x):
        with te.autocast(enabled=kept is not None, recipe=kept):
            return torch.func.functional_call(module, parameters, (x,))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for run, owner in ((compiled, module), (call, eager)):
        parameters = {
            name: (p.detach() * 0.5).requires_grad_() for name, p in owner.named_parameters()
        }
        torch.manual_seed(DRAWS)
        y = run(owner, parameters, random(32, K, device=device))
        y.backward(gradient(y))
        assert all(p.grad is None for p in owner.parameters())
        results.append([y, *(p.grad for p in parameters.values())])
    for a, b in zip(*results):
        assert_same_bits(a, b, "output or gradient of a given parameter")
