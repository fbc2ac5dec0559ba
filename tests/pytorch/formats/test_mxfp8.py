# SPDX-License-Identifier: Apache-2.0
"""MXFP8 against a model that quantizes one block after the other in plain Python."""

import block_checks
import block_references
import pytest
import torch

from transformer_engine.pytorch.formats.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from transformer_engine.pytorch.formats.spec import QuantSpec
from transformer_engine.pytorch.formats.swizzle import (
    unswizzle_columnwise_scales,
    unswizzle_scales,
)

pytestmark = pytest.mark.usefixtures("poison_empty")


def check(x, spec, device, rowwise=True, columnwise=True):
    """Quantize and compare every byte; returns what was made."""
    rows, columns = x.shape
    before = x.clone().to(device)
    made = quantize_mxfp8(before, spec, rowwise, columnwise)
    torch.testing.assert_close(before.cpu(), x, rtol=0, atol=0, equal_nan=True)
    block_checks.assert_layout(made, spec, rows, columns, rowwise, columnwise)
    nan = block_checks.nan_codes(spec.fmt)
    if rowwise:
        expected = block_references.mxfp8(x, spec.fmt, spec.dim == 2)
        block_checks.assert_bytes(made.row, expected.codes, nan)
        scales = unswizzle_scales(made.scale_inv) if spec.swizzled else made.scale_inv
        block_checks.assert_padded(scales, expected.scales)
        for dtype in (torch.float32, x.dtype):
            values = dequantize_mxfp8(made.row, made.scale_inv, spec, False, dtype)
            block_checks.assert_values(values, expected.values, dtype)
    if columnwise:
        padded = block_checks.padded_transpose(x, block_checks.up(rows, 32))
        expected = block_references.mxfp8(padded, spec.fmt, spec.dim == 2)
        block_checks.assert_bytes(made.col, expected.codes.T, nan)
        assert not made.col[rows:].any()
        scales = made.col_scale_inv
        scales = unswizzle_columnwise_scales(scales) if spec.swizzled else scales
        block_checks.assert_padded(scales, expected.scales.T)
        for data in (made.col, made.col[:rows]):  # with and without the padding
            values = dequantize_mxfp8(data, made.col_scale_inv, spec, True, x.dtype)
            block_checks.assert_values(values, expected.values.T[: len(data)], x.dtype)
    return made


@pytest.mark.parametrize("kind", block_references.HARD)
@pytest.mark.parametrize("dtype", block_checks.DTYPES, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_byte(device, kind, dtype, fmt):
    x = block_references.hard_matrix(kind, 40, 96, dtype)
    check(x, QuantSpec("mxfp8", fmt), device)
    check(x, QuantSpec("mxfp8", fmt, dim=2), device)


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 129])
@pytest.mark.parametrize("columns", [32, 160])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("swizzled", [False, True])
def test_any_number_of_rows(device, rows, columns, dim, swizzled):
    x = block_references.hard_matrix("wide", rows, columns, torch.bfloat16)
    spec = QuantSpec("mxfp8", "e4m3", dim=dim, swizzled=swizzled)
    both = check(x, spec, device)
    row = check(x, spec, device, columnwise=False)
    col = check(x, spec, device, rowwise=False)
    for name in ("row", "scale_inv"):
        assert torch.equal(getattr(both, name), getattr(row, name))
    for name in ("col", "col_scale_inv"):
        assert torch.equal(getattr(both, name), getattr(col, name))


