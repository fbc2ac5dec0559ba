# SPDX-License-Identifier: Apache-2.0
"""How the norm kernels share rows among programs and walk along a row."""

from __future__ import annotations

from typing import NamedTuple

from ...formats.layout import ceil_div
from .launch import next_power_of_2

MAX_BLOCK = 8192  # a longer row would not stay in the registers of one program
CHUNK = 4096  # the block in which longer rows are walked


class RowBlock(NamedTuple):
    """How one program walks its rows."""

    rows: int
    block: int
    warps: int


def is_long(columns: int) -> bool:
    """Whether a row is walked in chunks."""
    return columns > MAX_BLOCK


def row_block(columns: int) -> RowBlock:
    """Rows at a time, block length and warps: 8 to 16 elements per thread."""
    if is_long(columns):
        return RowBlock(1, CHUNK, 8)
    block = max(16, next_power_of_2(columns))
    rows = max(1, 1024 // block)
    elements = rows * block
    return RowBlock(rows, block, 4 if elements <= 2048 else 8 if elements <= 4096 else 16)


def rows_per_program(rows: int, programs: int, at_a_time: int) -> int:
    """Rows of each program if ``programs`` at most shall share ``rows``."""
    return ceil_div(max(1, ceil_div(rows, programs)), at_a_time) * at_a_time
