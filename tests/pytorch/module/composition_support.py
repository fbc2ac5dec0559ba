# SPDX-License-Identifier: Apache-2.0
"""What the tests of compiled modules inside of users' training code share."""

import copy

import pytest
import torch
from feature_report import trained_feature  # noqa: F401  # pylint: disable=unused-import

import transformer_engine.pytorch as te

from compile_support import (
    DRAWS,
    FFN,
    GEMM_MODULES,
    K,
    as_tuple,
    assert_same_bits,
    assert_same_modules,
    gradient,
    graphs,
    random,
    recipe_of,
    reset,
    with_recipe,
)

# Each module in high precision and with state, and each recipe with one of the modules.
CASES = (
    *((kind, recipe) for kind in GEMM_MODULES for recipe in ("none", "delayed")),
    ("Linear", "current"),
    ("LayerNormLinear", "block"),
    ("LayerNormMLP", "mxfp8"),
    ("Linear", "nvfp4"),
    ("LayerNormMLP", "custom_two_formats"),
)
EACH_CASE = pytest.mark.parametrize("kind, recipe", CASES)


def each_case_with(name, values):
    """Each case with one of the values, in turn; in this order, each value meets each module."""
    pairs = [(*case, values[(i + i // 3) % len(values)]) for i, case in enumerate(CASES)]
    return pytest.mark.parametrize(f"kind, recipe, {name}", pairs)


WEIGHT = {"Linear": "weight", "LayerNormLinear": "weight", "LayerNormMLP": "fc1_weight"}


def assert_equal(pair, what):
    """Both tensors of a pair have the same bits."""
    tested, eager = pair
    assert_same_bits(tested, eager, what)


def square(kind, device):
    """A module from width K to width K."""
    sizes = (K, FFN) if kind == "LayerNormMLP" else (K, K)
    return getattr(te, kind)(*sizes, params_dtype=torch.bfloat16, device=device)


class Pair:
    """A model whose call is compiled, and its eager copy; both are trained in lockstep.

    ``change`` is applied to both, for what no copy takes along (hooks).
    """

    def __init__(self, model, recipe, optimizer=None, change=None, **options):
        reset()
        self.models = model, copy.deepcopy(model)
        if change is not None:
            self.kept = [change(m) for m in self.models]
        self.recipe = recipe_of(recipe)
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        trainable = [[p for p in m.parameters() if p.requires_grad] for m in self.models]
        self.optimizers = [make(parameters) for parameters in trainable]

        def call(x):
            return with_recipe(model, x, self.recipe)

        compiled = torch.compile(call, **{"fullgraph": True, "backend": "aot_eager", **options})
        self.calls = compiled, lambda x: with_recipe(self.models[1], x, self.recipe)

    def train(self, device, steps=2, x_grad=True, after=None, one_graph=True):
        """Steps whose outputs, gradients, parameters and scales must be equal, in one graph.

        ``after`` gets the index of a model after each of its steps.
        """
        for seed in range(steps):
            results = []
            for call, optimizer in zip(self.calls, self.optimizers):
                optimizer.zero_grad()
                x = random(32, K, device=device, seed=seed).requires_grad_(x_grad)
                torch.manual_seed(DRAWS)
                y = as_tuple(call(x))[0]
                y.backward(gradient(y, seed=seed))
                results.append((y, x.grad))
            for what, *both in zip(("output", "input gradient"), *results):
                assert_equal(both, what)
            assert_same_modules(*self.models)
            for i, optimizer in enumerate(self.optimizers):
                optimizer.step()
                if after is not None:
                    after(i)
            assert_same_modules(*self.models)
        assert graphs() == 1 if one_graph else graphs() >= 1
