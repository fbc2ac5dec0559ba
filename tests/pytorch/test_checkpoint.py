# SPDX-License-Identifier: Apache-2.0
"""Recomputation in backward, by ``te.checkpoint`` and by ``torch.utils.checkpoint``.

A module that is recomputed is compared with a twin that is not, bit by bit: outputs, gradients,
scales and histories of delayed scaling.
"""

# pylint: disable=no-value-for-parameter,unnecessary-lambda,cell-var-from-loop,unused-variable

import contextlib
import copy
import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch
from feature_report import trained_feature
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

sys.path.insert(0, str(Path(__file__).parent / "module"))

# pylint: disable=wrong-import-position
from compile_support import (
    K,
    STATE,
    as_tuple,
    assert_same_bits,
    assert_same_modules,
    build,
    gradient,
    graphs,
    random,
    recipe_of,
    reset,
    scaling_states,
    with_recipe,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import recompute
from transformer_engine.pytorch.core.ops import EAGER
from transformer_engine.pytorch.torch_version import torch_version
from transformer_engine.pytorch.distributed import (
    activation_recompute_forward,
    get_activation_recompute_contexts,
    has_te_modules,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
    use_reentrant_activation_recompute,
)

CHECKPOINTS = {"te": te.checkpoint, "torch": torch_checkpoint}
ROWS, SEED = 32, 11
both_checkpoints = pytest.mark.parametrize("which", list(CHECKPOINTS))
both_ways = pytest.mark.parametrize("use_reentrant", (False, True))
compilers = pytest.mark.parametrize("backend", ("aot_eager", "inductor"))


class Block(torch.nn.Module):
    """Modules with plain PyTorch between; the ReLU keeps its output, so a wrong bit there shows."""

    def __init__(self, device="cpu", depth=2):
        super().__init__()
        self.mlps = torch.nn.ModuleList(
            build("LayerNormMLP", device, seed=i, activation="swiglu") for i in range(depth)
        )
        self.linears = torch.nn.ModuleList(
            build("Linear", device, seed=9 + i, recipe="mxfp8") for i in range(depth)
        )

    def forward(self, x):
        """``x [rows, K]`` to ``[rows, K]``."""
        for mlp, linear in zip(self.mlps, self.linears):
            x = x + torch.relu(mlp(x))
            x = x + torch.relu(torch.nn.functional.pad(linear(x), (0, K))[..., :K])
        return x


def region(recipe, enabled=True):
    """te.autocast, or nothing."""
    return te.autocast(enabled=recipe is not None and enabled, recipe=recipe)


def train(call, x, recipe, place="around", seed=0):
    """One step: ``call(x)``, in a region that ends before backward (or opens its own)."""
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(SEED + seed)
    with region(recipe, place == "around"):
        y = call(x)
    torch.manual_seed(SEED - 1)
    y.backward(gradient(y, seed=seed))
    return y, x.grad


def assert_same_steps(calls, modules, recipe, device, place="around", steps=3):
    """Some steps of two calls give the same bits, and leave two modules the same."""
    for seed in range(steps):
        x = random(ROWS, K, device=device, seed=seed)
        (y, dx), (z, dz) = (train(call, x, recipe, place, seed) for call in calls)
        assert_same_bits(y, z, "output")
        assert_same_bits(dx, dz, "input gradient")
        assert_same_modules(*modules)


# --- every kind of recipe, place and way ----------------------------------------------------------


@pytest.mark.feature("te.checkpoint", modes=("eager",))
@pytest.mark.parametrize("place", ("around", "inside"))
@both_ways
@both_checkpoints
@pytest.mark.parametrize("recipe", ("none", "current", "delayed", "nvfp4", "custom_delayed"))
@pytest.mark.parametrize("kind", ("Linear", "LayerNormLinear", "LayerNormMLP"))
def test_backward_outside_of_the_region(kind, recipe, which, use_reentrant, place, device):
    """The region is around the checkpoint or in the function; it has ended when backward runs."""
    module, checkpoint = build(kind, device, recipe=recipe), CHECKPOINTS[which]
    twin, kept = copy.deepcopy(module), recipe_of(recipe)

    def function(m, x):
        return m(x) if place == "around" else with_recipe(m, x, kept)

    def recomputed(x):
        return checkpoint(function, module, x, use_reentrant=use_reentrant)

    calls = recomputed, functools.partial(function, twin)
    assert_same_steps(calls, (module, twin), kept, device, place)


@both_ways
@both_checkpoints
@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_backward_inside_of_the_region(recipe, which, use_reentrant, device):
    """Also where the region is that of another recipe, or of none."""
    module, checkpoint = build("LayerNormMLP", device), CHECKPOINTS[which]
    twin, kept = copy.deepcopy(module), recipe_of(recipe)
    for seed, other in enumerate((kept, Float8CurrentScaling(), None)):
        results = []
        for m in (module, twin):
            x = random(ROWS, K, device=device, seed=seed).requires_grad_()
            with region(kept):
                y = checkpoint(m, x, use_reentrant=use_reentrant) if m is module else m(x)
                if other is kept:
                    y.backward(gradient(y))
            if other is not kept:
                with region(other):
                    y.backward(gradient(y))
            results.append((y, x.grad))
        for a, b in zip(*results):
            assert_same_bits(a, b, "output or gradient")
        assert_same_modules(module, twin)


@both_ways
@both_checkpoints
def test_region_off_in_forward_and_on_in_backward(which, use_reentrant, device):
    """What ran in high precision is recomputed in high precision."""
    module, checkpoint = build("LayerNormMLP", device), CHECKPOINTS[which]
    twin, results = copy.deepcopy(module), []
    for m in (module, twin):
        x = random(ROWS, K, device=device).requires_grad_()
        y = checkpoint(m, x, use_reentrant=use_reentrant) if m is module else m(x)
        with te.autocast(recipe=Float8CurrentScaling()):
            y.backward(gradient(y))
        results.append((y, x.grad))
    for a, b in zip(*results):
        assert_same_bits(a, b, "output or gradient")
    assert_same_modules(module, twin)
    assert not scaling_states(module)


@both_ways
@both_checkpoints
@pytest.mark.parametrize("recipe", ("current", "delayed", "mxfp8"))
def test_blocks(recipe, which, use_reentrant, device):
    """Several modules in one function, and recipes that change between its calls."""
    block, checkpoint = Block(device), CHECKPOINTS[which]
    twin, kept = copy.deepcopy(block), recipe_of(recipe)

    def function(m, x):
        x = m(x)
        with te.autocast(enabled=False):
            x = m.mlps[0](x)
        with region(recipe_of("current")):
            return m(x)

    calls = (
        lambda x: checkpoint(function, block, x, use_reentrant=use_reentrant),
        functools.partial(function, twin),
    )
    assert_same_steps(calls, (block, twin), kept, device)


@pytest.mark.parametrize("ways", itertools.product((False, True), repeat=2))
@both_checkpoints
@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_checkpoints_in_checkpoints(recipe, which, ways, device):
    """Recomputing the outer one runs the inner ones for the first time once more."""
    block, checkpoint = Block(device), CHECKPOINTS[which]
    twin, kept = copy.deepcopy(block), recipe_of(recipe)

    def nested(m, x):
        for mlp, linear in zip(m.mlps, m.linears):
            x = x + torch.relu(checkpoint(mlp, x, use_reentrant=ways[1]))
            x = x + torch.relu(torch.nn.functional.pad(linear(x), (0, K))[..., :K])
        return x

    calls = (lambda x: checkpoint(nested, block, x, use_reentrant=ways[0])), twin
    assert_same_steps(calls, (block, twin), kept, device)


@pytest.mark.parametrize("order", ((0, 1, 2), (2, 1, 0), (1, 2, 0)))
@both_ways
@both_checkpoints
def test_backwards_in_any_order(which, use_reentrant, order, device):
    """Three regions, each of which renews the scales, then their backwards."""
    module, checkpoint = build("LayerNormMLP", device), CHECKPOINTS[which]
    twin, recipe, gradients = copy.deepcopy(module), recipe_of("delayed"), []
    for m in (module, twin):
        pending = []
        for seed in range(3):
            x = random(ROWS, K, device=device, seed=seed).mul_(1 + seed).requires_grad_()
            with region(recipe):
                y = checkpoint(m, x, use_reentrant=use_reentrant) if m is module else m(x)
            pending.append((x, y))
        for i in order:
            pending[i][1].backward(gradient(pending[i][1], seed=i))
        gradients.append([x.grad for x, _ in pending])
    for a, b in zip(*gradients):
        assert_same_bits(a, b, "input gradient")
    assert_same_modules(module, twin)


@both_checkpoints
def test_one_module_twice_in_a_region(which, device):
    """Its backward scales are renewed once, from both uses.

    Without reentrance: a reentrant backward adds each gradient to ``.grad`` by itself, and so
    rounds the sums in another order.
    """
    module, checkpoint = build("LayerNormMLP", device), CHECKPOINTS[which]
    twin = copy.deepcopy(module)

    def recomputed(x):
        x = checkpoint(module, x, use_reentrant=False)
        return checkpoint(module, x, use_reentrant=False)

    assert_same_steps(
        (recomputed, lambda x: twin(twin(x))), (module, twin), recipe_of("delayed"), device
    )


@both_checkpoints
def test_retained_graph(which, device):
    """Each backward recomputes from the beginning."""
    block, checkpoint = Block(device), CHECKPOINTS[which]
    twin, recipe = copy.deepcopy(block), recipe_of("delayed")
    for m in (block, twin):
        x = random(ROWS, K, device=device).requires_grad_()
        with region(recipe):
            y = checkpoint(m, x, use_reentrant=False) if m is block else m(x)
        y.backward(gradient(y), retain_graph=True)
        y.backward(gradient(y, seed=1))
    assert_same_modules(block, twin)


@both_ways
@both_checkpoints
def test_length_of_the_history_changes_before_backward(which, use_reentrant, device):
    """The recomputation does not give the state its old length back."""
    module, checkpoint = build("Linear", device), CHECKPOINTS[which]
    x = random(ROWS, K, device=device).requires_grad_()
    with te.autocast(recipe=DelayedScaling(amax_history_len=3)):
        y = checkpoint(module, x, use_reentrant=use_reentrant)
    with torch.no_grad(), te.autocast(recipe=DelayedScaling(amax_history_len=5)):
        module(x)
    y.backward(gradient(y))
    state = module._delayed_scaling
    assert state.fwd_history.shape[0] == state.bwd_history.shape[0] == 5


@both_ways
@both_checkpoints
def test_torch_autocast(which, use_reentrant, device):
    """fp32 parameters in bf16 arithmetic, recomputed outside of torch.autocast."""
    module = build("LayerNormMLP", device, dtype=torch.float32)
    twin, results = copy.deepcopy(module), []
    for m in (module, twin):
        x = random(ROWS, K, device=device, dtype=torch.float32).requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16), region(recipe_of("current")):
            y = CHECKPOINTS[which](m, x, use_reentrant=use_reentrant) if m is module else m(x)
        assert y.dtype == torch.bfloat16
        y.backward(gradient(y))
        results.append(x.grad)
    assert_same_bits(*results, "input gradient")
    assert_same_modules(module, twin)


