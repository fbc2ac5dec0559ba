# SPDX-License-Identifier: Apache-2.0
"""``LayerNormMLP(checkpoint=True)`` against the same module without it, bit by bit."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from compile_support import (
    FEW_OTHERS,
    K,
    Twins,
    as_tuple,
    assert_same_bits,
    assert_same_modules,
    build,
    gradient,
    graphs,
    random,
    recipe_of,
    reset,
    with_recipe,
)
from recipe_list import ALL_RECIPES, tensor_type

from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.core.ops import EAGER
from transformer_engine.pytorch.tensor import NVFP4Quantizer

ROWS, SEED = 32, 7
FEW = ("none", "current", "delayed")


def make(device="cpu", recomputing=True, **options):
    """The module, which recomputes or keeps everything."""
    return build("LayerNormMLP", device, checkpoint=recomputing, **options)


def keeping(module):
    """A copy that keeps everything for backward."""
    twin = copy.deepcopy(module)
    twin.checkpoint = False
    return twin


def step(module, x, recipe, seed=0, **kwargs):
    """``(outputs, input gradient)`` of one step whose backward runs outside of the region."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(SEED + seed)
    outputs = as_tuple(with_recipe(module, x, recipe, **kwargs))
    outputs = [y for y in outputs if y is not None and y.grad_fn is not None]
    torch.autograd.backward(outputs, [gradient(y, seed=seed + i) for i, y in enumerate(outputs)])
    return outputs, x.grad


def assert_same_training(module, twin, recipe, device, steps=3, **kwargs):
    """Several steps of both give the same bits everywhere."""
    for seed in range(steps):
        x = random(ROWS, K, device=device, seed=seed, dtype=module.fc1_weight.dtype)
        results = [step(m, x, recipe, seed, **kwargs) for m in (module, twin)]
        for a, b in zip(*(outputs for outputs, _ in results)):
            assert_same_bits(a, b, "output")
        assert_same_bits(*(dx for _, dx in results), "input gradient")
        assert_same_modules(module, twin)


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.feature(
    "LayerNormMLP(checkpoint=True)",
    modes=("eager",),
    modules=("LayerNormMLP",),
    other_modules="the module has no such option",
)
@pytest.mark.parametrize("want", (False, True))
@pytest.mark.parametrize("recipe", ("none", *ALL_RECIPES))
def test_recomputed_bits(recipe, want, device):
    """Outputs, gradients, scales and histories of every recipe."""
    module = make(device, activation="swiglu", return_layernorm_output=want)
    assert_same_training(module, keeping(module), recipe_of(recipe), device)


@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize(
    "options",
    [
        {"normalization": "RMSNorm", "activation": "srelu", "zero_centered_gamma": True},
        {"bias": False, "activation": "clamped_swiglu"},
        {"return_bias": True, "activation": "geglu"},
        {"dtype": torch.float32},
    ],
)
def test_options(options, recipe, device):
    """Norms, activations, biases, dtypes."""
    module = make(device, **options)
    assert_same_training(module, keeping(module), recipe_of(recipe), device)


@pytest.mark.parametrize("recipe", (*FEW, "mxfp8_dq", "current_hp"))
@pytest.mark.parametrize(
    "trained",
    [
        ("fc2_weight",),
        ("fc2_bias",),
        ("fc1_bias",),
        ("fc1_weight",),
        ("layer_norm_weight",),
        (),
    ],
)
def test_frozen_parameters(trained, recipe, device):
    """Whatever is trained, alone or with the input."""
    module = make(device)
    for name, param in module.named_parameters():
        param.requires_grad_(name in trained)
    twin, kept = keeping(module), recipe_of(recipe)
    assert_same_training(module, twin, kept, device, steps=2)
    if trained:  # no gradient of the input
        x = random(ROWS, K, device=device)
        for m in (module, twin):
            y = with_recipe(m, x, kept)
            y.backward(gradient(y))
        assert_same_modules(module, twin)


