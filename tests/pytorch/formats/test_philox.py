# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 against published vectors and a model in Python integers."""

import pytest
import torch

from transformer_engine.pytorch.formats.philox import philox4x32, philox_noise

# Test vectors of Random123 for 10 rounds: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000")
    + ("6627e8d5 e169c58d bc57ac4c 9b00dbd8",),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff")
    + ("408f276d 41c83b0e a20bc7c6 6d5451fd",),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0")
    + ("d16cfe09 94fdcceb 5001e420 24126ea1",),
]


def words(text):
    """The numbers of a line of hexadecimal words."""
    return [int(word, 16) for word in text.split()]


def model(counter, key):
    """Philox4x32-10 in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (p1 >> 32) ^ c[1] ^ k[0],
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c[3] ^ k[1],
            p0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


@pytest.mark.parametrize("counter, key, result", VECTORS)
def test_published_vectors(device, counter, key, result):
    assert model(words(counter), words(key)) == words(result)
    counter = [torch.tensor([word], device=device) for word in words(counter)]
    key = [torch.tensor([word], device=device) for word in words(key)]
    assert [word.item() for word in philox4x32(counter, key)] == words(result)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1, -1])
@pytest.mark.parametrize("offset", [0, 7, 2**31 + 3, 2**32 + 1])
@pytest.mark.parametrize("stream", [0, 1])
def test_noise_is_the_bytes_of_each_block(device, seed, offset, stream):
    rng = torch.tensor([seed, offset], device=device)
    noise = philox_noise(rng, stream, 50)
    assert noise.shape == (50, 16) and noise.dtype == torch.uint8
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    for block in (0, 1, 49):
        result = model((block, 0, offset & 0xFFFFFFFF, stream), key)
        expected = [byte for word in result for byte in word.to_bytes(4, "little")]
        assert noise[block].tolist() == expected
    assert rng.tolist() == [seed, offset]


def test_noise_does_not_depend_on_the_number_of_blocks(device):
    rng = torch.tensor([3, 4], device=device)
    assert torch.equal(philox_noise(rng, 0, 10), philox_noise(rng, 0, 1000)[:10])
    assert philox_noise(rng, 0, 0).shape == (0, 16)


def test_noise_is_uniform_and_its_streams_differ(device):
    first = philox_noise(torch.tensor([3, 4], device=device), 0, 65536)
    counts = torch.bincount(first.view(-1).int().cpu(), minlength=256).double()
    expected = first.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 255 + 5 * (2 * 255) ** 0.5
    for seed, offset, stream in ((3, 4, 1), (3, 5, 0), (4, 4, 0)):
        other = philox_noise(torch.tensor([seed, offset], device=device), stream, 65536)
        equal = (first == other).float().mean().item()
        assert abs(equal - 1 / 256) < 5e-4