@both_ways
@both_checkpoints
@pytest.mark.parametrize("recipe", ("current", "delayed"))
@pytest.mark.parametrize("reverse", (False, True))
def test_cached_weights(recipe, which, use_reentrant, reverse, device):
    """Microbatches with cached weights and late backwards: the first pass caches, once."""
    module, checkpoint = build("LayerNormMLP", device), CHECKPOINTS[which]
    twin, kept = copy.deepcopy(module), recipe_of(recipe)
    for minibatch in range(3):
        results, caches = [], []
        for m in (module, twin):
            pending = []
            for micro in range(3):
                x = random(ROWS, K, device=device, seed=9 * minibatch + micro).requires_grad_()
                call = functools.partial(m, is_first_microbatch=micro == 0)
                with region(kept):
                    y = checkpoint(call, x, use_reentrant=use_reentrant) if m is module else call(x)
                pending.append((x, y))
                caches.append(dict(m._fp8_workspaces))
            for x, y in reversed(pending) if reverse else pending:
                y.backward(gradient(y))
            caches.append(dict(m._fp8_workspaces))
            results.append([t for x, y in pending for t in (y, x.grad)])
            with torch.no_grad():
                for param in m.parameters():
                    param.add_(param.grad, alpha=-0.01)
        for a, b in zip(*results):
            assert_same_bits(a, b, "microbatch")
        assert_same_modules(module, twin)
        for cache in caches[1:4]:  # one object from the first microbatch to the last backward
            assert all(cache[key] is entry for key, entry in caches[0].items())