def test_torch_autocast(device):
    """fp32 parameters in bf16 arithmetic; backward runs outside of torch.autocast."""
    module = make(device, dtype=torch.float32)
    results = []
    for m in (module, keeping(module)):
        x = random(ROWS, K, device=device, dtype=torch.float32).requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            y = with_recipe(m, x, recipe_of("current"))
        y.backward(gradient(y))
        results.append((y, x.grad, *(p.grad for p in m.parameters())))
    for a, b in zip(*results):
        assert_same_bits(a, b, "autocast")


@pytest.mark.parametrize("recipe", ("current", "delayed", "mxfp8"))
def test_cached_weights_and_deferred_backward(recipe, device):
    """Three microbatches forward, then their backwards; the cache is that of the twin."""
    module = make(device)
    twin, kept = keeping(module), recipe_of(recipe)
    for minibatch in range(3):
        results = []
        for m in (module, twin):
            pending = []
            for micro in range(3):
                x = random(ROWS, K, device=device, seed=10 * minibatch + micro).requires_grad_()
                y = with_recipe(m, x, kept, is_first_microbatch=micro == 0)
                pending.append((x, y))
            for x, y in pending:
                y.backward(gradient(y))
            results.append([t for x, y in pending for t in (y, x.grad)])
            with torch.no_grad():
                for param in m.parameters():
                    param.add_(param.grad, alpha=-0.01)
        for a, b in zip(*results):
            assert_same_bits(a, b, "microbatch")
        assert_same_modules(module, twin)


