# SPDX-License-Identifier: Apache-2.0
"""Random bytes that depend on a seed and a position only, for stochastic rounding.

Philox4x32-10: "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al., 2011).
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
ROUNDS = 10


def philox4x32(counter, key) -> list:
    """The four words of each counter.

    Args:
        counter: four int64 tensors, of shapes that broadcast, with values of 32 bits.
        key: two int64 tensors likewise.

    Returns:
        Four int64 tensors with values of 32 bits.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for index in range(ROUNDS):
        if index:
            k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
        # A product of 64 bits wraps into the sign; its halves are right all the same.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
    return [c0, c1, c2, c3]


def philox_noise(rng: torch.Tensor, stream: int, blocks: int) -> torch.Tensor:
    """16 random bytes for each block.

    Args:
        rng: int64 [2], seed and offset; never read back to the host.
        stream: 0 for rowwise, 1 for columnwise blocks.
        blocks: how many.

    Returns:
        uint8 [blocks, 16]: for block ``b`` the little-endian bytes of the words of Philox with the
        key (low, high half of the seed) and the counter (low, high half of b, low half of the
        offset, stream).
    """
    index = torch.arange(blocks, dtype=torch.int64, device=rng.device)
    seed, offset = rng[0], rng[1]
    counter = (index & _MASK, index >> 32, offset & _MASK, torch.full_like(offset, stream))
    words = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
    # int64 to int32 keeps the low 32 bits.
    return torch.stack([word.to(torch.int32) for word in words], dim=1).view(torch.uint8)
