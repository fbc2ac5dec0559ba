# SPDX-License-Identifier: Apache-2.0
"""torch.export: programs of every module and recipe compute what eager computes, bit by bit."""

import copy

import pytest
import torch

import transformer_engine.pytorch as te

from deployment_support import (
    BATCH,
    LARGE_BATCH,
    Recipe,
    exported,
    python,
    small_model,
    te_ops,
    trained,
)
from compile_support import (
    GEMM_MODULES,
    K,
    MODULES,
    STATE,
    as_tuple,
    assert_same_bits,
    build,
    random,
    scaling_states,
)
from recipe_list import ALL_RECIPES, recipe_of

LEAVES = {"quantize", "dequantize", "norm_forward", "activation_forward", "gemm", "rng_state"}
STRICT = pytest.mark.parametrize("strict", (False, True), ids=("nonstrict", "strict"))


def assert_equal_programs(model, programs, device, dtype=torch.bfloat16):
    """Programs give the bits of eager for batches that none of them was exported with."""
    with torch.no_grad():
        for rows in (8, 80):
            x = random(rows, K, device=device, seed=rows, dtype=dtype)
            wanted = as_tuple(model(x))
            for program in programs:
                outputs = as_tuple(program.module()(x))
                assert len(outputs) == len(wanted)
                for i, pair in enumerate(zip(outputs, wanted)):
                    assert_same_bits(*pair, f"output {i} for {rows} rows")


def columnwise_of(program):
    """The argument ``columnwise`` of every leaf op that has one."""
    found = []
    for node in program.graph.nodes:
        if "transformer_engine" in str(node.target):
            names = [argument.name for argument in node.target._schema.arguments]
            found += [node.args[names.index("columnwise")]] if "columnwise" in names else []
    return found


# --- inference -----------------------------------------------------------------------------------


@pytest.mark.feature("dynamic batch", modes=("exported",))
@pytest.mark.feature(
    "torch.export, strict and not, dynamic batch", modes=("exported",), others="a form of export"
)
@STRICT
@pytest.mark.parametrize("kind", MODULES)
def test_module(kind, strict, device):
    """Each module by itself: one op, which decomposes into leaf ops."""
    model = build(kind, device).eval()
    with torch.no_grad():
        program = exported(model, random(32, K, device=device), strict)
    lowered = program.run_decompositions()
    assert len(te_ops(program)) == 1
    assert set(te_ops(lowered)) <= LEAVES and te_ops(lowered)
    assert_equal_programs(model, (program, lowered), device)


@pytest.mark.feature("torch.export of every recipe", modes=("exported",), others="a form of export")
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_model_under_every_recipe(recipe, device):
    """A model that opens its own autocast; no leaf op makes anything for a backward pass."""
    model = small_model(recipe, device)
    if "delayed" in recipe:
        trained(model, device)
    with torch.no_grad():
        program = exported(model, random(32, K, device=device))
    lowered = program.run_decompositions()
    operations = [name for name in te_ops(program) if name not in LEAVES]
    assert operations == ["layernorm_linear", "linear", "layernorm_mlp"]
    assert set(te_ops(lowered)) <= LEAVES
    assert not any(columnwise_of(lowered))
    assert_equal_programs(model, (program, lowered), device)


@pytest.mark.parametrize("recipe", ("current", "delayed", "block", "mxfp8", "nvfp4"))
def test_strict_export(recipe, device):
    """Dynamo traces the same program."""
    model = small_model(recipe, device)
    with torch.no_grad():
        program = exported(model, random(32, K, device=device), strict=True)
    assert_equal_programs(model, (program, program.run_decompositions()), device)


@STRICT
def test_surrounding_autocast(strict, device):
    """The region may be around the call of torch.export: its recipe is in the program."""
    model = build("LayerNormMLP", device).eval()
    with torch.no_grad(), te.autocast(recipe=recipe_of("current")):
        program = exported(model, random(32, K, device=device), strict)
        assert_equal_programs(model, (program,), device)
    assert "quantize" in te_ops(program.run_decompositions())


