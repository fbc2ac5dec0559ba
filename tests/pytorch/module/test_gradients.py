# SPDX-License-Identifier: Apache-2.0
"""Which gradients come out, and when: frozen subsets, several outputs, several backward passes."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from eager_support import (
    BF16,
    DRAWS,
    FP32,
    GEMM_MODULES,
    K,
    MODULES,
    NORMS,
    OTHER_CASES,
    OTHER_RECIPES,
    UNIT,
    as_tuple,
    assert_near,
    build,
    model,
    random,
    run,
)

from recipe_list import recipe_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

RECIPES = {"none": lambda: None, "current": Float8CurrentScaling, "delayed": DelayedScaling}
ALL_RECIPES = {**RECIPES, **{name: partial(recipe_of, name) for name in OTHER_RECIPES}}
# A lone norm is not quantized.
CASES = [(kind, r) for kind in MODULES for r in RECIPES if r == "none" or kind in GEMM_MODULES]
ROWS = 12


def forward(module, x, recipe=None, **arguments):
    """Outputs of the module inside of its recipe's autocast, as a tuple."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return as_tuple(module(x, **arguments))


def backward(outputs, which=None, **options):
    """Backward through the outputs, or through those numbered in ``which``."""
    which = range(len(outputs)) if which is None else which
    pairs = [(outputs[i], random(*outputs[i].shape, seed=70 + i).to(outputs[i])) for i in which]
    torch.manual_seed(DRAWS)
    torch.autograd.backward(*zip(*pairs), **options)


def gradients(module, x):
    """All gradients by name."""
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


# --- frozen subsets ------------------------------------------------------------------------------

FROZEN = [
    ("Linear", {}),
    ("LayerNormLinear", {}),
    ("LayerNormLinear", {"normalization": "RMSNorm"}),
]
FROZEN += [("LayerNormMLP", {}), ("LayerNormMLP", {"normalization": "RMSNorm"})]
FROZEN += [("LayerNormMLP", {"activation": "swiglu", "return_layernorm_output": True})]
FROZEN += [("LayerNormLinear", {"return_layernorm_output": True, "return_bias": True})]
FROZEN += [("LayerNorm", {}), ("RMSNorm", {})]


# A weight of "custom_two_formats" that is frozen draws no random numbers, so others draw its.
OTHER_FROZEN = [(kind, {}, r) for kind, r in OTHER_CASES if r != "custom_two_formats"]


@pytest.mark.parametrize(
    "kind,options,recipe",
    [(*case, r) for case in FROZEN for r in RECIPES if (case[0], r) in CASES] + OTHER_FROZEN,
    ids=str,
)
def test_every_frozen_subset(kind, options, recipe, device):
    """Each subset of input and parameters gets the gradients it gets when nothing is frozen."""
    if kind in GEMM_MODULES:
        options = {"recipe": recipe, **options}
    fresh, recipe = build(kind, device, dtype=BF16, **options), ALL_RECIPES[recipe]()
    data = random(ROWS, K, dtype=BF16, device=device)
    names = ["x", *(name for name, _ in fresh.named_parameters())]
    expected = None
    for trained in itertools.product((True, False), repeat=len(names)):
        module, x = copy.deepcopy(fresh), data.clone()
        leaves = {"x": x, **dict(module.named_parameters())}
        for name, wanted in zip(names, trained):
            leaves[name].requires_grad_(wanted)
        outputs = forward(module, x, recipe)
        with_grad = [i for i, y in enumerate(outputs) if y.requires_grad]
        # A bias that is returned is not below the first output.
        assert (0 in with_grad) == any(
            wanted for name, wanted in zip(names, trained) if not returned(module, name)
        )
        if with_grad:
            backward(outputs, with_grad)
        got = gradients(module, x)
        expected = got if expected is None else expected
        for name, wanted in zip(names, trained):
            if not wanted:
                assert got[name] is None, f"{name} is frozen, but has a gradient"
            else:
                assert got[name] is not None, f"{name} has no gradient; trained: {trained}"
                assert torch.equal(got[name], expected[name]), f"{name}; trained: {trained}"


