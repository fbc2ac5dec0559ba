# SPDX-License-Identifier: Apache-2.0
"""``CustomRecipe``: quantizers that a function of the user chooses, tensor by tensor."""

import copy
import inspect
import pickle
import sys
import warnings
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    _custom,
)
from transformer_engine.pytorch.custom_recipes import quantizer_factories, quantizer_factory_zoo
from transformer_engine.pytorch.quantization import CustomRecipeState, RecipeState

sys.path.insert(0, str(Path(__file__).parent / "module"))
# pylint: disable=wrong-import-position
from compile_support import Twins, graphs, random, with_recipe  # noqa: E402
from eager_support import (  # noqa: E402
    BF16,
    GEMM_MODULES,
    K,
    STATE,
    assert_equal,
    assert_near,
    assert_product,
    build,
)
from eager_support import run as step  # noqa: E402
from recipe_list import E4M3, E5M2, tensor_type  # noqa: E402

OUT, FFN = 96, 96
FACTORIES = {
    name: factory
    for module in (quantizer_factories, quantizer_factory_zoo)
    for name, factory in inspect.getmembers(module, inspect.isfunction)
    if name.endswith("_factory")
}


def make(kind, device="cpu", dtype=BF16, **options):
    """A module that fits every format."""
    return build(kind, device, dtype=dtype, out=OUT, ffn=FFN, **options)


def an_input(device, rows=64, seed=11, dtype=BF16):
    """An input of a module."""
    return random(rows, K, device=device, seed=seed, dtype=dtype)


def results(done):
    """All tensors of a step."""
    return [*done.outputs, *done.grads.values()]


def by_tensor(**answers):
    """A factory by the tensor type of the role; the answers are functions without arguments."""

    def factory(role):
        return answers.get(tensor_type(role), answers["other"])()

    return factory


def mxfp8():
    """A plain MXFP8 quantizer."""
    return te.MXFP8Quantizer(E4M3)


def hybrid(row, col, **options):
    """A quantizer with a format per orientation."""
    return te.HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, **options)


# --- the factories that come with the package -----------------------------------------------------


def test_all_factories_are_there():
    """The names that users of the reference package know."""
    assert set(FACTORIES) == {
        "high_precision_factory",
        "delayed_scaling_factory",
        "current_scaling_factory",
        "float8_block_scaling_factory",
        "mxfp8_factory",
        "nvfp4_factory",
        "high_precision_fwd_mxfp8_bwd_factory",
        "mxfp8_fwd_nvfp4_bwd_factory",
        "nvfp4_1d_weight_factory",
        "mxfp8_fwd_high_precision_bwd_factory",
        "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
        "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
        "nvfp4_linear_fp8_dpa_factory",
    }
    with_docstrings = [name for name, factory in FACTORIES.items() if factory.__doc__]
    assert sorted(with_docstrings) == sorted(FACTORIES)


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name, kind, device):
    """Compiled as in eager bit by bit, in one graph, and in the vicinity of high precision."""
    module, recipe = make(kind, device), CustomRecipe(FACTORIES[name])
    plain = step(copy.deepcopy(module), an_input(device, seed=0))
    twins = Twins(module)
    y = twins.step(an_input(device, seed=0), recipe)[0]
    assert_near(y, plain.outputs[0], 0.4 if "nvfp4" in name else 0.1, name)
    if name.startswith("high_precision"):
        assert torch.equal(y, plain.outputs[0])
    twins.step(an_input(device, seed=1), recipe, seed=1)
    assert graphs() == 1


BUILT_IN = {
    "current_scaling_factory": Float8CurrentScaling,
    "delayed_scaling_factory": DelayedScaling,
    "float8_block_scaling_factory": Float8BlockScaling,
    "mxfp8_factory": MXFP8BlockScaling,
    "nvfp4_factory": NVFP4BlockScaling,
}
# The input of FC2 is quantized after it was rounded to bf16. Where amaxes are taken of what is
# rounded, or no amax is needed, nothing else does so.
SAME_MLP = ("float8_block_scaling_factory", "mxfp8_factory", "nvfp4_factory")


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("name", BUILT_IN)
def test_numbers_of_built_in_recipes(name, kind, device):
    """A factory that answers what a built-in recipe uses gives that recipe's numbers."""
    module, builtin = make(kind, device), BUILT_IN[name]()
    twin, custom = copy.deepcopy(module), CustomRecipe(FACTORIES[name])
    for seed in range(3):
        x = an_input(device, rows=48, seed=seed)
        got, want = step(module, x, custom), step(twin, x, builtin)
        if kind != "LayerNormMLP" or name in SAME_MLP:
            assert_equal(results(got), results(want))
        else:
            assert_near(got.outputs[0], want.outputs[0], 0.02, "output")


# --- roles ----------------------------------------------------------------------------------------


class Recorder:
    """A factory that notes the roles it was asked for."""

    def __init__(self):
        self.roles = []

    def __call__(self, role):
        self.roles.append(role)
        return mxfp8()


def role(kind, name):
    """The role of a tensor of a linear layer."""
    return te.QuantizerRole("linear", kind, name)


