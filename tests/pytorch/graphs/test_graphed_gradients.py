# SPDX-License-Identifier: Apache-2.0
"""Gradients of parameters that backward graphs make."""

import copy

import pytest
import torch
from compile_support import (
    K,
    assert_same_bits,
    assert_same_modules,
    build,
    random,
    recipe_of,
)
from graph_support import ROWS, graphed, sample_of, step, assert_same_results, plain_linear

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling


@pytest.mark.parametrize("skip", (False, True))
@pytest.mark.parametrize("clone", (True, False))
def test_ownership_of_parameter_gradients(clone, skip, device):
    """Clones by default; the static tensor where asked for, as decided at capture."""
    module = plain_linear(device)
    if skip:
        module.weight.skip_backward_post_hook = True
    sample = torch.zeros(4, 8, device=device, requires_grad=True)
    te.make_graphed_callables(module, (sample,), clone_param_grads_on_return=clone)
    module.weight.skip_backward_post_hook = not skip  # too late
    grads = []
    for _ in range(2):
        x = torch.randn(4, 8, device=device, requires_grad=True)
        grads += torch.autograd.grad(module(x).sum(), module.weight)
    assert (grads[0].data_ptr() == grads[1].data_ptr()) == (skip or not clone)


def test_owned_gradients_accumulate(device):
    """``.grad`` is not overwritten by the next replay."""
    module = plain_linear(device)
    twin = copy.deepcopy(module)
    te.make_graphed_callables(module, (torch.zeros(4, 8, device=device, requires_grad=True),))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 8, device=device)
        for m in (module, twin):
            m(x.clone().requires_grad_()).square().sum().backward()
        assert torch.equal(module.weight.grad, twin.weight.grad)


class Two(torch.nn.Module):
    """Two outputs, one unused parameter, and an output that is no tensor."""

    def __init__(self, device):
        super().__init__()
        self.a, self.b = plain_linear(device), plain_linear(device)
        self.idle = torch.nn.Parameter(torch.ones(3, device=device))

    def forward(self, x, *, scale):
        """A dictionary of results."""
        return {"a": self.a(x) * scale, "b": self.b(x), "note": "text", "c": x.detach() + 1}


def test_unused_outputs_and_inputs(device):
    """A missing output gradient is zero; an unused parameter has none."""
    module = Two(device)
    twin = copy.deepcopy(module)
    x, scale = torch.zeros(4, 8, device=device, requires_grad=True), torch.ones(1, device=device)
    with pytest.raises(RuntimeError, match="allow_unused|not have been used"):
        te.make_graphed_callables(copy.deepcopy(module), (x,), sample_kwargs={"scale": scale})
    te.make_graphed_callables(module, (x,), sample_kwargs={"scale": scale}, allow_unused_input=True)
    for m in (module, twin):
        leaf = torch.full((4, 8), 0.5, device=device, requires_grad=True)
        extra = {"ignored": 1} if m is module else {}
        out = m(leaf, scale=torch.full((1,), 3.0, device=device), **extra)
        assert out["note"] == "text" and not out["c"].requires_grad
        out["a"].sum().backward()
    assert torch.equal(module.a.weight.grad, twin.a.weight.grad)
    assert module.idle.grad is None and not module.b.weight.grad.any()


def with_main_grads(module):
    """``module`` with destinations of its weight gradients, marked as frameworks do."""
    for weight in (module.fc1_weight, module.fc2_weight):
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    return module


