# SPDX-License-Identifier: Apache-2.0
"""``te.make_graphed_callables`` against the same modules in eager, bit by bit.

On CUDA the graphs are CUDA graphs. Without CUDA a stand-in runs the captured functions again
(``graph_support.py``), which tests all but the capture.
"""

import copy
import functools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "module"))

# pylint: disable=wrong-import-position
from compile_support import (
    K,
    STATE,
    assert_same_bits,
    assert_same_modules,
    build,
    gradient,
    graphs,
    random,
    recipe_of,
    reset,
    scaling_states,
)
from graph_support import Rerun
from recipe_list import ALL_RECIPES

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import graph
from transformer_engine.pytorch.graphed.schedule import (
    Event,
    pipelined_schedule,
    plain_schedule,
    shared_buffers,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

ROWS = 32
FEW = ("none", "current", "delayed", "mxfp8")
FLAG_RECIPES = ("current", "delayed", "block", "mxfp8", "nvfp4_plain", "custom_from_dequantized")
NEEDS_CUDA = "CUDA graphs need a CUDA device; the stand-in has no streams and no memory of its own"
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_CUDA)


@pytest.fixture(autouse=True)
def capturing_somehow(request, monkeypatch):
    """The stand-in, unless the test runs on CUDA."""
    names = request.fixturenames
    if "device" in names and request.getfixturevalue("device") == "cpu":
        monkeypatch.setattr(graph, "CudaGraphs", Rerun)
        monkeypatch.setattr(graph, "_need_cuda", lambda: None)


def region(recipe):
    """te.autocast, or nothing."""
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def graphed(modules, sample, recipe=None, **options):
    """Graphs of ``modules`` under ``recipe``."""
    options = {"enabled": recipe is not None, "recipe": recipe, **options}
    return te.make_graphed_callables(modules, sample, **options)


def sample_of(device, rows=ROWS, width=K):
    """A static input."""
    return torch.zeros(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)


