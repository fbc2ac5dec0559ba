# SPDX-License-Identifier: Apache-2.0
"""torch.export with what else users combine with it: the program has the bits of eager."""

import copy

import pytest
import torch

from deployment_support import Recipe, exported, trained
from compile_support import (
    GEMM_MODULES,
    K,
    as_tuple,
    assert_same_bits,
    build,
    random,
)
from recipe_list import recipe_of
from test_compile_dynamic import VIEWS
from test_compile_matrix import FLAGS, OPTION, named
from test_compile_transforms import NO_RULE, TRANSFORMS
from test_export import STRICT, assert_equal_programs

import transformer_engine.pytorch as te
from transformer_engine.pytorch.formats.activations import ACTIVATIONS

EACH = pytest.mark.parametrize("kind", GEMM_MODULES)
EDGES = ("Linear", "LayerNormLinear")  # the modules with fp8_output and fp8_grad
NO_QUANTIZED = "graphs and programs have plain tensors as results and gradients"
NOT_RECORDED = "a program records nothing: calibrate the module before its export"
NORM_FLAGS = {"return_layernorm_output", "zero_centered_gamma", "eps"}
FLAG_CASES = [
    pytest.param(kind, flags, id=f"{kind}-{named(flags)}")
    for kind in GEMM_MODULES
    for flags in FLAGS
    if kind != "Linear" or not set(flags) & NORM_FLAGS
]


def export_and_compare(module, recipe, device, strict=False, dtype=torch.bfloat16):
    """Export a module in its own autocast; the program and its leaf ops give the bits of eager."""
    model = Recipe(module, recipe_of(recipe)).eval()
    with torch.no_grad():
        program = exported(model, random(32, K, device=device, dtype=dtype), strict)
    assert_equal_programs(model, (program, program.run_decompositions()), device, dtype)
    return program


# --- options of the modules ----------------------------------------------------------------------


@pytest.mark.feature("fp32 and fp16", modes=("exported",))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("recipe", ("none", "current", "nvfp4"))
@EACH
def test_dtypes(kind, recipe, dtype, device):
    """The other activation dtypes."""
    module = build(kind, device, dtype=dtype, recipe=recipe)
    export_and_compare(module, recipe, device, dtype=dtype)


@pytest.mark.feature(OPTION, modes=("exported",))
@pytest.mark.parametrize("kind,flags", FLAG_CASES)
def test_flags(kind, flags, device):
    """Bias, returned outputs, zero-centred gamma and eps; each recipe meets each module."""
    recipe = ("none", "current", "mxfp8")[(FLAGS.index(flags) + GEMM_MODULES.index(kind)) % 3]
    module = build(kind, device, recipe=recipe, **flags)
    export_and_compare(module, recipe, device, strict=FLAGS.index(flags) % 2 == 1)


@pytest.mark.feature(OPTION, modes=("exported",), modules=("LayerNormMLP",))
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activations(activation, device):
    """Each activation."""
    recipe = ("none", "current")[sorted(ACTIVATIONS).index(activation) % 2]
    export_and_compare(build("LayerNormMLP", device, activation=activation), recipe, device)


@pytest.mark.feature("split parameters", modes=("exported",))
@pytest.mark.parametrize("recipe", ("none", "current"))
@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear"))
def test_split_parameters(kind, recipe, device):
    """The program has each piece of the weight by its name."""
    module = build(kind, device, parameters_split=("q", "k", "v"))
    program = export_and_compare(module, recipe, device)
    names = {name.removeprefix("module.") for name, _ in program.named_parameters()}
    assert {"q_weight", "k_weight", "v_weight"} <= names


# --- what is around a call -----------------------------------------------------------------------


class Viewed(torch.nn.Module):
    """A model that gives its module a view of the input."""

    def __init__(self, model, view):
        super().__init__()
        self.model, self.view = model, view

    def forward(self, x):
        """``x`` of the shape that ``view`` makes ``[rows, K]`` of."""
        return self.model(self.view(x))


