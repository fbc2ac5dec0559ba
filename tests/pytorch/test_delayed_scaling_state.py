# SPDX-License-Identifier: Apache-2.0
"""The life of delayed scaling's state: against an independent model of the rules, and compiled
against eager.
"""

import copy
import gc
import math
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from toy import Toy

from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.core import delayed_scaling
from transformer_engine.pytorch.core.update_rule import decode_rule, rule_of
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast
from transformer_engine.pytorch.recipe_state import DelayedScalingRecipeState

FLT_MAX = torch.finfo(torch.float32).max


def f32(value):
    """`value` rounded to fp32."""
    return torch.tensor(value, dtype=torch.float64).float().item()


class Model:
    """Scale and history of one slot by the written rules, number by number."""

    def __init__(self, length, fp8_max, margin=0, algo="max"):
        self.history = [0.0] * length
        self.scale = 1.0
        self.largest = f32(fp8_max * 2.0**-margin)
        self.algo = algo

    def record(self, amax):
        """A tensor with this amax was quantized."""
        if not math.isnan(amax):
            self.history[0] = max(self.history[0], f32(amax))

    def update(self):
        """The end of a step."""
        last = self.history[0]
        if last == 0.0:
            return
        amax = max([last, *self.history[1:]]) if self.algo == "max" else last
        self.history = [0.0, *self.history[2:], last] if len(self.history) > 1 else [0.0]
        if 0.0 < amax < math.inf:
            scale = f32(self.largest / amax)
            self.scale = FLT_MAX if math.isinf(scale) else scale


def run(toy, recipe, amaxes, grad_amaxes, **context):
    """One region in which `toy` runs once per given amax; backwards in reverse order. ``[rows, 8]``
    inputs.
    """
    outputs = []
    with autocast(recipe=recipe, **context):
        for amax in amaxes:
            outputs.append(toy(torch.linspace(-amax, amax / 2, 32).reshape(4, 8).requires_grad_()))
    for y, amax in reversed(list(zip(outputs, grad_amaxes))):
        y.backward(torch.linspace(-amax, amax / 3, 32).reshape(4, 8))


def column(history, slot):
    """One slot of a history as numbers."""
    return history[:, slot].tolist()


# --- against the written rules --------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2, -1])
def test_steps_against_the_rules(length, algo, margin):
    toy = Toy()
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=algo)
    x, w = Model(length, 448, margin, algo), Model(length, 448, margin, algo)
    g = Model(length, 57344, margin, algo)
    w_amax = toy.w.detach().abs().max().item()
    for step in range(8):
        amaxes = [3.0 / (step + 1), 0.7 * step]
        grad_amaxes = [1e-3 * (step + 1), 5.0 if step == 3 else 0.0]
        run(toy, recipe, amaxes, grad_amaxes)
        for a, ga in zip(amaxes, grad_amaxes):
            x.record(a)
            w.record(w_amax)
            g.record(ga)
        for model in (x, w, g):
            model.update()
        state = toy._delayed_scaling
        assert not state.pending
        assert (
            column(state.fwd_history, 0) == x.history and column(state.fwd_history, 1) == w.history
        )
        assert state.fwd_scale.tolist() == [x.scale, w.scale, 1.0]
        assert column(state.bwd_history, 0) == g.history
        assert state.bwd_scale.tolist() == [g.scale, 1.0]


def test_e4m3_format_scales_gradients_by_448():
    toy = Toy()
    run(toy, DelayedScaling(fp8_format=Format.E4M3, amax_history_len=2), [1.0], [2.0])
    assert toy._delayed_scaling.bwd_scale[0].item() == 224.0


@pytest.mark.parametrize(
    "amax, scale", [(0.0, 1.0), (math.inf, 1.0), (1e-45, FLT_MAX), (1e38, f32(448 / f32(1e38)))]
)
def test_unusual_amaxes(amax, scale):
    state = delayed_scaling.DelayedScalingState(1, 1, 4, torch.device("cpu"))
    state.rule = "4,max,0,448,57344,1,0,"
    delayed_scaling.record_forward(state, [torch.tensor([amax])], [0])
    delayed_scaling.update_forward([state])
    assert state.fwd_scale.item() == scale


