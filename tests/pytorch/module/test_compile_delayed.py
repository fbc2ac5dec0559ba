# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling in compiled code: scales and amax histories of both directions equal eager's, bit
by bit, over many steps. `Twins` compares all of them after each step."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

from compile_support import (
    GEMM_MODULES,
    K,
    STATE,
    Twins,
    build,
    graphs,
    plain,
    random,
    same_bits,
    scaling_states,
)

RECIPES = {
    "length_1": {"amax_history_len": 1},
    "length_4": {"amax_history_len": 4},
    "default": {},
    "most_recent": {"amax_history_len": 4, "amax_compute_algo": "most_recent"},
    "margin": {"amax_history_len": 2, "margin": 3},
    "negative_margin": {"amax_history_len": 2, "margin": -1, "reduce_amax": False},
    "e4m3": {"amax_history_len": 2, "fp8_format": Format.E4M3},
}


def in_region(modules, x, recipe):
    """All modules in one region."""
    with te.autocast(recipe=recipe):
        for module in modules:
            x = module(x)
    return x


def regions_of_their_own(modules, x, recipe):
    """A region for each module."""
    for module in modules:
        with te.autocast(recipe=recipe):
            x = module(x)
    return x


def in_caller_s_region(modules, x, recipe):
    """The region is outside of the compiled function."""
    del recipe
    for module in modules:
        x = module(x)
    return x


def stack(device):
    """All three modules with a norm between them."""
    return torch.nn.ModuleList(
        [
            build("LayerNormMLP", device, seed=1, activation="swiglu", normalization="RMSNorm"),
            te.Linear(K, K, params_dtype=torch.bfloat16, device=device),
            build("LayerNorm", device, seed=2),
            te.LayerNormLinear(K, K, params_dtype=torch.bfloat16, device=device, bias=False),
            build("LayerNormMLP", device, seed=3, activation="gelu"),
        ]
    )


def data(step, device, rows=16):
    """Inputs whose magnitude goes up and down, so that every scale moves in both directions."""
    return random(rows, K, device=device, seed=step) * (1, 8, 0.25, 3, 0.01, 30, 2, 0.5)[step % 8]


def train(twins, recipe, device, steps=7, around=False):
    """Training steps with gradients of changing magnitude."""
    for step in range(steps):
        if around:
            with te.autocast(recipe=recipe):
                forward = twins.forward(data(step, device), recipe)
            forward.backward(seed=step)
        else:
            twins.step(data(step, device), recipe, seed=step)
        twins.zero_grad()


def assert_state_moved(module):
    """Every scale that is in use is no longer one, so that the comparison meant something."""
    for state in scaling_states(module).values():
        used = state.fwd_history.shape[1] // 3
        for gemm in range(used):
            assert (state.fwd_scale[3 * gemm : 3 * gemm + 2] != 1).all()
            assert state.bwd_scale[2 * gemm] != 1


STACKS = [(in_region, options) for options in sorted(RECIPES)]
STACKS += [(in_caller_s_region, options) for options in ("length_1", "margin")]


@pytest.mark.parametrize("call,options", STACKS)
def test_stack(call, options, device):
    """Seven steps of five modules in one graph, for each kind of update rule."""
    twins, recipe = Twins(stack(device), call), DelayedScaling(**RECIPES[options])
    train(twins, recipe, device, around=call is in_caller_s_region)
    assert graphs() == 1
    assert_state_moved(twins.module)
    length = recipe.amax_history_len
    for state in scaling_states(twins.module).values():
        assert state.fwd_history.shape[0] == state.bwd_history.shape[0] == length


def test_stack_inductor(device):
    """The same with the default backend, whose memory planning must not touch the state."""
    for call in (in_region, in_caller_s_region):
        twins = Twins(stack(device), call, backend="inductor")
        train(twins, DelayedScaling(amax_history_len=3), device, around=call is in_caller_s_region)
        assert graphs() == 1


def test_regions_of_their_own(device):
    """Scales are renewed after each module."""
    twins = Twins(stack(device), regions_of_their_own)
    train(twins, DelayedScaling(amax_history_len=3), device)
    assert graphs() == 1


def test_dynamic_batch(device):
    """Any number of rows, a batch as large as the history included, in one graph."""
    twins, recipe = Twins(stack(device), in_region, dynamic=True), DelayedScaling(
        amax_history_len=4
    )
    for step, rows in enumerate((4, 16, 6, 3, 33)):
        twins.step(data(step, device, rows), recipe, seed=step)
    assert graphs() == 1
    for step, rows in enumerate((1, 0, 0, 1, 5)):
        twins.step(data(step, device, rows), recipe, seed=step)
    assert graphs() == 3


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_two_modules_one_used_twice(kind, device):
    """The last backward of a module renews its scales, once; the amaxes of both uses count."""

    def call(modules, x, recipe):
        with te.autocast(recipe=recipe):
            small, large = modules[0](x), modules[0](x * 100)
            return modules[1](x) + small + large

    modules = torch.nn.ModuleList([build(kind, device, seed=i) for i in range(2)])
    twins = Twins(modules, call)
    train(twins, DelayedScaling(amax_history_len=3), device)
    assert graphs() == 1