@pytest.mark.feature("inputs that are not contiguous", modes=("exported",))
@pytest.mark.parametrize("layout", sorted(VIEWS))
@EACH
def test_non_contiguous_inputs(kind, layout, device):
    """Views made by the caller and views made in the program."""
    view, shape = VIEWS[layout]
    model = Recipe(build(kind, device), recipe_of("current")).eval()
    inside = Viewed(model, view)
    x = random(*shape, device=device)
    with torch.no_grad():
        wanted = model(view(x).contiguous())
        assert_same_bits(model(view(x)), wanted, "eager")
        program = torch.export.export(inside, (x,), strict=False)
        assert_same_bits(program.module()(x), wanted, "view in the program")
        program = torch.export.export(model, (view(x).contiguous(),), strict=False)
        assert_same_bits(program.module()(view(x)), wanted, "view of the caller")


class TorchAutocast(torch.nn.Module):
    """A model that opens torch.autocast."""

    def __init__(self, model, device):
        super().__init__()
        self.model, self.device = model, device

    def forward(self, x):
        """``x [rows, K]``."""
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return self.model(x)


@pytest.mark.feature("torch.autocast around or inside", modes=("exported",))
@pytest.mark.parametrize("place", ("inside", "around"))
@pytest.mark.parametrize("recipe", ("none", "current"))
@EACH
def test_torch_autocast(kind, recipe, place, device):
    """fp32 parameters under bf16 torch.autocast, in the model or around the export.

    A program holds the casts of its export, so it is called without torch.autocast.
    """
    module = build(kind, device, dtype=torch.float32, recipe=recipe)
    inner = Recipe(module, recipe_of(recipe)).eval()
    model, dtype = TorchAutocast(inner, device), torch.float32
    x = random(32, K, device=device, dtype=dtype)
    with torch.no_grad():
        if place == "inside":
            program = exported(model, x)
        else:
            with torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False):
                program = exported(inner, x)
        assert program.module()(x).dtype == torch.bfloat16
    assert_equal_programs(model, (program, program.run_decompositions()), device, dtype)


# --- parameters from outside, derivatives --------------------------------------------------------


@pytest.mark.feature("torch.func.functional_call", modes=("exported",))
@pytest.mark.parametrize("recipe", ("none", "current", "nvfp4"))
@EACH
def test_functional_call(kind, recipe, device):
    """A program is called with parameters from outside, as the module is."""
    model = Recipe(build(kind, device, recipe=recipe), recipe_of(recipe)).eval()
    other = Recipe(build(kind, device, seed=7, recipe=recipe), recipe_of(recipe)).eval()
    x = random(32, K, device=device)
    with torch.no_grad():
        called = exported(model, x).module()
        given = dict(other.named_parameters())
        assert not torch.equal(as_tuple(called(x))[0], as_tuple(other(x))[0])
        found = torch.func.functional_call(called, given, (x,))
        assert_same_bits(found, other(x), "output with other parameters")
        assert_same_bits(called(x), model(x), "output with its own parameters")


@pytest.mark.feature("torch.func.grad, vjp, jvp, vmap", modes=("exported",), no=NO_RULE)
@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
@pytest.mark.parametrize("recipe", ("none", "current"))
@EACH
def test_transforms_are_refused(kind, recipe, grad, device):
    """A program is refused like its module: nothing takes a derivative for zero."""
    model = Recipe(build(kind, device, recipe=recipe), recipe_of(recipe)).eval()
    x = random(32, K, device=device)
    with torch.set_grad_enabled(grad):
        program = exported(model, x.clone().requires_grad_(grad))
    called = program.module()
    for transform in TRANSFORMS.values():
        # Programs switch gradients off and on by nodes of their own, which an error may part.
        with (
            torch.enable_grad(),
            pytest.raises(RuntimeError, match="functorch transforms|Batching rule|forward-mode"),
        ):
            transform(lambda x: as_tuple(called(x))[0].float().square().sum(), x)
    lowered = program.run_decompositions().module()
    with torch.enable_grad(), pytest.raises(RuntimeError, match="forward-mode"):
        TRANSFORMS["jvp"](lambda x: as_tuple(lowered(x))[0].float().square().sum(), x)


# --- quantized tensors at the edges, recomputation, calibration ----------------------------------


@pytest.mark.feature("quantized inputs", modes=("exported",))
@STRICT
@EACH
def test_quantized_inputs(kind, strict, device):
    """A program that was exported with a quantized tensor takes others of its kind."""
    model = Recipe(build(kind, device), recipe_of("current")).eval()
    first, second = (
        te.MXFP8Quantizer(te.DType.kFloat8E4M3)(random(32, K, device=device, seed=seed))
        for seed in range(2)
    )
    with torch.no_grad():
        program = torch.export.export(model, (first,), strict=strict)
        assert_same_bits(program.module()(second), model(second), "output")


