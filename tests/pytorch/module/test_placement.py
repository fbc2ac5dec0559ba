# SPDX-License-Identifier: Apache-2.0
"""Moves and casts of modules, default devices, deferred initialisation."""

import copy

import pytest
import torch
from eager_support import (
    BF16,
    FP16,
    FP32,
    GEMM_MODULES,
    K,
    MODULES,
    NORMS,
    STATE,
    assert_equal,
    build,
    random,
    run,
    train,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

# --- moves and casts -----------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ("half", "bfloat16", "to", "float"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_casts_leave_the_scales_alone(cast, kind, device):
    """Parameters change their dtype; scales and histories stay fp32 and keep their values."""
    dtype = {"half": FP16, "bfloat16": BF16, "to": BF16, "float": FP32}[cast]
    start = BF16 if cast == "float" else FP32
    module, recipe = build(kind, device, dtype=start), DelayedScaling(amax_history_len=3)
    run(module, random(16, K, dtype=start, device=device), recipe)
    before = [getattr(module._delayed_scaling, field).clone() for field in STATE]
    assert (module.to(dtype) if cast == "to" else getattr(module, cast)()) is module
    after = [getattr(module._delayed_scaling, field) for field in STATE]
    assert_equal(after, before)
    assert {p.dtype for p in module.parameters()} == {dtype}
    step = run(module, random(16, K, dtype=dtype, device=device), recipe)
    assert step.outputs[0].dtype == dtype and step.outputs[0].isfinite().all()
    assert all(grad.dtype == dtype for grad in step.grads.values())


@pytest.mark.parametrize("kind", NORMS)
def test_casts_of_norms(kind, device):
    """The output has the dtype of the weight."""
    norm = build(kind, device).half()
    assert norm(random(4, K, device=device)).dtype == FP16


def test_a_cast_drops_cached_weights(device):
    """Cached bytes belong to the old parameter."""
    module = build("Linear", device)
    x = random(16, K, device=device)
    run(module, x, Float8CurrentScaling(), is_first_microbatch=True)
    assert list(module._fp8_workspaces) == ["weight"]
    module.bfloat16()
    assert not module._fp8_workspaces


def test_move_between_devices(device):
    """Everything arrives; results on the way back are the same."""
    module, recipe = build("LayerNormMLP", "cpu", dtype=BF16), DelayedScaling(amax_history_len=3)
    train(module, recipe, range(2))
    twin = copy.deepcopy(module).to(device)
    assert {p.device.type for p in twin.parameters()} == {device}
    assert all(getattr(twin._delayed_scaling, f).device.type == device for f in STATE)
    assert all(
        torch.equal(getattr(twin._delayed_scaling, f).cpu(), getattr(module._delayed_scaling, f))
        for f in STATE
    )
    train(twin, recipe, range(2, 3))
    assert twin.cpu()._delayed_scaling.fwd_scale.device.type == "cpu"
    train(twin, recipe, range(3, 4))


# --- devices and deferred initialisation ---------------------------------------------------------


@pytest.mark.parametrize("kind", MODULES)
def test_default_device(kind):
    """CUDA where it is there, else the CPU."""
    sizes = {"Linear": (32, 16), "LayerNormLinear": (32, 16), "LayerNormMLP": (32, 16)}
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    cls, size = getattr(te, kind), sizes.get(kind, (32,))
    for options in ({}, {"device": "cuda"}, {"device": 0}, {"device": torch.device("cuda", 0)}):
        assert {p.device.type for p in cls(*size, **options).parameters()} == {expected}
    for cpu in ("cpu", torch.device("cpu")):
        assert {p.device.type for p in cls(*size, device=cpu).parameters()} == {"cpu"}


@pytest.mark.feature(
    "made on the meta device", modes=("eager",), others="materialised before the export"
)
@pytest.mark.parametrize("meta", ("meta", torch.device("meta")), ids=("str", "device"))
@pytest.mark.parametrize("kind", MODULES)
def test_deferred_initialisation(kind, meta):
    """Parameters stay on meta until ``reset_parameters``, which initialises and marks them."""
    sizes = {"Linear": (128, 256), "LayerNormLinear": (128, 256), "LayerNormMLP": (128, 256)}
    torch.manual_seed(0)
    module = getattr(te, kind)(*sizes.get(kind, (128,)), params_dtype=BF16, device=meta)
    assert all(p.is_meta and p.dtype == BF16 for p in module.parameters())
    names = [name for name, _ in module.named_parameters()]
    for param in module.parameters():
        assert not hasattr(param, "tensor_model_parallel")
        param.requires_grad_(False)
    module.reset_parameters()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert [name for name, _ in module.named_parameters()] == names
    for name, param in module.named_parameters():
        assert param.device.type == device and param.dtype == BF16 and not param.requires_grad
        if param.dim() == 2:
            assert abs(param.float().std().item() / 0.023 - 1) < 0.03
            assert param.tensor_model_parallel is True
        else:
            assert (param == (0.0 if "bias" in name else 1.0)).all()
    out = module(random(4, 128, dtype=BF16, device=device))
    assert out.isfinite().all()


@pytest.mark.parametrize("kind", MODULES)
def test_to_empty_then_reset(kind, poison_empty, device):  # pylint: disable=unused-argument
    """torch's convention for meta modules: no parameter is left uninitialised."""
    sizes = {"Linear": (32, 16), "LayerNormLinear": (32, 16), "LayerNormMLP": (32, 16)}
    module = getattr(te, kind)(*sizes.get(kind, (32,)), device="meta")
    module.to_empty(device=device)
    module.reset_parameters()
    assert all(p.device.type == device and p.isfinite().all() for p in module.parameters())
    assert run(module, random(4, 32, device=device)).outputs[0].isfinite().all()


@pytest.mark.parametrize("kind", MODULES)
def test_nothing_is_left_uninitialised(
    kind, poison_empty, device
):  # pylint: disable=unused-argument
    """With ``torch.empty`` filled with NaN, parameters, outputs and gradients are finite."""
    sizes = {"Linear": (32, 16), "LayerNormLinear": (32, 16), "LayerNormMLP": (32, 16)}
    for recipe in (None, Float8CurrentScaling(), DelayedScaling()):
        module = getattr(te, kind)(*sizes.get(kind, (32,)), device=device)
        assert all(p.isfinite().all() for p in module.parameters())
        step = run(module, random(5, 32, device=device), recipe)
        assert all(t.isfinite().all() for t in (*step.outputs, *step.grads.values()))


@pytest.mark.parametrize("kind", NORMS)
def test_norms_materialise_at_the_first_forward(kind):
    """Without ``reset_parameters``."""
    norm = getattr(te, kind)(32, device="meta")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    y = norm(random(4, 32, device=device))
    assert norm.weight.device.type == device and y.isfinite().all()


def test_meta_module_takes_a_checkpoint():
    """``assign=True`` materialises a meta module without initialising it first."""
    module = build("LayerNormMLP")
    twin = build_on_meta()
    twin.load_state_dict(module.state_dict(), assign=True)
    x = random(4, K)
    assert torch.equal(twin(x), module(x))


def build_on_meta():
    """A LayerNormMLP of the usual size without values."""
    return te.LayerNormMLP(K, 96, device="meta")