@pytest.mark.parametrize("call", (in_region, in_caller_s_region))
@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_inference_advances_nothing(context, call, device):
    """Without gradients the end of a region renews no scale; training goes on where it was."""
    twins, recipe = Twins(stack(device), call), DelayedScaling(amax_history_len=3)
    around = call is in_caller_s_region
    train(twins, recipe, device, steps=2, around=around)
    for _ in range(2):
        scales = [s.fwd_scale.clone() for s in scaling_states(twins.module).values()]
        x = data(5, device)
        with context(), te.autocast(enabled=around, recipe=recipe):
            for function in (twins.compiled, lambda *args: call(twins.eager, *args)):
                function(x, recipe)
        twins.compare()
        states = scaling_states(twins.module).values()
        assert all(torch.equal(a, s.fwd_scale) for a, s in zip(scales, states))
        train(twins, recipe, device, steps=2, around=around)
    assert graphs() == 2


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_cold_module_is_one_graph(kind, device):
    """The state is made while the first call is traced; there is no second trace."""
    for call in (in_region, in_caller_s_region):
        twins = Twins(torch.nn.ModuleList([build(kind, device)]), call)
        assert not scaling_states(twins.module)
        train(twins, DelayedScaling(), device, steps=2, around=call is in_caller_s_region)
        assert graphs() == 1
        assert len(scaling_states(twins.module)) == 1


def test_eager_and_compiled_steps_in_turn(device):
    """One state serves both; its tensors are never replaced."""
    twins, recipe = Twins(stack(device), in_region), DelayedScaling(amax_history_len=3)
    addresses = None
    for step, eager in enumerate((False, True, True, False, True, False)):
        twins.step(data(step, device), recipe, seed=step, eager_only=eager)
        twins.zero_grad()
        states = scaling_states(twins.module).values()
        found = [getattr(state, field).data_ptr() for state in states for field in STATE]
        assert addresses is None or found == addresses
        addresses = found
    assert graphs() == 1


def test_history_length_changed(device):
    """A graph does not resize a history in use, and says how to; then it goes on as in eager."""
    twins = Twins(stack(device), in_region)
    x = data(0, device)
    for step, length in enumerate((2, 4, 1)):
        recipe = DelayedScaling(amax_history_len=length)
        if step:
            with pytest.raises(Exception, match=rf"adjust_amax_history_length\({length}\)"):
                twins.compiled(x, recipe)
            twins.compare()
            for child in twins.module:
                if hasattr(child, "adjust_amax_history_length"):
                    child.adjust_amax_history_length(length)
        for repeat in range(3):
            twins.step(data(3 * step + repeat, device), recipe, seed=repeat)
            twins.zero_grad()
    assert graphs() == 3


def test_state_loaded_after_compilation(device):
    """A checkpoint loaded into a compiled module counts from the next step on."""
    twins, recipe = Twins(stack(device), in_region), DelayedScaling(amax_history_len=3)
    train(twins, recipe, device, steps=2)
    saved = {key: value.clone() for key, value in twins.module.state_dict().items()}
    train(twins, recipe, device, steps=2)
    for module in (twins.module, twins.eager):
        module.load_state_dict(saved)
    train(twins, recipe, device, steps=3)


def test_saturation_and_special_values(device):
    """Infinite and NaN inputs leave the same state behind in both."""
    twins, recipe = Twins(build("Linear", device)), DelayedScaling(amax_history_len=2)
    for step, value in enumerate((float("inf"), 1.0, float("nan"), 0.0, 1.0)):
        x = data(step, device)
        x[3, 5] = value
        if value == 0:
            x.zero_()
        twins.step(x, recipe, seed=step)
        twins.zero_grad()
    assert graphs() == 1


def test_current_and_delayed_in_one_graph(device):
    """A region of each kind; only one of them has a state to renew."""

    def call(modules, x, delayed, current):
        with te.autocast(recipe=current):
            x = modules[0](x)
        with te.autocast(recipe=delayed):
            return modules[1](x)

    modules = [build("LayerNormMLP", device), build("LayerNormLinear", device)]
    twins = Twins(torch.nn.ModuleList(modules), call)
    delayed, current = DelayedScaling(amax_history_len=2), Float8CurrentScaling()
    for step in range(4):
        twins.step(data(step, device), delayed, current, seed=step)
        twins.zero_grad()
    unused = scaling_states(twins.module).get("0")
    assert unused is None or not unused.fwd_history.any()
    assert graphs() == 1


def test_tracing_leaves_other_modules_alone(device):
    """Compiling a module with a shorter history does not touch the history of another one."""
    others = [build(kind, device) for kind in GEMM_MODULES]
    for step in range(5):
        for module in others:
            with te.autocast(recipe=DelayedScaling(amax_history_len=4)):
                y = module(data(step, device))
            y.sum().backward()
    states = [state for module in others for state in scaling_states(module).values()]
    before = [getattr(state, field).clone() for state in states for field in STATE]
    for length in (1, 6):
        twins = Twins(torch.nn.ModuleList([build("LayerNormMLP", device)]), in_region)
        train(twins, DelayedScaling(amax_history_len=length), device, steps=1)
        after = [getattr(state, field) for state in states for field in STATE]
        assert all(same_bits(a, b) for a, b in zip(after, before))


def test_one_region_around_several_compiled_functions(device):
    """Layers compiled one by one share the caller's region."""
    layers = [Twins(build("LayerNormMLP", device, seed=i), plain) for i in range(2)]
    recipe = DelayedScaling(amax_history_len=2)
    for step in range(4):
        with te.autocast(recipe=recipe):
            forwards = [twins.forward(data(step, device)) for twins in (*layers, layers[0])]
        for forward in reversed(forwards):
            forward.backward(seed=step)
