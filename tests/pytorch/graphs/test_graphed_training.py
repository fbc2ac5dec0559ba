# SPDX-License-Identifier: Apache-2.0
"""``te.make_graphed_callables`` against the same modules in eager, bit by bit."""

import copy
import pickle

import pytest
import torch
from compile_support import (
    K,
    assert_same_bits,
    assert_same_modules,
    build,
    gradient,
    random,
    recipe_of,
)
from graph_support import (
    ROWS,
    region,
    graphed,
    sample_of,
    step,
    train,
    assert_same_results,
    stack,
)
from recipe_list import ALL_RECIPES

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import graph
from transformer_engine.pytorch.quantization import FP8GlobalStateManager


@pytest.mark.feature(
    "te.make_graphed_callables",
    modes=("eager",),
    modules=("LayerNormMLP",),
    needs="cuda",
    others="replays are made by eager code",
)
@pytest.mark.parametrize("recipe", ("none", *ALL_RECIPES))
def test_training(recipe, device):
    """Replays with new data and new scales; gradients accumulate; parameters change."""
    model = stack(device, recipe)
    twin, kept = copy.deepcopy(model), recipe_of(recipe)
    assert graphed(model, (sample_of(device),), kept) is model
    results = [train(m, m, kept, device) for m in (model, twin)]
    assert_same_results(*results)
    assert_same_modules(model, twin)


@pytest.mark.feature(
    "te.make_graphed_callables",
    modes=("eager",),
    needs="cuda",
    others="replays are made by eager code",
)
@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear"))
@pytest.mark.parametrize("recipe", ("none", *ALL_RECIPES))
def test_each_module(kind, recipe, device):
    """A tuple of modules, of which one graph each is made, with inputs of their own."""
    module = build(kind, device, recipe=recipe)
    back = torch.nn.Linear(module.out_features, K).to(device, torch.bfloat16)
    last = build("LayerNormMLP", device, recipe=recipe)
    model = torch.nn.Sequential(torch.nn.Sequential(module, back), last)
    twin, kept = copy.deepcopy(model), recipe_of(recipe)
    made = graphed(tuple(model), ((sample_of(device),),) * 2, kept)
    assert made[0] is model[0] and made[1] is model[1]
    assert_same_results(*(train(m, m, kept, device, steps=2) for m in (model, twin)))
    assert_same_modules(model, twin)


@pytest.mark.parametrize("recipe", ("current", "delayed", "block_dq", "mxfp8", "mxfp8_hp", "nvfp4"))
def test_quantized_parameters(recipe, device):
    """Weights that are quantized tensors change in place, where the graph reads them."""
    kept = recipe_of(recipe)
    with te.quantized_model_init(recipe=kept):
        model = torch.nn.Sequential(
            build("LayerNormMLP", device, recipe=recipe), build("LayerNormMLP", device, seed=1)
        )
    assert isinstance(model[0].fc1_weight, te.QuantizedTensor)
    twin = copy.deepcopy(model)
    graphed(model, (sample_of(device),), kept)
    before = model[0].fc1_weight.dequantize()
    assert_same_results(*(train(m, m, kept, device, rate=0.5) for m in (model, twin)))
    assert_same_modules(model, twin)
    assert not torch.equal(before, model[0].fc1_weight.dequantize())


def test_some_callables_quantize_and_some_do_not(device):
    """``enabled`` is a tuple."""
    modules = tuple(build("LayerNormMLP", device, seed=i) for i in range(2))
    model = torch.nn.Sequential(*modules)
    twin, recipe = copy.deepcopy(model), Float8CurrentScaling()
    samples = ((sample_of(device),), (sample_of(device),))
    graphed(modules, samples, recipe, enabled=(True, False))

    def mixed(x):
        with te.autocast(recipe=recipe):
            x = twin[0](x)
        with te.autocast(enabled=False):
            return twin[1](x)

    assert_same_results(
        train(model, model, None, device, steps=2), train(mixed, twin, None, device, steps=2)
    )


def test_original_forward_in_the_other_mode(device):
    """A graph is of training or of evaluation; the other mode runs in eager, in any precision."""
    module = build("LayerNormMLP", device)
    twin, recipe = copy.deepcopy(module), Float8CurrentScaling()
    graphed(module, (sample_of(device),), recipe)
    x = random(7, K, device=device)
    module.eval()
    with torch.no_grad():
        assert_same_bits(module(x), twin(x), "in eval, without quantization")
    module.train()
    x = random(ROWS, K, device=device)
    assert_same_results(step(module, x, recipe), step(twin, x, recipe))


def test_evaluation(device):
    """Modules in eval mode and without gradients: a graph without backward."""
    module = build("LayerNormMLP", device).eval()
    twin, recipe = copy.deepcopy(module), Float8CurrentScaling()
    with torch.no_grad():
        graphed(module, (sample_of(device).detach(),), recipe)
        for seed in range(2):
            x = random(ROWS, K, device=device, seed=seed)
            with region(recipe):
                assert_same_bits(module(x), twin(x), "output")


