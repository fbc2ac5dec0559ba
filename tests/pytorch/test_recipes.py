# SPDX-License-Identifier: Apache-2.0
"""Recipes: defaults, checks, coercion, equality, environment, and that Dynamo can make them."""

import copy
import dataclasses
import pickle
import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)
from transformer_engine.pytorch.formats.spec import decode_quant


def factory(role):
    """A quantizer factory that no test calls."""
    return role


ALL = (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Float8BlockScaling,
    NVFP4BlockScaling,
    lambda **kw: CustomRecipe(factory, **kw),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """Defaults must be those of a clean environment."""
    for name in (
        "NVTE_BACKWARD_OVERRIDE",
        "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        "NVTE_NVFP4_DISABLE_RHT",
        "NVTE_NVFP4_4OVER6",
        "NVTE_NVFP4_4OVER6_ERR_MODE",
    ):
        monkeypatch.delenv(name, raising=False)


def fields_of(recipe):
    """Field values by name."""
    return {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}


def test_defaults():
    assert fields_of(DelayedScaling()) == {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    }
    current = Float8CurrentScaling()
    assert (current.use_power_2_scales, current.fp8_format) == (False, Format.HYBRID)
    assert current.fp8_gemm_fprop == MMParams(use_split_accumulator=False)
    assert current.fp8_gemm_dgrad == current.fp8_gemm_wgrad == MMParams(use_split_accumulator=True)
    assert current.fp8_quant_fwd_inp == current.fp8_quant_bwd_grad == QParams()
    mxfp8 = MXFP8BlockScaling()
    assert (mxfp8.margin, mxfp8.fp8_format, mxfp8.enable_2d_quantization) == (0, Format.E4M3, False)
    block = Float8BlockScaling()
    assert (block.x_block_scaling_dim, block.w_block_scaling_dim) == (1, 2)
    assert block.grad_block_scaling_dim == 1 and block.fp8_format == Format.E4M3
    assert block.fp8_quant_fwd_weight == QParams(power_2_scale=True)
    nvfp4 = NVFP4BlockScaling()
    assert (nvfp4.nvfp4_4over6, nvfp4.nvfp4_4over6_e4m3_use_256) == ("none", "all")
    assert nvfp4.nvfp4_4over6_err_mode == "MAE"
    assert nvfp4.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert nvfp4.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert nvfp4.fp4_quant_bwd_grad == QParams(
        random_hadamard_transform=True, stochastic_rounding=True
    )
    assert CustomRecipe(factory).quantization_alignment == 128


def test_format_values():
    largest = {f.name: (f.value.max_fwd, f.value.max_bwd) for f in Format}
    assert largest == {
        "E2M1": (6, 6),
        "E4M3": (448, 448),
        "E5M2": (57344, 57344),
        "HYBRID": (448, 57344),
    }


@pytest.mark.parametrize(
    "make, delayed, current, per_tensor, mxfp8, block, nvfp4, custom",
    [
        (ALL[0], True, False, True, False, False, False, False),
        (ALL[1], False, True, True, False, False, False, False),
        (ALL[2], False, False, False, True, False, False, False),
        (ALL[3], False, False, False, False, True, False, False),
        (ALL[4], False, False, False, False, False, True, False),
        (ALL[5], False, False, False, False, False, False, True),
    ],
)
def test_predicates(make, delayed, current, per_tensor, mxfp8, block, nvfp4, custom):
    recipe = make()
    for kind in (recipe, type(recipe)):
        assert kind.delayed() == delayed
        assert kind.float8_current_scaling() == current
        assert kind.float8_per_tensor_scaling() == per_tensor
        assert kind.mxfp8() == mxfp8
        assert kind.float8_block_scaling() == block
        assert kind.nvfp4() == nvfp4
        assert kind.custom() == custom


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: DelayedScaling(fp8_format=Format.E5M2), "E5M2"),
        (lambda: DelayedScaling(backward_override="dequantized"), "must be None"),
        (lambda: DelayedScaling(amax_compute_algo="median"), "amax_compute_algo"),
        (lambda: DelayedScaling(margin=2.5), "margin must be an integer"),
        (lambda: DelayedScaling(amax_history_len=0), "at least 1"),
        (lambda: DelayedScaling(reduce_amax="perhaps"), "reduce_amax"),
        (lambda: DelayedScaling(fp8_format="HYBRID"), "must be a Format"),
        (lambda: DelayedScaling(scaling_factor_compute_algo=3), "scaling_factor_compute_algo"),
        (lambda: Float8CurrentScaling(fp8_format=Format.E5M2), "E5M2"),
        (lambda: Float8CurrentScaling(backward_override="bf16"), "backward_override"),
        (lambda: Float8CurrentScaling(fp8_gemm_fprop=True), "must be a MMParams"),
        (lambda: MXFP8BlockScaling(fp8_format=Format.E5M2), "E5M2"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), "at most one"),
        (lambda: Float8BlockScaling(grad_block_scaling_dim=2), "at most one"),
        (
            lambda: Float8BlockScaling(
                x_block_scaling_dim=2, grad_block_scaling_dim=2, w_block_scaling_dim=1
            ),
            "at most one",
        ),
        (lambda: Float8BlockScaling(w_block_scaling_dim=3), "w_block_scaling_dim"),
        (lambda: Float8BlockScaling(fp8_gemm_wgrad=MMParams(False)), "fp8_gemm_wgrad"),
        (lambda: Float8BlockScaling(fp8_dpa=True), "fp8_dpa"),
        (lambda: NVFP4BlockScaling(fp8_format=Format.HYBRID), "fp8_format"),
        (lambda: NVFP4BlockScaling(fp4_format=Format.E4M3), "fp4_format"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="some"), "nvfp4_4over6"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6_err_mode="MAX"), "err_mode"),
        (
            lambda: CustomRecipe(factory, quantization_alignment=0),
            "quantization_alignment must be positive",
        ),
        (lambda: CustomRecipe(3), "qfactory"),
        (lambda: MMParams(use_split_accumulator=1), "True or False"),
    ],
)
def test_what_does_not_fit_is_a_value_error(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_custom_recipe_needs_a_factory():
    with pytest.raises(TypeError):
        CustomRecipe()  # pylint: disable=no-value-for-parameter


@pytest.mark.parametrize("make", ALL)
def test_what_frameworks_pass_is_ignored(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe = make(
            override_linear_precision=(False, False, False), interval=1, params_dtype=None
        )
    assert recipe == make()
    assert not hasattr(recipe, "interval")


@pytest.mark.parametrize("make", ALL)
def test_unknown_keywords_are_named(make):
    """Code for other versions keeps working, but a wrong name does not go unnoticed."""
    name = type(make()).__name__
    meant = {
        "backwards_override": "Did you mean 'backward_override'?",
        "zzz": "Its arguments are .*fp8_format",
        "override_linear_precision": "Its arguments are ",
    }
    for word, text in meant.items():
        match = f"^{name} has no argument '{word}': it is ignored. {text}"
        with pytest.warns(UserWarning, match=match) as caught:
            assert make(**{word: (False, False, True)}) == make()
        assert len(caught) == 1 and caught[0].filename == __file__


def test_unknown_keywords_suggest_the_field():
    with pytest.warns(UserWarning, match="'amax_history_length'.* mean 'amax_history_len'"):
        DelayedScaling(amax_history_length=16)
    with pytest.warns(UserWarning, match="Assign the attribute 'fp8_quant_fwd_inp'"):
        assert Float8CurrentScaling(fp8_quant_fwd_inp=QParams(True)) == Float8CurrentScaling()


def test_positional_arguments_and_coercion():
    assert DelayedScaling(2, Format.E4M3, 16) == DelayedScaling(
        margin="2", fp8_format=Format.E4M3, amax_history_len=16.0
    )
    assert DelayedScaling(reduce_amax=0).reduce_amax is False
    assert Float8CurrentScaling("true").use_power_2_scales is True


@pytest.mark.parametrize("make", ALL)
def test_equality_copies_and_pickles(make):
    recipe = make()
    assert recipe == make() and recipe is not make()
    assert (
        copy.copy(recipe) == copy.deepcopy(recipe) == pickle.loads(pickle.dumps(recipe)) == recipe
    )
    changed = copy.deepcopy(recipe)
    changed.fp8_dpa = True
    assert changed != recipe
    assert changed != object()
    with pytest.raises(TypeError):
        hash(recipe)


def test_different_classes_are_not_equal():
    class Mine(DelayedScaling):
        """A subclass."""

    assert Mine() != DelayedScaling()
    assert Mine() == Mine()


def test_assigned_quantization_parameters_count_in_equality():
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_bwd_grad = QParams(power_2_scale=True)
    assert recipe != Float8CurrentScaling()


def test_repr_follows_assignment():
    recipe = DelayedScaling()
    recipe.margin = 7
    recipe.fp8_format = Format.E4M3
    assert "margin=7" in repr(recipe) and "fp8_format=E4M3" in repr(recipe)
    assert recipe._spec.startswith("x=delayed,e4m3;")
    recipe.reduce_amax, recipe.amax_history_len = 0, "16"
    assert recipe == DelayedScaling(7, Format.E4M3, 16, reduce_amax=False)


WRONG = (
    (0, "margin", 2.5, "margin must be an integer"),
    (0, "fp8_format", "HYBRID", "fp8_format must be a Format"),
    (0, "fp8_format", Format.E5M2, "must not be Format.E5M2"),
    (0, "amax_history_len", 0, "amax_history_len must be at least 1"),
    (0, "amax_compute_algo", "median", "amax_compute_algo must be one of"),
    (0, "scaling_factor_compute_algo", 3, "scaling_factor_compute_algo must be None or"),
    (0, "backward_override", "high_precision", "must be None for DelayedScaling"),
    (1, "backward_override", "hp", "backward_override must be one of"),
    (1, "fp8_gemm_wgrad", True, "fp8_gemm_wgrad must be a MMParams"),
    (1, "fp8_quant_fwd_inp", True, "fp8_quant_fwd_inp must be a QParams"),
    (2, "fp8_format", "E4M3", "fp8_format must be a Format"),
    (2, "enable_2d_quantization", "perhaps", "enable_2d_quantization must be True or False"),
    (3, "x_block_scaling_dim", 2, "at most one"),
    (3, "fp8_quant_bwd_grad", None, "fp8_quant_bwd_grad must be a QParams"),
    (3, "fp8_gemm_fprop", MMParams(False), "fp8_gemm_fprop must be"),
    (4, "nvfp4_4over6", "some", "nvfp4_4over6 must be one of"),
    (4, "fp4_quant_fwd_weight", {}, "fp4_quant_fwd_weight must be a QParams"),
    (5, "qfactory", None, "qfactory must be a function"),
    (5, "quantization_alignment", 0, "quantization_alignment must be positive"),
)


@pytest.mark.parametrize("number, name, value, text", WRONG)
def test_contexts_refuse_what_was_assigned(number, name, value, text):
    """With the words of the constructor, also after a copy; a good value repairs it."""
    recipe = ALL[number]()
    good, kind = getattr(recipe, name), type(recipe).__name__
    before = recipe._spec, recipe._update_rule
    setattr(recipe, name, value)
    assert getattr(recipe, name) is value
    match = f"{kind} was changed to what it can not be: .*{text}"
    for wrong in (recipe, copy.copy(recipe), copy.deepcopy(recipe)):
        for context in (
            te.autocast(recipe=wrong),
            te.autocast(False, True, wrong),
            te.quantized_model_init(recipe=wrong),
        ):
            with pytest.raises(ValueError, match=match):
                with context:
                    pass
    setattr(recipe, name, good)
    assert recipe == ALL[number]() and (recipe._spec, recipe._update_rule) == before
    with te.autocast(recipe=recipe):
        pass


def test_fields_may_be_assigned_one_after_the_other():
    recipe = Float8BlockScaling()
    recipe.x_block_scaling_dim = 2  # does not fit w_block_scaling_dim
    recipe.w_block_scaling_dim = 1
    expected = Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    assert recipe == expected and recipe._spec == expected._spec
    with te.autocast(recipe=recipe):
        pass


def test_assignment_is_checked_in_subclasses():
    class FromConfig(DelayedScaling):
        """Its constructor takes other arguments than the fields."""

        def __init__(self, config):
            super().__init__(margin=config)
            self.config = config

    recipe = FromConfig(2)
    # pylint: disable=attribute-defined-outside-init
    recipe.amax_history_len = 4
    with te.autocast(recipe=recipe):
        pass
    recipe.amax_history_len = -1
    with pytest.raises(ValueError, match="FromConfig was changed .* at least 1, not -1"):
        with te.autocast(recipe=recipe):
            pass


NO_TRANSFORM = {"fp4_quant_fwd_inp": QParams(), "fp4_quant_bwd_grad": QParams()}


@pytest.mark.parametrize(
    "field, value",
    (("nvfp4_4over6", "all"), ("nvfp4_4over6", "activations"), ("row_scaled_activation", True)),
)
def test_nvfp4_fields_that_the_transform_excludes(field, value):
    """They are named, with both cures; made or assigned, in either way."""
    made, assigned = NVFP4BlockScaling(**{field: value}), NVFP4BlockScaling()
    setattr(assigned, field, value)
    match = f"{field}={value!r} cannot be combined with random_hadamard_transform.*disable_rht=True"
    for recipe in (made, assigned):
        for context in (te.autocast(recipe=recipe), te.quantized_model_init(recipe=recipe)):
            with pytest.raises(RuntimeError, match=match):
                with context:
                    pass
        for name, params in NO_TRANSFORM.items():
            setattr(recipe, name, params)
        with te.autocast(recipe=recipe):
            pass
    with te.autocast(recipe=NVFP4BlockScaling(disable_rht=True, **{field: value})):
        pass


@pytest.mark.parametrize(
    "field, value, name, option",
    (
        ("nvfp4_4over6", "weights", "fp4_quant_fwd_weight", "stochastic_rounding"),
        ("nvfp4_4over6", "all", "fp4_quant_fwd_inp", "stochastic_rounding"),
        ("row_scaled_activation", True, "fp4_quant_fwd_inp", "fp4_2d_quantization"),
    ),
)
def test_nvfp4_fields_that_assigned_parameters_exclude(field, value, name, option):
    recipe = NVFP4BlockScaling(disable_rht=True, **{field: value})
    setattr(recipe, name, QParams(**{option: True}))
    match = f"{field}={value!r} cannot be combined with {option} .*Assign {name} a QParams without"
    with pytest.raises(RuntimeError, match=match):
        with te.autocast(recipe=recipe):
            pass


def test_replace():
    assert dataclasses.replace(DelayedScaling(margin=1), amax_history_len=2) == DelayedScaling(
        1, amax_history_len=2
    )


def test_subclass_with_its_own_constructor():
    class FromConfig(DelayedScaling):
        """As Megatron does: attributes before the base constructor, unknown keywords."""

        def __init__(self, config, **extra):
            self.config = config
            super().__init__(margin=config, override_linear_precision=(False,), **extra)

    recipe = FromConfig(3, reduce_amax=False)
    assert (recipe.config, recipe.margin, recipe.reduce_amax) == (3, 3, False)
    assert FromConfig.delayed()
    assert recipe._update_rule == "1024,max,3,448,57344,0"


def test_class_names_in_pickles_are_the_public_ones():
    for name in recipes.__all__:
        assert getattr(recipes, name).__module__ == "transformer_engine.common.recipe"


# --- the strings that modules compute by ----------------------------------------------------------


@pytest.mark.parametrize(
    "recipe, spec",
    [
        (
            Float8CurrentScaling(),
            "x=current,e4m3;w=current,e4m3;g=current,e5m2;acc=0,1,1",
        ),
        (
            Float8CurrentScaling(use_power_2_scales=True, fp8_format=Format.E4M3),
            "x=current,e4m3,pow2=1;w=current,e4m3,pow2=1;g=current,e4m3,pow2=1;acc=0,1,1",
        ),
        (
            Float8CurrentScaling(
                fp8_gemm_fprop=MMParams(True),
                fp8_gemm_wgrad=MMParams(False),
                backward_override="dequantized",
            ),
            "x=current,e4m3;w=current,e4m3;g=current,e5m2;acc=1,1,0;bwd=dequantized",
        ),
        (
            DelayedScaling(),
            "x=delayed,e4m3;w=delayed,e4m3;g=delayed,e5m2;acc=0,1,1",
        ),
        (
            Float8BlockScaling(),
            "x=block,e4m3,pow2=1;w=block,e4m3,pow2=1,dim=2;g=block,e4m3,pow2=1;acc=1,1,1",
        ),
        (
            Float8BlockScaling(
                use_f32_scales=True,
                fp8_format=Format.HYBRID,
                w_block_scaling_dim=1,
                grad_block_scaling_dim=2,
                backward_override="high_precision",
            ),
            "x=block,e4m3;w=block,e4m3;g=block,e5m2,dim=2;acc=1,1,1;bwd=high_precision",
        ),
        (
            MXFP8BlockScaling(),
            "x=mxfp8,e4m3,swizzled=1;w=mxfp8,e4m3,swizzled=1;g=mxfp8,e4m3,swizzled=1;acc=0,1,1",
        ),
        (
            MXFP8BlockScaling(
                fp8_format=Format.HYBRID,
                enable_2d_quantization=True,
                backward_override="dequantized",
            ),
            "x=mxfp8,e4m3,swizzled=1;w=mxfp8,e4m3,dim=2,swizzled=1;g=mxfp8,e5m2,swizzled=1"
            ";acc=0,1,1;bwd=dequantized",
        ),
        (
            NVFP4BlockScaling(),
            "x=nvfp4,e2m1,swizzled=1,rht=1;w=nvfp4,e2m1,dim=2,swizzled=1"
            ";g=nvfp4,e2m1,swizzled=1,rht=1,stochastic=1;acc=0,1,1",
        ),
        (
            NVFP4BlockScaling(
                disable_rht=True,
                disable_stochastic_rounding=True,
                disable_2d_quantization=True,
                row_scaled_activation=True,
            ),
            "x=nvfp4,e2m1,swizzled=1,row_scaled=1;w=nvfp4,e2m1,swizzled=1"
            ";g=nvfp4,e2m1,swizzled=1;acc=0,1,1",
        ),
        (
            NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
            "x=nvfp4,e2m1,swizzled=1,four_over_six=mse,e4m3_max=256"
            ";w=nvfp4,e2m1,dim=2,swizzled=1,four_over_six=mse,e4m3_max=256"
            ";g=nvfp4,e2m1,swizzled=1,stochastic=1;acc=0,1,1",
        ),
        (
            NVFP4BlockScaling(nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="activations"),
            "x=nvfp4,e2m1,swizzled=1,rht=1;w=nvfp4,e2m1,dim=2,swizzled=1,four_over_six=mae"
            ";g=nvfp4,e2m1,swizzled=1,rht=1,stochastic=1;acc=0,1,1",
        ),
    ],
)
def test_spec(recipe, spec):
    assert recipe._spec == spec
    for part in filter(None, spec.split(";")):
        key, _, value = part.partition("=")
        if key in ("x", "w", "g"):
            assert decode_quant(value).encode() == value


def test_spec_follows_assignment():
    recipe = Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = QParams(amax_epsilon=0.25)
    assert recipe._spec.startswith("x=current,e4m3,eps=0.25;w=current,e4m3;")
    recipe.backward_override = "high_precision"
    assert recipe._spec.endswith(";bwd=high_precision")
    block = Float8BlockScaling()
    block.fp8_quant_bwd_grad = QParams(amax_epsilon=0.5)
    assert ";g=block,e4m3,eps=0.5;" in block._spec
    nvfp4 = NVFP4BlockScaling()
    nvfp4.fp4_quant_fwd_inp = QParams()
    assert nvfp4._spec.startswith("x=nvfp4,e2m1,swizzled=1;")


def test_spec_of_custom_recipes():
    """Equal ones share a number; any field that decides results makes another."""

    def other(role):
        return role

    recipe = CustomRecipe(factory)
    assert recipe._spec == CustomRecipe(factory, quantization_alignment=64)._spec
    numbers = {
        recipe._spec,
        CustomRecipe(other)._spec,
        CustomRecipe(factory, backward_override="dequantized")._spec,
        CustomRecipe(factory, fp8_format=Format.E4M3)._spec,
    }
    assert len(numbers) == 4 and all(number.startswith("custom:") for number in numbers)
    before = recipe._spec
    recipe.qfactory = other
    assert recipe._spec == CustomRecipe(other)._spec != before


def test_update_rule_says_when_python_functions_are_needed():
    assert (
        DelayedScaling(amax_compute_algo="most_recent")._update_rule
        == "1024,most_recent,0,448,57344,1"
    )
    assert ",python," in DelayedScaling(amax_compute_algo=torch.amax)._update_rule
    assert ",python," in DelayedScaling(scaling_factor_compute_algo=torch.amax)._update_rule


def test_scale_flags_take_effect():
    assert Float8CurrentScaling(use_power_2_scales=True).fp8_quant_fwd_weight.power_2_scale
    assert not Float8BlockScaling(use_f32_scales=True).fp8_quant_fwd_weight.power_2_scale
    off = NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    )
    assert off.fp4_quant_fwd_inp == off.fp4_quant_fwd_weight == off.fp4_quant_bwd_grad == QParams()


# --- environment ----------------------------------------------------------------------------------


def test_environment_is_read_when_a_recipe_is_made(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "1")
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "weights")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_MODE", "mse")
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    current = Float8CurrentScaling()
    assert current.fp8_quant_fwd_inp.power_2_scale and current.backward_override == "high_precision"
    assert Float8CurrentScaling(backward_override=None).backward_override is None
    assert not Float8CurrentScaling(use_power_2_scales=False).use_power_2_scales
    assert not Float8BlockScaling().fp8_quant_fwd_inp.power_2_scale
    nvfp4 = NVFP4BlockScaling()
    assert nvfp4.disable_rht and nvfp4.nvfp4_4over6 == "weights"
    assert nvfp4.nvfp4_4over6_err_mode == "MSE"


