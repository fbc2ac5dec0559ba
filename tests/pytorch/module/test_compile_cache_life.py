# SPDX-License-Identifier: Apache-2.0
"""What happens to cached weights of compiled modules besides training: against eager twins.

Minibatches that overlap, evaluation in between, modules that are moved, cast, loaded or copied.
"""

import copy

import pytest
import torch
from compile_support import (
    K,
    Twins,
    assert_same_bits,
    assert_same_modules,
    build,
    graphs,
    random,
    recipe_of,
)
from test_compile_cache import (
    MICROBATCHES,
    PAIRS,
    assert_same_cache,
    cache_of,
    call,
    make,
    weights_of,
)

# Where one of each kind is enough: per-tensor and block scales, with and without a norm.
SOME = (("Linear", "current"), ("LayerNormLinear", "delayed"), ("LayerNormMLP", "mxfp8_2d"))


def change_weights(modules, factor=-1.5):
    """Make cached weights stale; nothing that a waiting backward pass has saved is touched."""
    with torch.no_grad():
        for module in modules:
            for name in module.weight_names:
                getattr(module, name).mul_(factor)


@pytest.mark.parametrize("kind,recipe", (*PAIRS, ("LayerNormMLP", "mxfp8_dq")))
def test_overlapping_minibatches(kind, recipe, device):
    """The next minibatch replaces the cache while backward passes of the last one wait for theirs.

    Its weights have other values by then, so old bytes and new ones can not be mixed up.
    """
    twins, kept = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    waiting = []
    for minibatch in range(4):
        for i, first in enumerate(MICROBATCHES):
            seed = 10 * minibatch + i
            x = random(16, K, device=device, seed=seed)
            before = cache_of(twins.module)
            waiting.append((twins.forward(x, kept, first), seed))
            for name, entry in cache_of(twins.module).items():
                assert (entry is before.get(name)) == (not first)
            assert_same_cache(twins)
            if len(waiting) > 2:  # always two behind
                forward, seed = waiting.pop(0)
                forward.backward(seed=seed)
        change_weights((twins.module, twins.eager))
    for forward, seed in waiting:
        forward.backward(seed=seed)
    assert graphs() <= 3


@pytest.mark.parametrize("kind,recipe", SOME)
def test_evaluation_between_microbatches(kind, recipe, device):
    """It uses what is cached, or neither reads nor writes it; training goes on with the same."""
    twins, kept = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    counts = []
    for minibatch in range(3):
        for i, first in enumerate(MICROBATCHES):
            twins.step(random(16, K, device=device, seed=10 * minibatch + i), kept, first)
            trained = cache_of(twins.module)
            for module in (twins.module, twins.eager):
                module.eval()
            for evaluated in (False, None):
                x = random(8, K, device=device, seed=20 * minibatch + i)
                with torch.no_grad():
                    results = twins.compiled(x, kept, evaluated), call(
                        twins.eager, x, kept, evaluated
                    )
                assert_same_bits(*results, "output")
                assert cache_of(twins.module) == trained
                assert_same_cache(twins)
            for module in (twins.module, twins.eager):
                module.train()
        change_weights((twins.module, twins.eager))
        twins.zero_grad()
        counts.append(graphs())
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("kind,recipe", SOME)
def test_cache_of_evaluation_with_gradients(kind, recipe, device):
    """``module.eval()`` alone is training for the cache: it is complete, and taken as it is."""
    twins, kept = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    for module in (twins.module, twins.eager):
        module.eval()
    x = random(16, K, device=device)
    twins.step(x, kept, True)
    made = cache_of(twins.module)
    change_weights((twins.module, twins.eager))
    for module in (twins.module, twins.eager):
        module.train()
    for seed in range(2):
        twins.step(x, kept, False, seed=seed)
        assert cache_of(twins.module) == made
        assert_same_cache(twins)


def cast(module):
    """Another dtype."""
    return module.to(torch.float32)


def cast_and_back(module):
    """The values of the cache, in other memory."""
    return module.float().bfloat16()


def stay(module):
    """Nothing changes, but PyTorch does not say so."""
    return module.to(next(module.parameters()).device)


def through_meta(module):
    """All values are new ones, in place of none."""
    values = copy.deepcopy(module.state_dict())
    device = next(module.parameters()).device
    module.to_empty(device="meta").to_empty(device=device)
    module.load_state_dict(values)
    return module


