# SPDX-License-Identifier: Apache-2.0
"""Modules whose weights are quantized tensors, as ``quantized_model_init`` makes them, in eager."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from eager_support import (
    BF16,
    DRAWS,
    FP16,
    FP32,
    GEMM_MODULES,
    K,
    assert_equal,
    assert_product,
    random,
)
from eager_support import run as step
from primary_support import (
    CLASSES,
    OUT,
    QUANTIZED,
    RECIPES,
    assert_quantized_from,
    buffers,
    initial,
    make,
    recipe_of,
    same_bytes,
    snapshot,
    twin_of,
    values,
    weights,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState

# Recipes whose weights quantize to the same bytes again, columnwise ones included.
IDEMPOTENT = ("delayed", "block", "mxfp8_2d", "nvfp4", "custom_square")


def results(done):
    """All tensors of a step."""
    return [*done.outputs, *done.grads.values()]


def an_input(device, rows=48, dtype=BF16, seed=11):
    """An input of a module."""
    return random(rows, K, device=device, dtype=dtype, seed=seed)


# --- what is made ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_classes_and_bytes(recipe, kind, device):
    """GEMM weights are of the recipe's class and consist of the bytes of the initial values; all
    other parameters are ordinary ones."""
    module = make(kind, recipe, device)
    assert module.primary_weights_in_fp8
    for name, param in module.named_parameters():
        assert isinstance(param, torch.nn.Parameter) and param.requires_grad and param.is_leaf
        assert param.dtype == BF16 and param.device.type == device
        if name not in weights(module):
            assert param.__class__ is torch.nn.Parameter, name
            continue
        assert param.__class__ is CLASSES[recipe], name
        if recipe == "custom_identity":
            assert torch.equal(param.cpu(), initial(param.shape))
        else:
            assert param.get_usages() == {"rowwise": True, "columnwise": True}
            assert_quantized_from(param, recipe, initial(param.shape))


@pytest.mark.parametrize("dtype", (FP32, FP16), ids=str)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_other_dtypes(recipe, dtype, device):
    """Weights of other nominal dtypes hold the bytes of values of that dtype."""
    weight = make("Linear", recipe, device, dtype).weight
    assert weight.dtype == dtype
    assert_quantized_from(weight, recipe, initial(weight.shape, dtype))


def test_contexts(device):
    """Contexts nest, can be entered twice, decorate functions, and end when something is raised."""

    def made():
        return type(te.Linear(K, OUT, device=device).weight)

    context = te.quantized_model_init(recipe=MXFP8BlockScaling())
    with context:
        assert made() is te.MXFP8Tensor
        with te.quantized_model_init(enabled=False):
            assert made() is torch.nn.Parameter
            with context, te.quantized_model_init(recipe=NVFP4BlockScaling()):
                assert made() is te.NVFP4Tensor
            assert made() is torch.nn.Parameter
        assert made() is te.MXFP8Tensor
    assert made() is torch.nn.Parameter
    assert context(made)() is te.MXFP8Tensor
    with pytest.raises(ZeroDivisionError), context:
        1 / 0  # pylint: disable=pointless-statement
    assert not FP8GlobalStateManager.with_fp8_parameters()
    with pytest.warns(DeprecationWarning, match="fp8_model_init is deprecated"):
        old = te.fp8_model_init(recipe=Float8CurrentScaling())
    with old:
        assert made() is te.Float8Tensor
    with te.quantized_model_init():
        expected = type(te.get_default_recipe()).__name__
        assert {"MXFP8BlockScaling": te.MXFP8Tensor}.get(expected, te.Float8Tensor) is made()


def test_split_parameters_are_refused(device):
    """Blocks would cross the pieces; the message names the module and the way out."""
    match = "Linear 'qkv' has parameters_split.*Leave one of the two out"
    with pytest.raises(RuntimeError, match=match):
        make("Linear", "mxfp8", device, parameters_split=("q", "k", "v"), name="qkv")


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ("delayed", "mxfp8", "custom_two_formats"))
def test_meta_device(recipe, kind):
    """Made on meta, the module quantizes when it is materialised, outside of the context."""
    module = make(kind, recipe, "meta", init={"preserve_high_precision_init_val": True})
    assert all(param.is_meta for param in module.parameters())
    module.reset_parameters()
    for weight in weights(module).values():
        assert not weight.is_meta and weight.tensor_model_parallel
        assert_quantized_from(weight, recipe, initial(weight.shape))
        assert torch.equal(weight.get_high_precision_init_val(), initial(weight.shape))
    device = module.layer_norm_weight.device if kind != "Linear" else module.weight.device
    done = step(module, an_input(device), recipe_of(recipe))
    assert all(grad.isfinite().all() for grad in done.grads.values())


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_parameters_are_reset_from_high_precision(recipe, device):
    """Initialising once more starts from values that were never quantized."""
    module = make("Linear", recipe, device, init={"preserve_high_precision_init_val": True})
    with torch.no_grad():
        module.weight.mul_(100)
    module.reset_parameters()
    assert_quantized_from(module.weight, recipe, initial(module.weight.shape))
    assert module.weight.get_high_precision_init_val().__class__ is torch.Tensor
    assert torch.equal(module.weight.get_high_precision_init_val(), initial(module.weight.shape))


# --- the values before quantization ---------------------------------------------------------------


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_initial_values_are_kept(recipe, device):
    """On the CPU, through moves, casts, copies and training, until they are cleared."""
    module = make("LayerNormMLP", recipe, device, init={"preserve_high_precision_init_val": True})
    for move in (
        lambda m: m.to(device),
        lambda m: m.float(),
        lambda m: m.half(),
        lambda m: m.to(device, BF16),
        lambda m: m.cpu().to(device),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ):
        module.fc1_weight.main_grad = torch.zeros(2)
        module = move(module)
        assert module.fc1_weight.main_grad.shape == (2,)
        for weight in weights(module).values():
            value = weight.get_high_precision_init_val()
            assert value.device.type == "cpu" and torch.equal(value, initial(weight.shape))
            assert weight.get_high_precision_init_val.__self__ is weight
    module.to(BF16)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    step(module, an_input(device), recipe_of(recipe))
    optimizer.step()
    for weight in weights(module).values():
        assert torch.equal(weight.get_high_precision_init_val(), initial(weight.shape))
        weight.clear_high_precision_init_val()
        assert weight.get_high_precision_init_val() is None
        weight.clear_high_precision_init_val()
    assert not hasattr(make("Linear", recipe, device).weight, "get_high_precision_init_val")


def test_methods_belong_to_the_parameter_that_stays(device, monkeypatch):
    """Also where torch makes new parameters instead of changing the ones there are."""
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    module = make("Linear", "mxfp8", device, init={"preserve_high_precision_init_val": True})
    before = module.weight
    module._apply(lambda tensor: tensor * 2)
    assert module.weight is not before
    assert module.weight.get_high_precision_init_val.__self__ is module.weight
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    assert before.get_high_precision_init_val() is not None


def test_initial_values_do_not_share_memory_with_the_weight(device):
    """An IdentityQuantizer keeps the tensor that it gets."""

    init = {"preserve_high_precision_init_val": True}
    weight = make("Linear", "custom_forward_only", device, init=init).weight
    with torch.no_grad():
        weight.zero_()
    assert not values(weight, True).any()
    assert torch.equal(weight.get_high_precision_init_val(), initial(weight.shape))


# --- computing with them --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", IDEMPOTENT)
def test_equal_to_quantizing_the_values_again(recipe, kind, device):
    """Where quantizing again gives the same bytes, results are those of a module that holds the
    dequantized values in high precision, bit for bit."""
    module, x = make(kind, recipe, device), an_input(device)
    want = step(twin_of(module), x, recipe_of(recipe))
    got = step(module, x, recipe_of(recipe))
    assert_equal(results(got), results(want))
    assert all(grad.__class__ is torch.Tensor for grad in got.grads.values())


@pytest.mark.parametrize(
    "recipe",
    (
        *("current", "block_hybrid", "mxfp8", "nvfp4_plain", "custom_two_formats"),
        *("custom_from_dequantized", "custom_forward_only"),
    ),
)
def test_products_of_the_bytes(recipe, device):
    """fprop multiplies the rowwise values, dgrad the columnwise ones; wgrad and the bias gradient
    do not see the weight."""
    module, x, recipe = make("Linear", recipe, device), an_input(device, 64), recipe_of(recipe)
    twin = twin_of(module)
    got, want = step(module, x, recipe), step(twin, x, recipe)
    for name in ("weight", "bias"):
        assert torch.equal(got.grads[name], want.grads[name])

    def rowwise(tensor, mode):
        state = RecipeState.create(
            recipe, mode=mode, num_quantizers=1, device=device, roles=_roles(module, mode)
        )
        quantizer = state.make_quantizers()[0]
        return quantizer(tensor).dequantize(dtype=FP32).double()

    x_q, dy_q = rowwise(x, "forward"), rowwise(got.dys[0], "backward")
    bias = module.bias.detach().double()
    assert_product(got.outputs[0], x_q, values(module.weight).double(), bias, fp8=True)
    w_col = values(module.weight, columnwise=True).double()
    assert_product(got.grads["x"], dy_q, w_col.t().contiguous(), fp8=True)


def _roles(module, mode):
    return module.get_quantizer_roles(fwd=mode == "forward", num_quantizers=1)


@pytest.mark.parametrize("override", ("high_precision", "dequantized"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", (Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling))
def test_backward_override(recipe, kind, override, device):
    """dgrad multiplies the rowwise values, which both overrides mean for such a weight; forward is
    that without an override."""
    module, x = make(kind, recipe(), device), an_input(device)
    forward = step(module, x, recipe()).outputs[0]
    got = step(module, x, recipe(backward_override=override))
    if kind != "LayerNormMLP":  # where FC2's input may be quantized before or after it is rounded
        assert torch.equal(got.outputs[0], forward)
    if kind == "Linear":
        w = module.weight.detach().dequantize().double()
        assert_product(got.grads["x"], got.dys[0].double(), w.t().contiguous(), fp8=False)
    frozen = make(kind, recipe(), device)
    for weight in weights(frozen).values():
        weight.requires_grad_(False)
    again = step(frozen, x, recipe(backward_override=override), dys=got.dys)
    assert torch.equal(again.grads["x"], got.grads["x"])


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_outside_autocast(recipe, kind, device):
    """The numbers of a module with the dequantized values; a warning, but from LayerNormMLP."""
    module, x = make(kind, recipe, device), an_input(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = step(module, x)
        with torch.no_grad():
            assert torch.equal(module(x), got.outputs[0])
    assert_equal(results(got), results(step(twin_of(module), x)))
    match = "outside of te.autocast: it computes in high precision with the dequantized weights"
    assert all(match in str(warning.message) for warning in caught)
    assert len(caught) == (0 if kind == "LayerNormMLP" else 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(module, x, recipe_of(recipe))


@pytest.mark.filterwarnings("ignore:A module with quantized weights")
@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ("block", "mxfp8_2d", "none"))
def test_torch_autocast(recipe, kind, device):
    """fp32 weights in a bf16 region of torch.autocast: the weights' values as bf16, gradients in
    fp32."""
    module = make(kind, "block" if recipe == "none" else recipe, device, FP32)
    twin, x, recipe = twin_of(module), an_input(device, dtype=FP32), recipe_of(recipe)
    with torch.autocast(device, BF16):
        got, want = step(module, x, recipe), step(twin, x, recipe)
    assert got.outputs[0].dtype == BF16
    assert all(grad.dtype == FP32 for grad in got.grads.values())
    assert_equal(results(got), results(want))


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_no_tokens(recipe, kind, device):
    """Zero rows give zero gradients."""
    done = step(make(kind, recipe, device), an_input(device, rows=0), recipe_of(recipe))
    assert done.outputs[0].shape[0] == 0
    assert all(not grad.any() for grad in done.grads.values())


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_is_first_microbatch_is_ignored(recipe, kind, device):
    """The weight is quantized already: nothing is cached, and every update counts."""
    module, x = make(kind, recipe, device), an_input(device)
    for first in (None, True, False, False):
        want = step(copy.deepcopy(module), x, recipe_of(recipe))
        got = step(module, x, recipe_of(recipe), is_first_microbatch=first)
        assert_equal(results(got), results(want))
        assert not module._fp8_workspaces
        with torch.no_grad():
            for weight in weights(module).values():
                weight.mul_(-0.5)


# --- gradients and optimizers ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ("delayed", "mxfp8", "nvfp4_plain", "custom_forward_only"))
def test_frozen_weights(recipe, kind, device):
    """A frozen weight gets no gradient; all other gradients are as before."""
    module, x = make(kind, recipe, device), an_input(device)
    frozen = copy.deepcopy(module)
    for weight in weights(frozen).values():
        weight.requires_grad_(False)
    got, want = step(frozen, x, recipe_of(recipe)), step(module, x, recipe_of(recipe))
    for name, grad in want.grads.items():
        if name in weights(module):
            assert got.grads[name] is None
        else:
            assert torch.equal(got.grads[name], grad), name


@pytest.mark.parametrize("recipe", ("mxfp8", "custom_two_formats"))
def test_gradients_add_up_and_are_zeroed(recipe, device):
    """Gradients of two backward passes are added in the nominal dtype."""
    module, recipe = make("Linear", recipe, device), recipe_of(recipe)
    first, second = an_input(device), an_input(device, seed=5)
    single = [step(module, x, recipe).grads["weight"].clone() for x in (first, second)]
    module.zero_grad()
    for x in (first, second):
        with te.autocast(recipe=recipe):
            y = module(x)
        torch.manual_seed(DRAWS)  # as each step does
        y.backward(random(*y.shape, seed=1000).to(y))
    assert torch.equal(module.weight.grad, single[0] + single[1])
    module.zero_grad(set_to_none=False)
    assert not module.weight.grad.any()
    module.zero_grad()
    assert module.weight.grad is None


OPTIMIZERS = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0, **o),
}


@pytest.mark.parametrize(
    "options", ({"foreach": False}, {"foreach": True}, {"fused": True}), ids=str
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_optimizer(recipe, optimizer, options, device):
    """A step writes the quantized form of what the optimizer makes of the dequantized values."""
    module = make("Linear", recipe, device, FP32)
    weight = module.weight
    plain = torch.nn.Parameter(weight.dequantize().detach())
    ours = OPTIMIZERS[optimizer]([weight], **options)
    theirs = OPTIMIZERS[optimizer]([plain], **options)
    addresses = [b.data_ptr() for b in buffers(weight) if b is not None]
    for seed in range(3):
        weight.grad = random(*weight.shape, device=device, seed=seed)
        plain.grad = weight.grad.clone()
        ours.step()
        theirs.step()
        assert_quantized_from(weight, recipe, plain)
        with torch.no_grad():
            plain.copy_(weight)
    assert [b.data_ptr() for b in buffers(weight) if b is not None] == addresses
    state = [v for v in ours.state[weight].values() if v is not None and v.dim() == 2]
    assert state and all(moment.__class__ is torch.Tensor for moment in state)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_decoupled_weight_decay_quantizes_twice(recipe, device):
    """AdamW writes the weight twice unless it is fused: decayed, and then minus the step."""
    weight = make("Linear", recipe, device, FP32).weight
    quantized = weight.detach().clone()
    weight.grad = random(*weight.shape, device=device)
    torch.optim.AdamW([weight], lr=0.01, weight_decay=0.5, foreach=False).step()
    quantized.quantize_(values(quantized) * (1 - 0.01 * 0.5))
    plain = torch.nn.Parameter(values(quantized))
    plain.grad = weight.grad.clone()
    torch.optim.AdamW([plain], lr=0.01, weight_decay=0.0, foreach=False).step()
    assert_quantized_from(weight, recipe, plain)


def test_updates_are_recorded_for_delayed_scaling(device):
    """What an optimizer writes enters the history, and the next step's scale comes from it."""
    module, recipe = make("Linear", "delayed", device), recipe_of("delayed")
    step(module, an_input(device), recipe)
    state = module._delayed_scaling
    with torch.no_grad():
        module.weight.mul_(3)
    largest = (3 * values(make("Linear", "delayed").weight)).to(BF16).abs().max().float().to(device)
    scale = torch.full_like(largest, 448.0) / largest
    assert state.fwd_history[0, 1] == largest and state.fwd_scale[1] != scale
    before = snapshot(module.weight)
    step(module, an_input(device), recipe)
    assert state.fwd_scale[1] == scale
    assert same_bytes(module.weight, before)  # until it is written again
    with torch.no_grad():
        module.weight.mul_(1)
    assert module.weight._scale_inv == scale.reciprocal()