def test_delayed_scaling_says_that_it_ignores_the_backward_override(monkeypatch):
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "dequantized")
    with pytest.warns(UserWarning, match="NVTE_BACKWARD_OVERRIDE"):
        assert DelayedScaling().backward_override is None


def test_a_wrong_flag_is_named(monkeypatch):
    monkeypatch.setenv("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "yes")
    with pytest.raises(ValueError, match="NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"):
        Float8CurrentScaling()


# --- Dynamo ---------------------------------------------------------------------------------------


def test_recipes_are_made_and_changed_in_a_graph():
    def make(x):
        current = Float8CurrentScaling(use_power_2_scales=True)
        current.fp8_quant_fwd_inp = QParams(amax_epsilon=0.5)
        delayed = DelayedScaling(margin=1, amax_history_len=2)
        delayed.fp8_format = Format.E4M3
        others = (
            MXFP8BlockScaling(),
            Float8BlockScaling(),
            NVFP4BlockScaling(),
            CustomRecipe(factory),
        )
        strings = [r._spec + r._update_rule for r in (current, delayed, *others)]
        return x + 1, strings, delayed.delayed(), current.float8_per_tensor_scaling()

    torch._dynamo.reset()
    expected = make(torch.ones(2))
    result = torch.compile(make, backend="eager", fullgraph=True)(torch.ones(2))
    assert result[1:] == expected[1:]


def test_wrong_assignments_are_refused_in_a_graph():
    recipe = Float8CurrentScaling()

    def region(x):
        with te.autocast(recipe=recipe):
            return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(region, backend="eager", fullgraph=True)
    compiled(torch.ones(2))
    recipe.backward_override = "hp"
    with pytest.raises(Exception, match="backward_override must be one of"):
        compiled(torch.ones(2))
    recipe.backward_override = "dequantized"
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_unknown_keywords_are_named_at_trace_time():
    def make(x):
        return x + DelayedScaling(margin=1, amax_history_length=16).margin

    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="'amax_history_length'.* mean 'amax_history_len'"):
        y = torch.compile(make, backend="eager", fullgraph=True)(torch.ones(2))
    assert torch.equal(y, torch.full((2,), 2.0))


def test_constant_mark_is_the_one_dynamo_sets():
    def sample():
        return True

    torch._dynamo.assume_constant_result(sample)
    assert vars(sample) == vars(recipes._base.environment.flag)