@pytest.mark.feature("fp8_output", modes=("exported",), no=NO_QUANTIZED, modules=EDGES)
@pytest.mark.feature("fp8_grad", modes=("exported",), no=NO_QUANTIZED, modules=EDGES)
@STRICT
@pytest.mark.parametrize("option", ("fp8_output", "fp8_grad"))
@pytest.mark.parametrize("kind", EDGES)
def test_quantized_results_are_refused(kind, option, strict, device):
    """A program has plain tensors; without gradients fp8_grad asks for nothing."""
    model = Recipe(build(kind, device), recipe_of("current"), **{option: True}).eval()
    x = random(32, K, device=device).requires_grad_()
    with pytest.raises(Exception, match=f"{option}=True") as error:
        exported(model, x, strict)
    assert strict or error.type is RuntimeError
    if option == "fp8_grad":
        with torch.no_grad():
            program = exported(model, x.detach(), strict)
        assert_equal_programs(model, (program,), device)


class Checkpointed(torch.nn.Module):
    """A model that recomputes its module in backward."""

    def __init__(self, module, recipe, **options):
        super().__init__()
        self.module, self.recipe, self.options = module, recipe, options

    def forward(self, x):
        """``x [rows, K]``."""
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return te.checkpoint(self.module, x, **self.options)


def assert_equal_gradients(model, strict, device):
    """Output and gradients of a program that was exported with gradients."""
    model.zero_grad()
    program = exported(model, random(32, K, device=device).requires_grad_(), strict).module()
    results = []
    for run in (program, copy.deepcopy(model)):
        x = random(48, K, device=device, seed=3).requires_grad_()
        y = run(x)
        y.backward(random(*y.shape, device=device, seed=4))
        grads = {name: p.grad for name, p in run.named_parameters()}
        results.append({"output": y, "input gradient": x.grad, **grads})
    assert set(results[0]) == set(results[1]) and all(g is not None for g in results[1].values())
    for name, value in results[1].items():
        assert_same_bits(results[0][name], value, name)


@pytest.mark.feature("te.checkpoint", modes=("exported",))
@STRICT
@EACH
def test_te_checkpoint(kind, strict, device):
    """A program has the module once, whatever its backward keeps."""
    module = build(kind, device)
    for reentrant in (False, True):
        model = Checkpointed(module, recipe_of("current"), use_reentrant=reentrant)
        assert_equal_gradients(model, strict, device)
    model = Checkpointed(module, recipe_of("delayed"), use_reentrant=False)
    trained(model, device)
    with torch.no_grad():
        program = exported(model, random(32, K, device=device), strict)
    assert_equal_programs(model, (program,), device)


@pytest.mark.feature(
    "LayerNormMLP(checkpoint=True)", modes=("exported",), modules=("LayerNormMLP",)
)
@STRICT
def test_recomputing_mlp(strict, device):
    """In a program its gradients are those of eager, too."""
    module = build("LayerNormMLP", device, checkpoint=True, activation="swiglu")
    assert_equal_gradients(Recipe(module, recipe_of("current")), strict, device)


class Calibrating(torch.nn.Module):
    """A model that records amaxes and computes in high precision."""

    def __init__(self, module):
        super().__init__()
        self.module, self.recipe = module, recipe_of("delayed")

    def forward(self, x):
        """``x [rows, K]``."""
        with te.autocast(enabled=False, calibrating=True, recipe=self.recipe):
            return self.module(x)


@pytest.mark.feature("calibration", modes=("exported",), no=NOT_RECORDED)
@STRICT
@EACH
def test_calibration_is_not_in_a_program(kind, strict, device):
    """It computes in high precision and records nothing; the export neither."""
    model = Calibrating(build(kind, device))
    with torch.no_grad():
        model(random(32, K, device=device))  # makes the state
        history = model.module._delayed_scaling.fwd_history
        before = history.zero_().clone()
        program = exported(model, 100 * random(32, K, device=device), strict)
        x = 100 * random(48, K, device=device, seed=1)
        y = program.module()(x)
        assert_same_bits(history, before, "amax history")
        assert_same_bits(y, model(x), "output")
        assert not torch.equal(history, before)
