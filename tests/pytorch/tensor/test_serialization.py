# SPDX-License-Identifier: Apache-2.0
"""Pickles, torch.save, distributed checkpoints: bytes come back as they were."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import io
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensor_support import E4M3, QUANTIZERS, addresses, buffers, random, same_bytes

from transformer_engine.pytorch import float8_tensor as legacy
from transformer_engine.pytorch import tensor as te_tensor
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    QuantizedTensorStorage,
)
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    _make_float8_blockwise_tensor_in_reduce_ex,
)
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8Tensor,
    _make_float8_tensor_in_reduce_ex,
)
from transformer_engine.pytorch.tensor.hybrid_tensor import (
    _make_hybrid_quantized_tensor_in_reduce_ex,
)
from transformer_engine.pytorch.tensor.identity_tensor import _make_identity_tensor_in_reduce_ex
from transformer_engine.pytorch.tensor.mxfp8_tensor import _make_mxfp8_tensor_in_reduce_ex
from transformer_engine.pytorch.tensor.nvfp4_tensor import _make_nvfp4_tensor_in_reduce_ex

SHAPE = (64, 96)
MAKERS = {
    "current": _make_float8_tensor_in_reduce_ex,
    "delayed": _make_float8_tensor_in_reduce_ex,
    "block": _make_float8_blockwise_tensor_in_reduce_ex,
    "mxfp8": _make_mxfp8_tensor_in_reduce_ex,
    "nvfp4": _make_nvfp4_tensor_in_reduce_ex,
    "hybrid": _make_hybrid_quantized_tensor_in_reduce_ex,
    "identity": _make_identity_tensor_in_reduce_ex,
}
every_quantizer = pytest.mark.parametrize("name", QUANTIZERS)


def saved_and_loaded(value, **options):
    """What comes back from a file, read without running any code in it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def made(name, device, internal=False, swizzled=False, seed=0):
    quantizer = QUANTIZERS[name](device)
    quantizer.internal, quantizer.optimize_for_gemm = internal, swizzled
    return quantizer(random(SHAPE, device, seed=seed))


def check_same(tensor, other):
    """Same bytes, class and metadata, and a quantizer that does the same."""
    assert type(tensor) is type(other) and same_bytes(tensor, other)
    assert tensor.quant == other.quant and tensor._dtype == other._dtype
    assert tensor._shape == other._shape
    assert torch.equal(tensor.dequantize(), other.dequantize())
    x = random(SHAPE, other.device, seed=7)
    assert same_bytes(tensor.clone().quantize_(x), other.clone().quantize_(x))


@every_quantizer
@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
def test_files(device, name, internal, swizzled):
    tensor = made(name, device, internal, swizzled)
    check_same(saved_and_loaded({"weight": tensor})["weight"], tensor)
    check_same(pickle.loads(pickle.dumps(tensor)), tensor)
    check_same(saved_and_loaded(tensor, map_location="cpu"), _on_cpu(tensor))


def _on_cpu(tensor):
    if isinstance(tensor, QuantizedTensorStorage) and not isinstance(tensor, torch.Tensor):
        return tensor._map_buffers(_on_cpu)
    return tensor.cpu()


@every_quantizer
def test_usages_and_views_in_files(device, name):
    tensor = made(name, device)
    if name != "identity":
        tensor.update_usage(rowwise_usage=False)
    for variant in (tensor, tensor.view(2, 32, 96), tensor.view(-1)):
        loaded = saved_and_loaded(variant)
        assert same_bytes(loaded, variant) and loaded.shape == variant.shape
        assert loaded.get_usages() == variant.get_usages()
        assert torch.equal(loaded.dequantize(), variant.dequantize())
        assert torch.equal(loaded.view(-1), tensor.view(-1))


@every_quantizer
def test_parameters_in_files(device, name):
    parameter = torch.nn.Parameter(made(name, device))
    parameter.mark = 5
    loaded = saved_and_loaded(parameter)
    assert isinstance(loaded, torch.nn.Parameter) and loaded.requires_grad and loaded.mark == 5
    check_same(loaded.detach(), parameter.detach())
    frozen = torch.nn.Parameter(made(name, device), requires_grad=False)
    assert not saved_and_loaded(frozen).requires_grad
    module = torch.nn.Module()
    module.weight = parameter
    parameter.owner = parameter  # a cycle
    twin = pickle.loads(pickle.dumps(module))
    assert twin.weight.owner is twin.weight and same_bytes(twin.weight, parameter)
    # What a state dict holds is no parameter and leaves such attributes behind.
    parameter.hook = lambda: None
    check_same(saved_and_loaded(module.state_dict())["weight"], parameter.detach())


@every_quantizer
def test_quantizers_in_files(device, name):
    quantizer = QUANTIZERS[name](device)
    quantizer.set_usage(rowwise="row_scaled" in name, columnwise=True)
    quantizer.internal = quantizer.optimize_for_gemm = True
    loaded = saved_and_loaded(quantizer)
    assert type(loaded) is type(quantizer) and repr(loaded) == repr(quantizer)
    assert loaded == quantizer or name == "delayed"
    assert loaded.internal and loaded.get_usages() == quantizer.get_usages()
    x = random(SHAPE, device)
    assert same_bytes(loaded(x), quantizer(x))