def returned(module, name):
    """Whether the parameter is a bias that is not added but returned."""
    return getattr(module, "return_bias", False) and name in ("bias", "fc2_bias")


def test_rmsnorm_mlp_with_everything_below_fc1_frozen(device):
    """The reference package crashes here, looking for a norm bias."""
    module = build("LayerNormMLP", device, normalization="RMSNorm")
    module.layer_norm_weight.requires_grad_(False)
    x = random(ROWS, K, device=device)
    (y,) = forward(module, x)
    y.sum().backward()
    want = model(module, x, [torch.ones_like(y)])
    for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"):
        assert_near(getattr(module, name).grad, want.grads[name], 16 * UNIT[FP32], name)
    assert module.layer_norm_weight.grad is None


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_bias_is_trained_while_weights_are_frozen(kind, device):
    """The reference package forgets the bias gradient here, in high precision."""
    module = build(kind, device)
    for name, param in module.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    x = random(ROWS, K, device=device)
    outputs = forward(module, x)
    outputs[0].sum().backward()
    want = model(module, x, [torch.ones_like(outputs[0])])
    for name, param in module.named_parameters():
        if name.endswith("bias"):
            assert_near(param.grad, want.grads[name], 16 * UNIT[FP32], name)
        else:
            assert param.grad is None


def test_requires_grad_may_change_between_calls(device):
    """Freezing and unfreezing acts at the next call."""
    module, x = build("LayerNormMLP", device), random(ROWS, K, device=device)
    expected = run(module, x).grads
    for frozen in ("fc1_weight", "fc2_bias", "layer_norm_weight"):
        getattr(module, frozen).requires_grad_(False)
        grads = run(module, x).grads
        assert grads[frozen] is None
        assert all(torch.equal(grads[n], expected[n]) for n in expected if n != frozen)
        getattr(module, frozen).requires_grad_(True)
    assert all(torch.equal(g, expected[n]) for n, g in run(module, x).grads.items())


# --- returned norm output ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("which", ((0,), (1,), (0, 1)), ids=str)
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_gradients_through_one_or_both_outputs(kind, normalization, which, dtype, device):
    """The output, the norm output, or both, against the float64 model."""
    module = build(
        kind, device, dtype=dtype, normalization=normalization, return_layernorm_output=True
    )
    x = random(ROWS, K, dtype=dtype, device=device, grad=True)
    outputs = forward(module, x)
    backward(outputs, which)
    dys = [
        random(*y.shape, seed=70 + i).to(y) if i in which else None for i, y in enumerate(outputs)
    ]
    want = model(module, x, dys, dtype=None if dtype == FP32 else dtype).grads
    limit = (16 if dtype == FP32 else 1.5) * UNIT[dtype]
    for name, grad in gradients(module, x).items():
        if want[name] is None:  # only the norm output was used
            assert grad is None or (grad == 0).all(), name
        else:
            assert_near(grad, want[name], limit, name)


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_fp8_gradients_through_the_norm_output_alone(kind, recipe, device):
    """The GEMM takes no part: exactly the gradients of a norm."""
    module, norm = build(kind, device, return_layernorm_output=True), te.LayerNorm(K, device=device)
    with torch.no_grad():
        norm.weight.copy_(module.layer_norm_weight)
        norm.bias.copy_(module.layer_norm_bias)
    x = random(ROWS, K, device=device, grad=True)
    outputs = forward(module, x, RECIPES[recipe]())
    backward(outputs, (1,))
    other = x.detach().clone().requires_grad_()
    norm(other).backward(random(ROWS, K, seed=71, device=device))
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(module.layer_norm_weight.grad, norm.weight.grad)
    torch.testing.assert_close(module.layer_norm_bias.grad, norm.bias.grad)
    if recipe == "delayed":
        assert (module._delayed_scaling.bwd_scale == 1).all()