@pytest.mark.parametrize("kind", block_references.HARD)
def test_without_looking_at_values(device, kind, monkeypatch):
    block_checks.forbid_branches(monkeypatch)
    x = block_references.hard_matrix(kind, 40, 96, torch.bfloat16)
    check(x, QuantSpec("mxfp8", "e4m3"), device)
    check(x, QuantSpec("mxfp8", "e5m2", dim=2), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_16_bit_number(device, dtype, fmt):
    # Sorted, so that blocks hold numbers of one magnitude, and shuffled, so that they do not.
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    shuffled = bits[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    for part in (bits, shuffled):
        x = part.to(torch.int16).view(dtype).view(512, 128)
        check(x, QuantSpec("mxfp8", fmt), device, columnwise=False)


def test_a_row_by_hand(device):
    x = torch.linspace(-1, 1, 32).bfloat16()[None].to(device)
    made = quantize_mxfp8(x, QuantSpec("mxfp8", "e4m3"), True, False)
    assert made.scale_inv[0].tolist() == [119, 0, 0, 0]
    assert bytes(made.row[0].tolist()).hex(" ") == (
        "f8 f7 f6 f5 f4 f3 f2 f1 f0 ed eb e9 e6 e2 dc d0 "
        "50 5c 62 66 69 6b 6d 70 71 72 73 74 75 76 77 78"
    )


def test_infinity_and_nan_by_hand(device):
    x = torch.ones(1, 96, device=device)
    x[0, 3] = float("inf")
    x[0, 40] = float("nan")
    x[0, 64:] = 0.0
    made = quantize_mxfp8(x, QuantSpec("mxfp8", "e4m3"), True, False)
    assert made.scale_inv[0].tolist() == [254, 119, 0, 0]
    row = made.row[0].tolist()
    assert row[3] == 0x7E and row[4] == 0  # 448, and 1 * 2^-127
    assert row[40] in (0x7F, 0xFF) and row[41] == 0x78  # 256
    assert not any(row[64:])


@pytest.mark.parametrize("fmt, step", [("e4m3", 2.0**-3), ("e5m2", 2.0**-2)])
@pytest.mark.parametrize("columnwise", [False, True])
def test_values_come_back_to_within_half_a_step(device, fmt, step, columnwise):
    x = block_references.hard_matrix("wide", 64, 128, torch.bfloat16).to(device)
    spec = QuantSpec("mxfp8", fmt)
    made = quantize_mxfp8(x, spec, True, True)
    data = (made.col, made.col_scale_inv) if columnwise else (made.row, made.scale_inv)
    values = dequantize_mxfp8(*data, spec, columnwise, torch.float32).double()
    x = x.double()
    blocks = x.view(2, 32, 128).abs().amax(1) if columnwise else x.view(64, 4, 32).abs().amax(2)
    amax = blocks.repeat_interleave(32, 0 if columnwise else 1)
    # The least of a block: half the smallest subnormal number, and its largest value becomes more
    # than half of the largest of the format.
    smallest = {"e4m3": 2.0**-9 / 224, "e5m2": 2.0**-16 / 28672}[fmt]
    bound = torch.maximum(x.abs() * step / 2, amax * smallest / 2)
    assert bool(((values - x).abs() <= bound).all())


def test_strided_inputs(device):
    x = block_references.hard_matrix("normal", 64, 128, torch.bfloat16).to(device)
    spec = QuantSpec("mxfp8", "e4m3")
    for part in (x.t(), x[:, 32:96], x[::2], x[:1].expand(3, 128), x.t()[:1]):
        strided = quantize_mxfp8(part, spec, True, True)
        for ours, theirs in zip(
            strided, quantize_mxfp8(part.clone().contiguous(), spec, True, True)
        ):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_float64_counts_as_rounded_to_fp32(device):
    x = block_references.hard_matrix("normal", 8, 64, torch.float32).to(device)
    spec = QuantSpec("mxfp8", "e4m3")
    a, b = quantize_mxfp8(x.double(), spec, True, False), quantize_mxfp8(x, spec, True, False)
    assert torch.equal(a.row, b.row) and torch.equal(a.scale_inv, b.scale_inv)


def test_reserved_scales_are_decoded(device):
    data = torch.full((3, 32), 0x38, dtype=torch.uint8, device=device)  # 1.0
    scales = torch.zeros(128, 4, dtype=torch.uint8, device=device)
    scales[1, 0], scales[2, 0] = 254, 255
    values = dequantize_mxfp8(data, scales, QuantSpec("mxfp8", "e4m3"), False, torch.float32)
    assert values[:2, 0].tolist() == [2.0**-127, 2.0**127] and bool(values[2].isnan().all())


def test_nothing_waits_for_the_device():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    x = block_references.hard_matrix("nan", 40, 96, torch.bfloat16).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for dim in (1, 2):
            spec = QuantSpec("mxfp8", "e4m3", dim=dim, swizzled=True)
            made = quantize_mxfp8(x, spec, True, True)
            dequantize_mxfp8(made.row, made.scale_inv, spec, False, torch.bfloat16)
            dequantize_mxfp8(made.col, made.col_scale_inv, spec, True, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
