# SPDX-License-Identifier: Apache-2.0
"""Quantizers and storages of per-tensor FP8."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import copy
import pickle

import pytest
import torch

import references
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.formats.layout import NOTHING
from transformer_engine.pytorch.quantized_tensor import (
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from transformer_engine.pytorch.tensor import storage_from_quantized
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
FORMAT = {E4M3: "e4m3", E5M2: "e5m2"}

pytestmark = pytest.mark.usefixtures("poison_empty")


def random(shape, device="cpu", dtype=torch.float32, seed=0):
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)


def delayed(device, fp8_dtype=E4M3, scale=20.0, **usages):
    """A quantizer with delayed scaling and an empty record."""
    return Float8Quantizer(
        torch.full((1,), scale, device=device), torch.zeros(1, device=device), fp8_dtype, **usages
    )


def current(device, fp8_dtype=E4M3, **options):
    """A quantizer with current scaling."""
    return Float8CurrentScalingQuantizer(fp8_dtype, device, **options)


QUANTIZERS = [delayed, current]


def check(storage, x, quantizer):
    """The storage holds what an independent quantizer makes of ``x``."""
    fmt = FORMAT[quantizer.dtype]
    scale = quantizer.scale.cpu() if isinstance(quantizer, Float8Quantizer) else None
    options = {}
    if scale is None:
        options = {"pow2": quantizer.force_pow_2_scales, "eps": quantizer.amax_epsilon}
    codes, values, scale = references.quantized(x.cpu(), fmt, scale, **options)
    inverse = (1.0 / scale.double()).float().view(1)
    assert torch.equal(storage._scale_inv.cpu(), inverse)
    if storage._data is not None:
        assert storage._data.shape == x.shape and torch.equal(storage._data.cpu(), codes)
    if storage._transpose is not None:
        assert storage._transpose.shape == (x.shape[-1], *x.shape[:-1])
        matrix = codes.reshape(-1, x.shape[-1])
        padded = storage._transpose_padded.cpu()
        assert padded.shape == (x.shape[-1], (matrix.shape[0] + 15) // 16 * 16)
        assert torch.equal(padded[:, : matrix.shape[0]], matrix.t())
        assert not padded[:, matrix.shape[0] :].any()
        assert torch.equal(storage._transpose.cpu(), codes.movedim(-1, 0))
    expected = (values * inverse.double()).float().to(x.dtype)
    assert torch.equal(storage.dequantize().cpu(), expected)


@pytest.mark.parametrize("make", QUANTIZERS)
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16, 32), (5, 24), (3, 7, 8), (6,), (2, 0, 8)])
@pytest.mark.parametrize("rowwise, columnwise", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("internal", [False, True])
def test_quantize(device, make, fp8_dtype, dtype, shape, rowwise, columnwise, internal):
    x = random(shape, device, dtype)
    quantizer = make(device, fp8_dtype, rowwise=rowwise, columnwise=columnwise)
    quantizer.internal = internal
    storage = quantizer(x)
    assert type(storage) is (Float8TensorStorage if internal else Float8Tensor)
    assert storage.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
    assert storage.shape == storage.size() == torch.Size(shape) and storage.size(-1) == shape[-1]
    assert storage._dtype == dtype and storage._fp8_dtype == fp8_dtype
    assert storage.device.type == device
    check(storage, x, quantizer)


def test_quantize_options(device):
    x = random((4, 8), device)
    for options in ({"force_pow_2_scales": True}, {"amax_epsilon": 1000.0}):
        quantizer = current(device, **options)
        check(quantizer(x), x, quantizer)
    assert current(device).quantize(x, dtype=torch.float16).dequantize().dtype == torch.float16
    assert len(current(device).multi_quantize([x, x])) == 2
    strided = random((8, 4), device).t()
    check(current(device)(strided), strided, current(device))
    needs_grad = x.clone().requires_grad_()
    quantizer = current(device)
    quantizer.internal = True
    assert not quantizer(needs_grad).dequantize().requires_grad


def test_what_can_not_be_quantized(device):
    with pytest.raises(ValueError, match="int64"):
        current(device)(torch.zeros(2, 2, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match="fp8_dtype"):
        delayed(device, DType.kBFloat16)


def test_delayed_scaling_records_the_largest_amax(device):
    history = torch.zeros(4, 3, device=device)
    quantizer = Float8Quantizer(torch.ones(1, device=device), history[0, 1:2], E4M3)
    for values, expected in (([1.0, -2.0], 2.0), ([0.5, 0.5], 2.0), ([float("nan"), 3.0], 3.0)):
        quantizer(torch.tensor([values], device=device))
        assert history[0].tolist() == [0.0, expected, 0.0]
    quantizer.calibrate(torch.tensor([[1.5, -1.0]], device=device))
    assert history[0, 1].item() == 1.5
    assert not history[1:].any()


def test_the_scale_is_read_when_a_tensor_is_quantized(device):
    quantizer = delayed(device)
    x = random((2, 8), device)
    storage = quantizer(x)
    quantizer.scale.fill_(7.0)
    assert storage._scale_inv.item() == pytest.approx(1 / 20)
    check(quantizer(x), x, quantizer)


@pytest.mark.parametrize("make", QUANTIZERS)
def test_usages_of_quantizers(device, make):
    quantizer = make(device)
    quantizer.set_usage(columnwise=False)
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    quantizer.set_usage(rowwise=False, columnwise=True)
    quantizer.internal = True
    twin = quantizer.copy()
    assert type(twin) is type(quantizer) and twin.internal
    assert twin.get_usages() == {"rowwise": False, "columnwise": True}
    twin.set_usage(rowwise=True)
    assert not quantizer.rowwise_usage
    assert quantizer.is_quantizable(torch.zeros(3, 5))
    assert quantizer.supports_only_rowwise_all_gather()
    assert quantizer.is_requantization_safe() == (make is current)


def test_copies_of_delayed_quantizers_share_their_state(device):
    quantizer = delayed(device)
    quantizer.copy()(torch.full((1, 8), 5.0, device=device))
    assert quantizer.amax.item() == 5.0


def test_current_quantizers_are_values(device):
    assert current(device) == current("cpu") and hash(current(device)) == hash(current("cpu"))
    assert current(device) != current(device, E5M2)
    assert current(device) != current(device, columnwise=False)
    assert current(device) != current(device, force_pow_2_scales=True)
    assert delayed(device) != delayed(device)
    with pytest.warns(DeprecationWarning, match="use_existing_amax"):
        current(device, use_existing_amax=True)


def test_compatible_recipes(device):
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    assert delayed(device)._get_compatible_recipe() is DelayedScaling
    assert current(device)._get_compatible_recipe() is Float8CurrentScaling


@pytest.mark.parametrize("shape", [(32, 8), (5, 24), (3, 7, 8)])
def test_update_usage(device, shape):
    x = random(shape, device)
    quantizer = current(device, columnwise=False)
    storage = quantizer(x)
    storage.update_usage()
    assert storage._transpose is None
    storage.update_usage(columnwise_usage=True)
    check(storage, x, quantizer)
    storage.update_usage(rowwise_usage=False)
    assert storage._data is None and storage.get_usages() == {"rowwise": False, "columnwise": True}
    check(storage, x, quantizer)  # dequantizes the transpose
    with pytest.raises(RuntimeError, match="[Rr]owwise"):
        storage.update_usage(rowwise_usage=True)
    storage.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="rowwise data"):
        storage.update_usage(columnwise_usage=True)
    with pytest.raises(RuntimeError, match="no values"):
        storage.dequantize()


def test_a_stale_transpose_is_not_used(device):
    x = random((5, 8), device)
    storage = current(device)(x)
    buffer = storage._transpose_padded
    buffer.fill_(1)
    storage._transpose_invalid = True
    assert not storage.get_usages()["columnwise"]
    storage.update_usage(columnwise_usage=True)
    assert storage._transpose_padded is buffer
    check(storage, x, current(device))


@pytest.mark.parametrize("shape", [(16, 8), (5, 8), (2, 3, 8)])
def test_constructor_of_users(device, shape):
    storage = current(device)(random(shape, device))
    again = Float8TensorStorage(
        data=storage._data,
        fp8_scale_inv=storage._scale_inv,
        fp8_dtype=E4M3,
        fake_dtype=torch.bfloat16,
        data_transpose=storage._transpose,
        quantizer=None,
    )
    assert again.dequantize().dtype == torch.bfloat16 and again.quant == "current,e4m3"
    assert torch.equal(again._transpose, storage._transpose)
    assert torch.equal(again._transpose_padded, storage._transpose_padded)
    columnwise = Float8TensorStorage(
        data=None,
        fp8_scale_inv=storage._scale_inv,
        fp8_dtype=torch.float8_e4m3fn,
        data_transpose=storage._transpose,
    )
    assert columnwise.shape == shape
    assert torch.equal(columnwise.dequantize(), storage.dequantize())
    with pytest.raises(ValueError, match="shape"):
        Float8TensorStorage(data=None, fp8_scale_inv=storage._scale_inv, fp8_dtype=E4M3)
    with pytest.raises(RuntimeError, match="no quantizer"):
        again.quantize_(random(shape, device))
    with pytest.warns(UserWarning, match="Quantizer is being updated"):
        again.update_quantizer(current(device))
    x = random(shape, device, torch.bfloat16, seed=3)
    again.quantize_(x)
    check(again, x, current(device))


@pytest.mark.parametrize("make", QUANTIZERS)
def test_update_quantized_keeps_addresses(device, make):
    quantizer = make(device)
    storage = quantizer(random((5, 8), device))
    buffers = (storage._data, storage._transpose_padded, storage._scale_inv)
    x = random((5, 8), device, seed=2) * 4
    assert quantizer.update_quantized(x, storage) is storage
    for before, after in zip(
        buffers, (storage._data, storage._transpose_padded, storage._scale_inv)
    ):
        assert before is after
    check(storage, x, quantizer)
    assert storage.quantize_(x / 2) is storage
    check(storage, x / 2, quantizer)
    assert quantizer.quantize(x, out=storage) is storage
    check(storage, x, quantizer)


def test_update_quantized_follows_the_usages_of_the_quantizer(device):
    x = random((5, 8), device)
    quantizer = current(device, rowwise=False)
    storage = current(device, columnwise=False)(x)
    quantizer.update_quantized(2 * x, storage)
    assert storage.get_usages() == {"rowwise": False, "columnwise": True}
    check(storage, 2 * x, quantizer)
    with pytest.raises(ValueError, match="shape"):
        quantizer.update_quantized(x[:2], storage)
    with pytest.raises(ValueError, match="Float8TensorStorage"):
        quantizer.update_quantized(x, x)


@pytest.mark.parametrize("make", QUANTIZERS)
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_noop_flag(device, make, skip):
    quantizer = make(device)
    x, other = random((5, 8), device), random((5, 8), device, seed=5) * 4
    storage = make(device, columnwise=False)(x)  # the transpose is missing and gets made
    flag = torch.full((1,), skip, device=device)
    quantizer.update_quantized(other, storage, noop_flag=flag)
    assert storage.get_usages() == {"rowwise": True, "columnwise": True}
    check(storage, x if skip else other, quantizer)
    if make is delayed:
        assert quantizer.amax.item() == (0.0 if skip else other.abs().max().item())


@pytest.mark.parametrize("make", QUANTIZERS)
@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 16), (0, 8)])
@pytest.mark.parametrize("internal", [False, True])
def test_make_empty(device, make, shape, internal):
    quantizer = make(device)
    quantizer.internal = internal
    storage = quantizer.make_empty(shape, dtype=torch.bfloat16, device=device)
    assert storage.shape == shape and storage._dtype == torch.bfloat16
    assert storage.get_usages() == {"rowwise": True, "columnwise": True}
    rows = storage.shape[:-1].numel()
    assert not storage._transpose_padded[:, rows:].any()
    x = random(shape, device, torch.bfloat16)
    quantizer.update_quantized(x, storage)
    check(storage, x, quantizer)
    if not internal:
        assert quantizer.make_empty(shape, device=device, requires_grad=True).requires_grad
        return
    with pytest.raises(ValueError, match="requires_grad"):
        quantizer.make_empty(shape, device=device, requires_grad=True)


def test_make_empty_picks_a_device():
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert current("cpu").make_empty((2, 4)).device.type == expected


def test_create_tensor_from_data(device):
    quantizer = delayed(device)
    storage = quantizer(random((3, 8), device))
    again = quantizer.create_tensor_from_data(storage._data, torch.float32)
    assert torch.equal(again.dequantize(), storage.dequantize())


def test_amax_reduction_is_not_inherited_by_results(device, monkeypatch):
    x, group, calls = random((3, 8), device), object(), []

    def all_reduce(tensor, op, group):
        calls.append((op, group))
        tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    quantizer = current(device, with_amax_reduction=True, amax_reduction_group=group)
    storage = quantizer(x)
    assert calls == [(torch.distributed.ReduceOp.MAX, group)]
    half = references.current_scale(2 * x.abs().max(), "e4m3")
    assert torch.equal(storage._scale_inv.cpu(), half.reciprocal().view(1))
    assert not storage._quantizer.with_amax_reduction
    assert storage._quantizer.amax_reduction_group is None
    storage.quantize_(x)
    assert len(calls) == 1
    storage.amax_reduction_group = group  # as sharded training sets it
    storage.quantize_(x)
    assert len(calls) == 2


@pytest.mark.parametrize("make", QUANTIZERS)
@pytest.mark.parametrize("shape", [(16, 8), (5, 8)])
def test_pickle_and_deepcopy(device, make, shape):
    x = random(shape, device)
    quantizer = make(device)
    storage = quantizer(x)
    for twin in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        assert twin._data.data_ptr() != storage._data.data_ptr()
        assert twin._quantizer is not storage._quantizer
        check(twin, x, quantizer)
        twin.quantize_(2 * x)
        check(twin, 2 * x, quantizer)
    check(storage, x, quantizer)
    check(Float8TensorStorage(**storage.get_metadata()), x, quantizer)
    assert "e4m3" in repr(storage)


def test_saving_for_backward(device):
    x = random((5, 8), device)
    storage = current(device)(x)
    plain, objects = prepare_for_saving(x, storage, None)
    assert len(plain) == 5 and objects[0] is objects[2] is None
    assert objects[1]._data is None and storage._data is not None
    (tensor, restored, nothing), rest = restore_from_saved(objects, (*plain, x), True)
    assert tensor is x and nothing is None and rest == [x]
    check(restored, x, current(device))

    class Function(torch.autograd.Function):
        """Saves a quantized tensor."""

        @staticmethod
        def forward(ctx, x):
            tensors, ctx.tensor_objects = prepare_for_saving(current(device)(x), None)
            ctx.save_for_backward(*tensors)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            quantized = restore_from_func_ctx(ctx)[0]
            return dy * quantized.dequantize()

    leaf = x.clone().requires_grad_()
    Function.apply(leaf).sum().backward()
    assert torch.equal(leaf.grad, storage.dequantize())


def test_traces_into_one_graph(device):
    """A compiler may make a storage, keep it in a cache and read it in a later call."""
    quant = "current,e4m3"
    reference = current(device)(random((5, 8), device))
    cache = {}

    def step(row, col, scale_inv, first):
        if first:
            made = NOTHING._replace(row=row, col=col, scale_inv=scale_inv)
            cache["weight"] = storage_from_quantized(made, quant, torch.float32)
        entry = cache["weight"]
        assert entry.quant == quant and entry._transpose_padded is not None
        return entry._data + 1, entry._transpose + 1, entry._scale_inv + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    arguments = (reference._data, reference._transpose_padded, reference._scale_inv)
    for first in (True, False):
        row, transpose, scale_inv = compiled(*arguments, first)
        assert torch.equal(row, reference._data + 1)
        assert torch.equal(transpose, reference._transpose + 1)
        assert torch.equal(scale_inv, reference._scale_inv + 1)
    assert torch.equal(cache["weight"].dequantize(), reference.dequantize())
