# SPDX-License-Identifier: Apache-2.0
"""LayerNormMLP frees what forward kept once backward has used it, unless others look at it."""

import gc

import pytest
import torch
from compile_support import K, assert_same_bits, build, gradient, random, recipe_of
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.core import ops
from transformer_engine.pytorch.dynamo.module_function import ModuleFunction

ROWS = 64
RECIPES = ("none", "current", "delayed", "block", "mxfp8", "nvfp4_plain")


def forward(module, recipe, x, **kwargs):
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x, **kwargs)


def kept(y):
    """The tensors that a call keeps, by the bytes of their storages."""
    return [t.untyped_storage() for t in y.grad_fn.saved_tensors if t is not None]


@pytest.mark.parametrize("name", RECIPES)
def test_activations_are_freed(name, device):
    """During backward, although the node still refers to them; all three calls of a plan alike."""
    module, recipe = build("LayerNormMLP", device, activation="swiglu", recipe=name), recipe_of(
        name
    )
    inputs = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for seed in range(4):
        x = random(ROWS, K, device=device, seed=seed).requires_grad_()
        y = forward(module, recipe, x)
        storages = [s for s in kept(y) if s.data_ptr() not in inputs]
        before = sum(s.nbytes() for s in storages)
        ffn = module.fc2_weight.shape[1]
        activations = ROWS * 2 * ffn * 2  # the fc1 output, at least
        y.backward(gradient(y, seed=seed))
        assert before - sum(s.nbytes() for s in storages) >= activations


@pytest.mark.parametrize("name", RECIPES)
def test_retained_graph(name, device):
    """Nothing is freed under retain_graph=True: the same gradients again, then freed."""
    module, recipe = build("LayerNormMLP", device, recipe=name), recipe_of(name)
    x = random(ROWS, K, device=device).requires_grad_()
    inputs = (x, *module.parameters())
    for _ in range(3):
        y = forward(module, recipe, x)
        dy = gradient(y)
        first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        sizes = [s.nbytes() for s in kept(y)]
        second = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        assert sizes == [s.nbytes() for s in kept(y)]
        third = torch.autograd.grad(y, inputs, dy)
        if name == "delayed":
            continue  # whose scales each backward pass renews
        for a, b, c in zip(first, second, third):
            assert_same_bits(a, b, "second")
            assert_same_bits(a, c, "third")


def assert_unchanged(seen):
    """Each pair is a tensor and a copy of it that was made earlier."""
    for tensor, copy in seen:
        assert tensor.untyped_storage().nbytes() >= tensor.nbytes, "freed"
        assert_same_bits(tensor, copy, "seen")


