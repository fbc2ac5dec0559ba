# SPDX-License-Identifier: Apache-2.0
"""What modules return, their attributes before and after running, and options of norms."""

import warnings

import pytest
import torch
from eager_support import GEMM_MODULES, MODULES, NORMS, construct

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("return_layernorm_output", [False, True])
def test_return_tuples(kind, return_bias, return_layernorm_output, device):
    """``out``, ``(out, bias)``, ``(out, ln_out)`` or ``(out, bias, ln_out)``."""
    module = construct(
        kind,
        device,
        return_bias=return_bias,
        return_layernorm_output=return_layernorm_output,
    )
    x = torch.randn(3, 5, 32, device=device)
    result = module(x)
    if not (return_bias or return_layernorm_output):
        assert isinstance(result, torch.Tensor)
        return
    assert type(result) is tuple  # pylint: disable=unidiomatic-typecheck
    assert len(result) == 1 + return_bias + return_layernorm_output
    assert result[0].shape == (3, 5, 48 if kind == "LayerNormLinear" else 32)
    if return_bias:
        name = "bias" if kind == "LayerNormLinear" else "fc2_bias"
        assert result[1] is getattr(module, name)
    if return_layernorm_output:
        expected = torch.nn.functional.layer_norm(x, (32,))
        torch.testing.assert_close(result[-1], expected)


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_returned_bias_is_not_added(kind, device):
    """The sum of both results is that without ``return_bias``; the bias gets its gradient."""
    torch.manual_seed(0)
    module = construct(kind, device)
    with torch.no_grad():
        for param in module.parameters():
            param.normal_()
    apart = construct(kind, device, return_bias=True)
    apart.load_state_dict(module.state_dict())
    x = torch.randn(4, 32, device=device)
    out, bias = apart(x)
    torch.testing.assert_close(out + bias, module(x))
    (out + bias).sum().backward()
    assert (bias.grad == 4.0).all()


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_returned_bias_without_bias(kind):
    """None, except for LayerNormLinear, which returns an empty tensor (as the reference does)."""
    _, bias = construct(kind, bias=False, return_bias=True)(torch.randn(4, 32))
    if kind == "LayerNormLinear":
        assert isinstance(bias, torch.Tensor) and bias.numel() == 0
    else:
        assert bias is None


def test_gathered_flag_is_kept_as_given():
    """LayerNormLinear masks it with ``return_layernorm_output``; LayerNormMLP does not."""
    options = {"return_layernorm_output_gathered": True}
    assert construct("LayerNormLinear", **options).return_layernorm_output_gathered is False
    assert construct("LayerNormMLP", **options).return_layernorm_output_gathered is True


