# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: eager, around compiled models, compiled; against one process."""

import copy
from contextlib import nullcontext

import processes
import pytest
import torch
from models import (
    assert_same,
    batch,
    build,
    bytes_of,
    loss_of,
    optimizer_of,
    state_of,
    train,
    train_ranks,
)
from processes import RANKS, everybody, needs_distributed
from recipe_list import recipe_of
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te

STEPS = 2


def batches(rank, steps=STEPS):
    """What one rank trains on."""
    return [batch(step, rank) for step in range(steps)]


def check_eager(rank, recipe, primary):
    """Outputs and parameters are those of one process that averages two gradients."""
    recipe_object = recipe_of(recipe)
    model = build(recipe if primary else None)
    single = copy.deepcopy(model)
    if rank:  # DDP gives everybody the parameters of rank 0
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2.0)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    outputs = train(model, recipe_object, batches(rank), wrapped)
    wanted = train_ranks(single, recipe_object, [batches(r) for r in range(RANKS)])
    assert_same(outputs, wanted[rank], "output")
    assert_same(bytes_of(model), bytes_of(single), "parameter")


def check_delayed(rank, mode):
    """Scales come from the largest amax of all ranks, and are the same everywhere.

    ``mode``: eager; compiled below DDP; DDP compiled.
    """
    recipe = recipe_of("delayed")
    model = build()
    wrapped = DistributedDataParallel(model)
    if mode == "inside":
        model.compile(backend="aot_eager", fullgraph=True)
    elif mode == "outside":
        wrapped = torch.compile(wrapped, backend="aot_eager")
    data = batches(rank)
    outputs = train(model, recipe, data, wrapped)
    states, params = state_of(model), bytes_of(model)
    for theirs in everybody(states + params):
        assert_same(theirs, states + params, "another rank's state")
    seen = [max(float(batch(step, r).abs().max()) for r in range(RANKS)) for step in range(STEPS)]
    # The first module normalizes its input; look at the second one's, which is an output.
    linear = torch.nn.Sequential(te.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu"))
    train(linear, recipe, data, DistributedDataParallel(linear))
    history = linear[0]._delayed_scaling.fwd_history[:, 0].tolist()
    assert history[0] == 0 and sorted(history[1:]) == sorted(seen)
    if mode != "eager":  # the same bits as without a compiler
        again = build()
        wanted = train(again, recipe, data, DistributedDataParallel(again))
        assert_same(outputs, wanted, "output")
        assert_same(params + states, bytes_of(again) + state_of(again), "parameter or state")


def check_no_sync(rank, recipe):
    """Two microbatches without, one with communication, cached weights: the sum of all."""
    recipe = recipe_of(recipe)
    model = torch.nn.Sequential(te.Linear(64, 64, params_dtype=torch.float32, device="cpu"))
    replicas = [copy.deepcopy(model) for _ in range(RANKS)]
    wrapped = DistributedDataParallel(model)

    class Layer(torch.nn.Module):
        """Passes the flag on."""

        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x, first):
            return self.layers[0](x, is_first_microbatch=first)

    wrapped = DistributedDataParallel(Layer(model))
    for micro in range(3):
        with nullcontext() if micro == 2 else wrapped.no_sync():
            x = batch(micro, rank, dtype=torch.float32)
            loss_of(wrapped, x, recipe, first=micro == 0)[1].backward()
        for r, replica in enumerate(replicas):
            x = batch(micro, r, dtype=torch.float32)
            loss_of(Layer(replica), x, recipe, first=micro == 0)[1].backward()
    weights = [replica[0].weight.grad for replica in replicas]
    assert_same([model[0].weight.grad], [weights[0] / 2 + weights[1] / 2], "gradient")
    assert (len(model[0]._fp8_workspaces) == 1) == (recipe is not None)


def check_compiled_inside(rank, recipe, primary):
    """One graph below DDP, with the bits of eager; buckets do not split it."""
    recipe_object = recipe_of(recipe)
    model = build(recipe if primary else None)
    eager = copy.deepcopy(model)
    counters.clear()
    model.compile(backend="aot_eager", fullgraph=True)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    outputs = train(model, recipe_object, batches(rank), wrapped)
    assert counters["stats"]["unique_graphs"] == 1, dict(counters)
    wanted = train(eager, recipe_object, batches(rank), DistributedDataParallel(eager))
    assert_same(outputs, wanted, "output")
    assert_same(bytes_of(model), bytes_of(eager), "parameter")


def check_compiled_outside(rank, recipe):
    """DDP's optimizer cuts the graph at buckets; the bits are those of eager."""
    recipe_object, width = recipe_of(recipe), 512
    model = build(width=width)
    eager = copy.deepcopy(model)
    counters.clear()
    # 2.5 MiB of parameters: several buckets.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    compiled = torch.compile(wrapped, backend="aot_eager")
    data = [batch(step, rank, width=width) for step in range(STEPS)]
    outputs = train(model, recipe_object, data, compiled)
    assert counters["stats"]["unique_graphs"] > 0
    wanted = train(eager, recipe_object, data, DistributedDataParallel(eager))
    assert_same(outputs, wanted, "output")
    assert_same(bytes_of(model), bytes_of(eager), "parameter")


def check_unused(rank):
    """A rank that leaves a module out, and a frozen parameter."""
    recipe = recipe_of("current")
    model = build()
    model[1].weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = optimizer_of(model)
    before = model[1].weight.detach().clone()
    for step in range(2):
        loss_of(wrapped, batch(step, rank), recipe)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model[1].weight, before)
    for theirs in everybody(bytes_of(model)):
        assert_same(theirs, bytes_of(model), "parameter")


CHECKS = {
    **{f"eager {name}": (check_eager, name, False) for name in ("none", "current", "block")},
    **{f"eager {name}": (check_eager, name, False) for name in ("mxfp8", "nvfp4")},
    **{f"eager primary {n}": (check_eager, n, True) for n in ("current", "mxfp8", "nvfp4")},
    **{f"delayed {mode}": (check_delayed, mode) for mode in ("eager", "inside", "outside")},
    "no_sync none": (check_no_sync, "none"),
    "no_sync current": (check_no_sync, "current"),
    "compiled inside nvfp4": (check_compiled_inside, "nvfp4", False),
    "compiled inside primary current": (check_compiled_inside, "current", True),
    "compiled outside current": (check_compiled_outside, "current"),
    "frozen parameter": (check_unused,),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run_checks("test_ddp", tmp_path_factory.mktemp("ddp"))


@pytest.mark.feature(
    "DDP", modes=("eager", "compiled"), others="part of training, not of an exported program"
)
@needs_distributed
@pytest.mark.parametrize("label", CHECKS)
def test_two_processes(found, label):
    processes.assert_passed(found, label)
