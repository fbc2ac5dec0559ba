# SPDX-License-Identifier: Apache-2.0
"""The plain-torch quantization leaves against an independent quantizer in float64."""

import math

import pytest
import torch

import references
from transformer_engine.pytorch.backends import reference
from transformer_engine.pytorch.formats.layout import Quantized

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("poison_empty")


def random(shape, dtype=torch.float32, device="cpu", seed=0, std=3.0):
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * std).to(dtype).to(device)


def check(x, quant, outputs, scale=None):
    """Bytes, transpose and inverse scale of ``quantize(x, quant, ..., True, True, None)``."""
    _, fmt, *options = quant.split(",")
    options = dict(option.split("=") for option in options)
    pow2, eps = options.get("pow2") == "1", float(options.get("eps", 0))
    assert isinstance(outputs, Quantized)
    assert outputs.col_scale_inv is None and outputs.col_amax is None
    row, col, scale_inv, amax = (outputs[i].cpu() for i in (0, 1, 2, 4))
    x = x.cpu()
    codes, values, used = references.quantized(x, fmt, scale, pow2, eps)
    nan = values.isnan()
    assert row.dtype == torch.uint8 and row.shape == x.shape
    assert torch.equal(row[~nan], codes[~nan])
    assert torch.equal(references.fp8_table(fmt)[row.long()].isnan(), nan)
    rows = x.shape[0]
    assert col.shape == (x.shape[1], (rows + 15) // 16 * 16)
    assert torch.equal(col[:, :rows], row.t()) and not col[:, rows:].any()
    assert scale_inv.dtype == amax.dtype == torch.float32
    assert torch.equal(scale_inv, (1.0 / used.double()).float().view(1))
    known = x.float().abs().nan_to_num(0.0, posinf=INF)
    assert amax.shape == (1,) and amax.item() == (known.max().item() if x.numel() else 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 32), (7, 24), (33, 5), (1, 8), (0, 16), (3, 1)])