@both_ways
@both_checkpoints
def test_scales_in_use_are_not_touched(which, use_reentrant, device):
    """Between the end of the region and the end of backward only the backward scales change."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    x = random(ROWS, K, device=device).requires_grad_()
    with region(recipe):
        y = CHECKPOINTS[which](module, x, use_reentrant=use_reentrant)
    state = module._delayed_scaling
    tensors = [getattr(state, name) for name in STATE]
    before = [t.clone() for t in tensors]
    y.backward(gradient(y))
    assert all(getattr(state, name) is t for name, t in zip(STATE, tensors))
    same = [torch.equal(a, b) for a, b in zip(tensors, before)]
    assert same == [True, True, False, False]
    assert not te.quantization.FP8GlobalStateManager.is_fp8_enabled()


# --- random numbers -------------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    """Draws from the default stream and from a named one."""

    def __init__(self, device, tracker):
        super().__init__()
        self.mlp, self.tracker = build("LayerNormMLP", device), tracker

    def forward(self, x):
        """Dropout before and after the module."""
        x = torch.nn.functional.dropout(x, 0.3)
        with self.tracker.fork():
            x = x + torch.nn.functional.dropout(self.mlp(x), 0.5)
        return x * torch.rand_like(x)


@both_ways
def test_random_streams(use_reentrant, device):
    """The second pass draws what the first drew, from each stream, and leaves them as they were."""
    results = []
    for recomputing in (True, False):
        tracker = te.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 5)
        model, after = Dropping(device, tracker), []
        for seed in range(2):
            x = random(ROWS, K, device=device, seed=seed).requires_grad_()
            torch.manual_seed(seed)
            with region(recipe_of("nvfp4")):
                if recomputing:
                    options = {"use_reentrant": use_reentrant}
                    y = te.checkpoint(model, x, get_rng_state_tracker=lambda: tracker, **options)
                else:
                    y = model(x)
            with tracker.fork():
                after.append(torch.rand(3, device=device))
            torch.manual_seed(99)
            y.backward(gradient(y))
            with tracker.fork():
                after += [x.grad, torch.rand(3, device=device)]
        results.append([*after, *(p.grad for p in model.parameters())])
    for a, b in zip(*results):
        assert_same_bits(a, b, "stream or gradient")


def test_tracker():
    """Streams are independent and go on where they were; names and seeds are unique."""
    tracker = te.CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    with pytest.raises(RuntimeError, match="seed 1"):
        tracker.add("c", 1)
    with pytest.raises(RuntimeError, match="'a'"):
        tracker.add("a", 3)
    with pytest.raises(KeyError, match="model-parallel-rng"):
        with tracker.fork():
            pass
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = functools.partial(torch.rand, 4, device=device)
    torch.manual_seed(0)
    default = draw()
    torch.manual_seed(0)
    with tracker.fork("a"):
        first = draw()
    assert torch.equal(draw(), default)
    with tracker.fork("a"), tracker.fork("b"):
        draw()
    with tracker.fork("a"):
        second = draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first) and torch.equal(draw(), second)
    tracker.reset()
    assert not tracker.get_states() and not tracker.seeds_


# --- what te.checkpoint accepts -------------------------------------------------------------------


@both_ways
def test_arguments_and_outputs(use_reentrant, device):
    """Tensors, None, numbers, keywords; several outputs; a function without gradients."""
    module = build("Linear", device)

    def function(x, scale, nothing, *, shift, flag=False):
        assert nothing is None and flag
        return module(x) * scale + shift, x.detach(), scale

    x = random(ROWS, K, device=device).requires_grad_()
    shift = random(ROWS, 1, device=device)
    results = []
    for call in (functools.partial(te.checkpoint, function, use_reentrant=use_reentrant), function):
        x.grad = module.weight.grad = None
        y, z, scale = call(x, 2.0, None, shift=shift, flag=True)
        # A reentrant checkpoint gives every output a gradient function, as torch's does.
        assert scale == 2.0 and (use_reentrant or not z.requires_grad)
        y.backward(gradient(y))
        results.append((y, x.grad.clone(), module.weight.grad.clone()))
    for a, b in zip(*results):
        assert_same_bits(a, b, "output or gradient")
    with torch.no_grad():
        assert_same_bits(te.checkpoint(module, x), module(x), "without gradients")


def test_network_without_our_modules(device):
    """PyTorch's function takes it as it is."""
    network = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).to(device)
    assert not has_te_modules(network) and has_te_modules(torch.nn.Sequential(build("Linear")))
    x = torch.randn(4, 8, device=device, requires_grad=True)
    for use_reentrant in (False, True):
        te.checkpoint(network, x, use_reentrant=use_reentrant).sum().backward()
    expected = x.detach().clone().requires_grad_()
    network(expected).sum().backward()
    assert torch.allclose(x.grad, 2 * expected.grad)


