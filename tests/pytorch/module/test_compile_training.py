# SPDX-License-Identifier: Apache-2.0
"""Compiled modules in training code: optimizers, loss scaling, averages, whole steps, compiled
autograd; beside an eager copy, compared bit by bit.
"""

import contextlib
import copy
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compile_support import (
    DRAWS,
    GEMM_MODULES,
    K,
    assert_same_bits,
    assert_same_modules,
    build,
    gradient,
    graphs,
    random,
    with_recipe,
)
from composition_support import (
    CASES,
    EACH_CASE,
    WEIGHT,
    Pair,
    assert_equal,
    each_case_with,
    trained_feature,
)

# --- optimizers, loss scaling, averages ----------------------------------------------------------

OPTIMIZERS = {
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


@trained_feature("fused and foreach optimizers")
@each_case_with("optimizer", tuple(OPTIMIZERS))
def test_optimizers(kind, recipe, optimizer, device):
    """Steps in place cause no new graph, and the next call quantizes the new weights."""
    Pair(build(kind, device, recipe=recipe), recipe, OPTIMIZERS[optimizer]).train(device)


def scaled_step(call, model, scaler, optimizer, x):
    """A step with loss scaling and clipping; returns the loss scale after it, and the norm."""
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=torch.float16):
        torch.manual_seed(DRAWS)
        y = call(x)
    scaler.scale(y.float().square().mean()).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), norm


@trained_feature("GradScaler and clip_grad_norm_")
@EACH_CASE
def test_loss_scaling(kind, recipe, device):
    """fp16 under GradScaler: an overflow skips the step and halves the scale, in both."""
    pair = Pair(build(kind, device, dtype=torch.float32, recipe=recipe), recipe)
    scalers = [torch.amp.GradScaler(torch.device(device).type) for _ in pair.models]
    for scaler in scalers:
        scaler.scale(torch.ones((), device=device))  # before that it has no scale to be renewed
    for seed, scale_before in enumerate((256.0, 2.0**60, 64.0)):
        x = random(32, K, device=device, seed=seed, dtype=torch.float32)
        overflow = seed == 1
        before = [p.clone() for p in pair.models[0].parameters()]
        results = []
        for call, model, scaler, optimizer in zip(
            pair.calls, pair.models, scalers, pair.optimizers
        ):
            scaler.update(scale_before)
            results.append(scaled_step(call, model, scaler, optimizer, x))
        scales, norms = zip(*results)
        assert set(scales) == {scale_before / 2 if overflow else scale_before}
        assert_equal(norms, "norm of the gradients")
        moved = [not torch.equal(a, b) for a, b in zip(before, pair.models[0].parameters())]
        assert any(moved) != overflow
        for a, b in zip(*(model.parameters() for model in pair.models)):
            assert_same_bits(a, b, "parameter")


@trained_feature("moving averages (swa_utils)")
@EACH_CASE
def test_moving_average(kind, recipe, device):
    """The average is a copy with its own state; compiled it computes what eager computes."""
    pair = Pair(build(kind, device, recipe=recipe), recipe)
    average = get_ema_multi_avg_fn(0.5)
    averages = [AveragedModel(model, multi_avg_fn=average) for model in pair.models]
    pair.train(device, after=lambda i: averages[i].update_parameters(pair.models[i]))
    assert_same_modules(*averages)
    weights = [getattr(m, WEIGHT[kind]) for m in (averages[0].module, pair.models[0])]
    assert not torch.equal(*weights)
    compiled = torch.compile(with_recipe, fullgraph=True, backend="aot_eager")
    x = random(16, K, device=device, seed=9)
    with torch.no_grad():
        outputs = []
        for run, model in ((compiled, averages[0]), (with_recipe, averages[1])):
            outputs.append(run(model.eval(), x, pair.recipe))
        assert_equal(outputs, "output of the average")


# --- whole steps ---------------------------------------------------------------------------------


@trained_feature("torch.compile of a whole training step")
@EACH_CASE
def test_whole_step(kind, recipe, device):
    """Forward, backward, clipping and optimizer in one compiled function, which may break up.

    All arithmetic beside the module is exact: torch compiles sums of products of bf16 with other
    roundings than its optimizers have in eager.
    """
    pair = Pair(build(kind, device, recipe=recipe), recipe, lambda p: torch.optim.SGD(p, lr=1.0))

    def step(model, optimizer, x):
        loss = with_recipe(model, x, pair.recipe).float().square().mean() * 2.0**-5
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = torch.compile(step, backend="aot_eager")
    for seed in range(3):
        x = random(32, K, device=device, seed=seed)
        losses = []
        for run, model, optimizer in zip((compiled, step), pair.models, pair.optimizers):
            torch.manual_seed(DRAWS)
            losses.append(run(model, optimizer, x))
        assert_equal(losses, "loss")
        assert_same_modules(*pair.models)
    assert graphs() > 0


