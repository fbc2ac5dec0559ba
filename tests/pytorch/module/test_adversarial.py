# SPDX-License-Identifier: Apache-2.0
"""Unusual uses that once broke something, or easily could."""

import contextlib
import copy
import gc

import pytest
import torch
from compile_support import GEMM_MODULES, STATE, K, N, Twins, assert_same_bits, assert_same_modules
from compile_support import build, graphs, random, reset, with_recipe

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=3)
LONG = DelayedScaling(amax_history_len=8)
ALL_RECIPES = {"none": None, "current": CURRENT, "delayed": DELAYED}
recipes = pytest.mark.parametrize("recipe", ALL_RECIPES.values(), ids=ALL_RECIPES.keys())
gemm_modules = pytest.mark.parametrize("kind", GEMM_MODULES)


def compiled(function, backend="aot_eager"):
    """``function`` as one graph."""
    return torch.compile(function, fullgraph=True, backend=backend)


# --- state of delayed scaling ---------------------------------------------------------------------


def test_tracing_leaves_histories_of_other_modules_alone():
    traced, other = build("Linear"), build("LayerNormLinear")
    for i in range(3):
        with_recipe(other, random(16, K, seed=i), LONG).sum().backward()
    before = copy.deepcopy(other._delayed_scaling)
    compiled(lambda x: with_recipe(traced, x, DELAYED))(random(16, K))
    for field in STATE:
        assert_same_bits(getattr(other._delayed_scaling, field), getattr(before, field), field)


def test_two_history_lengths_make_two_graphs():
    reset()
    modules = build("Linear"), build("LayerNormMLP")
    steps = [
        compiled(lambda x, m=m, r=r: with_recipe(m, x, r)) for m, r in zip(modules, (DELAYED, LONG))
    ]
    for _ in range(3):
        for step in steps:
            step(random(16, K)).sum().backward()
    assert graphs() == 2


def test_many_layers_compile_beside_a_module_of_another_history_length():
    reset()
    other, layers = build("Linear"), [build("LayerNormMLP", seed=i) for i in range(10)]
    with_recipe(other, random(16, K), LONG)
    steps = [compiled(layer) for layer in layers]
    with te.autocast(recipe=DELAYED):
        y = random(16, K)
        for step in steps:
            y = step(y)
    assert graphs() <= 3


def test_a_graph_does_not_resize_a_history_and_names_the_cure():
    twins = Twins(build("Linear"))
    twins.step(random(16, K), DELAYED)
    before = twins.module._delayed_scaling.fwd_history.clone()
    with pytest.raises(Exception, match=r"adjust_amax_history_length\(8\)"):
        twins.compiled(random(16, K), LONG)
    assert torch.equal(twins.module._delayed_scaling.fwd_history, before)
    for i, recipe in enumerate((LONG, LONG, DELAYED, LONG)):
        for module in (twins.eager, twins.module):
            module.adjust_amax_history_length(recipe.amax_history_len)
        twins.step(random(16, K, seed=i), recipe)
    assert graphs() <= 3


def test_two_history_lengths_in_one_graph():
    def call(modules, x):
        with te.autocast(recipe=DELAYED):
            y = modules[0](x)
            with te.autocast(recipe=LONG):
                return modules[1](y)

    modules = torch.nn.ModuleList([build("LayerNormMLP"), build("Linear")])
    # Made while tracing, both would get the length that the trace meets first.
    call(modules, random(16, K))
    twins = Twins(modules, call)
    for i in range(3):
        twins.step(random(16, K, seed=i))


def test_one_module_under_two_history_lengths_in_one_region():
    """Compiled code may refuse this, but must not compute something else than eager."""

    def call(module, x):
        with te.autocast(recipe=DELAYED):
            y = module(x)
            with te.autocast(recipe=LONG):
                z = module(x)
            return y + z + module(x)

    twins = Twins(build("Linear"), call)
    try:
        twins.compiled(random(16, K))
    except Exception:  # pylint: disable=broad-exception-caught
        return  # refused
    twins = Twins(build("Linear"), call)
    for i in range(3):
        twins.step(random(16, K, seed=i))


