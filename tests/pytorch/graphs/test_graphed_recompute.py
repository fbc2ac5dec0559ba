# SPDX-License-Identifier: Apache-2.0
"""Graphs of callables that recompute in backward, against the same modules that keep everything."""

import copy
import itertools

import pytest
import torch
from compile_support import GEMM_MODULES, K, assert_same_modules, recipe_of
from graph_support import assert_same_results, graphed, sample_of, train
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graphed.random_numbers import DrawsNothing


class Recomputing(torch.nn.Module):
    """A model whose module is recomputed by ``te.checkpoint``, if there are options for it."""

    def __init__(self, module, options, dropout=0.0):
        super().__init__()
        self.module, self.options = module, options
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x, **kwargs):
        """``x [rows, K]``."""
        if self.options is None:
            return self.run(x, **kwargs)
        return te.checkpoint(self.run, x, **self.options, **kwargs)

    def run(self, x, **kwargs):
        """What is recomputed: our module between operations of PyTorch, used twice."""
        x = self.module(torch.sin(x), **kwargs)
        return self.module(self.dropout(torch.nn.functional.silu(x)), **kwargs) + x


def pair(kind, recipe, options, device, dropout=0.0):
    """A model that recomputes, and one that keeps everything."""
    # The custom recipe of delayed scaling needs no sizes of its own: K to K fits every recipe.
    sizes = (K, 96) if kind == "LayerNormMLP" else (K, K)
    module = getattr(te, kind)(*sizes, params_dtype=torch.bfloat16, device=device)
    model = Recomputing(module, options, dropout)
    twin = copy.deepcopy(model)
    twin.options = None
    return model, twin, recipe_of(recipe)


@pytest.mark.feature(
    "te.checkpoint in te.make_graphed_callables",
    modes=("eager",),
    needs="cuda",
    others="see te.make_graphed_callables",
)
@pytest.mark.parametrize("use_reentrant", (True, False))
@pytest.mark.parametrize("recipe", ("none", "current", "delayed", "nvfp4", "custom_delayed"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_training(kind, recipe, use_reentrant, device):
    """Outputs, gradients, parameters and scales; backward after the region has ended."""
    model, twin, kept = pair(kind, recipe, {"use_reentrant": use_reentrant}, device)
    graphed(model, (sample_of(device),), kept)
    assert_same_results(*(train(m, m, kept, device) for m in (model, twin)))
    assert_same_modules(model, twin)


@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_cached_weights(recipe, device):
    """The second pass reads the weights that the flag left in the cache."""
    model, twin, kept = pair("LayerNormMLP", recipe, {}, device)
    graphed(model, (sample_of(device),), kept, cache_quantized_params=True)

    def microbatches(m):
        first = itertools.cycle((True, False))
        return train(lambda x: m(x, is_first_microbatch=next(first)), m, kept, device)

    assert_same_results(*(microbatches(m) for m in (model, twin)))
    assert_same_modules(model, twin)


@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_checkpoint_of_torch(recipe, device):
    """It may not read generators in a capture, and needs ``use_reentrant=False``."""
    model, twin, kept = pair("LayerNormMLP", recipe, {}, device)
    run, options = model.run, {"use_reentrant": False, "preserve_rng_state": False}
    model.run = lambda x: torch_checkpoint(run, x, **options)
    model.options = None
    graphed(model, (sample_of(device),), kept)
    assert_same_results(*(train(m, m, kept, device) for m in (model, twin)))
    assert_same_modules(model, twin)


@pytest.mark.parametrize("iterations", (0, 3))
def test_random_numbers_are_refused(iterations, device):
    """A backward graph could not draw the same ones; in eval mode there are none."""
    model, twin, kept = pair("LayerNormMLP", "current", {}, device, dropout=0.5)
    sample = (sample_of(device),)
    if iterations:  # an error in a capture leaves a CUDA device in no state to go on
        with pytest.raises(RuntimeError, match="(dropout|bernoulli).*draws random"):
            graphed(model, sample, kept, num_warmup_iters=iterations)
    for m in (model, twin):
        m.eval()
        m(sample[0].detach())
    graphed(model, sample, kept, num_warmup_iters=iterations)
    assert_same_results(*(train(m, m, kept, device, steps=1) for m in (model, twin)))


def test_attention_without_dropout(device):
    """Its op is marked as one that may draw, but with a probability of 0 it does not."""
    q = torch.ones(1, 2, 8, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    attention = torch.nn.functional.scaled_dot_product_attention
    with DrawsNothing():
        attention(q, q, q)
    with DrawsNothing(), pytest.raises(RuntimeError, match="draws random numbers"):
        attention(q, q, q, dropout_p=0.5)
