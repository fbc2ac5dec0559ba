# SPDX-License-Identifier: Apache-2.0
"""Quantizer, storage and tensor of FP8 with block scales, against a model in plain Python."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import block_references
import numpy
import pytest
import torch
from tensor_support import E4M3, E5M2, random, same_bytes

from transformer_engine.common.recipe import Float8BlockScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
)

pytestmark = pytest.mark.usefixtures("poison_empty")
FORMAT = {E4M3: "e4m3", E5M2: "e5m2"}
USAGES = [(True, True), (True, False), (False, True)]


def up(value, multiple):
    return -(-value // multiple) * multiple


def quantizer_of(fp8_dtype=E4M3, rowwise=True, columnwise=True, **options):
    return Float8BlockQuantizer(fp8_dtype, rowwise=rowwise, columnwise=columnwise, **options)


def corner(scales, rows, columns):
    """The valid part of a scale buffer; the rest is zero."""
    scales = scales.cpu()
    assert not scales[rows:].any() and not scales[:, columns:].any()
    return scales[:rows, :columns].numpy()


def check(tensor, x, quantizer):
    """The tensor holds what the model in plain Python makes of ``x``."""
    square = quantizer.block_scaling_dim == 2
    options = {
        "pow2": quantizer.force_pow_2_scales,
        "eps": quantizer.amax_epsilon,
        "square": square,
    }
    fmt = FORMAT[quantizer.dtype]
    matrix = x.cpu().reshape(-1, x.shape[-1])
    (rows, columns), values = matrix.shape, None
    if tensor._rowwise_data is not None:
        row = block_references.block(matrix, fmt, **options)
        assert tensor._rowwise_data.shape == x.shape
        numpy.testing.assert_array_equal(
            tensor._rowwise_data.cpu().reshape(matrix.shape).numpy(), row.codes
        )
        grid = row.scales[::128] if square else row.scales.T
        shape = (up(rows, 128) // 128, up(up(columns, 128) // 128, 4))
        shape = shape if square else (up(columns, 128) // 128, up(rows, 4))
        assert tensor._rowwise_scale_inv.shape == shape
        numpy.testing.assert_array_equal(corner(tensor._rowwise_scale_inv, *grid.shape), grid)
        values = row.values
    if tensor._columnwise_data is not None:
        col = block_references.block(matrix.t().contiguous(), fmt, **options)
        assert tensor._columnwise_data.shape == (columns, *x.shape[:-1])
        padded = tensor._columnwise_padded.cpu()
        assert padded.shape == (columns, up(rows, 128)) and not padded[:, rows:].any()
        numpy.testing.assert_array_equal(padded[:, :rows].numpy(), col.codes)
        assert torch.equal(tensor._columnwise_data.cpu().reshape(columns, rows), padded[:, :rows])
        grid = col.scales[::128] if square else col.scales.T
        shape = (up(columns, 128) // 128, up(up(rows, 128) // 128, 4))
        shape = shape if square else (up(rows, 128) // 128, up(columns, 4))
        assert tensor._columnwise_scale_inv.shape == shape
        numpy.testing.assert_array_equal(corner(tensor._columnwise_scale_inv, *grid.shape), grid)
        values = col.values.T if values is None else values
    expected = torch.from_numpy(numpy.ascontiguousarray(values)).float().to(x.dtype)
    assert torch.equal(tensor.dequantize().cpu(), expected.view(x.shape))


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("shape", [(130, 136), (3, 5, 24), (7,), (256, 128)])
@pytest.mark.parametrize("rowwise, columnwise", USAGES)
@pytest.mark.parametrize("internal", [False, True])
def test_quantize(device, dim, shape, rowwise, columnwise, internal):
    x = random(shape, device)
    quantizer = quantizer_of(rowwise=rowwise, columnwise=columnwise, block_scaling_dim=dim)
    quantizer.internal = internal
    tensor = quantizer(x)
    assert type(tensor) is (Float8BlockwiseQTensorStorage if internal else Float8BlockwiseQTensor)
    assert tensor.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
    assert tensor.shape == x.shape == tensor.size() and tensor.size(-1) == shape[-1]
    assert tensor._dtype == x.dtype and tensor._fp8_dtype == E4M3
    assert tensor._is_2D_scaled == (dim == 2) and tensor.device.type == device
    check(tensor, x, quantizer)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options", [{"force_pow_2_scales": False}, {"amax_epsilon": 100.0}, {"fp8_dtype": E5M2}]
)
def test_options(device, dim, dtype, options):
    x = random((132, 130), device, dtype)
    quantizer = quantizer_of(block_scaling_dim=dim, **options)
    check(quantizer(x), x, quantizer)


def test_empty(device):
    for shape in ((0, 128), (2, 0, 64)):
        tensor = quantizer_of()(torch.zeros(shape, device=device))
        assert tensor.dequantize().shape == shape and tensor._columnwise_data.shape[0] == shape[-1]


@pytest.mark.parametrize("shape", [(130, 136), (3, 5, 24)])
def test_columnwise_data_from_rowwise_data(device, shape):
    x = random(shape, device)
    quantizer = quantizer_of(columnwise=False, block_scaling_dim=2)
    tensor = quantizer(x)
    tensor.update_usage(columnwise_usage=True)
    assert same_bytes(tensor, quantizer_of(block_scaling_dim=2)(x))
    tensor.update_usage(rowwise_usage=False)
    assert tensor._rowwise_data is None and tensor._rowwise_scale_inv is None
    check(tensor, x, quantizer)
    with pytest.raises(RuntimeError, match="no rowwise data"):
        tensor.update_usage(rowwise_usage=True)
    with pytest.raises(RuntimeError, match="Keep one"):
        tensor.update_usage(columnwise_usage=False)
    check(tensor, x, quantizer)


def test_rows_of_blocks_do_not_serve_columns(device):
    x = random((130, 136), device)
    tensor = quantizer_of(columnwise=False, block_scaling_dim=1)(x)
    with pytest.raises(RuntimeError, match="rows of 128"):
        tensor.update_usage(columnwise_usage=True)
    check(tensor, x, quantizer_of(block_scaling_dim=1))


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("shape", [(130, 136), (3, 5, 24)])
@pytest.mark.parametrize("rowwise, columnwise", USAGES)
def test_constructors_of_users(device, dim, shape, rowwise, columnwise):
    x = random(shape, device)
    quantizer = quantizer_of(
        block_scaling_dim=dim, rowwise=rowwise, columnwise=columnwise, force_pow_2_scales=False
    )
    made = quantizer(x)
    args = (
        made._rowwise_data,
        made._rowwise_scale_inv,
        made._columnwise_data,
        made._columnwise_scale_inv,
        E4M3,
        None,
        dim == 2,
    )
    storage = Float8BlockwiseQTensorStorage(*args, fake_dtype=torch.bfloat16)
    check(storage, x, quantizer)
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    tensor = Float8BlockwiseQTensor(
        shape=x.shape,
        dtype=torch.bfloat16,
        fp8_dtype=E4M3,
        is_2D_scaled=dim == 2,
        quantizer=quantizer,
        requires_grad=True,
        **dict(zip(names, args)),
    )
    check(tensor.detach(), x, quantizer)
    assert tensor.requires_grad and tensor.quant == quantizer.quant
    again = Float8BlockwiseQTensor(**made.get_metadata())
    assert same_bytes(again, made) and again._quantizer == made._quantizer
    check(Float8BlockwiseQTensorStorage(**made.get_metadata()), x, quantizer)
    tensor.detach().quantize_(2 * x)
    check(tensor.detach(), 2 * x, quantizer)
    with pytest.raises(ValueError, match="has no shape"):
        Float8BlockwiseQTensorStorage(None, None, None, None, E4M3, None, False)


def test_quantizers_are_values():
    options = [{"block_scaling_dim": 1}, {"amax_epsilon": 1.0}, {"force_pow_2_scales": False}]
    options += [{"fp8_dtype": E5M2}, {"rowwise": False}, {}]
    quantizers = [quantizer_of(**option) for option in options]
    assert len(set(quantizers)) == len(quantizers)
    for quantizer in quantizers:
        assert quantizer.copy() == quantizer and hash(quantizer.copy()) == hash(quantizer)
        assert quantizer._get_compatible_recipe() is Float8BlockScaling
        assert quantizer.is_requantization_safe()
        assert not quantizer.supports_only_rowwise_all_gather()
        assert quantizer.block_len == 128
    twin = quantizers[-1].copy()
    twin.set_usage(columnwise=False)
    assert twin != quantizers[-1] and quantizers[-1].columnwise_usage


def test_what_is_quantizable():
    quantizer = quantizer_of()
    for shape, expected in (
        ((128, 256), True),
        ((2, 64, 128), True),
        ((130, 128), False),
        ((128, 130), False),
        ((128,), False),
    ):
        assert quantizer.is_quantizable(torch.zeros(shape)) == expected
    assert quantizer.get_scale_shape((96, 160), False) == (1, 4)
    assert quantizer.get_scale_shape((96, 160), True) == (2, 4)
    assert quantizer_of(block_scaling_dim=1).get_scale_shape((96, 160), False) == (2, 96)


def test_wrong_settings():
    with pytest.raises(ValueError, match="block_scaling_dim is 3"):
        quantizer_of(block_scaling_dim=3)
    with pytest.raises(ValueError, match="no 8-bit"):
        quantizer_of(DType.kBFloat16)
    with pytest.raises(ValueError, match="without dimensions"):
        quantizer_of()(torch.tensor(1.0))
    with pytest.raises(ValueError, match="int32"):
        quantizer_of()(torch.zeros(2, 2, dtype=torch.int32))