# --- saving and copying ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_checkpoints(recipe, kind, device, tmp_path):
    """Files load with weights_only=True and strict=True, byte for byte; checkpoints in high
    precision load into quantized modules, and the other way round."""
    module = make(kind, recipe, device)
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(1.25)
    step(module, an_input(device), recipe_of(recipe))
    torch.save(module.state_dict(), tmp_path / "quantized.pt")
    for assign in (True, False):
        other = make(kind, recipe, device)
        saved = torch.load(tmp_path / "quantized.pt", weights_only=True)
        other.load_state_dict(saved, strict=True, assign=assign)
        for name, weight in weights(module).items():
            assert same_bytes(getattr(other, name), weight)
            assert isinstance(getattr(other, name), torch.nn.Parameter)
    x = an_input(device)
    assert_equal(*[results(step(m, x, recipe_of(recipe))) for m in (other, module)])
    plain = make(kind, None, device)
    plain.load_state_dict(saved, strict=True)
    for name, weight in weights(module).items():
        assert getattr(plain, name).__class__ is torch.nn.Parameter
        assert torch.equal(getattr(plain, name), weight.dequantize())
    fresh, plain = make(kind, recipe, device), make(kind, None, device)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(3)
    fresh.load_state_dict(plain.state_dict(), strict=True)
    for name, weight in weights(fresh).items():
        assert_quantized_from(weight, recipe, getattr(plain, name))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_distributed_checkpoints(recipe, device, tmp_path):
    """torch.distributed.checkpoint in one process, bytes kept."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    module, other = make("LayerNormMLP", recipe, device), make("LayerNormMLP", recipe, device)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    state = {"model": module.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(state, checkpoint_id=tmp_path, no_dist=True)
        state = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["model"])
    for name, param in module.named_parameters():
        assert same_bytes(dict(other.named_parameters())[name], param), name


def _through_a_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize(
    "copied",
    (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), _through_a_file),
    ids=("deepcopy", "pickle", "torch.save"),
)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_copies(recipe, copied, kind, device):
    """A copy has the bytes, trains alike, and shares nothing."""
    module, recipe = make(kind, recipe, device), recipe_of(recipe)
    step(module, an_input(device), recipe)
    twin = copied(module)
    before = [snapshot(param) for param in module.parameters()]
    assert all(map(same_bytes, twin.parameters(), before))
    done = []
    for one in (twin, module):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
        for seed in range(2):
            done.append(step(one, an_input(device, seed=seed), recipe))
            optimizer.step()
        if one is twin:
            assert all(map(same_bytes, module.parameters(), before))
            assert not any(map(same_bytes, twin.parameters(), before))
    assert_equal(results(done[0]) + results(done[1]), results(done[2]) + results(done[3]))
    assert all(map(same_bytes, twin.parameters(), module.parameters()))


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantizers_and_parameters_by_their_names(recipe, kind, device):
    """``_get_fp8_params`` and ``_get_quantizer``, with which optimizers quantize into a weight."""
    module = make(kind, recipe, device)
    found = list(weights(module).values())
    if recipe == "custom_identity":
        assert module._get_fp8_params() is None
        return
    assert [id(param) for param in module._get_fp8_params()] == [id(param) for param in found]
    for param in found:
        quantizer = param._get_quantizer()
        values = random(*param.shape, device=device).to(BF16)
        new = quantizer.make_empty(shape=param.shape, dtype=BF16, device=device)
        quantizer.update_quantized(values, new)
        param.data.quantize_(values)
        assert same_bytes(new, param)
        param.requires_grad_(False)
    assert module._get_fp8_params() is None
    bare = found[0].detach()
    bare._quantizer = None
    with pytest.raises(RuntimeError, match="has no quantizer"):
        bare._get_quantizer()


# --- moving and casting ---------------------------------------------------------------------------

CONVERSIONS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "float": lambda module: module.float(),
    "to_dtype": lambda module: module.to(FP16),
    "to_device": lambda module: module.to("cpu"),
    "to_both": lambda module: module.to("cpu", FP32),
}


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("recipe", (*QUANTIZED, "nvfp4_plain", "custom_forward_only"))
def test_conversions_keep_the_bytes(recipe, conversion, dtype, device):
    """Another dtype is another nominal dtype: nothing is rounded, not even amaxes recorded."""
    module = make("Linear", recipe, device, dtype)
    before, state = snapshot(module.weight), module._delayed_scaling
    history = None if state is None else state.fwd_history.clone()
    CONVERSIONS[conversion](module)
    assert same_bytes([None if b is None else b.to(device) for b in buffers(module.weight)], before)
    assert isinstance(module.weight, te.QuantizedTensor)
    assert isinstance(module.weight, torch.nn.Parameter) and module.weight.requires_grad
    assert module.weight.dtype == module.bias.dtype
    assert module.weight.device == module.bias.device
    assert history is None or torch.equal(module._delayed_scaling.fwd_history.to(device), history)
    dtype, device = module.bias.dtype, module.bias.device
    done = step(module, an_input(device, dtype=dtype), recipe_of(recipe))
    assert done.outputs[0].dtype == done.grads["weight"].dtype == dtype


def test_other_functions_are_applied_to_values(device):
    """``_apply`` with a function that is no conversion quantizes its result."""
    module = make("Linear", "mxfp8", device)
    module._apply(lambda tensor: tensor * 2)
    twice = 2 * values(make("Linear", "mxfp8").weight).bfloat16()
    assert_quantized_from(module.weight, "mxfp8", twice)


# --- recipes that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize(
    "made,active",
    (
        ("delayed", "current"),
        ("mxfp8", "current"),
        ("nvfp4", "mxfp8"),
        ("block", "custom_two_formats"),
        ("custom_two_formats", "block"),
    ),
)
def test_recipe_mismatch(made, active, kind, device):
    """A weight of another format is an error that names the weight, before anything is computed;
    the right recipe still works afterwards."""
    module, x = make(kind, made, device, name="here"), an_input(device)
    name = next(iter(weights(module)))
    match = f"Recipe mismatch: the {name} of {kind} 'here' was made .* Use the recipe of"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match=match):
            step(module, x, recipe_of(active))
        step(module, x, recipe_of(made))


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_updated_quantizer(kind, device):
    """A recipe with other fields is announced, once; equal recipes are not."""
    made, other = (DelayedScaling(amax_history_len=length) for length in (1024, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(make(kind, made, device), an_input(device), DelayedScaling())
    module = make(kind, made, device)
    match = r"Quantizer is being updated, this may affect model behavior: .* was made with"
    match += r" DelayedScaling\(amax_history_len=1024\) and runs with .*len=1\)"
    with pytest.warns(UserWarning, match=match):
        step(module, an_input(device), other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(module, an_input(device), other)
    assert module._delayed_scaling.fwd_history.shape[0] == 1


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ("delayed", "current", "block", "nvfp4"))
def test_made_without_gradients(recipe, kind, device):
    """No columnwise data are made before a training step needs them; then they are those that a
    module made with gradients has."""
    with torch.no_grad():
        module = make(kind, recipe, device)
    x = an_input(device)
    with torch.no_grad(), te.autocast(recipe=recipe_of(recipe)):
        inferred = module(x)
    with torch.inference_mode(), te.autocast(recipe=recipe_of(recipe)):
        assert torch.equal(module(x), inferred)
    for weight in weights(module).values():
        assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    trained = make(kind, recipe, device)
    if recipe == "delayed":  # inference records amaxes
        trained.reset_fp8_meta_tensors(module.get_fp8_meta_tensors())
    got, want = step(module, x, recipe_of(recipe)), step(trained, x, recipe_of(recipe))
    assert_equal(results(got), results(want))
    assert all(map(same_bytes, module.parameters(), trained.parameters()))


@pytest.mark.parametrize("recipe", ("mxfp8", "custom_two_formats"))
def test_columnwise_data_that_can_not_be_made(recipe, device):
    """Formats whose rowwise data do not tell the columnwise ones say so, with the way out."""
    with torch.no_grad():
        module = make("Linear", recipe, device, name="here")
    match = "columnwise data of the weight of Linear 'here'.* Make the module with gradients"
    with pytest.raises(RuntimeError, match=match):
        step(module, an_input(device), recipe_of(recipe))
    x = an_input(device)
    with te.autocast(recipe=recipe_of(recipe)):
        module(x).sum().backward()  # the input's gradient is not wanted: dgrad does not happen
    assert module.weight.grad.isfinite().all()
    other = recipe_of(recipe)
    other.backward_override = "dequantized"  # nor does it read columnwise data
    assert_equal(*[results(step(m, x, other)) for m in (module, make("Linear", recipe, device))])


# --- state of delayed scaling ---------------------------------------------------------------------


def assert_bound(module):
    """The quantizers of the weights read and write the module's present state."""
    state = module._delayed_scaling
    for slot, weight in zip((1, 4), weights(module).values()):
        quantizer = weight._quantizer
        assert quantizer.scale.data_ptr() == state.fwd_scale[slot:].data_ptr()
        assert quantizer.amax.data_ptr() == state.fwd_history[0, slot:].data_ptr()


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ("delayed", "custom_delayed"))
def test_quantizers_stay_bound(recipe, kind, device):
    """From the first moment, through everything that makes the state anew."""
    module = make(kind, recipe, device)
    assert_bound(module)
    step(module, an_input(device), recipe_of(recipe))
    assert_bound(module)
    saved = module.state_dict()
    for change in (
        lambda m: m.to(device),
        lambda m: m.float().bfloat16(),
        lambda m: m.to("cpu").to(device),
        lambda m: m.adjust_amax_history_length(5),
        lambda m: m.adjust_amax_history_length(2),
        lambda m: m.load_state_dict(saved),
        lambda m: m.reset_fp8_meta_tensors(),
        lambda m: m.reset_parameters(),
    ):
        change(module)
        assert_bound(module)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_bound(copied)
        assert copied._delayed_scaling.fwd_scale.data_ptr() != (
            module._delayed_scaling.fwd_scale.data_ptr()
        )


@pytest.mark.filterwarnings("ignore:A module with quantized weights")
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_calibrating(kind, device):
    """Amaxes of the dequantized weights are recorded, the outputs are those in high precision."""
    module, x = make(kind, "delayed", device), an_input(device)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe_of("delayed")):
        y = module(x)
    assert torch.equal(y, module(x))
    for slot, weight in zip((1, 4), weights(module).values()):
        first = initial(weight.shape).abs().max()  # recorded when the weight was made
        amax = values(weight).abs().max().cpu()
        assert module._delayed_scaling.fwd_history[0, slot] == max(first, amax)
