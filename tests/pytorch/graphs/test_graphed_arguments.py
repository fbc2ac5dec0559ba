# SPDX-License-Identifier: Apache-2.0
"""What ``te.make_graphed_callables`` and its results may be given."""

import copy
import weakref

import pytest
import torch
from compile_support import (
    K,
    STATE,
    assert_same_bits,
    assert_same_modules,
    build,
    random,
    recipe_of,
    scaling_states,
)
from graph_support import ROWS, graphed, sample_of, step, assert_same_results, stack, plain_linear

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import graph


def test_hooks(device):
    """Around each warm-up pass and around the capture, in schedule order, never at a replay."""
    modules = tuple(plain_linear(device) for _ in range(2))
    calls = []

    def note(name, i):
        return {
            0: lambda m: calls.append((name, i, m is modules[i], graph.is_graph_capturing())),
        }

    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    samples = [(torch.zeros(4, 8, device=device, requires_grad=True),) for _ in range(2)]
    te.make_graphed_callables(
        modules,
        tuple(samples),
        num_warmup_iters=2,
        pre_warmup_hook=lambda: calls.append("before"),
        post_warmup_hook=lambda: calls.append("after"),
        capture_time_hooks=[{kind: note(kind, i) for kind in kinds} for i in range(2)],
    )
    assert calls[0] == "before"
    done = calls.index("after")
    once = [[(kind, i, True, True) for kind in kinds] for i in range(2)]
    assert calls[1:done] == [*once[0] * 2, *once[1] * 2]
    assert calls[done + 1 :] == [*once[0][:2], *once[1][:2], *once[1][2:], *once[0][2:]]
    calls.clear()
    modules[1](modules[0](torch.ones(4, 8, device=device, requires_grad=True))).sum().backward()
    assert not calls