@pytest.mark.feature(
    "norm output returned, with its gradient",
    modes=("exported",),
    modules=("LayerNormLinear", "LayerNormMLP"),
    other_modules="the module has no norm",
)
@STRICT
def test_outputs_of_modules(strict, device):
    """Bias and norm output come out of the program as of the module."""
    options = {"return_bias": True, "return_layernorm_output": True}
    for kind in ("LayerNormLinear", "LayerNormMLP"):
        model = Recipe(build(kind, device, **options), recipe_of("current")).eval()
        with torch.no_grad():
            program = exported(model, random(32, K, device=device), strict)
        assert_equal_programs(model, (program,), device)


@STRICT
def test_two_dynamic_dimensions(strict, device):
    """Batch and sequence of a 3-D input."""
    model = Recipe(build("LayerNormLinear", device), recipe_of("current")).eval()
    shapes = ({0: BATCH, 1: torch.export.Dim("sequence", min=2, max=512)},)
    with torch.no_grad():
        x = random(4, 8, K, device=device)
        program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=shapes)
        x = random(6, 16, K, device=device, seed=1)
        assert_same_bits(program.module()(x), model(x), "output")


# --- weights that were quantized before ----------------------------------------------------------


# One module under every recipe, the others under some.
QUANTIZED = [("LayerNormMLP", name) for name in ("current", "delayed", "block", "mxfp8", "nvfp4")]
QUANTIZED += [(kind, name) for kind in GEMM_MODULES[:2] for name in ("delayed", "mxfp8")]


@pytest.mark.feature("weight caching (is_first_microbatch)", modes=("exported",))
@STRICT
@pytest.mark.parametrize("kind,recipe", QUANTIZED)
def test_cached_weights_are_constants(kind, recipe, strict, device):
    """With ``is_first_microbatch=False`` the program holds the bytes, and quantizes no weight."""
    module = build(kind, device, recipe=recipe).eval()
    model = Recipe(module, recipe_of(recipe), is_first_microbatch=False)
    with torch.no_grad():
        model(random(32, K, device=device))  # fills the cache
        program = exported(model, random(32, K, device=device), strict)
    assert len(te_ops(program)) == 1
    assert_equal_programs(model, (program,), device)


@pytest.mark.feature("quantized primary weights", modes=("exported",))
@pytest.mark.parametrize("kind,recipe", QUANTIZED)
def test_quantized_primary_weights(kind, recipe, device):
    """Weights that exist only as bytes are exported as bytes."""
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        module = getattr(te, kind)(K, 96, params_dtype=torch.bfloat16, device=device)
    model = Recipe(module, recipe_of(recipe)).eval()
    with torch.no_grad():
        program = exported(model, random(32, K, device=device))
    assert_equal_programs(model, (program,), device)


@STRICT
def test_an_export_fills_no_cache(strict, device):
    """``is_first_microbatch=True`` in an export leaves the cache as it was."""
    module = build("Linear", device).eval()
    model = Recipe(module, recipe_of("current"), is_first_microbatch=True)
    with torch.no_grad():
        program = exported(model, random(32, K, device=device), strict)
        assert not module._fp8_workspaces
        assert_equal_programs(model, (program,), device)


# --- delayed scaling -----------------------------------------------------------------------------


def state_copy(model):
    """All tensors of delayed scaling."""
    states = scaling_states(model).values()
    return [getattr(state, field).clone() for state in states for field in STATE]


