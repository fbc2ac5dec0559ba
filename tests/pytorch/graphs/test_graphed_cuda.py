# SPDX-License-Identifier: Apache-2.0
"""What graphed modules have on CUDA only: streams, pools, memory."""

import copy
import functools

import torch
from compile_support import K, assert_same_modules, build, gradient, random, recipe_of
from graph_support import ROWS, cuda_only, region, graphed, sample_of, step, assert_same_results

from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import graph


@cuda_only
def test_streams_and_events():
    """Replays on a stream of the caller, who waits for all of it or for an event."""
    module = build("LayerNormMLP", "cuda")
    twin, recipe = copy.deepcopy(module), Float8CurrentScaling()
    graphed(module, (sample_of("cuda"),), recipe)
    stream = torch.cuda.Stream()
    for seed, event in enumerate((None, torch.cuda.Event())):
        x = random(ROWS, K, device="cuda", seed=seed)
        if event is not None:
            event.record(stream)
        call = functools.partial(module, cuda_graph_stream=stream, cuda_graph_event=event)
        # With an event that is not in the graph nobody waits for the replay but the host.
        leaf = x.clone().requires_grad_()
        with region(recipe):
            y = call(leaf)
        torch.cuda.synchronize()
        y.backward(gradient(y, seed=seed))
        torch.cuda.synchronize()
        assert_same_results((y.detach(), leaf.grad), step(twin, x, recipe, seed))


@cuda_only
def test_a_pool_is_shared():
    """Two captures in one pool, replayed in their order."""
    pool, recipe = graph.graph_pool_handle(), recipe_of("delayed")
    modules = [build("LayerNormMLP", "cuda", seed=i) for i in range(2)]
    twins = copy.deepcopy(modules)
    for module in modules:
        graphed(module, (sample_of("cuda"),), recipe, pool=pool)
    for seed in range(2):
        x = random(ROWS, K, device="cuda", seed=seed)
        for module, twin in zip(modules, twins):
            assert_same_results(step(module, x, recipe, seed), step(twin, x, recipe, seed))
    for module, twin in zip(modules, twins):
        assert_same_modules(module, twin)


@cuda_only
def test_memory_is_freed_by_reset():
    """Nothing of the graph stays but cached bytes of the weights."""
    module = build("LayerNormMLP", "cuda", width=1024)
    before = allocated()
    graphed(module, (sample_of("cuda", 4096, 1024),), Float8CurrentScaling())
    assert allocated() > before
    module.reset()
    del module.forward, module.backward_dw, module.reset
    assert allocated() <= before + 2**21


def allocated():
    """Bytes, without the workspaces that cuBLAS takes for each stream."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()