@pytest.mark.parametrize("iterations", (0, 1))
def test_number_of_warmups(iterations, device):
    """Modules of ours are found in the capture too."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    if iterations == 0:  # then the user warms up
        step(module, random(ROWS, K, device=device), recipe)
        module.zero_grad()
    twin = copy.deepcopy(module)
    graphed(module, (sample_of(device),), recipe, num_warmup_iters=iterations)
    for seed in range(2):
        x = random(ROWS, K, device=device, seed=seed)
        assert_same_results(*(step(m, x, recipe, seed) for m in (module, twin)))
    assert_same_modules(module, twin)


@pytest.mark.parametrize(
    "old,new,value",
    [
        ("fp8_enabled", "enabled", True),
        ("fp8_calibrating", "calibrating", False),
        ("fp8_recipe", "recipe", Float8CurrentScaling()),
        ("fp8_weight_caching", "cache_quantized_params", False),
    ],
)
def test_former_names(old, new, value, device):
    """They work and are deprecated; both forms together are an error."""
    module = build("Linear", device)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated"):
        te.make_graphed_callables(module, (sample_of(device),), **{old: value})
    with pytest.raises(ValueError, match=f"give only {new}"):
        te.make_graphed_callables(module, (sample_of(device),), **{old: value, new: value})


def two(device):
    """Two modules and their samples."""
    modules = tuple(plain_linear(device) for _ in range(2))
    samples = tuple((torch.zeros(4, 8, device=device, requires_grad=True),) for _ in range(2))
    return modules, samples


@pytest.mark.parametrize(
    "change,error,match",
    [
        ({"enabled": 1}, TypeError, "bool or a tuple"),
        ({"enabled": (True,)}, ValueError, "1 entries for 2"),
        ({"num_warmup_iters": -1}, ValueError, "0 or more, not -1"),
        ({"num_warmup_iters": 1.5}, ValueError, "0 or more, not 1.5"),
        ({"sample_kwargs": ({},)}, ValueError, "sample_kwargs has 1 entries"),
        ({"sample_kwargs": ({"a": 1}, {})}, TypeError, "there is a int"),
        ({"capture_time_hooks": [None]}, ValueError, "1 entries for 2"),
        ({"capture_time_hooks": [None, {"hooks": {}}]}, ValueError, "kind 'hooks'"),
    ],
)
def test_wrong_arguments(change, error, match, device):
    """Each is named."""
    modules, samples = two(device)
    with pytest.raises(error, match=match):
        te.make_graphed_callables(modules, samples, **change)


def test_wrong_modules(device, monkeypatch):
    """Functions, hooks, mixed modes, an order for a single module, a cache of casts."""
    modules, samples = two(device)
    with pytest.raises(TypeError, match="torch.nn.Module"):
        te.make_graphed_callables((modules[0], torch.sin), samples)
    modules[0].eval()
    with pytest.raises(RuntimeError, match="training mode"):
        te.make_graphed_callables(modules, samples)
    modules[0].train()
    handle = modules[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="has hooks"):
        te.make_graphed_callables(modules, samples)
    handle.remove()
    with pytest.raises(ValueError, match="tuple of modules"):
        te.make_graphed_callables(modules[0], samples[0], _order=[1, -1])
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    with pytest.raises(RuntimeError, match="cache_enabled=False"):
        te.make_graphed_callables(modules, samples)


class Keyword(torch.nn.Module):
    """Takes a tensor by name."""

    def __init__(self, device):
        super().__init__()
        self.linear = plain_linear(device)

    def forward(self, x, shift):
        """``linear(x) + shift``."""
        return self.linear(x) + shift


def test_wrong_calls(device):
    """Missing keywords, other numbers of inputs, other shapes."""
    module = Keyword(device)
    x = torch.zeros(4, 8, device=device, requires_grad=True)
    te.make_graphed_callables(module, (x,), sample_kwargs={"shift": torch.zeros(8, device=device)})
    shift = torch.ones(8, device=device)
    with pytest.raises(TypeError, match="shift must be given"):
        module(x)
    with pytest.raises(TypeError, match="2 tensors as input, but is called with 3"):
        module(x, x, shift=shift)
    with pytest.raises(ValueError, match=r"shape \(4, 8\), as captured, not \(5, 8\)"):
        module(torch.zeros(5, 8, device=device), shift=shift)
    with pytest.raises(ValueError, match="not int"):
        module(3, shift=shift)
    with pytest.raises(ValueError, match="must be torch.float32, as captured, not torch.float64"):
        module(x.double(), shift=shift)
    with pytest.raises(ValueError, match="Input 1 .* requires a gradient, but the sample"):
        module(x, shift=shift.clone().requires_grad_())
    with torch.no_grad():
        module(x, shift=shift.clone().requires_grad_())
    y = module(x, shift=shift)
    assert torch.allclose(y, shift.expand(4, 8))


def test_parameters_that_moved(device):
    """A graph reads and writes addresses: whoever moves a tensor is told."""
    module = build("LayerNormMLP", device, fuse_wgrad_accumulation=True)
    weights = module.fc1_weight, module.fc2_weight
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    graphed(module, (sample_of(device),))
    x = random(ROWS, K, device=device)
    step(module, x, None)
    old = weights[1].main_grad
    weights[1].main_grad = old.clone()
    with pytest.raises(RuntimeError, match="main_grad of parameter 'fc2_weight' .* is not in"):
        module(x)
    weights[1].main_grad = old
    step(module, x, None)
    module.layer_norm_bias.data = module.layer_norm_bias.data.clone()
    with pytest.raises(RuntimeError, match="The parameter 'layer_norm_bias' of .* moved, cast or"):
        module(x)


def test_backward_of_an_earlier_call(device):
    """The next call overwrites what it needs; and backward_dw has one backward to belong to."""
    module = build("Linear", device)
    graphed(module, (sample_of(device),))
    x = random(ROWS, K, device=device)
    first, second = (module(x.clone().requires_grad_()) for _ in range(2))
    with pytest.raises(RuntimeError, match="Call 1 of the graphed Linear can not go back any more"):
        first.sum().backward()
    second.sum().backward()


def test_reset(device):
    """Calls raise afterwards, and the static input is freed."""
    module, sample = build("Linear", device), sample_of(device)
    graphed(module, (sample,))
    static = weakref.ref(sample)
    del sample
    assert static() is not None
    module.reset()
    assert static() is None
    with pytest.raises(RuntimeError, match="was reset"):
        module(random(ROWS, K, device=device))


def test_saved_tensors_by_name(device):
    """``save_fp8_tensors`` and ``restore_fp8_tensors`` are each other's inverse."""
    model, recipe = stack(device), recipe_of("delayed")
    assert graph.save_fp8_tensors([model], Float8CurrentScaling()) is None
    graph.restore_fp8_tensors([model], None)
    step(model, random(ROWS, K, device=device), recipe)
    before = copy.deepcopy(scaling_states(model))
    saved = graph.save_fp8_tensors([model], recipe)
    step(model, 3 * random(ROWS, K, device=device), recipe)
    graph.restore_fp8_tensors([model], saved)
    for name, state in scaling_states(model).items():
        for field in STATE:
            assert_same_bits(getattr(state, field), getattr(before[name], field), field)
    graph.set_capture_start()
    assert graph.is_graph_capturing()
    graph.set_capture_end()
    assert not graph.is_graph_capturing()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda():
    """An error says so."""
    with pytest.raises(RuntimeError, match="CUDA device"):
        te.make_graphed_callables(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    with pytest.raises(RuntimeError, match="CUDA device"):
        graph.graph_pool_handle()
