# SPDX-License-Identifier: Apache-2.0
"""Copies and checkpoints of modules, with what they remember."""

import copy
import io
import os
import pickle
import time

import pytest
import torch
from eager_support import (
    BF16,
    GEMM_MODULES,
    K,
    MODULES,
    STATE,
    assert_equal,
    build,
    random,
    run,
    train,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.core import delayed_scaling

RECIPES = {"none": lambda: None, "current": Float8CurrentScaling}
RECIPES["delayed"] = lambda: DelayedScaling(amax_history_len=3)
CASES = [(kind, r) for kind in MODULES for r in RECIPES if r == "none" or kind in GEMM_MODULES]


def saved(state):
    """``state`` through ``torch.save`` and a ``torch.load`` that runs no code."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.feature("deepcopy and pickle", modes=("eager",), others="copied before the export")
@pytest.mark.parametrize("kind,recipe", CASES)
@pytest.mark.parametrize(
    "how", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))), ids=("deepcopy", "pickle")
)
def test_a_copy_continues_on_its_own(kind, recipe, how, device):
    """The copy has the parameters and scales of the original, and shares nothing with it."""
    module, recipe = build(kind, device, dtype=BF16), RECIPES[recipe]()
    train(module, recipe, range(2))
    twin = how(module)
    assert {p.data_ptr() for p in twin.parameters()}.isdisjoint(
        p.data_ptr() for p in module.parameters()
    )
    ahead = train(module, recipe, range(2, 4))
    assert_equal(train(twin, recipe, range(2, 4)), ahead)
    if getattr(module, "_delayed_scaling", None) is not None:
        assert module._delayed_scaling is not twin._delayed_scaling
        assert twin.fp8_meta["scaling_fwd"].scale is twin._delayed_scaling.fwd_scale


@pytest.mark.parametrize(
    "how", (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))), ids=("deepcopy", "pickle")
)
def test_a_copy_is_known_to_the_compiler(how):
    """Copies are registered, so that a trace can make their scaling state."""
    module = how(build("Linear"))
    assert any(known is module for known in delayed_scaling._MODULES.live())


def test_a_copied_model_keeps_shared_parameters_shared():
    """deepcopy of a container keeps ties."""
    model = torch.nn.Sequential(build("Linear", out=K), build("Linear", out=K))
    model[1].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight and twin[0].weight is not model[0].weight


def test_a_copy_keeps_cached_weights(device):
    """Cached bytes are copied too, and pickled as plain uint8."""
    module, recipe = build("LayerNormMLP", device, dtype=BF16), Float8CurrentScaling()
    x = random(16, K, dtype=BF16, device=device)
    expected = run(module, x, recipe, is_first_microbatch=True)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert list(twin._fp8_workspaces) == list(module._fp8_workspaces)
        with torch.no_grad():
            twin.fc1_weight.zero_()
            twin.fc2_weight.zero_()
        step = run(twin, x, recipe, is_first_microbatch=False)
        assert torch.equal(step.outputs[0], expected.outputs[0])
        assert torch.equal(step.grads["x"], expected.grads["x"])
        assert torch.equal(
            run(module, x, recipe, is_first_microbatch=False).outputs[0], step.outputs[0]
        )


# --- state dicts ---------------------------------------------------------------------------------


@pytest.mark.feature("state_dict", modes=("eager",), others="loaded before the export")
@pytest.mark.parametrize("kind,recipe", CASES)
def test_checkpoint_continues_bit_by_bit(kind, recipe, device):
    """Save, load into a new module with other values, go on: equal results and equal scales."""
    module, recipe = build(kind, device, dtype=BF16), RECIPES[recipe]()
    train(module, recipe, range(3))
    state = saved(module.state_dict())
    twin = build(kind, device, seed=5, dtype=BF16)
    result = twin.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert_equal(train(twin, recipe, range(3, 6)), train(module, recipe, range(3, 6)))


def test_checkpoint_of_a_model(device):
    """Extra states of nested modules find their modules."""
    model = torch.nn.Sequential(
        build("LayerNormLinear", device, out=K), build("LayerNormMLP", device)
    )
    recipe = DelayedScaling(amax_history_len=2)
    run(model, random(16, K, device=device), recipe)
    state = saved(model.state_dict())
    assert state["0._extra_state"].numel() and state["1._extra_state"].numel()
    twin = torch.nn.Sequential(
        build("LayerNormLinear", device, 7, out=K), build("LayerNormMLP", device, 8)
    )
    twin.load_state_dict(state)
    x = random(16, K, device=device, seed=1)
    for a, b in zip(run(twin, x, recipe).grads.values(), run(model, x, recipe).grads.values()):
        assert torch.equal(a, b)


def test_extra_state_is_plain_bytes(device):
    """CPU uint8, no pickle; it depends on the state only, not on what ran last."""
    module, recipe = build("Linear", device), DelayedScaling(amax_history_len=3)
    x = random(16, K, device=device)
    assert module.get_extra_state().numel() == 0
    run(module, x)
    run(module, x, Float8CurrentScaling())
    assert module.get_extra_state().numel() == 0
    module = build("Linear", device)
    run(module, x, recipe)
    extra = module.get_extra_state()
    assert extra.dtype == torch.uint8 and extra.device.type == "cpu" and extra.dim() == 1
    assert not bytes(extra.tolist()).startswith(b"\x80")
    module.eval()(x)
    assert torch.equal(module.get_extra_state(), extra)
    run(module.train(), x)
    assert torch.equal(module.get_extra_state(), extra)
    with pytest.warns(UserWarning, match="Recipe type changed"):
        run(module, x, Float8CurrentScaling())
    assert torch.equal(module.get_extra_state(), extra)
    twin = build("Linear", device)
    twin.set_extra_state(extra)
    assert torch.equal(twin.get_extra_state(), extra)


def test_untouched_scales_are_not_saved():
    """Tracing one module makes the state of others, which never recorded anything."""
    module = build("Linear")
    module._delayed_scaling = delayed_scaling.DelayedScalingState(3, 2, 4, torch.device("cpu"))
    assert module.get_extra_state().numel() == 0
    module._delayed_scaling.bwd_history[0, 0] = 1.0
    assert module.get_extra_state().numel() > 0


def test_extra_state_is_made_fast():
    """A history of 1024 steps is 24 KiB: microseconds, where ``bytes(tensor)`` takes a second."""
    module = build("LayerNormMLP")
    run(module, random(16, K), DelayedScaling(amax_history_len=1024))
    start = time.perf_counter()
    for _ in range(5):
        module.set_extra_state(module.get_extra_state())
    assert time.perf_counter() - start < 0.5


def test_loading_replaces_the_state(device):
    """A module that has scales of its own, with another history length, takes those of the file."""
    module, other = build("Linear", device), build("Linear", device)
    run(module, random(16, K, device=device), DelayedScaling(amax_history_len=3))
    run(other, 9 * random(16, K, device=device), DelayedScaling(amax_history_len=5))
    other.load_state_dict(module.state_dict())
    for field in STATE:
        assert torch.equal(
            getattr(other._delayed_scaling, field), getattr(module._delayed_scaling, field)
        )


@pytest.mark.parametrize("length", (1, 2, 6))
def test_loaded_history_fits_another_recipe(length, device):
    """Shorter: the first rows stay; longer: zero rows follow. Scales stay."""
    module, twin = build("Linear", device), build("Linear", device)
    for i in range(4):
        run(module, random(16, K, device=device, seed=i), DelayedScaling(amax_history_len=3))
    twin.load_state_dict(module.state_dict())
    history = module._delayed_scaling.fwd_history
    with torch.no_grad(), te.autocast(recipe=DelayedScaling(amax_history_len=length)):
        twin(torch.zeros(16, K, device=device))
    loaded = twin._delayed_scaling
    assert loaded.fwd_history.shape == (length, 3)
    kept = min(3, length)
    assert torch.equal(loaded.fwd_history[1:kept], history[1:kept])
    assert (loaded.fwd_history[kept:] == 0).all()
    assert torch.equal(loaded.fwd_scale, module._delayed_scaling.fwd_scale)


@pytest.mark.parametrize("state", (None, torch.empty(0, dtype=torch.uint8)), ids=("None", "empty"))
@pytest.mark.parametrize("kind", MODULES)
def test_empty_extra_states_change_nothing(state, kind):
    """As older checkpoints have them."""
    module, recipe = build(kind), DelayedScaling(amax_history_len=2)
    if kind in GEMM_MODULES:
        run(module, random(16, K), recipe)
        scale = module._delayed_scaling.fwd_scale.clone()
    module.set_extra_state(state)
    if kind in GEMM_MODULES:
        assert torch.equal(module._delayed_scaling.fwd_scale, scale)


class Danger:
    """Would leave a mark if it were unpickled."""

    def __reduce__(self):
        return os.putenv, ("TE_TEST_UNPICKLED", "1")


def test_pickled_extra_state_is_refused(monkeypatch):
    """Unpickling can run any code: it does not happen, and the message names the variable."""
    payload = pickle.dumps({"recipe": Danger(), "scale_fwd": torch.ones(3)})
    ran = []
    monkeypatch.setattr(os, "putenv", lambda *args: ran.append(args))
    state = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    for value in (state, io.BytesIO(payload)):
        with pytest.raises(RuntimeError, match="NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"):
            build("Linear").set_extra_state(value)
    assert not ran


def test_pickled_extra_state_without_scales_is_ignored():
    """The reference writes such for recipes without state; nothing in it is needed."""
    for content in ({}, {"recipe": None, "extra_fp8_variables": {"num_gemms": 1}}):
        state = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        module = build("Linear")
        module.set_extra_state(state)
        assert module._delayed_scaling is None


def test_extra_state_of_another_module_is_refused():
    """The number of slots does not fit."""
    mlp = build("LayerNormMLP")
    run(mlp, random(16, K), DelayedScaling())
    with pytest.raises(RuntimeError, match="6 forward and 4 backward.*3 and 2"):
        build("Linear").set_extra_state(mlp.get_extra_state())


@pytest.mark.parametrize(
    "ours,theirs",
    [
        (lambda: build("Linear"), lambda: torch.nn.Linear(K, 48)),
        (lambda: build("Linear", bias=False), lambda: torch.nn.Linear(K, 48, bias=False)),
        (lambda: build("LayerNorm"), lambda: torch.nn.LayerNorm(K)),
        (lambda: build("RMSNorm"), lambda: torch.nn.RMSNorm(K)),
    ],
)
def test_checkpoints_of_torch_modules(ours, theirs):
    """They load with ``strict=True``; ours loads there but for the key of the extra state."""
    module, plain = ours(), theirs()
    result = module.load_state_dict(saved(plain.state_dict()))
    assert not result.missing_keys and not result.unexpected_keys
    for a, b in zip(module.parameters(), plain.parameters()):
        assert torch.equal(a, b)
    result = plain.load_state_dict(module.state_dict(), strict=False)
    assert not result.missing_keys and result.unexpected_keys in ([], ["_extra_state"])


def test_strict_loading_still_finds_missing_parameters():
    """Only the extra state may be absent."""
    model = torch.nn.Sequential(build("Linear"), build("LayerNormMLP"))
    state = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    model.load_state_dict(state)
    del state["1.fc2_bias"]
    with pytest.raises(RuntimeError, match="1.fc2_bias"):
        model.load_state_dict(state)


def test_assign_loading():
    """``load_state_dict(assign=True)`` takes the tensors themselves."""
    module, twin = build("LayerNormMLP"), build("LayerNormMLP", seed=3)
    state = module.state_dict()
    twin.load_state_dict(state, assign=True)
    assert twin.fc1_weight.data_ptr() == state["fc1_weight"].data_ptr()
    x = random(4, K)
    assert torch.equal(twin(x), module(x))
