# SPDX-License-Identifier: Apache-2.0
"""Plans (core/plans.py): an eager call that is run from its recording gives the same bits."""

import contextlib
import gc
import weakref

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.backends.registry import force_backend, forced_backends
from transformer_engine.pytorch.core import ops, plan_keys, plans

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


def shared_steps(device, recipe, share) -> list:
    """Five steps of a LayerNormLinear, of which ``share(module, x, step)`` decides what it shares;
    it returns the input and the gradients of both outputs.
    """
    torch.manual_seed(0)
    module = te.LayerNormLinear(
        64, 64, return_layernorm_output=True, device=device, params_dtype=torch.bfloat16
    )
    with torch.no_grad():
        for param in module.parameters():
            param.normal_()
    found = []
    for step in range(5):
        x = torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        grads = [torch.randn_like(x) for _ in range(2)]
        x, *grads = share(module, x, grads, step)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            outputs = module(x)
        torch.autograd.backward(outputs, grads)
        found += [y.detach() for y in outputs]
        found += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        module.zero_grad()
    return found


def _gradients(module, x, grads, step):
    """One tensor is the gradient of both outputs, as in ``sum(outputs)``."""
    del module
    return (x, grads[0], grads[0]) if step < 3 else (x, *grads)


def _weight_as_input(module, x, grads, step):
    """The weight is also the input."""
    return (module.weight if step < 3 else x, *grads)


def _overlapping(module, x, grads, step):
    """The input and a gradient overlap; before and afterwards they do not."""
    del module
    if step < 3:
        memory = torch.cat([x.detach(), grads[0]])
        x, grads[0] = memory[:64].requires_grad_(), memory[32:96]
    return x, *grads


def _parameters(module, x, grads, step):
    """Norm and linear have one bias."""
    if step == 0:
        module.other = module.bias
        module.bias = module.layer_norm_bias
    if step == 3:
        module.bias = module.other
    return x, *grads


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize("share", [_gradients, _weight_as_input, _overlapping, _parameters])
def test_arguments_that_share_memory(device, share, recipe, without_plans):
    """A plan that was recorded with such arguments serves those that share nothing."""
    got = shared_steps(device, RECIPES[recipe], share)
    assert planned() and not refused()
    without_plans()
    want = shared_steps(device, RECIPES[recipe], share)
    for ours, theirs in zip(got, want):
        assert torch.equal(ours, theirs)


class Starting(te.Quantizer):
    """Hands on what it gets, until its third call."""

    calls = 0

    def quantize_impl(self, tensor):
        self.calls += 1
        return tensor if self.calls < 3 else torch.zeros_like(tensor)

    def update_quantized(self, src, dst, *, noop_flag=None):
        raise AssertionError("nothing is quantized in place")

    def make_empty(self, shape, **options):
        raise AssertionError("nothing is allocated")


def test_a_quantizer_of_the_user_runs_each_time(device):
    """Also one that so far handed on its argument."""
    quantizers = []

    def factory(role):
        del role
        quantizers.append(Starting(rowwise=True, columnwise=True))
        return quantizers[-1]

    module = te.Linear(64, 64, bias=False, device=device)
    recipe = CustomRecipe(qfactory=factory)
    x = torch.randn(32, 64, device=device)
    for step in range(4):
        with torch.no_grad(), te.autocast(recipe=recipe):
            y = module(x)
        assert bool(y.any()) == (step < 2)
    assert sorted(quantizer.calls for quantizer in quantizers)[-2:] == [4, 4]


def test_a_plan_that_another_thread_drops(device, monkeypatch):
    """Between finding it and saying that it was used."""
    x = torch.randn(16, 64, device=device)

    class Dropping(type(plans._PLANS)):
        """Each plan is gone as soon as it was found."""

        def get(self, key):
            return super().pop(key, None)

    for _ in range(2):
        want = plans.run_planned(_cast, "", (), (x,))
    assert planned() == 1
    monkeypatch.setattr(plans, "_PLANS", Dropping(plans._PLANS))
    assert torch.equal(plans.run_planned(_cast, "", (), (x,))[0], want[0])
    assert not plans._PLANS


