# SPDX-License-Identifier: Apache-2.0
"""Triton quantize and dequantize give the bytes and scales of the reference, bit for bit."""

import pytest
import torch
from triton_support import DEVICE, ON_GPU, REASON, poison_empty, same_bytes

from transformer_engine.pytorch.backends import reference
from transformer_engine.pytorch.backends import triton as kernels

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

QUANTS = ("current,e4m3", "current,e5m2,pow2=1,eps=0.5", "delayed,e4m3", "delayed,e5m2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_empty(monkeypatch)


def check(x, quant, scale=None, slot=None, amax=None, rowwise=True, columnwise=True):
    arguments = (quant, scale, slot, amax, rowwise, columnwise, None)
    got = kernels.quantize(x, *arguments)
    want = reference.quantize(x, *arguments)
    assert [g is None for g in got] == [w is None for w in want]
    for g, w in zip(got[:2], want[:2]):
        if w is not None:
            same_bytes(g, w, quant.split(",")[1])
    for g, w in ((got.scale_inv, want.scale_inv), (got.amax, want.amax)):
        assert g.dtype == torch.float32 and g.shape == (1,)
        assert torch.equal(g, w) or (g.isnan().all() and w.isnan().all())
    return got


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(37, 50), (1, 16), (0, 32), (64, 128), (70, 200)])
def test_quantize_equals_the_reference(shape, dtype, quant):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE).to(dtype) * 3
    check(x, quant, torch.tensor([1.0, 77.0], device=DEVICE), 1)


@pytest.mark.parametrize("rowwise, columnwise", [(True, False), (False, True)])
@pytest.mark.parametrize("quant", QUANTS[:3:2])
def test_one_orientation(quant, rowwise, columnwise):
    x = torch.randn(33, 48, device=DEVICE)
    scale = torch.full((1,), 2.0, device=DEVICE)
    check(x, quant, scale, 0, None, rowwise, columnwise)


@pytest.mark.parametrize("amax", [5.0, 0.0, float("inf"), float("nan"), 1e-45])
def test_a_given_amax_is_used_and_returned(amax):
    x = torch.randn(20, 40, device=DEVICE)
    given = torch.tensor([amax], device=DEVICE)
    returned = check(x, "current,e4m3", amax=given).amax
    assert returned.data_ptr() != given.data_ptr()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(
    "specials",
    [(float("nan"),), (float("inf"), float("nan")), (-float("inf"),), (0.0, -0.0), (1e-40, -1e-45)],
)
def test_special_values(specials, quant):
    x = (
        torch.randn(18, 35, device=DEVICE)
        if abs(specials[0]) > 1
        else torch.zeros(18, 35).to(DEVICE)
    )
    x.view(-1)[::53][: len(specials)] = torch.tensor(specials, device=DEVICE)
    check(x, quant, torch.tensor([64.0], device=DEVICE), 0)


def test_a_tensor_of_nan_has_amax_zero():
    x = torch.full((17, 33), float("nan"), device=DEVICE)
    assert check(x, "current,e4m3").amax.item() == 0.0


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_every_bf16_number_is_cast_exactly(fmt):
    """All exponents, ties and NaNs in both orientations; Triton has stored garbage in one."""
    bits = torch.arange(-32768, 32768, device=DEVICE).to(torch.int16)
    x = bits[torch.randperm(65536, device=DEVICE)].view(torch.bfloat16).view(256, 256)
    check(x, f"delayed,{fmt}", torch.ones(1, device=DEVICE), 0)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_of_every_code(fmt, dtype):
    data = torch.arange(256, device=DEVICE).to(torch.uint8).view(4, 64)
    scale_inv = torch.tensor([0.3], device=DEVICE)
    quant = f"current,{fmt}"
    got = kernels.dequantize(data, scale_inv, None, quant, False, dtype)
    want = reference.dequantize(data, scale_inv, None, quant, False, dtype)
    assert got.dtype == dtype
    if ON_GPU:
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    else:  # the interpreter reads NaN codes as numbers
        finite = want.isfinite()
        torch.testing.assert_close(got[finite], want[finite], rtol=0, atol=0)
    assert kernels.dequantize(data[:0], scale_inv, None, quant, False, dtype).shape == (0, 64)


@pytest.mark.skipif(not ON_GPU, reason="needs 15 GB of GPU memory and 2^31 elements")
def test_more_than_two_to_the_31_elements():
    free, _ = torch.cuda.mem_get_info()
    if free < 20e9:
        pytest.skip(f"{free / 1e9:.0f} GB of GPU memory are free, 20 GB are needed.")
    rows, columns = 65552, 32784
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-40:] = torch.randn(40, columns, device=DEVICE)
    got = kernels.quantize(x, QUANTS[0], None, None, None, True, True, None)
    part = reference.quantize(x[-48:], QUANTS[0], None, None, None, True, True, None)
    assert torch.equal(got.amax, part.amax) and torch.equal(got.scale_inv, part.scale_inv)
    assert torch.equal(got.row[-48:], part.row) and torch.equal(got.col[:, -48:], part.col)
    assert not got.row[:-48].any()


@pytest.mark.parametrize("quant", QUANTS[:3:2])
def test_results_are_reproducible(quant):
    x = torch.randn(130, 260, device=DEVICE)
    scale = torch.full((1,), 9.0, device=DEVICE)
    first, second = (kernels.quantize(x, quant, scale, 0, None, True, True, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second) if a is not None)
