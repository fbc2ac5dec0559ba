# SPDX-License-Identifier: Apache-2.0
"""Quantizer, storage and tensor of NVFP4, against a model in plain Python."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import block_references
import numpy
import pytest
import torch
from tensor_support import random, same_bytes
from test_mxfp8_tensor import USAGES, check_scales, up

from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import NVFP4Quantizer, NVFP4Tensor, NVFP4TensorStorage

pytestmark = pytest.mark.usefixtures("poison_empty")
RHT = {"with_rht": True, "with_post_rht_amax": True}
OPTIONS = {
    "plain": {},
    "2d": {"with_2d_quantization": True},
    "rht": RHT,
    "rht_no_signs": {**RHT, "with_random_sign_mask": False},
    "row_scaled": {"row_scaled_nvfp4": True},
    "4over6": {"nvfp4_use_4over6": True},
    "4over6_256_mse": {
        "nvfp4_use_4over6": True,
        "nvfp4_e4m3_max": 256,
        "nvfp4_4over6_err_mode": "mse",
    },
}


def unpacked(data):
    """Codes [R, C] of bytes [R, C / 2], the even one in the low half."""
    data = data.cpu().numpy()
    codes = numpy.zeros((data.shape[0], 2 * data.shape[1]), dtype=numpy.uint8)
    codes[:, 0::2], codes[:, 1::2] = data & 15, data >> 4
    return codes


def model(matrix, quantizer):
    """Codes, scales and values of one orientation, and its global amax."""
    amax = block_references.amax(block_references.fp32(matrix))
    if quantizer.row_scaled_nvfp4:
        amax = numpy.array([block_references.amax(row) for row in block_references.fp32(matrix)])
    square = quantizer.with_2d_quantization
    if quantizer.nvfp4_use_4over6:
        error = quantizer.nvfp4_4over6_err_mode.lower()
        made = block_references.four_over_six(matrix, error, quantizer.nvfp4_e4m3_max, amax, square)
    else:
        made = block_references.nvfp4(matrix, amax, square)
    return made, numpy.asarray(amax, dtype=numpy.float32).reshape(-1)


def transformed(matrix, quantizer):
    """The transpose, Hadamard-transformed and rounded to bf16; and the matrix."""
    signs = block_references.hadamard(0xD7E8 if quantizer.with_random_sign_mask else 0)
    blocks = matrix.t().double().reshape(matrix.shape[1], -1, 16) @ signs
    return blocks.reshape(matrix.shape[1], -1).bfloat16(), signs


def check(tensor, x, quantizer):
    """The tensor holds what the model in plain Python makes of ``x``."""
    swizzled = tensor._with_gemm_swizzled_scales
    matrix = x.cpu().reshape(-1, x.shape[-1])
    (rows, columns), values = matrix.shape, None
    if tensor._rowwise_data is not None:
        row, amax = model(matrix, quantizer)
        assert tensor._rowwise_data.shape == (*x.shape[:-1], columns // 2)
        codes = unpacked(tensor._rowwise_data.reshape(rows, columns // 2))
        numpy.testing.assert_array_equal(codes, row.codes)
        shape = (up(rows, 128), up(columns // 16, 4))
        check_scales(tensor._rowwise_scale_inv, row.scales, shape, swizzled, False)
        numpy.testing.assert_array_equal(tensor._amax_rowwise.cpu().numpy(), amax)
        values = row.values
    if tensor._columnwise_data is not None:
        source, signs = matrix.t().contiguous(), None
        if quantizer.with_rht:
            source, signs = transformed(matrix, quantizer)
        col, amax = model(source, quantizer)
        assert tensor._columnwise_data.shape == (columns, rows // 2)
        numpy.testing.assert_array_equal(unpacked(tensor._columnwise_data), col.codes)
        shape = (up(columns, 128), up(rows // 16, 4))
        check_scales(tensor._columnwise_scale_inv, col.scales, shape, swizzled, False)
        numpy.testing.assert_array_equal(tensor._amax_columnwise.cpu().numpy(), amax)
        if values is None and signs is not None:
            back = torch.from_numpy(col.values).reshape(columns, -1, 16) @ signs.t()
            back = back.reshape(columns, rows).t().view(x.shape)
            # fp32 sums of 16 numbers, then one rounding
            torch.testing.assert_close(
                tensor.dequantize(dtype=torch.float32).cpu(), back.float(), rtol=1e-5, atol=1e-5
            )
            return
        values = col.values.T if values is None else values
    expected = torch.from_numpy(numpy.ascontiguousarray(values)).float().to(x.dtype)
    assert torch.equal(tensor.dequantize().cpu(), expected.view(x.shape))


# Row-scaled tensors always have rowwise data.
CASES = [(n, *u) for n in OPTIONS for u in USAGES if u[0] or n != "row_scaled"]


@pytest.mark.parametrize("name, rowwise, columnwise", CASES)
@pytest.mark.parametrize("shape", [(48, 80), (2, 8, 32)])
@pytest.mark.parametrize("swizzled", [False, True])
def test_quantize(device, name, rowwise, columnwise, shape, swizzled):
    x = random(shape, device)
    quantizer = NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise, **OPTIONS[name])
    quantizer.optimize_for_gemm = swizzled
    for internal, kind in ((True, NVFP4TensorStorage), (False, NVFP4Tensor)):
        quantizer.internal = internal
        tensor = quantizer(x)
        assert type(tensor) is kind
        assert tensor.get_usages() == {"rowwise": rowwise, "columnwise": columnwise}
        assert tensor.shape == x.shape and tensor._fp4_dtype == DType.kFloat4E2M1
        assert tensor._with_gemm_swizzled_scales == swizzled
        assert tensor._row_scaled_nvfp4 == quantizer.row_scaled_nvfp4
        assert tensor._nvfp4_use_4over6 == quantizer.nvfp4_use_4over6
        assert tensor._nvfp4_e4m3_max == quantizer.nvfp4_e4m3_max
        check(tensor, x, quantizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes(device, dtype):
    x = random((32, 48), device, dtype)
    check(NVFP4Quantizer()(x), x, NVFP4Quantizer())


def test_odd_batches(device):
    """Columnwise data are of the matrix, however many dimensions precede the last one."""
    for shape in ((16, 1, 32), (3, 16, 32), (2, 2, 4, 32)):
        x = random(shape, device)
        check(NVFP4Quantizer()(x), x, NVFP4Quantizer())


def test_empty(device):
    tensor = NVFP4Quantizer()(torch.zeros(0, 64, device=device))
    assert tensor.dequantize().shape == (0, 64) and tensor._rowwise_data.shape == (0, 32)


@pytest.mark.parametrize("shape", [(48, 80), (2, 8, 32)])
@pytest.mark.parametrize("swizzled", [False, True])
def test_columnwise_data_from_rowwise_data(device, shape, swizzled):
    x = random(shape, device)
    quantizer = NVFP4Quantizer(columnwise=False, with_2d_quantization=True)
    quantizer.optimize_for_gemm = swizzled
    tensor = quantizer(x)
    tensor.update_usage(columnwise_usage=True)
    quantizer.set_usage(columnwise=True)
    assert same_bytes(tensor, quantizer(x))
    tensor.update_usage(rowwise_usage=False)
    assert tensor._rowwise_data is tensor._rowwise_scale_inv is tensor._amax_rowwise is None
    check(tensor, x, quantizer)
    with pytest.raises(RuntimeError, match="no rowwise data"):
        tensor.update_usage(rowwise_usage=True)
    with pytest.raises(RuntimeError, match="with_2d_quantization"):
        NVFP4Quantizer(columnwise=False)(x).update_usage(columnwise_usage=True)


def test_columnwise_data_alone_are_close_to_the_input(device):
    """The Hadamard transform is undone."""
    x = random((64, 48), device)
    tensor = NVFP4Quantizer(rowwise=False, **RHT)(x)
    error = (tensor.dequantize(dtype=torch.float32) - x.float()).norm() / x.float().norm()
    assert 0.02 < error.item() < 0.15
    assert tensor.dequantize().dtype == torch.bfloat16


def test_stochastic_rounding_follows_the_generator(device):
    x = random((64, 64), device)
    quantizer = NVFP4Quantizer(stochastic_rounding=True)
    assert not quantizer.is_requantization_safe() and NVFP4Quantizer().is_requantization_safe()
    torch.manual_seed(1)
    first, second = quantizer(x), quantizer(x)
    torch.manual_seed(1)
    assert same_bytes(first, quantizer(x)) and not same_bytes(first, second)
    torch.manual_seed(1)
    made = quantizer.make_empty(x.shape, dtype=x.dtype, device=device)
    assert same_bytes(quantizer.update_quantized(x, made), first)
    # Without bias: the mean over many draws is nearer to x than rounding to nearest is.
    draws = torch.stack([quantizer(x).dequantize(dtype=torch.float32) for _ in range(64)])
    nearest = NVFP4Quantizer()(x).dequantize(dtype=torch.float32)
    bias = (draws.mean(0) - x.float()).norm() / (nearest - x.float()).norm()
    assert bias.item() < 0.35


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_constructors_of_users(device, options):
    x = random((32, 64), device)
    quantizer = NVFP4Quantizer(**options)
    made = quantizer(x)
    args = (
        made._rowwise_data,
        made._rowwise_scale_inv,
        made._columnwise_data,
        made._columnwise_scale_inv,
        made._amax_rowwise,
        made._amax_columnwise,
        DType.kFloat4E2M1,
        quantizer,
        False,
    )
    flags = {
        "row_scaled_nvfp4": quantizer.row_scaled_nvfp4,
        "nvfp4_use_4over6": quantizer.nvfp4_use_4over6,
        "nvfp4_e4m3_max": quantizer.nvfp4_e4m3_max,
    }
    storage = NVFP4TensorStorage(*args, fake_dtype=torch.bfloat16, **flags)
    assert storage.quant == made.quant and storage.shape == x.shape
    check(storage, x, quantizer)
    check(NVFP4Tensor(*args, shape=x.shape, dtype=torch.bfloat16, **flags), x, quantizer)
    assert same_bytes(NVFP4Tensor(**made.get_metadata()), made)
    columnwise = (None, None, *args[2:4], None, *args[5:])
    storage = NVFP4TensorStorage(*columnwise, fake_dtype=torch.bfloat16, **flags)
    assert storage.shape == x.shape
    check(storage, x, quantizer)


def test_quantizers_are_values():
    quantizers = [NVFP4Quantizer(**options) for options in OPTIONS.values()]
    quantizers += [NVFP4Quantizer(stochastic_rounding=True), NVFP4Quantizer(rowwise=False)]
    assert len(set(quantizers)) == len(quantizers)
    for quantizer in quantizers:
        assert quantizer.copy() == quantizer and hash(quantizer.copy()) == hash(quantizer)
        assert quantizer._get_compatible_recipe() is NVFP4BlockScaling
        assert not quantizer.supports_only_rowwise_all_gather()
        fits = not quantizer.row_scaled_nvfp4
        assert quantizer.is_quantizable(torch.zeros(2, 8, 32)) == fits
        assert not quantizer.is_quantizable(torch.zeros(17, 32))
    matrix = NVFP4Quantizer(**RHT).rht_matrix
    assert torch.equal(matrix.cpu().double(), block_references.hadamard(0xD7E8))
    assert NVFP4Quantizer(**RHT).rht_matrix_random_sign_mask_t == 0xD7E8
    assert NVFP4Quantizer.get_columnwise_shape((2, 3, 4)) == (4, 2, 3)
    assert NVFP4Quantizer.convert_shape_for_fp4((2, 3, 4)) == (2, 3, 2)
    assert NVFP4Quantizer.get_scale_shape((96, 160), False) == (128, 12)
    assert NVFP4Quantizer.get_scale_shape((96, 160), True) == (256, 8)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 300}, "nvfp4_e4m3_max is 300"),
        ({"nvfp4_4over6_err_mode": "max"}, "nvfp4_4over6_err_mode is 'MAX'"),
        ({"row_scaled_nvfp4": True, "with_amax_reduction": True}, "none to reduce"),
        ({"row_scaled_nvfp4": True, **RHT}, "cannot combine row_scaled with rht"),
        ({"nvfp4_use_4over6": True, "stochastic_rounding": True}, "four_over_six with stochastic"),
        ({"fp4_dtype": DType.kFloat8E4M3}, "NVFP4 is DType.kFloat4E2M1"),
    ],
)
def test_settings_that_exclude_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        NVFP4Quantizer(**options)
    assert NVFP4Quantizer(nvfp4_e4m3_max=256).nvfp4_e4m3_max == 448


def test_tensors_that_do_not_fit(device):
    x = random((32, 64), device)
    with pytest.raises(ValueError, match="torch.bfloat16 tensors, not torch.float32"):
        NVFP4Quantizer(**RHT)(x.float())
    NVFP4Quantizer(columnwise=False, **RHT)(x.float())  # transforms nothing
    with pytest.raises(ValueError, match="with_post_rht_amax"):
        NVFP4Quantizer(with_rht=True)(x)
    with pytest.raises(ValueError, match="rowwise usage"):
        NVFP4Quantizer(row_scaled_nvfp4=True, rowwise=False)(x)
    with pytest.raises(ValueError, match="last dimension is 24, which is no multiple of 16"):
        NVFP4Quantizer()(x[:, :24])
    with pytest.raises(ValueError, match="before the last one is 20"):
        NVFP4Quantizer()(x[:20])


@pytest.mark.parametrize("options", [{}, {"with_2d_quantization": True}, RHT])
def test_one_amax_for_a_group(device, monkeypatch, options):
    """Each part of a tensor is quantized as it would be within the whole."""
    x, group = random((64, 64), device), object()
    whole = NVFP4Quantizer(**options)(x)
    reductions = []

    def all_reduce(tensor, op, group):
        reductions.append((op, group))
        both = torch.maximum(whole._amax_rowwise, whole._amax_columnwise)
        wanted = [whole._amax_rowwise, whole._amax_columnwise][len(reductions) - 1]
        assert tensor <= both
        tensor.copy_(wanted)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    quantizer = NVFP4Quantizer(with_amax_reduction=True, amax_reduction_group=group, **options)
    part = quantizer(x[:32])
    assert set(reductions) == {(torch.distributed.ReduceOp.MAX, group)}
    assert len(reductions) == (2 if options == RHT else 1)
    assert not part._quantizer.with_amax_reduction and part._quantizer.amax_reduction_group is None
    assert same_bytes(part, torch.split(whole, 32)[0])
    reductions.clear()
    part.quantize_(x[:32])
    assert not reductions
    part.amax_reduction_group = group  # as sharded training sets it
    part.quantize_(x[:32])
    assert reductions and same_bytes(part, torch.split(whole, 32)[0])
