# SPDX-License-Identifier: Apache-2.0
"""Tensors with one format per layout, and tensors that are not quantized at all."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import pytest
import torch
from tensor_support import E4M3, E5M2, addresses, buffers, random, same_bytes

from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.formats.layout import Quantized
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    MXFP8Quantizer,
    NVFP4Quantizer,
    hybrid_storage,
)

pytestmark = pytest.mark.usefixtures("poison_empty")
PARTS = {
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": NVFP4Quantizer,
    "block": lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "current": lambda: Float8CurrentScalingQuantizer(E5M2),
    "identity": IdentityQuantizer,
}
PAIRS = [("mxfp8", "nvfp4"), ("nvfp4", "mxfp8"), ("current", "block"), ("block", "current")]
PAIRS += [("identity", "mxfp8"), ("mxfp8", "identity"), ("current", "current")]


def hybrid(row, column, source="original"):
    return HybridQuantizer(
        rowwise_quantizer=PARTS[row](),
        columnwise_quantizer=PARTS[column](),
        columnwise_source=source,
    )


def part(name, x, columnwise):
    """What the quantizer alone makes of ``x`` for one layout."""
    quantizer = PARTS[name]()
    quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
    return quantizer(x)


@pytest.mark.parametrize("row, column", PAIRS)
@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("internal", [False, True])
def test_parts_are_what_their_quantizers_make(device, row, column, source, internal):
    x = random((2, 32, 64), device)
    quantizer = hybrid(row, column, source)
    quantizer.internal = internal
    tensor = quantizer(x)
    assert type(tensor) is (HybridQuantizedTensorStorage if internal else HybridQuantizedTensor)
    assert isinstance(tensor.rowwise_sub_storage, torch.Tensor) == (not internal)
    expected_row = part(row, x, False)
    origin = x if source == "original" else expected_row.dequantize()
    expected_column = part(column, origin, True)
    assert same_bytes(tensor.rowwise_sub_storage, expected_row)
    assert same_bytes(tensor.columnwise_sub_storage, expected_column)
    assert tensor.shape == x.shape and tensor._dtype == x.dtype
    assert torch.equal(tensor.dequantize(), expected_row.dequantize())
    assert type(tensor)(**tensor.get_metadata()).dequantize().equal(tensor.dequantize())
    tensor.update_usage(rowwise_usage=False)
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(tensor.dequantize(), expected_column.dequantize())
    with pytest.raises(RuntimeError, match="Rowwise usage"):
        tensor.update_usage(rowwise_usage=True)


@pytest.mark.parametrize("row, column", PAIRS)
def test_operand_buffers(device, row, column):
    x = random((64, 64), device)
    tensor = hybrid(row, column)(x)
    a, b = (part(n, x, c).operand_buffers() for n, c in ((row, False), (column, True)))
    column_scale = b.scale_inv if b.col_scale_inv is None else b.col_scale_inv
    expected = Quantized(a.row, b.col, a.scale_inv, column_scale, a.amax, b.col_amax)
    for actual, wanted in zip(tensor.operand_buffers(), expected):
        assert (actual is None) == (wanted is None)
        assert actual is None or torch.equal(actual, wanted)
    text = f"{getattr(PARTS[row](), 'quant')}|{PARTS[column]().quant}"
    assert tensor.quant == hybrid(row, column).quant == text
    if "identity" in (row, column):
        return
    storage = hybrid_storage(tensor.operand_buffers(), text, x.dtype)
    assert same_bytes(storage, tensor) and storage.quant == text
    only_column = tensor.operand_buffers()._replace(row=None)
    storage = hybrid_storage(only_column, text, x.dtype, shape=x.shape)
    assert torch.equal(storage.dequantize(), part(column, x, True).dequantize())


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("rowwise", [False, True])
def test_usages_of_hybrid_quantizers(device, source, rowwise):
    x = random((64, 64), device)
    quantizer = hybrid("mxfp8", "nvfp4", source)
    quantizer.set_usage(rowwise=rowwise, columnwise=True)
    tensor = quantizer(x)
    assert tensor.get_usages() == {"rowwise": rowwise, "columnwise": True}
    origin = x if source == "original" else part("mxfp8", x, False).dequantize()
    assert same_bytes(tensor.columnwise_sub_storage, part("nvfp4", origin, True))
    assert quantizer.rowwise_quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    assert quantizer.columnwise_quantizer.get_usages() == {"rowwise": False, "columnwise": True}


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_update(device, source, skip):
    x, y = random((64, 64), device), random((64, 64), device, seed=1)
    quantizer = hybrid("mxfp8", "nvfp4", source)
    tensor = quantizer(x)
    before = addresses(tensor)
    flag = torch.full((1,), skip, device=device)
    assert quantizer.update_quantized(y, tensor, noop_flag=flag) is tensor
    assert addresses(tensor) == before
    assert same_bytes(tensor, quantizer(x if skip else y))
    empty = quantizer.make_empty((64, 64), dtype=x.dtype, device=device)
    assert same_bytes(quantizer.update_quantized(y, empty), quantizer(y))
    columnwise = quantizer.copy()
    columnwise.set_usage(rowwise=False)
    columnwise.update_quantized(y, tensor)
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
    assert same_bytes(tensor, columnwise(y))
    with pytest.raises(ValueError, match="shape"):
        quantizer.update_quantized(y[:32], empty)


def test_properties_of_hybrid_quantizers():
    quantizer = hybrid("mxfp8", "nvfp4")
    assert quantizer._get_compatible_recipe() is CustomRecipe
    assert quantizer.is_requantization_safe()
    assert quantizer.is_quantizable(torch.zeros(32, 32))
    assert not quantizer.is_quantizable(torch.zeros(16, 16))  # MXFP8 needs 32
    assert quantizer.supports_only_rowwise_all_gather()  # columnwise NVFP4
    assert not hybrid("nvfp4", "mxfp8").supports_only_rowwise_all_gather()
    assert hybrid("current", "mxfp8").supports_only_rowwise_all_gather()
    stochastic = HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(stochastic_rounding=True),
        columnwise_quantizer=MXFP8Quantizer(E4M3),
    )
    assert not stochastic.is_requantization_safe()
    stochastic.set_usage(rowwise=False)
    assert stochastic.is_requantization_safe()
    stochastic.columnwise_source = "rowwise_dequantized"
    assert not stochastic.is_requantization_safe()


def test_hybrid_quantizers_are_values():
    quantizer = hybrid("mxfp8", "nvfp4")
    assert quantizer == hybrid("mxfp8", "nvfp4") and hash(quantizer) == hash(quantizer.copy())
    assert quantizer != hybrid("nvfp4", "mxfp8")
    assert quantizer != hybrid("mxfp8", "nvfp4", "rowwise_dequantized")
    twin = quantizer.copy()
    assert twin.rowwise_quantizer is not quantizer.rowwise_quantizer
    twin.optimize_for_gemm = True
    assert twin.rowwise_quantizer.optimize_for_gemm and twin != quantizer
    assert not quantizer.rowwise_quantizer.optimize_for_gemm
    assert "swizzled=1" in twin(torch.zeros(32, 32)).rowwise_sub_storage.quant
    twin.with_amax_reduction, twin.amax_reduction_group = True, "group"
    assert twin.columnwise_quantizer.with_amax_reduction
    assert twin.columnwise_quantizer.amax_reduction_group == "group"
    assert twin.with_amax_reduction and twin.copy().amax_reduction_group == "group"
    assert not twin._for_result().with_amax_reduction


def test_what_is_no_hybrid_quantizer():
    one = MXFP8Quantizer(E4M3)
    with pytest.raises(ValueError, match="the same object"):
        HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer=one)
    with pytest.raises(TypeError, match="columnwise_quantizer is a str"):
        HybridQuantizer(rowwise_quantizer=one, columnwise_quantizer="nvfp4")
    with pytest.raises(ValueError, match="columnwise_source is 'both'"):
        hybrid("mxfp8", "nvfp4", "both")
    with pytest.raises(ValueError, match="has no shape"):
        HybridQuantizedTensorStorage(rowwise_storage=None, columnwise_storage=None)


# ---------------------------------------------------------------------------------------- identity


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("internal", [False, True])
def test_identity(device, dtype, internal):
    x = random((3, 5), device)
    quantizer = IdentityQuantizer(dtype=dtype)
    quantizer.internal = internal
    tensor = quantizer(x)
    assert type(tensor) is (IdentityTensorStorage if internal else IdentityTensor)
    expected = x if dtype is None else x.to(dtype)
    assert tensor._hp_data.dtype == tensor.dequantize().dtype == tensor._dtype == expected.dtype
    assert torch.equal(tensor.dequantize(), expected)
    assert torch.equal(tensor.dequantize(dtype=torch.float64), expected.double())
    tensor.update_usage(rowwise_usage=False, columnwise_usage=False)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}
    assert tensor.quant == "" and tensor.operand_buffers() == Quantized(*[None] * 6)
    again = type(tensor)(**tensor.get_metadata())
    assert again._hp_data is tensor._hp_data and again.shape == x.shape


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_update_of_identity(device, skip):
    x, y = random((3, 5), device), random((3, 5), device, seed=1)
    quantizer = IdentityQuantizer()
    tensor = quantizer(x.clone())
    before = addresses(tensor)
    flag = torch.full((1,), skip, device=device)
    quantizer.update_quantized(y, tensor, noop_flag=flag)
    assert addresses(tensor) == before
    assert torch.equal(tensor.dequantize(), x if skip else y)
    empty = quantizer.make_empty((3, 5), dtype=x.dtype, device=device)
    assert torch.equal(quantizer.update_quantized(y, empty).dequantize(), y)
    assert buffers(empty)[0].dtype == x.dtype


def test_identity_quantizers():
    quantizer = IdentityQuantizer()
    assert quantizer == IdentityQuantizer() and quantizer != IdentityQuantizer(dtype=torch.half)
    assert quantizer.is_requantization_safe() and quantizer.is_quantizable(torch.zeros(3))
    assert quantizer._get_compatible_recipe() is CustomRecipe
    with pytest.raises(ValueError, match="hp_data"):
        IdentityTensorStorage(hp_data=None)