@pytest.mark.parametrize("quant", ["current,e4m3", "current,e5m2,pow2=1", "current,e4m3,eps=100.0"])
def test_current_scaling(device, dtype, shape, quant):
    x = random(shape, dtype, device)
    check(x, quant, reference.quantize(x, quant, None, 0, None, True, True, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_delayed_scaling_uses_its_slot(device, dtype, fmt):
    x = random((19, 16), dtype, device)
    scales = torch.tensor([1.0, 47.3, 1e4], device=device)
    for slot in range(3):
        outputs = reference.quantize(x, f"delayed,{fmt}", scales, slot, None, True, True, None)
        check(x, f"delayed,{fmt}", outputs, scale=scales[slot].cpu())


@pytest.mark.parametrize("quant", ["current,e4m3", "current,e5m2"])
@pytest.mark.parametrize(
    "special", [[NAN, 1.0, -2.0, 0.0], [INF, 1.0, -2.0, 600.0], [-INF, NAN, 0.0, -0.0], [0.0] * 4]
)
def test_values_that_are_not_numbers(device, quant, special):
    x = torch.tensor([special], device=device)
    check(x, quant, reference.quantize(x, quant, None, 0, None, True, True, None))


def test_amax_may_be_given(device):
    x = random((4, 8), device=device)
    given = torch.tensor([896.0], device=device)
    row, _, scale_inv, _, amax, _ = reference.quantize(
        x, "current,e4m3", None, 0, given, True, False, None
    )
    assert scale_inv.item() == 2.0 and amax.item() == 896.0
    assert amax.data_ptr() != given.data_ptr()
    assert torch.equal(row.cpu(), references.quantized(x.cpu(), "e4m3", 0.5)[0])


@pytest.mark.parametrize("rowwise, columnwise", [(True, False), (False, True), (False, False)])
def test_only_the_layouts_asked_for(device, rowwise, columnwise):
    x = random((5, 8), device=device)
    both = reference.quantize(x, "current,e4m3", None, 0, None, True, True, None)
    some = reference.quantize(x, "current,e4m3", None, 0, None, rowwise, columnwise, None)
    present = (rowwise, columnwise, True, False, True, False)
    for present, expected, actual in zip(present, both, some, strict=True):
        assert torch.equal(expected, actual) if present else actual is None


def test_outputs_are_fresh(device):
    # A matrix of one column is contiguous in both orders, which invites returning a view.
    x = random((16, 1), device=device)
    before = x.clone()
    scales = torch.ones(2, device=device)
    outputs = reference.quantize(x, "delayed,e4m3", scales, 1, None, True, True, None)
    made = [t for t in outputs if t is not None]
    pointers = {t.untyped_storage().data_ptr() for t in (x, scales, *made)}
    assert len(made) == 4 and len(pointers) == 6 and torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale_inv", [1.0, 0.00334821432, 1e-39, 3e35])
def test_dequantize_rounds_once(device, dtype, fmt, scale_inv):
    data = torch.arange(256, dtype=torch.uint8, device=device).view(8, 32)
    scale_inv = torch.tensor([scale_inv])
    product = (references.fp8_table(fmt) * scale_inv.double()).float()
    expected = product.to(dtype).view(8, 32)
    for quant in (f"current,{fmt}", f"delayed,{fmt}"):
        actual = reference.dequantize(data, scale_inv.to(device), None, quant, False, dtype)
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    none = reference.dequantize(data[:0], scale_inv.to(device), None, quant, False, dtype)
    assert none.shape == (0, 32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(300, 24), (1, 7), (0, 5)])
def test_bias_grad(device, dtype, shape):
    dy = random(shape, dtype, device)
    actual = reference.bias_grad(dy)
    assert actual.dtype == dtype and actual.shape == shape[1:]
    torch.testing.assert_close(actual, dy.double().sum(0).to(dtype), rtol=1e-2, atol=1e-4)
    # Terms that 16-bit accumulation would lose.
    ones = torch.ones((4097, 2), dtype=dtype, device=device)
    assert torch.equal(reference.bias_grad(ones), ones.double().sum(0).to(dtype))


def test_record_amax(device):
    history = torch.tensor([[1.0, 2.0, 3.0], [9.0, 9.0, 9.0]], device=device)
    amaxes = [torch.full((1,), value, device=device) for value in (5.0, 1.0, NAN, 7.0)]
    reference.record_amax_(history, amaxes, [2, 0, 1, 2])
    assert history.tolist() == [[1.0, 2.0, 7.0], [9.0, 9.0, 9.0]]


def updated(history, scale, fp8_max, margin, algo):
    """The update rule in Python, one column at a time."""
    columns, scales = [], []
    for column, old in zip(zip(*history), scale):
        last = column[0]
        if last == 0:
            columns.append(column)
            scales.append(old)
            continue
        numbers = [value for value in (*column[1:], last) if not math.isnan(value)]
        amax = last if algo == "most_recent" else max(numbers, default=NAN)
        columns.append((0.0, *column[2:], last) if len(column) > 1 else (0.0,))
        if math.isfinite(amax) and amax > 0:
            quotient = torch.tensor(fp8_max * 2.0**-margin / amax, dtype=torch.float64).float()
            old = min(quotient.item(), torch.finfo(torch.float32).max)
        scales.append(old)
    return list(map(list, zip(*columns))), scales


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("margin", [0.0, 3.0])
def test_delayed_scaling_update(device, algo, length, margin):
    # Columns: ordinary, nothing seen, infinite, NaN, overflowing quotient, older value larger.
    history = torch.tensor(
        [
            [3.0, 0.0, INF, NAN, 1e-45, 1.0],
            [1.0, 5.0, 1.0, 2.0, 0.0, 2.0],
            [0.0, 6.0, 1.0, NAN, 0.0, 8.0],
            [2.0, 7.0, 1.0, 1.0, 0.0, 4.0],
        ]
    )[:length]
    scale = torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    rows = [[float(f"{value:.9g}") for value in row] for row in history.tolist()]
    expected_history, expected_scale = updated(rows, scale.tolist(), 448.0, margin, algo)
    history, scale = history.to(device), scale.to(device)
    pointers = history.data_ptr(), scale.data_ptr()
    reference.delayed_scaling_update_(history, scale, 448.0, margin, algo)
    assert pointers == (history.data_ptr(), scale.data_ptr())
    torch.testing.assert_close(
        history.cpu(), torch.tensor(expected_history), rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(scale.cpu(), torch.tensor(expected_scale), rtol=0, atol=0)


def test_delayed_scaling_update_names_an_unknown_rule(device):
    with pytest.raises(ValueError, match="median"):
        reference.delayed_scaling_update_(
            torch.zeros(2, 1, device=device), torch.ones(1, device=device), 448.0, 0.0, "median"
        )
