# SPDX-License-Identifier: Apache-2.0
"""Quantizer, storage and tensor of MXFP8, against a model in plain Python."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import block_references
import numpy
import pytest
import torch
from tensor_support import E4M3, E5M2, random, same_bytes

from transformer_engine.common.recipe import MXFP8BlockScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import MXFP8Quantizer, MXFP8Tensor, MXFP8TensorStorage

pytestmark = pytest.mark.usefixtures("poison_empty")
FORMAT = {E4M3: "e4m3", E5M2: "e5m2"}
USAGES = [(True, True), (True, False), (False, True)]


def up(value, multiple):
    return -(-value // multiple) * multiple


def in_gemm_order(scales):
    """Scales [R, C] where the GEMM reads them, one after the other by the formula."""
    rows, columns = scales.shape
    out = numpy.zeros(rows * columns, dtype=scales.dtype)
    for i, j in numpy.ndindex(rows, columns):
        tile = (i // 128) * (columns // 4) + j // 4
        out[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4] = scales[i, j]
    return out


def check_scales(actual, expected, shape, swizzled, columnwise):
    """Zero-padded, and in the order that the flag says."""
    padded = numpy.zeros(shape, dtype=numpy.uint8)
    padded[: expected.shape[0], : expected.shape[1]] = expected
    assert actual.shape == shape and actual.dtype == torch.uint8
    if swizzled:
        padded = in_gemm_order(padded.T if columnwise else padded).reshape(shape)
    numpy.testing.assert_array_equal(actual.cpu().numpy(), padded)


def check(tensor, x, quantizer):
    """The tensor holds what the model in plain Python makes of ``x``."""
    fmt, square = FORMAT[quantizer.dtype], quantizer.with_2d_quantization
    swizzled = tensor._with_gemm_swizzled_scales
    matrix = x.cpu().reshape(-1, x.shape[-1])
    (rows, columns), values = matrix.shape, None
    if tensor._rowwise_data is not None:
        row = block_references.mxfp8(matrix, fmt, square)
        assert tensor._rowwise_data.shape == x.shape
        codes = tensor._rowwise_data.cpu().reshape(rows, columns).numpy()
        numpy.testing.assert_array_equal(codes, row.codes)
        shape = (up(rows, 128), up(columns // 32, 4))
        check_scales(tensor._rowwise_scale_inv, row.scales, shape, swizzled, False)
        values = row.values
    if tensor._columnwise_data is not None:
        col = block_references.mxfp8(matrix.t().contiguous(), fmt, square)
        assert tensor._columnwise_data.shape == x.shape
        codes = tensor._columnwise_data.cpu().reshape(rows, columns).numpy()
        numpy.testing.assert_array_equal(codes, col.codes.T)
        shape = (up(rows // 32, 4), up(columns, 128))
        check_scales(tensor._columnwise_scale_inv, col.scales.T, shape, swizzled, True)
        values = col.values.T if values is None else values
    expected = torch.from_numpy(numpy.ascontiguousarray(values)).float().to(x.dtype)
    assert torch.equal(tensor.dequantize().cpu(), expected.view(x.shape))


@pytest.mark.parametrize("shape", [(96, 160), (2, 16, 64), (160, 32)])
@pytest.mark.parametrize("rowwise, columnwise", USAGES)
@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("square", [False, True])
def test_quantize(device, shape, rowwise, columnwise, internal, swizzled, square):
    x = random(shape, device)
    quantizer = MXFP8Quantizer(
        E4M3, rowwise=rowwise, columnwise=columnwise, with_2d_quantization=square
    )
    quantizer.internal, quantizer.optimize_for_gemm = internal, swizzled
    tensor = quantizer(x)
    assert type(tensor) is (MXFP8TensorStorage if internal else MXFP8Tensor)
    assert tensor.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
    assert tensor.shape == x.shape and tensor._fp8_dtype == E4M3
    assert tensor._with_gemm_swizzled_scales == swizzled
    check(tensor, x, quantizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
def test_dtypes(device, dtype, fp8_dtype):
    x = random((64, 64), device, dtype)
    check(MXFP8Quantizer(fp8_dtype)(x), x, MXFP8Quantizer(fp8_dtype))


def test_square_blocks_have_equal_bytes(device):
    tensor = MXFP8Quantizer(E4M3, with_2d_quantization=True)(random((64, 96), device))
    assert torch.equal(tensor._rowwise_data, tensor._columnwise_data)


def test_usages_are_only_dropped(device):
    x = random((64, 64), device)
    tensor = MXFP8Quantizer(E4M3)(x)
    tensor.update_usage(rowwise_usage=False)
    assert tensor._rowwise_data is None and tensor._rowwise_scale_inv is None
    check(tensor, x, MXFP8Quantizer(E4M3))
    with pytest.raises(RuntimeError, match="Rowwise usage of this MXFP8Tensor"):
        tensor.update_usage(rowwise_usage=True)
    tensor = MXFP8Quantizer(E4M3, columnwise=False)(x)
    with pytest.raises(RuntimeError, match="Columnwise usage of this MXFP8Tensor"):
        tensor.update_usage(columnwise_usage=True)
    tensor.update_usage(rowwise_usage=False)
    with pytest.raises(RuntimeError, match="no values"):
        tensor.dequantize()


@pytest.mark.parametrize(
    "shape, message",
    [
        ((32, 40), "last dimension is 40, which is no multiple of 32. Pad it to 64"),
        ((3, 8, 32), "before the last one is 24, which is no multiple of 32. Pad it to 32"),
        ((32,), "before the last one is 1"),
    ],
)
def test_shapes_that_do_not_fit(device, shape, message):
    quantizer = MXFP8Quantizer(E4M3)
    assert not quantizer.is_quantizable(torch.zeros(shape))
    with pytest.raises(ValueError, match=message):
        quantizer(torch.zeros(shape, device=device))
    with pytest.raises(ValueError, match=message):
        quantizer.make_empty(shape, device=device)
    with pytest.raises(ValueError, match="no 8-bit"):
        MXFP8Quantizer(DType.kFloat4E2M1)


def test_empty(device):
    tensor = MXFP8Quantizer(E4M3)(torch.zeros(0, 64, device=device))
    assert tensor.dequantize().shape == (0, 64) and tensor._rowwise_data.shape == (0, 64)


@pytest.mark.parametrize("rowwise, columnwise", USAGES)
@pytest.mark.parametrize("swizzled", [False, True])
def test_constructors_of_users(device, rowwise, columnwise, swizzled):
    x = random((2, 32, 64), device)
    quantizer = MXFP8Quantizer(E4M3, rowwise=rowwise, columnwise=columnwise)
    quantizer.optimize_for_gemm = swizzled
    made = quantizer(x)
    args = (
        made._rowwise_data,
        made._rowwise_scale_inv,
        made._columnwise_data,
        made._columnwise_scale_inv,
        E4M3,
        None,
        swizzled,
    )
    storage = MXFP8TensorStorage(*args, fake_dtype=torch.bfloat16)
    assert storage.shape == x.shape and storage._with_gemm_swizzled_scales == swizzled
    check(storage, x, quantizer)
    assert same_bytes(MXFP8Tensor(**made.get_metadata()), made)
    assert same_bytes(MXFP8TensorStorage(**made.get_metadata()), made)
    tensor = MXFP8Tensor(*args, shape=x.shape, dtype=torch.bfloat16)
    check(tensor, x, quantizer)
    tensor._with_gemm_swizzled_scales = not swizzled
    assert tensor.quant == ("mxfp8,e4m3" if swizzled else "mxfp8,e4m3,swizzled=1")


def test_quantizers_are_values():
    quantizers = [MXFP8Quantizer(E4M3), MXFP8Quantizer(E5M2)]
    quantizers += [MXFP8Quantizer(E4M3, with_2d_quantization=True), MXFP8Quantizer(E4M3)]
    quantizers[-1].optimize_for_gemm = True
    assert len(set(quantizers)) == 4
    for quantizer in quantizers:
        assert quantizer.copy() == quantizer and hash(quantizer.copy()) == hash(quantizer)
        assert quantizer._get_compatible_recipe() is MXFP8BlockScaling
        assert quantizer.is_requantization_safe()
        assert not quantizer.supports_only_rowwise_all_gather()
    assert quantizers[0].is_quantizable(torch.zeros(2, 16, 32))
    assert quantizers[0].get_scale_shape((96, 160), False) == (128, 8)
    assert quantizers[0].get_scale_shape((96, 160), True) == (4, 256)


def test_quantizing_again_keeps_the_values(device):
    x = random((64, 64), device, torch.float32)
    once = MXFP8Quantizer(E4M3)(x).dequantize()
    assert torch.equal(MXFP8Quantizer(E4M3)(once).dequantize(), once)
    assert not torch.equal(once, x)
