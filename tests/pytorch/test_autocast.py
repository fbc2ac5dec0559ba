# SPDX-License-Identifier: Apache-2.0
"""``autocast``, ``quantized_model_init``, the global state, availability, in eager and inside of
graphs.
"""

import copy
import importlib
import sys
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from transformer_engine.pytorch import availability, quantization, utils
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.core import delayed_scaling
from transformer_engine.pytorch.quantization import (
    DelayedScalingRecipeState,
    DelayedScalingRequest,
    Float8CurrentScalingRecipeState,
    FP8GlobalStateManager,
    QuantizerRole,
    RecipeState,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_align_size_for_quantization,
    get_default_recipe,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
    quantized_model_init,
)

STATE = FP8GlobalStateManager.quantization_state
CURRENT = Float8CurrentScaling()._spec
DELAYED = DelayedScaling()._spec


def look():
    """What a module would read."""
    return (STATE.fp8_enabled, STATE.kind, STATE.spec)


OUTSIDE = (False, "", "")


def test_enter_and_exit():
    assert look() == OUTSIDE
    recipe = Float8CurrentScaling()
    with autocast(recipe=recipe):
        assert look() == (True, "stateless", CURRENT)
        assert FP8GlobalStateManager.is_fp8_enabled()
        assert FP8GlobalStateManager.get_fp8_recipe() is recipe
        assert STATE.autocast_depth == 1
    assert look() == OUTSIDE and STATE.autocast_depth == 0 and STATE.fp8_recipe is None


def test_positional_arguments():
    with autocast(True, False, DelayedScaling(), None):
        assert look() == (True, "delayed", DELAYED)


def test_nesting():
    with autocast(recipe=DelayedScaling()):
        with autocast(recipe=Float8CurrentScaling()):
            assert look() == (True, "stateless", CURRENT)
            with autocast(enabled=False):
                assert look() == OUTSIDE and STATE.autocast_depth == 3
            assert look() == (True, "stateless", CURRENT)
        assert look() == (True, "delayed", DELAYED)
    assert look() == OUTSIDE


def test_exceptions_leave_no_trace():
    with pytest.raises(KeyError):
        with autocast(recipe=DelayedScaling()):
            with autocast(recipe=Float8CurrentScaling()):
                raise KeyError
    assert look() == OUTSIDE and STATE.autocast_depth == 0


def test_an_active_instance_cannot_be_entered_again():
    context = autocast(recipe=Float8CurrentScaling())
    with context:
        with pytest.raises(RuntimeError, match="active already"):
            with context:
                pass
        assert look() == (True, "stateless", CURRENT) and STATE.autocast_depth == 1
    with context:
        assert look() == (True, "stateless", CURRENT)
    assert look() == OUTSIDE


@pytest.mark.parametrize(
    "recipe, kind",
    [
        (DelayedScaling(), "delayed"),
        (Float8CurrentScaling(), "stateless"),
        (MXFP8BlockScaling(enable_2d_quantization=True), "stateless"),
        (Float8BlockScaling(use_f32_scales=True), "stateless"),
        (NVFP4BlockScaling(), "stateless"),
        (NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True), "stateless"),
        (NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True), "stateless"),
        (NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"), "stateless"),
        (CustomRecipe(lambda role: None), "custom"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Recipe) else "",
)
def test_every_recipe_is_accepted(recipe, kind):
    with autocast(recipe=recipe):
        assert look() == (True, kind, recipe._spec) and recipe._spec
        assert (delayed_scaling.REGION.rule != "") == (kind == "delayed")
        with autocast(enabled=False, recipe=recipe):
            assert look() == OUTSIDE
    assert look() == OUTSIDE and STATE.autocast_depth == 0


def changed(recipe, **attributes):
    """The recipe with attributes that its constructor does not take."""
    for name, value in attributes.items():
        setattr(recipe, name, value)
    return recipe


