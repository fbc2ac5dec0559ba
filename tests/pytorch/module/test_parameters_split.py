# SPDX-License-Identifier: Apache-2.0
"""``parameters_split``: one linear layer whose weight and bias are several parameters."""

import pytest
import torch
from eager_support import BF16, K, build, random, run

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

KINDS = ("Linear", "LayerNormLinear")
SPLITS = [
    (None, {"": 96}),
    (("q", "k", "v"), {"q_": 32, "k_": 32, "v_": 32}),
    (["q", "k"], {"q_": 48, "k_": 48}),
    ({"query": 64, "kv": 32}, {"query_": 64, "kv_": 32}),
    (("query_", "key_value__"), {"query_": 48, "key_value_": 48}),
    (("only",), {"only_": 96}),
]


def make(kind, split, out=96, **options):
    """A linear layer of width 96 with split parameters."""
    options = {"device": "cpu", **options}
    return getattr(te, kind)(K, out, parameters_split=split, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split,expected", SPLITS)
def test_names_and_shapes(kind, split, expected):
    """``<name without trailing underscores>_weight``; all weights come before all biases."""
    module = make(kind, split)
    weights, biases = ([f"{prefix}{what}" for prefix in expected] for what in ("weight", "bias"))
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    norm = ["layer_norm_weight", "layer_norm_bias"] if kind == "LayerNormLinear" else []
    assert list(shapes) == norm + weights + biases
    assert [shapes[name] for name in weights] == [(size, K) for size in expected.values()]
    assert [shapes[name] for name in biases] == [(size,) for size in expected.values()]
    assert module.weight_names == weights and module.bias_names == biases
    assert module.parameter_split_sizes == list(expected.values())
    assert list(module.state_dict()) == [*shapes, "_extra_state"]
    for name in weights:
        assert getattr(module, name).partition_dim == 0
        assert module.param_init_meta[name].fp8_meta_index == 1


@pytest.mark.parametrize(
    "split,error,match",
    [
        ((), ValueError, "empty"),
        ([], ValueError, "empty"),
        ({}, ValueError, "empty"),
        ("qkv", TypeError, "str"),
        (3, TypeError, "int"),
        ({"q", "k"}, TypeError, "set"),
        (("q", 1), TypeError, "1"),
        ({1: 96}, TypeError, "1"),
        ({"q": 64, "k": 31}, ValueError, "95.*96"),
        (("a", "b", "c", "d", "e"), ValueError, "95.*96"),
    ],
)
def test_errors(split, error, match):
    """Types of the reference, and messages that name what is wrong."""
    for kind in KINDS:
        with pytest.raises(error, match=match):
            make(kind, split)


def test_column_parallel_pieces():
    """Sizes are global; each rank has its share, if the size is divisible."""
    options = {"parallel_mode": "column", "tp_size": 4}
    module = make("Linear", {"q": 64, "kv": 32}, **options)
    assert module.parameter_split_sizes == [16, 8] and module.out_features == 24
    assert module.q_weight.shape == (16, K) and module.kv_bias.shape == (8,)
    assert module.kv_bias.partition_dim == 0
    with pytest.raises(RuntimeError, match="'q'.*66.*tp_size=4"):
        make("Linear", {"q": 66, "kv": 30}, **options)
    # Only the column mode divides them.
    row = make("Linear", {"q": 66, "kv": 30}, parallel_mode="row", tp_size=4)
    assert row.q_weight.shape == (66, K // 4) and row.kv_bias.shape == (30,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ("cpu", "meta"))
def test_pieces_are_views_of_one_buffer(kind, where):
    """So that forward can use them together without a copy."""
    module = make(kind, ("q", "k", "v"), device=where)
    module.reset_parameters()
    for names in (module.weight_names, module.bias_names):
        pieces = [getattr(module, name) for name in names]
        storages = {piece.untyped_storage().data_ptr() for piece in pieces}
        assert len(storages) == 1
        starts = [piece.storage_offset() for piece in pieces]
        assert starts == [i * pieces[0].numel() for i in range(3)]
        assert pieces[0].untyped_storage().nbytes() == 3 * pieces[0].numel() * 4
        assert all(isinstance(p, torch.nn.Parameter) and p.is_leaf for p in pieces)
    assert abs(module.k_weight.std().item() / 0.023 - 1) < 0.1 and (module.v_bias == 0).all()


def joined(module, split):
    """Copy the values of ``split`` into ``module``, which is not split."""
    with torch.no_grad():
        for name in ("weight", "bias"):
            pieces = [getattr(split, n) for n in getattr(split, f"{name}_names")]
            if module.use_bias or name == "weight":
                getattr(module, name).copy_(torch.cat([piece.detach() for piece in pieces]))
        if hasattr(module, "layer_norm_weight"):
            module.layer_norm_weight.copy_(split.layer_norm_weight)
            module.layer_norm_bias.copy_(split.layer_norm_bias)
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "recipe", (None, Float8CurrentScaling(), DelayedScaling()), ids=("none", "current", "delayed")
)
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("apart", (False, True))
def test_results_are_those_of_one_weight(kind, recipe, bias, apart, device):
    """Outputs and gradients equal bit by bit, also when the pieces no longer share a buffer."""
    split = {"q": 64, "kv": 32}
    module = build(kind, device, dtype=BF16, out=96, bias=bias, parameters_split=split)
    if apart:
        for param in module.parameters():
            param.data = param.data.clone()
    whole = joined(build(kind, device, dtype=BF16, out=96, bias=bias), module)
    for seed in range(2):
        x = random(24, K, dtype=BF16, device=device, seed=seed)
        step, expected = run(module, x, recipe), run(whole, x, recipe)
        assert torch.equal(step.outputs[0], expected.outputs[0])
        assert torch.equal(step.grads["x"], expected.grads["x"])
        for what in ("weight", "bias") if bias else ("weight",):
            q, kv = expected.grads[what].split([64, 32])
            assert torch.equal(step.grads[f"q_{what}"], q)
            assert torch.equal(step.grads[f"kv_{what}"], kv)


def test_updates_and_frozen_pieces(device):
    """An optimizer sees the pieces; a frozen piece gets no gradient and does not move."""
    module = build("Linear", device, out=96, parameters_split=("q", "k"))
    module.k_weight.requires_grad_(False)
    before = [module.q_weight.detach().clone(), module.k_weight.detach().clone()]
    x = random(8, K, device=device)
    y = module(x)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    y.square().sum().backward()
    assert module.k_weight.grad is None and module.q_weight.grad.shape == (48, K)
    optimizer.step()
    assert not torch.equal(module.q_weight, before[0])
    assert torch.equal(module.k_weight, before[1])
    weight = torch.cat([module.q_weight, module.k_weight])
    bias = torch.cat([module.q_bias, module.k_bias])
    torch.testing.assert_close(module(x), torch.nn.functional.linear(x, weight, bias))


def test_returned_bias_of_pieces(device):
    """``return_bias`` returns the pieces as one tensor, and gradients reach them."""
    module = build("Linear", device, out=96, parameters_split=("q", "k"), return_bias=True)
    y, bias = module(random(4, K, device=device))
    assert torch.equal(bias, torch.cat([module.q_bias, module.k_bias]))
    ((y + bias) * torch.arange(96.0, device=device)).sum().backward()
    assert torch.equal(module.q_bias.grad, 4 * torch.arange(48.0, device=device))
    assert torch.equal(module.k_bias.grad, 4 * torch.arange(48.0, 96.0, device=device))


def test_missing_bias_of_pieces():
    """``bias=False, return_bias=True`` behaves as without pieces."""
    linear = make("Linear", ("q", "k"), bias=False, return_bias=True)
    assert linear(torch.ones(2, K))[1] is None
    with_norm = make("LayerNormLinear", ("q", "k"), bias=False, return_bias=True)
    assert with_norm(torch.ones(2, K))[1].numel() == 0