def test_weight_gradients_elsewhere(device):
    """Fused accumulation and delayed weight gradients see the recomputed operands."""
    for options in ({"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}):
        module = make(device, **options)
        twin, recipe = keeping(module), recipe_of("current")
        for m in (module, twin):
            for param in (m.fc1_weight, m.fc2_weight):
                param.main_grad = torch.zeros_like(param, dtype=torch.float32)
        for seed in range(2):
            x = random(ROWS, K, device=device, seed=seed)
            dx = [step(m, x, recipe, seed)[1] for m in (module, twin)]
            assert_same_bits(*dx, "input gradient")
            for m in (module, twin):
                m.backward_dw()
        for a, b in zip(module.parameters(), twin.parameters()):
            assert_same_bits(a.grad, b.grad, "gradient")
            if hasattr(a, "main_grad"):
                assert_same_bits(a.main_grad, b.main_grad, "main_grad")
        assert any(
            p.main_grad.any() or p.grad.any() for p in (module.fc1_weight, module.fc2_weight)
        )


# --- stochastic rounding --------------------------------------------------------------------------


def stochastic_inputs(role):
    """Forward operands that are rounded stochastically, as gradients are."""
    return NVFP4Quantizer(stochastic_rounding=tensor_type(role) != "weight")


@pytest.mark.parametrize("compiled", (False, True))
def test_stochastic_forward_operands_repeat_their_draws(compiled, device):
    """Backward rounds as forward did, and draws as many numbers as without recomputation."""
    recipe = CustomRecipe(stochastic_inputs)
    module = make(device, activation="swiglu")
    twin = keeping(module)
    reset()
    call = module
    if compiled:
        call = torch.compile(
            lambda x: module(x),  # pylint: disable=unnecessary-lambda
            fullgraph=True,
            backend="aot_eager",
        )
    for seed in range(2):
        x = random(ROWS, K, device=device, seed=seed)
        results = [step(m, x, recipe, seed)[1] for m in (call, twin)]
        assert_same_bits(*results, "input gradient")
        assert_same_modules(module, twin)
    differing = [step(twin, random(ROWS, K, device=device), recipe, seed)[1] for seed in (0, 1)]
    assert not torch.equal(*differing), "the rounding is not stochastic"


def test_draws_are_not_consumed_twice(device):
    """After a step the generator is where the twin's is."""
    recipe, after = CustomRecipe(stochastic_inputs), []
    module = make(device)
    for m in (module, keeping(module)):
        step(m, random(ROWS, K, device=device), recipe)
        after.append(torch.randint(0, 1 << 62, (4,), device=device))
    assert torch.equal(*after)


# --- what is kept and what is run -----------------------------------------------------------------


def kept_bytes(call, x, parameters):
    """Bytes that autograd keeps of tensors that have rows, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in parameters}
    kept = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call(x)
    y.sum().backward()
    return sum(kept.values())


def calling(module, recipe):
    """A function of the input."""
    return lambda x: with_recipe(module, x, recipe)


@pytest.mark.parametrize("backend", (None, "aot_eager", "inductor"))
@pytest.mark.parametrize("recipe", (*FEW, "mxfp8"))
def test_only_the_input_is_kept(recipe, backend, device):
    """Of what grows with the rows; compilers do not keep what backward could reuse."""
    kept = {}
    for recomputing in (False, True):
        for rows in (256, 512):
            reset()
            module, made = make(device, recomputing, activation="swiglu"), recipe_of(recipe)
            call = calling(module, made)
            if backend is not None:
                call = torch.compile(call, fullgraph=True, backend=backend)
            x = random(rows, K, device=device).requires_grad_()
            kept[recomputing, rows] = kept_bytes(call, x, module.parameters())
    growth = {
        recomputing: kept[recomputing, 512] - kept[recomputing, 256] for recomputing in (0, 1)
    }
    assert growth[True] == 256 * K * 2
    assert growth[False] > 3 * growth[True]


def test_stages_run_twice_but_the_last_gemm(monkeypatch, device):
    """Norm, fc1 and activation run in forward and in backward, the second GEMM does not."""
    calls = []

    def counted(name):
        run = getattr(EAGER, name)
        return lambda *args: (calls.append(name), run(*args))[1]

    for name in ("norm_forward", "activation_forward", "gemm", "rng_state"):
        monkeypatch.setattr(EAGER, name, counted(name))
    module, recipe = make(device), recipe_of("current")
    x = random(ROWS, K, device=device).requires_grad_()
    y = with_recipe(module, x, recipe)
    assert calls == ["norm_forward", "gemm", "activation_forward", "gemm"]
    calls.clear()
    y.backward(gradient(y))
    assert calls == ["norm_forward", "gemm", "activation_forward", *["gemm"] * 4]
    calls.clear()
    with torch.no_grad():
        with_recipe(module, x, recipe)
    assert calls == ["norm_forward", "gemm", "activation_forward", "gemm"]


def test_retained_graph(device):
    """Two backwards of one forward."""
    module = make(device)
    twin, recipe = keeping(module), recipe_of("delayed")
    for m in (module, twin):
        y = with_recipe(m, random(ROWS, K, device=device), recipe)
        y.backward(gradient(y), retain_graph=True)
        y.backward(gradient(y, seed=1))
    assert_same_modules(module, twin)


def test_inside_of_another_checkpoint(device):
    """torch.utils.checkpoint around the module: recomputation within recomputation."""
    module = make(device)
    twin, recipe = keeping(module), recipe_of("current")
    x = random(ROWS, K, device=device)
    _, expected = step(twin, x, recipe)
    x.requires_grad_()
    y = checkpoint(with_recipe, module, x, recipe, use_reentrant=False)
    y.backward(gradient(y))
    assert_same_bits(x.grad, expected, "input gradient")
    assert_same_modules(module, twin)


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.feature(
    "LayerNormMLP(checkpoint=True)",
    modes=("compiled",),
    modules=("LayerNormMLP",),
    other_modules="the module has no such option",
)
@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("recipe", (*FEW, *FEW_OTHERS))
def test_compiled(recipe, backend, device):
    """One graph, equal to the eager module that keeps everything, batches of any size."""
    module = make(device, activation="swiglu", return_layernorm_output=True)
    twins, kept = Twins(module, backend=backend, dynamic=True), recipe_of(recipe)
    twins.eager.checkpoint = False
    for seed, rows in enumerate((48, 32, 96)):
        twins.step(random(rows, K, device=device, seed=seed), kept, seed=seed)
    assert graphs() == 1


def test_compiled_with_cached_weights(device):
    """At most three graphs over minibatches of three microbatches."""
    twins, recipe = Twins(make(device)), recipe_of("current")
    twins.eager.checkpoint = False
    for minibatch in range(3):
        for micro in range(3):
            x = random(ROWS, K, device=device, seed=3 * minibatch + micro)
            twins.step(x, recipe, is_first_microbatch=micro == 0)
        with torch.no_grad():
            for m in (twins.module, twins.eager):
                for param in m.parameters():
                    param.mul_(0.9)
    assert graphs() <= 3