def test_deferred_backwards_update_once_per_region():
    toy, recipe, g = Toy(), DelayedScaling(amax_history_len=4), Model(4, 57344)
    outputs = []
    for _ in range(3):
        with autocast(recipe=recipe):
            outputs.append(toy(torch.ones(4, 8)) + toy(torch.ones(4, 8)))
    for amax, y in enumerate(outputs, start=1):
        y.backward(torch.full((4, 8), float(amax)))
        g.record(amax)
        g.update()
        assert column(toy._delayed_scaling.bwd_history, 0) == g.history
        assert toy._delayed_scaling.bwd_scale[0].item() == g.scale


def test_backward_inside_the_region():
    toy, recipe = Toy(), DelayedScaling(amax_history_len=2)
    with autocast(recipe=recipe):
        toy(torch.ones(4, 8)).sum().backward()
        assert toy._delayed_scaling.bwd_scale[0].item() == 57344.0
        assert toy._delayed_scaling.fwd_scale[0].item() == 1.0
    assert toy._delayed_scaling.fwd_scale[0].item() == 448.0


# --- when the update happens ----------------------------------------------------------------------


def live_amax(toy):
    """Row 0 of the input slot, and its scale."""
    state = toy._delayed_scaling
    assert not state.pending
    return state.fwd_history[0, 0].item(), state.fwd_scale[0].item()


def test_only_the_outermost_region_updates():
    toy, recipe = Toy(), DelayedScaling()
    with autocast(recipe=recipe):
        with autocast(recipe=recipe):
            toy(torch.ones(4, 8))
        assert toy._delayed_scaling.fwd_scale[0].item() == 1.0
        toy(torch.full((4, 8), 2.0))
    assert live_amax(toy) == (0.0, 224.0)


def test_a_disabled_outermost_region_does_not_update():
    toy = Toy()
    with autocast(enabled=False):
        with autocast(recipe=DelayedScaling()):
            toy(torch.ones(4, 8))
    assert live_amax(toy) == (1.0, 1.0)


def test_each_module_updates_by_the_rule_of_its_own_region():
    one, two = Toy(), Toy()
    with autocast(recipe=DelayedScaling()):
        one(torch.ones(4, 8))
        with autocast(recipe=DelayedScaling(margin=1)):
            two(torch.ones(4, 8))
    assert live_amax(one) == (0.0, 448.0) and live_amax(two) == (0.0, 224.0)


def test_a_region_of_another_recipe_around_it_updates():
    toy = Toy()
    with autocast(recipe=Float8CurrentScaling()):
        with autocast(recipe=DelayedScaling()):
            toy(torch.ones(4, 8))
    assert live_amax(toy) == (0.0, 448.0)


@pytest.mark.parametrize("grad_off", [torch.no_grad, torch.inference_mode])
def test_no_update_without_gradients(grad_off):
    toy, recipe = Toy(), DelayedScaling()
    with grad_off():
        with autocast(recipe=recipe):
            toy(torch.ones(4, 8))
    assert live_amax(toy) == (1.0, 1.0)
    # The state that inference made can be trained with.
    run(toy, recipe, [0.5], [1.0])
    assert live_amax(toy) == (0.0, 448.0)


def test_no_update_while_a_graph_is_captured():
    toy = Toy()
    with autocast(recipe=DelayedScaling(), _graph=True):
        toy(torch.ones(4, 8)).sum().backward()
    assert live_amax(toy) == (1.0, 1.0)
    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
    assert live_amax(toy) == (0.0, 448.0)


def test_no_update_after_an_exception():
    toy, recipe = Toy(), DelayedScaling()
    with pytest.raises(KeyError):
        with autocast(recipe=recipe):
            toy(torch.full((4, 8), 2.0))
            raise KeyError
    assert live_amax(toy) == (2.0, 1.0)
    run(toy, recipe, [1.0], [1.0])
    assert live_amax(toy) == (0.0, 224.0)


def test_a_use_outside_of_regions_does_not_disturb_the_next_region():
    toy, recipe = Toy(), DelayedScaling(amax_history_len=2)
    with autocast(recipe=recipe):
        saved = FP8GlobalStateManager.get_autocast_state()
    outside = FP8GlobalStateManager.get_autocast_state()
    # What a checkpoint does that recomputes in backward.
    FP8GlobalStateManager.set_autocast_state(saved)
    toy(torch.ones(4, 8))
    FP8GlobalStateManager.set_autocast_state(outside)
    assert toy._delayed_scaling.pending
    run(toy, recipe, [1.0], [2.0])
    assert toy._delayed_scaling.bwd_scale[0].item() == 57344 / 2


