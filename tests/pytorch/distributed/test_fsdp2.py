# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (``fully_shard``) and FSDP1: eager and compiled, sharded values and sharded bytes."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import copy

import processes
import pytest
import torch
from feature_report import trained_feature
from models import (
    WIDE,
    assert_same,
    batch,
    build,
    bytes_of,
    loss_of,
    optimizer_of,
    state_of,
    train,
    train_ranks,
)
from primary_support import CLASSES
from processes import RANKS, mesh, needs_distributed
from recipe_list import ALL_RECIPES, recipe_of
from torch._dynamo.utils import counters

import transformer_engine.pytorch as te

STEPS = 2
# Weights can be sharded as bytes if both orientations agree on where a block begins.
PRIMARY = [name for name in ALL_RECIPES if name != "custom_delayed"]


def shard(model, layers=True, **options):
    """``model`` under FSDP2, each layer by itself, or all together."""
    from torch.distributed.fsdp import fully_shard

    for layer in model if layers else ():
        fully_shard(layer, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def whole(tensor):
    """Values of all shards, for what is in high precision."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def batches(rank, recipe, width=64):
    """What a rank trains on: delayed scaling is compared on equal data, which reduction keeps."""
    same = "delayed" in recipe
    return [batch(step, 0 if same else rank, width=width) for step in range(STEPS)]


def check_training(rank, recipe, primary, layers=True, compiled="", **options):
    """Outputs, parameters and state are those of one process that averages two gradients."""
    recipe_object, width = recipe_of(recipe), WIDE if primary else 64
    model = build(recipe if primary else None, width)
    single = copy.deepcopy(model)
    kinds = [type(param) for param in model.parameters()]
    shard(model, layers, **options)
    for param, kind in zip(model.parameters(), kinds):
        local = param._local_tensor
        assert (type(local) is kind) or kind is torch.nn.Parameter
        assert local.shape[0] * RANKS == param.shape[0]
    if primary and recipe in CLASSES:
        assert type(model[1].weight._local_tensor) is CLASSES[recipe]
    call = None
    if compiled == "layers":
        counters.clear()
        for layer in model:
            layer.compile(backend="aot_eager", fullgraph=True)
    elif compiled:
        call = torch.compile(model, backend="aot_eager")
    outputs = train(model, recipe_object, batches(rank, recipe, width), call)
    if compiled == "layers":
        assert not counters["graph_break"]
    wanted = train_ranks(single, recipe_object, [batches(r, recipe, width) for r in range(RANKS)])
    assert_same(outputs, wanted[rank], "output")
    assert_same(bytes_of(model), bytes_of(single, rank), "parameter")
    assert_same(state_of(model), state_of(single), "state")


def kept_by_autograd(model, recipe, x):
    """``(loss, tensors)``: those that autograd saved and whose memory is still there."""
    held = []

    def pack(tensor):
        held.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, loss = loss_of(model, x, recipe)
    return loss, [tensor for tensor in held if tensor.untyped_storage().size() > 0]


def check_memory(rank, recipe, primary, compiled):
    """Between passes nothing of the size of a gathered weight is alive, in any format."""
    recipe_object = recipe_of(recipe)
    model = build(recipe if primary else None, WIDE)
    outer = torch.nn.Sequential(torch.nn.Sequential(model[0], model[1]), model[2])
    shard(outer)
    if compiled:
        for layer in outer:
            layer.compile(backend="aot_eager")
    for step in range(2):
        x = batch(step, rank, rows=16, width=WIDE)
        loss, alive = kept_by_autograd(outer, recipe_object, x)
        smallest = WIDE * WIDE // 2  # bytes of a weight in NVFP4
        large = [t for t in alive if WIDE in t.shape[:1] and t.numel() * t.itemsize >= smallest]
        # Of 16 rows of activations, the columnwise part is padded, and as tall as a weight.
        large = [t for t in large if t.shape[1] >= WIDE // 2]
        assert not large, [(tuple(t.shape), t.dtype) for t in large]
        loss.backward()


def check_cache(rank, recipe, layers):
    """``is_first_microbatch`` caches no gathered weight; accumulated gradients are as without."""
    recipe = recipe_of(recipe)
    model = build()
    single = copy.deepcopy(model)
    shard(model, layers)
    replicas = [single, copy.deepcopy(single)]

    def run(model, x, first):
        torch.manual_seed(0)
        with te.autocast(recipe=recipe):
            for layer in model:
                x = layer(x, is_first_microbatch=first)
        x.float().square().mean().backward()

    if layers:  # the model itself is not called, its layers are
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            run(model, batch(micro, rank), micro == 0)
            for r, replica in enumerate(replicas):
                run(replica, batch(micro, r), micro == 0)
        for param, a, b in zip(model.parameters(), *(r.parameters() for r in replicas)):
            assert_same([whole(param.grad)], [a.grad / 2 + b.grad / 2], "gradient")
        assert all(replica._fp8_workspaces for replica in single)
    else:
        model.forward = lambda x: run(model, x, True)
        model(batch(0, rank))
    assert not any(layer._fp8_workspaces for layer in model)


def check_mixed_precision(rank, recipe):
    """fp32 shards, bf16 passes, gradients reduced in fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    recipe = recipe_of(recipe)
    model = build(dtype=torch.float32)
    single = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, mp_policy=policy)
    optimizers = [optimizer_of(model), optimizer_of(single)]
    for step in range(STEPS):
        y, loss = loss_of(model, batch(step, rank), recipe, draws=step)
        loss.backward()
        sums = [torch.zeros_like(param) for param in single.parameters()]
        for r in range(RANKS):
            twin = copy.deepcopy(single).to(torch.bfloat16)
            z, loss = loss_of(twin, batch(step, r), recipe, draws=step)
            loss.backward()
            if r == rank:
                assert_same([y], [z], "output")
            for total, param in zip(sums, twin.parameters()):
                total.add_(param.grad.float())
        for param, total in zip(single.parameters(), sums):
            param.grad = total / 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(bytes_of(model), bytes_of(single, rank), "parameter")