def step(call, x, recipe, seed=0, **kwargs):
    """``(output, input gradient)`` of one forward and backward pass; backward after the region."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(seed)
    with region(recipe):
        y = call(x, **kwargs)
    y.backward(gradient(y, seed=seed))
    return y.detach().clone(), x.grad.clone()


def prepare(module):
    """Gradients that exist before training, as optimizers may leave them."""
    for param in module.parameters():
        param.grad = torch.zeros_like(param)


def train(call, module, recipe, device, steps=3, accumulate=2, **kwargs):
    """Outputs and input gradients of some steps of SGD."""
    prepare(module)
    results = []
    for i in range(steps):
        for j in range(accumulate):
            x = random(ROWS, K, device=device, seed=10 * i + j) * (1 + i)
            results += step(call, x, recipe, 10 * i + j, **kwargs)
        with torch.no_grad():
            for param in module.parameters():
                param.add_(param.grad, alpha=-0.01)
                param.grad.zero_()
    return results


def assert_same_results(a, b):
    """Lists of tensors are equal bit by bit."""
    assert len(a) == len(b)
    for i, (left, right) in enumerate(zip(a, b)):
        assert_same_bits(left, right, f"result {i}")


def stack(device, recipe="none"):
    """Modules whose input and output have the same width; one recomputes in backward."""
    return torch.nn.Sequential(
        build("LayerNormMLP", device, recipe=recipe, activation="swiglu"),
        build("LayerNorm", device, seed=1),
        build("LayerNormMLP", device, recipe=recipe, seed=2, checkpoint=True),
    )


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", ["none", *(r for r in ALL_RECIPES if r not in ("nvfp4", "custom_two_formats"))]
)
def test_training(recipe, device):
    """Replays with new data and new scales; gradients accumulate; parameters change.

    Recipes that round stochastically draw from other places of the stream in a graph.
    """
    model = stack(device, recipe)
    twin, kept = copy.deepcopy(model), recipe_of(recipe)
    assert graphed(model, (sample_of(device),), kept) is model
    results = [train(m, m, kept, device) for m in (model, twin)]
    assert_same_results(*results)
    assert_same_modules(model, twin)


@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear"))
@pytest.mark.parametrize("recipe", FEW)
def test_each_module(kind, recipe, device):
    """A tuple of modules, of which one graph each is made."""
    module = build(kind, device, recipe=recipe)
    back = torch.nn.Linear(module.out_features, K).to(device, torch.bfloat16)
    model = torch.nn.Sequential(torch.nn.Sequential(module, back), build("LayerNormMLP", device))
    twin, kept = copy.deepcopy(model), recipe_of(recipe)
    made = graphed(tuple(model), ((sample_of(device),), (sample_of(device),)), kept)
    assert made[0] is model[0] and made[1] is model[1]
    assert_same_results(*(train(m, m, kept, device) for m in (model, twin)))
    assert_same_modules(model, twin)


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


# --- delayed scaling ------------------------------------------------------------------------------


def test_scales_are_renewed_between_replays(device):
    """By the surrounding region and after backward, as in eager; not by calls outside of one."""
    module, recipe = build("Linear", device), recipe_of("delayed")
    graphed(module, (sample_of(device),), recipe)
    state = module._delayed_scaling
    before = {name: getattr(state, name).clone() for name in STATE}
    step(module, random(ROWS, K, device=device), None)
    assert torch.equal(state.fwd_scale, before["fwd_scale"])
    assert torch.equal(state.bwd_scale, before["bwd_scale"])
    step(module, random(ROWS, K, device=device), recipe)
    assert (state.fwd_scale[:2] != before["fwd_scale"][:2]).all()
    assert (state.bwd_scale[:1] != before["bwd_scale"][:1]).all()


def test_one_module_twice_in_a_region(device):
    """Two graphs of one module: its scales are renewed once for both."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    twin = copy.deepcopy(module)
    samples = ((sample_of(device),), (sample_of(device),))
    units = graphed((module,), samples, recipe, _order=[1, 1, -1, -1])
    assert len(units) == 2

    def twice(first, second, seed):
        x = [random(ROWS, K, device=device, seed=seed + i).requires_grad_() for i in range(2)]
        with region(recipe):
            y = first(x[0]), second(x[1])
        for i in (1, 0):  # the first use goes back last
            y[i].backward(gradient(y[i], seed=seed))
        return [*(out.detach().clone() for out in y), *(t.grad for t in x)]

    for seed in range(3):
        assert_same_results(twice(*units, seed), twice(twin, twin, seed))
        assert_same_modules(module, twin)


def test_another_history_length_is_refused(device):
    """The graph records in memory that a resize would leave behind."""
    module = build("Linear", device)
    graphed(module, (sample_of(device),), DelayedScaling(amax_history_len=3))
    with pytest.raises(RuntimeError, match="another length"):
        step(module, random(ROWS, K, device=device), DelayedScaling(amax_history_len=4))


# --- cached weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FLAG_RECIPES)
def test_cached_weights(recipe, device):
    """The first microbatch writes the cached weights, the others read them."""
    model = stack(device, recipe)
    twin, kept = copy.deepcopy(model), recipe_of(recipe)
    graphed(model, (sample_of(device),), kept, cache_quantized_params=True)
    caches = [layer._fp8_workspaces for layer in (model[0], model[2])]
    entries = [entry for cache in caches for entry in cache.values()]
    pointers = [
        buffer.data_ptr() for e in entries for buffer in e.operand_buffers() if buffer is not None
    ]
    assert len(entries) == 4

    def call(x, is_first_microbatch):
        for layer in twin:
            is_norm = isinstance(layer, te.LayerNorm)
            x = layer(x) if is_norm else layer(x, is_first_microbatch=is_first_microbatch)
        return x

    for minibatch in range(3):
        for m in (model, twin):
            prepare(m)
        for micro in range(3):
            x = random(ROWS, K, device=device, seed=3 * minibatch + micro)
            first = {"is_first_microbatch": micro == 0}
            assert_same_results(step(model, x, kept, **first), step(call, x, kept, **first))
            with torch.no_grad():  # seen from the next minibatch on
                for m in (model, twin):
                    for param in m.parameters():
                        param.mul_(0.97)
        assert_same_modules(model, twin)
    now = [entry for cache in caches for entry in cache.values()]
    assert all(a is b for a, b in zip(entries, now))
    assert pointers == [b.data_ptr() for e in now for b in e.operand_buffers() if b is not None]


