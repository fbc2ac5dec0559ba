# SPDX-License-Identifier: Apache-2.0
"""What graphs consist of: one op per module and direction, leaf ops only where those are needed."""

import collections
import itertools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from transformer_engine.pytorch.core import plans
from transformer_engine.pytorch.dynamo import custom_op

from compile_support import GEMM_MODULES, K, NORMS, Twins, build, random, recipe_of
from recipe_list import BLOCKS, CUSTOM, OVERRIDES, CustomRecipe, IdentityQuantizer, NVFP4Quantizer

NAMES = {
    "Linear": "linear",
    "LayerNormLinear": "layernorm_linear",
    "LayerNormMLP": "layernorm_mlp",
    "LayerNorm": "normalization",
    "RMSNorm": "normalization",
}
# Of weights, which are quantized beside the module op, and of the state of delayed scaling.
BESIDE = {"quantize", "dequantize", "after"}
BESIDE |= {"record_amax_", "delayed_scaling_update_", "record_and_update_"}
# The leaf ops that a module's own computation consists of.
INSIDE = {"gemm", "norm_forward", "norm_backward", "activation_forward", "activation_backward"}
DRAWING = ("nvfp4", "nvfp4_row_scaled", "nvfp4_four_over_six", "custom_two_formats")  # in backward
RECIPES = ("none", "current", "delayed", *BLOCKS, *OVERRIDES, *CUSTOM)
CASES = [*itertools.product(GEMM_MODULES, RECIPES), *((norm, "none") for norm in NORMS)]
PACKAGE = "transformer_engine."


def counting(graphs):
    """A backend that appends to ``graphs`` how often each of our ops is in a graph."""

    def compiler(graph, inputs):
        del inputs
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        for node in graph.graph.nodes:  # ops that write to their arguments
            if "auto_functionalized" in str(node.target):
                targets.append(node.args[0])
        names = [str(target) for target in targets if str(target).startswith(PACKAGE)]
        names = [
            name.removeprefix(PACKAGE).removesuffix(".default").removesuffix(".whole")
            for name in names
        ]
        graphs.append(collections.Counter(names))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler)


@pytest.fixture
def whole_runs(monkeypatch):
    """The functions of module ops that run as a whole, each result checked.

    It shares no memory with an argument, nor with another result. Compilers rely on it: they give
    the memory of an argument to something else after its last use.
    """
    seen = []

    def run(function, static, arguments, tensors):
        results = plans.run_planned(function, static, arguments, tensors)
        taken = {t.untyped_storage().data_ptr() for t in tensors if t is not None and t.numel()}
        for i, result in enumerate(results):
            if result is not None and result.numel():
                address = result.untyped_storage().data_ptr()
                assert address not in taken, f"{function.__name__}: result {i} is no fresh tensor"
                taken.add(address)
        seen.append(function.__name__)
        return results

    monkeypatch.setattr(custom_op, "run_planned", run)
    return seen


@pytest.mark.parametrize("kind,recipe", CASES)
def test_one_op_per_direction(kind, recipe, whole_runs, device):
    """The graphs of a training step, and its bits."""
    options = [{}]
    if kind in ("LayerNormLinear", "LayerNormMLP"):
        options.append({"return_layernorm_output": True})
    if kind == "LayerNormMLP":
        options.append({"checkpoint": True})
    ops = (NAMES[kind], NAMES[kind] + "_backward")
    whole = (True, recipe not in DRAWING)
    for chosen in options:
        graphs, module = [], build(kind, device, recipe=recipe, **chosen)
        whole_runs.clear()
        twins = Twins(module, backend=counting(graphs))
        twins.step(random(32, K, device=device), recipe_of(recipe))
        assert len(graphs) == 2
        for graph, op, is_whole in zip(graphs, ops, whole):
            assert graph[op] == is_whole
            if is_whole:
                assert set(graph) <= {op, *BESIDE}
            else:
                assert set(graph) & INSIDE and graph["rng_state"]
        assert len(whole_runs) == sum(whole)


def is_weight(role):
    """Whether a slot of a recipe is that of a weight."""
    return role is not None and role.tensor_type == "weight"


def stochastic_everywhere(role):
    """Stochastic operands in the forward pass as well."""
    del role
    return NVFP4Quantizer(stochastic_rounding=True)


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_a_forward_pass_that_draws(kind, whole_runs, device):
    """The draws of the inputs are in the graph, beside those of the weights."""
    graphs = []
    twins = Twins(build(kind, device, recipe="nvfp4"), backend=counting(graphs))
    twins.step(random(32, K, device=device), CustomRecipe(stochastic_everywhere))
    stages = 2 if kind == "LayerNormMLP" else 1
    assert [graph["rng_state"] for graph in graphs] == [2 * stages, stages]
    assert all(graph["gemm"] for graph in graphs)
    assert not whole_runs


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("rows", (32, 1))
@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
def test_operands_left_alone(kind, rows, dtype, whole_runs, device):
    """An operand in high precision is no argument that is handed on."""
    recipe = CustomRecipe(
        lambda role: IdentityQuantizer(dtype=torch.float32 if is_weight(role) else dtype)
    )
    graphs, module = [], build(kind, device, dtype=torch.float32)
    twins = Twins(module, backend=counting(graphs))
    twins.step(random(rows, K, device=device, dtype=torch.float32), recipe)
    ops = (NAMES[kind], NAMES[kind] + "_backward")
    assert [graph[op] for graph, op in zip(graphs, ops)] == [1, 1]
    assert len(whole_runs) == 2


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", ("none", "delayed", "mxfp8"))
def test_an_inference_graph(kind, recipe, whole_runs, device):
    """Without gradients: one op, and nothing for a backward pass."""
    graphs = []
    twins = Twins(
        build(kind, device, recipe=recipe).requires_grad_(False), backend=counting(graphs)
    )
    twins.forward(random(32, K, device=device), recipe_of(recipe), x_grad=False)
    assert len(graphs) == 1
    assert graphs[0][NAMES[kind]] == 1
    assert set(graphs[0]) <= {NAMES[kind], *BESIDE}
    assert len(whole_runs) == 1


@pytest.mark.parametrize("dynamic", (None, True))
def test_a_large_backward_pass(dynamic, whole_runs, device, monkeypatch):
    """Leaf ops, so that activations are freed after their last use; small ones stay whole."""
    for limit, whole in ((2**15, 0), (2**27, 1)):
        monkeypatch.setattr(custom_op, "_MANY_BYTES", limit)
        graphs = []
        twins = Twins(build("LayerNormMLP", device), backend=counting(graphs), dynamic=dynamic)
        twins.step(random(64, K, device=device), None)
        assert graphs[1]["layernorm_mlp_backward"] == whole
        assert graphs[1]["gemm"] == 4 * (1 - whole)
        assert len(whole_runs) == 1 + whole
        whole_runs.clear()
