# SPDX-License-Identifier: Apache-2.0
"""What compiled modules say when something does not fit, and how they fall back to eager.

Which exception Dynamo wraps an error in depends on the torch version; the message does not.
"""

import re
import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.core import ops
from transformer_engine.pytorch.dynamo import capability

from compile_support import (
    GEMM_MODULES,
    K,
    N,
    Twins,
    build,
    graphs,
    random,
    recipe_of,
    reset,
    scaling_states,
    with_recipe,
)

FALLBACK = "Falling back to eager execution under torch.compile: "


def compiled_call(module, backend="aot_eager", fullgraph=True):
    """``(x, recipe) -> outputs``, compiled."""
    reset()

    def call(x, recipe=None):
        return with_recipe(module, x, recipe)

    return torch.compile(call, fullgraph=fullgraph, backend=backend)


def no_kernels(monkeypatch):
    """Fail if anything is computed."""

    def never(request):
        raise AssertionError(f"{request.op} ran")

    monkeypatch.setattr(ops, "select", never)


# --- errors while tracing -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ("none", "current", "delayed"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_wrong_input_width(kind, recipe, device, monkeypatch):
    """The input and in_features are named; nothing runs, and a good call afterwards works."""
    module, recipe = build(kind, device), recipe_of(recipe)
    call = compiled_call(module)
    with monkeypatch.context() as patch:
        no_kernels(patch)
        with pytest.raises(
            Exception, match=r"the input of .*\(16, 48\).*must be 64 \(in_features\)"
        ):
            call(random(16, 48, device=device), recipe)
    assert not te.quantization.FP8GlobalStateManager.is_fp8_enabled()
    assert call(random(16, K, device=device), recipe).shape[0] == 16


@pytest.mark.parametrize("kind", ("LayerNorm", "RMSNorm"))
def test_wrong_norm_width(kind, device):
    """Norms name the shape they normalise over."""
    call = compiled_call(build(kind, device))
    with pytest.raises(Exception, match=r"input.*48\).*\(64,\).*normalized_shape"):
        call(random(16, 48, device=device))
    call(random(16, K, device=device))


@pytest.mark.parametrize("recipe", ("none", "delayed"))
@pytest.mark.parametrize("activation,width", (("gelu", 96), ("swiglu", 96), ("swiglu", 192)))
def test_wrong_fc2_width(activation, width, recipe, device, monkeypatch):
    """FC2 is named, and the width that the activation gives, gated or not."""
    module, recipe = build("LayerNormMLP", device, activation=activation), recipe_of(recipe)
    good, call = module.fc2_weight, compiled_call(module)
    wrong = 2 * width if width == 96 else width
    with torch.no_grad():
        module.fc2_weight = torch.nn.Parameter(random(K, wrong, device=device))
    x = random(16, K, device=device)
    with monkeypatch.context() as patch:
        no_kernels(patch)
        with pytest.raises(Exception, match=rf"FC2 of LayerNormMLP.*\(64, {wrong}\).*must be 96"):
            call(x, recipe)
    module.fc2_weight = good
    assert call(x, recipe).shape == x.shape


def test_wrong_fc1_width(device):
    """FC1 is named if its weight does not take the module's input."""
    module = build("LayerNormMLP", device)
    module.fc1_weight = torch.nn.Parameter(random(96, 32, device=device))
    with pytest.raises(Exception, match=r"FC1 of LayerNormMLP.*\(96, 32\).*must be 64"):
        compiled_call(module)(random(16, K, device=device), recipe_of("current"))


@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_ffn_that_fp8_can_not_take(recipe, device):
    """ffn=24: FC2 contracts over 24 columns, which is no multiple of 16. Without FP8 it works."""
    module = te.LayerNormMLP(K, 24, params_dtype=torch.bfloat16, device=device)
    call, x = compiled_call(module), random(16, K, device=device)
    match = r"FP8 execution requires dimension 1 of the FC2 weight .* multiple of 16, but it is 24"
    with pytest.raises(Exception, match=match):
        call(x, recipe_of(recipe))
    assert call(x).shape == x.shape


@pytest.mark.parametrize(
    "shape,dim,need", (((60, 64), 0, 8), ((64, 56), 1, 16), ((64, 100), 1, 16))
)
def test_linear_that_fp8_can_not_take(shape, dim, need, device):
    """The message has module, dimension, value and the cure."""
    out_features, in_features = shape
    module = te.Linear(in_features, out_features, params_dtype=torch.bfloat16, device=device)
    call, x = compiled_call(module), random(16, in_features, device=device)
    match = (
        rf"dimension {dim} of the weight of Linear .* multiple of {need}, but .* {shape[dim]}.*Use"
    )
    with pytest.raises(Exception, match=match):
        call(x, recipe_of("current"))
    assert call(x).shape == (16, out_features)


def test_dtype_mismatch(device):
    """An input of another dtype than the parameters is named while tracing."""
    for kind in GEMM_MODULES:
        call = compiled_call(build(kind, device))
        with pytest.raises(Exception, match="input of .* is torch.float32, but a parameter"):
            call(random(16, K, device=device, dtype=torch.float32))
        call(random(16, K, device=device))


def test_errors_without_fullgraph(device):
    """The same message where a graph break is allowed."""
    module = build("LayerNormMLP", device)
    call = compiled_call(module, fullgraph=False)
    with pytest.raises(Exception, match=r"the input of LayerNormMLP"):
        call(random(16, 32, device=device), recipe_of("current"))
    module.fc2_weight = torch.nn.Parameter(random(K, 48, device=device))
    with pytest.raises(Exception, match=r"FC2 of LayerNormMLP"):
        call(random(16, K, device=device), recipe_of("current"))
    assert not te.quantization.FP8GlobalStateManager.is_fp8_enabled()