@pytest.mark.parametrize("flag", (None, 1, "yes"))
def test_cached_weights_need_the_keyword(flag, device):
    """A call without it, or with something else, is an error."""
    module = build("Linear", device)
    graphed(module, (sample_of(device),), Float8CurrentScaling(), cache_quantized_params=True)
    kwargs = {} if flag is None else {"is_first_microbatch": flag}
    with pytest.raises(ValueError, match="is_first_microbatch=True or False"):
        module(random(ROWS, K, device=device), **kwargs)


def under_flag(module, x, recipe, first, **kwargs):
    """One call whose cached weights the device decides about."""
    FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(not first)
    flag = FP8GlobalStateManager.quantization_state
    flag.skip_fp8_weight_update_tensor = flag.skip_fp8_weight_update_tensor.to(x.device)
    with te.autocast(recipe=recipe, _graph=True):
        return module(x, **kwargs)


def gemm_weights(module):
    """What is cached: backward does not read the weights themselves."""
    return [getattr(module, name) for name in module.weight_names]


def contents(entry):
    """The buffers of a cached weight."""
    return [buffer for buffer in entry.operand_buffers() if buffer is not None]


@pytest.mark.parametrize("recipe", FLAG_RECIPES)
@pytest.mark.parametrize("kind", ("Linear", "LayerNormMLP"))
def test_flag_in_eager(kind, recipe, device):
    """0 writes what a fresh quantization would make, 1 leaves it; amaxes count when written."""
    module, kept = build(kind, device, recipe=recipe), recipe_of(recipe)
    x = random(ROWS, K, device=device)
    under_flag(module, x.clone().requires_grad_(), kept, True)
    entries, pending = dict(module._fp8_workspaces), []
    for seed, first in enumerate((False, True, False, True)):
        with torch.no_grad():
            for weight in gemm_weights(module):
                weight.mul_(0.5 + seed)
        state = module._delayed_scaling
        old = {key: [b.clone() for b in contents(entry)] for key, entry in entries.items()}
        if state is not None:
            state.fwd_history.zero_()
        leaf = x.clone().requires_grad_()
        pending.append(under_flag(module, leaf, kept, first, is_first_microbatch=not first))
        assert all(module._fp8_workspaces[key] is entry for key, entry in entries.items())
        if recipe == "delayed":
            assert (state.fwd_history[0, 1] != 0).item() == first
        fresh = build(kind, device, recipe=recipe)
        fresh.load_state_dict(module.state_dict())
        under_flag(fresh, x.clone().requires_grad_(), kept, True)
        for key, entry in entries.items():
            made = contents(fresh._fp8_workspaces[key])
            for i, buffer in enumerate(contents(entry)):
                assert_same_bits(buffer, (made if first else old[key])[i], f"{key} buffer {i}")
    for y in pending:  # backward after the bytes have changed: no error, the bytes of now
        y.backward(gradient(y))