def test_detached_norm_output_adds_nothing(device):
    """Using the norm output without gradient leaves the gradients as they are."""
    module = build("LayerNormMLP", device, return_layernorm_output=True)
    plain = build("LayerNormMLP", device)
    x = random(ROWS, K, device=device)
    expected = run(plain, x)
    leaf = x.clone().requires_grad_()
    y, ln_out = module(leaf)
    torch.autograd.backward(
        (y, ln_out.detach().requires_grad_()), (expected.dys[0], torch.ones_like(ln_out))
    )
    assert all(torch.equal(g, expected.grads[n]) for n, g in gradients(module, leaf).items())


# --- several passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,recipe", CASES)
def test_gradients_accumulate(kind, recipe, device):
    """Two backward passes leave the sum of both gradients."""
    module, recipe = build(kind, device, dtype=BF16), RECIPES[recipe]()
    twin = copy.deepcopy(module)
    xs = [random(ROWS, K, dtype=BF16, device=device, seed=seed, grad=True) for seed in range(2)]
    for x in xs:
        backward(forward(module, x, recipe))
    apart = []
    for x in xs:
        twin.zero_grad()
        other = x.detach().clone().requires_grad_()
        backward(forward(twin, other, recipe))
        apart.append(gradients(twin, other))
        assert torch.equal(other.grad, x.grad)
    for name, param in module.named_parameters():
        assert torch.equal(param.grad, apart[0][name] + apart[1][name]), name


STATELESS = [(kind, recipe) for kind in GEMM_MODULES for recipe in ("none", "current")]
STATELESS += [case for case in OTHER_CASES if case[1] != "custom_delayed"]


@pytest.mark.parametrize("kind,recipe", STATELESS)
@pytest.mark.parametrize("order", ((0, 1, 2), (2, 1, 0), (1, 2, 0)))
def test_deferred_backward(kind, recipe, order, device):
    """Several forward passes, then their backward passes in any order, as pipelines do."""
    name = recipe
    module, recipe = build(kind, device, dtype=BF16, recipe=name), ALL_RECIPES[name]()
    data = [random(ROWS + seed, K, dtype=BF16, device=device, seed=seed) for seed in range(3)]
    xs = [x.clone().requires_grad_() for x in data]
    outputs = [forward(module, x, recipe) for x in xs]
    for i in order:
        module.zero_grad()
        backward(outputs[i])
        got = gradients(module, xs[i])
        twin = build(kind, device, dtype=BF16, recipe=name)
        x = data[i].clone().requires_grad_()
        backward(forward(twin, x, recipe))
        for key, grad in gradients(twin, x).items():
            assert torch.equal(got[key], grad), key


@pytest.mark.parametrize("kind", MODULES)
def test_retained_graph(kind, device):
    """The saved tensors serve twice."""
    module, x = build(kind, device), random(ROWS, K, device=device, grad=True)
    outputs = forward(module, x)
    backward(outputs, retain_graph=True)
    first = {name: grad.clone() for name, grad in gradients(module, x).items()}
    backward(outputs)
    for name, grad in gradients(module, x).items():
        assert torch.equal(grad, 2 * first[name]), name
    with pytest.raises(RuntimeError, match="second time"):
        backward(outputs)


# What is differentiated twice, and whether the gradient that backward gets needs one itself.
PENALIZED = (lambda y: y.square().sum(), lambda y: y.sum())


@pytest.mark.parametrize("kind,recipe", CASES)
@pytest.mark.parametrize("loss", PENALIZED, ids=("square", "sum"))
def test_second_derivatives_are_refused(kind, recipe, loss, device):
    """No formula gives them: an error, not a wrong number, also beside another path to a leaf."""
    module, x = build(kind, device), random(ROWS, K, device=device, grad=True)
    (y,) = forward(module, x, RECIPES[recipe]())
    with pytest.raises(RuntimeError, match="differentiated twice"):
        (dx,) = torch.autograd.grad(loss(y), x, create_graph=True)
        (y.mean() + dx.square().sum()).backward()