def test_former_argument_order(device):
    """Positional options are understood, and deprecated."""
    module = build("Linear", device)
    x = random(ROWS, K, device=device).requires_grad_()
    with pytest.warns(DeprecationWarning, match="by name"):
        y = te.checkpoint(module, False, None, None, x)
    assert_same_bits(y, module(x), "output")


def test_fsdp_marks_are_cleared(device):
    """A recomputed module keeps no activations to be scattered."""
    module = build("Linear", device)
    module.fsdp_wrapped, module.fsdp_group = True, "group"
    te.checkpoint(module, random(ROWS, K, device=device).requires_grad_())
    assert not module.fsdp_wrapped and module.fsdp_group is None


def test_distribution_needs_a_group(device):
    """An error says so; without reentrance a warning says that the option does nothing."""
    module, x = build("Linear", device), random(ROWS, K, device=device).requires_grad_()
    with pytest.raises(RuntimeError, match="init_process_group"):
        te.checkpoint(module, x, distribute_saved_activations=True)
    with pytest.warns(UserWarning, match="no effect"):
        te.checkpoint(module, x, distribute_saved_activations=True, use_reentrant=False)


def _distributed(rank, folder):
    """One of two processes that keep half of the input each."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    module = build("LayerNormMLP")
    twin, kept = copy.deepcopy(module), []

    def pack(t):
        kept.append(t.numel() if isinstance(t, torch.Tensor) else 0)
        return t

    results = []
    for m in (module, twin):
        x = random(ROWS, K).requires_grad_()
        with region(recipe_of("delayed")):
            if m is module:
                y = te.checkpoint(m, x, distribute_saved_activations=True, tp_group=None)
            else:
                y = m(x)
        y.backward(gradient(y))
        results.append(x.grad)
    assert_same_bits(*results, "input gradient")
    assert_same_modules(module, twin)
    whole = torch.arange(8.0).view(2, 4)
    part = te.distributed.split_tensor_into_1d_equal_chunks(whole, None, new_buffer=True)
    assert part.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]
    assert torch.equal(te.distributed.gather_split_1d_tensor(part, None), whole.view(-1))
    with pytest.raises(ValueError, match="equal parts"):
        te.distributed.split_tensor_into_1d_equal_chunks(torch.zeros(3), None)
    torch.distributed.destroy_process_group()


def test_distributed_input(tmp_path):
    """Two processes gather the input again in backward."""
    torch.multiprocessing.spawn(_distributed, (str(tmp_path),), nprocs=2)


# --- what can be asked ----------------------------------------------------------------------------


@both_ways
def test_phases(use_reentrant, device):
    """Names that other packages ask, in each pass, with regions around and inside."""
    seen, module = [], build("Linear", device)

    def look(x):
        seen.append(
            (
                is_fp8_activation_recompute_enabled(),
                in_fp8_activation_recompute_phase(),
                use_reentrant_activation_recompute(),
            )
        )
        with te.autocast(recipe=Float8CurrentScaling()):
            inner = is_fp8_activation_recompute_enabled()
            y = module(x)
        seen.append(inner)
        return y

    x = random(ROWS, K, device=device).requires_grad_()
    for recipe in (Float8CurrentScaling(), None):
        seen.clear()
        with region(recipe):
            y = te.checkpoint(look, x, use_reentrant=use_reentrant)
        y.sum().backward()
        enabled = recipe is not None
        first, second = (enabled, False, use_reentrant), (enabled, True, use_reentrant)
        assert seen[:3] == [first, True, second]  # the second pass may stop early
    assert not is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()
    assert use_reentrant_activation_recompute()


class Manual(torch.autograd.Function):
    """A reentrant checkpoint as other packages write them, with the contexts for it."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad(), activation_recompute_forward(True, False):
            return function(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), activation_recompute_forward(True, True):
            y = ctx.function(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_contexts_for_other_checkpoints(recipe, reentrant, device):
    """``activation_recompute_forward`` by hand, first in first out."""
    block, kept = Block(device), recipe_of(recipe)
    twin, results = copy.deepcopy(block), []
    for seed in range(2):
        for m in (block, twin):
            pending = []
            for i in range(2):
                x = random(ROWS, K, device=device, seed=2 * seed + i).requires_grad_()
                with region(kept):
                    if m is twin:
                        y = m(x)
                    elif reentrant:
                        y = Manual.apply(m, x)
                    else:
                        contexts = get_activation_recompute_contexts
                        y = torch_checkpoint(m, x, use_reentrant=False, context_fn=contexts)
                pending.append((x, y))
            for x, y in pending:
                y.backward(gradient(y))
            results.append([x.grad for x, _ in pending])
        for a, b in zip(*results[-2:]):
            assert_same_bits(a, b, "input gradient")
        assert_same_modules(block, twin)


def test_an_unknown_recomputation_is_refused(device):
    """A checkpoint that tells us nothing can not have the scales of its first pass back."""

    class Unknown(torch.autograd.Function):
        """As above, without the contexts."""

        @staticmethod
        def forward(ctx, function, x):
            ctx.function = function
            ctx.save_for_backward(x)
            with torch.no_grad():
                return function(x)

        @staticmethod
        def backward(ctx, dy):
            with torch.enable_grad():
                ctx.function(ctx.saved_tensors[0].detach().requires_grad_())
            return None, dy

    module, recipe = build("Linear", device), recipe_of("delayed")
    x = random(ROWS, K, device=device).requires_grad_()
    y = Unknown.apply(lambda x: with_recipe(module, x, recipe), x)
    before = [getattr(module._delayed_scaling, name).clone() for name in STATE]
    with pytest.raises(RuntimeError, match="te.checkpoint"):
        y.sum().backward()
    assert all(torch.equal(getattr(module._delayed_scaling, n), b) for n, b in zip(STATE, before))


def test_a_function_that_does_something_else_is_refused(device):
    """The recomputation calls another module than the forward pass did."""
    modules = [build("Linear", device) for _ in range(2)]
    order = iter((0, 1))
    x = random(ROWS, K, device=device).requires_grad_()
    y = torch_checkpoint(lambda x: modules[next(order)](x), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="module number 0"):
        y.sum().backward()


def test_the_places_that_torch_keeps_are_found(device):
    """If this fails, a new torch keeps checkpoints elsewhere: see recompute.py."""
    found = []

    def look(x):
        surroundings = recompute._surroundings(None)
        found.append((len(surroundings.sinks), surroundings.following is not None))
        return module(x).sin()

    module = build("Linear", device)
    for use_reentrant in (False, True):
        found.clear()
        x = random(ROWS, K, device=device).requires_grad_()
        torch_checkpoint(look, x, use_reentrant=use_reentrant).sum().backward()
        assert found == [(1, False), (0, True)]
    assert recompute._surroundings(None) is None
    with torch.no_grad():
        assert recompute._surroundings(None) is None


# --- selective policies ---------------------------------------------------------------------------


def count_calls(monkeypatch, names):
    """A list that grows by the name of each leaf op of ``names`` that runs."""
    calls = []
    for name in names:
        op = getattr(torch.ops.transformer_engine, name).default
        del op
        run = getattr(EAGER, name)
        monkeypatch.setattr(
            EAGER, name, lambda *a, _run=run, _name=name: (calls.append(_name), _run(*a))[1]
        )
    return calls


def saving(name):
    """A policy that keeps the outputs of one of our module ops."""
    op = getattr(torch.ops.transformer_engine, name).default

    def policy(ctx, func, *args, **kwargs):
        del ctx, args, kwargs
        return CheckpointPolicy.MUST_SAVE if func is op else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


# Each module and its op; with weights cached or not.
POLICIES = [
    ("LayerNormMLP", r, first) for r in ("none", "current", "delayed") for first in (None, True)
]
POLICIES += [(kind, "delayed", None) for kind in ("Linear", "LayerNormLinear")]
OPS = {"Linear": "linear", "LayerNormLinear": "layernorm_linear", "LayerNormMLP": "layernorm_mlp"}


@trained_feature("selective checkpoint policies", modes=("eager",))
@both_checkpoints
@pytest.mark.parametrize("kind,recipe,first", POLICIES)
def test_selective_policy(kind, recipe, which, first, monkeypatch, device):
    """A policy that names the op of a module: it is not computed again."""
    module, kept = build(kind, device), recipe_of(recipe)
    twin, checkpoint = copy.deepcopy(module), CHECKPOINTS[which]
    calls = count_calls(monkeypatch, ("gemm" if kind == "Linear" else "norm_forward",))
    of_backward = 2 if kind == "Linear" else 0
    for name, passes in ((OPS[kind], 1), ("normalization", 2)):
        for seed in range(2):
            results = []
            for m in (module, twin):
                calls.clear()
                x = random(ROWS, K, device=device, seed=seed).requires_grad_()
                with region(kept):
                    call = functools.partial(m, is_first_microbatch=first)
                    if m is module:
                        y = checkpoint(
                            lambda x, call=call: call(x.sin()).cos(),
                            x,
                            use_reentrant=False,
                            context_fn=saving(name),
                        )
                    else:
                        y = call(x.sin()).cos()
                y.backward(gradient(y))
                assert len(calls) == (passes if m is module else 1) + of_backward
                results.append(x.grad)
            assert_same_bits(*results, "input gradient")
            assert_same_modules(module, twin)


# --- compiled -------------------------------------------------------------------------------------


IN_GRAPH = [("LayerNormMLP", recipe) for recipe in ("none", "current", "mxfp8", "nvfp4")]
IN_GRAPH += [("Linear", "nvfp4"), ("LayerNormLinear", "current")]


@pytest.mark.feature("te.checkpoint", modes=("compiled",))
@pytest.mark.parametrize("place", ("around", "inside"))
@compilers
@pytest.mark.parametrize("kind,recipe", IN_GRAPH)
def test_in_a_graph(kind, recipe, backend, place, device):
    """te.checkpoint in a compiled function; the region around it or in it."""
    check_in_a_graph(kind, recipe, backend, place, device)


@trained_feature("selective checkpoint policies", modes=("compiled",))
@pytest.mark.parametrize("place", ("around", "inside"))
@compilers
@pytest.mark.parametrize("kind,recipe", IN_GRAPH)
def test_policy_in_a_graph(kind, recipe, backend, place, device):
    """The same with a policy that keeps what the module returns."""
    check_in_a_graph(kind, recipe, backend, place, device, context_fn=saving(OPS[kind]))


def check_in_a_graph(kind, recipe, backend, place, device, **options):
    """One graph, and the bits of a module that keeps everything."""
    reset()
    module, kept = build(kind, device, recipe=recipe), recipe_of(recipe)
    twin = copy.deepcopy(module)

    def step(x):
        with (
            te.autocast(enabled=kept is not None, recipe=kept)
            if place == "inside"
            else (contextlib.nullcontext())
        ):
            return te.checkpoint(module, x, use_reentrant=False, **options)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    calls = compiled, lambda x: with_recipe(twin, x, kept)
    assert_same_steps(calls, (module, twin), kept, device, place, steps=2)
    assert graphs() == 1


def kept_bytes(call, x):
    """Bytes that autograd keeps of one call, and the call's backward."""
    kept = []

    def pack(t):
        kept.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call(x)
    y.sum().backward()
    return sum(kept)


@compilers
def test_a_graph_keeps_less(backend, device):
    """The checkpoint in the graph saves memory, and a policy that keeps the module costs it."""
    module, kept = build("LayerNormMLP", device, activation="swiglu"), []
    for options in ({}, {"context_fn": saving("layernorm_mlp")}, None):
        reset()

        def step(x, options=options):
            if options is None:
                return module(x)
            return te.checkpoint(module, x, use_reentrant=False, **options)

        compiled = torch.compile(step, fullgraph=True, backend=backend)
        kept.append(kept_bytes(compiled, random(256, K, device=device).requires_grad_()))
    assert kept[0] <= kept[1] <= kept[2]
    if torch_version()[:2] >= (2, 13):  # before, the partitioner keeps everything anyway
        assert kept[0] < kept[2]


@pytest.mark.feature(
    "te.checkpoint",
    modes=("compiled",),
    no="DelayedScaling in compiled code: runs in eager, with a warning; not around compiled code",
)
def test_delayed_scaling_in_a_graph_falls_back(device):
    """With a warning; with fullgraph the reason is in the error."""
    reset()
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    twin = copy.deepcopy(module)

    def step(x):
        return te.checkpoint(module, x, use_reentrant=False).sin()

    with pytest.raises(Exception, match="outside of torch.compile"), region(recipe):
        torch.compile(step, fullgraph=True, backend="aot_eager")(random(ROWS, K, device=device))
    reset()
    compiled = torch.compile(step, backend="aot_eager")
    with pytest.warns(UserWarning, match="Falling back to eager"):
        assert_same_steps((compiled, lambda x: twin(x).sin()), (module, twin), recipe, device)


@both_ways
@pytest.mark.parametrize("recipe", ("none", "current", "delayed", "nvfp4"))
def test_compiled_module(recipe, use_reentrant, device):
    """Eager te.checkpoint of a compiled module, backward outside of the region: two graphs.

    Not with Inductor, which rounds the operations between the modules in its own way.
    """
    reset()
    block, kept = Block(device, depth=1), recipe_of(recipe)
    twin = copy.deepcopy(block)
    compiled = torch.compile(lambda x: block(x), fullgraph=True, backend="aot_eager")
    calls = (lambda x: te.checkpoint(compiled, x, use_reentrant=use_reentrant)), twin
    assert_same_steps(calls, (block, twin), kept, device, steps=4)
    assert graphs() <= (2 if use_reentrant else 1)


@both_ways
def test_compiled_and_eager_modules_in_one_function(use_reentrant, device):
    """One module compiled, one not, one both; used twice in a region."""
    reset()
    block, kept = Block(device), recipe_of("delayed")
    twin = copy.deepcopy(block)
    compiled = torch.compile(lambda x: block.mlps[0](x), fullgraph=True, backend="aot_eager")

    def function(m, x):
        first = m.mlps[0] if m is twin else compiled
        x = torch.relu(first(x))
        x = torch.relu(m.mlps[1](x))
        return first(x) + m.mlps[1](x)

    calls = (
        lambda x: te.checkpoint(function, block, x, use_reentrant=use_reentrant),
        lambda x: function(twin, x),
    )
    assert_same_steps(calls, (block, twin), kept, device)


def test_compiled_function_with_its_own_delayed_region_is_refused(device):
    """Its scales are renewed in the graph, so nobody could keep the old ones."""
    reset()
    module, recipe = build("Linear", device), recipe_of("delayed")
    compiled = torch.compile(
        lambda x: with_recipe(module, x, recipe), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(RuntimeError, match="around te.checkpoint"):
        te.checkpoint(compiled, random(ROWS, K, device=device).requires_grad_())


def test_nothing_is_left_behind(device):
    """Records die with the graph; a step leaves no tensor and no mark."""
    module, recipe = build("LayerNormMLP", device), recipe_of("delayed")
    for use_reentrant, checkpoint in itertools.product((False, True), CHECKPOINTS.values()):
        x = random(ROWS, K, device=device).requires_grad_()
        with region(recipe):
            y = checkpoint(module, x, use_reentrant=use_reentrant)
        y.backward(gradient(y))
        del y
    phase = recompute.PHASE
    assert not phase.backward_follows and not phase.recomputing and phase.uses is None
    assert not recompute.MARKED.enabled and not recompute.MARKED.queues
    assert as_tuple(module(x))[0].grad_fn is not None