@pytest.mark.parametrize("backend", ("aot_eager", "inductor"))
@pytest.mark.parametrize("recipe", ("current", "delayed", "mxfp8"))
def test_flag_in_one_graph(recipe, backend, device):
    """Compiled, once the cache exists: the flag changes and the graph does not; late backwards.

    (Whether a backward that comes after the next rewriting sees old or new bytes is up to the
    backend.)
    """
    reset()
    module, kept = build("LayerNormMLP", device), recipe_of(recipe)
    under_flag(module, random(ROWS, K, device=device).requires_grad_(), kept, True)
    twin = copy.deepcopy(module)

    def call(m, x):
        with te.autocast(recipe=kept, _graph=True):
            return m(x)

    compiled = torch.compile(lambda x: call(module, x), fullgraph=True, backend=backend)
    pending = []
    for seed, first in enumerate((True, False, False, True, False, False)):
        flag = FP8GlobalStateManager.get_skip_fp8_weight_update_tensor()
        flag.fill_(not first)
        with torch.no_grad():
            for weight in (*gemm_weights(module), *gemm_weights(twin)):
                weight.mul_(1.1)
        leaves = [random(ROWS, K, device=device, seed=seed).requires_grad_() for _ in range(2)]
        y, z = compiled(leaves[0]), call(twin, leaves[1])
        assert_same_bits(y, z, "output")
        for key, entry in module._fp8_workspaces.items():
            pairs = zip(contents(entry), contents(twin._fp8_workspaces[key]))
            for i, (a, b) in enumerate(pairs):
                assert_same_bits(a, b, f"{key} buffer {i}")
        pending.append((y, z, *leaves))
        if seed % 3 == 2:
            for y, z, *leaves in pending:
                y.backward(gradient(y))
                z.backward(gradient(z))
                assert_same_bits(*(leaf.grad for leaf in leaves), "input gradient")
            pending.clear()
    assert_same_modules(module, twin)
    assert graphs() == 1


# --- gradients of parameters ----------------------------------------------------------------------


def plain_linear(device):
    """A module that is not ours."""
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8, bias=False).to(device)


@pytest.mark.parametrize("skip", (False, True))
@pytest.mark.parametrize("clone", (True, False))
def test_ownership_of_parameter_gradients(clone, skip, device):
    """Clones by default; the static tensor where asked for, as decided at capture."""
    module = plain_linear(device)
    if skip:
        module.weight.skip_backward_post_hook = True
    sample = torch.zeros(4, 8, device=device, requires_grad=True)
    te.make_graphed_callables(module, (sample,), clone_param_grads_on_return=clone)
    module.weight.skip_backward_post_hook = not skip  # too late
    grads = []
    for _ in range(2):
        x = torch.randn(4, 8, device=device, requires_grad=True)
        grads += torch.autograd.grad(module(x).sum(), module.weight)
    assert (grads[0].data_ptr() == grads[1].data_ptr()) == (skip or not clone)


def test_owned_gradients_accumulate(device):
    """``.grad`` is not overwritten by the next replay."""
    module = plain_linear(device)
    twin = copy.deepcopy(module)
    te.make_graphed_callables(module, (torch.zeros(4, 8, device=device, requires_grad=True),))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 8, device=device)
        for m in (module, twin):
            m(x.clone().requires_grad_()).square().sum().backward()
        assert torch.equal(module.weight.grad, twin.weight.grad)


class Two(torch.nn.Module):
    """Two outputs, one unused parameter, and an output that is no tensor."""

    def __init__(self, device):
        super().__init__()
        self.a, self.b = plain_linear(device), plain_linear(device)
        self.idle = torch.nn.Parameter(torch.ones(3, device=device))

    def forward(self, x, *, scale):
        """A dictionary of results."""
        return {"a": self.a(x) * scale, "b": self.b(x), "note": "text", "c": x.detach() + 1}


