# SPDX-License-Identifier: Apache-2.0
"""FP8 arithmetic against tables built from the definition of the formats."""

import pytest
import torch

import references
from transformer_engine.pytorch.formats import fp8
from transformer_engine.pytorch.formats.spec import QuantSpec, decode_quant

FORMATS = ["e4m3", "e5m2"]
INF, NAN = float("inf"), float("nan")
FLOAT32_MAX = torch.finfo(torch.float32).max

pytestmark = pytest.mark.usefixtures("poison_empty")


def all_values(dtype):
    """Every number of a 16-bit dtype, NaNs and infinities included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def hard_float32_values(fmt):
    """fp32 values around every rounding boundary of a format, and others that go wrong easily."""
    table = references.fp8_table(fmt)
    finite = table[table.isfinite()].unique()
    ties = ((finite[1:] + finite[:-1]) / 2).float()
    edges = torch.cat([finite.float(), ties])
    neighbours = [torch.nextafter(edges, torch.full_like(edges, bound)) for bound in (-INF, INF)]
    special = [0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1e-38, FLOAT32_MAX, -FLOAT32_MAX]
    special += [448.0, 463.9, 464.0, 464.1, 480.0, 57344.0, 61439.0, 61440.0, 65536.0]
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    values = [edges, *neighbours, torch.tensor(special), bits.view(torch.float32)]
    return torch.cat(values)


def assert_same_codes(actual, expected, fmt):
    """Equal bytes; a NaN code of either sign stands for NaN."""
    nan = references.fp8_table(fmt)[expected.long()].isnan()
    actual_nan = references.fp8_table(fmt)[actual.long()].isnan()
    assert torch.equal(actual_nan, nan)
    assert torch.equal(actual[~nan], expected[~nan])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("may_branch", [True, False])
def test_decoding_every_code(device, fmt, may_branch, monkeypatch):
    if not may_branch:
        monkeypatch.setattr(fp8, "_may_look_at_values", lambda x: False)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    expected = references.fp8_table(fmt).float()
    decoded = fp8.codes_to_float(codes, fmt).cpu()
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)
    zeros = expected == 0
    assert torch.equal(torch.signbit(decoded[zeros]), torch.signbit(expected[zeros]))
    # Without the NaN codes the CPU takes its short cut.
    finite = expected.isfinite()
    assert torch.equal(fp8.codes_to_float(codes[finite.to(device)], fmt).cpu(), expected[finite])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_operands_are_exact(device, fmt, dtype):
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(16, 16)
    expected = references.fp8_table(fmt).view(16, 16).to(device)
    for part in (slice(None), slice(0, 5)):  # a GEMM cuts padding off, so it passes slices
        actual = fp8.fp8_matmul_operand(codes[:, part], fmt, dtype)
        assert actual.dtype == dtype
        torch.testing.assert_close(
            actual.double(), expected[:, part], rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_rounding_is_to_nearest_even_and_saturates(device, fmt, source):
    dtype = getattr(torch, source)
    values = hard_float32_values(fmt) if source == "float32" else all_values(dtype)
    expected, _ = references.fp8_round(values, fmt)
    actual = fp8.cast_to_fp8(values.to(device), torch.ones(1, device=device), fmt)
    assert actual.dtype == torch.uint8
    assert_same_codes(actual.cpu(), expected, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale", [0.37, 298.666656, 3e-5])
def test_the_scaled_product_is_rounded_to_fp32_first(device, fmt, source, scale):
    dtype = getattr(torch, source)
    values = hard_float32_values(fmt) if source == "float32" else all_values(dtype)
    expected, _, scale = references.quantized(values, fmt, scale)
    before = values.to(device)
    actual = fp8.cast_to_fp8(before, scale.view(1).to(device), fmt)
    assert_same_codes(actual.cpu(), expected, fmt)
    torch.testing.assert_close(before.cpu(), values, rtol=0, atol=0, equal_nan=True)


def test_cast_keeps_the_shape_of_any_input(device):
    one = torch.ones(1, device=device)
    for shape in ((0, 4), (4, 0), (3,), (2, 3, 4)):
        assert fp8.cast_to_fp8(torch.zeros(shape, device=device), one, "e4m3").shape == shape


# Hand-checked: amax, scale, scale rounded to a power of two, reciprocal of the former.
SCALES_E4M3 = [
    (0.0, 1.0, 1.0, 1.0),
    (1e-45, 3.40282347e38, 1.70141183e38, 2.93873588e-39),
    (1.5, 298.666656, 256.0, 0.00334821432),
    (3.0, 149.333328, 128.0, 0.00669642864),
    (448.0, 1.0, 1.0, 1.0),
    (449.0, 0.997772813, 0.5, 1.00223219),
    (1e38, 4.48000025e-36, 3.00926554e-36, 2.23214276e35),
    (INF, 1.0, 1.0, 1.0),
    (NAN, 1.0, 1.0, 1.0),
]


@pytest.mark.parametrize("amax, plain, pow2, inverse", SCALES_E4M3)
def test_scale_from_amax_by_hand(device, amax, plain, pow2, inverse):
    amax = torch.tensor([amax], device=device)
    scale = fp8.scale_from_amax(amax, "e4m3")
    assert torch.equal(scale.cpu(), torch.tensor([plain]))
    assert torch.equal(scale.reciprocal().cpu(), torch.tensor([inverse]))
    assert torch.equal(fp8.scale_from_amax(amax, "e4m3", pow2=True).cpu(), torch.tensor([pow2]))


@pytest.mark.parametrize("fmt", FORMATS)
def test_scale_is_the_correctly_rounded_quotient(device, fmt):
    generator = torch.Generator().manual_seed(1)
    amax = torch.rand(10_000, generator=generator) * 10 ** torch.empty(10_000).uniform_(
        -20, 20, generator=generator
    )
    scale = fp8.scale_from_amax(amax.to(device), fmt).cpu()
    assert torch.equal(scale, (references.FP8_MAX[fmt] / amax.double()).float())
    assert torch.equal(
        fp8.scale_from_amax(amax.to(device), fmt, pow2=True).cpu(),
        torch.exp2(torch.floor(torch.log2(scale.double()))).float(),
    )


def test_scale_options(device):
    amax = torch.tensor([0.0, 1e-3, 2.0, NAN], device=device)
    scale = fp8.scale_from_amax(amax, "e4m3", eps=1.0)
    assert scale.tolist() == [448.0, 448.0, 224.0, 1.0]
    tiny = torch.tensor([1e-40], device=device)
    assert fp8.scale_from_amax(tiny, "e4m3", value_for_inf=7.0).item() == 7.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("may_branch", [True, False])
def test_amax_ignores_nan(device, dtype, may_branch, monkeypatch):
    if not may_branch:
        monkeypatch.setattr(fp8, "_may_look_at_values", lambda x: False)
    for values, expected in (
        ([1.0, -3.0, 2.0], 3.0),
        ([1.0, 3.0, -2.0], 3.0),
        ([NAN, -3.0, 2.0], 3.0),
        ([NAN, NAN, NAN], 0.0),
        ([1.0, -INF, NAN], INF),
        ([INF, 1.0, 1.0], INF),
        ([-0.0, 0.0, -0.0], 0.0),
        ([], 0.0),
    ):
        amax = fp8.amax_of(torch.tensor(values, dtype=dtype, device=device))
        assert amax.dtype == torch.float32 and amax.shape == (1,)
        assert amax.item() == expected
        assert not torch.signbit(amax).item()


@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 48])
@pytest.mark.parametrize("columns", [1, 5, 8, 24])
def test_transpose_pads_with_zero_bytes(device, rows, columns):
    data = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device)
    transpose = fp8.transpose_bytes(data)
    length = (rows + 15) // 16 * 16
    assert transpose.shape == (columns, length) and transpose.is_contiguous()
    assert torch.equal(transpose[:, :rows], data.t())
    assert not transpose[:, rows:].any()
    if rows:
        assert transpose.data_ptr() != data.data_ptr()


def test_transpose_of_any_strides_and_offsets(device):
    data = torch.randint(0, 256, (40, 32), dtype=torch.uint8, device=device)
    assert torch.equal(fp8.transpose_bytes(data[:, 8:24])[:, :40], data[:, 8:24].t())
    assert torch.equal(fp8.transpose_bytes(data.t())[:, :32], data)
    shifted = data.view(-1)[3 : 3 + 16 * 24].view(16, 24)
    assert torch.equal(fp8.transpose_bytes(shifted), shifted.t())


def test_spec_strings():
    assert QuantSpec("current", "e4m3").encode() == "current,e4m3"
    assert QuantSpec("delayed", "e5m2").encode() == "delayed,e5m2"
    for spec in (QuantSpec("delayed", "e4m3"), QuantSpec("current", "e5m2", True, 1e-7)):
        assert decode_quant(spec.encode()) == spec
    assert decode_quant("") is None
    assert decode_quant("current,e4m3") is decode_quant("current,e4m3")


@pytest.mark.parametrize(
    "fields, word",
    [
        (("later", "e4m3"), "later"),
        (("current", "e3m4"), "e3m4"),
        (("delayed", "e4m3", True), "pow2"),
        (("delayed", "e4m3", False, 0.5), "eps"),
    ],
)
def test_spec_rejects_what_has_no_meaning(fields, word):
    with pytest.raises(ValueError, match=word):
        QuantSpec(*fields)