@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear"))
def test_roles(kind, device):
    """Input, weight, output; output gradient, input gradient. Asked once for a module, not per
    step."""
    module, factory = make(kind, device, name="here"), Recorder()
    for _ in range(2):
        step(module, an_input(device), CustomRecipe(factory))
    expected = [role("input", "here"), role("weight", "here"), None]
    expected += [role("grad_output", "here"), None]
    assert factory.roles == expected
    assert str(factory.roles[0]) == "linear:input:here"


def test_roles_of_an_mlp(device):
    """Both GEMMs; the slots between them are what follows or comes before."""
    module, factory = make("LayerNormMLP", device, name="here"), Recorder()
    module.output_quantizer_role = te.QuantizerRole("dpa", "qkv", "attention")
    module.grad_input_quantizer_role = te.QuantizerRole("", "", "dpa_grad_output")
    for _ in range(2):
        step(module, an_input(device), CustomRecipe(factory))
    assert factory.roles == [
        role("input", "here.fc1"),
        role("weight", "here.fc1"),
        role("input", "here.fc2"),
        role("input", "here.fc2"),
        role("weight", "here.fc2"),
        module.output_quantizer_role,
        role("grad_output", "here.fc1"),
        module.grad_input_quantizer_role,
        role("grad_output", "here.fc2"),
        role("grad_output", "here.fc1"),
    ]


def test_a_factory_is_asked_once_per_compiled_module(device):
    """Tracing asks as eager does; running the graph does not."""
    module, factory = make("Linear", device, name="here"), Recorder()
    twins, recipe = Twins(module), CustomRecipe(factory)
    for seed in range(3):
        twins.step(an_input(device, seed=seed), recipe)
    assert len(factory.roles) == 2 * 5  # of the module and of its eager twin


def test_names_choose(device):
    """Layers of a model are told apart by their names."""

    def factory(role):
        return mxfp8() if role is not None and role.name == "second" else te.IdentityQuantizer()

    model = torch.nn.Sequential(make("Linear", device, name="first"), te.LayerNorm(OUT, dtype=BF16))
    first, second = (make("Linear", device, name=name) for name in ("first", "second"))
    recipe, x = CustomRecipe(factory), an_input(device)
    assert_equal(results(step(first, x, recipe)), results(step(model[0], x)))
    want = step(copy.deepcopy(second), x, MXFP8BlockScaling())
    assert_equal(results(step(second, x, recipe)), results(want))


# --- what is refused ------------------------------------------------------------------------------


def refused(factory, match, device, kind="LayerNormMLP"):
    """The factory is a ValueError in eager, and says the same while tracing."""
    recipe = CustomRecipe(factory)
    module, x = make(kind, device, name="here"), an_input(device)
    with pytest.raises(ValueError, match=match):
        with_recipe(module, x, recipe)
    with pytest.raises(Exception, match=match):
        Twins(module).compiled(x, recipe)
    assert not te.quantization.FP8GlobalStateManager.is_fp8_enabled()
    step(module, x, CustomRecipe(quantizer_factories.mxfp8_factory))


def test_none(device):
    """The role is named, and what to return instead."""
    factory = by_tensor(weight=lambda: None, other=mxfp8)
    match = "returned None for the role linear:weight:here.fc1.*IdentityQuantizer"
    refused(factory, match, device)
    twins = Twins(make("LayerNormMLP", device, name="here"), fullgraph=False)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=match):
        warnings.simplefilter("ignore")  # the module was left to eager, which raises
        twins.compiled(an_input(device), CustomRecipe(factory))


def test_no_quantizer(device):
    """Neither a quantizer nor a request."""
    refused(lambda role: "mxfp8", "returned a str. Return a te.Quantizer", device)
    scale = torch.ones(2)
    factory = by_tensor(
        other=lambda: te.Float8Quantizer(scale[:1], scale[1:], E4M3), grad_output=mxfp8
    )
    refused(factory, "Return a te.DelayedScalingRequest", device)


def test_different_requests(device):
    """One module has one history length and one rule."""
    factory = by_tensor(
        grad_output=lambda: te.DelayedScalingRequest(margin=1), other=te.DelayedScalingRequest
    )
    match = r"two different DelayedScalingRequests.*margin=0.*margin=1.*must be equal"
    refused(factory, match, device)


