# SPDX-License-Identifier: Apache-2.0
"""What torch's operations, autograd, modules and optimizers do with quantized tensors."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import copy

import pytest
import torch
from tensor_support import (
    E4M3,
    KINDS,
    QUANTIZERS,
    addresses,
    buffers,
    random,
    same_bytes,
)

from transformer_engine.pytorch.tensor import (
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    QuantizedTensor,
    QuantizedTensorStorage,
)

SHAPE = (64, 96)
every_kind = pytest.mark.parametrize("name", KINDS)


def quantized(name, device, seed=0, shape=SHAPE):
    return QUANTIZERS[name](device)(random(shape, device, seed=seed))


def plain(tensor):
    """Whether it is an ordinary tensor in high precision."""
    return type(tensor) is torch.Tensor


# ------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("name", QUANTIZERS)
def test_operations_see_the_values(device, name):
    q = quantized(name, device)
    values = q.dequantize()
    for run in (
        lambda t: t + 1,
        lambda t: 2 * t,
        torch.relu,
        lambda t: t.t(),
        lambda t: t.transpose(0, 1).contiguous(),
        lambda t: t[3],
        lambda t: t[:, 5:7],
        lambda t: t[1:5],
        lambda t: t @ t.t(),
        lambda t: torch.nn.functional.linear(torch.ones(2, 96, device=device, dtype=t.dtype), t),
        lambda t: torch.cat([t, values]),
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack([t, t]),
        lambda t: t.sum(),
        lambda t: t.bfloat16(),
        lambda t: torch.where(t > 0, t, values),
        lambda t: torch.add(t, t, out=torch.empty_like(values)),
        lambda t: t.masked_fill(t > 0, 0.0),
        lambda t: t.unfold(0, 2, 2),
    ):
        out = run(q)
        assert plain(out) and torch.equal(out, run(values))
    assert torch.equal(q, quantized(name, device)) and not torch.equal(q, values + 1)
    for dtype, out in (
        (torch.float32, q.float()),
        (torch.float16, q.half()),
        (torch.float64, q.to(torch.float64)),
        (torch.float32, q.to(torch.float32)),
    ):  # rounded once, not by way of the nominal dtype
        assert plain(out) and torch.equal(out, q.dequantize(dtype=dtype)) and out.dtype == dtype
    assert (q == values).all() and q.tolist() == values.tolist()
    assert (q.float().cpu().numpy() == q.to(torch.float32).numpy(force=True)).all()
    assert repr(q).startswith(type(q).__name__) and "quant" in repr(q)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_autocast_changes_nothing(device, name):
    x, quantizer = random(SHAPE, device), QUANTIZERS[name](device)
    q = quantizer(x)
    columnwise = q.detach()
    columnwise.update_usage(rowwise_usage=False)
    with torch.autocast(device, torch.bfloat16):
        assert same_bytes(quantizer(x), q) and q.float().dtype == torch.float32
        values = columnwise.dequantize(dtype=torch.float32)
    assert torch.equal(values, columnwise.dequantize(dtype=torch.float32))


@every_kind
def test_metadata(device, name):
    q = quantized(name, device)
    assert isinstance(q, (torch.Tensor, QuantizedTensor, QuantizedTensorStorage))
    assert q.shape == q.size() == SHAPE and q.size(1) == 96 and q.dim() == 2
    assert q.dtype == torch.bfloat16 and q.device.type == device and q.numel() == 64 * 96
    assert q.is_contiguous() and q.contiguous() is q and q.is_floating_point()
    assert q.element_size() == 2 and not q.requires_grad and q.is_leaf


def test_representations_never_read_values():
    """Neither on a device without values nor while something traces."""
    for name, make in QUANTIZERS.items():
        q = quantized(name, "cpu").to("meta")
        assert type(q).__name__ in repr(q) and "meta" in repr(q)
        storage = make("cpu")
        storage.internal = True
        assert "bfloat16" in repr(storage(random(SHAPE)))


@every_kind
def test_views_share_buffers(device, name):
    q = quantized(name, device)
    values = q.dequantize()
    for run in (
        lambda t: t.view(2, 32, 96),
        lambda t: t.reshape(4, -1, 96),
        lambda t: t.view(-1),
        lambda t: t.view(64, 12, 8),
        lambda t: t.flatten(),
        lambda t: t.unsqueeze(0),
        lambda t: t.unsqueeze(-1),
        lambda t: t.view(64, 1, 96).squeeze(1),
        lambda t: t.detach(),
        lambda t: t[:],
        lambda t: t.view_as(values),
        lambda t: torch.as_strided(t, t.shape, t.stride()),
        lambda t: t.view(-1).view(2, 32, 96),
    ):
        view = run(q)
        assert type(view) is type(q) and addresses(view) == addresses(q)
        assert view.shape == run(values).shape and torch.equal(view, run(values))
        assert torch.equal(view + 1, run(values) + 1)
    view = q.view(2, 32, 96)
    if name not in ("identity", "hybrid"):
        data = view._data if name == "current" else view._rowwise_data
        assert data.shape[:2] == (2, 32)
    back = q.view(-1).view(SHAPE)
    assert same_bytes(back, q) and back._buffer_shape is None
    with pytest.raises(RuntimeError, match="number of elements"):
        q.view(7, 7)


@every_kind
@pytest.mark.parametrize("swizzled", [False, True])
def test_parts_along_the_first_dimension(device, name, swizzled):
    quantizer = QUANTIZERS[name](device)
    quantizer.optimize_for_gemm = swizzled
    x = random((384, 96), device)
    q = quantizer(x)
    values = q.dequantize()
    for whole in (torch.chunk(q, 3), q.split(128), q.split([128, 256])):
        start = 0
        for part in whole:
            rows = part.shape[0]
            expected = values[start : start + rows]
            assert type(part) is type(q) and torch.equal(part, expected)
            half = part.detach()
            half.update_usage(rowwise_usage=False)  # the columnwise data are right as well
            other = q.detach()
            other.update_usage(rowwise_usage=False)
            assert torch.equal(half, other.dequantize()[start : start + rows])
            assert not set(addresses(part)) & set(addresses(q)) - {None}
            start += rows
    for run in (lambda t: t.split(100), lambda t: t.split(24, 1), lambda t: torch.chunk(t, 3, -1)):
        for part, expected in zip(run(q), run(values), strict=True):
            assert torch.equal(part, expected)


def test_parts_that_cut_through_blocks_are_values(device):
    for name, size in (("block_1d", 64), ("mxfp8", 16), ("nvfp4", 8)):
        parts = quantized(name, device, shape=(256, 96)).split(size)
        assert all(plain(part) for part in parts)


def test_parts_of_shards_with_three_dimensions(device):
    q = quantized("mxfp8", device, shape=(6, 16, 32))
    parts = q.split(2)
    assert [type(p) for p in parts] == [type(q)] * 3 and parts[0]._rowwise_data.shape == (2, 16, 32)
    assert torch.equal(torch.cat(parts), q.dequantize())
    assert all(plain(p) for p in q.split(1))  # 16 rows, half a block


# ------------------------------------------------------------------------------------- new tensors


@every_kind
def test_new_tensors(device, name):
    q = quantized(name, device)
    clone = q.clone()
    assert type(clone) is type(q) and same_bytes(clone, q)
    assert not set(addresses(clone)) & set(addresses(q)) - {None}
    for empty in (torch.empty_like(q), torch.empty_like(q, device="cpu")):
        assert type(empty) is type(q) and empty.shape == SHAPE
        assert empty.copy_(q) is empty and same_bytes(empty, q)
    assert plain(torch.empty_like(q, dtype=torch.float32))
    zeros = q.new_zeros(32, 96)
    assert type(zeros) is type(q) and zeros.shape == (32, 96)
    assert torch.equal(zeros, torch.zeros(32, 96, dtype=q.dtype, device=device))
    new = random((32, 96), device, seed=4)
    assert same_bytes(zeros.copy_(new), QUANTIZERS[name](device)(new))
    for other in (
        torch.zeros_like(q),
        torch.zeros_like(q, memory_format=torch.preserve_format),
        q.new_zeros(3),
        q.new_zeros(SHAPE, dtype=torch.float32),
    ):
        assert plain(other) and not other.any() and other.device.type == device
    assert plain(torch.ones_like(q)) and torch.ones_like(q).sum() == 64 * 96
    assert plain(torch.full_like(q, 2.0)) and plain(torch.randn_like(q))
    assert q.new_full((2,), 3.0).tolist() == [3.0, 3.0]
    if name not in ("identity", "current"):
        assert plain(q.new_zeros(33, 96)) == (name in ("mxfp8", "nvfp4", "hybrid"))


@every_kind
def test_other_devices(device, name):
    q = quantized(name, device)
    assert q.to(device) is q and q.to(q.dtype) is q
    for there in (q.cpu(), q.to("cpu", copy=True), q.to(torch.device("cpu"), torch.bfloat16)):
        assert type(there) is type(q) and there.device.type == "cpu"
        assert same_bytes(there, q) and there._quantizer is q._quantizer
    assert q.to("meta").device.type == "meta" and q.to("meta").shape == SHAPE
    assert not q.is_pinned()
    if torch.cuda.is_available():
        assert q.cpu().pin_memory().is_pinned() and same_bytes(q.cpu().cuda(), q)
        q.cuda().record_stream(torch.cuda.current_stream())


# ----------------------------------------------------------------------------------------- writing


@every_kind
def test_copies_between_precisions(device, name):
    q, x = quantized(name, device), random(SHAPE, device, torch.float32, seed=5)
    quantizer = QUANTIZERS[name](device)
    before = addresses(q)
    assert q.copy_(x.bfloat16()) is q and same_bytes(q, quantizer(x.bfloat16()))
    out = torch.empty(SHAPE, device=device)
    assert out.copy_(q) is out and torch.equal(out, q.dequantize(dtype=torch.float32))
    other = quantized(name, device, seed=6)
    q.copy_(other)
    assert same_bytes(q, other)  # bytes, nothing is rounded twice
    source = Float8CurrentScalingQuantizer(E4M3)(x.bfloat16())
    q.copy_(source)
    assert same_bytes(q, quantizer(source.dequantize()))
    q.copy_(torch.arange(96, device=device))  # broadcast, integers
    assert same_bytes(q, quantizer(torch.arange(96, device=device).bfloat16().expand(SHAPE)))
    assert addresses(q) == before


@pytest.mark.parametrize("name", [n for n in QUANTIZERS if n != "delayed"])
def test_operations_that_write(device, name):
    """The result is quantized again; addresses stay."""
    quantizer = QUANTIZERS[name](device)
    for run in (
        lambda t: t.add_(1),
        lambda t: t.mul_(0.5),
        lambda t: t.zero_(),
        lambda t: t.fill_(2.0),
        lambda t: t.addcdiv_(torch.ones_like(t), torch.full_like(t, 3.0), value=-0.5),
        lambda t: t.clamp_(min=0),
        lambda t: torch.nn.init.constant_(t, 3.0),
        lambda t: torch.mul(t, 2, out=t),
        lambda t: t.sub_(t),
        lambda t: t.__iadd__(1),
        lambda t: t.masked_fill_(t > 0, 1.0),
        lambda t: t.view(-1).neg_().view(SHAPE),
    ):
        q = quantized(name, device)
        values, before, version = q.dequantize().clone(), addresses(q), q._version
        out = run(q)
        assert out is q or addresses(out) == before
        assert addresses(q) == before and q._version > version
        assert same_bytes(q, quantizer(run(values)))


@every_kind
def test_operations_on_lists(device, name):
    quantizer = QUANTIZERS[name](device)
    many = [quantized(name, device, seed=s) for s in range(3)]
    values = [q.dequantize().clone() for q in many]
    grads = [random(SHAPE, device, seed=s + 7) for s in range(3)]
    torch._foreach_mul_(many, 0.5)
    torch._foreach_add_(many, grads, alpha=-0.1)
    torch._foreach_mul_(values, 0.5)
    values = [quantizer(v).dequantize() for v in values]
    torch._foreach_add_(values, grads, alpha=-0.1)
    for q, v in zip(many, values):
        assert same_bytes(q, quantizer(v))
    sums = torch._foreach_add(many, 1.0)
    assert all(plain(s) for s in sums) and torch.equal(sums[0], many[0].dequantize() + 1)


@every_kind
def test_data(device, name):
    q, x = quantized(name, device), random(SHAPE, device, seed=8)
    parameter = torch.nn.Parameter(q)
    assert type(parameter.data) is type(q) and addresses(parameter.data) == addresses(q)
    parameter.data = x
    assert same_bytes(parameter, QUANTIZERS[name](device)(x)) and addresses(parameter) == addresses(
        q
    )
    other = quantized(name, device, seed=9)
    parameter.data = other
    assert addresses(parameter) == addresses(other) and parameter.requires_grad
    parameter.data = torch.empty(0, device=device)
    with pytest.raises(RuntimeError, match="no values"):
        parameter.dequantize()


def test_collectives_are_refused(tmp_path):
    """All but a broadcast, which is one of bytes."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for name in KINDS:
            q = quantized(name, "cpu")
            before = buffers(q.clone())
            torch.distributed.broadcast(q, 0)
            assert all(a is None or torch.equal(a, b) for a, b in zip(buffers(q), before))
            with pytest.raises(TypeError, match="dequantize"):
                torch.distributed.all_reduce(q)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_inference_mode(device, name):
    x = torch.ones(2, 96, device=device, dtype=torch.bfloat16)
    outside = quantized(name, device)
    with torch.inference_mode():
        q = quantized(name, device)
        assert torch.equal(torch.nn.functional.linear(x, q), torch.nn.functional.linear(x, outside))
        assert type(q.view(2, 32, 96)) is type(q) and type(q.reshape(-1)) is type(q)
        assert plain(q.to(torch.float64)) and q.contiguous() is q
        assert torch.equal(q.add_(1), outside.clone().add_(1))
        assert torch.equal(torch.chunk(q, 2)[1], q[32:])