@pytest.mark.parametrize("options", (("fuse",), ("delay",), ("fuse", "delay")))
def test_weight_gradients_elsewhere(options, device):
    """Fused accumulation in the backward graph; delayed gradients in a graph of their own."""
    names = {"fuse": "fuse_wgrad_accumulation", "delay": "delay_wgrad_compute"}
    module = build("LayerNormMLP", device, **{names[option]: True for option in options})
    twin, recipe = copy.deepcopy(module), Float8CurrentScaling()
    both = [(m.fc1_weight, m.fc2_weight) for m in (module, twin)]
    calls = []
    if "fuse" in options:
        for m in (module, twin):
            with_main_grads(m).fc1_weight.overwrite_main_grad = True
    for m in (module, twin):
        m.register_wgrad_accumulation_and_reduce_hooks(lambda m=m: calls.append(m is twin))
    graphed(module, (sample_of(device),), recipe)
    assert not calls
    for weight in both[0] if "fuse" in options else ():  # as it was before warming up
        assert (weight.main_grad == 1).all() and not weight.grad_added_to_main_grad
    for seed in range(3):
        x = random(ROWS, K, device=device, seed=seed)
        assert_same_results(*(step(m, x, recipe, seed) for m in (module, twin)))
        for m in (module, twin):
            m.backward_dw()
        for a, b in zip(*both):
            if "fuse" in options:
                assert_same_bits(a.main_grad, b.main_grad, "main_grad")
                assert a.grad_added_to_main_grad and b.grad_added_to_main_grad
                a.grad_added_to_main_grad = b.grad_added_to_main_grad = False
            else:
                assert_same_bits(a.grad, b.grad, "weight gradient")
        if "fuse" not in options:  # else there are tensors without meaning in the place of some
            assert_same_modules(module, twin)
    assert (
        not (module.fc1_weight.main_grad if "fuse" in options else module.fc1_weight.grad)[0, 0]
        == 1
    )
    assert calls == ([False, True] * 3 if "delay" in options else [])
    if "delay" in options:
        with pytest.raises(RuntimeError, match="No weight gradient is waiting"):
            module.backward_dw()


def test_delayed_weight_gradients_of_several_graphs(device):
    """They are computed after all backward passes, in any order: memory is not shared till then."""
    layers = [build("LayerNormMLP", device, seed=i, delay_wgrad_compute=True) for i in range(3)]
    model, recipe = torch.nn.Sequential(*layers), recipe_of("current")
    twin = copy.deepcopy(model)
    graphed(tuple(model), ((sample_of(device),),) * 3, recipe)
    for seed, order in enumerate(((0, 1, 2), (2, 0, 1))):
        x = random(ROWS, K, device=device, seed=seed)
        assert_same_results(*(step(m, x, recipe, seed) for m in (model, twin)))
        for i in order:
            model[i].backward_dw()
            twin[i].backward_dw()
        assert_same_modules(model, twin)


def test_delayed_weight_gradients_in_the_other_mode(device):
    """Where the original forward runs, so does the original ``backward_dw``."""
    module, recipe = build("LayerNormMLP", device, delay_wgrad_compute=True), recipe_of("mxfp8")
    twin = copy.deepcopy(module)
    graphed(module, (sample_of(device),), recipe)
    x = random(ROWS, K, device=device)
    for m in (module, twin):
        m.eval()
        step(m, x, recipe)
        m.backward_dw()
    assert_same_modules(module, twin)


def test_delayed_weight_gradients_of_an_earlier_call(device):
    """The operands that a backward pass left are gone after the next forward pass."""
    module = build("Linear", device, delay_wgrad_compute=True)
    graphed(module, (sample_of(device),))
    step(module, random(ROWS, K, device=device), None)
    module(random(ROWS, K, device=device))
    with pytest.raises(RuntimeError, match="Call 1 of the graphed Linear can not go back"):
        module.backward_dw()


def test_fused_accumulation_with_cached_weights(device):
    """Only the device knows which microbatch is the first: all of them add to ``main_grad``."""
    module = build("LayerNormMLP", device, fuse_wgrad_accumulation=True)
    twin, recipe = copy.deepcopy(module), recipe_of("current")
    with_main_grads(module)
    with_main_grads(twin)
    graphed(module, (sample_of(device),), recipe, cache_quantized_params=True)
    for minibatch in range(2):
        for m in (module, twin):
            for weight in (m.fc1_weight, m.fc2_weight):
                weight.main_grad.zero_()
        for i in range(3):
            x = random(ROWS, K, device=device, seed=3 * minibatch + i)
            first = {"is_first_microbatch": i == 0}
            assert_same_results(*(step(m, x, recipe, **first) for m in (module, twin)))
        assert_same_bits(module.fc1_weight.main_grad, twin.fc1_weight.main_grad, "fc1")
        assert_same_bits(module.fc2_weight.main_grad, twin.fc2_weight.main_grad, "fc2")
        with torch.no_grad():
            for m in (module, twin):
                for weight in (m.fc1_weight, m.fc2_weight):
                    weight.add_(weight.main_grad, alpha=-0.1)
