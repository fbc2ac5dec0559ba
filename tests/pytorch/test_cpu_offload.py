# SPDX-License-Identifier: Apache-2.0
"""Activation offload: bits as without it, what moves and what stays, when, and errors."""

import copy
import gc
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from feature_report import trained_feature
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent / "module"))

from recipe_list import ALL_RECIPES, recipe_of  # pylint: disable=wrong-import-position

import transformer_engine.pytorch as te  # pylint: disable=wrong-import-position
from transformer_engine.pytorch import cpu_offload  # pylint: disable=wrong-import-position
from transformer_engine.pytorch.offload import rules  # pylint: disable=wrong-import-position
from transformer_engine.pytorch.offload.layer import (  # pylint: disable=wrong-import-position
    OFFLOAD_FINISHED,
    OFFLOAD_STARTED,
    RELOAD_STARTED,
)

WIDE, ROWS = 64, 32
BF16 = torch.bfloat16
# Their weights can be made by quantized_model_init at this width.
PRIMARY = ("current", "delayed", "mxfp8", "nvfp4")


@pytest.fixture(autouse=True)
def small_tensors_count(monkeypatch):
    """Offload what is larger than 1 KiB."""
    monkeypatch.setattr(rules, "MINIMUM_BYTES", 1024)


def model_of(device, primary=None, count=4):
    """Layers of one width."""
    recipe = None if primary is None else recipe_of(primary)
    torch.manual_seed(0)
    options = {"params_dtype": BF16, "device": device}
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        layers = [
            (
                te.LayerNormMLP(WIDE, 2 * WIDE, activation="swiglu", **options)
                if i % 2
                else te.LayerNormLinear(WIDE, WIDE, **options)
            )
            for i in range(count)
        ]
    return torch.nn.ModuleList(layers)


def given(device, seed=1, grad=True):
    """An input."""
    x = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(seed))
    return x.to(BF16).to(device).requires_grad_(grad)


def forward(layers, x, recipe, context=None, sync=None, after=None, **arguments):
    """The output of all layers, offloaded if there is a context."""
    torch.manual_seed(2)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        for i, layer in enumerate(layers):
            if context is None:
                x = layer(x, **arguments)
                continue
            with context:
                x = layer(x, **arguments)
            x = sync(x)
            if after is not None:
                after(i)
    return x


def gradients(layers, x, y, **options):
    """Backward; all gradients."""
    torch.manual_seed(3)
    torch.autograd.backward(y.float().square().mean(), **options)
    found = [x.grad, *(param.grad for param in layers.parameters())]
    x.grad = None
    layers.zero_grad()
    return found


