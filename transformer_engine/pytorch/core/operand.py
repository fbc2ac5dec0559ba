# SPDX-License-Identifier: Apache-2.0
"""GEMM operands: high-precision values, or the buffers of one or both orientations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple, Optional

from torch import Tensor

from ..backends.registry import capability_of
from ..formats.layout import Quantized, produced_spec
from ..formats.spec import decode_quant
from .config import ModuleConfig, OperandConfig
from .python_quantizers import is_python, python_quantized


class Part(NamedTuple):
    """One orientation of a quantized operand, and the encoded ``QuantSpec`` it was made with."""

    data: Optional[Tensor] = None
    scale_inv: Optional[Tensor] = None
    amax: Optional[Tensor] = None
    quant: str = ""


NO_PART = Part()


class Operand(NamedTuple):
    """A GEMM operand ``[rows, columns]``: what is not there is None or ``NO_PART``."""

    hp: Optional[Tensor] = None
    row: Part = NO_PART
    col: Part = NO_PART


def operand_from(buffers: Quantized, row_quant: str, col_quant: str, hp=None) -> Operand:
    """The operand that ``buffers`` are; per-tensor FP8 has one scale for both orientations."""
    col_scale_inv = buffers.scale_inv if buffers.col_scale_inv is None else buffers.col_scale_inv
    row = Part(buffers.row, buffers.scale_inv, part_amax(buffers.amax, row_quant), row_quant)
    col = Part(buffers.col, col_scale_inv, part_amax(buffers.col_amax, col_quant), col_quant)
    return Operand(
        hp,
        NO_PART if buffers.row is None else row,
        NO_PART if buffers.col is None else col,
    )


def part_amax(amax: Optional[Tensor], quant: str) -> Optional[Tensor]:
    """The amax where it is needed to read the bytes."""
    return amax if quant.startswith("nvfp4") else None


def made_quant(cfg: ModuleConfig, quant: str, producer: str, rows, columns, device) -> str:
    """How a ``[rows, columns]`` tensor comes out if ``producer`` quantizes it as ``quant`` asks."""
    if "swizzled" not in quant:
        return quant
    return produced_spec(
        decode_quant(quant), producer, rows, columns, capability_of(device), cfg.flags
    ).encode()


def draw(k, quant: str, x: Tensor) -> Optional[Tensor]:
    """Random state for the stochastic rounding of ``x``, if ``quant`` rounds so."""
    return k.rng_state(x) if "stochastic" in quant else None


def recorded_draws(k) -> tuple[SimpleNamespace, list]:
    """Leaf ops as those of ``k`` that note what is drawn, and the list of it."""
    drawn: list = []

    def rng_state(like: Tensor) -> Tensor:
        drawn.append(k.rng_state(like))
        return drawn[-1]

    return SimpleNamespace(**{**vars(k), "rng_state": rng_state}), drawn


def repeated_draws(k, draws: Tensor) -> SimpleNamespace:
    """Leaf ops as those of ``k`` that repeat ``draws`` ``[n, 2]`` instead of drawing."""
    following = iter(draws.unbind())
    return SimpleNamespace(**{**vars(k), "rng_state": lambda like: next(following)})


def quantized_leaf(
    k, x: Tensor, quant: str, scale: Optional[Tensor], slot: int, rowwise: bool, columnwise: bool
) -> Quantized:
    """``x`` quantized by the leaf op, or by a quantizer of the user."""
    if is_python(quant):
        return python_quantized(k, x, quant, rowwise, columnwise)
    rng = draw(k, quant, x)
    return Quantized(*k.quantize(x, quant, scale, slot, None, rowwise, columnwise, rng))


def quantize_operand(
    k,
    cfg: ModuleConfig,
    operand: OperandConfig,
    x: Tensor,
    producer: str,
    scale: Optional[Tensor],
    slot: int,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Operand, Optional[Tensor]]:
    """``x [M, K]`` as an operand in the orientations asked for; and its amax if one is known.

    An orientation without a format is ``x`` itself.
    """
    hp = x if (rowwise and not operand.row) or (columnwise and not operand.col) else None
    row_wanted, col_wanted = rowwise and bool(operand.row), columnwise and bool(operand.col)
    dequantize = columnwise and operand.dequantized_columns
    if not (row_wanted or col_wanted or dequantize):
        return Operand(hp if rowwise or columnwise else x), None
    rows, columns = x.shape

    def run(quant: str, source: Tensor, row: bool, col: bool):
        quant = made_quant(cfg, quant, producer, rows, columns, x.device)
        return quantized_leaf(k, source, quant, scale, slot, row, col), quant

    if not operand.hybrid:
        buffers, quant = run(operand.row, x, row_wanted, col_wanted)
        return operand_from(buffers, quant, quant, hp), buffers.amax
    row = col = NO_PART
    amax = None
    if row_wanted or operand.col_from_row:
        buffers, quant = run(operand.row, x, True, False)
        row, amax = operand_from(buffers, quant, "").row, buffers.amax
    if dequantize:
        hp = dequantized(k, row, x.dtype)
    if col_wanted:
        source = dequantized(k, row, x.dtype) if operand.col_from_row else x
        buffers, quant = run(operand.col, source, False, True)
        col = operand_from(buffers, "", quant).col
        amax = buffers.amax if amax is None else amax
    return Operand(hp, row if row_wanted else NO_PART, col), amax


def dequantized(k, part: Part, dtype) -> Tensor:
    """The values of a rowwise part."""
    if is_python(part.quant):
        return part.data.to(dtype)
    return k.dequantize(part.data, part.scale_inv, part.amax, part.quant, False, dtype)