@pytest.mark.parametrize(
    "recipe, first, second",
    [
        (
            NVFP4BlockScaling(row_scaled_activation=True),
            "row_scaled_activation=True",
            "random_hadamard_transform",
        ),
        (
            NVFP4BlockScaling(nvfp4_4over6="activations"),
            "nvfp4_4over6='activations'",
            "random_hadamard_transform",
        ),
        (NVFP4BlockScaling(nvfp4_4over6="all"), "nvfp4_4over6='all'", "random_hadamard_transform"),
        (
            changed(
                NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
                fp4_quant_fwd_inp=QParams(stochastic_rounding=True),
            ),
            "row_scaled_activation=True",
            "stochastic_rounding",
        ),
        (
            changed(
                NVFP4BlockScaling(),
                fp4_quant_bwd_grad=QParams(
                    random_hadamard_transform=True, fp4_2d_quantization=True
                ),
            ),
            "rht",
            "dim=2",
        ),
        (
            changed(
                NVFP4BlockScaling(nvfp4_4over6="weights"),
                fp4_quant_fwd_weight=QParams(stochastic_rounding=True),
            ),
            "nvfp4_4over6='weights'",
            "stochastic_rounding",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "recipe",
)
def test_options_that_exclude_each_other_are_refused(recipe, first, second):
    """When the region is entered, and before anything changes."""
    with autocast(recipe=DelayedScaling()):
        before = FP8GlobalStateManager.snapshot()
        context = autocast(recipe=recipe)
        with pytest.raises(RuntimeError, match=f"NVFP4BlockScaling.*{first} .*with {second}"):
            with context:
                pass
        assert FP8GlobalStateManager.snapshot() == before and STATE.autocast_depth == 1
        # A disabled region does not compute the recipe.
        with autocast(enabled=False, recipe=recipe):
            assert look() == OUTSIDE


def test_what_is_not_a_recipe_is_refused():
    with pytest.raises(RuntimeError, match="must be an instance"):
        with autocast(recipe="DelayedScaling"):
            pass
    with pytest.raises(RuntimeError, match=r"is the class: pass Float8CurrentScaling\(\)"):
        with autocast(recipe=Float8CurrentScaling):
            pass


def test_recipe_fields_are_read_on_entry():
    recipe = Float8CurrentScaling()
    with autocast(recipe=recipe):
        recipe.fp8_format = Format.E4M3
        assert look()[2] == CURRENT
    with autocast(recipe=recipe):
        assert ";g=current,e4m3;" in look()[2]


def test_backward_override_is_part_of_the_spec():
    with autocast(recipe=Float8CurrentScaling(backward_override="high_precision")):
        assert look()[2] == CURRENT + ";bwd=high_precision"


def test_calibration():
    with autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        assert look() == OUTSIDE and FP8GlobalStateManager.is_fp8_calibration()
    assert not FP8GlobalStateManager.is_fp8_calibration()


def test_first_module_is_told_once():
    with autocast(recipe=DelayedScaling()):
        assert FP8GlobalStateManager.is_first_fp8_module()
        assert not FP8GlobalStateManager.is_first_fp8_module()
    assert not FP8GlobalStateManager.is_first_fp8_module()


def test_saved_autocast_state_can_be_set_again():
    with autocast(recipe=Float8CurrentScaling()):
        saved = FP8GlobalStateManager.get_autocast_state()
    outside = FP8GlobalStateManager.get_autocast_state()
    assert len(saved) == 6
    FP8GlobalStateManager.set_autocast_state(saved)
    assert look() == (True, "stateless", CURRENT)
    FP8GlobalStateManager.set_autocast_state(outside)
    assert look() == OUTSIDE


def test_reset_keeps_the_instance():
    with autocast(recipe=DelayedScaling()):
        FP8GlobalStateManager.reset()
        assert look() == OUTSIDE and FP8GlobalStateManager.quantization_state is STATE


def test_default_recipe_is_only_made_where_it_is_used(monkeypatch):
    def fail():
        raise AssertionError("made a recipe")

    with autocast():
        assert FP8GlobalStateManager.get_fp8_recipe() == get_default_recipe()
    monkeypatch.setattr("transformer_engine.pytorch.fp8_global_state.get_default_recipe", fail)
    with autocast(enabled=False):
        pass


@pytest.mark.parametrize(
    "capability, kind",
    [
        ((0, 0), Float8CurrentScaling),
        ((8, 0), DelayedScaling),
        ((9, 0), DelayedScaling),
        ((10, 0), MXFP8BlockScaling),
        ((11, 0), MXFP8BlockScaling),
        ((12, 0), Float8CurrentScaling),
    ],
)
def test_default_recipe(monkeypatch, capability, kind):
    monkeypatch.setattr(availability, "get_device_compute_capability", lambda: capability)
    recipe = get_default_recipe()
    assert recipe == kind()
    assert quantization.get_default_fp8_recipe() == recipe


@pytest.mark.parametrize(
    "capability, cuda, available",
    [
        ((0, 0), "12.9", ()),
        ((8, 0), "12.9", ("bf16",)),
        ((8, 9), "12.0", ("bf16",)),
        ((8, 9), "12.9", ("bf16", "fp8")),
        ((9, 0), "12.8", ("bf16", "fp8")),
        ((9, 0), "13.0", ("bf16", "fp8", "fp8_block_scaling")),
        ((10, 0), "13.0", ("bf16", "fp8", "fp8_block_scaling", "mxfp8", "nvfp4")),
        ((12, 0), "13.0", ("bf16", "fp8", "fp8_block_scaling", "nvfp4")),
    ],
)
def test_availability(monkeypatch, capability, cuda, available):
    monkeypatch.setattr(availability, "get_device_compute_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        function = getattr(quantization, f"is_{name}_available")
        answer, reason = function(return_reason=True)
        assert answer == (name in available) == function()
        assert (reason == "") == answer
        assert getattr(quantization, f"check_{name}_support")() == (answer, reason)
        assert getattr(FP8GlobalStateManager, f"is_{name}_available")() == (answer, reason)
    assert quantization.is_bf16_available() == (capability == (0, 0) or "bf16" in available)


TRANSFORMED = QParams(random_hadamard_transform=True)
# field, its value, other options of the recipe, what the error says
UNEQUAL_TRANSFORMS = [
    ("fp4_quant_fwd_inp", QParams(), {}, r"fwd_inp has random_hadamard_transform=False.*bwd_grad"),
    ("fp4_quant_bwd_grad", QParams(), {}, r"fwd_inp has random_hadamard_transform=True.*bwd_grad"),
    ("fp4_quant_fwd_inp", TRANSFORMED, {"disable_rht": True}, "wgrad multiplies the two.*disable"),
    ("fp4_quant_fwd_weight", TRANSFORMED, {}, "fwd_weight has .*dgrad.*bwd_grad.*without"),
]


@pytest.mark.parametrize("field,value,options,match", UNEQUAL_TRANSFORMS)
def test_transforms_that_do_not_cancel(field, value, options, match):
    """Refused on entry: the product of transformed and other values would be silently wrong."""
    recipe = NVFP4BlockScaling(**options)
    setattr(recipe, field, value)
    with pytest.raises(RuntimeError, match=match):
        with autocast(recipe=recipe):
            pass
    assert look()[0] is False
    # Where no backward GEMM is quantized, there is no product that could be wrong.
    recipe.backward_override = "high_precision"
    with autocast(recipe=recipe):
        assert look()[0] is True


def test_equal_transforms_are_computed(device):
    """Both switched off by their QParams: the numbers of ``disable_rht``."""
    recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    recipe.fp4_quant_fwd_inp = recipe.fp4_quant_bwd_grad = QParams()
    gradients = []
    for used in (recipe, NVFP4BlockScaling(True, True)):
        torch.manual_seed(0)
        module = te.Linear(64, 96, params_dtype=torch.bfloat16, device=device)
        x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
        with autocast(recipe=used):
            y = module(x)
        y.backward(torch.linspace(0, 1, 96, device=device).to(y.dtype).expand_as(y))
        gradients.append(module.weight.grad)
    assert torch.equal(*gradients)


# --- init contexts, deprecated names --------------------------------------------------------------


def test_quantized_model_init():
    recipe = Float8CurrentScaling()
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        assert FP8GlobalStateManager.with_fp8_parameters()
        assert FP8GlobalStateManager.get_fp8_recipe() is recipe
        with quantized_model_init(enabled=False):
            assert not FP8GlobalStateManager.with_fp8_parameters()
            assert not FP8GlobalStateManager.with_high_precision_init_val()
        assert FP8GlobalStateManager.with_high_precision_init_val()
        assert not FP8GlobalStateManager.is_fp8_enabled()
    assert not FP8GlobalStateManager.with_fp8_parameters()
    assert not FP8GlobalStateManager.with_high_precision_init_val()
    with pytest.raises(RuntimeError, match="row_scaled_activation=True cannot be combined"):
        with quantized_model_init(recipe=NVFP4BlockScaling(row_scaled_activation=True)):
            pass
    assert not FP8GlobalStateManager.with_fp8_parameters()


def test_deprecated_names():
    with pytest.warns(DeprecationWarning):
        context = fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(), fp8_group=None)
    assert isinstance(context, autocast)
    with context:
        assert look() == (True, "delayed", DELAYED)
    with pytest.warns(DeprecationWarning):
        with fp8_model_init(enabled=False):
            pass
    sys.modules.pop("transformer_engine.pytorch.fp8", None)
    with pytest.warns(DeprecationWarning):
        legacy = importlib.import_module("transformer_engine.pytorch.fp8")
    for name in legacy.__all__:
        assert hasattr(legacy, name)
    assert legacy.FP8GlobalStateManager is FP8GlobalStateManager


# --- recipe states --------------------------------------------------------------------------------


def test_dtypes_of_a_recipe():
    hybrid, e4m3 = DelayedScaling(), DelayedScaling(fp8_format=Format.E4M3)
    assert get_fp8_torch_dtype(hybrid) == torch.float8_e4m3fn
    assert get_fp8_torch_dtype(hybrid, fprop_tensor=False) == torch.float8_e5m2
    assert get_fp8_te_dtype(e4m3, False) == DType.kFloat8E4M3 == 7
    assert (get_fp8_max(hybrid), get_fp8_max(hybrid, False), get_fp8_max(e4m3, False)) == (
        448,
        57344,
        448,
    )
    assert quantization.get_fp4_te_dtype(NVFP4BlockScaling()) == DType.kFloat4E2M1


def test_alignment():
    sizes = [
        get_align_size_for_quantization(recipe)
        for recipe in (
            DelayedScaling(),
            Float8CurrentScaling(),
            Float8BlockScaling(),
            MXFP8BlockScaling(),
            NVFP4BlockScaling(),
            CustomRecipe(lambda role: None, quantization_alignment=64),
        )
    ]
    assert sizes == [16, 16, 16, 32, 128, 64]


def test_recipe_states():
    state = RecipeState.create(DelayedScaling(amax_history_len=5), mode="forward", num_quantizers=3)
    assert isinstance(state, DelayedScalingRecipeState) and state.dtype == DType.kFloat8E4M3
    assert torch.equal(state.scale, torch.ones(3))
    assert torch.equal(state.amax_history, torch.zeros(5, 3))
    assert [state.quant(i) for i in range(3)] == ["delayed,e4m3"] * 3
    backward = RecipeState.create(Float8CurrentScaling(), mode="backward", num_quantizers=2)
    assert (
        isinstance(backward, Float8CurrentScalingRecipeState)
        and backward.dtype == DType.kFloat8E5M2
    )
    assert backward.quant(1) == "current,e5m2"
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_weight = QParams(power_2_scale=True)
    roles = [QuantizerRole("linear", "weight", "a"), None, QuantizerRole("linear", "other", "a")]
    mixed = RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=roles)
    assert [mixed._slot_tensor_type(i) for i in range(3)] == ["weight", "weight", "output"]
    power_of_two = "current,e4m3,pow2=1"
    assert [mixed.quant(i) for i in range(3)] == [power_of_two, power_of_two, "current,e4m3"]
    assert mixed._slot_role(1) is None


def test_recipe_state_errors():
    with pytest.raises(RuntimeError, match="row_scaled_activation=True .*disable_rht=True"):
        RecipeState.create(NVFP4BlockScaling(row_scaled_activation=True), mode="forward")
    with pytest.raises(ValueError, match="mode must be"):
        RecipeState.create(DelayedScaling(), mode="sideways")
    with pytest.raises(ValueError, match="one role per quantizer"):
        RecipeState.create(DelayedScaling(), mode="forward", num_quantizers=2, roles=[None])


def test_recipe_state_inherits():
    one, two = (
        RecipeState.create(DelayedScaling(amax_history_len=2), mode="forward") for _ in range(2)
    )
    one.scale.fill_(3.0)
    one.amax_history.fill_(4.0)
    assert two.inherit_state_from(one)
    assert two.scale.item() == 3.0 and two.amax_history.sum().item() == 8.0
    assert not two.inherit_state_from(RecipeState.create(DelayedScaling(), mode="forward"))
    assert not two.inherit_state_from(
        RecipeState.create(DelayedScaling(amax_history_len=2), mode="backward")
    )


def test_roles_and_requests_are_values():
    assert QuantizerRole("linear", "input", "a") == QuantizerRole("linear", "input", "a")
    assert str(QuantizerRole("linear", "input", "a")) == "linear:input:a"
    assert DelayedScalingRequest().amax_history_len == 1024
    assert (
        len({DelayedScalingRequest(), DelayedScalingRequest(), DelayedScalingRequest(margin=1)})
        == 2
    )


def test_buffer_keys():
    recipe = DelayedScaling()
    key = FP8GlobalStateManager.get_key_in_buffer(False, recipe, None)
    assert key == f"backward_recipe={recipe!r},group=None"
    assert FP8GlobalStateManager.split_key_in_buffer(key) == (
        False,
        FP8GlobalStateManager.get_unique_autocast_key(recipe, None),
    )
    assert FP8GlobalStateManager.get_meta_tensor_key() == "scaling_fwd"


def test_skip_weight_update_tensor():
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is None
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True)
    flag = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(False)
    assert flag is FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
    assert flag.dtype == torch.float32 and flag.shape == (1,) and flag.item() == 0.0


