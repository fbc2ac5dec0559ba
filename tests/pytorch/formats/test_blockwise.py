# SPDX-License-Identifier: Apache-2.0
"""FP8 with scales of 128 values, against a model that quantizes block by block in plain Python."""

import block_checks
import block_references
import numpy
import pytest
import torch

from transformer_engine.pytorch.formats.blockwise import dequantize_block, quantize_block
from transformer_engine.pytorch.formats.spec import QuantSpec

SPECS = [
    QuantSpec("block", "e4m3"),
    QuantSpec("block", "e5m2", pow2=True),
    QuantSpec("block", "e4m3", pow2=True, dim=2),
    QuantSpec("block", "e5m2", eps=0.75, dim=2),
    QuantSpec("block", "e4m3", pow2=True, eps=1e-3),
]

pytestmark = pytest.mark.usefixtures("poison_empty")


def expected_of(x, spec):
    """The reference's quantization along rows; its scales as they are stored."""
    made = block_references.block(x, spec.fmt, spec.pow2, spec.eps, spec.dim == 2)
    stored = made.scales[::128] if spec.dim == 2 else made.scales.T
    return made, stored


def check(x, spec, device, rowwise=True, columnwise=True):
    """Quantize and compare every byte and scale; returns what was made."""
    rows, columns = x.shape
    before = x.clone().to(device)
    made = quantize_block(before, spec, rowwise, columnwise)
    torch.testing.assert_close(before.cpu(), x, rtol=0, atol=0, equal_nan=True)
    block_checks.assert_layout(made, spec, rows, columns, rowwise, columnwise)
    sides = []
    if rowwise:
        sides.append((x, made.row, made.scale_inv))
    if columnwise:
        padded = block_checks.padded_transpose(x, block_checks.up(rows, 128))
        sides.append((padded, made.col, made.col_scale_inv))
        assert not made.col[:, rows:].any()
    for values, data, scale_inv in sides:
        expected, scales = expected_of(values, spec)
        block_checks.assert_bytes(data, expected.codes, block_checks.nan_codes(spec.fmt))
        block_checks.assert_padded(scale_inv, scales)
        for dtype in (torch.float32, x.dtype):
            decoded = dequantize_block(data, scale_inv, spec, dtype)
            block_checks.assert_values(decoded, expected.values, dtype)
    return made


@pytest.mark.parametrize("kind", block_references.HARD)
@pytest.mark.parametrize("dtype", block_checks.DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=QuantSpec.encode)
def test_every_byte_and_scale(device, kind, dtype, spec):
    # Each orientation of 1D blocks, and the two of square ones, which may not reach over an edge.
    check(block_references.hard_matrix(kind, 36, 132, dtype), spec, device)


