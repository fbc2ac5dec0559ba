# SPDX-License-Identifier: Apache-2.0
"""What the tests of ``te.make_graphed_callables`` share, and a stand-in for CUDA graphs."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from compile_support import K, assert_same_bits, build, gradient, random

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graphed.capture import CAPTURING
from transformer_engine.pytorch.graphed.weight_gradients import fused
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

ROWS = 32
FEW = ("current", "delayed", "mxfp8")
NEEDS_CUDA = "CUDA graphs need a CUDA device; the stand-in has no streams and no memory of its own"
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)


class Rerun:
    """Captures by running, replays by running again; results land in the memory of the first ones.

    What replays must not depend on shows as it does with a graph: a replay reads and writes static
    tensors only.
    """

    def new_pool(self):
        """Nothing to share."""
        return object()

    def warming_up(self):
        """No stream."""
        return nullcontext()

    def capture(self, run, pool):
        """``(what can be replayed, results)``."""
        assert pool is not None
        again = _Again(run)
        return again, again.results

    def replay(self, graph, stream=None, event=None):
        """Run again."""
        del stream, event
        graph.replay()

    @contextmanager
    def same_random_numbers(self):
        """Give the generator back as it was."""
        before = torch.get_rng_state()
        yield
        torch.set_rng_state(before)


class _Again:
    """A method of a unit and the tensors that it returned first."""

    def __init__(self, run):
        self.run, self.grad_enabled = run, torch.is_grad_enabled()
        self.flag = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
        self.results = run()

    def replay(self):
        """Compute the results anew, in place, with the captured flag; Python marks nothing."""
        state = FP8GlobalStateManager.quantization_state
        flag, state.skip_fp8_weight_update_tensor = state.skip_fp8_weight_update_tensor, self.flag
        CAPTURING.active = True  # as it was when a graph would have been recorded
        with torch.set_grad_enabled(self.grad_enabled), fused(self.run.__self__.params):
            fresh = self.run()
        CAPTURING.active = False
        state.skip_fp8_weight_update_tensor = flag
        for static, value in zip(self.results, fresh):
            if static is not None and static is not value:
                static.data.copy_(value)

    def reset(self):
        """Forget what was captured."""
        self.run = None


def region(recipe):
    """te.autocast, or nothing."""
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def graphed(modules, sample, recipe=None, **options):
    """Graphs of ``modules`` under ``recipe``."""
    options = {"enabled": recipe is not None, "recipe": recipe, **options}
    return te.make_graphed_callables(modules, sample, **options)


def sample_of(device, rows=ROWS, width=K):
    """A static input."""
    return torch.zeros(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)


def step(call, x, recipe, seed=0, **kwargs):
    """``(output, input gradient)`` of one forward and backward pass; backward after the region."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    with region(recipe):
        y = call(x, **kwargs)
    y.backward(gradient(y, seed=seed))
    return y.detach().clone(), x.grad.clone()


def prepare(module):
    """Gradients that exist before training, as optimizers may leave them."""
    for param in module.parameters():
        param.grad = torch.zeros(param.shape, dtype=param.dtype, device=param.device)


def train(call, module, recipe, device, steps=3, accumulate=2, rate=0.01, **kwargs):
    """Outputs and input gradients of some steps of SGD."""
    prepare(module)
    results = []
    for i in range(steps):
        for j in range(accumulate):
            x = random(ROWS, K, device=device, seed=10 * i + j) * (1 + i)
            results += step(call, x, recipe, 10 * i + j, **kwargs)
        with torch.no_grad():
            for param in module.parameters():
                param.add_(param.grad, alpha=-rate)
                param.grad.zero_()
    return results


def assert_same_results(a, b):
    """Lists of tensors are equal bit by bit."""
    assert len(a) == len(b)
    for i, (left, right) in enumerate(zip(a, b)):
        assert_same_bits(left, right, f"result {i}")


def stack(device, recipe="none"):
    """Modules whose input and output have the same width; one recomputes in backward."""
    return torch.nn.Sequential(
        build("LayerNormMLP", device, recipe=recipe, activation="swiglu"),
        build("LayerNorm", device, seed=1),
        build("LayerNormMLP", device, recipe=recipe, seed=2, checkpoint=True),
    )


def plain_linear(device):
    """A module that is not ours."""
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8, bias=False).to(device)