def test_process_groups_are_not_pickled():
    def group():
        """Stands for what can not be pickled."""

    for quantizer in (
        Float8CurrentScalingQuantizer(E4M3, with_amax_reduction=True, amax_reduction_group=group),
        NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group),
    ):
        loaded = pickle.loads(pickle.dumps(quantizer))
        assert loaded.with_amax_reduction and loaded.amax_reduction_group is None
        assert quantizer.copy().amax_reduction_group is group
        assert loaded == quantizer


def test_state_of_delayed_scaling_goes_along(device):
    scale, amax = torch.full((1,), 20.0, device=device), torch.zeros(1, device=device)
    tensor = Float8Quantizer(scale, amax, E4M3)(random(SHAPE, device))
    loaded = saved_and_loaded(tensor)
    assert torch.equal(loaded._quantizer.amax, amax) and amax.item() > 1
    assert loaded._quantizer.scale is not scale and loaded._quantizer.scale.item() == 20.0


@every_quantizer
def test_names_that_pickles_call(name):
    maker = MAKERS[next(kind for kind in MAKERS if name.startswith(kind))]
    tensor = made(name, "cpu")
    function, arguments = tensor.__reduce_ex__(4)
    assert function is maker and same_bytes(function(*arguments), tensor)


def test_pickles_of_the_first_version_stay_readable():
    """Written out by hand: this is what files hold."""
    data = torch.arange(32 * 32, dtype=torch.int32).remainder(120).to(torch.uint8).view(32, 32)
    scales = torch.zeros(128, 4, dtype=torch.uint8)
    scales[:32, 0] = 127
    quantizer = MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)
    state = {
        "version": 1,
        "shape": (32, 32),
        "device": "cpu",
        "requires_grad": False,
        "buffers": {
            "_rowwise_data": data,
            "_columnwise_padded": None,
            "_rowwise_scale_inv": scales,
            "_columnwise_scale_inv": None,
        },
        "options": {
            "_dtype": torch.bfloat16,
            "_quantizer": quantizer,
            "quant": "mxfp8,e4m3",
            "_buffer_shape": None,
        },
    }
    tensor = _make_mxfp8_tensor_in_reduce_ex(state)
    assert type(tensor) is MXFP8Tensor and tensor.dtype == torch.bfloat16
    assert torch.equal(tensor.dequantize(), data.view(torch.float8_e4m3fn).bfloat16())
    assert tensor.__reduce_ex__(4)[1][0].keys() == state.keys()
    with pytest.raises(RuntimeError, match="version 2"):
        _make_mxfp8_tensor_in_reduce_ex({**state, "version": 2})
    quantizer_state = {
        "settings": {"fp8_dtype": DType.kFloat8E4M3, "with_2d_quantization": False},
        "usages": {"rowwise": True, "columnwise": False},
        "internal": False,
        "optimize_for_gemm": False,
    }
    make, arguments = quantizer.__reduce_ex__(4)
    assert arguments == (MXFP8Quantizer, quantizer_state)
    assert make(*arguments) == quantizer


def test_subclasses_must_say_how_they_are_pickled():
    class Own(MXFP8Tensor):  # pylint: disable=too-many-ancestors
        """Of a user."""

    with pytest.raises(TypeError, match="__reduce_ex__"):
        pickle.dumps(Own(**made("mxfp8", "cpu").get_metadata()))


def test_legacy_name():
    assert legacy.Float8Tensor is te_tensor.Float8Tensor is Float8Tensor


# ------------------------------------------------------------------------- distributed checkpoints


def quietly(function, *args, **kwargs):
    """``torch.distributed.checkpoint`` warns that there is one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


@every_quantizer
@pytest.mark.parametrize("swizzled", [False, True])
def test_distributed_checkpoints(device, tmp_path, name, swizzled):
    """Bytes are neither dequantized nor quantized again."""
    tensor = made(name, device, swizzled=swizzled)
    target = made(name, device, swizzled=swizzled, seed=1)
    quietly(dcp.save, {"weight": tensor}, checkpoint_id=tmp_path)
    before = addresses(target)
    quietly(dcp.load, {"weight": target}, checkpoint_id=tmp_path)
    assert same_bytes(tensor, target) and target.quant == tensor.quant
    assert addresses(target) == before
    differently = made(name, device, swizzled=not swizzled, seed=1)
    quietly(dcp.load, {"weight": differently}, checkpoint_id=tmp_path)
    assert same_bytes(differently, made(name, device, swizzled=not swizzled))
    values = torch.zeros(SHAPE, dtype=torch.bfloat16, device=device)
    quietly(dcp.load, {"weight": values}, checkpoint_id=tmp_path)
    assert torch.equal(values, tensor.dequantize())


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_asynchronous_checkpoints(device, tmp_path, name):
    """What a checkpoint holds is what was there when it was requested."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        tensor, other = made(name, device), made(name, device, seed=1)
        expected = buffers(tensor.clone())
        future = quietly(dcp.async_save, {"weight": tensor}, checkpoint_id=tmp_path / "saved")
        tensor.zero_()
        future.result()
        quietly(dcp.load, {"weight": other}, checkpoint_id=tmp_path / "saved")
    finally:
        torch.distributed.destroy_process_group()
    for actual, wanted in zip(buffers(other), expected):
        assert (actual is None) == (wanted is None)
        assert actual is None or torch.equal(actual, wanted)