# ---------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("name", QUANTIZERS)
def test_gradients_pass_through(device, name):
    """Quantization and dequantization are the identity of autograd."""
    x = random(SHAPE, device).requires_grad_()
    weights = random(SHAPE, device, seed=3)
    quantizer = QUANTIZERS[name](device)
    q = quantizer(x)
    assert type(q) is type(quantizer(x.detach())) and q.requires_grad and not q.is_leaf
    (q.dequantize() * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    x.grad = None
    (quantizer(x).view(2, 32, 96).float() * weights.view(2, 32, 96)).sum().backward()
    assert torch.equal(x.grad, weights)
    x.grad = None
    (quantizer(x) * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    with torch.no_grad():
        assert not quantizer(x).requires_grad and not q.dequantize().requires_grad
    quantizer.internal = True
    assert not isinstance(quantizer(x), torch.Tensor)


@every_kind
def test_parameters(device, name):
    q = quantized(name, device)
    w = torch.nn.Parameter(q)
    assert isinstance(w, torch.nn.Parameter) and type(w) is type(q) and w.requires_grad
    assert addresses(w) == addresses(q) and w.is_leaf
    x = random((4, 96), device, seed=2).requires_grad_()
    y = torch.nn.functional.linear(x, w)
    dy = random(y.shape, device, seed=3)
    y.backward(dy)
    values = q.dequantize()
    assert plain(w.grad) and torch.equal(w.grad, dy.t() @ x.detach())
    assert torch.equal(x.grad, dy @ values) and torch.equal(y, x.detach() @ values.t())
    w.grad = torch.zeros(SHAPE, device=device, dtype=q.dtype)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        w.add_(1)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "adam_foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "adam_fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", KINDS)
def test_optimizers(device, name, optimizer):
    """A step is one on the values, with the parameter quantized after each operation."""
    quantizer = QUANTIZERS[name](device)
    w = torch.nn.Parameter(quantized(name, device))
    state_of = OPTIMIZERS[optimizer]([w])
    reference = torch.nn.Parameter(w.dequantize().detach().clone())
    same = OPTIMIZERS[optimizer]([reference])
    before = addresses(w)
    for seed in range(3):
        w.grad = random(SHAPE, device, seed=20 + seed)
        reference.grad = w.grad.clone()
        state_of.step()
        same.step()
        expected = quantizer(reference.detach()).dequantize()
        # Weight decay and step are quantized one after the other unless the operator does both.
        error = (w.dequantize() - expected).detach().float().norm()
        assert error <= (0.0 if optimizer in ("sgd_foreach", "adam_fused") else 0.06) * w.norm()
        with torch.no_grad():
            reference.copy_(w)
    assert addresses(w) == before and type(w) is type(quantized(name, device))
    for values in state_of.state.values():
        assert all(plain(v) for v in values.values() if isinstance(v, torch.Tensor))


# ----------------------------------------------------------------------------------------- modules


class Module(torch.nn.Module):
    """A linear layer with a quantized weight that carries attributes."""

    def __init__(self, name, device):
        super().__init__()
        self.weight = torch.nn.Parameter(quantized(name, device))
        self.weight.mark = "kept"
        self.weight.initial = lambda: 5

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


@every_kind
def test_attributes_survive_moving_a_module(device, name):
    module, kind = Module(name, device), type(quantized(name, device))
    before = quantized(name, device)
    for run in (
        lambda m: m.to(device),
        lambda m: m.cpu(),
        lambda m: m.to(device),
        lambda m: m.requires_grad_(False),
        lambda m: m.to(torch.bfloat16),
    ):
        run(module)
        assert type(module.weight) is kind and isinstance(module.weight, torch.nn.Parameter)
        assert module.weight.mark == "kept" and module.weight.initial() == 5
        assert same_bytes(module.weight, before) and not hasattr(before, "mark")
    module.to("meta")
    assert module.weight.device.type == "meta" and module.weight.mark == "kept"
    module.to_empty(device=device)
    module.load_state_dict({"weight": before})
    assert type(module.weight) is kind and same_bytes(module.weight, before)


@every_kind
def test_casting_a_module(device, name):
    """The weight stays quantized under the new nominal dtype."""
    module = Module(name, device)
    values = module.weight.dequantize(dtype=torch.float32)
    module.float()
    assert module.weight.dtype == torch.float32 and module.weight.mark == "kept"
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module(torch.ones(1, 96, device=device)).dtype == torch.float32
    error = (module.weight.dequantize() - values).norm() / values.norm()
    assert error < 0.05 and isinstance(module.weight, QuantizedTensor)


@every_kind
def test_state_dicts(device, name):
    module, other = Module(name, device), Module(name, device)
    with torch.no_grad():
        other.weight.mul_(0.3)
    state = module.state_dict()
    assert type(state["weight"]) is type(module.weight) and not state["weight"].requires_grad
    other.load_state_dict(state)
    assert same_bytes(other.weight, module.weight)
    x = random(SHAPE, device, seed=11)
    other.load_state_dict({"weight": x})  # from high precision
    assert same_bytes(other.weight, QUANTIZERS[name](device)(x))
    target = torch.nn.Linear(96, 64, bias=False, device=device, dtype=torch.bfloat16)
    target.load_state_dict(state)  # to high precision
    assert plain(target.weight.data) and torch.equal(target.weight, module.weight.dequantize())
    other.load_state_dict(state, assign=True)
    assert addresses(other.weight) == addresses(module.weight)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_deepcopy(device, name):
    module = Module(name, device)
    module.weight.myself = module.weight
    module.weight.grad = random(SHAPE, device)
    twin = copy.deepcopy(module)
    assert type(twin.weight) is type(module.weight) and same_bytes(twin.weight, module.weight)
    assert not set(addresses(twin.weight)) & set(addresses(module.weight)) - {None}
    assert twin.weight.mark == "kept" and twin.weight.myself is twin.weight
    assert isinstance(twin.weight, torch.nn.Parameter) and twin.weight.requires_grad
    assert torch.equal(twin.weight.grad, module.weight.grad)
    assert twin.weight.grad is not module.weight.grad
    assert twin.weight._quantizer is not module.weight._quantizer
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(QUANTIZERS[name](device)(random(SHAPE, device).requires_grad_()))
    storage = QUANTIZERS[name](device)
    storage.internal = True
    storage = storage(random(SHAPE, device))
    assert same_bytes(copy.deepcopy(storage), storage)


def test_parameters_of_one_tensor_do_not_share_attributes(device):
    q = MXFP8Quantizer(E4M3)(random(SHAPE, device))
    one, two = torch.nn.Parameter(q), torch.nn.Parameter(q)
    one.mark = 1
    assert not hasattr(two, "mark") and not isinstance(q.detach(), torch.nn.Parameter)
    assert not isinstance(one.detach(), torch.nn.Parameter) and one.detach().mark == 1