# --- inside of graphs -----------------------------------------------------------------------------


def compiled(function, dynamic=None):
    """`function` compiled into one graph; the number of graphs is then ``graphs()``."""
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)


def graphs():
    """How many graphs were made since `compiled`."""
    return counters["stats"]["unique_graphs"]


def scaled(x):
    """A tensor whose value tells which spec was active."""
    spec = STATE.spec
    factor = 1.0 + len(spec) + 100.0 * len(STATE.kind)
    if "e5m2" in spec:
        factor += 0.5
    return x * factor


@pytest.mark.parametrize("dynamic", [None, True])
def test_entered_inside_a_graph(dynamic):
    recipe = Float8CurrentScaling()

    def region(x, enabled=True):
        with autocast(enabled=enabled, recipe=recipe):
            y = scaled(x)
        return y + scaled(x)

    x = torch.ones(3)
    f = compiled(region, dynamic)
    for enabled in (True, False, True):
        assert torch.equal(f(x, enabled), region(x, enabled))
    assert graphs() == 2 and look() == OUTSIDE and STATE.autocast_depth == 0


def test_nested_inside_a_graph():
    recipe, other = Float8CurrentScaling(), DelayedScaling()

    def region(x):
        with autocast(recipe=recipe):
            a = scaled(x)
            with autocast(recipe=other):
                b = scaled(x)
                with autocast(enabled=False):
                    c = scaled(x)
                d = scaled(x)
            e = scaled(x)
        return torch.stack([a, b, c, d, e, scaled(x)])

    x = torch.ones(3)
    f = compiled(region)
    assert torch.equal(f(x), region(x)) and torch.equal(f(x), region(x))
    assert graphs() == 1 and look() == OUTSIDE


