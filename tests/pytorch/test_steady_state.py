# SPDX-License-Identifier: Apache-2.0
"""After a warm-up nothing compiles any more, however steps are mixed.

Each test walks through all kinds of steps twice, then through a long random schedule of them during
which Dynamo raises an error, with the guard that failed, instead of compiling.
"""

import random
from contextlib import nullcontext

import pytest
import torch
from diagnostics_support import BF16, K, build
from module.recipe_list import recipe_of
from torch._dynamo.utils import counters

import transformer_engine.pytorch as te
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

ROWS = (8, 24, 40, 56, 104)
MODES = ("train", "eval", "no_grad", "inference")


@pytest.fixture(autouse=True)
def fresh_counters():
    """Graphs of one code object may be many here: recipes times modes times microbatches."""
    torch._dynamo.reset()
    counters.clear()
    FP8GlobalStateManager.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def graphs():
    """Graphs that Dynamo has made."""
    return counters["stats"]["unique_graphs"]


def given(rows, seed, device, grad):
    """An input whose number of rows is a symbol of the graph."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=generator).to(device=device, dtype=BF16)
    x.requires_grad_(grad)
    torch._dynamo.mark_dynamic(x, 0)
    return x


class Steps:
    """A compiled model and the kinds of steps that are taken with it."""

    def __init__(self, model, device, recipes, modes=MODES, inside=False):
        self.model, self.device, self.modes, self.inside = model, device, modes, inside
        self.recipes = {name: recipe_of(name) for name in recipes}
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.count = 0

        def call(x, first, recipe):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                return model(x, first)

        def inner(x, first, recipe):
            del recipe
            return model(x, first)

        target = call if inside else inner
        self.compiled = torch.compile(target, backend="aot_eager", fullgraph=True)

    def one(self, name, first, mode, rows):
        """One call of the model, with its backward where there is one."""
        recipe = self.recipes[name]
        self.count += 1
        self.model.train(mode == "train")
        x = given(rows, self.count, self.device, mode in ("train", "eval"))
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        context = te.autocast(enabled=recipe is not None, recipe=recipe)
        with nullcontext() if self.inside else context, modes.get(mode, nullcontext)():
            y = self.compiled(x, first, recipe)
        if mode in ("train", "eval"):
            y.float().square().mean().backward()
        assert torch.isfinite(y).all()

    def minibatch(self, name, mode, cached, rows):
        """Several microbatches with the weights of one, or a single step; then new weights."""
        for first in (True, False, False) if cached else (None,):
            self.one(name, first, mode, rows)
        if mode == "train":
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.count % 2 == 0)

    def kinds(self):
        """All kinds of minibatches."""
        return [(n, m, c) for n in self.recipes for m in self.modes for c in (False, True)]

    def run(self, length, seed=0):
        """Warm up, then ``length`` minibatches in random order without a compilation; the number of
        graphs.
        """
        order = random.Random(seed)
        for turn in range(2):
            for kind in self.kinds()[:: 1 - 2 * turn]:
                self.minibatch(*kind, ROWS[turn])
        warm = graphs()
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(length):
                self.minibatch(*order.choice(self.kinds()), order.choice(ROWS))
        assert graphs() == warm > 0
        return warm


class Block(torch.nn.Module):
    """All modules with weights, residual, activations of PyTorch between them."""

    def __init__(self, device):
        super().__init__()
        self.attend = build("LayerNormLinear", device, "mxfp8", normalization="RMSNorm")
        self.project = te.Linear(96, K, params_dtype=BF16, device=device, bias=False)
        self.mlp = build("LayerNormMLP", device, activation="swiglu")

    def forward(self, x, first):
        h = torch.nn.functional.silu(self.attend(x, first))
        x = x + self.project(h, first)
        return x + self.mlp(x, first)


# True has one graph more for the time before the cache holds anything.
FIRSTS = 3


def test_one_module_all_modes(device):
    """Modes, microbatches and batch sizes of one module."""
    steps = Steps(build("LayerNormMLP", device), device, ("delayed",))
    # With gradients, without, and in inference mode, for each value of is_first_microbatch.
    assert steps.run(60) <= 3 * FIRSTS + 1


@pytest.mark.parametrize("inside,recipes", ((False, "none mxfp8"), (True, "delayed")))
def test_a_model_under_changing_recipes(inside, recipes, device):
    """Recipes in turn, the autocast around the compiled function or inside of it."""
    recipes = recipes.split()
    steps = Steps(Block(device), device, recipes, ("train", "no_grad"), inside)
    assert steps.run(40) <= len(recipes) * 2 * FIRSTS + 1


def test_frozen_and_thawed(device):
    """Fine-tuning schedules: which parameters are trained changes from step to step."""
    model = build("LayerNormMLP", device)
    steps = Steps(model, device, ("current",))
    freezes = [(), ("fc1",), ("fc1", "layer"), ("fc1", "fc2_weight", "layer")]

    def walk(order):
        for frozen in order:
            for name, param in model.named_parameters():
                param.requires_grad_(not name.startswith(frozen or "-"))
            for rows in ROWS[:2]:
                steps.minibatch("current", "train", False, rows)

    walk(freezes)
    walk(freezes[::-1])
    warm, order = graphs(), random.Random(1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        walk([order.choice(freezes) for _ in range(20)])
    assert graphs() == warm == len(freezes)


def test_new_recipe_objects_with_the_same_fields(device):
    """Loops that make their recipe anew in each step do not compile anew."""
    module = build("LayerNormMLP", device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)

    def step(name, seed):
        with te.autocast(recipe=recipe_of(name)):
            y = compiled(given(ROWS[seed % len(ROWS)], seed, device, True))
        y.sum().backward()

    for name in ("current", "delayed", "nvfp4"):
        for seed in range(2):
            step(name, seed)
    warm = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(30):
            step(("current", "delayed", "nvfp4")[seed % 3], seed)
    assert graphs() == warm <= 6


def test_diagnostics_between_steps(device):
    """te.explain and te.memory_report cost no graph."""
    steps = Steps(build("LayerNormMLP", device), device, ("delayed",), ("train",))
    steps.run(4)
    warm = graphs()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            with te.autocast(recipe=steps.recipes["delayed"]):
                te.explain(steps.model, given(8, 0, device, True), True)
            steps.minibatch("delayed", "train", True, 24)
            te.memory_report(steps.model, given(8, 0, device, True))
    assert graphs() == warm
