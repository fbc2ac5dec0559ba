# SPDX-License-Identifier: Apache-2.0
"""What modules refuse, and what they say."""

import pytest
import recipe_list
import torch
from eager_support import GEMM_MODULES, MODULES, NORMS, construct
from torch._subclasses import FakeTensorMode

import transformer_engine.pytorch as te


@pytest.mark.parametrize(
    "make,error,match",
    [
        (lambda: construct("Linear", parallel_mode="diagonal"), AssertionError, "diagonal"),
        (
            lambda: construct("LayerNormLinear", parallel_mode="row"),
            NotImplementedError,
            "column",
        ),
        (
            lambda: construct("LayerNormLinear", normalization="BatchNorm"),
            AssertionError,
            "BatchNorm",
        ),
        (lambda: construct("LayerNormMLP", normalization="l2"), AssertionError, "RMSNorm"),
        (lambda: construct("LayerNormMLP", activation="mish"), NotImplementedError, "swiglu"),
        (
            lambda: construct(
                "LayerNormMLP", activation="clamped_swiglu", activation_params={"limt": 1}
            ),
            ValueError,
            "limt",
        ),
        (
            lambda: te.Linear(32, 49, tp_size=2, parallel_mode="column", device="cpu"),
            (ValueError, RuntimeError),
            "49",
        ),
        (
            lambda: te.Linear(33, 48, tp_size=2, parallel_mode="row", device="cpu"),
            ValueError,
            "33",
        ),
        (lambda: te.LayerNormMLP(32, 63, tp_size=2, device="cpu"), ValueError, "63"),
        (lambda: te.Linear(-1, 16), ValueError, "in_features of Linear is -1"),
        (lambda: te.LayerNormLinear(16, -2), ValueError, "out_features of LayerNormLinear is -2"),
        (lambda: te.LayerNormMLP(16, -4), ValueError, "ffn_hidden_size of LayerNormMLP is -4"),
        (lambda: te.LayerNormMLP(16, 16.5), TypeError, r"ffn_hidden_size .* 16\.5, .* int"),
        (lambda: te.Linear("16", 16), TypeError, "in_features of Linear is '16'"),
        (lambda: te.RMSNorm(-3), ValueError, "normalized_shape of RMSNorm is -3"),
        (lambda: te.LayerNorm((4, 2.0)), TypeError, r"normalized_shape of LayerNorm is 2\.0"),
        *(
            (lambda kind=kind: construct(kind, params_dtype="bf16"), TypeError, match)
            for kind, match in ((kind, f"params_dtype of {kind} is 'bf16'") for kind in MODULES)
        ),
        *(
            (lambda dtype=dtype: construct("Linear", params_dtype=dtype), TypeError, f"is {dtype}")
            for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn)
        ),
    ],
)
def test_construction_errors(make, error, match):
    """Types that callers catch, and messages that name the value."""
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    "kind,options",
    [
        ("Linear", {"fuse_wgrad_accumulation": True}),
        ("Linear", {"delay_wgrad_compute": True}),
        ("LayerNormMLP", {"checkpoint": True}),
    ],
)
def test_training_options_do_not_matter_without_gradients(kind, options):
    """They act in backward only, so inference works."""
    module, plain = construct(kind, **options), construct(kind)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_input_of_wrong_width(kind):
    """Both error types that callers catch, with the module, the shape and the width needed."""
    module = construct(kind, name="here")
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=r"GEMM not possible.*'here'.*\(4, 31\).*32"):
            module(torch.randn(4, 31))
    with pytest.raises(ValueError, match="GEMM not possible"):
        module(torch.tensor(1.0))


def test_weights_of_wrong_shape():
    """LayerNormMLP names the GEMM: FC1, or FC2 with the width that the activation leaves."""
    mlp, x = construct("LayerNormMLP", activation="swiglu", name="here"), torch.randn(4, 32)
    weight = mlp.fc1_weight
    mlp.fc1_weight = torch.nn.Parameter(torch.zeros(128, 33))
    with pytest.raises(ValueError, match=r"FC1 of LayerNormMLP 'here'.*\(128, 33\).*32"):
        mlp(x)
    mlp.fc1_weight = weight
    mlp.fc2_weight = torch.nn.Parameter(torch.zeros(32, 128))  # forgot that swiglu halves
    with pytest.raises(ValueError, match=r"FC2 of.*'here'.*\(32, 128\).*64, the width of swiglu"):
        mlp(x)


def test_norm_input_of_wrong_width():
    """A ValueError that names both shapes."""
    for kind in ("LayerNorm", "RMSNorm"):
        with pytest.raises(ValueError, match=r"\(4, 31\).*\(32,\)"):
            construct(kind)(torch.randn(4, 31))
        with pytest.raises(ValueError, match="normalized_shape"):
            getattr(te, kind)((3, 8), device="cpu")(torch.randn(8))