def test_unused_outputs_and_inputs(device):
    """A missing output gradient is zero; an unused parameter has none."""
    module = Two(device)
    twin = copy.deepcopy(module)
    x, scale = torch.zeros(4, 8, device=device, requires_grad=True), torch.ones(1, device=device)
    with pytest.raises(RuntimeError, match="allow_unused|not have been used"):
        te.make_graphed_callables(copy.deepcopy(module), (x,), sample_kwargs={"scale": scale})
    te.make_graphed_callables(module, (x,), sample_kwargs={"scale": scale}, allow_unused_input=True)
    for m in (module, twin):
        leaf = torch.full((4, 8), 0.5, device=device, requires_grad=True)
        extra = {"ignored": 1} if m is module else {}
        out = m(leaf, scale=torch.full((1,), 3.0, device=device), **extra)
        assert out["note"] == "text" and not out["c"].requires_grad
        out["a"].sum().backward()
    assert torch.equal(module.a.weight.grad, twin.a.weight.grad)
    assert module.idle.grad is None and not module.b.weight.grad.any()


@pytest.mark.parametrize("option", ("fuse_wgrad_accumulation", "delay_wgrad_compute"))
def test_weight_gradients_elsewhere(option, device):
    """Fused accumulation in the backward graph; delayed gradients in a graph of their own."""
    module = build("LayerNormMLP", device, **{option: True})
    twin, recipe = copy.deepcopy(module), Float8CurrentScaling()
    fused = option.startswith("fuse")
    weights = [(m.fc1_weight, m.fc2_weight) for m in (module, twin)]
    for weight in weights[0] + weights[1] if fused else ():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    graphed(module, (sample_of(device),), recipe)
    for weight in weights[0] if fused else ():
        weight.main_grad.zero_()  # what warming up added
    for seed in range(2):
        x = random(ROWS, K, device=device, seed=seed)
        assert_same_results(*(step(m, x, recipe, seed) for m in (module, twin)))
        for m in (module, twin):
            m.backward_dw()
        for a, b in zip(*weights):
            pair = (a.main_grad, b.main_grad) if fused else (a.grad, b.grad)
            assert_same_bits(*pair, "weight gradient")
            assert pair[0].any()


# --- pipelines ------------------------------------------------------------------------------------


def run_pipeline(order, calls, recipe, device, seed):
    """Outputs and input gradients of one minibatch; ``calls[chunk][microbatch]`` are its layers."""
    done, inputs, outputs, results = {step: 0 for step in order}, {}, {}, []
    with region(recipe):
        for move in order:
            place = abs(move), done[move]
            done[move] += 1
            if move > 0:
                x = random(ROWS, K, device=device, seed=100 * seed + 10 * place[0] + place[1])
                inputs[place] = y = x.requires_grad_()
                for call in calls[place[0]][place[1]]:
                    y = call(y)
                outputs[place] = y
                results.append(y.detach().clone())
            else:
                y = outputs.pop(place)
                y.backward(gradient(y, seed=place[1]))
                results.append(inputs[place].grad.clone())
    return results


@pytest.mark.parametrize("reuse", (False, True))
@pytest.mark.parametrize("recipe", ("none", "current", "delayed"))
def test_interleaved_pipeline(recipe, reuse, device):
    """Two chunks of one and two layers, three microbatches."""
    order = [1, 2, 1, -2, 2, -1, 1, -2, 2, -1, -2, -1]
    layers = [build("LayerNormMLP", device, seed=i) for i in range(3)]
    twins, kept = copy.deepcopy(layers), recipe_of(recipe)
    made = graphed(
        tuple(layers),
        tuple((sample_of(device),) for _ in range(9)),
        kept,
        _order=order,
        _num_layers_per_chunk=[1, 2],
        _reuse_graph_input_output_buffers=reuse,
    )
    assert isinstance(made, tuple) and len(made) == 9
    units = {1: [[made[m]] for m in range(3)], 2: [made[3 + 2 * m : 5 + 2 * m] for m in range(3)]}
    eager = {1: [twins[:1]] * 3, 2: [twins[1:]] * 3}
    for seed in range(2):
        results = [run_pipeline(order, calls, kept, device, seed) for calls in (units, eager)]
        assert_same_results(*results)
    for layer, twin in zip(layers, twins):
        assert_same_modules(layer, twin)
    inputs = {unit.inputs[0].data_ptr() for unit in made}
    assert len(inputs) == (4 if reuse else 9)
    for unit in made:
        unit.reset()
    with pytest.raises(RuntimeError, match="was reset"):
        made[0](random(ROWS, K, device=device))