def test_functions_of_the_user_in_a_delayed_recipe(device):
    """A Python function as amax algorithm can not be traced, and the message says what to do."""
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=lambda history: history[0])
    call, x = compiled_call(build("Linear", device)), random(16, K, device=device)
    with pytest.raises(Exception, match='amax_compute_algo "max" or "most_recent"'):
        call(x, recipe)
    call(x, recipe_of("delayed"))


def test_failed_trace_leaves_delayed_state_alone(device):
    """An error while tracing changes no scale and no history; the next step equals eager."""
    twins, recipe = Twins(build("LayerNormMLP", device)), recipe_of("delayed")
    twins.step(random(16, K, device=device), recipe)
    with pytest.raises(Exception, match="the input of"):
        twins.compiled(random(16, 32, device=device), recipe)
    twins.compare()
    assert not any(state.pending for state in scaling_states(twins.module).values())
    twins.step(random(16, K, device=device, seed=1), recipe)
    assert graphs() == 1


# --- fallback to eager --------------------------------------------------------------------------


def unsupported_by_class(module, monkeypatch):
    """A configuration that the module itself reports."""
    reason = "this configuration is made up by a test."
    monkeypatch.setattr(type(module), "unsupported_in_graph", lambda self: reason)
    return reason


def unsupported_by_instance(module, monkeypatch):
    """A configuration of this one module."""
    reason = "this one is made up for an instance."
    monkeypatch.setattr(module, "unsupported_in_graph", lambda: reason)
    return reason


def unsupported_by_torch(module, monkeypatch):
    """A torch that is too old."""
    monkeypatch.setattr(capability, "torch_version", lambda: (2, 5, 1))
    return "is older than 2.11"


OBSTACLES = (unsupported_by_class, unsupported_by_instance, unsupported_by_torch)


FALLBACKS = [("LayerNormMLP", "delayed", obstacle) for obstacle in OBSTACLES]
FALLBACKS += [("LayerNormMLP", "none", OBSTACLES[0]), ("LayerNormLinear", "current", OBSTACLES[1])]
FALLBACKS += [("Linear", "current", OBSTACLES[0]), ("Linear", "delayed", OBSTACLES[1])]


@pytest.mark.parametrize("kind,recipe,obstacle", FALLBACKS)
def test_fallback(kind, obstacle, recipe, device, monkeypatch):
    """Without fullgraph: a warning with the reason, and the numbers and state of eager."""
    twins, recipe = Twins(build(kind, device), fullgraph=False), recipe_of(recipe)
    with monkeypatch.context() as patch:
        reason = obstacle(twins.module, patch)
        with pytest.warns(UserWarning, match=f"^{re.escape(FALLBACK)}.*{reason}"):
            twins.step(random(16, K, device=device), recipe)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(2):
                twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for seed in range(2):
            if obstacle is unsupported_by_torch:
                torch._dynamo.reset()  # the version is a constant of the graph
            twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)


@pytest.mark.parametrize("kind", ("Linear", "LayerNormMLP", "RMSNorm"))
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_fullgraph_names_the_reason(obstacle, kind, device, monkeypatch):
    """With fullgraph: an exception with the reason; then a supported call on the same callable."""
    module = build(kind, device)
    recipe = None if kind in ("LayerNorm", "RMSNorm") else recipe_of("current")
    twins = Twins(module)
    with monkeypatch.context() as patch:
        reason = obstacle(module, patch)
        with pytest.raises(Exception, match=reason) as error:
            twins.compiled(random(16, K, device=device), recipe)
        assert FALLBACK in str(error.value)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        twins.step(random(16, K, device=device), recipe)
    assert graphs() == 1


def test_only_the_unsupported_module_leaves_the_graph(device, monkeypatch):
    """The rest of the model stays compiled, and caches are kept as in eager."""

    def call(modules, x, recipe, first):
        with te.autocast(recipe=recipe):
            for module in modules:
                x = module(x, is_first_microbatch=first)
        return x

    layers = [te.Linear(K, K, params_dtype=torch.bfloat16, device=device) for _ in range(3)]
    twins = Twins(torch.nn.ModuleList(layers), call, fullgraph=False)
    unsupported_by_instance(twins.module[1], monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for seed, first in enumerate((True, False, False, True)):
            before = twins.module[1]._fp8_workspaces.get("weight")
            x = random(16, K, device=device, seed=seed)
            twins.step(x, recipe_of("current"), first, seed=seed)
            after = twins.module[1]._fp8_workspaces.get("weight")
            assert (before is after) == (not first)
    assert graphs() > 0


def test_no_warning_without_a_reason(device):
    """A supported call never warns of a fallback, not even where the user breaks the graph."""

    def call(module, x, recipe):
        with te.autocast(recipe=recipe):
            y = module(x)
        torch._dynamo.graph_break()
        return y * 2

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for kind in GEMM_MODULES:
            twins = Twins(build(kind, device), call, fullgraph=False)
            for seed in range(2):
                twins.step(random(16, K, device=device, seed=seed), Float8CurrentScaling())
    assert not [w for w in caught if FALLBACK in str(w.message)]


def test_graph_break_inside_a_region(device):
    """A break of the user between two modules of one region keeps numbers and state."""

    def call(modules, x, recipe):
        with te.autocast(recipe=recipe):
            x = modules[0](x)
            torch._dynamo.graph_break()
            return modules[1](x)

    for name in ("current", "delayed"):
        layers = [build("LayerNormMLP", device), build("Linear", device)]
        twins, recipe = Twins(torch.nn.ModuleList(layers), call, fullgraph=False), recipe_of(name)
        for seed in range(3):
            y = twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)[0]
            assert y.shape == (16, N)