@pytest.mark.parametrize("dynamic", [None, True])
def test_opened_outside_of_the_graph(dynamic):
    def inner(x):
        y = scaled(x)
        with autocast(enabled=False):
            return y + scaled(x)

    x = torch.ones(3)
    f = compiled(inner, dynamic)
    for recipe in (Float8CurrentScaling(), DelayedScaling(), Float8CurrentScaling()):
        with autocast(recipe=recipe):
            assert torch.equal(f(x), inner(x))
            assert STATE.fp8_recipe is recipe and STATE.autocast_depth == 1
            # The depth is no constant of the graph that is made anew for each.
            with autocast(recipe=recipe):
                with autocast(recipe=recipe):
                    assert torch.equal(f(x), inner(x))
                    assert STATE.autocast_depth == 3
    assert torch.equal(f(x), inner(x))


def test_one_graph_for_each_recipe_value():
    def region(x, recipe):
        with autocast(recipe=recipe):
            return scaled(x)

    x = torch.ones(3)
    f = compiled(region)
    first = Float8CurrentScaling()
    for recipe in (first, copy.deepcopy(first), DelayedScaling(), first, DelayedScaling()):
        assert torch.equal(f(x, recipe), region(x, recipe))
    assert graphs() == 2
    for make in (MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling):
        before = graphs()
        for recipe in (make(), first, make(), make(backward_override="high_precision")):
            assert torch.equal(f(x, recipe), region(x, recipe))
        assert graphs() == before + 2


