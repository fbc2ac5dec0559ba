# SPDX-License-Identifier: Apache-2.0
"""FP4 against a search through all of its values."""

import block_references
import pytest
import torch

from transformer_engine.pytorch.formats import fp4

INF, NAN = float("inf"), float("nan")
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
TIES = (VALUES[1:] + VALUES[:-1]) / 2  # 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5


def expected_codes(values):
    """Codes of numbers: the nearest value, of two the even one."""
    values = values.double()
    magnitude = values.abs().clamp(max=6.0).nan_to_num(6.0)
    distances = (magnitude[..., None] - VALUES).abs()
    nearest = distances == distances.amin(-1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    pick = torch.where(nearest.sum(-1, keepdim=True) > 1, nearest & even, nearest)
    negative = torch.signbit(values) & ~values.isnan()
    return (pick.int().argmax(-1) + 8 * negative).to(torch.uint8)


def hard_values():
    """fp32 values at every code, tie and saturation, their neighbours, and random ones."""
    edges = torch.cat([VALUES, TIES]).float()
    special = torch.tensor([INF, NAN, 1e-45, 1e-38, 6.5, 7.0, 8.0, 3e38])
    values = torch.cat([edges, special])
    around = [torch.nextafter(values, torch.full_like(values, bound)) for bound in (-INF, INF)]
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    near = torch.empty(100_000).uniform_(-7, 7, generator=generator)
    values = torch.cat([values, *around])
    return torch.cat([values, -values, bits.view(torch.float32), near])


def all_values(dtype):
    """Every number of a 16-bit dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def test_the_searches_of_this_file_and_of_the_references_agree():
    values = torch.cat([hard_values()[:200], all_values(torch.bfloat16)[::37]])
    by_loop = [block_references.fp4_code(value) for value in values.tolist()]
    assert expected_codes(values).tolist() == by_loop


def test_rounding_is_to_nearest_even_and_saturates(device):
    for values in (hard_values(), all_values(torch.bfloat16), all_values(torch.float16)):
        before = values.clone().to(device)
        actual = fp4.cast_to_fp4(before)
        assert actual.dtype == torch.uint8
        assert torch.equal(actual.cpu(), expected_codes(values))
        assert torch.equal(before.cpu().view(torch.int32), values.view(torch.int32))


def test_ties_and_signs_by_hand(device):
    def codes(values):
        return fp4.cast_to_fp4(torch.tensor(values, device=device)).tolist()

    assert codes([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) == [0, 2, 2, 4, 4, 6, 6]
    assert codes([-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0]) == [8, 10, 10, 12, 12, 14, 14]
    assert codes([0.0, -0.0, -1e-45, INF, -INF, NAN, -NAN]) == [0, 8, 8, 7, 15, 7, 7]


def test_codes_come_back(device):
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    values = fp4.fp4_to_float(codes)
    assert values.dtype == torch.float32
    assert torch.equal(values.cpu().double(), torch.cat([VALUES, -VALUES]))
    assert torch.equal(torch.signbit(values).cpu(), torch.arange(16) >= 8)
    assert torch.equal(fp4.cast_to_fp4(values), codes)
    for noise in (0, 255):
        noise = torch.full_like(codes, noise)
        assert torch.equal(fp4.stochastic_cast_to_fp4(values, noise), codes)


@pytest.mark.parametrize("may_branch", [True, False])
def test_every_byte_holds_two_codes_the_even_one_low(device, may_branch, monkeypatch):
    if not may_branch:
        monkeypatch.setattr(fp4, "_may_look_at_values", lambda x: False)
    data = torch.arange(256, dtype=torch.uint8, device=device).view(4, 64)
    codes = fp4.unpack_fp4(data)
    assert codes.shape == (4, 128) and codes.dtype == torch.uint8
    assert torch.equal(codes[:, 0::2], data % 16) and torch.equal(codes[:, 1::2], data // 16)
    assert torch.equal(fp4.pack_fp4(codes), data)
    assert torch.equal(fp4.packed_fp4_to_float(data), fp4.fp4_to_float(codes))
    assert torch.equal(fp4.packed_fp4_to_float(data[:, 3:7]), fp4.fp4_to_float(codes[:, 6:14]))
    assert fp4.pack_fp4(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]
    # Strided and shifted codes are packed as their copy is.
    for part in (codes.t(), codes[:, 3:5], codes.view(-1)[1:9], codes[:, :1].t()):
        assert torch.equal(fp4.pack_fp4(part), fp4.pack_fp4(part.clone().contiguous()))
        assert torch.equal(fp4.unpack_fp4(fp4.pack_fp4(part)), part)


def test_shapes(device):
    for shape in ((0, 4), (4, 0), (6,), (2, 3, 4)):
        values = torch.zeros(shape, device=device)
        codes = fp4.cast_to_fp4(values)
        assert codes.shape == shape == fp4.fp4_to_float(codes).shape
        assert fp4.stochastic_cast_to_fp4(values, codes).shape == shape
        packed = fp4.pack_fp4(codes)
        assert packed.shape == (*shape[:-1], shape[-1] // 2)
        assert fp4.unpack_fp4(packed).shape == fp4.packed_fp4_to_float(packed).shape == shape


def test_stochastic_rounding_against_the_rule_for_every_noise(device):
    values = hard_values()[:100].repeat_interleave(256)
    noise = torch.arange(256).repeat(100).to(torch.uint8)
    expected = [
        block_references.stochastic_fp4_code(value, byte)
        for value, byte in zip(values.tolist(), noise.tolist())
    ]
    actual = fp4.stochastic_cast_to_fp4(values.to(device), noise.to(device))
    assert actual.tolist() == expected


def test_stochastic_rounding_stays_between_neighbours_and_is_unbiased(device):
    generator = torch.Generator().manual_seed(1)
    values = torch.empty(2000).uniform_(-6, 6, generator=generator)
    noise = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes = fp4.stochastic_cast_to_fp4(
        values[:, None].expand(-1, 256).to(device), noise.expand(2000, -1).to(device)
    )
    rounded = fp4.fp4_to_float(codes).cpu().double()
    magnitude = values.abs().double()
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).double()
    distance = (rounded - values.double()[:, None]).abs()
    assert bool((distance < spacing[:, None]).all())
    # All 256 noises once: the mean is the value to within what one of them weighs, and where the
    # value is a multiple of that, exactly.
    assert bool(((rounded.mean(1) - values).abs() <= spacing / 256).all())
    coarse = torch.sign(values) * (magnitude / spacing * 256).round() * spacing / 256
    codes = fp4.stochastic_cast_to_fp4(
        coarse.float()[:, None].expand(-1, 256).to(device), noise.expand(2000, -1).to(device)
    )
    assert torch.equal(fp4.fp4_to_float(codes).cpu().double().mean(1), coarse)


def test_noise_moves_the_magnitude_up_only(device):
    values = torch.tensor([0.7, -0.7, 2.25, -5.0], device=device)
    low = fp4.stochastic_cast_to_fp4(values, torch.zeros(4, dtype=torch.uint8, device=device))
    high = fp4.stochastic_cast_to_fp4(values, torch.full_like(low, 255))
    assert fp4.fp4_to_float(low).tolist() == [0.5, -0.5, 2.0, -4.0]
    assert fp4.fp4_to_float(high).tolist() == [1.0, -1.0, 3.0, -6.0]