def test_schedules():
    """Which unit is which, and who shares input buffers."""
    plain = plain_schedule(2)
    assert plain.callables == [0, 1]
    assert plain.events == [Event(True, 0), Event(True, 1), Event(False, 1), Event(False, 0)]
    pipeline = pipelined_schedule([1, 2, 1, 2, -2, -1, -2, -1], 3, [2, 1], 6)
    assert pipeline.callables == [0, 1, 0, 1, 2, 2]
    forward = [event.unit for event in pipeline.events if event.forward]
    backward = [event.unit for event in pipeline.events if not event.forward]
    assert forward == [0, 1, 4, 2, 3, 5] and backward == [4, 1, 0, 5, 3, 2]
    even = pipelined_schedule([1, -1, 1, -1], 2, None, 4)
    assert even.callables == [0, 1, 0, 1]
    assert shared_buffers(even, ["s"] * 4) == [0, 1, 0, 1]
    assert shared_buffers(even, ["s", "s", "t", "s"]) == [0, 1, 2, 1]
    assert shared_buffers(pipeline, ["s"] * 6) == list(range(6))


@pytest.mark.parametrize(
    "order,count,layers,samples,match",
    [
        ([], 1, None, 0, "list of integers"),
        ([1, 0, -1], 1, None, 1, "list of integers"),
        ([1, 1.5, -1], 1, None, 1, "list of integers"),
        ([1, -1, 2], 2, None, 2, "Chunk 2 has 1 forward and 0 backward"),
        ([1, -1, -2], 1, None, 1, "chunk 2, but no forward"),
        ([-1], 1, None, 1, "chunk 1, but no forward"),
        ([-1, 1], 1, None, 1, "before its forward"),
        ([1, 2, -2, -1], 3, None, 3, "divided evenly"),
        ([1, 2, -2, -1], 3, [1, 1], 3, "_num_layers_per_chunk is"),
        ([1, 2, -2, -1], 2, None, 3, "must have 2 entries"),
    ],
)
def test_impossible_schedules(order, count, layers, samples, match):
    """Each names what does not fit."""
    with pytest.raises(ValueError, match=match):
        pipelined_schedule(order, count, layers, samples)


# --- arguments ------------------------------------------------------------------------------------


def test_hooks(device):
    """Around each warm-up pass and around the capture, in schedule order, never at a replay."""
    modules = tuple(plain_linear(device) for _ in range(2))
    calls = []

    def note(name, i):
        return {
            0: lambda m: calls.append((name, i, m is modules[i], graph.is_graph_capturing())),
        }

    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    samples = [(torch.zeros(4, 8, device=device, requires_grad=True),) for _ in range(2)]
    te.make_graphed_callables(
        modules,
        tuple(samples),
        num_warmup_iters=2,
        pre_warmup_hook=lambda: calls.append("before"),
        post_warmup_hook=lambda: calls.append("after"),
        capture_time_hooks=[{kind: note(kind, i) for kind in kinds} for i in range(2)],
    )
    assert calls[0] == "before"
    done = calls.index("after")
    once = [[(kind, i, True, True) for kind in kinds] for i in range(2)]
    assert calls[1:done] == [*once[0] * 2, *once[1] * 2]
    assert calls[done + 1 :] == [*once[0][:2], *once[1][:2], *once[1][2:], *once[0][2:]]
    calls.clear()
    modules[1](modules[0](torch.ones(4, 8, device=device, requires_grad=True))).sum().backward()
    assert not calls


