# SPDX-License-Identifier: Apache-2.0
"""Triton quantization with block scales gives the buffers of the reference, bit for bit.

Every buffer is compared as a whole, padding included; memory is poisoned before.
"""

import pytest
import torch
from triton_support import DEVICE, ON_GPU, REASON, poison_empty, same_bytes

from transformer_engine.pytorch.backends import reference
from transformer_engine.pytorch.backends import triton as kernels

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

BLOCK = ("block,e4m3", "block,e5m2,pow2=1", "block,e4m3,dim=2,pow2=1,eps=0.5", "block,e5m2,dim=2")
MXFP8 = (
    "mxfp8,e4m3",
    "mxfp8,e5m2,swizzled=1",
    "mxfp8,e5m2,dim=2",
    "mxfp8,e4m3,dim=2,swizzled=1",
)
RHT = ("nvfp4,e2m1,rht=1", "nvfp4,e2m1,rht=1,stochastic=1,swizzled=1")
NVFP4 = (
    "nvfp4,e2m1",
    "nvfp4,e2m1,swizzled=1,stochastic=1",
    "nvfp4,e2m1,dim=2",
    "nvfp4,e2m1,dim=2,stochastic=1",
    "nvfp4,e2m1,row_scaled=1",
    "nvfp4,e2m1,four_over_six=mae,swizzled=1",
    "nvfp4,e2m1,four_over_six=mse,dim=2,e4m3_max=256",
    "nvfp4,e2m1,four_over_six=mse,row_scaled=1",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_empty(monkeypatch)


def random(shape, dtype=torch.bfloat16):
    """Values of many magnitudes, so that scales differ from row to row and column to column."""
    torch.manual_seed(sum(shape))
    magnitude = torch.exp(torch.randn(shape[0], 1) + torch.randn(1, shape[1]))
    return (torch.randn(shape) * magnitude).to(dtype).to(DEVICE)


def seed():
    return torch.tensor([0x123456789ABCDEF, 77], device=DEVICE)


def same(got, want, quant):
    """Equal buffers. FP8 codes of NaN may differ in their sign."""
    assert [g is None for g in got] == [w is None for w in want]
    for name, g, w in zip(want._fields, got, want):
        if w is None:
            continue
        assert g.dtype == w.dtype and g.shape == w.shape and g.is_contiguous(), name
        if name in ("row", "col") and not quant.startswith("nvfp4"):
            same_bytes(g, w, quant.split(",")[1])
            continue
        wrong = g != w if g.dtype == torch.uint8 else g.view(torch.int32) != w.view(torch.int32)
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} differ, first at "
            f"{wrong.nonzero()[0].tolist()}: got {g[wrong][0].item()}, want {w[wrong][0].item()}"
        )


def check(x, quant, rowwise=True, columnwise=True, amax=None):
    arguments = (quant, None, 0, amax, rowwise, columnwise, seed())
    got = kernels.quantize(x, *arguments)
    same(got, reference.quantize(x, *arguments), quant)
    return got


@pytest.mark.parametrize("quant", BLOCK + MXFP8 + NVFP4 + RHT)
@pytest.mark.parametrize("shape", [(70, 96), (1, 32), (0, 64)])
def test_quantize_equals_the_reference(shape, quant):
    check(random(shape), quant)


@pytest.mark.parametrize("quant", BLOCK + MXFP8 + NVFP4[:4] + RHT)
def test_several_blocks_in_both_directions(quant):
    check(random((140, 160)), quant)


@pytest.mark.parametrize(
    "quant, shape, orientations",
    [
        # 20 rows of tiles, 16 of which are walked together.
        (MXFP8[0], (520, 160), (True, True)),
        # Tiles of 256 columns, the last of which is half outside the padded width.
        (MXFP8[2], (70, 288), (True, True)),
        (MXFP8[3], (70, 288), (True, True)),
        (MXFP8[0], (70, 288), (True, False)),
        (MXFP8[1], (140, 288), (True, False)),
        # Tiles of 64 by 64, also in part.
        (NVFP4[0], (140, 208), (True, True)),
        (NVFP4[5], (140, 80), (True, True)),
        (NVFP4[6], (70, 80), (True, True)),
    ],
)
def test_tiles_that_do_not_divide_the_tensor(quant, shape, orientations):
    check(random(shape), quant, *orientations)


