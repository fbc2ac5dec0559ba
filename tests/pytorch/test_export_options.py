# SPDX-License-Identifier: Apache-2.0
"""torch.export with what else users combine with it: the program has the bits of eager."""

import pytest
import torch

from deployment_support import Recipe, exported
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
from test_export import assert_equal_programs

from transformer_engine.pytorch.formats.activations import ACTIVATIONS

EACH = pytest.mark.parametrize("kind", GEMM_MODULES)
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
        with pytest.raises(RuntimeError, match="functorch transforms|Batching rule|forward-mode"):
            transform(lambda x: as_tuple(called(x))[0].float().square().sum(), x)
    lowered = program.run_decompositions().module()
    with pytest.raises(RuntimeError, match="forward-mode"):
        TRANSFORMS["jvp"](lambda x: as_tuple(lowered(x))[0].float().square().sum(), x)
