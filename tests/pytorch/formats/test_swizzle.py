# SPDX-License-Identifier: Apache-2.0
"""The order of scales that GEMMs read, against its formula."""

import pytest
import torch

from transformer_engine.pytorch.formats import swizzle


def offset(i, j, tiles):
    """Where the scale of row ``i`` and block ``j`` lies, with ``tiles`` tiles side by side."""
    tile = (i // 128) * tiles + j // 4
    return tile * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4


def scales_of(rows, columns, device):
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randint(0, 256, (rows, columns), generator=generator).to(torch.uint8).to(device)


BY_HAND = [
    *((0, 0, 0), (1, 0, 16), (0, 1, 1), (32, 0, 4), (31, 3, 499), (127, 3, 511), (0, 4, 512)),
    *((128, 0, 1024), (200, 7, 1675)),
]


def test_offsets_by_hand(device):
    for i, j, place in BY_HAND:
        assert offset(i, j, 2) == place
        scales = torch.zeros(256, 8, dtype=torch.uint8, device=device)
        scales[i, j] = 77
        swizzled = swizzle.swizzle_scales(scales)
        assert swizzled.view(-1).nonzero().tolist() == [[place]]
        columnwise = swizzle.swizzle_columnwise_scales(scales.t().contiguous())
        assert columnwise.view(-1).nonzero().tolist() == [[place]]


@pytest.mark.parametrize("rows, columns", [(128, 4), (128, 12), (384, 4), (256, 20), (0, 8)])
def test_every_offset_and_back(device, rows, columns):
    scales = scales_of(rows, columns, device)
    swizzled = swizzle.swizzle_scales(scales)
    assert swizzled.shape == scales.shape and swizzled.is_contiguous()
    flat, original = swizzled.view(-1).tolist(), scales.tolist()
    for i in range(rows):
        for j in range(columns):
            assert flat[offset(i, j, columns // 4)] == original[i][j]
    assert torch.equal(swizzle.unswizzle_scales(swizzled), scales)


@pytest.mark.parametrize("blocks, columns", [(4, 128), (12, 256), (4, 384), (0, 128)])
def test_columnwise_scales_are_those_of_the_transpose(device, blocks, columns):
    scales = scales_of(blocks, columns, device)
    swizzled = swizzle.swizzle_columnwise_scales(scales)
    assert swizzled.shape == scales.shape and swizzled.is_contiguous()
    flat, original = swizzled.view(-1).tolist(), scales.tolist()
    for j in range(blocks):
        for i in range(columns):
            assert flat[offset(i, j, blocks // 4)] == original[j][i]
    back = swizzle.unswizzle_columnwise_scales(swizzled)
    assert torch.equal(back, scales) and back.is_contiguous()


def test_strided_scales(device):
    scales = scales_of(256, 16, device)
    part = scales[:128, 4:12]
    assert torch.equal(swizzle.swizzle_scales(part), swizzle.swizzle_scales(part.contiguous()))
    turned = scales.t()
    assert torch.equal(
        swizzle.swizzle_columnwise_scales(turned),
        swizzle.swizzle_columnwise_scales(turned.contiguous()),
    )


@pytest.mark.parametrize("shape", [(127, 4), (128, 5), (64, 4)])
def test_unpadded_scales_are_refused(shape):
    scales = torch.zeros(shape, dtype=torch.uint8)
    for function in (swizzle.swizzle_scales, swizzle.unswizzle_scales):
        with pytest.raises(ValueError, match=rf"\[{shape[0]}, {shape[1]}\].*128.*Pad"):
            function(scales)
    for function in (swizzle.swizzle_columnwise_scales, swizzle.unswizzle_columnwise_scales):
        with pytest.raises(ValueError, match=rf"\[{shape[1]}, {shape[0]}\].*128.*Pad"):
            function(scales.t())
