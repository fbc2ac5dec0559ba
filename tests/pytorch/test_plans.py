# SPDX-License-Identifier: Apache-2.0
"""Plans (core/plans.py): an eager call that is run from its recording gives the same bits."""

import gc
import weakref

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.backends.registry import force_backend
from transformer_engine.pytorch.core import ops, plans

RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}


@pytest.fixture(autouse=True)
def no_plans():
    """Every test starts without plans."""
    plans._PLANS.clear()
    yield
    plans._PLANS.clear()


@pytest.fixture
def without_plans(monkeypatch):
    """Switches plans off."""

    def off():
        monkeypatch.setattr(plans, "_key", lambda *_: None)

    return off


def planned() -> int:
    """How many plans there are."""
    return sum(callable(plan) for plan in plans._PLANS.values())


def refused() -> int:
    """How many kinds of calls have none because they do something that is not recorded."""
    return sum(plan is plans._REFUSED for plan in plans._PLANS.values())


def steps(device, kind: str, recipe, batches, dtype=torch.bfloat16) -> list:
    """Outputs, gradients and scales of some training steps."""
    torch.manual_seed(0)
    options = {"params_dtype": dtype, "device": device}
    if kind == "mlp":
        module = te.LayerNormMLP(128, 256, activation="swiglu", **options)
    elif kind == "layernorm_linear":
        module = te.LayerNormLinear(128, 256, **options)
    else:
        module = te.Linear(128, 256, **options)
    found = []
    for step, rows in enumerate(batches):
        torch.manual_seed(step)
        x = torch.randn(rows, 128, device=device, dtype=dtype, requires_grad=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = module(x * (step + 1))
        y.backward(torch.randn_like(y))
        found += [y.detach(), x.grad, *(param.grad.clone() for param in module.parameters())]
        module.zero_grad()
    if module._delayed_scaling is not None:
        state = module._delayed_scaling
        found += [state.fwd_scale, state.fwd_history, state.bwd_scale, state.bwd_history]
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["linear", "layernorm_linear", "mlp"])
def test_the_same_bits(device, kind, recipe, without_plans, poison_empty):
    """Five steps, of which the last three run from plans; one shape comes between."""
    batches = (32, 32, 32, 48, 32)
    got = steps(device, kind, RECIPES[recipe], batches)
    assert planned() >= 2 and not refused()
    without_plans()
    want = steps(device, kind, RECIPES[recipe], batches)
    assert len(got) == len(want)
    for ours, theirs in zip(got, want):
        assert torch.equal(ours, theirs)


def test_other_circumstances_other_steps(device):
    """Shapes, dtypes, alignment, devices and backends that are forced have steps of their own."""
    x = torch.randn(16, 64, device=device)

    def run(*tensors):
        return plans.run_planned(_cast, "", (), tensors)

    for _ in range(3):
        run(x)
    assert planned() == 1
    known = len(plans._PLANS)
    run(x[:8])
    run(x.bfloat16())
    buffer = torch.empty(16 * 64 + 1, device=device)
    run(buffer[1:].view(16, 64))
    with force_backend("reference"):
        run(x)
    assert len(plans._PLANS) == known + 4
    run(x.t())  # not contiguous: no plan
    assert len(plans._PLANS) == known + 4


def _cast(k, x):
    return k.quantize(x, "current,e4m3", None, 0, None, True, True, None)


def test_a_step_between_leaf_ops_is_not_lost(device):
    """A function that computes something of its own has no plan."""

    def function(k, x):
        return _cast(k, x + 1.0)

    x = torch.randn(16, 64, device=device)
    results = [plans.run_planned(function, "", (), (x,)) for _ in range(4)]
    assert refused() == 1 and planned() == 0
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])


def test_a_leaf_that_is_watched_runs(device, monkeypatch):
    """Whoever exchanges a leaf op, to count calls for instance, sees all of them."""
    x = torch.randn(16, 64, device=device)
    for _ in range(3):
        plans.run_planned(_cast, "", (), (x,))
    calls = []
    quantize = ops.EAGER.quantize
    monkeypatch.setattr(
        ops.EAGER, "quantize", lambda *args: (calls.append(args), quantize(*args))[1]
    )
    plans.run_planned(_cast, "", (), (x,))
    assert len(calls) == 1


def test_nothing_outlives_a_call(device):
    """Neither the recorded call's tensors nor those of a plan are kept."""
    x = torch.randn(16, 64, device=device)
    for _ in range(4):
        row, col, *_ = plans.run_planned(_cast, "", (), (x,))
    found = [weakref.ref(t) for t in (x, row, col)]
    del x, row, col, _
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


def test_many_shapes(device):
    """The number of plans has a bound, and the newest stay."""
    for rows in range(1, plans._MOST + 40):
        x = torch.randn(rows, 16, device=device)
        plans.run_planned(_cast, "", (), (x,))
    assert len(plans._PLANS) <= plans._MOST
    for _ in range(3):
        plans.run_planned(_cast, "", (), (x,))
    assert planned() == 1