@pytest.mark.parametrize(
    "gemm,factory,operands",
    (
        (
            "fprop",
            by_tensor(weight=te.IdentityQuantizer, other=mxfp8),
            "input mxfp8,e4m3.* and weight in high precision; quantize both or neither",
        ),
        (
            "dgrad",
            by_tensor(weight=lambda: hybrid(mxfp8(), te.IdentityQuantizer()), other=mxfp8),
            "grad_output mxfp8,e4m3.* and weight in high precision; quantize both or neither",
        ),
        (
            "wgrad",
            by_tensor(input=lambda: hybrid(mxfp8(), te.IdentityQuantizer()), other=mxfp8),
            "grad_output mxfp8,e4m3.* and input in high precision; quantize both or neither",
        ),
        (
            "wgrad",
            by_tensor(input=lambda: te.NVFP4Quantizer(with_rht=True), other=te.NVFP4Quantizer),
            "grad_output nvfp4,.* and input nvfp4,.*rht=1; both or neither must be transformed",
        ),
        (
            "dgrad",
            by_tensor(other=lambda: te.NVFP4Quantizer(with_rht=True)),
            "weight nvfp4,.*rht=1; .* weights must not be",
        ),
        (
            "wgrad",
            by_tensor(grad_output=te.NVFP4Quantizer, other=mxfp8),
            "grad_output nvfp4,.* and input mxfp8,.*; .*give both operands of wgrad MXFP8",
        ),
        (
            "wgrad",
            by_tensor(grad_output=mxfp8, other=te.NVFP4Quantizer),
            "grad_output mxfp8,.* and input nvfp4,.*; .*give both operands of wgrad MXFP8",
        ),
    ),
    ids=("fprop", "dgrad", "wgrad", "signs", "transformed_weight", "gradient", "input"),
)
def test_operands_that_do_not_fit(gemm, factory, operands, device):
    """The GEMM, the module and both operands are named, and the cure."""
    refused(factory, f"{gemm} GEMM of LayerNormMLP 'here' FC1 operands.*{operands}", device)


def test_only_the_gemms_of_an_override_count(device):
    """With an override of the backward pass only fprop multiplies quantized operands."""
    factory = by_tensor(weight=lambda: hybrid(mxfp8(), te.IdentityQuantizer()), other=mxfp8)
    recipe = CustomRecipe(factory, backward_override="high_precision")
    x, module = an_input(device), make("Linear", device)
    twin = copy.deepcopy(module)
    got = step(module, x, recipe)
    want = step(twin, x, MXFP8BlockScaling(backward_override="high_precision"))
    assert_equal(results(got), results(want))


def test_recipes_are_checked():
    """No factory, or no function."""
    with pytest.raises(TypeError, match="qfactory"):
        CustomRecipe(**{})  # pylint: disable=no-value-for-parameter
    with pytest.raises(ValueError, match="qfactory must be a function"):
        CustomRecipe(qfactory=None)
    with pytest.raises(ValueError, match="quantization_alignment must be positive"):
        CustomRecipe(quantizer_factories.mxfp8_factory, quantization_alignment=0)


# --- hybrid quantizers ----------------------------------------------------------------------------


def rowwise(quantizer, tensor):
    """float64 values of the rowwise data."""
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer(tensor).dequantize(dtype=torch.float32).double()


def columnwise(quantizer, tensor):
    """float64 values of the columnwise data."""
    quantizer.set_usage(rowwise=False, columnwise=True)
    return quantizer(tensor).dequantize(dtype=torch.float32).double()