def check_clipping(rank, primary):
    """Gradient norm over all shards, and clipped gradients."""
    recipe = recipe_of("current")
    model = build("current" if primary else None, dtype=torch.float32)
    single = copy.deepcopy(model)
    shard(model)
    x = batch(0, dtype=torch.float32)
    norms = []
    for tested in (model, single):
        (100 * loss_of(tested, x, recipe)[1]).backward()
        norms.append(whole(torch.nn.utils.clip_grad_norm_(tested.parameters(), 0.5)))
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
    assert norms[1] > 0.5
    total = 0.0
    for ours, theirs in zip(model.parameters(), single.parameters()):
        torch.testing.assert_close(whole(ours.grad), theirs.grad, rtol=1e-5, atol=1e-9)
        total += float(whole(ours.grad).square().sum())
    assert abs(total**0.5 - 0.5) < 1e-5
    del rank


def check_deferred(rank, recipe, materialised):
    """A quantized model made on meta, sharded, then initialised: the bytes of one process."""

    def fill(weight):
        values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) / 16
        if hasattr(weight, "device_mesh"):
            weight, values = weight.to_local(), values.chunk(RANKS)[rank]
        weight.copy_(values)

    def make():
        options = {"init_method": fill, "device": "meta", "params_dtype": torch.bfloat16}
        with te.quantized_model_init(
            recipe=recipe_of(recipe), preserve_high_precision_init_val=True
        ):
            layers = [
                te.LayerNormMLP(WIDE, WIDE, output_layer_init_method=fill, **options),
                te.Linear(WIDE, WIDE, **options),
            ]
        return torch.nn.Sequential(*layers)

    single, model = make(), shard(make())
    single.to_empty(device="cpu")  # by itself it would go to a GPU that is there
    if materialised:
        model.to_empty(device="cpu")
    for tested in (single, model):
        for layer in tested:
            layer.reset_parameters()
    assert_same(bytes_of(model), bytes_of(single, rank), "parameter")
    initial = [layer.weight.get_high_precision_init_val() for layer in (single[1], model[1])]
    assert_same([initial[1]], [initial[0].chunk(RANKS)[rank]], "initial value")
    outputs = [
        train(tested, recipe_of(recipe), [batch(step, width=WIDE) for step in range(STEPS)])
        for tested in (model, single)
    ]
    assert_same(*outputs, "output")
    assert_same(bytes_of(model), bytes_of(single, rank), "parameter")


def check_three_dimensions(rank):
    """Outputs are no views: torch marks them, and loses the mark on a view changed in place."""
    del rank
    model = shard(build())
    y = model(batch(0).view(2, 8, 64))
    assert y.shape == (2, 8, 64) and not y._is_view()
    y += 1.0
    y.sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def check_errors(rank):
    """A shard that no pass has gathered, and blocks that shards would cut."""
    del rank
    model = shard(build(), layers=False)
    with pytest.raises(RuntimeError, match="is a DTensor with placements .*fully_shard"):
        model[1](batch(0))
    model = shard(build("block", 128))
    with pytest.raises(ValueError, match="no multiple of 128"):
        model(batch(0, width=128))


