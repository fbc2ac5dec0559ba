# SPDX-License-Identifier: Apache-2.0
"""Compiled modules against eager twins over the whole matrix of configurations, bit by bit.

Each case trains for some steps with another number of rows and another kind of output gradient each
time, in one graph. `test_fake_equals_real` compares what a compiler is told about a module op with
what the op really returns.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from transformer_engine.pytorch.formats.activations import ACTIVATIONS

from compile_support import (
    GEMM_MODULES,
    K,
    NORMS,
    OTHER_RECIPES,
    RECIPES,
    Twins,
    as_tuple,
    build,
    gradient,
    graphs,
    random,
    recorded_runs,
    recipe_of,
    with_recipe,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPTION = "options (bias, activation, zero-centred gamma, returned outputs)"
OPTIONS = pytest.mark.feature(OPTION, modes=("eager", "compiled"))
STEPS = ((24, "random"), (40, "expanded"), (17, "transposed"))

# Every flag on and off, and every pair of them in both combinations at least once.
FLAGS = (
    {},
    {"bias": False},
    {"return_bias": True},
    {"return_layernorm_output": True, "eps": 1e-3},
    {"zero_centered_gamma": True, "bias": False, "return_layernorm_output": True},
    {"zero_centered_gamma": True, "return_bias": True, "eps": 0.1},
    {"return_bias": True, "return_layernorm_output": True},
    {"bias": False, "return_bias": True, "eps": 1e-3},
)


def named(flags):
    """Test id of a set of flags."""
    return "-".join(f"{key}={value}" for key, value in flags.items()) or "defaults"


def train(module, recipe, device, dtype=BF16, backend="aot_eager"):
    """Three steps in one graph."""
    twins = Twins(module, backend=backend, dynamic=True)
    recipe = recipe_of(recipe)
    for step, (rows, grad) in enumerate(STEPS):
        x = random(rows, K, device=device, seed=step, dtype=dtype)
        twins.step(x, recipe, grad=grad, seed=step)
    assert graphs() == 1


@OPTIONS
@pytest.mark.parametrize("index", range(len(FLAGS)), ids=[named(flags) for flags in FLAGS])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
def test_flags(kind, recipe, index, device):
    """Bias, extra outputs and norm of the modules that have them; each flag meets both norms."""
    flags, norm = FLAGS[index], NORMS[(index + RECIPES.index(recipe)) % 2]
    options = dict(flags) if kind == "LayerNormLinear" else {"activation": "swiglu", **flags}
    train(build(kind, device, normalization=norm, **options), recipe, device)


# The flags do not know the format: each other recipe meets two sets, each set some recipes.
OTHER_FLAGS = [
    (kind, recipe, (start + 3 * i) % len(FLAGS))
    for start, recipe in enumerate(OTHER_RECIPES)
    for i, kind in enumerate(("LayerNormLinear", "LayerNormMLP"))
]


@OPTIONS
@pytest.mark.parametrize("kind,recipe,index", OTHER_FLAGS)
def test_flags_of_other_recipes(kind, recipe, index, device):
    """As `test_flags`."""
    norm = NORMS[(index + OTHER_RECIPES.index(recipe)) % 2]
    options = {} if kind == "LayerNormLinear" else {"activation": ("swiglu", "gelu")[index % 2]}
    options.update(FLAGS[index], normalization=norm, recipe=recipe)
    train(build(kind, device, **options), recipe, device)


@pytest.mark.feature(OPTION, modes=("eager", "compiled"), modules=("Linear",))
@pytest.mark.parametrize("flags", FLAGS[:3] + ({"bias": False, "return_bias": True},), ids=named)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_flags(recipe, flags, device):
    """Bias and extra output of ``Linear``."""
    train(build("Linear", device, **flags), recipe, device)


@pytest.mark.parametrize("recipe", OTHER_RECIPES)
def test_linear_of_other_recipes(recipe, device):
    """Each with one of the options above."""
    flags = FLAGS[OTHER_RECIPES.index(recipe) % 3]
    train(build("Linear", device, recipe=recipe, **flags), recipe, device)


ACTIVATION_CASES = [(activation, "delayed") for activation in sorted(ACTIVATIONS)]
ACTIVATION_CASES += [
    (activation, ("none", "current")[i % 2]) for i, activation in enumerate(sorted(ACTIVATIONS))
]
ACTIVATION_CASES += [
    (activation, OTHER_RECIPES[i]) for i, activation in enumerate(sorted(ACTIVATIONS))
]


@pytest.mark.feature(OPTION, modes=("eager", "compiled"), modules=("LayerNormMLP",))
@pytest.mark.parametrize("activation,recipe", ACTIVATION_CASES)
def test_activations(activation, recipe, device):
    """All activations, with parameters that are not the defaults where there are some."""
    options = {"activation": activation, "normalization": "RMSNorm"}
    if activation == "clamped_swiglu":
        options["activation_params"] = {"limit": 0.5, "alpha": 1.25, "glu_linear_offset": 0.5}
    train(build("LayerNormMLP", device, **options), recipe, device)


DTYPE_CASES = [(kind, r, dtype) for kind in GEMM_MODULES for r in RECIPES for dtype in (FP16, FP32)]
DTYPE_CASES += [
    (GEMM_MODULES[i % 3], recipe, (FP16, FP32)[i % 2]) for i, recipe in enumerate(OTHER_RECIPES)
]


@pytest.mark.feature("fp32 and fp16", modes=("eager", "compiled"))
@pytest.mark.parametrize("kind,recipe,dtype", DTYPE_CASES)
def test_dtypes(kind, recipe, dtype, device):
    """The other activation dtypes; FP8 GEMMs of fp32 modules add a bf16 bias."""
    train(build(kind, device, dtype=dtype, recipe=recipe), recipe, device, dtype)


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize("flags", ({}, {"zero_centered_gamma": True, "eps": 0.1}), ids=named)
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind, flags, dtype, device):
    """Norms alone."""
    train(build(kind, device, dtype=dtype, **flags), "none", device, dtype)


@pytest.mark.feature(
    "split parameters",
    modes=("eager", "compiled"),
    other_modules="the module has no such option",
)
@pytest.mark.parametrize("recipe", ("none", "current"))
@pytest.mark.parametrize("split", (("q", "k", "v"), {"q": 32, "kv": 16}), ids=("names", "sizes"))
@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear"))
def test_split_parameters(kind, split, recipe, device):
    """Weights that are kept as several parameters are joined in the graph."""
    train(build(kind, device, parameters_split=split), recipe, device)


INDUCTOR = [(kind, recipe) for kind in GEMM_MODULES for recipe in RECIPES]
INDUCTOR += [("LayerNormMLP", recipe) for recipe in ("block", "mxfp8", "nvfp4", "custom_delayed")]
INDUCTOR += [("LayerNormLinear", "nvfp4_row_scaled"), ("Linear", "custom_two_formats")]


@pytest.mark.feature(
    "forward and backward through Inductor",
    modes=("eager", "compiled"),
    others="see gradients of an exported program",
)
@pytest.mark.parametrize("kind,recipe", INDUCTOR)
def test_inductor(kind, recipe, device):
    """The default backend: C++ on the CPU, Triton on CUDA."""
    options = {"return_bias": True, "recipe": recipe}
    if kind != "Linear":
        options["return_layernorm_output"] = True
    if kind == "LayerNormMLP":
        options.update(activation="swiglu", normalization="RMSNorm")
    train(build(kind, device, **options), recipe, device, backend="inductor")


@pytest.mark.parametrize("kind", NORMS)
def test_inductor_norms(kind, device):
    """Norms alone, default backend."""
    train(build(kind, device), "none", device, backend="inductor")


@pytest.mark.parametrize("dtype", (FP16, FP32), ids=str)
@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
def test_inductor_dtypes(kind, dtype, device):
    """Default backend, current scaling, the other dtypes."""
    train(build(kind, device, dtype=dtype), "current", device, dtype, backend="inductor")


# --- what the compiler is told ------------------------------------------------------------------


def recorded_ops(monkeypatch, module, recipe, rows, frozen=()):
    """``(op, arguments, results)`` of each module op that a forward and backward call."""
    calls = recorded_runs(monkeypatch)
    for name, param in module.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    x = random(rows, K, device=next(module.parameters()).device)
    x.requires_grad_("x" not in frozen)
    outputs = [y for y in as_tuple(with_recipe(module, x, recipe_of(recipe))) if y is not None]
    outputs = [y for y in outputs if y.grad_fn is not None]
    if outputs:
        torch.autograd.backward(outputs, [gradient(y) for y in outputs])
    return calls


def description(tensor):
    """What a compiler relies on; the strides of empty tensors mean nothing."""
    if tensor is None:
        return None
    strides = tensor.stride() if tensor.numel() else None
    return tuple(tensor.shape), tensor.dtype, strides, tensor.device


def assert_fresh(arguments, results):
    """No result shares memory with an argument or another result."""

    def storages(tensors):
        return [t.untyped_storage().data_ptr() for t in tensors if t is not None and t.numel()]

    found = storages(results)
    assert len(set(found)) == len(found)
    assert not set(found) & set(storages(arguments[:-1]))


FROZEN = ((), ("x",), ("weight",), ("norm", "x"), ("fc1", "norm", "x"), ("bias",), ("",))


FAKE_CASES = [(kind, recipe) for kind in (*GEMM_MODULES, *NORMS) for recipe in RECIPES]
FAKE_CASES += [(kind, recipe) for kind in GEMM_MODULES for recipe in OTHER_RECIPES]


@pytest.mark.parametrize("rows", (24, 1, 0))
@pytest.mark.parametrize("kind,recipe", FAKE_CASES)
def test_fake_equals_real(kind, recipe, rows, device, monkeypatch):
    """Presence, shape, dtype, strides and device of every result of every module op."""
    for i, frozen in enumerate(FROZEN):
        options = {}
        if kind not in NORMS:
            options = {"recipe": recipe, **FLAGS[i % 3]}
        if kind not in ("Linear", *NORMS):
            options.update(
                return_layernorm_output=i % 2 == 1, normalization=NORMS[i % 2], bias=i % 3 != 1
            )
        if kind == "LayerNormMLP":
            options["activation"] = ("gelu", "swiglu")[i % 2]
        with monkeypatch.context() as patch:
            calls = recorded_ops(patch, build(kind, device, **options), recipe, rows, frozen)
        assert calls
        for op, arguments, results in calls:
            with FakeTensorMode() as mode:
                fakes = [
                    mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments
                ]
                answers = op(*fakes)
            assert [description(t) for t in answers] == [description(t) for t in results], op
            assert_fresh(arguments, results)
