# SPDX-License-Identifier: Apache-2.0
"""The random Hadamard transform against a product with its matrix in float64."""

import block_references
import pytest
import torch

from transformer_engine.pytorch.formats.hadamard import (
    hadamard_matrix,
    hadamard_transform,
    hadamard_transform_rows,
)
from transformer_engine.pytorch.formats.spec import RHT_SIGN_MASK

MASKS = [RHT_SIGN_MASK, 0, 0xFFFF, 0x0001]
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]

pytestmark = pytest.mark.usefixtures("poison_empty")


def expected(x, mask):
    """float64 result before it is rounded."""
    blocks = x.cpu().double().reshape(-1, 16) @ block_references.hadamard(mask)
    return blocks.view(x.shape)


def test_signs_by_hand(device):
    assert RHT_SIGN_MASK == 0xD7E8 == 55272
    matrix = hadamard_matrix(RHT_SIGN_MASK, device)
    # Column 0 of Sylvester's matrix is all ones.
    assert (matrix[:, 0].float() * 4).tolist() == SIGNS


@pytest.mark.parametrize("mask", MASKS)
def test_matrix(device, mask):
    matrix = hadamard_matrix(mask, device)
    assert matrix.dtype == torch.bfloat16 and matrix.device.type == device
    matrix = matrix.cpu().double()
    assert torch.equal(matrix, block_references.hadamard(mask))
    assert torch.equal(matrix @ matrix.t(), torch.eye(16).double())


def test_transform_by_hand(device):
    x = torch.arange(1.0, 17.0, device=device).bfloat16()[None]
    result = hadamard_transform(x, RHT_SIGN_MASK)
    assert result.dtype == torch.bfloat16
    assert result.tolist() == [
        [-15.5, -7.5, 7.5, -0.5, 7.5, -0.5, -15.5, 8.5]
        + [8.5, 16.5, 1.5, 1.5, 1.5, -2.5, 10.5, -17.5]
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (32, 160)])
def test_small_integers_are_exact_until_the_one_rounding(device, mask, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-255, 256, shape, generator=generator).bfloat16().to(device)
    result = hadamard_transform(x, mask)
    assert torch.equal(result.cpu(), expected(x, mask).bfloat16())
    # Down the columns it is the same.
    assert torch.equal(hadamard_transform_rows(x.t(), mask), result.t())
    assert torch.equal(hadamard_transform_rows(x.t().contiguous(), mask), result.t())


def test_any_numbers_are_within_a_rounding_of_the_exact_result(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 256, generator=generator)
    x = (x * torch.exp2(torch.randint(-20, 20, x.shape, generator=generator).float())).bfloat16()
    result = hadamard_transform(x.to(device), RHT_SIGN_MASK)
    exact = expected(x, RHT_SIGN_MASK)
    # Half a bf16 spacing, and what 16 sums in fp32 may be off.
    size = x.double().abs().view(64, 16, 16).amax(-1).repeat_interleave(16, 1)
    bound = exact.abs() * 2.0**-8 + 16 * size * 2.0**-24
    assert bool(((result.cpu().double() - exact).abs() <= bound).all())
    assert torch.equal(hadamard_transform_rows(x.t().to(device), RHT_SIGN_MASK), result.t())


def test_the_stated_order_of_sums(device):
    # 2^24 + 1 - 2^24: which sum comes first decides whether the 1 survives in fp32.
    x = torch.zeros(16)
    x[0], x[8], x[4] = 2.0**26, -(2.0**26), 4.0
    # Positions 8 apart are combined first: column 0 keeps the 1.
    assert hadamard_transform(x.bfloat16()[None].to(device), 0)[0, 0].item() == 1.0
    x = torch.zeros(16)
    x[0], x[8], x[4] = 2.0**26, 4.0, -(2.0**26)
    assert hadamard_transform(x.bfloat16()[None].to(device), 0)[0, 0].item() == 0.0


def test_products_are_kept(device):
    generator = torch.Generator().manual_seed(2)
    a, b = torch.randint(-3, 4, (2, 8, 64), generator=generator).bfloat16().to(device)
    transformed = [hadamard_transform(x, RHT_SIGN_MASK).double() for x in (a, b)]
    product = transformed[0] @ transformed[1].t()
    assert torch.equal(product, a.double() @ b.double().t())


def test_empty_and_special(device):
    assert hadamard_transform(torch.zeros(0, 32).bfloat16().to(device), 0).shape == (0, 32)
    assert hadamard_transform_rows(torch.zeros(0, 32).bfloat16().to(device), 0).shape == (0, 32)
    x = torch.zeros(2, 32, device=device).bfloat16()
    x[0, 3] = float("nan")
    result = hadamard_transform(x, 0)
    assert bool(result[0, :16].isnan().all()) and not result[0, 16:].any() and not result[1].any()


def test_other_dtypes_are_refused():
    for transform in (hadamard_transform, hadamard_transform_rows):
        with pytest.raises(ValueError, match="torch.float32.*disable_rht"):
            transform(torch.zeros(16, 16), 0)