def test_custom_recipes_of_equal_factories_share_a_graph():
    def region(x, recipe):
        with autocast(recipe=recipe):
            return scaled(x) + len(STATE.kind)

    def one(role):
        return role

    def two(role):
        return role

    x, counts = torch.ones(3), []
    f = compiled(region)
    for factory in (one, one, two, one, two):
        recipe = CustomRecipe(factory)
        assert torch.equal(f(x, recipe), region(x, recipe))
        counts.append(graphs())
    assert counts == [1, 1, 2, 2, 2]


def test_a_changed_field_is_noticed():
    recipe = DelayedScaling()

    def region(x):
        with autocast(recipe=recipe):
            return scaled(x)

    x = torch.ones(3)
    f = compiled(region)
    before = f(x)
    recipe.fp8_format = Format.E4M3
    assert torch.equal(f(x), region(x)) and not torch.equal(f(x), before)
    recipe.fp8_format = Format.HYBRID
    assert torch.equal(f(x), before)
    assert graphs() == 2


def test_recipe_made_inside_the_graph():
    def region(x):
        with autocast(recipe=Float8CurrentScaling(use_power_2_scales=True)):
            a = scaled(x)
        with autocast():
            return a + scaled(x)

    x = torch.ones(3)
    assert torch.equal(compiled(region)(x), region(x))
    assert graphs() == 1