def test_modules_outside_the_region_keep_their_scales():
    used, idle, recipe = Toy(), Toy(), DelayedScaling()
    run(used, recipe, [1.0], [1.0])
    run(idle, recipe, [4.0], [1.0])
    before = idle._delayed_scaling.fwd_history.clone()
    run(used, recipe, [2.0], [1.0])
    assert torch.equal(idle._delayed_scaling.fwd_history, before)


# --- the state itself -----------------------------------------------------------------------------


def test_history_length_follows_the_recipe():
    toy = Toy()
    for amax in (1.0, 2.0, 3.0):
        run(toy, DelayedScaling(amax_history_len=4), [amax], [amax])
    state = toy._delayed_scaling
    assert column(state.fwd_history, 0) == [0.0, 1.0, 2.0, 3.0]
    with autocast(recipe=DelayedScaling(amax_history_len=6)):
        delayed_scaling.state_of(toy, delayed_scaling.REGION.rule)
    assert column(state.fwd_history, 0) == [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]
    assert state.bwd_history.shape == (6, 2)
    delayed_scaling.state_of(toy, rule_of(DelayedScaling(amax_history_len=2), None))
    assert column(state.bwd_history, 0) == [0.0, 1.0]
    assert state.fwd_scale[0].item() == f32(448 / 3)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_module_have_a_life_of_their_own(duplicate):
    toy, recipe = Toy(), DelayedScaling(amax_history_len=2)
    run(toy, recipe, [1.0], [1.0])
    with autocast(recipe=recipe):
        toy(torch.ones(4, 8))
        twin = duplicate(toy)
    run(twin, recipe, [4.0], [4.0])
    assert twin._delayed_scaling.fwd_scale[0].item() == 112.0
    assert twin._delayed_scaling.bwd_scale[0].item() == 57344 / 4
    assert toy._delayed_scaling.fwd_scale[0].item() == 448.0


def test_states_and_modules_are_not_kept_alive():
    gc.collect()
    before = len(delayed_scaling.live_states())
    toy = Toy()
    run(toy, DelayedScaling(), [1.0], [1.0])
    assert len(delayed_scaling.live_states()) == before + 1
    del toy
    gc.collect()
    assert len(delayed_scaling.live_states()) == before


def test_meta_modules_have_no_state():
    toy = Toy(device="meta")
    with autocast(recipe=DelayedScaling()):
        with pytest.raises(RuntimeError, match="reset_parameters"):
            delayed_scaling.state_of(toy, delayed_scaling.REGION.rule)


def test_state_made_in_inference_mode_is_an_ordinary_tensor():
    toy = Toy()
    with torch.inference_mode():
        state = delayed_scaling.state_of(toy, rule_of(DelayedScaling(amax_history_len=2), None))
        state.resize(3)
    for tensor in (state.fwd_scale, state.fwd_history, state.bwd_scale, state.bwd_history):
        assert not tensor.is_inference()


def test_state_made_under_a_dispatch_mode_is_real():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    toy = Toy()
    with FakeTensorMode():
        state = delayed_scaling.state_of(toy, rule_of(DelayedScaling(amax_history_len=2), None))
        state.resize(3)
    assert not isinstance(state.fwd_history, FakeTensor) and state.fwd_history.sum().item() == 0.0


def test_recipe_state_shows_the_live_tensors():
    toy, recipe = Toy(), DelayedScaling(amax_history_len=2)
    run(toy, recipe, [1.0], [1.0])
    views = [
        DelayedScalingRecipeState(recipe, owner=toy._delayed_scaling, mode=mode, num_quantizers=n)
        for mode, n in (("forward", 3), ("backward", 2))
    ]
    assert views[0].scale is toy._delayed_scaling.fwd_scale
    views[0].amax_history[0, 0] = 7.0
    views[1].scale = torch.full((2,), 5.0)
    assert toy._delayed_scaling.fwd_history[0, 0].item() == 7.0
    assert toy._delayed_scaling.bwd_scale.tolist() == [5.0, 5.0]
    views[1].amax_history = torch.ones(4, 2)
    assert views[1].amax_history is toy._delayed_scaling.bwd_history
    assert toy._delayed_scaling.bwd_history.shape == (4, 2)


