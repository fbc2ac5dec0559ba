# SPDX-License-Identifier: Apache-2.0
"""What users put around compiled modules: adapters, shared and parametrized weights, hooks.

Every model is trained beside an eager copy, and everything is compared bit by bit.
"""

import copy

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

from compile_support import (
    DRAWS,
    K,
    assert_same_bits,
    assert_same_modules,
    build,
    gradient,
    random,
    reset,
    with_recipe,
)
from composition_support import (
    EACH_CASE,
    WEIGHT,
    Pair,
    assert_equal,
    each_case_with,
    square,
    trained_feature,
)

import transformer_engine.pytorch as te

# --- weights -------------------------------------------------------------------------------------


class Adapter(torch.nn.Module):
    """A frozen layer with a trained low-rank one beside it (LoRA, Hu et al., 2021)."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        like = next(base.parameters())
        sizes = (rank, K), (base.out_features if hasattr(base, "out_features") else K, rank)
        self.down, self.up = (
            torch.nn.Parameter(random(*size, device=like.device, seed=i, dtype=like.dtype) * 0.1)
            for i, size in enumerate(sizes)
        )

    def forward(self, x):
        """``x [rows, K]``."""
        return self.base(x) + (x @ self.down.t()) @ self.up.t()


@trained_feature("low-rank adapter on a frozen layer")
@each_case_with("x_grad", (False, True))
def test_adapter_on_a_frozen_layer(kind, recipe, x_grad, device):
    """Only the adapter is trained; the frozen layer hands the gradient on where it is wanted."""
    pair = Pair(Adapter(build(kind, device, recipe=recipe)), recipe)
    frozen = [p.clone() for p in pair.models[0].base.parameters()]
    pair.train(device, x_grad=x_grad)
    for before, after in zip(frozen, pair.models[0].base.parameters()):
        assert after.grad is None
        assert_same_bits(before, after, "frozen parameter")


@trained_feature("one weight in two modules")
@EACH_CASE
def test_tied_weights(kind, recipe, device):
    """The weight's gradient is the sum of both uses; it stays one parameter."""
    model, name = torch.nn.Sequential(square(kind, device), square(kind, device)), WEIGHT[kind]
    setattr(model[1], name, getattr(model[0], name))
    separate = len(list(model[0].parameters())) * 2
    pair = Pair(model, recipe)
    pair.train(device)
    for tied in pair.models:
        assert getattr(tied[0], name) is getattr(tied[1], name)
        assert len(list(tied.parameters())) == separate - 1
    (weight,) = {id(getattr(layer, name)): getattr(layer, name) for layer in model}.values()
    assert weight.grad.abs().max() > 0


@pytest.mark.parametrize("recipe", ("none", "current", "delayed", "mxfp8"))
def test_one_parameter_as_both_weights(recipe, device):
    """Of a square LayerNormMLP; and one bias for both. Dynamo takes no tensor twice."""
    module = te.LayerNormMLP(K, K, params_dtype=torch.bfloat16, device=device)
    module.fc2_weight, module.fc2_bias = module.fc1_weight, module.fc1_bias
    pair = Pair(module, recipe)
    pair.train(device)
    for model in pair.models:
        assert model.fc1_weight is model.fc2_weight and model.fc1_weight.grad.abs().max() > 0


class Scaled(torch.nn.Module):
    """A user's parametrization."""

    def __init__(self, rows, like):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((rows, 1), 0.5).to(like))

    def forward(self, weight):
        """``weight [N, K]``."""
        return weight * self.gain


@trained_feature("parametrized weight (weight_norm, user's)")
@each_case_with("made_by", ("weight_norm", "user"))
def test_parametrized_weight(kind, recipe, made_by, device):
    """The weight is computed anew at each call; the parametrization's parameters are trained."""
    module, name = build(kind, device, recipe=recipe), WEIGHT[kind]
    if made_by == "user":
        weight = getattr(module, name)
        scaled = Scaled(weight.shape[0], weight)
        parametrize.register_parametrization(module, name, scaled)
    else:
        parametrizations.weight_norm(module, name)
    pair = Pair(module, recipe)
    before = [p.clone() for p in module.parametrizations[name].parameters()]
    pair.train(device)
    for a, b in zip(before, module.parametrizations[name].parameters()):
        assert not torch.equal(a, b)


# --- hooks ---------------------------------------------------------------------------------------


@trained_feature("hooks on parameters")
@EACH_CASE
def test_hooks_on_parameters(kind, recipe, device):
    """Hooks see the gradients that eager sees, and what they return is what is accumulated."""

    def hooked(model):
        seen = {"hook": [], "after": []}
        weight = getattr(model, WEIGHT[kind])
        weight.register_hook(lambda grad: seen["hook"].append(grad.clone()) or grad * 2)
        weight.register_post_accumulate_grad_hook(
            lambda param: seen["after"].append(param.grad.clone())
        )
        return seen

    pair = Pair(build(kind, device, recipe=recipe), recipe, change=hooked)
    pair.train(device)
    for name, found in pair.kept[0].items():
        assert len(found) == len(pair.kept[1][name]) == 2
        for a, b in zip(found, pair.kept[1][name]):
            assert_same_bits(a, b, f"gradient that a hook saw ({name})")
    for once, twice in zip(pair.kept[0]["hook"], pair.kept[0]["after"]):
        assert_same_bits(once * 2, twice, "accumulated gradient")


@trained_feature("forward hooks")
@EACH_CASE
def test_forward_hooks_are_traced(kind, recipe, device):
    """Hooks on inputs and outputs of a module are part of the graph."""

    def hooked(model):
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        model[0].register_forward_hook(lambda module, args, out: out * 3)

    model = torch.nn.Sequential(build(kind, device, recipe=recipe))
    plain, x = copy.deepcopy(model), random(32, K, device=device)
    pair = Pair(model, recipe, change=hooked)
    with torch.no_grad():
        for run in pair.calls:
            assert_same_bits(
                run(x), with_recipe(copy.deepcopy(plain), x * 0.5, pair.recipe) * 3, "output"
            )
    reset()
    pair.train(device)


@trained_feature("full backward hooks")
@EACH_CASE
def test_full_backward_hooks(kind, recipe, device):
    """They see the gradients of input and output, and may replace that of the input.

    Dynamo traces no such hook without compiled autograd: the call breaks up around the module.
    """

    def hooked(model):
        seen = []

        def hook(module, grad_input, grad_output):
            del module
            seen.extend(g.clone() for g in (*grad_input, *grad_output))
            return (grad_input[0] * 2,)

        model[0].register_full_backward_hook(hook)
        return seen

    model = torch.nn.Sequential(build(kind, device, recipe=recipe))
    pair = Pair(model, recipe, change=hooked, fullgraph=False)
    pair.train(device, one_graph=False)
    assert len(pair.kept[0]) == len(pair.kept[1]) == 4
    for a, b in zip(*pair.kept):
        assert_same_bits(a, b, "gradient that a hook saw")


@trained_feature("tensor hooks outside of the graph")
@EACH_CASE
def test_tensor_hooks_outside_of_the_graph(kind, recipe, device):
    """A hook on the output changes the gradient before the compiled backward gets it."""
    results = []
    pair = Pair(build(kind, device, recipe=recipe), recipe)
    for call in pair.calls:
        x = random(32, K, device=device).requires_grad_()
        torch.manual_seed(DRAWS)
        y = call(x)
        y.register_hook(lambda grad: grad * 3)
        y.backward(gradient(y))
        results.append(x.grad)
    assert_equal(results, "input gradient")
    assert_same_modules(*pair.models)
