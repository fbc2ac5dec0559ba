# SPDX-License-Identifier: Apache-2.0
"""E8M0 against a search through all of its values."""

import block_references
import pytest
import torch

from transformer_engine.pytorch.formats.e8m0 import (
    e8m0_from_float,
    e8m0_multiplier,
    e8m0_to_float,
)

INF, NAN = float("inf"), float("nan")
FLOAT32_MAX = torch.finfo(torch.float32).max


def expected_codes(values):
    """Bytes of fp32 values: the place of the first power of two that is not below."""
    powers = torch.exp2(torch.arange(-127, 128, dtype=torch.float64))
    codes = torch.searchsorted(powers, values.double().nan_to_num(0.0, posinf=1e300))
    return torch.where(values.isnan(), 255, codes.clamp(max=254)).to(torch.uint8)


def test_the_searches_of_this_file_and_of_the_references_agree():
    values = [0.0, 1e-45, 2.0**-127, 1.1 * 2.0**-127, 1.0, 1.5, 2.0, 3e38, INF, NAN]
    by_loop = [block_references.e8m0_code(value) for value in values]
    assert expected_codes(torch.tensor(values)).tolist() == by_loop
    assert by_loop == [0, 0, 0, 1, 127, 128, 128, 254, 254, 255]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number(device, dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values.abs().float()
    assert torch.equal(e8m0_from_float(values.to(device)).cpu(), expected_codes(values))


def test_every_power_of_two_tie_and_neighbour(device):
    powers = torch.ldexp(torch.ones(277), torch.arange(-149, 128))
    assert powers[0] == 2.0**-149 and powers[-1] == 2.0**127
    ties = powers[1:] * 1.5
    values = torch.cat([powers, ties, torch.tensor([0.0, INF, NAN, FLOAT32_MAX])])
    above = torch.nextafter(values, torch.full_like(values, INF))
    below = torch.nextafter(values, torch.zeros_like(values))
    for part in (values, above, below):
        assert torch.equal(e8m0_from_float(part.to(device)).cpu(), expected_codes(part))
    # Halfway is not rounded to the nearer power but up.
    normal = powers[powers >= 2.0**-126]
    halfway = e8m0_from_float((normal[:-1] * 1.5).to(device)).cpu()
    assert torch.equal(halfway, e8m0_from_float(normal[1:].to(device)).cpu())


def test_random_bits(device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**31, (100_000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    assert torch.equal(e8m0_from_float(values.to(device)).cpu(), expected_codes(values))
    # A NaN is one with either sign.
    nans = torch.tensor([-1, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert e8m0_from_float(nans.to(device)).tolist() == [255] * 3


# Hand-checked: amax of a block of E4M3 values, E8M0 byte.
BY_HAND = [
    *((0.0, 0), (1.0, 119), (1.75, 119), (1.7578125, 120), (448.0, 127), (450.0, 128)),
    *((3e38, 247), (INF, 254), (2.0**-126, 0)),
]


def test_scales_of_e4m3_by_hand(device):
    amax = torch.tensor([amax for amax, _ in BY_HAND], device=device)
    inverse = torch.tensor([0x3B124925], dtype=torch.int32, device=device).view(torch.float32)
    assert e8m0_from_float(amax * inverse).tolist() == [code for _, code in BY_HAND]
    # The division by 448 gives the same bytes.
    assert e8m0_from_float(amax / torch.full_like(amax, 448.0)).tolist() == [c for _, c in BY_HAND]


def test_decoding_every_code(device):
    codes = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
    values = e8m0_to_float(codes).cpu()
    multipliers = e8m0_multiplier(codes).cpu()
    assert values.dtype == multipliers.dtype == torch.float32
    assert values[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert multipliers[:255].tolist() == [2.0 ** (127 - code) for code in range(255)]
    assert values[255].isnan() and multipliers[255].isnan()
    assert torch.equal(e8m0_from_float(values.to(device)), codes)
    assert torch.equal(codes.cpu(), torch.arange(256).to(torch.uint8))  # left alone


def test_shapes_are_kept_and_inputs_left_alone(device):
    for shape in ((0,), (0, 4), (3, 4), (2, 3, 4)):
        values = torch.full(shape, 3.0, device=device)
        codes = e8m0_from_float(values)
        assert codes.shape == shape and codes.dtype == torch.uint8 and bool((codes == 129).all())
        assert e8m0_to_float(codes).shape == e8m0_multiplier(codes).shape == shape
        assert bool((values == 3.0).all())