@pytest.mark.parametrize("name", ("record_amax_", "record_and_update_"))
def test_a_leaf_op_of_a_list(name, device):
    """A registered leaf op that takes a list of tensors has a plan, for other tensors as well."""
    op = getattr(torch.ops.transformer_engine, name).default
    for step in range(6):
        results = []
        for run in (op, getattr(ops.EAGER, name)):
            history, scale = torch.zeros(3, 4, device=device), torch.ones(4, device=device)
            amaxes = [torch.full((1,), 2.0 + step + i, device=device) for i in range(2)]
            if name == "record_amax_":
                run(history, amaxes, [2, 0])
            else:
                run(history, scale, amaxes, [2, 0], 448.0, 0.0, "max")
            results.append((history, scale))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert results[0][0].max() == 3.0 + step
    assert planned()


class Subclass(torch.Tensor):
    """A tensor that kernels can not be trusted to read."""


def a_function(k):
    """What a key is of."""
    del k


def test_keys_that_are_remembered(device, monkeypatch):
    """A key that is remembered is the key that would be written, whatever differs."""
    monkeypatch.setattr(plan_keys, "_KNOWN", {})
    x, y = (torch.randn(16, 8, device=device) for _ in range(2))
    flat = torch.randn(16 * 8 + 1, device=device)
    calls = [
        (x, None, y),
        (x, y, None),
        (None, x, y),
        (x, y, y),
        (x, None, None),
        (None, None, x),
        (x[:8], None, y),
        (x.double(), None, y),
        (x, None, y.requires_grad_()),
        (x, None, torch.nn.Parameter(y)),
        (flat[1:].view(16, 8), None, x),  # 4 bytes off
        (x.t(), None, y),
        (x.view(8, 16).t(), None, y),  # the same size, other strides
        (x.as_subclass(Subclass), None, y),
        (None, None, None),
        (x, y),
        (x.to("meta"), None, y),
    ]
    calls += [(x[:rows], None, None) for rows in range(1, 16)]  # more than are remembered
    for static in ("a", "b"):
        for forced in (False, True):
            with force_backend("reference") if forced else contextlib.nullcontext():
                for _ in range(2):
                    for tensors in calls:
                        kind = (a_function, static, len(tensors), *forced_backends())
                        written = plan_keys._written(kind, tensors)
                        assert plans._key(a_function, static, tensors) == written
    assert plans._key(a_function, "a", calls[0]) is plans._key(a_function, "a", calls[0])
    keys = [plans._key(a_function, "a", tensors) for tensors in calls[:8]]
    assert len(set(keys)) == len(keys)
    assert max(len(known) for known in plan_keys._KNOWN.values()) == plan_keys._MOST_OF_A_KIND


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_call_that_fails_and_is_tried_again(device, kind, monkeypatch):
    """In one region, as out of memory: the state of delayed scaling becomes that of one call."""

    def run(fails: bool) -> list:
        torch.manual_seed(0)
        make = te.Linear if kind == "linear" else te.LayerNormMLP
        module = make(64, 64, device=device, params_dtype=torch.bfloat16)
        found = []
        for step in range(4):
            x = torch.randn(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
            with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                if fails and step in (0, 2):
                    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="room"):
                        patch.setattr(ops.EAGER, "gemm", _no_room)
                        module(x)
                y = module(x * (step + 1))
            y.float().square().sum().backward()
            state = module._delayed_scaling
            found += [y.detach(), x.grad, state.bwd_scale.clone(), state.bwd_history.clone()]
        return found

    for ours, theirs in zip(run(True), run(False)):
        assert torch.equal(ours, theirs)


def _no_room(*_):
    raise RuntimeError("no room")


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