@pytest.mark.parametrize(
    "quant, dtype",
    [
        (quant, dtype)
        for quant in BLOCK[1:3] + MXFP8[:3] + NVFP4[:1] + NVFP4[2:5] + RHT[:1]
        for dtype in (torch.bfloat16, torch.float32)[: 1 if "rht" in quant else 2]
    ],
)
def test_rows_that_begin_at_any_address(quant, dtype):
    """A view that begins one element into its memory, as a slice of a flat buffer may."""
    x = random((40, 96), dtype)
    flat = torch.zeros(x.numel() + 1, dtype=dtype, device=DEVICE)
    flat[1:] = x.view(-1)
    check(flat[1:].view(x.shape), quant)


@pytest.mark.parametrize("quant", BLOCK + MXFP8[:2] + NVFP4[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype, quant):
    check(random((40, 64), dtype), quant)


@pytest.mark.parametrize("quant", BLOCK)
@pytest.mark.parametrize("shape", [(37, 50), (130, 131), (3, 1)])
def test_any_number_of_columns(shape, quant):
    check(random(shape), quant)


@pytest.mark.parametrize("rowwise, columnwise", [(True, False), (False, True)])
@pytest.mark.parametrize("quant", BLOCK[1:3] + MXFP8[1:3] + NVFP4[1:5] + RHT)
def test_one_orientation(quant, rowwise, columnwise):
    check(random((40, 64)), quant, rowwise, columnwise)


@pytest.mark.parametrize("quant", [NVFP4[0], NVFP4[2], NVFP4[5], RHT[0]])
@pytest.mark.parametrize("amax", [5.0, 0.0, INF, NAN, 1e-38])
def test_a_given_amax_is_used_and_returned(amax, quant):
    given = torch.tensor([amax], device=DEVICE)
    x = random((32, 64))
    arguments = (quant, None, 0, given, True, True, None)
    got, want = kernels.quantize(x, *arguments), reference.quantize(x, *arguments)
    if torch.isnan(given).all():
        assert got.amax.isnan().all() and want.amax.isnan().all()
        got, want = (q._replace(amax=None, col_amax=None) for q in (got, want))
    else:
        assert len({t.data_ptr() for t in (given, got.amax, got.col_amax)}) == 3
    same(got, want, quant)


@pytest.mark.parametrize("quant", BLOCK + MXFP8 + NVFP4[:1] + NVFP4[2:3] + NVFP4[4:])
@pytest.mark.parametrize(
    "specials",
    [[NAN, 1.0], [INF, NAN, -2.0], [-INF, 3.0], [0.0, -0.0], [1e-40, -1e-45], [3e38, -1e-30]],
)
def test_special_values(specials, quant):
    """Infinities saturate, NaNs count for no scale, tiny blocks get the scale of their format."""
    x = random((48, 64), torch.float32)
    x[:, 16:48] = 0.0  # blocks of zeros with one special value
    x.view(-1)[::37][: 60 // len(specials) * len(specials)] = torch.tensor(
        specials * (60 // len(specials)), device=DEVICE
    )
    x[17:19] = torch.tensor(specials[0], device=DEVICE)
    if quant.startswith("nvfp4") and x.isnan().any():
        x[x.isnan()] = NAN  # of one sign: a NaN is the code of +6
    check(x, quant)


@pytest.mark.parametrize("quant", BLOCK[1:3] + MXFP8 + NVFP4[:3] + NVFP4[4:5])
def test_a_tensor_of_nan(quant):
    got = check(torch.full((33, 64), NAN, device=DEVICE), quant)
    if got.amax is not None:
        assert not got.amax.any()


@pytest.mark.parametrize("quant", BLOCK + MXFP8)
def test_every_bf16_number(quant):
    """All exponents, ties and NaNs in both orientations; Triton has stored garbage in one."""
    bits = torch.arange(-32768, 32768).to(torch.int16)
    torch.manual_seed(0)
    bits = bits[torch.randperm(65536)].view(256, 256)
    # In sorted rows the blocks hold similar numbers, which use the range of the format.
    x = bits.view(torch.bfloat16).sort(1).values.nan_to_num(nan=1.0)
    check(x.to(DEVICE), quant)


@pytest.mark.parametrize("quant", BLOCK + MXFP8 + NVFP4 + RHT[:1])
def test_amaxes_around_powers_of_two(quant):
    """Scales of amaxes just below, at and above the numbers where their exponent changes."""
    bits = torch.arange(-1, 2).repeat(32) + torch.arange(96) % 32 * (1 << 21) + 0x3F000000
    x = bits.int().view(torch.float32)[:, None].repeat(1, 64).to(DEVICE)
    x *= torch.linspace(-1.0, 1.0, 64, device=DEVICE)
    check(x.bfloat16() if "rht" in quant else x, quant)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant", BLOCK + MXFP8 + NVFP4[:3] + NVFP4[4:7])
@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantize(columnwise, quant, dtype):
    x = random((70, 160))
    q = reference.quantize(x, quant, None, 0, None, True, True, seed())
    buffers = (q.col, q.col_scale_inv, q.col_amax) if columnwise else (q.row, q.scale_inv, q.amax)
    got = kernels.dequantize(*buffers, quant, columnwise, dtype)
    want = reference.dequantize(*buffers, quant, columnwise, dtype)
    assert got.dtype == dtype and torch.equal(got, want)
    empty = kernels.dequantize(buffers[0][:0], *buffers[1:], quant, columnwise, dtype)
    assert empty.shape == (0, want.shape[1])


@pytest.mark.parametrize("columnwise", [False, True])
def test_dequantize_every_scale_of_mxfp8(columnwise):
    """Also the codes 0 (subnormal), 254 and 255 (NaN)."""
    data = torch.full((32, 8192), 0x38, dtype=torch.uint8, device=DEVICE)
    scales = torch.arange(256, device=DEVICE).to(torch.uint8).repeat(128, 1)
    if columnwise:
        data, scales = data.view(8192, 32), torch.cat([scales.t().contiguous()] * 1)
    arguments = (data, scales, None, "mxfp8,e4m3", columnwise, torch.float32)
    got, want = kernels.dequantize(*arguments), reference.dequantize(*arguments)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert want.isnan().any() and (want == 2.0**-127).any()


def test_what_does_not_fit_is_refused():
    for quant, columns, message in (
        ("mxfp8,e4m3", 40, "40 columns; mxfp8 needs a multiple of 32"),
        ("nvfp4,e2m1", 24, "24 columns; nvfp4 needs a multiple of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.quantize(random((8, columns)), quant, None, 0, None, True, True, None)
    with pytest.raises(ValueError, match="torch.bfloat16"):
        check(random((16, 32), torch.float16), RHT[0])
    with pytest.raises(ValueError, match="rng is None"):
        kernels.quantize(random((16, 32)), NVFP4[1], None, 0, None, True, True, None)


@pytest.mark.skipif(not ON_GPU, reason="needs 20 GB of GPU memory and 2^31 elements")
@pytest.mark.parametrize("quant", [BLOCK[1], MXFP8[1], NVFP4[1], RHT[1]])
def test_more_than_two_to_the_31_elements(quant):
    free, _ = torch.cuda.mem_get_info()
    if free < 24e9:
        pytest.skip(f"{free / 1e9:.0f} GB of GPU memory are free, 24 GB are needed.")
    rows, columns = 65664, 32768
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-128:] = torch.randn(128, columns, device=DEVICE)
    if "stochastic" in quant:  # the noise of the last rows is that of their place
        quant = quant.replace(",stochastic=1", "")
    quant = quant.replace(",swizzled=1", "")
    got = kernels.quantize(x, quant, None, 0, None, True, True, seed())
    part = reference.quantize(x[-128:], quant, None, 0, None, True, True, seed())
    assert torch.equal(got.row[-128:], part.row)
    assert torch.equal(got.row[:-128].count_nonzero(), torch.tensor(0, device=DEVICE))
    tail = got.col[-128:] if quant.startswith("mxfp8") else got.col[:, -part.col.shape[1] :]
    assert torch.equal(tail, part.col)
    if quant.startswith("nvfp4"):
        assert torch.equal(got.scale_inv[-128:], part.scale_inv)
        assert torch.equal(got.amax, part.amax) and torch.equal(got.col_amax, part.col_amax)


@pytest.mark.parametrize("quant", BLOCK[:1] + MXFP8[:1] + NVFP4[1:2] + RHT)
def test_results_are_reproducible(quant):
    x = random((1000, 4096) if ON_GPU else (40, 64))
    first, second = (
        kernels.quantize(x, quant, None, 0, None, True, True, seed()) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second) if a is not None)


def test_stochastic_rounding_depends_on_the_seed_and_its_mean_is_right():
    x = torch.full((128, 128), 0.7, device=DEVICE)
    x[:, ::16] = 6.0
    amax = torch.tensor([2688.0], device=DEVICE)  # all scales of blocks are 1
    total, results = 0.0, []
    for number in range(4):
        rng = torch.tensor([number, 5], device=DEVICE)
        q = kernels.quantize(x, NVFP4[1], None, 0, amax, True, True, rng)
        values = kernels.dequantize(q.row, q.scale_inv, q.amax, NVFP4[1], False, torch.float32)
        results.append(q.row)
        total += values[x == x[0, 1]].mean().item() / 4
    assert not torch.equal(results[0], results[1])
    assert abs(total - x[0, 1].item()) < 5 * 0.25 / (4 * 128 * 120) ** 0.5 + 1 / 512