def test_recompute_stash_is_first_in_first_out():
    recipe = DelayedScaling(amax_history_len=2)
    meta = {"scaling_fwd": DelayedScalingRecipeState(recipe, mode="forward", num_quantizers=3)}
    tensors = meta["scaling_fwd"]
    for value in (1.0, 2.0):
        tensors.scale.fill_(value)
        FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute(meta)
    tensors.scale.fill_(3.0)
    for value in (1.0, 2.0):
        FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute(meta)
        assert tensors.scale.tolist() == [value] * 3
        FP8GlobalStateManager.restore_fp8_meta_tensors(meta)
        assert tensors.scale.tolist() == [3.0] * 3


# --- the update in plain torch --------------------------------------------------------------------


def test_functions_of_the_user():
    seen = []

    def half_of_max(history):
        return history.amax(dim=0) / 2

    def scale(amax, old_scale, fp8_max, recipe):
        seen.append((old_scale.clone(), fp8_max, recipe))
        return torch.where(amax > 0, fp8_max / (8 * amax), old_scale)

    toy = Toy()
    recipe = DelayedScaling(
        amax_history_len=3, amax_compute_algo=half_of_max, scaling_factor_compute_algo=scale
    )
    run(toy, recipe, [4.0], [2.0])
    state = toy._delayed_scaling
    assert state.fwd_scale[0].item() == 448 / 16 and state.fwd_scale[2].item() == 1.0
    assert state.bwd_scale[0].item() == 57344 / 8
    assert column(state.fwd_history, 0) == [0.0, 0.0, 4.0]
    assert [(f, r) for _, f, r in seen] == [(448.0, recipe), (57344.0, recipe)]


def test_unfused_rule_rolls_slots_without_a_new_amax(monkeypatch):
    recipe = DelayedScaling(amax_history_len=3)
    toy = Toy()
    run(toy, recipe, [4.0], [1.0])
    run(toy, recipe, [0.0], [1.0])
    # The input slot got no new amax: the default rule leaves it alone.
    assert column(toy._delayed_scaling.fwd_history, 0) == [0.0, 0.0, 4.0]
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    run(toy, recipe, [0.0], [1.0])
    assert column(toy._delayed_scaling.fwd_history, 0) == [0.0, 4.0, 0.0]
    assert toy._delayed_scaling.fwd_scale[0].item() == 112.0
    run(toy, recipe, [0.0], [1.0])
    run(toy, recipe, [0.0], [1.0])
    assert column(toy._delayed_scaling.fwd_history, 0) == [0.0, 0.0, 0.0]


def test_helpers_in_plain_torch():
    history = torch.tensor([[1.0, 0.0, math.inf, math.nan, 1e-45], [4.0, 0.0, 1.0, 1.0, 0.0]])
    scale = torch.full((5,), 7.0)
    quantization._amax_and_scale_update(history, scale, 448.0, DelayedScaling(margin=1))
    assert scale.tolist() == [56.0, 7.0, 7.0, 7.0, FLT_MAX]
    assert history[0].tolist() == [0.0] * 5 and history[1, 0].item() == 1.0
    outputs = [torch.zeros(2), torch.zeros(1)]
    quantization.split_and_copy(torch.arange(3.0), outputs, [2, 1])
    assert outputs[0].tolist() == [0.0, 1.0] and outputs[1].tolist() == [2.0]


def test_rules_are_decoded():
    rule = decode_rule(
        DelayedScaling(margin=-3, reduce_amax=False)._update_rule + ",1,0,with,commas"
    )
    assert rule == (1024, "max", -3.0, 448.0, 57344.0, True, "0,with,commas", None)


# --- compiled -------------------------------------------------------------------------------------