@pytest.mark.parametrize("kind", MODULES)
def test_create_graph_alone(kind, device):
    """Gradients that are not differentiated again are those without ``create_graph``."""
    module, x = build(kind, device), random(ROWS, K, device=device, grad=True)
    leaves = (x, *module.parameters())
    (y,) = forward(module, x)
    found = torch.autograd.grad(y.sum(), leaves, create_graph=True)
    (y,) = forward(module, x)
    for a, b in zip(found, torch.autograd.grad(y.sum(), leaves)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind,recipe", CASES)
def test_batches_of_gradients_are_refused(kind, recipe, device):
    """The error says what to do instead, which works: nothing is lost or changed by then."""
    module, x = build(kind, device), random(ROWS, K, device=device, grad=True)
    (other,), (y,) = [forward(m, x, RECIPES[recipe]()) for m in (copy.deepcopy(module), module)]
    (want,) = torch.autograd.grad(other, x, y.detach())
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.autograd.grad(y, x, torch.stack([y, y]).detach(), None, True, is_grads_batched=True)
    (got,) = torch.autograd.grad(y, x, y.detach())
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind,recipe", STATELESS)
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_torch_checkpoint(kind, recipe, use_reentrant, device):
    """Recomputation by the stock function changes no bit."""
    module = build(kind, device, dtype=BF16, recipe=recipe)
    recipe = ALL_RECIPES[recipe]()
    data = random(ROWS, K, dtype=BF16, device=device)
    expected = run(module, data, recipe)
    module.zero_grad()
    x = data.clone().requires_grad_()
    y = checkpoint(lambda t: forward(module, t, recipe)[0], x, use_reentrant=use_reentrant)
    torch.manual_seed(DRAWS)
    y.backward(expected.dys[0])
    assert torch.equal(y, expected.outputs[0])
    for name, grad in gradients(module, x).items():
        assert torch.equal(grad, expected.grads[name]), name


@pytest.mark.parametrize("kind,recipe", CASES)
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_inference_then_training(kind, recipe, mode, device):
    """Inference gives the bits of training without a graph, and training works after it."""
    module, recipe = build(kind, device, dtype=BF16), RECIPES[recipe]()
    twin = copy.deepcopy(module)
    x = random(ROWS, K, dtype=BF16, device=device)
    with mode():
        y = forward(module, x, recipe)[0]
        assert not y.requires_grad and y.grad_fn is None
    step, expected = run(module, x, recipe), run(twin, x, recipe)
    assert torch.equal(y, expected.outputs[0]) and torch.equal(step.outputs[0], y)
    for name, grad in expected.grads.items():
        assert torch.equal(step.grads[name], grad), name
    assert torch.equal(run(module, x, recipe).outputs[0], run(twin, x, recipe).outputs[0])


def test_saved_tensors_are_checked(device):
    """Changing a parameter in place between forward and backward is found, not computed with."""
    module, x = build("Linear", device), random(ROWS, K, device=device, grad=True)
    (y,) = forward(module, x)
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_one_module_used_twice(kind, device):
    """In one graph, one after the other; gradients are the sums of both uses."""
    module = build(kind, device, out=K)
    x = random(ROWS, K, device=device, grad=True)
    first = as_tuple(module(x))[0]
    as_tuple(module(first))[0].square().sum().backward()
    one, two = copy.deepcopy(module), copy.deepcopy(module)
    one.zero_grad()
    two.zero_grad()
    other = x.detach().clone().requires_grad_()
    as_tuple(two(as_tuple(one(other))[0]))[0].square().sum().backward()
    assert torch.equal(x.grad, other.grad)
    for name, param in module.named_parameters():
        both = dict(one.named_parameters())[name].grad + dict(two.named_parameters())[name].grad
        torch.testing.assert_close(param.grad, both)


@pytest.mark.parametrize("kind", MODULES)
def test_functional_call(kind, device):
    """Parameters can be handed over from outside, as meta-learning and EMA code does."""
    module, values = build(kind, device), build(kind, device, seed=4)
    x = random(ROWS, K, device=device)
    parameters = {
        name: p.detach().clone().requires_grad_() for name, p in values.named_parameters()
    }
    y = torch.func.functional_call(module, parameters, (x,))
    assert torch.equal(y, values(x))
    y.sum().backward()
    values(x).sum().backward()
    for name, param in values.named_parameters():
        assert torch.equal(parameters[name].grad, param.grad)
    assert all(p.grad is None for p in module.parameters())
