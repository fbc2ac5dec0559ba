# SPDX-License-Identifier: Apache-2.0
"""Scales of NVFP4: the one of a tensor, those of blocks, and what values are multiplied by.

The rules are those of ``formats.nvfp4_scales`` and ``formats.four_over_six``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .block_tiles import largest_along, reciprocal, spread_columns, spread_rows
from .common import FLOAT32_MAX, INTERPRETED, cast_to_fp8_by_bits
from .fp4_codes import clamped_magnitude


@triton.jit
def encode_scale(amax, E4M3_MAX: tl.constexpr):
    """The scale of a tensor with this amax; the rule is ``formats.nvfp4_scales.encode_scale``."""
    s = tl.div_rn(tl.full(amax.shape, 6.0 * E4M3_MAX, tl.float32), amax)
    s = tl.where(s < FLOAT32_MAX, s, FLOAT32_MAX)
    return tl.where((amax == 0.0) | (s == 0.0), 1.0, s)


@triton.jit
def e4m3_code(v):
    """uint32 E4M3 bytes of fp32 v >= 0, saturating.

    Not as bytes: those came out wrong on Hopper where they were transposed (``tiles.py``).
    """
    if INTERPRETED:
        code = cast_to_fp8_by_bits(v, 1).to(tl.uint32)
    else:
        code = tl.inline_asm_elementwise(
            """{
            .reg .b16 pair;
            .reg .f32 zero;
            mov.f32 zero, 0f00000000;
            cvt.rn.satfinite.e4m3x2.f32 pair, zero, $1;
            cvt.u32.u16 $0, pair;
            }""",
            "=r,f",
            [v],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return code


@triton.jit
def e4m3_to_float(code):
    """fp32 of uint32 E4M3 bytes, not negative."""
    # The fields at the place of an fp32's make a number too small by 2^120.
    return (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def value_multiplier(code, decode):
    """What the values of a block with this scale are multiplied by."""
    r = reciprocal(e4m3_to_float(code) * decode)
    return tl.where(r < FLOAT32_MAX, r, FLOAT32_MAX)


@triton.jit
def share_in_square(m, R: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr):
    """Maximum over each 16 neighbours along the axis of m [R, C], given to all of them."""
    if AXIS == 0:
        m = spread_rows(largest_along(tl.reshape(m, [R // 16, 16, C]), 1), R // 16, C, 16)
    else:
        m = spread_columns(largest_along(tl.reshape(m, [R, C // 16, 16]), 2), R, C // 16, 16)
    return m


@triton.jit
def sum_in_square(m, R: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr):
    """Sum likewise, as a tree of distances 8, 4, 2 and 1."""
    if AXIS == 0:
        m = tl.sum(tl.reshape(m, [R // 16, 2, 8, C]), 1)
        m = tl.sum(tl.reshape(m, [R // 16, 2, 4, C]), 1)
        m = tl.sum(tl.reshape(m, [R // 16, 2, 2, C]), 1)
        m = spread_rows(tl.sum(m, 1), R // 16, C, 16)
    else:
        m = tl.sum(tl.reshape(m, [R, C // 16, 2, 8]), 2)
        m = tl.sum(tl.reshape(m, [R, C // 16, 2, 4]), 2)
        m = tl.sum(tl.reshape(m, [R, C // 16, 2, 2]), 2)
        m = spread_columns(tl.sum(m, 2), R, C // 16, 16)
    return m


@triton.jit
def error_of_blocks(
    v, r, code, amax, SQUARED: tl.constexpr, E4M3_MAX: tl.constexpr, ORDINARY: tl.constexpr
):
    """Sum of the errors of the blocks' values, one after the other.

    With ORDINARY no value overflows and none but 0 is tiny, so a division takes three
    instructions (an interpreter has no fma).
    """
    limit: tl.constexpr = 6.0 * E4M3_MAX
    s = e4m3_to_float(code)
    total = tl.zeros_like(r)
    for i in tl.static_range(16):
        # Magnitudes will do: a value has the sign of its code.
        a = clamped_magnitude(v[i] * r)
        # Adding 2^22 times the power of two in a number of 1 or more rounds it to two bits.
        power = tl.where(a > 1.0, a, 1.0).to(tl.int32, bitcast=True) & 0x7F800000
        magic = (power + 0x0B000000).to(tl.float32, bitcast=True)
        value = ((a + magic) - magic) * s * amax
        if ORDINARY and not INTERPRETED:
            # The quotient, rounded to nearest: checked for every fp32 mantissa.
            q = value * (1.0 / limit)
            q = tl.fma(tl.fma(-q, tl.full(q.shape, limit, tl.float32), value), 1.0 / limit, q)
        else:
            q = tl.div_rn(value, tl.full(value.shape, limit, tl.float32))
        error = q - tl.abs(v[i])
        # Compiled without contraction to fma (see the launch).
        total += error * error if SQUARED else tl.abs(error)
    return total


@triton.jit
def errors_of_candidates(
    v, r4, code4, r6, code6, amax, SQUARED: tl.constexpr, E4M3_MAX: tl.constexpr,
    ORDINARY: tl.constexpr,
):  # fmt: skip
    """Errors with either scale."""
    error4 = error_of_blocks(v, r4, code4, amax, SQUARED, E4M3_MAX, ORDINARY)
    error6 = error_of_blocks(v, r6, code6, amax, SQUARED, E4M3_MAX, ORDINARY)
    return error4, error6


@triton.jit
def four_or_six(
    v, b, encode, decode, amax, R: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr,
    DIM: tl.constexpr, MODE: tl.constexpr, E4M3_MAX: tl.constexpr, AMAX_IS_SCALAR: tl.constexpr,
):  # fmt: skip
    """Scale bytes and multipliers of the candidate with the smaller error, 6 where equal."""
    base = tl.div_rn(b, tl.full(b.shape, 6.0, tl.float32)) * encode
    code4 = e4m3_code(base * 1.5)
    code6 = e4m3_code(base)
    r4 = value_multiplier(code4, decode)
    r6 = value_multiplier(code6, decode)
    if AMAX_IS_SCALAR:
        smallest = amax
        largest = amax
    else:
        smallest = tl.min(tl.min(amax, 1), 0)
        largest = tl.max(tl.max(amax, 1), 0)
    if (smallest > 1e-18) & (largest < 1e30):
        error4, error6 = errors_of_candidates(
            v, r4, code4, r6, code6, amax, MODE == 2, E4M3_MAX, True
        )
    else:
        error4, error6 = errors_of_candidates(
            v, r4, code4, r6, code6, amax, MODE == 2, E4M3_MAX, False
        )
    if DIM == 2:
        error4 = sum_in_square(error4, R, C, AXIS)
        error6 = sum_in_square(error6, R, C, AXIS)
    four = error4 < error6
    return tl.where(four, code4, code6), tl.where(four, r4, r6)