class Chain:
    """Three modules, each used twice in a region, in one of the ways to compile them."""

    def __init__(self, mode, recipe, backend="aot_eager", dynamic=None):
        torch._dynamo.reset()
        counters.clear()
        self.net = nn.Sequential(Toy(seed=0), Toy(seed=1), Toy(seed=2))
        self.recipe = recipe
        options = {"backend": backend, "fullgraph": True, "dynamic": dynamic}
        self.net_function = self.net
        self.region = self._region
        if mode == "whole":
            self.region = torch.compile(self._region, **options)
        elif mode == "inside":
            self.net_function = torch.compile(self.net, **options)
        elif mode == "layers":
            layers = [torch.compile(m, **options) for m in self.net]
            self.net_function = lambda x: layers[2](layers[1](layers[0](x)))

    def _region(self, x):
        with autocast(recipe=self.recipe):
            return self.net_function(self.net_function(x))

    def steps(self, batches=(4, 6, 9)):
        """Two regions, then their backwards, per step. Returns outputs, gradients and states."""
        results = []
        for step, rows in enumerate(batches):
            generator = torch.Generator().manual_seed(step)
            xs = [torch.randn(rows + i, 8, generator=generator) * 10**i for i in range(2)]
            ys = [self.region(x.requires_grad_()) for x in xs]
            for y in ys:
                (y * torch.linspace(0, 1, 8)).sum().backward()
            results += [x.grad for x in xs] + [y.detach() for y in ys]
        return results + [m.w.grad for m in self.net], self.state()

    def state(self):
        """Scales and histories of all modules."""
        found = []
        for module in self.net:
            s = module._delayed_scaling
            assert not s.pending
            found += [t.clone() for t in (s.fwd_scale, s.fwd_history, s.bwd_scale, s.bwd_history)]
        return found


def assert_equal(result, expected):
    """Bit for bit."""
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["whole", "inside", "layers"])
def test_compiled_equals_eager(mode):
    # As many rows of history as the first batch has: their sizes must not become one symbol.
    recipe = DelayedScaling(amax_history_len=4, margin=1)
    values, state = Chain("eager", recipe).steps()
    chain = Chain(mode, recipe, dynamic=True)
    compiled_values, compiled_state = chain.steps()
    assert_equal(compiled_state, state)
    assert_equal(compiled_values, values)
    # First and second use in a region are different code; layers of one class share it.
    assert counters["stats"]["unique_graphs"] == (1 if mode == "whole" else 2)


def test_inductor_equals_eager():
    recipe = DelayedScaling(amax_history_len=2)
    values, state = Chain("eager", recipe).steps((4, 6))
    compiled_values, compiled_state = Chain("whole", recipe, "inductor", True).steps((4, 6))
    assert_equal(compiled_state, state)
    for a, b in zip(compiled_values, values, strict=True):
        # The toy sums the gradient of w outside of the leaf ops; Inductor sums in another order.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_changed_recipe_fields_are_noticed_by_graphs():
    recipe, eager_recipe = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=4)
    eager, whole = Chain("eager", eager_recipe), Chain("whole", recipe, dynamic=True)
    for field, value in (
        ("margin", 3),
        ("fp8_format", Format.E4M3),
        ("amax_compute_algo", "most_recent"),
    ):
        setattr(recipe, field, value)
        setattr(eager_recipe, field, value)
        assert_equal(whole.steps((5,))[1], eager.steps((5,))[1])


def test_recipe_made_in_the_graph_shares_it_over_calls():
    net = Toy()

    def region(x):
        with autocast(recipe=DelayedScaling(amax_history_len=2)):
            return net(x)

    torch._dynamo.reset()
    counters.clear()
    f = torch.compile(region, backend="aot_eager", fullgraph=True)
    for amax in (1.0, 2.0, 4.0):
        f(torch.full((4, 8), amax)).sum().backward()
        assert net._delayed_scaling.fwd_scale[0].item() == 448 / amax
    assert counters["stats"]["unique_graphs"] == 1