@pytest.mark.parametrize("kind", ["LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), NVFP4BlockScaling()])
def test_gathered_output_of_one_rank(kind, recipe, device):
    """Where there is nothing to gather it is the norm output: values, shape, gradient."""
    torch.manual_seed(0)
    plain = construct(kind, device, return_layernorm_output=True)
    gathering = construct(
        kind, device, return_layernorm_output=True, return_layernorm_output_gathered=True
    )
    gathering.load_state_dict(plain.state_dict())
    x = torch.randn(8, 4, 32, device=device)

    def run(call):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out, norm_output = call(leaf)
        (out.sum() + norm_output.square().sum()).backward()
        return out.detach(), norm_output.detach(), leaf.grad

    expected = run(plain)
    assert expected[1].shape == x.shape
    compiled = torch.compile(gathering, backend="aot_eager", fullgraph=True)
    for call in (gathering, compiled):
        for got, wanted in zip(run(call), expected):
            assert torch.equal(got, wanted)


# --- attributes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_attributes_before_the_first_forward(kind):
    """What frameworks read off a fresh module."""
    module = construct(kind, name="block.7")
    assert module.name == "block.7"
    assert module.fp8_initialized is False and module.fp8 is False
    assert module.fp8_calibration is False and module.fp8_meta_tensors_initialized is False
    assert module.fp8_meta == {"fp8_checkpoint": False, "fp8_group": None}
    assert module.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    assert module.tp_group is None and module.tp_size == 1
    assert module.primary_weights_in_fp8 is False and module.activation_dtype is None
    assert module.preserve_high_precision_init_val is False
    assert module.fsdp_wrapped is False and module.fsdp_group is None
    assert module.wgrad_accumulation_and_reduce_hooks == []
    assert module.output_quantizer_role is None and module.grad_input_quantizer_role is None
    assert module.fuse_wgrad_accumulation is False and module.ub_name is None
    assert module.symmetric_ar_type is None and module.get_rng_state_tracker is None


OPTIONS = {
    **dict.fromkeys(("use_bias", "apply_bias"), True),
    **dict.fromkeys(("return_bias", "gemm_bias_unfused_add", "delay_wgrad_compute"), False),
    **dict.fromkeys(("ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_ag_dgrad"), False),
    **dict.fromkeys(("ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"), False),
    "parallel_mode": None,
}
NORM_OPTIONS = {
    **{"eps": 1e-5, "normalization": "LayerNorm", "zero_centered_gamma": False},
    **dict.fromkeys(("return_layernorm_output", "return_layernorm_output_gathered"), False),
    **dict.fromkeys(("fwd_ln_sm_margin", "bwd_ln_sm_margin", "inf_ln_sm_margin"), 0),
}
SINGLE = {"in_features": 32, "out_features": 48, "parameter_split_sizes": [48]}
OWN_OPTIONS = {
    "Linear": {**SINGLE, "rng_tracker_name": None, "save_original_input": False},
    "LayerNormLinear": {**SINGLE, **NORM_OPTIONS},
    "LayerNormMLP": {
        **NORM_OPTIONS,
        **{"activation": "gelu", "activation_params": None, "bias_gelu_nvfusion": True},
        **{"gemm_gelu_fusion": False, "set_parallel_mode": False, "checkpoint": False},
        **{"size_per_partition": 64, "hidden_size": 32},
    },
}


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_options_are_attributes(kind):
    """Frameworks read the constructor's options back."""
    module, expected = construct(kind), {**OPTIONS, **OWN_OPTIONS[kind]}
    assert {name: getattr(module, name) for name in expected} == expected


def test_effective_sizes_are_those_of_one_rank():
    """Megatron multiplies ``out_features`` by ``tp_size``."""
    column = construct("Linear", parallel_mode="column", tp_size=2)
    row = construct("Linear", parallel_mode="row", tp_size=2)
    assert (column.in_features, column.out_features) == (32, 24)
    assert (row.in_features, row.out_features) == (16, 48)
    assert row.gemm_bias_unfused_add and not column.gemm_bias_unfused_add
    mlp = construct("LayerNormMLP", tp_size=2, set_parallel_mode=True)
    assert mlp.size_per_partition == 32 and mlp.gemm_bias_unfused_add


def test_names_are_counted():
    """Modules without a name get consecutive numbers."""
    names = [construct("Linear").name for _ in range(2)]
    first, second = (int(name.removeprefix("Layer_")) for name in names)
    assert second == first + 1
    construct("Linear", name="own")
    assert construct("Linear").name == f"Layer_{second + 1}"


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_attributes_after_a_delayed_scaling_forward(kind, device):
    """``fp8_meta`` shows the recipe and the live scales and histories, one slot per quantizer."""
    module = construct(kind, device)
    recipe = DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=recipe):
        module(torch.ones(16, 32, device=device))
    gemms = 2 if kind == "LayerNormMLP" else 1
    assert module.fp8_initialized and module.fp8_meta_tensors_initialized and module.fp8
    meta = module.fp8_meta
    assert meta["recipe"] is recipe and meta["num_gemms"] == gemms
    assert meta["fp8_max_fwd"] == 448 and meta["fp8_max_bwd"] == 57344
    assert meta["scaling_fwd"].scale.shape == (3 * gemms,)
    assert meta["scaling_fwd"].amax_history.shape == (4, 3 * gemms)
    assert meta["scaling_bwd"].scale.shape == (2 * gemms,)
    weight = module.fc1_weight if kind == "LayerNormMLP" else module.weight
    amax = weight.detach().abs().max().float()
    assert meta["scaling_fwd"].scale[1].item() == (torch.tensor(448.0) / amax.cpu()).item()
    assert meta["scaling_fwd"].amax_history[-1, 1].item() == amax.item()
    module.fp8_meta["scaling_fwd"].scale.fill_(0.5)
    assert (module.fp8_meta["scaling_fwd"].scale == 0.5).all()


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", [Float8CurrentScaling, DelayedScaling])
def test_quantizers_after_a_forward(kind, recipe, device):
    """Three forward and two backward quantizers per GEMM."""
    module = construct(kind, device)
    with te.autocast(recipe=recipe()):
        module(torch.ones(16, 32, device=device))
    gemms = 2 if kind == "LayerNormMLP" else 1
    quantizers = module.quantizers
    assert len(quantizers["scaling_fwd"]) == 3 * gemms
    assert len(quantizers["scaling_bwd"]) == 2 * gemms
    quantized = quantizers["scaling_fwd"][0](torch.randn(16, 32, device=device))
    assert quantized.dequantize().shape == (16, 32)


def test_fp8_is_off_after_a_plain_forward():
    """``fp8`` follows the last forward."""
    module = construct("Linear")
    with te.autocast(recipe=Float8CurrentScaling()):
        module(torch.ones(16, 32))
    assert module.fp8 and module.fp8_initialized
    module(torch.ones(16, 32))
    assert not module.fp8


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_recipe_change_warns_once(kind):
    """A change of class is announced once; a new object of the same class is not."""
    module, x = construct(kind), torch.ones(16, 32)

    def step(recipe):
        with te.autocast(recipe=recipe):
            module(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(DelayedScaling())
        step(DelayedScaling(margin=1))
    with pytest.warns(UserWarning, match="Recipe type changed") as caught:
        step(Float8CurrentScaling())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(Float8CurrentScaling())
        module(x)
        step(Float8CurrentScaling())


def test_recipe_change_keeps_scales():
    """A later return to delayed scaling finds the scales that it left."""
    module = construct("Linear")
    with te.autocast(recipe=DelayedScaling()):
        module(torch.full((16, 32), 8.0))
    assert module.fp8_meta["scaling_fwd"].scale[0] == 56.0
    for recipe in (Float8CurrentScaling(), DelayedScaling()):
        with pytest.warns(UserWarning, match="Recipe type changed"):
            with te.autocast(recipe=recipe), torch.no_grad():
                module(torch.full((16, 32), 8.0))
    assert module.fp8_meta["scaling_fwd"].scale[0] == 56.0


@pytest.mark.parametrize(
    "module,text",
    [
        (lambda: construct("Linear"), "in_features=32, out_features=48, use_bias=True"),
        (
            lambda: construct("LayerNormLinear", normalization="RMSNorm", bias=False),
            "in_features=32, out_features=48, use_bias=False, normalization=RMSNorm",
        ),
        (
            lambda: construct("LayerNormMLP", activation="swiglu"),
            "hidden_size=32, size_per_partition=64, use_bias=True, normalization=LayerNorm,"
            " activation=swiglu",
        ),
        (lambda: construct("RMSNorm"), "(32,), eps=1e-05, zero_centered_gamma=False"),
    ],
)
def test_extra_repr(module, text):
    """Sizes and options can be read off a printed model."""
    module = module()
    assert repr(module) == f"{type(module).__name__}({text})"


def test_train_and_eval():
    """The switches do what torch's do, and change no number."""
    for kind in MODULES:
        module, x = construct(kind), torch.randn(4, 32)
        expected = module(x)
        assert module.eval() is module and not module.training
        assert torch.equal(module(x), expected)
        assert module.train().training and torch.equal(module(x), expected)


# --- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NORMS)
def test_norm_constructor_rules(kind):
    """Exactly one of the shape arguments, at most one of the dtype arguments."""
    cls = getattr(te, kind)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        cls(device="cpu")
    with pytest.raises(RuntimeError, match="normalized_shape"):
        cls(16, hidden_size=16, device="cpu")
    with pytest.raises(RuntimeError, match="params_dtype"):
        cls(16, dtype=torch.float16, params_dtype=torch.float16, device="cpu")
    with pytest.warns(DeprecationWarning, match="hidden_size"):
        assert tuple(cls(hidden_size=16, device="cpu").weight.shape) == (16,)
    assert cls(16, dtype=torch.float16, device="cpu").weight.dtype == torch.float16
    for shape in ([2, 3], (2, 3), torch.Size((2, 3)), iter((2, 3))):
        assert tuple(cls(shape, device="cpu").weight.shape) == (2, 3)


@pytest.mark.parametrize("kind,infix", [("LayerNorm", "ln"), ("RMSNorm", "rmsnorm")])
def test_norm_margins(kind, infix, monkeypatch):
    """An int, a dict or the environment; the old integer properties still work, with a warning."""
    cls = getattr(te, kind)
    keys = ("forward", "backward", "inference")
    assert cls(16, device="cpu")._sm_margins == dict.fromkeys(keys, 0)
    assert cls(16, device="cpu", sm_margin=3)._sm_margins == dict.fromkeys(keys, 3)
    monkeypatch.setenv("NVTE_BWD_LAYERNORM_SM_MARGIN", "5")
    margins = cls(16, device="cpu", sm_margin={"forward": 2})._sm_margins
    assert margins == {"forward": 2, "backward": 5, "inference": 0}
    assert cls(16, device="cpu", sm_margin=3)._sm_margins["backward"] == 5
    norm = cls(16, device="cpu")
    for key, prefix in zip(keys, ("fwd", "bwd", "inf")):
        with pytest.warns(DeprecationWarning, match="sm_margin"):
            setattr(norm, f"{prefix}_{infix}_sm_margin", 7)
        with pytest.warns(DeprecationWarning, match="sm_margin"):
            assert getattr(norm, f"{prefix}_{infix}_sm_margin") == 7
        assert norm._sm_margins[key] == 7


def test_norm_deprecations():
    """Old names warn and work."""
    for kind, name in (
        ("LayerNorm", "reset_layer_norm_parameters"),
        ("RMSNorm", "reset_rms_norm_parameters"),
    ):
        norm = construct(kind)
        norm.weight.data.fill_(3.0)
        with pytest.warns(DeprecationWarning, match=name):
            getattr(norm, name)()
        assert (norm.weight == 1.0).all()
        with pytest.warns(DeprecationWarning, match="defer_init"):
            norm.reset_parameters(defer_init=False)


@pytest.mark.parametrize("kind", NORMS)
def test_norm_over_several_dimensions(kind, device):
    """The statistics are those of the flattened trailing dimensions."""
    norm = getattr(te, kind)((3, 8), device=device)
    x = torch.randn(5, 2, 3, 8, device=device)
    flat = x.flatten(2).double()
    mean = flat.mean(-1, keepdim=True) if kind == "LayerNorm" else 0.0
    centred = flat - mean
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    y = norm(x)
    assert y.shape == x.shape
    torch.testing.assert_close(y, expected.view(x.shape).float())