def check_fsdp1(rank, recipe, compiled):
    """FSDP1: numbers of one process, and no quantized weights in what autograd keeps."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    recipe_object = recipe_of(recipe)
    model = build(width=WIDE)
    single = copy.deepcopy(model)
    policy = ModuleWrapPolicy({te.LayerNormMLP, te.Linear, te.LayerNormLinear})
    wrapped = te.distributed.FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    modules = [m for m in wrapped.modules() if isinstance(m, te.Linear)]
    assert all(m.fsdp_wrapped and m.fsdp_group.size() == RANKS for m in modules)
    call = torch.compile(wrapped, backend="aot_eager") if compiled else wrapped
    data = batches(rank, recipe, WIDE)
    outputs = train(wrapped, recipe_object, data, call)
    wanted = train_ranks(single, recipe_object, [batches(r, recipe, WIDE) for r in range(RANKS)])
    assert_same(outputs, wanted[rank], "output")
    if not compiled:
        loss, alive = kept_by_autograd(wrapped, recipe_object, data[0])
        assert not [t for t in alive if t.dim() == 2 and 0 < WIDE * WIDE // 2 <= t.numel()]
        loss.backward()


def check_fsdp1_errors(rank):
    """What FSDP1 can not do, and what is no FSDP1."""
    del rank
    with pytest.raises(TypeError, match="fully_shard nothing has to be prepared"):
        te.distributed.prepare_te_modules_for_fsdp(build())
    with pytest.raises(RuntimeError, match="can not shard quantized parameters"):
        te.distributed.FullyShardedDataParallel(build("current"), device_id=torch.device("cpu"))


CHECKS = {
    "none": (check_training, "none", False),
    **{name: (check_training, name, False) for name in ALL_RECIPES},
    **{f"primary {name}": (check_training, name, True) for name in PRIMARY},
    "whole model": (check_training, "nvfp4", False, False),
    "whole model, primary": (check_training, "mxfp8", True, False),
    "layers compiled, delayed": (check_training, "delayed", False, True, "layers"),
    "layers compiled, primary": (check_training, "nvfp4", True, True, "layers"),
    "model compiled": (check_training, "current", False, True, "model"),
    "memory none": (check_memory, "none", False, False),
    "memory delayed": (check_memory, "delayed", False, False),
    "memory nvfp4": (check_memory, "nvfp4", False, False),
    "memory dequantized": (check_memory, "mxfp8_dq", False, False),
    "memory primary": (check_memory, "mxfp8", True, False),
    "memory compiled": (check_memory, "current", False, True),
    "cache": (check_cache, "current", True),
    "cache, whole model": (check_cache, "mxfp8", False),
    "mixed precision none": (check_mixed_precision, "none"),
    "mixed precision mxfp8": (check_mixed_precision, "mxfp8"),
    "clipping": (check_clipping, False),
    "clipping, primary": (check_clipping, True),
    "deferred delayed": (check_deferred, "delayed", True),
    "deferred nvfp4": (check_deferred, "nvfp4", False),
    "deferred hybrid": (check_deferred, "custom_from_dequantized", True),
    "three dimensions": (check_three_dimensions,),
    "errors": (check_errors,),
    "fsdp1 delayed": (check_fsdp1, "delayed", False),
    "fsdp1 nvfp4": (check_fsdp1, "nvfp4", False),
    "fsdp1 compiled": (check_fsdp1, "current", True),
    "fsdp1 errors": (check_fsdp1_errors,),
}


def check_resharding(rank, recipe, primary):
    """Parameters that stay gathered from forward to backward."""
    check_training(rank, recipe, primary, reshard_after_forward=False)


CHECKS["gathered once"] = (check_resharding, "delayed", False)
CHECKS["gathered once, primary"] = (check_resharding, "nvfp4", True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.run_checks("test_fsdp2", tmp_path_factory.mktemp("fsdp2"))


def marked(label):
    """What a check shows: FSDP1, compiled or not, or FSDP2."""
    mode = "compiled" if "compiled" in label else "eager"
    engine = "FSDP1" if label.startswith("fsdp1") else "FSDP2"
    return pytest.param(label, marks=trained_feature(engine, modes=(mode,)))


@needs_distributed
@pytest.mark.parametrize("label", [marked(label) for label in CHECKS])
def test_two_processes(found, label):
    processes.assert_passed(found, label)