def test_no_update_of_compiled_regions_without_gradients():
    toy, recipe = Toy(), DelayedScaling()

    def region(x):
        with autocast(recipe=recipe):
            return toy(x)

    torch._dynamo.reset()
    f = torch.compile(region, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        f(torch.ones(4, 8))
    assert live_amax(toy) == (1.0, 1.0)
    f(torch.full((4, 8), 2.0)).sum().backward()
    assert live_amax(toy) == (0.0, 224.0)
    with torch.no_grad():
        f(torch.ones(4, 8))
    assert live_amax(toy) == (1.0, 224.0)


def test_module_made_after_the_eager_region_was_entered():
    torch._dynamo.reset()
    with autocast(recipe=DelayedScaling()):
        toy = Toy()
        torch.compile(toy, backend="aot_eager", fullgraph=True)(torch.ones(4, 8))
    assert live_amax(toy) == (0.0, 448.0)


def test_other_modules_can_use_a_graph_made_before_they_existed():
    recipe = DelayedScaling(amax_history_len=2)

    def region(module, x):
        with autocast(recipe=recipe):
            return module(x)

    torch._dynamo.reset()
    f = torch.compile(region, backend="aot_eager", fullgraph=True)
    for amax in (1.0, 2.0):
        toy = Toy()
        f(toy, torch.full((4, 8), amax)).sum().backward()
        twin = copy.deepcopy(toy)
        f(twin, torch.full((4, 8), 2 * amax)).sum().backward()
        assert live_amax(toy) == (0.0, 448 / amax) and live_amax(twin) == (0.0, 224 / amax)


def test_unfused_update_is_compiled(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    recipe = DelayedScaling(amax_history_len=3)
    whole = Chain("whole", recipe, dynamic=True).steps((4, 6))
    assert_equal(whole[1], Chain("eager", recipe).steps((4, 6))[1])


def test_functions_of_the_user_around_a_compiled_module():
    toy = torch.compile(Toy(), backend="aot_eager", fullgraph=True)
    with autocast(recipe=DelayedScaling(amax_compute_algo=lambda history: history.amax(0))):
        with pytest.raises(Exception, match="cannot be compiled"):
            toy(torch.ones(4, 8))


def test_graph_breaks_inside_a_traced_region():
    one, two, recipe = Toy(), Toy(), DelayedScaling(amax_history_len=2)

    def region(x):
        with autocast(recipe=recipe):
            x = one(x)
            torch._dynamo.graph_break()
            return two(x)

    torch._dynamo.reset()
    f = torch.compile(region, backend="aot_eager")
    for _ in range(2):
        f(torch.ones(4, 8)).sum().backward()
        for toy in (one, two):
            assert live_amax(toy)[0] == 0.0 and toy._delayed_scaling.fwd_scale[0].item() != 1.0
            assert toy._delayed_scaling.bwd_scale[0].item() != 1.0


# --- several ranks --------------------------------------------------------------------------------


def rank_main(rank, init_file, results):
    """One rank: three steps in which the amaxes differ from rank to rank, eager and compiled."""
    torch.set_num_threads(1)
    distributed = torch.distributed
    distributed.init_process_group(
        "gloo", init_method=f"file://{init_file}", rank=rank, world_size=2
    )
    recipe = DelayedScaling(amax_history_len=2)
    scales = []
    for mode, group in (("eager", None), ("whole", distributed.group.WORLD), ("off", None)):
        toys = nn.Sequential(Toy(seed=0), Toy(seed=1))
        recipe.reduce_amax = mode != "off"

        def region(x, toys=toys, group=group):
            with autocast(recipe=recipe, amax_reduction_group=group):
                return toys(x)

        if mode == "whole":
            region = torch.compile(region, backend="aot_eager", fullgraph=True)
        for step in range(3):
            x = torch.full((4, 8), float(1 + rank + step))
            region(x).backward(torch.full((4, 8), 2.0 - rank))
        states = [m._delayed_scaling for m in toys]
        scales.append([s.fwd_scale.tolist() + s.bwd_scale.tolist() for s in states])
    results.put((rank, scales))
    distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without distributed")
def test_amaxes_are_reduced_over_ranks(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=rank_main, args=(rank, tmp_path / "init", results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
        assert process.exitcode == 0
    scales = dict(results.get() for _ in ranks)
    eager, whole, off = scales[0]
    assert eager == whole == scales[1][0] == scales[1][1]
    # Rank 1 had the larger inputs (2, 3, 4), rank 0 the larger gradients (2).
    assert eager[0][0] == 448 / 4 and eager[1][3] == 57344 / 2
    assert off[0][0] == f32(448 / 3) and scales[1][2][1][3] == 57344


def test_threads_that_run_backward_see_the_state():
    toy = Toy()
    with autocast(recipe=DelayedScaling()):
        y = toy(torch.ones(4, 8)).sum()
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    assert toy._delayed_scaling.bwd_scale[0].item() == 57344.0