def assert_same(tested, wanted):
    """Equal bit by bit."""
    for a, b in zip(tested, wanted, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def offloaded(context):
    """``(shape, dtype)`` of the copies on the CPU, per layer of the last forward pass."""
    return [
        [(tuple(e.copy.shape), e.copy.dtype) for e in layer._entries() if e.copy is not None]
        for layer in context.synchronizer.current.layers
    ]


def states(context):
    """Where the layers of the last forward pass are."""
    return [layer.state for layer in context.synchronizer.current.layers]


def enabled(num_layers=2, model_layers=4, **options):
    """A context and its function."""
    return te.get_cpu_offload_context(
        enabled=True, num_layers=num_layers, model_layers=model_layers, **options
    )


# --- numbers --------------------------------------------------------------------------------------


@trained_feature(
    "activation offload", modes=("eager",), modules=("LayerNormLinear", "LayerNormMLP")
)
@pytest.mark.parametrize("recipe", ("none", *ALL_RECIPES))
def test_bits_are_those_without(recipe, device):
    """Outputs, gradients and, over several steps, the state of delayed scaling."""
    plain = model_of(device)
    layers, recipe = copy.deepcopy(plain), recipe_of(recipe)
    context, sync = enabled()
    for seed in range(2):
        x, y = given(device, seed), given(device, seed)
        wanted = forward(plain, x, recipe)
        tested = forward(layers, y, recipe, context, sync)
        assert states(context)[:2] == [OFFLOAD_FINISHED] * 2
        assert all(offloaded(context)[:2]) and not any(offloaded(context)[2:])
        assert_same([tested], [wanted])
        assert_same(gradients(layers, y, tested), gradients(plain, x, wanted))


@pytest.mark.parametrize("recipe", PRIMARY)
def test_quantized_weights_stay(recipe, device):
    """Neither parameters, nor their bytes, nor cached bytes, nor fresh ones are moved."""
    for primary, first in ((recipe, None), (None, True), (None, False), (None, None)):
        layers = model_of(device, primary)
        context, sync = enabled()
        x = torch.cat([given(device), given(device, 2), given(device, 3)]).detach()
        x.requires_grad_()
        y = forward(layers, x, recipe_of(recipe), context, sync, is_first_microbatch=first)
        copies = sum(offloaded(context), [])
        assert copies
        for shape, _ in copies:  # of 96 rows, two NVFP4 codes in a byte where they are contracted
            scales = shape[0] * shape[1] < WIDE * WIDE // 2
            assert scales or 96 in shape or shape[-1] == 48, shape
        y.sum().backward()


def test_quantized_activations_move_as_bytes(device):
    """What a layer saves in FP8 is copied in FP8."""
    for recipe, shape in (("current", (WIDE, ROWS)), ("nvfp4", (WIDE, ROWS // 2))):
        layers = model_of(device, count=2)
        context, sync = enabled(1, 2)
        y = forward(layers, given(device), recipe_of(recipe), context, sync)
        copies = offloaded(context)[0]
        y.sum().backward()
        assert ((ROWS, WIDE), BF16) in copies  # the input of the norm
        assert (shape, torch.uint8) in copies
        assert len(copies) == len(set(copies)) == 2


def test_a_quantized_tensor_saved_by_torch(device):
    """A tensor of ours among those that an operation of torch saves: its bytes are moved."""
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    weight = torch.nn.Parameter(given(device)[:WIDE].detach().clone())
    q = quantizer(given(device).detach())
    context, sync = enabled(1, 2)
    with context:
        y = torch.nn.functional.linear(q, weight)
    sync(y)
    copies = offloaded(context)[0]
    dtypes = {dtype for _, dtype in copies}
    (wanted,) = torch.autograd.grad(
        torch.nn.functional.linear(q.dequantize(), weight).sum(), weight
    )
    y.sum().backward()
    assert torch.equal(weight.grad, wanted)
    assert BF16 not in dtypes or ((ROWS, WIDE), BF16) in copies


# --- memory ---------------------------------------------------------------------------------------


class Kept(torch.autograd.Function):
    """Saves a fresh tensor, which `seen` watches."""

    seen: list = []

    @staticmethod
    def forward(ctx, x):
        fresh = x * 3.0
        Kept.seen.append(StorageWeakRef(fresh.untyped_storage()))
        ctx.save_for_backward(fresh)
        return x * 2.0

    @staticmethod
    def backward(ctx, grad):
        (fresh,) = ctx.saved_tensors
        return grad * fresh


def run_kept(context, sync, x, count=4):
    """Some layers that save a tensor each."""
    Kept.seen = []
    for _ in range(count):
        with context:
            x = Kept.apply(x)
        x = sync(x)
    return x


def test_memory_is_let_go(device):
    """What was offloaded is gone after the forward pass, and what was not is there."""
    x = given(device)
    y = run_kept(*enabled(2, 4), x)
    if device == "cuda":
        torch.cuda.synchronize()
    gc.collect()
    assert [reference.expired() for reference in Kept.seen] == [True, True, False, False]
    y.sum().backward()
    wanted = given(device).detach()
    factor = torch.ones_like(wanted)
    for i in reversed(range(4)):
        factor = factor * (wanted * 2.0**i * 3.0)
    assert torch.equal(x.grad, factor)


def test_nothing_is_left_after_backward(device):
    """Copies live as long as the graph, unless page-locked memory is retained for the next one."""
    for retain in (False, True):
        context, sync = enabled(2, 4, retain_pinned_cpu_buffers=retain)
        addresses = []
        for _ in range(2):
            y = run_kept(context, sync, given(device))
            layers = context.synchronizer.current.layers
            copies = [e.copy for e in layers[0]._entries()]
            assert len(copies) == 1 and copies[0].device.type == "cpu"
            assert copies[0].is_pinned() == (device == "cuda")
            addresses.append(copies[0].data_ptr())
            held = weakref.ref(copies.pop())
            assert layers[0].get_offloaded_total_size_mb() == ROWS * WIDE * 2 / 2**20
            y.sum().backward()
            del y
            gc.collect()
            assert (held() is not None) == retain
            assert not any(layer._entries() for layer in layers)
        assert not retain or addresses[0] == addresses[1]


def test_a_tensor_saved_twice_is_copied_once(device):
    def run(x):
        fresh = x * 3.0
        return fresh * fresh + fresh * torch.sin(fresh)

    x, z = given(device), given(device)
    context, sync = enabled(1, 2)
    with context:
        y = run(x)
    sync(y)
    assert offloaded(context)[0].count(((ROWS, WIDE), BF16)) == 2  # fresh, and its sine
    y.sum().backward()
    run(z).sum().backward()
    assert torch.equal(x.grad, z.grad)


def test_odd_tensors_stay(device):
    """Expanded, small, and frozen leaf tensors need no copy, or no exact one; views are right."""
    x = given(device)
    column = torch.randn(ROWS, 1, device=device).to(BF16)
    context, sync = enabled(1, 2)
    with context:
        y = (x.t() * x.t()).t() * column.expand(ROWS, WIDE) * x[:, :1]
    sync(y)
    sizes = [shape for shape, _ in offloaded(context)[0]]
    assert (ROWS, 1) not in sizes
    y.sum().backward()
    z = given(device)
    ((z.t() * z.t()).t() * column.expand(ROWS, WIDE) * z[:, :1]).sum().backward()
    assert torch.equal(x.grad, z.grad)


# --- order ----------------------------------------------------------------------------------------


def test_several_forward_passes_wait(device):
    """Microbatches of a pipeline: forward, forward, backward, backward, in both orders."""
    plain = model_of(device)
    for order in ((0, 1), (1, 0)):
        layers = copy.deepcopy(plain)
        context, sync = enabled(3, 4)
        inputs = [given(device, seed) for seed in range(2)]
        outputs = [forward(layers, x, None, context, sync) for x in inputs]
        for i in order:
            x = given(device, i)
            wanted = gradients(plain, x, forward(plain, x, None))
            assert_same(gradients(layers, inputs[i], outputs[i]), wanted)


def test_backward_twice(device):
    """A retained graph is reloaded again."""
    layers = model_of(device)
    context, sync = enabled(3, 4)
    x = given(device)
    y = forward(layers, x, recipe_of("mxfp8"), context, sync)
    first = gradients(layers, x, y, retain_graph=True)
    assert_same(gradients(layers, x, y), first)


def test_layers_come_back_in_time(device):
    """Backward of a layer finds the next one on its way, not more of them than are due."""
    layers = model_of(device, count=6)
    context, sync = enabled(3, 6)
    seen = []
    y = given(device)
    for i, layer in enumerate(layers):
        with context:
            y = layer(y)
        y = sync(y)
        y.register_hook(lambda grad, i=i: seen.append((i, states(context)[:3])))
    y.sum().backward()
    gone, back = OFFLOAD_FINISHED, RELOAD_STARTED
    # Layer i is due with layer 2 i + 1: hooks run right before it is asked for.
    assert [at for at, _ in seen] == [5, 4, 3, 2, 1, 0]
    assert seen[0][1] == [gone] * 3 and seen[1][1] == [gone, gone, back]
    assert seen[3][1][1] == back and seen[5][1][0] == back


def test_no_more_layers_than_announced(device):
    """A forward pass that ends early or goes on is no problem for the next one."""
    plain = model_of(device, count=6)
    layers = copy.deepcopy(plain)
    context, sync = enabled(2, 4)
    for count in (6, 3, 1, 4):
        x, y = given(device), given(device)
        wanted = gradients(plain, x, forward(plain[:count], x, None))
        assert_same(gradients(layers, y, forward(layers[:count], y, None, context, sync)), wanted)


def test_manual(device):
    """The user's schedule, as in the documentation of the reference package."""
    plain = model_of(device)
    layers = copy.deepcopy(plain)
    stream = torch.cuda.Stream() if device == "cuda" else None
    context, sync, controller = te.get_cpu_offload_context(
        enabled=True, model_layers=4, manual_synchronization=True, offload_stream=stream
    )
    assert isinstance(controller, cpu_offload.ManualOffloadSynchronizer)
    recipe = recipe_of("current")
    for _ in range(2):
        x, y = given(device), given(device)
        out = forward(layers, y, recipe, context, sync, controller.start_offload_layer)
        assert states(context) == [OFFLOAD_STARTED] * 4
        for i in range(4):
            controller.release_activation_forward_gpu_memory(i)
        assert states(context) == [OFFLOAD_FINISHED] * 4
        for i in reversed(range(3)):
            controller.start_reload_layer(i)  # the last one is left to backward
        assert states(context) == [RELOAD_STARTED] * 3 + [OFFLOAD_FINISHED]
        wanted = gradients(plain, x, forward(plain, x, recipe))
        assert_same(gradients(layers, y, out), wanted)


def test_manual_errors(device):
    """Steps out of order, and layers that did not run."""
    layers = model_of(device)
    context, sync, controller = te.get_cpu_offload_context(
        enabled=True, model_layers=4, manual_synchronization=True
    )
    with pytest.raises(ValueError, match="0 layers have run"):
        controller.start_offload_layer(0)
    forward(layers[:2], given(device), None, context, sync)
    with pytest.raises(ValueError, match="Layer 2 was asked for, but 2 layers"):
        controller.start_offload_layer(2)
    with pytest.raises(RuntimeError, match="must be 'offload_finished'"):
        controller.start_reload_layer(0)
    with pytest.raises(RuntimeError, match="must be 'offload_started'"):
        controller.release_activation_forward_gpu_memory(0)
    controller.start_offload_layer(0)
    with pytest.raises(RuntimeError, match="of layer 0 was called while it is 'offload_started'"):
        controller.start_offload_layer(0)


# --- marks ----------------------------------------------------------------------------------------


def test_marks(device):
    """A tensor can be kept, or moved however small it is."""
    x = given(device)
    for mark, wanted in ((te.mark_not_offload, 0), (cpu_offload.mark_activation_offload, 2)):
        context, sync = enabled(1, 2)
        with context:
            large, small = x * 3.0, x[:1, :8] * 3.0
            mark(large, small, None)
            y = torch.sin(large).sum() + torch.sin(small).sum()
        sync(y)
        assert len(offloaded(context)[0]) == wanted
    quantized = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(x.detach())
    te.mark_not_offload(quantized)
    assert not rules.is_offloaded(quantized._rowwise_data, set())


@pytest.mark.parametrize("base", (False, True))
def test_start_offload(base, device):
    """Copies begin before the layer ends; views of one tensor share its copy if asked for."""
    x = given(device)
    context, sync = enabled(1, 2)
    with context:
        fresh = x * 3.0
        a, b = fresh[:, :32], fresh[:, 32:]
        cpu_offload.start_offload(a, b, offload_base_tensor=base)
        early = offloaded(context)[0]
        y = a * b
    sync(y)
    expected = [((ROWS, WIDE), BF16)] if base else [((ROWS, WIDE // 2), BF16)] * 2
    assert early == expected and offloaded(context)[0] == expected
    y.sum().backward()
    z = given(device)
    ((z * 3.0)[:, :32] * (z * 3.0)[:, 32:]).sum().backward()
    assert torch.equal(x.grad, z.grad)
    cpu_offload.start_offload(x)  # outside of a context nothing happens


def test_start_offload_of_what_is_not_saved(device):
    """It is forgotten when the layer ends, or the layer is not offloaded at all."""
    x = given(device)
    context, sync = enabled(1, 2)
    for number in range(2):
        with context:
            fresh = x * 3.0
            cpu_offload.start_offload(fresh)
            assert len(offloaded(context)[number]) == (1 if number == 0 else 0)
            y = fresh + 1.0
        sync(y)
    assert offloaded(context) == [[], []]


# --- with other things ----------------------------------------------------------------------------


def offloaded_steps(plain, layers, recipe, device):
    """Steps of both, with the same results; yields what was moved of each of ``layers``."""
    context, sync = enabled()
    for seed in range(2):
        x, y = given(device, seed), given(device, seed)
        wanted = forward(plain, x, recipe)
        tested = forward(layers, y, recipe, context, sync)
        copies = offloaded(context)
        assert all(copies[:2]) and not any(copies[2:])
        yield copies
        assert_same([tested], [wanted])
        assert_same(gradients(layers, y, tested), gradients(plain, x, wanted))


@trained_feature(
    "activation offload", modes=("compiled",), modules=("LayerNormLinear", "LayerNormMLP")
)
@pytest.mark.parametrize("recipe,primary", (("none", False), ("delayed", False), ("nvfp4", True)))
def test_compiled_layers(recipe, primary, device):
    """The context around compiled layers moves what they save; weights stay."""
    torch._dynamo.reset()
    plain = model_of(device, recipe if primary else None)
    layers, recipe = copy.deepcopy(plain), recipe_of(recipe)
    for layer in layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for copies in offloaded_steps(plain, layers, recipe, device):
        assert (WIDE, WIDE) not in [shape for shape, dtype in copies[0] if dtype == BF16]
        if primary:  # the bytes of its weight: [64, 32], of the input [64, 16]
            assert (WIDE, WIDE // 2) not in [shape for shape, _ in copies[0]]


@trained_feature("activation offload", modules=("Linear",))
@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("recipe", ("none", "delayed", "mxfp8"))
def test_linear_layers(recipe, compiled, device):
    """Layers without a norm, in eager and compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"params_dtype": BF16, "device": device}
    plain = torch.nn.ModuleList(te.Linear(WIDE, WIDE, **options) for _ in range(4))
    layers, recipe = copy.deepcopy(plain), recipe_of(recipe)
    if compiled:
        for layer in layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    assert len(list(offloaded_steps(plain, layers, recipe, device))) == 2


def test_inside_of_a_graph(device):
    """Entered in compiled code it leaves the graph, with a reason."""
    layers = model_of(device, count=2)
    plain = copy.deepcopy(layers)
    context, sync = enabled(1, 2)

    def run(x):
        for layer in layers:
            with context:
                x = layer(x)
            x = sync(x)
        return x

    torch._dynamo.reset()
    with pytest.raises(Exception, match="OffloadContext"):  # by Dynamo's own rules
        torch.compile(run, fullgraph=True, backend="aot_eager")(given(device))
    torch._dynamo.reset()
    with context:
        y = layers[0](given(device))
    with pytest.raises(Exception, match="decides in Python"):
        torch.compile(sync, fullgraph=True, backend="aot_eager")(y)
    sync(y)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, y = given(device), given(device)
        out = torch.compile(run, backend="aot_eager")(y)
    assert all(offloaded(context)[:1])
    assert_same(gradients(layers, y, out), gradients(plain, x, forward(plain, x, None)))


@pytest.mark.parametrize("recipe", ("none", "delayed"))
def test_checkpointed_layers(recipe, device):
    """Of a layer that is recomputed, its input is what is offloaded."""
    plain = model_of(device)
    layers, recipe = copy.deepcopy(plain), recipe_of(recipe)
    context, sync = enabled(2, 4)
    x, y = given(device), given(device)
    wrapped = [lambda t, l=layer: checkpoint(l, t, use_reentrant=False) for layer in layers]
    out = forward(wrapped, y, recipe, context, sync)
    assert offloaded(context)[1] == [((ROWS, WIDE), BF16)]
    wanted = forward(plain, x, recipe)
    assert_same([out], [wanted])
    assert_same(gradients(layers, y, out), gradients(plain, x, wanted))


def test_enabled_only_inside(device):
    assert not cpu_offload.is_cpu_offload_enabled()
    layers = model_of(device, count=2)
    context, sync = enabled(1, 2)
    with context:
        assert cpu_offload.is_cpu_offload_enabled()
        y = layers[0](given(device))
    sync(y)
    assert not cpu_offload.is_cpu_offload_enabled()


# --- arguments and errors -------------------------------------------------------------------------


def test_disabled(device):
    """Nothing happens, not even errors."""
    x = given(device)
    context, sync = te.get_cpu_offload_context(num_layers=7, offload_activations=False)
    with context, context:
        assert not cpu_offload.is_cpu_offload_enabled()
    assert sync(x) is x and sync(x.detach()).requires_grad is False
    context, sync, controller = te.get_cpu_offload_context(manual_synchronization=True)
    assert controller is None and sync(x) is x


def test_arguments():
    with pytest.raises(ValueError, match="there is nothing to offload"):
        enabled(offload_activations=False)
    for count in (4, 7, 0):
        with pytest.raises(ValueError, match=f"num_layers is {count} and model_layers is 4"):
            enabled(count, 4)
    with pytest.warns(UserWarning, match="All but one of 4 layers"):
        enabled(3, 4)
    with pytest.raises(ValueError, match="manual_synchronization=True"):
        enabled(offload_stream=object())
    for name in ("offload_weights", "double_buffering"):
        with pytest.warns(DeprecationWarning, match=f"{name} is deprecated"):
            enabled(**{name: True})


def test_order_of_calls(device):
    layers = model_of(device, count=2)
    context, sync = enabled(1, 2)
    with context:
        y = layers[0](given(device))
    with pytest.raises(RuntimeError, match="entered again"):
        with context:
            pass
    with pytest.raises(ValueError, match="needs no gradient"):
        sync(y.detach())
    sync(y).sum().backward()
    with pytest.raises(ZeroDivisionError):  # a failed layer leaves nothing behind
        with context:
            raise ZeroDivisionError
    assert not cpu_offload.is_cpu_offload_enabled()
    x = given(device)
    gradients(layers, x, forward(layers, x, None, context, sync))


def test_names():
    for name in ("get_cpu_offload_context", "mark_not_offload", "ManualOffloadSynchronizer"):
        assert getattr(te, name) is getattr(cpu_offload, name)
    assert issubclass(
        cpu_offload.DefaultOffloadSynchronizer, cpu_offload.OffloadSynchronizer
    ) and hasattr(cpu_offload.OffloadableLayerState, "push_tensor")