@pytest.mark.parametrize("rows", [0, 1, 4, 127, 128, 130])
@pytest.mark.parametrize("columns", [16, 128, 200])
@pytest.mark.parametrize("dim", [1, 2])
def test_any_shape(device, rows, columns, dim):
    x = block_references.hard_matrix("wide", rows, columns, torch.bfloat16)
    spec = QuantSpec("block", "e4m3", dim=dim)
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
    for spec in SPECS[:3]:
        check(block_references.hard_matrix(kind, 36, 132, torch.bfloat16), spec, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_16_bit_number(device, dtype, fmt):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    shuffled = bits[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
    for part in (bits, shuffled):
        x = part.to(torch.int16).view(dtype).view(256, 256)
        check(x, QuantSpec("block", fmt), device, columnwise=False)


def test_columns_are_rows_of_the_transpose(device):
    x = block_references.hard_matrix("wide", 256, 384, torch.bfloat16).to(device)
    for dim in (1, 2):
        spec = QuantSpec("block", "e4m3", dim=dim)
        made = quantize_block(x, spec, True, True)
        turned = quantize_block(x.t(), spec, True, True)
        assert torch.equal(made.col, turned.row) and torch.equal(made.row, turned.col)
        assert torch.equal(made.col_scale_inv, turned.scale_inv)
        assert torch.equal(made.scale_inv, turned.col_scale_inv)
        assert torch.equal(made.col, made.row.t()) == (dim == 2)


def test_zeros_have_scale_one(device):
    for spec in SPECS:
        made = quantize_block(torch.zeros(128, 256, device=device), spec, True, True)
        assert not made.row.any() and not made.col.any()
        # eps raises an amax of zero as well, to which a scale of fp8_max / eps belongs.
        value = 1.0
        if spec.eps:
            scale = block_references.block_scale(0.0, spec.fmt, spec.pow2, spec.eps, 1.0)
            value = float(numpy.float32(1.0) / scale)
        assert set(made.scale_inv[:, :2].flatten().tolist()) == {value}


def test_the_largest_bf16_by_hand(device):
    largest = torch.finfo(torch.bfloat16).max
    x = torch.full((1, 128), largest, device=device).bfloat16()
    made = quantize_block(x, QuantSpec("block", "e4m3", pow2=True), True, False)
    # floor(log2(448 / 3.39e38)) = -120
    assert made.scale_inv[0].tolist() == [2.0**120, 0, 0, 0]


@pytest.mark.parametrize("dtype", block_checks.DTYPES, ids=str)
def test_what_replaces_an_overflowing_scale(device, dtype):
    x = torch.zeros(1, 128, dtype=torch.float32)
    x[0, 0] = 1e-45 if dtype == torch.float32 else torch.finfo(dtype).smallest_normal
    if dtype == torch.bfloat16:
        x[0, 0] = 2.0**-133  # its smallest subnormal number
    made = quantize_block(x.to(dtype).to(device), QuantSpec("block", "e4m3"), True, False)
    # In fp16 nothing is small enough for that.
    scale = 448 / x[0, 0].item() if dtype == torch.float16 else torch.finfo(dtype).max
    assert made.scale_inv[0, 0].item() == float(numpy.float32(1.0) / numpy.float32(scale))


@pytest.mark.parametrize("fmt, step", [("e4m3", 2.0**-3), ("e5m2", 2.0**-2)])
@pytest.mark.parametrize("pow2", [False, True])
def test_values_come_back_to_within_half_a_step(device, fmt, step, pow2):
    x = block_references.hard_matrix("wide", 128, 256, torch.bfloat16).to(device)
    for dim in (1, 2):
        spec = QuantSpec("block", fmt, pow2=pow2, dim=dim)
        made = quantize_block(x, spec, True, True)
        values = dequantize_block(made.row, made.scale_inv, spec).double()
        turned = dequantize_block(made.col, made.col_scale_inv, spec).double().t()
        scale = made.scale_inv.t()[:128] if dim == 1 else made.scale_inv[:1, :2].expand(128, 2)
        col_scale = made.col_scale_inv if dim == 1 else scale[:1].repeat_interleave(128, 1)
        subnormal = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}[fmt]
        for back, scales in (
            (values, scale.repeat_interleave(128, 1)),
            (turned, col_scale[:1].expand(128, 256)),
        ):
            bound = torch.maximum(x.double().abs() * step / 2, scales.double() * subnormal / 2)
            # A scale and its rounded reciprocal are off by 2^-24 each.
            assert bool(((back - x.double()).abs() <= bound * (1 + 1e-5)).all())


def test_strided_inputs(device):
    x = block_references.hard_matrix("normal", 64, 128, torch.bfloat16).to(device)
    for dim in (1, 2):
        spec = QuantSpec("block", "e4m3", dim=dim)
        for part in (x.t(), x[:, 32:96], x[::2], x[:1].expand(3, 128), x.t()[:1]):
            strided = quantize_block(part, spec, True, True)
            copied = quantize_block(part.clone().contiguous(), spec, True, True)
            for ours, theirs in zip(strided, copied):
                assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_data_padded_beyond_its_scales(device):
    x = block_references.hard_matrix("normal", 4, 200, torch.bfloat16).to(device)
    for dim in (1, 2):
        spec = QuantSpec("block", "e4m3", dim=dim)
        made = quantize_block(x, spec, True, False)
        wide = torch.zeros(4, 300, dtype=torch.uint8, device=device)
        wide[:, :200] = made.row
        scale_inv = made.scale_inv if dim == 1 else made.scale_inv[:, :2]
        values = dequantize_block(wide, scale_inv, spec, torch.bfloat16)
        expected = dequantize_block(made.row, made.scale_inv, spec, torch.bfloat16)
        assert torch.equal(values[:, :200], expected) and not values[:, 200:].any()


def test_nothing_waits_for_the_device():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    x = block_references.hard_matrix("nan", 40, 96, torch.bfloat16).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for spec in SPECS:
            made = quantize_block(x, spec, True, True)
            dequantize_block(made.row, made.scale_inv, spec, torch.bfloat16)
            dequantize_block(made.col, made.col_scale_inv, spec, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