@pytest.mark.parametrize(
    "kind,recipe,move",
    [
        ("Linear", "current", cast),
        ("LayerNormMLP", "mxfp8", cast_and_back),
        ("LayerNormLinear", "block", stay),
        ("Linear", "current", through_meta),
    ],
)
def test_moved_module(kind, recipe, move, device):
    """Cached bytes describe what was there before: a compiled False quantizes the moved weight."""
    twins, kept = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    twins.step(random(16, K, device=device), kept, True)
    change_weights((twins.module, twins.eager))
    twins.zero_grad()
    for module in (twins.module, twins.eager):
        assert move(module) is module
        assert not cache_of(module)
    dtype = next(twins.module.parameters()).dtype
    for seed in range(3):
        x = random(16, K, device=device, seed=seed, dtype=dtype)
        twins.step(x, kept, False, seed=seed)
        assert_same_cache(twins)
        assert not seed or cache_of(twins.module) == made
        made = cache_of(twins.module)
    fresh = copy.deepcopy(twins.eager)
    fresh._fp8_workspaces.clear()
    with torch.no_grad():  # the same as without a cache: nothing of the old one is left
        y = call(fresh, x, kept, None)
        assert_same_bits(twins.compiled(x, kept, False), y, "output")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is only one device")
@pytest.mark.parametrize("recipe", ("current", "delayed"))
def test_module_moved_to_another_device(recipe):
    """From the CPU to CUDA and back, with compiled calls in each place."""
    twins, kept = Twins(make("LayerNormMLP", "cpu"), call), recipe_of(recipe)
    for place in ("cpu", "cuda", "cpu"):
        for module in (twins.module, twins.eager):
            module.to(place)
        twins.zero_grad()
        for first in (False, True, False):
            twins.step(random(16, K, device=place), kept, first)
            assert_same_cache(twins)
        change_weights((twins.module, twins.eager))


@pytest.mark.feature("state_dict", modes=("compiled",), others="loaded before the export")
@pytest.mark.parametrize("kind,recipe", SOME)
def test_loaded_weights(kind, recipe, device):
    """A checkpoint is read in place, like an optimizer's step: seen from the next True on."""
    twins, kept = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    x, other = random(16, K, device=device), build(kind, device, seed=5, recipe=recipe)
    if kind == "LayerNormMLP":
        other = build(kind, device, seed=5, recipe=recipe, activation="swiglu")
    twins.step(x, kept, True)
    made = cache_of(twins.module)
    for module in (twins.module, twins.eager):
        module.load_state_dict(other.state_dict())
    twins.step(x, kept, False)
    assert cache_of(twins.module) == made
    twins.step(x, kept, True)
    assert not set(map(id, made.values())) & set(map(id, cache_of(twins.module).values()))
    assert_same_cache(twins)


@pytest.mark.parametrize("kind,recipe", PAIRS)
def test_copied_module(kind, recipe, device):
    """A deep copy has a cache of its own, with the same bytes, also when compiled."""
    first, kept = Twins(make(kind, device, recipe), call), recipe_of(recipe)
    x = random(16, K, device=device)
    first.step(x, kept, True)
    first.zero_grad()
    made, bytes_then = cache_of(first.module), {}
    for name, entry in made.items():
        bytes_then[name] = entry.operand_buffers().row.clone()
    copies = Twins(first.module, call)  # this one copies a module that has a cache
    assert set(cache_of(copies.eager)) == set(weights_of(kind))
    for name, entry in cache_of(copies.eager).items():
        assert entry is not made[name]
        ours, theirs = entry.operand_buffers(), made[name].operand_buffers()
        assert ours.row.data_ptr() != theirs.row.data_ptr()
    change_weights((copies.module, copies.eager))
    copies.step(x, kept, False)  # stale, both
    assert cache_of(copies.module) == made
    assert_same_cache(copies)
    with torch.no_grad():
        call(copies.eager, x, kept, True)  # new weights for the copy, the original's stay
    for name, entry in cache_of(copies.module).items():
        assert entry is made[name]
        assert_same_bits(entry.operand_buffers().row, bytes_then[name], "bytes of the original")
    with torch.no_grad():
        copies.compiled(x, kept, True)
    assert_same_cache(copies)


def test_two_compiled_callers(device):
    """One module in two compiled functions: one cache, and the graphs of each."""
    twins, kept = Twins(make("LayerNormMLP", device), call), recipe_of("delayed")
    other = torch.compile(
        lambda x, first: call(twins.module, x, kept, first) * 2,
        fullgraph=True,
        backend="aot_eager",
    )
    for minibatch in range(3):
        twins.step(random(16, K, device=device, seed=minibatch), kept, True)
        made = cache_of(twins.module)
        leaves = [random(16, K, device=device, seed=9).requires_grad_() for _ in range(2)]
        y, z = other(leaves[0], False), call(twins.eager, leaves[1], kept, False) * 2
        assert_same_bits(y, z, "output")
        y.sum().backward()
        z.sum().backward()
        assert_same_bits(leaves[0].grad, leaves[1].grad, "input gradient")
        assert cache_of(twins.module) == made
        assert_same_modules(twins.module, twins.eager)
        change_weights((twins.module, twins.eager))
    assert graphs() <= 6