def test_hooks_keep_what_they_saw(device):
    """Tensors that saved-tensor hooks have seen stay as they are."""
    module = build("LayerNormMLP", device)
    seen = []

    def pack(tensor):
        seen.append((tensor, tensor.clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module(random(ROWS, K, device=device).requires_grad_())
    y.backward(gradient(y))
    assert len(seen) > 5
    assert_unchanged(seen)


class Collecting(TorchDispatchMode):
    """Keeps what ops make."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves(results) if torch.is_tensor(t)]
        self.seen += [(t, t.clone()) for t in tensors if not func.is_view]
        return results


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_dispatch_modes_keep_what_they_saw(name, device):
    """Tensors that a dispatch mode has seen during forward stay as they are (delayed scaling has a
    state that changes in place)."""
    module, collecting = build("LayerNormMLP", device, recipe=name), Collecting()
    x = random(ROWS, K, device=device).requires_grad_()
    with collecting:
        y = forward(module, recipe_of(name), x)
    y.backward(gradient(y))
    shapes = [tensor.shape for tensor, _ in collecting.seen]
    assert (ROWS, module.fc2_weight.shape[1]) in shapes
    assert_unchanged(collecting.seen)


class Noting(te.Quantizer):
    """Rounds to eighths, and keeps what it was given and what it made."""

    def __init__(self, seen):
        super().__init__(rowwise=True, columnwise=True)
        self.seen = seen

    def quantize_impl(self, tensor):
        result = torch.round(tensor * 8) / 8
        self.seen += [(tensor, tensor.clone()), (result, result.clone())]
        return result

    def update_quantized(self, src, dst, *, noop_flag=None):
        raise AssertionError("nothing is quantized in place")

    def make_empty(self, shape, **options):
        raise AssertionError("nothing is allocated")


@pytest.mark.parametrize("override", (None, "high_precision", "dequantized"))
@pytest.mark.parametrize("rows", (1, ROWS))
def test_quantizers_of_users_keep_what_they_saw(rows, override, device):
    """Their arguments and results stay as they are."""
    seen = []
    recipe = CustomRecipe(lambda role: Noting(seen), backward_override=override)
    y = forward(
        build("LayerNormMLP", device), recipe, random(rows, K, device=device).requires_grad_()
    )
    y.backward(gradient(y))
    assert len(seen) >= 8  # inputs and weights
    assert_unchanged(seen)


def test_put_off_weight_gradients(device):
    """Operands that ``backward_dw`` needs are not freed before it."""
    module = build("LayerNormMLP", device, delay_wgrad_compute=True)
    twin = build("LayerNormMLP", device)
    twin.load_state_dict(module.state_dict())
    x = random(ROWS, K, device=device)
    for call in (module, twin):
        y = call(x)
        y.backward(gradient(y))
    module.backward_dw()
    for a, b in zip(module.parameters(), twin.parameters()):
        assert_same_bits(a.grad, b.grad, "gradient")


def test_backward_that_failed(device, monkeypatch):
    """Says what to do instead of reading freed memory."""
    module = build("LayerNormMLP", device)
    y = module(random(ROWS, K, device=device).requires_grad_())
    dy = gradient(y)

    def fail(*args):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ops.EAGER, "norm_backward", fail)
        with pytest.raises(MemoryError, match="no memory"):
            y.backward(dy)
    with pytest.raises(RuntimeError, match="Run the forward pass again"):
        y.backward(dy)


def test_other_modules_can_try_again(device, monkeypatch):
    """They free nothing early."""
    module = build("LayerNormLinear", device)
    x = random(ROWS, K, device=device).requires_grad_()
    y = module(x)
    dy = gradient(y)

    def fail(*args):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(ops.EAGER, "norm_backward", fail)
        with pytest.raises(MemoryError):
            y.backward(dy)
    y.backward(dy)
    assert x.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA counts its memory")
@pytest.mark.parametrize("name", ("none", "current", "delayed", "block"))
def test_peak(name):
    """At most what the gradient of the activation needs, and 5% for small things."""
    rows, hidden, ffn = 2048, 512, 2048
    module = te.LayerNormMLP(
        hidden, ffn, bias=False, activation="swiglu", params_dtype=torch.bfloat16, device="cuda"
    )
    recipe = recipe_of(name)
    dy = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    peaks = []
    for _ in range(5):
        x = torch.randn_like(dy).requires_grad_()
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = forward(module, recipe, x)
        torch.cuda.reset_peak_memory_stats()
        y.backward(dy)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        module.zero_grad()
    quantized = name != "none"
    wide = rows * ffn  # values of one activation
    at_activation = 2 * wide * 2 + wide * 2  # h and da in bf16
    at_activation += 2 * 2 * wide if quantized else 2 * wide * 2  # dh: both orientations, or bf16
    at_activation += 2 * rows * hidden * 2 + hidden * ffn * 2  # y, the norm's output; dfc2
    at_activation += (hidden * ffn * 3) * (2 if quantized else 0)  # quantized weights
    assert peaks[-1] <= 1.05 * at_activation + 2**16


def test_the_node_is_ours(device):
    """What the tests above look into is the node of a module call."""
    y = build("LayerNormMLP", device)(random(ROWS, K, device=device).requires_grad_())
    assert type(y.grad_fn).__name__ == ModuleFunction.__name__ + "Backward"