@pytest.mark.feature(
    "gradients of an exported program",
    modes=("exported",),
    no="DelayedScaling: a program has no state, so no backward scales that training could renew",
)
@STRICT
@pytest.mark.parametrize("grad", (False, True), ids=("no_grad", "grad"))
def test_delayed_scaling_is_exported_with_its_scales(grad, strict, device, tmp_path):
    """A program has the scales of its export; making and running it touches no state."""
    model = trained(small_model("delayed", device), device)
    before, x = state_copy(model), random(48, K, device=device, seed=9)
    with torch.set_grad_enabled(grad):
        program = exported(model, random(32, K, device=device), strict)
        first = program.module()(x)
        second = program.module()(x)
    assert not first.requires_grad  # there are no backward scales that a program could renew
    for a, b in zip(state_copy(model), before):
        assert_same_bits(a, b, "delayed-scaling state")
    with torch.no_grad():
        wanted = model(x)
    assert_same_bits(first, wanted, "first call")
    assert_same_bits(second, wanted, "second call")
    torch.export.save(program, tmp_path / "program.pt2")
    trained(model, device, steps=3)
    with torch.no_grad():
        assert not torch.equal(model(x), wanted)
        loaded = torch.export.load(tmp_path / "program.pt2").module()
        assert_same_bits(loaded(x), wanted, "saved program after more training")


def test_training_goes_on_after_an_export(device):
    """A module that was exported trains as its copy that was not."""
    model = trained(small_model("delayed", device), device)
    twin = copy.deepcopy(model)
    exported(model, random(32, K, device=device))
    trained(model, device)
    trained(twin, device)
    for a, b in zip(state_copy(model), state_copy(twin)):
        assert_same_bits(a, b, "delayed-scaling state")


# --- training graphs -----------------------------------------------------------------------------


@pytest.mark.feature(
    "gradients of an exported program", modes=("exported",), others="a form of export"
)
@STRICT
@pytest.mark.parametrize("recipe", ("none", "current", "block", "mxfp8", "nvfp4", "mxfp8_dq"))
def test_gradients(recipe, strict, device):
    """A program exported with gradients has those of eager."""
    model = small_model(recipe, device)
    eager = copy.deepcopy(model)
    example = random(256, K, device=device).requires_grad_()
    program = exported(model, example, strict, LARGE_BATCH).module()
    inputs, results = [], []
    for run in (program, eager):
        x = random(192, K, device=device, seed=3).requires_grad_()
        torch.manual_seed(1)  # of stochastic rounding
        y = run(x)
        torch.manual_seed(2)
        y.backward(random(*y.shape, device=device, seed=4))
        inputs.append(x.grad)
        results.append(y)
    assert_same_bits(results[0], results[1], "output")
    assert_same_bits(inputs[0], inputs[1], "input gradient")
    wanted = dict(eager.named_parameters())
    for name, parameter in program.named_parameters():
        assert_same_bits(parameter.grad, wanted[name].grad, f"gradient of {name}")


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_program_without_gradients_has_none(kind, device):
    """Exported under no_grad, a program called with gradients enabled does not pretend to any."""
    with torch.no_grad():
        program = exported(build(kind, device), random(32, K, device=device)).module()
    y = program(random(32, K, device=device).requires_grad_())
    assert not y.requires_grad


# --- another process -----------------------------------------------------------------------------

LOADING = """
import sys, torch
import transformer_engine.pytorch  # registers the ops
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    program = torch.export.load(folder + "/program.pt2").module()
    with torch.no_grad():
        torch.save(program(torch.load(folder + "/x.pt")), folder + "/y.pt")
print("done")
"""


@pytest.mark.feature(
    "saved programs in a fresh process", modes=("exported",), others="a form of export"
)
def test_programs_run_in_a_fresh_process(device, tmp_path):
    """Saved programs need nothing but the package, and no recipe."""
    wanted = {}
    for recipe in ("none", "current", "delayed", "block", "mxfp8", "nvfp4", "custom_two_formats"):
        folder = tmp_path / recipe
        folder.mkdir()
        model = small_model(recipe, device)
        x = random(40, K, device=device, seed=5)
        with torch.no_grad():
            torch.export.save(exported(model, random(32, K, device=device)), folder / "program.pt2")
            torch.save(x, folder / "x.pt")
            wanted[folder] = model(x)
    assert python(LOADING, *wanted) == "done\n"
    for folder, y in wanted.items():
        assert_same_bits(torch.load(folder / "y.pt"), y, folder.name)