@pytest.mark.parametrize("iterations", (0, 1))
def test_number_of_warmups(iterations, device):
    """Modules of ours are found in the capture too."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    if iterations == 0:  # then the user warms up
        step(module, random(ROWS, K, device=device), recipe)
        module.zero_grad()
    twin = copy.deepcopy(module)
    graphed(module, (sample_of(device),), recipe, num_warmup_iters=iterations)
    for seed in range(2):
        x = random(ROWS, K, device=device, seed=seed)
        assert_same_results(*(step(m, x, recipe, seed) for m in (module, twin)))
    assert_same_modules(module, twin)


@pytest.mark.parametrize(
    "old,new,value",
    [
        ("fp8_enabled", "enabled", True),
        ("fp8_calibrating", "calibrating", False),
        ("fp8_recipe", "recipe", Float8CurrentScaling()),
        ("fp8_weight_caching", "cache_quantized_params", False),
    ],
)
def test_former_names(old, new, value, device):
    """They work and are deprecated; both forms together are an error."""
    module = build("Linear", device)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated"):
        te.make_graphed_callables(module, (sample_of(device),), **{old: value})
    with pytest.raises(ValueError, match=f"give only {new}"):
        te.make_graphed_callables(module, (sample_of(device),), **{old: value, new: value})


def two(device):
    """Two modules and their samples."""
    modules = tuple(plain_linear(device) for _ in range(2))
    samples = tuple((torch.zeros(4, 8, device=device, requires_grad=True),) for _ in range(2))
    return modules, samples


@pytest.mark.parametrize(
    "change,error,match",
    [
        ({"enabled": 1}, TypeError, "bool or a tuple"),
        ({"enabled": (True,)}, ValueError, "1 entries for 2"),
        ({"sample_kwargs": ({},)}, ValueError, "sample_kwargs has 1 entries"),
        ({"sample_kwargs": ({"a": 1}, {})}, TypeError, "there is a int"),
        ({"capture_time_hooks": [None]}, ValueError, "1 entries for 2"),
        ({"capture_time_hooks": [None, {"hooks": {}}]}, ValueError, "kind 'hooks'"),
    ],
)
def test_wrong_arguments(change, error, match, device):
    """Each is named."""
    modules, samples = two(device)
    with pytest.raises(error, match=match):
        te.make_graphed_callables(modules, samples, **change)


def test_wrong_modules(device, monkeypatch):
    """Functions, hooks, mixed modes, an order for a single module, a cache of casts."""
    modules, samples = two(device)
    with pytest.raises(TypeError, match="torch.nn.Module"):
        te.make_graphed_callables((modules[0], torch.sin), samples)
    modules[0].eval()
    with pytest.raises(RuntimeError, match="training mode"):
        te.make_graphed_callables(modules, samples)
    modules[0].train()
    handle = modules[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="has hooks"):
        te.make_graphed_callables(modules, samples)
    handle.remove()
    with pytest.raises(ValueError, match="tuple of modules"):
        te.make_graphed_callables(modules[0], samples[0], _order=[1, -1])
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    with pytest.raises(RuntimeError, match="cache_enabled=False"):
        te.make_graphed_callables(modules, samples)


class Keyword(torch.nn.Module):
    """Takes a tensor by name."""

    def __init__(self, device):
        super().__init__()
        self.linear = plain_linear(device)

    def forward(self, x, shift):
        """``linear(x) + shift``."""
        return self.linear(x) + shift


def test_wrong_calls(device):
    """Missing keywords, other numbers of inputs, other shapes."""
    module = Keyword(device)
    x = torch.zeros(4, 8, device=device, requires_grad=True)
    te.make_graphed_callables(module, (x,), sample_kwargs={"shift": torch.zeros(8, device=device)})
    shift = torch.ones(8, device=device)
    with pytest.raises(TypeError, match="shift must be given"):
        module(x)
    with pytest.raises(TypeError, match="2 tensors as input, but is called with 3"):
        module(x, x, shift=shift)
    with pytest.raises(ValueError, match=r"shape \(4, 8\), as captured, not \(5, 8\)"):
        module(torch.zeros(5, 8, device=device), shift=shift)
    with pytest.raises(ValueError, match="not int"):
        module(3, shift=shift)
    y = module(x, shift=shift)
    assert torch.allclose(y, shift.expand(4, 8))


def test_reset(device):
    """Calls raise afterwards."""
    module = build("Linear", device)
    graphed(module, (sample_of(device),))
    module.reset()
    with pytest.raises(RuntimeError, match="was reset"):
        module(random(ROWS, K, device=device))


def test_saved_tensors_by_name(device):
    """``save_fp8_tensors`` and ``restore_fp8_tensors`` are each other's inverse."""
    model, recipe = stack(device), recipe_of("delayed")
    assert graph.save_fp8_tensors([model], Float8CurrentScaling()) is None
    graph.restore_fp8_tensors([model], None)
    step(model, random(ROWS, K, device=device), recipe)
    before = copy.deepcopy(scaling_states(model))
    saved = graph.save_fp8_tensors([model], recipe)
    step(model, 3 * random(ROWS, K, device=device), recipe)
    graph.restore_fp8_tensors([model], saved)
    for name, state in scaling_states(model).items():
        for field in STATE:
            assert_same_bits(getattr(state, field), getattr(before[name], field), field)
    graph.set_capture_start()
    assert graph.is_graph_capturing()
    graph.set_capture_end()
    assert not graph.is_graph_capturing()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda():
    """An error says so."""
    with pytest.raises(RuntimeError, match="CUDA device"):
        te.make_graphed_callables(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    with pytest.raises(RuntimeError, match="CUDA device"):
        graph.graph_pool_handle()


# --- what only CUDA has ---------------------------------------------------------------------------


@cuda_only
def test_streams_and_events():
    """Replays on a stream of the caller, who waits for all of it or for an event."""
    module = build("LayerNormMLP", "cuda")
    twin, recipe = copy.deepcopy(module), Float8CurrentScaling()
    graphed(module, (sample_of("cuda"),), recipe)
    stream = torch.cuda.Stream()
    for seed, event in enumerate((None, torch.cuda.Event())):
        x = random(ROWS, K, device="cuda", seed=seed)
        if event is not None:
            event.record(stream)
        call = functools.partial(module, cuda_graph_stream=stream, cuda_graph_event=event)
        # With an event that is not in the graph nobody waits for the replay but the host.
        leaf = x.clone().requires_grad_()
        with region(recipe):
            y = call(leaf)
        torch.cuda.synchronize()
        y.backward(gradient(y, seed=seed))
        torch.cuda.synchronize()
        assert_same_results((y.detach(), leaf.grad), step(twin, x, recipe, seed))


@cuda_only
def test_a_pool_is_shared():
    """Two captures in one pool, replayed in their order."""
    pool, recipe = graph.graph_pool_handle(), recipe_of("delayed")
    modules = [build("LayerNormMLP", "cuda", seed=i) for i in range(2)]
    twins = copy.deepcopy(modules)
    for module in modules:
        graphed(module, (sample_of("cuda"),), recipe, pool=pool)
    for seed in range(2):
        x = random(ROWS, K, device="cuda", seed=seed)
        for module, twin in zip(modules, twins):
            assert_same_results(step(module, x, recipe, seed), step(twin, x, recipe, seed))
    for module, twin in zip(modules, twins):
        assert_same_modules(module, twin)


@cuda_only
def test_memory_is_freed_by_reset():
    """Nothing of the graph stays but cached bytes of the weights."""
    module = build("LayerNormMLP", "cuda", width=1024)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graphed(module, (sample_of("cuda", 4096, 1024),), Float8CurrentScaling())
    assert torch.cuda.memory_allocated() > before
    module.reset()
    del module.forward, module.backward_dw, module.reset
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 2**21