def test_one_instance_entered_twice_inside_a_graph():
    # Dynamo enters only those context managers that were made in the function it traces.
    recipe = Float8CurrentScaling()

    def region(x):
        context = autocast(recipe=recipe)
        with context:
            x = scaled(x)
        with context:
            return scaled(x)

    x = torch.ones(3)
    f = compiled(region)
    assert torch.equal(f(x), region(x)) and torch.equal(f(x), region(x))
    assert graphs() == 1


def test_deprecated_name_inside_a_graph():
    def region(x):
        with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
            return scaled(x)

    x = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = region(x)
    assert torch.equal(compiled(region)(x), expected)


def test_errors_inside_a_graph_say_the_reason():
    def region(x):
        with autocast(recipe=NVFP4BlockScaling(nvfp4_4over6="all")):
            return scaled(x)

    f = compiled(region)
    with pytest.raises(Exception, match="nvfp4_4over6='all' .*disable_rht=True"):
        f(torch.ones(3))
    assert look() == OUTSIDE and STATE.autocast_depth == 0


def test_functions_of_the_user_cannot_be_compiled():
    recipe = DelayedScaling(amax_compute_algo=lambda history: history.amax(0))

    def region(x):
        with autocast(recipe=recipe):
            return scaled(x)

    assert torch.equal(region(torch.ones(3)), torch.ones(3) * (1.5 + len(DELAYED) + 700))
    with pytest.raises(Exception, match="cannot be compiled"):
        compiled(region)(torch.ones(3))


def test_gradients_through_a_region():
    def region(x):
        with autocast(recipe=Float8CurrentScaling()):
            return scaled(x).square().sum()

    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    compiled(region)(x).backward()
    region(y).backward()
    assert torch.equal(x.grad, y.grad) and graphs() == 1


def test_availability_inside_a_graph():
    def ask(x):
        if quantization.is_fp8_available():
            return x + 1
        reason = quantization.is_fp8_available(return_reason=True)[1]
        return x + len(reason) + utils.get_device_compute_capability()[0]

    x = torch.ones(3)
    assert torch.equal(compiled(ask)(x), ask(x))


def test_every_recipe_class_is_a_recipe():
    assert all(issubclass(c, Recipe) for c in (DelayedScaling, NVFP4BlockScaling, CustomRecipe))


@pytest.mark.parametrize(
    "make, argument, keyword",
    [
        (lambda r: autocast(r), "enabled", "autocast"),  # pylint: disable=unnecessary-lambda
        (lambda r: autocast(True, r), "calibrating", "autocast"),
        (lambda r: autocast(True, False, None, r), "amax_reduction_group", "autocast"),
        (lambda r: fp8_autocast(True, r), "calibrating", "autocast"),
        (quantized_model_init, "enabled", "quantized_model_init"),
        (
            lambda r: quantized_model_init(True, None, r),
            "preserve_high_precision_init_val",
            "quantized_model_init",
        ),
        (fp8_model_init, "enabled", "quantized_model_init"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_recipe_in_the_place_of_another_argument_is_refused(make, argument, keyword):
    for recipe in (DelayedScaling(), MXFP8BlockScaling()):
        match = rf"`{argument}` of te.{keyword} got .*te.{keyword}\(recipe={type(recipe).__name__}"
        with pytest.raises(TypeError, match=match):
            make(recipe)