def two_uses(module, x, recipe):
    """The module twice in a region; the first use has no backward."""
    with te.autocast(recipe=recipe):
        with torch.no_grad():
            module(x * 2)
        return module(x)


@gemm_modules
def test_backward_scale_is_renewed_though_the_first_use_has_no_backward(kind):
    twins = Twins(build(kind), two_uses)
    for i in range(3):
        twins.step(random(16, K, seed=i), DELAYED)
    slots = list(twins.eager.bwd_amax_slots)
    assert (twins.eager._delayed_scaling.bwd_scale[slots] != 1).all()


def test_reentrant_checkpoint_renews_the_backward_scale():
    module = build("LayerNormMLP")
    with te.autocast(recipe=DELAYED):
        x = random(16, K).requires_grad_()
        y = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=True)
        y.sum().backward()
    assert (module._delayed_scaling.bwd_scale[[0, 2]] != 1).all()


def test_state_loaded_in_inference_mode_can_train():
    source, module = build("Linear"), build("Linear", seed=1)
    with_recipe(source, random(16, K), DELAYED).sum().backward()
    with torch.inference_mode():
        module.load_state_dict(source.state_dict())
    with_recipe(module, random(16, K), DELAYED).sum().backward()


@pytest.mark.parametrize("size", [25, 40, -5])
def test_truncated_extra_state_is_named_and_changes_nothing(size):
    module = build("Linear")
    with_recipe(module, random(16, K), DELAYED).sum().backward()
    state, before = module.state_dict(), copy.deepcopy(module._delayed_scaling)
    state["_extra_state"] = state["_extra_state"][:size]
    with pytest.raises(RuntimeError, match="_extra_state"):
        module.load_state_dict(state)
    for field in STATE:
        assert_same_bits(getattr(module._delayed_scaling, field), getattr(before, field), field)


@gemm_modules
def test_errors_in_a_region_leave_compiled_and_eager_equal(kind):
    module = build(kind)
    eager = copy.deepcopy(module)
    step = compiled(module)
    for i in range(4):
        for function in (step, eager):
            y = None
            with contextlib.suppress(Exception):
                with te.autocast(recipe=DELAYED):
                    y = function(random(16, K, seed=i))
                    if i == 1:
                        function(random(3, K + 1))
                    if i == 2:
                        raise KeyError
            y.sum().backward()
        assert_same_modules(module, eager)
    assert FP8GlobalStateManager.quantization_state.autocast_depth == 0


def test_graph_breaks_inside_a_region():
    modules = torch.nn.ModuleList([build("LayerNormMLP", seed=i) for i in range(3)])
    outside = torch.compiler.disable(lambda module, x: module(x))

    def call(modules, x):
        with te.autocast(recipe=DELAYED):
            y = modules[0](x)
            torch._dynamo.graph_break()
            y = outside(modules[2], modules[1](y))
            return modules[0](y)

    twins = Twins(modules, call, fullgraph=False)
    for i in range(3):
        twins.step(random(16, K, seed=i))


@gemm_modules
def test_eager_backend_of_torch_compile(kind):
    twins = Twins(build(kind), backend="eager")
    for i in range(2):
        twins.step(random(16, K, seed=i), DELAYED)


def test_several_compiled_functions_and_an_eager_one_share_a_region():
    reset()
    gc.collect()  # modules of other tests, with histories of other lengths, would bind the graphs
    modules = [build("LayerNormMLP", seed=i) for i in range(3)] + [build("Linear")]
    twins = copy.deepcopy(modules)
    steps = [compiled(module) for module in modules]

    def run(functions, third, x, again):
        with te.autocast(recipe=DELAYED):
            y = third(functions[1](functions[0](x)))
            return functions[3](functions[1](y) if again else y)

    for i in range(6):
        x = random(16, K, seed=i)
        results = run(steps, modules[2] if i % 3 else steps[2], x, i % 2), run(
            twins, twins[2], x, i % 2
        )
        assert_same_bits(*results, "output")
        for result in results:
            result.sum().backward()
        for module, twin in zip(modules, twins):
            assert_same_modules(module, twin)
    assert graphs() <= 4