def test_retained_graph(device):
    """The backward graph is replayed twice for one forward."""
    module = build("LayerNormMLP", device)
    twin, recipe = copy.deepcopy(module), Float8CurrentScaling()
    graphed(module, (sample_of(device),), recipe, retain_graph_in_backward=True)
    for m in (module, twin):
        with region(recipe):
            y = m(random(ROWS, K, device=device).requires_grad_())
        y.backward(gradient(y), retain_graph=True)
        y.backward(gradient(y, seed=1))
    assert_same_modules(module, twin)


def test_capture_leaves_everything_as_it_was(device):
    """Scales, histories, gradients, random numbers, regions."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    twin = copy.deepcopy(module)
    for m in (module, twin):
        step(m, random(ROWS, K, device=device), recipe)
    torch.manual_seed(3)
    graphed(module, (sample_of(device),), recipe)
    drawn = torch.rand(4, device=device)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4, device=device))
    assert_same_modules(module, twin)
    assert not FP8GlobalStateManager.is_fp8_enabled() and not graph.is_graph_capturing()
    assert FP8GlobalStateManager.get_skip_fp8_weight_update_tensor() is None
    assert not module._delayed_scaling.pending


def test_random_numbers(device):
    """Each replay draws anew: dropout and stochastic rounding."""
    model = torch.nn.Sequential(build("LayerNormMLP", device), torch.nn.Dropout(0.5))
    graphed(model, (sample_of(device),), recipe_of("nvfp4"))
    x = random(ROWS, K, device=device)
    results = [step(model, x, recipe_of("nvfp4"), seed) for seed in (1, 2, 1)]
    for different, same in zip(results[1], results[2]):
        assert not any(torch.equal(different, first) for first in results[0])
        assert any(torch.equal(same, first) for first in results[0])


def test_tracked_random_numbers(device):
    """Named streams go on from replay to replay."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("the tracker is about CUDA where there is CUDA")
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)

    class Dropping(torch.nn.Module):
        """Dropout from the named stream."""

        def __init__(self):
            super().__init__()
            self.linear = build("Linear", device)

        def forward(self, x):
            """``x [rows, K]``."""
            with tracker.fork():
                return torch.nn.functional.dropout(self.linear(x), 0.5)

    model = Dropping()
    graphed(model, (sample_of(device),))
    x = random(ROWS, K, device=device)
    outputs = [step(model, x, None, 0)[0] for _ in range(2)]
    assert not torch.equal(*outputs)


# --- around graphs --------------------------------------------------------------------------------


def test_samples_may_be_one_tensor(device):
    """Each graph has static inputs of its own: the second call leaves those of the first alone."""
    model = torch.nn.Sequential(torch.nn.Linear(K, K), torch.nn.Linear(K, K))
    model.to(device, torch.bfloat16)
    twin, sample = copy.deepcopy(model), sample_of(device)
    graphed(tuple(model), ((sample,), (sample,)))
    assert_same_results(*(train(m, m, None, device, steps=1) for m in (model, twin)))
    assert_same_modules(model, twin)


def test_a_copy_has_no_graphs(device):
    """A deep copy trains in eager, with parameters of its own; a graph can not be pickled."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    graphed(module, (sample_of(device),), recipe)
    step(module, random(ROWS, K, device=device), recipe)
    twin = copy.deepcopy(module)
    step(twin, random(ROWS + 1, K, device=device), recipe)  # a graph would refuse this size
    twin.load_state_dict(module.state_dict())
    assert twin.fc1_weight is not module.fc1_weight
    assert_same_results(*(train(m, m, recipe, device) for m in (twin, module)))
    assert_same_modules(twin, module)
    with pytest.raises(TypeError, match="can not be pickled"):
        pickle.dumps(module)


@pytest.mark.feature(
    "te.make_graphed_callables",
    modes=("compiled",),
    no="a replay of a graph of its own: it leaves compiled code, with a warning",
    others="replays are made by eager code",
)
def test_compiled_code_falls_back(device):
    """A graphed module leaves compiled code, with a warning or an error."""
    module, recipe = build("Linear", device), Float8CurrentScaling()
    twin = copy.deepcopy(module)
    graphed(module, (sample_of(device),), recipe)

    def call(m, x):
        return m(x * 2) + 1

    x = random(ROWS, K, device=device)
    eager = step(lambda x: call(twin, x), x, recipe)
    compiled = torch.compile(lambda x: call(module, x), backend="aot_eager")
    with pytest.warns(UserWarning, match="replays a CUDA graph of its own"):
        assert_same_results(step(compiled, x, recipe), eager)
    whole = torch.compile(lambda x: call(module, x), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="replays a CUDA graph of its own"):
        step(whole, x, recipe)