# --- inputs ---------------------------------------------------------------------------------------

RECIPES = ("none", "current", "delayed", "mxfp8", "block", "nvfp4", "custom_square", "mxfp8_hp")
WITH_RECIPES = [(kind, recipe) for kind in GEMM_MODULES for recipe in RECIPES]
WITH_RECIPES += [(kind, "none") for kind in NORMS]
EITHER = pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))


def callable_of(module, compiled):
    """The module, or its compiled form."""
    if not compiled:
        return module
    torch._dynamo.reset()
    return torch.compile(module, backend="eager", fullgraph=True)


def refuses(module, inp, match, error, compiled, recipe=None, **options):
    """Without and with gradients; nothing is noted in the module."""
    for grad in (False, True):
        with pytest.raises(Exception, match=match) as raised:
            with torch.set_grad_enabled(grad), te.autocast(recipe is not None, recipe=recipe):
                callable_of(module, compiled)(inp, **options)
        assert compiled or isinstance(raised.value, error)
    assert not getattr(module, "forwarded_at_least_once", False)


@EITHER
@pytest.mark.parametrize("kind,recipe", WITH_RECIPES)
def test_input_on_another_device(kind, recipe, compiled):
    """Module, both devices and the cure are named, before anything runs."""
    recipe, x = recipe_list.recipe_of(recipe), torch.randn(32, 32)
    match = rf"input of {kind} '.*' is on meta, but the parameters .* on cpu\. This input has no"
    refuses(construct(kind), x.to("meta"), match, RuntimeError, compiled, recipe)
    if kind in GEMM_MODULES:  # norms materialise at the first call
        match = rf"input of {kind} '.*' is on cpu, but the .* on meta\. .* reset_parameters\(\)"
        refuses(construct(kind, "meta"), x, match, RuntimeError, compiled, recipe)


@pytest.mark.parametrize("kind", MODULES)
def test_input_on_another_real_device(kind, device):
    """The input, or the module, is to be moved."""
    if device == "cpu":
        with FakeTensorMode():  # has CUDA tensors without CUDA
            x = torch.empty(32, 32, device="cuda")
        match = (
            rf"input of {kind} '.*' is on cuda:0, but .* on cpu\. Move the input with .to\('cpu'"
        )
        refuses(construct(kind), x, match, RuntimeError, False)
    else:
        match = (
            rf"input of {kind} '.*' is on cpu, but .* on cuda:0\. Move the input with .to\('cuda"
        )
        refuses(construct(kind, device), torch.randn(32, 32), match, RuntimeError, False)


# The scales of delayed scaling are values of earlier steps, which meta modules do not have.
@pytest.mark.parametrize("kind,recipe", [case for case in WITH_RECIPES if case[1] != "delayed"])
def test_meta_modules_take_inputs_on_meta(kind, recipe):
    """Shapes and dtypes come out, and the module stays on meta."""
    dtype = {"params_dtype": torch.bfloat16, "device": "meta"}
    sizes = {"Linear": (32, 96), "LayerNormLinear": (32, 96), "LayerNormMLP": (32, 64)}
    module = getattr(te, kind)(*sizes.get(kind, (32,)), **dtype)
    x = torch.empty(2, 16, 32, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(recipe != "none", recipe=recipe_list.recipe_of(recipe)):
        y = module(x)
    assert y.is_meta and y.shape == (2, 16, 96 if kind in GEMM_MODULES[:2] else 32)
    assert y.dtype == torch.bfloat16 and y.requires_grad
    assert all(parameter.is_meta for parameter in module.parameters())


@EITHER
@pytest.mark.parametrize("value", (None, [1.0], 3), ids=repr)
@pytest.mark.parametrize("kind", MODULES)
def test_input_that_is_no_tensor(kind, value, compiled):
    """The module, and what it got. In a trace the input is why the module leaves the graph."""
    match = "is None" if value is None else f"is a {type(value).__name__}"
    match = f"[Tt]he input {'' if compiled else f'of {kind} .*'}.*{match}"
    refuses(construct(kind), value, match.replace("is None", "is .*None"), TypeError, compiled)


@EITHER
@pytest.mark.parametrize("recipe", ("none", "current", "delayed"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_first_microbatch_that_is_no_flag(kind, recipe, compiled):
    """Strings and numbers are truthy, and would replace the cache."""
    made = recipe_list.recipe_of(recipe)
    for value in ("yes", 1, torch.ones(1, dtype=torch.bool)):
        match = f"{kind} '.*' was called with is_first_microbatch=.*, but it must be None"
        options = {"is_first_microbatch": value}
        refuses(construct(kind), torch.ones(2, 32), match, TypeError, compiled, made, **options)
