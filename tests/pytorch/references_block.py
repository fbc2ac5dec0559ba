# SPDX-License-Identifier: Apache-2.0
"""Formats with scales of blocks in float64, written without the package and without hurry.

Each step that the formats define in fp32 is done in float64 and rounded to fp32 after every
operation, which gives the same: 53 bits are more than twice 24. Codes are found in tables of all
values of a format.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import torch
from references import FP8_MAX, current_scale, fp8_round, quantized

BLOCK = {"block": 128, "mxfp8": 32, "nvfp4": 16}
FLOAT32_MAX = torch.finfo(torch.float32).max
FP4_MAX = 6.0
# Signs of the Hadamard transform.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class Blocks:
    """How an operand is quantized.

    * `kind`: "block", "mxfp8", "nvfp4", or "current" for one block; `fmt`: the FP8 type, "e4m3" or
      "e5m2"
    * `square`: one scale per square of values
    * `pow2`: scales of "block" are powers of two
    * `hadamard`: columnwise values of "nvfp4" are transformed
    * `per_row`: one global scale of "nvfp4" per row
    * `error`: "mae" or "mse": blocks of "nvfp4" choose between 4 and 6 by this error
    * `largest`: largest scale of a block of "nvfp4"
    """

    kind: str
    fmt: str = "e4m3"
    square: bool = False
    pow2: bool = True
    hadamard: bool = False
    per_row: bool = False
    error: str = ""
    largest: float = 448.0


@dataclass(frozen=True)
class Quantized:
    """A matrix ``codes * scales * factor``, float64 ``[R, C]``: exact values of codes, scales of
    blocks given to each value, and the global factor, exact or as fp32 arithmetic has it.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: Optional[torch.Tensor]  # of nvfp4, [1, 1] or [R, 1]
    largest: float = 448.0

    def exact(self) -> torch.Tensor:
        """The values that the representation stands for."""
        values = self.codes * self.scales
        return values if self.amax is None else values * self.amax / (FP4_MAX * self.largest)

    def dequantized(self, dtype) -> torch.Tensor:
        """The values as dequantization gives them: fp32 operations, then rounded to ``dtype``."""
        scales = self.scales
        if self.amax is not None:
            sixth = float32(torch.tensor(1.0, dtype=torch.float64) / (FP4_MAX * self.largest))
            scales = float32(float32(scales * self.amax) * sixth)
        return float32(self.codes * scales).to(dtype).double()