# --- weights --------------------------------------------------------------------------------------


def test_split_weight_changed_before_backward_is_noticed():
    module = te.Linear(K, N, params_dtype=torch.float32, parameters_split=("a", "b"), device="cpu")
    y = module(random(4, K, dtype=torch.float32).requires_grad_())
    with torch.no_grad():
        module.b_weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@recipes
@pytest.mark.parametrize("bias", [True, False])
def test_parametrized_weight(bias, recipe):
    module = build("Linear", bias=bias)
    torch.nn.utils.parametrizations.weight_norm(module)
    x = random(16, K).requires_grad_()
    weight, expected = module.weight.detach().double(), x.detach().double()
    y = with_recipe(module, x, recipe)
    y.sum().backward()
    expected = expected @ weight.T + (module.bias.detach().double() if bias else 0)
    assert (y - expected).norm() < 0.1 * expected.norm()
    assert all(param.grad is not None for param in module.parameters())


@pytest.mark.parametrize("override", [None, "dequantized", "high_precision"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_cache_made_in_inference_mode_serves_training(kind, override):
    module, recipe = build(kind), Float8CurrentScaling(backward_override=override)
    with torch.inference_mode():
        with_recipe(module, random(16, K), recipe, is_first_microbatch=True)
    x = random(16, K).requires_grad_()
    with_recipe(module, x, recipe, is_first_microbatch=False).sum().backward()
    twin, z = copy.deepcopy(module), x.detach().clone().requires_grad_()
    with_recipe(twin, z, recipe).sum().backward()
    assert_same_bits(x.grad, z.grad, "input gradient")


@gemm_modules
def test_cached_weights_compile(kind):
    twins = Twins(build(kind))
    for first in (True, False, None):
        twins.step(random(16, K), CURRENT, is_first_microbatch=first)


@gemm_modules
def test_weights_replaced_swapped_frozen_and_loaded_between_compiled_calls(kind):
    twins, x = Twins(build(kind)), random(16, K)
    both, name = (twins.module, twins.eager), twins.module.weight_names[0]
    weight = random(*getattr(twins.module, name).shape, seed=9)
    state = copy.deepcopy(twins.module.state_dict())
    for recipe in (CURRENT, DELAYED):
        twins.zero_grad()
        for module in both:
            setattr(module, name, torch.nn.Parameter(weight.clone()))
        twins.step(x, recipe)
        for module in both:
            getattr(module, name).data = weight * 2
        twins.step(x, recipe)
        for module in both:
            setattr(module, name, torch.nn.Parameter(weight.clone(), requires_grad=False))
        twins.step(x, recipe)
        for module in both:
            module.load_state_dict(state)
        twins.step(x, recipe)


@recipes
def test_one_weight_in_two_modules(recipe):
    model = torch.nn.Sequential(
        *(te.Linear(K, K, params_dtype=torch.bfloat16, device="cpu") for _ in "ab")
    )
    model[1].weight = model[0].weight
    twins = Twins(model)
    for i in range(3):
        twins.step(random(16, K, seed=i), recipe)


# --- transforms, modes, devices -------------------------------------------------------------------


@pytest.mark.parametrize("compile_it", [False, True], ids=["eager", "compiled"])
@recipes
def test_forward_mode_derivatives_are_right_or_refused(recipe, compile_it):
    module = build("Linear", dtype=torch.float32).requires_grad_(False)
    x, v = (random(16, K, seed=i, dtype=torch.float32) for i in range(2))

    def derivative(x, v):
        return torch.func.jvp(lambda x: with_recipe(module, x, recipe), (x,), (v,))[1]

    try:
        tangent = (compiled(derivative) if compile_it else derivative)(x, v)
    except Exception:  # pylint: disable=broad-exception-caught
        return  # refused
    torch.testing.assert_close(tangent, v @ module.weight.T, rtol=0.1, atol=0.5)


@recipes
def test_vmap_of_a_frozen_module_is_right_or_refused(recipe):
    module = build("Linear", dtype=torch.float32).requires_grad_(False)
    x = random(3, 16, K, dtype=torch.float32)
    try:
        y = torch.vmap(lambda x: with_recipe(module, x, recipe))(x)
    except RuntimeError as error:
        assert "data-dependent control flow" not in str(error)
        return
    torch.testing.assert_close(y, module(x), rtol=0.1, atol=0.5)


@recipes
def test_second_derivatives_of_compiled_code_are_refused(recipe):
    x = random(16, K).requires_grad_()
    module = build("Linear")
    y = compiled(lambda x: with_recipe(module, x, recipe))(x)
    with pytest.raises(RuntimeError, match="double backward|create_graph"):
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        dx.square().sum().backward()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "LayerNorm"])
def test_meta_forward_gives_shapes(kind):
    module = build(kind).to("meta")
    x = torch.empty(2, 8, K, dtype=torch.bfloat16, device="meta", requires_grad=True)
    y = module(x)
    assert y.is_meta and y.shape == (2, 8, N if kind == "Linear" else K)
    y.sum().backward()
    assert x.grad.shape == x.shape