AUTOGRAD_CASES = [case for case in CASES if case[1] != "delayed"]


@trained_feature("compiled autograd")
@pytest.mark.parametrize("kind, recipe", AUTOGRAD_CASES)
def test_compiled_autograd(kind, recipe, device):
    """Dynamo traces the backward pass, hooks included."""
    pair = Pair(build(kind, device, recipe=recipe), recipe)
    for model in pair.models:
        getattr(model, WEIGHT[kind]).register_hook(lambda grad: grad * 2)
    with torch._dynamo.config.patch(compiled_autograd=True):
        train_with_compiled_backward(pair, device)


@trained_feature("compiled autograd", modes=("eager",))
@pytest.mark.parametrize("kind, recipe", AUTOGRAD_CASES)
def test_compiled_autograd_of_eager_calls(kind, recipe, device):
    """A backward pass is compiled, as one graph, whose forward pass was not."""
    pair = Pair(build(kind, device, recipe=recipe), recipe)
    whole = torch.compile(fullgraph=True, backend="aot_eager")
    for seed in range(2):
        results = []
        for model, backward in zip(pair.models, (compiled_autograd._enable(whole), nullcontext())):
            x = random(32, K, device=device, seed=seed).requires_grad_()
            torch.manual_seed(DRAWS)
            y = with_recipe(model, x, pair.recipe)
            with backward:
                y.backward(gradient(y, seed=seed))
            results.append(x.grad)
        assert_equal(results, "input gradient")
        assert_same_modules(*pair.models)
    assert counters["compiled_autograd"]["captures"] >= 1


def train_with_compiled_backward(pair, device):
    """Steps whose backward pass is compiled by itself; the twin's is not."""
    compiled = torch.compile(lambda y, dy: y.backward(dy), backend="aot_eager")
    for seed in range(2):
        results = []
        for call, backward in zip(pair.calls, (compiled, torch.Tensor.backward)):
            x = random(32, K, device=device, seed=seed).requires_grad_()
            torch.manual_seed(DRAWS)
            y = call(x)
            backward(y, gradient(y, seed=seed))
            results.append((y, x.grad))
        for what, *both in zip(("output", "input gradient"), *results):
            assert_equal(both, what)
        assert_same_modules(*pair.models)
    assert counters["compiled_autograd"]["captures"] >= 1


LOST = (
    "DelayedScaling and fuse_wgrad_accumulation: compiled autograd loses tensors that a compiled"
    " backward pass changes, so the module runs in eager, with a warning"
)


@pytest.mark.feature("compiled autograd", modes=("compiled",), no=LOST)
@pytest.mark.parametrize("what", ("delayed", "fused"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_compiled_autograd_of_changed_state(kind, what, device):
    """torch loses tensors that a compiled backward pass changes: the module runs in eager."""
    recipe = "delayed" if what == "delayed" else "none"
    module = build(kind, device, fuse_wgrad_accumulation=what == "fused")

    def with_main_grads(model):
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)

    with torch._dynamo.config.patch(compiled_autograd=True):
        whole = Pair(copy.deepcopy(module), recipe, change=with_main_grads)
        with pytest.raises(Exception, match="compiled autograd passes on no tensors"):
            whole.calls[0](random(32, K, device=device))
        parts = Pair(module, recipe, change=with_main_grads, fullgraph=False)
        with pytest.warns(UserWarning, match="compiled autograd passes on no tensors"):
            train_with_compiled_backward(parts, device)
    for a, b in zip(*(model.parameters() for model in parts.models)):
        assert_same_bits(a.main_grad, b.main_grad, "main_grad")


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_compiled_autograd_around_code_that_was_compiled_without(kind, device):
    """Graphs are guarded on it: the module runs in eager, with the warning, and then as before."""
    pair = Pair(build(kind, device), "delayed", fullgraph=False)
    pair.train(device)
    for seed in range(2):
        results = []
        for call in pair.calls:
            x = random(32, K, device=device, seed=seed).requires_grad_()
            around, warned = contextlib.nullcontext(), contextlib.nullcontext()
            if call is pair.calls[0]:
                compiler = torch.compile(backend="aot_eager")
                around = torch._dynamo.compiled_autograd._enable(compiler)
                warned = pytest.warns(UserWarning, match="compiled autograd passes on no tensors")
            with warned, around:
                y = call(x)
                y.backward(gradient(y, seed=seed))
            results.append((y, x.grad))
        for what, *both in zip(("output", "input gradient"), *results):
            assert_equal(both, what)
        assert_same_modules(*pair.models)
    pair.train(device, one_graph=False)  # Dynamo may take the broken graph first, and add one
    before = graphs()
    pair.train(device, one_graph=False)
    assert graphs() == before