FORMATS = {
    "mxfp8": mxfp8,
    "nvfp4": te.NVFP4Quantizer,
    "current": lambda: te.Float8CurrentScalingQuantizer(E4M3, "cpu"),
    "block": lambda: te.Float8BlockQuantizer(
        E5M2, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
}


@pytest.mark.parametrize("source", ("original", "rowwise_dequantized"))
@pytest.mark.parametrize("row,col", (("nvfp4", "mxfp8"), ("mxfp8", "current"), ("block", "nvfp4")))
def test_formats_per_orientation(row, col, source, device):
    """fprop multiplies rowwise values, dgrad the weight's columnwise and wgrad the input's and the
    gradient's columnwise ones, made of the tensor or of its dequantized rowwise values."""

    def factory(role):
        if tensor_type(role) == "grad_output":
            return hybrid(FORMATS[col](), FORMATS[col](), columnwise_source=source)
        return hybrid(FORMATS[row](), FORMATS[col](), columnwise_source=source)

    module, x = make("Linear", device, bias=False), an_input(device)
    got = step(module, x, CustomRecipe(factory))
    dy, weight = got.dys[0], module.weight.detach()
    rows = [rowwise(FORMATS[f](), t) for f, t in ((row, x), (row, weight), (col, dy))]
    sources = (x, weight, dy)
    if source == "rowwise_dequantized":
        sources = [values.to(BF16) for values in rows]
    columns = [columnwise(FORMATS[col](), t).t().contiguous() for t in sources]
    assert_product(got.outputs[0], rows[0], rows[1], fp8=True)
    assert_product(got.grads["x"], rows[2], columns[1], fp8=True)
    assert_product(got.grads["weight"], columns[2], columns[0], fp8=True)


def quantized_pair(gemm, a, b):
    """A factory that quantizes nothing but the two operands of one GEMM."""
    plain = te.IdentityQuantizer
    answers = {
        "fprop": {"input": lambda: hybrid(a(), plain()), "weight": lambda: hybrid(b(), plain())},
        "dgrad": {
            "grad_output": lambda: hybrid(a(), plain()),
            "weight": lambda: hybrid(plain(), b()),
        },
        "wgrad": {
            "grad_output": lambda: hybrid(plain(), a()),
            "input": lambda: hybrid(plain(), b()),
        },
    }
    return by_tensor(other=plain, **answers[gemm])


PAIR_FORMATS = {
    **FORMATS,
    "mxfp8_2d": lambda: te.MXFP8Quantizer(E5M2, with_2d_quantization=True),
    "nvfp4_2d": lambda: te.NVFP4Quantizer(with_2d_quantization=True),
}


@pytest.mark.parametrize("gemm", ("fprop", "dgrad", "wgrad"))
@pytest.mark.parametrize("first", PAIR_FORMATS)
def test_every_pair_of_formats(first, gemm, device):
    """Each GEMM multiplies each pair, or the module refuses the pair at the forward call."""
    a, x = PAIR_FORMATS[first], an_input(device)
    for second, b in PAIR_FORMATS.items():
        module = make("Linear", device, bias=False)
        recipe = CustomRecipe(quantized_pair(gemm, a, b))
        if gemm == "wgrad" and first.startswith("mxfp8") != second.startswith("mxfp8"):
            with pytest.raises(ValueError, match="wgrad GEMM of .*both operands of wgrad MXFP8"):
                with_recipe(module, x, recipe)
            continue
        got = step(module, x, recipe)
        dy, weight = got.dys[0], module.weight.detach()
        if gemm == "fprop":
            tested, values = got.outputs[0], (rowwise(a(), x), rowwise(b(), weight))
        elif gemm == "dgrad":
            tested, values = got.grads["x"], (rowwise(a(), dy), columnwise(b(), weight).t())
        else:
            tested = got.grads["weight"]
            values = (columnwise(a(), dy).t(), columnwise(b(), x).t())
        assert_product(tested, *values, fp8=True)


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_high_precision_columns_of_dequantized_rows(kind, device):
    """With an IdentityQuantizer for columns, the backward GEMMs multiply what the forward GEMM saw:
    the same as backward_override="dequantized"."""

    def forward():
        options = {"columnwise_source": "rowwise_dequantized"}
        return hybrid(mxfp8(), te.IdentityQuantizer(), **options)

    recipe = CustomRecipe(by_tensor(grad_output=te.IdentityQuantizer, other=forward))
    override = CustomRecipe(quantizer_factories.mxfp8_factory, backward_override="dequantized")
    module, x = make(kind, device), an_input(device)
    want = step(copy.deepcopy(module), x, override)
    assert_equal(results(step(copy.deepcopy(module), x, recipe)), results(want))
    Twins(module).step(x, recipe)
    with te.quantized_model_init(recipe=recipe):
        primary = make(kind, device)
    with te.quantized_model_init(recipe=override):
        twin = make(kind, device)
    got, want = step(primary, x, recipe), step(twin, x, override)
    assert_equal(results(got), results(want))


def test_gradients_in_high_precision_from_dequantized_rows(device):
    """The output gradient alike: dgrad in MXFP8, wgrad with what MXFP8 made of the gradient."""
    options = {"columnwise_source": "rowwise_dequantized"}
    factory = by_tensor(
        input=lambda: hybrid(mxfp8(), te.IdentityQuantizer()),
        grad_output=lambda: hybrid(mxfp8(), te.IdentityQuantizer(), **options),
        other=mxfp8,
    )
    module, x = make("Linear", device, bias=False), an_input(device)
    got = step(module, x, CustomRecipe(factory))
    dy = rowwise(mxfp8(), got.dys[0])
    assert_product(got.grads["weight"], dy.t().contiguous(), x.t().double(), fp8=False)
    frozen = step(module, x, CustomRecipe(factory), dys=got.dys)
    with te.autocast(recipe=CustomRecipe(factory)):
        y = module(x)  # the input's gradient is not wanted
    module.zero_grad()
    y.backward(got.dys[0])
    assert torch.equal(module.weight.grad, frozen.grads["weight"])


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_hybrid_of_equal_parts(kind, device):
    """Is the quantizer of both parts."""
    recipe, x = CustomRecipe(lambda role: hybrid(mxfp8(), mxfp8())), an_input(device)
    module = make(kind, device)
    want = step(copy.deepcopy(module), x, CustomRecipe(quantizer_factories.mxfp8_factory))
    assert_equal(results(step(copy.deepcopy(module), x, recipe)), results(want))
    identity = CustomRecipe(lambda role: hybrid(te.IdentityQuantizer(), te.IdentityQuantizer()))
    for first in (None, True, False):
        got = step(copy.deepcopy(module), x, identity, is_first_microbatch=first)
        assert_equal(results(got), results(step(copy.deepcopy(module), x)))


def test_square_blocks_of_the_norm_output(device):
    """MXFP8 blocks of 32x32 for the input, which no built-in recipe has: the norm's output is
    quantized as a Linear quantizes it."""

    def factory(role):
        square = not tensor_type(role).startswith("grad")
        return te.MXFP8Quantizer(E4M3, with_2d_quantization=square)

    recipe, x = CustomRecipe(factory), an_input(device)
    with torch.no_grad():
        x[::2, :32] *= 1e-4  # next to large values of the same square, small ones lose bits
    options = {"normalization": "RMSNorm"}
    fused, linear = make("LayerNormLinear", device, **options), make("Linear", device)
    norm = te.RMSNorm(K, dtype=BF16, device=device)
    with torch.no_grad():
        for ours, theirs in (
            (norm.weight, fused.layer_norm_weight),
            (linear.weight, fused.weight),
            (linear.bias, fused.bias),
        ):
            ours.copy_(theirs)
        y = norm(x)
    got, want = step(fused, x, recipe), step(linear, y, recipe)
    assert torch.equal(got.outputs[0], want.outputs[0])
    assert torch.equal(got.grads["weight"], want.grads["weight"])
    other = step(make("LayerNormLinear", device, **options), x, MXFP8BlockScaling())
    assert not torch.equal(got.outputs[0], other.outputs[0])
    Twins(make("LayerNormLinear", device, **options)).step(x, recipe)


@pytest.mark.parametrize("override", ("high_precision", "dequantized"))
@pytest.mark.parametrize("name", ("mxfp8_factory", "nvfp4_row_scaled_fwd_mxfp8_bwd_factory"))
def test_backward_override(name, override, device):
    """Forward as ever; backward multiplies the operands themselves, or their rowwise values."""
    factory = FACTORIES[name]
    module, x = make("Linear", device), an_input(device)
    forward = step(module, x, CustomRecipe(factory)).outputs[0]
    recipe = CustomRecipe(factory, backward_override=override)
    got = step(module, x, recipe)
    assert torch.equal(got.outputs[0], forward)
    x_q, weight = x.double(), module.weight.detach().double()
    if override == "dequantized":
        quantizers = RecipeState.create(
            recipe,
            mode="forward",
            num_quantizers=2,
            device=device,
            roles=module.get_quantizer_roles(fwd=True, num_quantizers=2),
        ).make_quantizers()
        pairs = zip(quantizers, (x, module.weight.detach()))
        x_q, weight = [q(tensor).dequantize().double() for q, tensor in pairs]
    dy = got.dys[0].double()
    assert_product(got.grads["x"], dy, weight.t().contiguous(), fp8=False)
    assert_product(got.grads["weight"], dy.t().contiguous(), x_q.t().contiguous(), fp8=False)


# --- cached weights -------------------------------------------------------------------------------

CACHED = (
    "mxfp8_fwd_nvfp4_bwd_factory",
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "current_scaling_factory",
)


@pytest.mark.parametrize("name,kind", list(zip(CACHED, ("LayerNormMLP", "Linear") * 2)))
def test_cached_weights(name, kind, device):
    """True replaces the cache, False takes what is in it, in eager and in graphs alike."""
    recipe = CustomRecipe(FACTORIES[name])
    twins, x = Twins(make(kind, device)), an_input(device)
    fresh = twins.step(x, recipe)[0].detach().clone()
    twins.step(x, recipe, is_first_microbatch=True)
    for module in (twins.module, twins.eager):
        with torch.no_grad():
            for param in module.parameters():
                if param.dim() == 2:
                    param.mul_(-1)
    cached = twins.step(x, recipe, is_first_microbatch=False)[0]
    if not name.startswith("high_precision"):  # fprop reads the weight itself there
        assert torch.equal(cached, fresh)
    renewed = twins.step(x, recipe, is_first_microbatch=True)[0]
    assert not torch.equal(renewed, fresh)
    assert torch.equal(twins.step(x, recipe, is_first_microbatch=False)[0], renewed)


@pytest.mark.parametrize("name", CACHED)
def test_cache_made_without_gradients(name, device):
    """Has no columnwise data; a training step that finds it there makes what it needs."""
    recipe, x, module = CustomRecipe(FACTORIES[name]), an_input(device), make("Linear", device)
    want = step(copy.deepcopy(module), x, recipe)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(module(x, is_first_microbatch=True), want.outputs[0])
        assert torch.equal(module(x, is_first_microbatch=False), want.outputs[0])
    assert_equal(results(step(module, x, recipe, is_first_microbatch=False)), results(want))


# --- delayed scaling ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear"))
def test_state_of_requests(kind, device):
    """Scales and histories are renewed exactly as DelayedScaling renews them; they are what the
    module shows, and checkpoints hold."""
    options = {"amax_history_len": 4, "margin": 1, "amax_compute_algo": "most_recent"}
    custom = CustomRecipe(lambda role: te.DelayedScalingRequest(**options))
    module = make(kind, device)
    twin = copy.deepcopy(module)
    for seed in range(4):
        x = an_input(device, seed=seed) * (1 + seed)
        got, want = step(module, x, custom), step(twin, x, DelayedScaling(**options))
        assert_equal(results(got), results(want))
        for field in STATE:
            ours, theirs = (getattr(m._delayed_scaling, field) for m in (module, twin))
            assert torch.equal(ours, theirs), field
    shown = module.fp8_meta["scaling_fwd"].delayed
    assert shown.amax_history.data_ptr() == module._delayed_scaling.fwd_history.data_ptr()
    quantizer = module.quantizers["scaling_fwd"][1]
    assert quantizer.scale == module._delayed_scaling.fwd_scale[1]
    fresh = make(kind, device)
    fresh.load_state_dict(module.state_dict())
    assert_equal(results(step(fresh, x, custom)), results(step(module, x, custom)))


def test_requests_for_some_tensors(device):
    """Slots without a request record nothing."""
    factory = by_tensor(
        input=te.DelayedScalingRequest,
        weight=te.DelayedScalingRequest,
        other=lambda: te.Float8CurrentScalingQuantizer(E5M2, device),
    )
    module, x = make("Linear", device), an_input(device)
    for _ in range(2):
        step(module, x, CustomRecipe(factory))
    state = module._delayed_scaling
    assert state.fwd_scale[0] == torch.tensor(448.0) / x.abs().max().float().cpu()
    assert state.fwd_scale[1] != 1 and state.fwd_scale[2] == 1
    assert not state.bwd_history.any() and (state.bwd_scale == 1).all()
    module.zero_grad()
    twins = Twins(module)
    for seed in range(2):
        twins.step(an_input(device, seed=seed), CustomRecipe(factory))


def calibrating(module, x, recipe):
    """High precision, while the amaxes of delayed scaling are recorded."""
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        return module(x)


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("requested", (("input",), ("weight",), ("input", "weight")), ids="+".join)
def test_calibration_of_requests(requested, kind, device):
    """Amaxes are recorded of what asks for delayed scaling, and nothing else; compiled too."""
    answers = {"other": lambda: te.Float8CurrentScalingQuantizer(E4M3, device)}
    recipe = CustomRecipe(
        by_tensor(**answers, **dict.fromkeys(requested, te.DelayedScalingRequest))
    )
    module = make(kind, device)
    plain, twins = copy.deepcopy(module), Twins(module, calibrating)
    inputs = [an_input(device, seed=seed) * (seed + 1) for seed in range(2)]
    for i, x in enumerate(inputs):
        y = twins.forward(x, recipe).outputs[0][0]
        assert torch.equal(y, plain(x))
        history = module._delayed_scaling.fwd_history
        recorded = history.max(0).values.reshape(-1, 3).tolist()
        for name, found in zip(module.weight_names, recorded):
            weight = getattr(module, name).abs().max().item()
            assert found[1] == (weight if "weight" in requested else 0)
            assert (found[0] != 0) == ("input" in requested) and found[2] == 0
        if kind == "Linear" and "input" in requested:
            assert recorded[0][0] == max(x.abs().max().item() for x in inputs[: i + 1])
    twins.compare()
    assert graphs() == 1


def test_requests_with_functions_of_the_user(device):
    """Work in eager, and fall back to it under torch.compile, with the reason."""

    def largest(history):
        return history.amax(0)

    request = te.DelayedScalingRequest(amax_compute_algo=largest, amax_history_len=3)
    recipe, module = CustomRecipe(lambda role: request), make("Linear", device)
    twin = copy.deepcopy(module)
    same = DelayedScaling(amax_compute_algo=largest, amax_history_len=3)
    for seed in range(3):
        x = an_input(device, seed=seed)
        assert_equal(results(step(module, x, recipe)), results(step(twin, x, same)))
    fallback(module, recipe, "amax_compute_algo .*cannot be compiled", device)


def fallback(module, recipe, reason, device):
    """The module leaves the graph with this reason; with fullgraph=True that is an error."""
    x = an_input(device)
    module.zero_grad()
    twins = Twins(module, fullgraph=False)
    with pytest.warns(UserWarning, match=f"Falling back to eager execution.*{reason}"):
        twins.step(x, recipe)
    with pytest.raises(Exception, match=reason):
        Twins(module).compiled(x, recipe)


# --- one recipe and another -----------------------------------------------------------------------


def test_recipes_and_graphs(device):
    """Recipes with the same function and fields share a graph; others have their own, which is
    found again."""
    factories = [lambda role: mxfp8(), lambda role: te.NVFP4Quantizer()]
    twins, x = Twins(make("Linear", device)), an_input(device)
    for count, index, override in (
        (1, 0, None),
        (1, 0, None),
        (2, 1, None),
        (2, 0, None),
        (3, 0, "dequantized"),
        (3, 1, None),
    ):
        twins.step(x, CustomRecipe(factories[index], backward_override=override))
        assert graphs() == count


def test_reassigned_function(device):
    """The function that the recipe has when autocast is entered counts."""
    recipe = CustomRecipe(quantizer_factories.mxfp8_factory)
    module, x = make("Linear", device), an_input(device)
    twins = Twins(module)
    outputs = {}
    for name in ("mxfp8_factory", "current_scaling_factory", "mxfp8_factory"):
        recipe.qfactory = FACTORIES[name]
        y = twins.step(x, recipe)[0].detach().clone()
        assert torch.equal(outputs.setdefault(name, y), y)
        built_in = BUILT_IN[name]()
        assert torch.equal(step(copy.deepcopy(module), x, built_in).outputs[0], y)
    assert graphs() == 2
    assert recipe == CustomRecipe(quantizer_factories.mxfp8_factory)
    assert recipe != CustomRecipe(quantizer_factories.nvfp4_factory)


def test_modules_of_one_class_share_a_graph_only_where_the_answers_are_equal(device):
    """Two layers of a model, told apart by name."""

    def factory(role):
        return mxfp8() if role is not None and role.name == "b" else te.NVFP4Quantizer()

    modules = [make("Linear", device, name=name, bias=False) for name in "ab"]
    x = an_input(device)
    for module in modules:
        Twins(module).step(x, CustomRecipe(factory))
    outputs = [step(module, x, CustomRecipe(factory)).outputs[0] for module in modules]
    assert not torch.equal(*outputs)


def test_unpickled_modules_ask_again(device, monkeypatch):
    """Recipes are numbered, and a number means another recipe in another process."""
    module, x = make("Linear", device), an_input(device)
    step(module, x, CustomRecipe(quantizer_factories.nvfp4_factory))
    pickled = pickle.dumps(module)
    monkeypatch.setattr(_custom, "_NUMBERED", [])
    recipe = CustomRecipe(quantizer_factories.mxfp8_factory)
    loaded = pickle.loads(pickled)
    got = step(loaded, x, recipe)
    want = step(make("Linear", device), x, MXFP8BlockScaling())
    assert_equal(results(got), results(want))


# --- recipe states --------------------------------------------------------------------------------


def test_recipe_state():
    """One answer per slot, in order; without roles by position."""
    recipe, asked = CustomRecipe(Recorder()), None
    asked = recipe.qfactory.roles
    roles = [role("input", "a"), role("weight", "a"), None]
    state = RecipeState.create(recipe, mode="forward", num_quantizers=3, roles=roles)
    assert isinstance(state, CustomRecipeState) and state.delayed is None
    quantizers = state.make_quantizers()
    assert asked == roles
    assert [type(quantizer) for quantizer in quantizers] == [te.MXFP8Quantizer] * 3
    asked.clear()
    RecipeState.create(recipe, mode="backward", num_quantizers=3)
    assert [r.tensor_type for r in asked] == ["grad_output", "grad_input", "grad_output"]
    asked.clear()
    RecipeState.create(recipe, mode="forward", num_quantizers=4)
    assert [r.tensor_type for r in asked] == ["input", "weight", "output", "input"]


def test_recipe_state_of_requests():
    """Requests share scales and a history; other slots have their own quantizers."""
    factory = by_tensor(
        weight=lambda: te.DelayedScalingRequest(amax_history_len=5),
        input=lambda: te.DelayedScalingRequest(amax_history_len=5),
        other=te.IdentityQuantizer,
    )
    state = RecipeState.create(CustomRecipe(factory), mode="forward", num_quantizers=3)
    assert state.delayed.amax_history.shape == (5, 3)
    first, second, third = state.make_quantizers()
    assert isinstance(third, te.IdentityQuantizer)
    state.delayed.scale[1] = 4
    assert (first.scale, second.scale) == (1, 4) and second.dtype == E4M3
    second(torch.full((16, 16), 3.0))
    assert state.delayed.amax_history[0].tolist() == [0, 3, 0]
    with pytest.raises(ValueError, match="returned None for the role"):
        RecipeState.create(CustomRecipe(lambda role: None), mode="forward", num_quantizers=1)
    with pytest.raises(ValueError, match="3 quantizers but 1 roles"):
        RecipeState.create(CustomRecipe(factory), mode="forward", num_quantizers=3, roles=[None])


# --- high precision of another dtype --------------------------------------------------------------


def to_bf16():
    """A quantizer that only rounds to bf16."""
    return te.IdentityQuantizer(dtype=BF16)


def test_operands_rounded_to_a_dtype(device):
    """Each GEMM of an fp32 module multiplies what the cast left, and nothing else is rounded."""
    module, x = make("Linear", device, torch.float32), an_input(device, dtype=torch.float32)
    got = step(module, x, CustomRecipe(by_tensor(weight=te.IdentityQuantizer, other=to_bf16)))
    dy, weight, bias = got.dys[0], module.weight.detach().double(), module.bias.detach().double()
    x_cast, dy_cast = (t.detach().to(BF16).double() for t in (x, dy))
    assert not torch.equal(x_cast, x.double())
    assert_product(got.outputs[0], x_cast, weight, bias, fp8=False)
    assert_product(got.grads["x"], dy_cast, weight.t(), fp8=False)
    assert_product(got.grads["weight"], dy_cast.t(), x_cast.t(), fp8=False)
    assert torch.equal(got.grads["bias"], step(module, x, dys=[dy]).grads["bias"])


def rounded_beside_formats(role):
    """MXFP8 in the forward GEMM; in backward some operands rounded, others left alone."""
    if tensor_type(role) == "grad_output":
        return te.IdentityQuantizer()
    return hybrid(mxfp8(), to_bf16() if tensor_type(role) == "input" else te.IdentityQuantizer())


@pytest.mark.parametrize(
    "kind,factory,backend",
    (
        ("LayerNormMLP", lambda role: to_bf16(), "aot_eager"),
        ("LayerNormMLP", rounded_beside_formats, "aot_eager"),
        ("Linear", lambda role: to_bf16(), "inductor"),
    ),
)
def test_rounded_operands_are_compiled(kind, factory, backend, device):
    """Compilers keep the cast, though its result is cast back; one row makes views of columns."""
    twins = Twins(make(kind, device, torch.float32), backend=backend)
    for rows in (64, 1)[: 1 + (backend == "aot_eager")]:
        x = an_input(device, rows, dtype=torch.float32)
        twins.step(x, CustomRecipe(factory), seed=rows)
        plain = copy.deepcopy(twins.eager)
        assert not torch.equal(with_recipe(plain, x, CustomRecipe(factory)), plain(x))


# --- quantizers that users write ------------------------------------------------------------------


class Rounding(te.Quantizer):
    """Integers times a scale of the tensor; results are plain tensors."""

    def __init__(self, levels=127):
        super().__init__(rowwise=True, columnwise=True)
        self.levels = levels

    def quantize_impl(self, tensor):
        scale = tensor.abs().amax() / self.levels
        return torch.round(tensor / scale) * scale

    def update_quantized(self, src, dst, *, noop_flag=None):
        raise AssertionError("nothing is quantized in place")

    def make_empty(self, shape, **options):
        raise AssertionError("nothing is allocated")


class Storing(Rounding):
    """The same, as an object that dequantizes."""

    def quantize_impl(self, tensor):
        return te.IdentityQuantizer()(super().quantize_impl(tensor))


class Renamed(te.MXFP8Quantizer):
    """A quantizer of the package that was changed: its own quantization counts."""

    def quantize_impl(self, tensor):
        return super().quantize_impl(tensor * 2)


@pytest.mark.parametrize("dtype", (BF16, torch.float32), ids=str)
@pytest.mark.parametrize("quantizer", (Rounding, Storing))
def test_quantizers_of_users(quantizer, dtype, device):
    """Operands are what the quantizer makes of them, in both orientations; the bias and its
    gradient are those of high precision."""
    module, x = make("Linear", device, dtype), an_input(device, dtype=dtype)
    got = step(module, x, CustomRecipe(lambda role: quantizer()))
    dy = got.dys[0]
    x_q, w_q, dy_q = [Rounding()(t.detach()).double() for t in (x, module.weight, dy)]
    bias = module.bias.detach().double()
    assert_product(got.outputs[0], x_q, w_q, bias, fp8=False)
    assert_product(got.grads["x"], dy_q, w_q.t().contiguous(), fp8=False)
    assert_product(got.grads["weight"], dy_q.t().contiguous(), x_q.t().contiguous(), fp8=False)
    assert torch.equal(got.grads["bias"], step(module, x, dys=[dy]).grads["bias"])


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_quantizers_of_users_in_all_modules(kind, device):
    """A quantizer that changes nothing gives the numbers of high precision, also for weights that
    are cached, or made inside of quantized_model_init; with an override, and beside others."""

    class Nothing(Rounding):
        """Leaves values alone."""

        def quantize_impl(self, tensor):
            return tensor

    x, want = an_input(device), step(make(kind, device), an_input(device))
    for factory in (
        lambda role: Nothing(),
        by_tensor(weight=Nothing, other=te.IdentityQuantizer),
        lambda role: hybrid(Nothing(), Nothing()),
    ):
        for override in (None, "high_precision", "dequantized"):
            recipe = CustomRecipe(factory, backward_override=override)
            for first in (None, True, False):
                module = make(kind, device)
                got = step(module, x, recipe, is_first_microbatch=first)
                assert_equal(results(got), results(want))
        with te.quantized_model_init(recipe=recipe):
            module = make(kind, device)
        assert not any(isinstance(p, te.QuantizedTensor) for p in module.parameters())
        assert_equal(results(step(module, x, recipe)), results(want))


def test_changed_quantizers_of_the_package(device):
    """A subclass is not mistaken for the class that it changes."""
    module, x = make("Linear", device, bias=False), an_input(device)
    factory = by_tensor(weight=lambda: Renamed(E4M3), other=te.IdentityQuantizer)
    got = step(module, x, CustomRecipe(factory))
    w_q = mxfp8()(2 * module.weight.detach()).dequantize().double()
    assert_product(got.outputs[0], x.double(), w_q, fp8=False)


def test_quantizers_of_users_beside_formats(device):
    """An operand in one of the package's formats can not be multiplied with it, but orientations
    may differ."""
    factory = by_tensor(weight=Rounding, other=mxfp8)
    refused(factory, "weight of a class of your own; .* IdentityQuantizer, beside it", device)
    factory = by_tensor(grad_output=mxfp8, other=lambda: hybrid(Rounding(), mxfp8()))
    module, x = make("Linear", device), an_input(device)
    want = step(copy.deepcopy(module), x, MXFP8BlockScaling())
    got = step(module, x, CustomRecipe(factory))
    for name in ("x", "weight"):
        assert torch.equal(got.grads[name], want.grads[name])
    x_q, w_q = [Rounding()(t.detach()).double() for t in (x, module.weight)]
    assert_product(got.outputs[0], x_q, w_q, module.bias.detach().double(), fp8=False)


def test_quantizers_of_users_that_change_the_shape(device):
    """The class and both shapes are named."""

    class Broken(Rounding):
        """Loses a row."""

        def quantize_impl(self, tensor):
            return tensor[1:]

    with pytest.raises(ValueError, match=r"The Broken of a CustomRecipe.*\(95, 64\).*\(96, 64\)"):
        step(make("Linear", device), an_input(device), CustomRecipe(lambda role: Broken()))


def test_quantizers_of_users_are_not_compiled(device):
    """The module falls back to eager and says why."""
    module = make("LayerNormMLP", device, name="here")
    reason = "'here' with a quantizer class of its own"
    fallback(module, CustomRecipe(lambda role: Rounding()), reason, device)