@recipes
@gemm_modules
def test_dispatch_modes_change_no_bit(kind, recipe):
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        """Passes everything on."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    module = build(kind)
    eager = copy.deepcopy(module)
    for i in range(2):
        with Mode():
            y = with_recipe(module, random(16, K, seed=i), recipe)
            y.sum().backward()
        z = with_recipe(eager, random(16, K, seed=i), recipe)
        z.sum().backward()
        assert_same_bits(y, z, "output")
        assert_same_modules(module, eager)


@recipes
def test_ambient_defaults_change_no_bit(recipe):
    module = build("LayerNormMLP")
    eager = copy.deepcopy(module)
    x = random(16, K)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            y = with_recipe(module, x, recipe)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
    z = with_recipe(eager, x, recipe)
    z.sum().backward()
    assert_same_bits(y, z, "output")
    assert_same_modules(module, eager)


VIEWS = {
    "flipped": lambda x: x.flip(0),
    "expanded": lambda x: x[:1].expand(8, 16, K),
    "permuted": lambda x: x.permute(1, 0, 2),
    "strided": lambda x: x[::2, ::3],
    "overlapping": lambda x: x.as_strided((5, 16, K), (3, 64, 1)),
    "channels_last": lambda x: x.reshape(2, 4, 16, K).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_strange_strides_equal_a_contiguous_copy(view):
    twins = Twins(build("LayerNormMLP"))
    twins.step(random(8, 16, K), DELAYED, view=view)
    inputs = [random(8, 16, K).requires_grad_() for _ in range(2)]
    modules = build("LayerNormMLP"), build("LayerNormMLP")
    for module, x, copied in zip(modules, inputs, (False, True)):
        given = view(x).clone(memory_format=torch.contiguous_format) if copied else view(x)
        with_recipe(module, given, CURRENT).float().square().sum().backward()
    assert_same_bits(inputs[0].grad, inputs[1].grad, "input gradient")
    assert_same_modules(*modules)


@gemm_modules
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38, 1e-45])
def test_bad_values_compiled_equal_eager(kind, value):
    x = random(16, K, dtype=torch.float32)
    if value == 1e-45:
        x = torch.full_like(x, value)
    else:
        x[3, 5] = value
    twins = Twins(build(kind, dtype=torch.float32))
    for _ in range(2):
        twins.step(x, DELAYED)


def test_overflowing_scaled_loss_leaves_compiled_and_eager_equal():
    twins = Twins(build("LayerNormMLP", dtype=torch.float16))
    for scale in (1.0, 1e4, 1e10, 1.0):
        forward = twins.forward(random(16, K, dtype=torch.float16), DELAYED)
        for outputs in forward.outputs:
            (outputs[0].float().sum() * scale).backward()
        twins.compare()
        twins.zero_grad()
