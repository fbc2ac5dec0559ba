# SPDX-License-Identifier: Apache-2.0
"""The random Hadamard transform, which spreads outliers over 16 values.

``y = (v * signs) @ H`` with ``H[r][c] = (-1)^popcount(r & c) / 4``, Sylvester's matrix made
orthogonal. Two operands that are transformed along the dimension they contract keep their product.
"Random" are only the signs, and those are fixed.
"""

from __future__ import annotations

import torch

SIZE = 16


def _signs(sign_mask: int, device) -> torch.Tensor:
    """fp32 [16]: -1 where the bit of the mask is set. Made without a copy from the host."""
    bits = torch.arange(SIZE, dtype=torch.int32, device=device)
    return (1 - ((sign_mask >> bits) & 1) * 2).float()


def hadamard_matrix(sign_mask: int, device) -> torch.Tensor:
    """The matrix [16, 16] in bf16 by which ``hadamard_transform`` multiplies; entries are +-1/4.

    Args:
        sign_mask: bit ``i`` is set where row ``i`` is negated.
    """
    index = torch.arange(SIZE, dtype=torch.int32, device=device)
    common = index[:, None] & index[None, :]
    parity = common ^ (common >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    matrix = (1 - 2 * parity).float() * 0.25
    return (matrix * _signs(sign_mask, device)[:, None]).bfloat16()


def hadamard_transform(x: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """Transform each 16 consecutive values of the last dimension.

    Sums are fp32, in the order that ``hadamard_transform_rows`` states, and rounded once.

    Args:
        x: bf16 [R, C], C a multiple of 16.

    Returns:
        bf16 [R, C].

    Raises:
        ValueError: for another dtype.
    """
    _check(x)
    blocks = x.reshape(-1, SIZE).t().contiguous().unsqueeze(0)
    return _transform(blocks, sign_mask).squeeze(0).t().reshape(x.shape)


def hadamard_transform_rows(x: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """Transform each 16 consecutive rows: ``hadamard_transform`` of the transpose, transposed.

    The 16 values with their signs are multiplied by 1/4 and summed in fp32 by four stages that
    combine positions 8, 4, 2 and 1 apart: (a, b) become (a + b, a - b). The order makes the result
    the same on every device.

    Args:
        x: bf16 [R, C], R a multiple of 16.

    Returns:
        bf16 [R, C].

    Raises:
        ValueError: for another dtype.
    """
    _check(x)
    rows, columns = x.shape
    blocks = x.reshape(rows // SIZE, SIZE, columns)
    return _transform(blocks, sign_mask).view(rows, columns)


def _transform(blocks: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """Transform dimension 1 of [B, 16, N]."""
    count, _, columns = blocks.shape
    values = blocks.detach() * (_signs(sign_mask, blocks.device) * 0.25)[:, None]
    other = torch.empty_like(values)
    for distance in (8, 4, 2, 1):
        shape = (count, SIZE // (2 * distance), 2, distance, columns)
        first, second = values.view(shape).unbind(2)
        total, difference = other.view(shape).unbind(2)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        values, other = other, values
    return values.bfloat16()


def _check(x: torch.Tensor) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(
            f"The random Hadamard transform is defined for torch.bfloat16, and x is {x.dtype}. "
            "Use bf16 activations and parameters, or a recipe with disable_rht=True."
        )