def float32(x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded to fp32."""
    return x.float().double()


def padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``x`` with zeros up to multiples of ``rows`` and ``columns``."""
    extra = (-x.shape[1] % columns, -x.shape[0] % rows)
    return torch.nn.functional.pad(x, (0, extra[0], 0, extra[1]))


def over_squares(x: torch.Tensor, size: int, combine) -> torch.Tensor:
    """``combine`` over each ``size`` rows of ``[R, B]``, given to all of them."""
    rows = x.shape[0]
    groups = padded(x, size, 1).view(-1, size, x.shape[1])
    return combine(groups).repeat_interleave(size, 0)[:rows]


def largest_of(groups: torch.Tensor) -> torch.Tensor:
    """Maximum over dimension 1 of ``[G, size, B]``."""
    return groups.amax(1)


def quantize_rows(
    x: torch.Tensor, how: Blocks, dtype: torch.dtype, amax: Optional[torch.Tensor] = None
) -> Quantized:
    """Quantize float64 ``x [R, C]``, whose values are of ``dtype``, in blocks along its rows.

    ``amax``: what takes the place of the largest magnitude of ``x``.
    """
    rows, columns = x.shape
    if how.kind == "current":
        scale = None if amax is None else current_scale(amax, how.fmt)
        _, codes, scale = quantized(x, how.fmt, scale)
        return Quantized(codes, float32(1 / scale.double()).to(x.device), None)
    size = BLOCK[how.kind]
    blocks = padded(x, 1, size).view(rows, -1, size)
    found = blocks.abs().amax(2) if rows else blocks.new_zeros(blocks.shape[:2])
    if how.square:
        found = over_squares(found, size, largest_of)
    if how.kind == "nvfp4":
        return _nvfp4(blocks, found, how, amax)
    scale, inverse = _block_scales(found, how, dtype) if how.kind == "block" else _e8m0(found, how)
    _, codes = fp8_round(float32(blocks * scale[:, :, None]), how.fmt)
    inverse = inverse[:, :, None].expand(blocks.shape)
    flat = [t.reshape(rows, -1)[:, :columns] for t in (codes, inverse)]
    return Quantized(*flat, None)


def quantize_columns(
    x: torch.Tensor, how: Blocks, dtype: torch.dtype, amax: Optional[torch.Tensor] = None
) -> Quantized:
    """The transpose ``[C, R]`` of ``x [R, C]``, quantized in blocks along its rows.

    A transformed one has zeros up to a multiple of 16 in its last dimension.
    """
    x = x.t()
    if how.hadamard:
        x = transform(padded(x.to(torch.bfloat16).double(), 1, 16))
        dtype, amax = torch.bfloat16, None
    return quantize_rows(x.contiguous(), how, dtype, amax)


def _block_scales(amax: torch.Tensor, how: Blocks, dtype: torch.dtype):
    """``(scale, scale_inv)`` of FP8 blocks."""
    scale = float32(FP8_MAX[how.fmt] / amax)
    limit = min(torch.finfo(dtype).max, FLOAT32_MAX)
    scale = torch.where(scale.isinf(), limit, scale)
    scale = torch.where((amax == 0) | amax.isinf(), 1.0, scale)
    if how.pow2:
        scale = torch.exp2(torch.frexp(scale)[1].double() - 1)
    return scale, float32(1 / scale)


def _e8m0(amax: torch.Tensor, how: Blocks):
    """``(scale, scale_inv)`` of MXFP8: the smallest power of two that no value exceeds."""
    ratio = torch.tensor(1.0 / FP8_MAX[how.fmt], dtype=torch.float64).float().double()
    fraction, exponent = torch.frexp(float32(amax * ratio))
    exponent = (exponent - (fraction == 0.5).int()).double()
    exponent = torch.where(amax == 0, -127.0, exponent.clamp(-127, 127))
    return torch.exp2(-exponent), torch.exp2(exponent)


# --- NVFP4 ----------------------------------------------------------------------------------------


@lru_cache(maxsize=None)
def hadamard() -> torch.Tensor:
    """The orthogonal 16 x 16 matrix with signs."""
    entries = [[(-1) ** bin(r & c).count("1") * SIGNS[r] / 4 for c in range(16)] for r in range(16)]
    return torch.tensor(entries, dtype=torch.float64)


def transform(x: torch.Tensor) -> torch.Tensor:
    """Each 16 values of a row of ``x [R, C]`` transformed, and rounded to bf16."""
    values = x.reshape(-1, 16) @ hadamard().to(x.device)
    return values.float().to(torch.bfloat16).double().view(x.shape)


def fp4_round(x: torch.Tensor) -> torch.Tensor:
    """Nearest value of E2M1; ties to the even code; saturating."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=x.device)
    magnitude = x.abs().clamp(max=FP4_MAX)
    above = torch.searchsorted(grid, magnitude.contiguous())
    below = (above - 1).clamp(min=0)
    middle = (grid[below] + grid[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    return torch.where(up, grid[above], grid[below]) * torch.where(x < 0, -1.0, 1.0)


def _nvfp4(blocks, found, how: Blocks, amax) -> Quantized:
    """``blocks [R, B, 16]`` with block amaxes ``found [R, B]``."""
    rows = blocks.shape[0]
    if how.per_row:
        amax = blocks.abs().amax((1, 2)).view(rows, 1)
    elif amax is None:
        amax = blocks.abs().max() if blocks.numel() else blocks.new_zeros(())
    amax = amax.double().reshape(-1, 1)
    encode = float32(how.largest * FP4_MAX / amax).clamp(max=FLOAT32_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    decode = float32(1 / encode)
    if how.error:
        codes, scales = _four_or_six(blocks, found, encode, decode, amax, how)
    else:
        sixth = torch.tensor(1.0 / 6.0, dtype=torch.float64).float().double()
        scales = fp8_round(float32(found * float32(encode * sixth)), "e4m3")[1]
        codes = _codes(blocks, scales, decode)
    scales = scales[:, :, None].expand(blocks.shape)
    return Quantized(codes.reshape(rows, -1), scales.reshape(rows, -1), amax, how.largest)


def _codes(blocks, scales, decode) -> torch.Tensor:
    multiplier = float32(1 / float32(scales * decode)).clamp(max=FLOAT32_MAX)
    return fp4_round(float32(blocks * multiplier[:, :, None]))


def _four_or_six(blocks, found, encode, decode, amax, how: Blocks):
    """Codes and scales of whichever candidate has the smaller error."""
    base = float32(float32(found / FP4_MAX) * encode)
    candidates = []
    for factor in (1.5, 1.0):
        scales = fp8_round(float32(base * factor).clamp(max=448.0), "e4m3")[1]
        codes = _codes(blocks, scales, decode)
        values = float32(float32(codes * scales[:, :, None]) * amax[:, :, None])
        error = float32(float32(values / (FP4_MAX * how.largest)) - blocks)
        error = error.abs() if how.error == "mae" else float32(error * error)
        total = error[:, :, 0]
        for i in range(1, 16):
            total = float32(total + error[:, :, i])
        candidates.append((codes, scales, total))
    codes4, scales4, error4 = candidates[0]
    codes6, scales6, error6 = candidates[1]
    if how.square:
        error4, error6 = (over_squares(e, 16, _tree_sum) for e in (error4, error6))
    four = error4 < error6
    return (
        torch.where(four[:, :, None], codes4, codes6),
        torch.where(four, scales4, scales6),
    )


def _tree_sum(groups: torch.Tensor) -> torch.Tensor:
    """fp32 sum over dimension 1 of ``[G, 16, B]`` by halves."""
    for distance in (8, 4, 2, 1):
        groups = float32(groups[:, :distance] + groups[:, distance : 2 * distance])
    return groups[:, 0]
