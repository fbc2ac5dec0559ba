# SPDX-License-Identifier: Apache-2.0
"""Casts of fp32 values to and from E2M1 codes, eight of which make a 32-bit word.

GPUs before Blackwell have no instruction for it. The numbers are those of ``formats.fp4``.
"""

# pylint: disable=comparison-with-itself

from __future__ import annotations

import triton
import triton.language as tl

from .common import INTERPRETED

# E2M1 has the spacing 0.5 below 2, 1 below 4 and 2 above, so the code of a magnitude a <= 6 is the
# smallest of 2 a, a + 2 and a / 2 + 4, each rounded to a whole number. Adding 2^23 makes the fp32
# addition round so, and leaves the number in the last bits. The minimum with 6 turns a NaN into 6.
# The sign is shifted into the word from the left, then the code's three bits; what the leading bits
# of 2^23 add up to in the word is subtracted at the end.
_CODE = """
abs.f32 a, $VALUE;
min.f32 a, a, 0f40C00000;
fma.rn.f32 t, a, 0f40000000, 0f4B000000;
add.rn.f32 u, a, 0f4B000002;
min.f32 t, t, u;
fma.rn.f32 u, a, 0f3F000000, 0f4B000004;
min.f32 t, t, u;
shf.l.wrap.b32 word, $VALUE, word, 1;
mov.b32 code, t;
mad.lo.u32 word, word, 8, code;"""
# The same for stochastic rounding, which ``formats.fp4.stochastic_cast_to_fp4`` defines; the
# addition of 2^23 rounds down. The exponent fields of a power and of 2 / power, which is
# 1 / spacing, add up to 255.
_STOCHASTIC_CODE = """
abs.f32 a, $VALUE;
min.f32 a, a, 0f40C00000;
mov.b32 power, a;
and.b32 power, power, 0x7F800000;
max.s32 power, power, 0x3F800000;
prmt.b32 code, $NOISE, 0x4B000000, 0x765$BYTE;
mov.b32 t, code;
sub.rn.f32 t, t, 0f4B000000;
sub.s32 code, power, 0x04800000;
mov.b32 u, code;
fma.rn.f32 t, t, u, a;
min.f32 t, t, 0f40C00000;
sub.s32 code, 0x7F800000, power;
mov.b32 u, code;
shr.u32 code, power, 22;
add.s32 code, code, 0x4AFFFF02;
mov.b32 a, code;
fma.rz.f32 t, t, u, a;
shf.l.wrap.b32 word, $VALUE, word, 1;
mov.b32 code, t;
mad.lo.u32 word, word, 8, code;"""


def _word(code: str) -> str:
    """Assembly of a word of eight codes from $1 to $8, noise in $9 and $10."""
    lines = "{ .reg .f32 a, t, u; .reg .b32 word, code, power; mov.b32 word, 0;"
    for i in range(7, -1, -1):
        step = code.replace("$VALUE", f"${i + 1}").replace("$NOISE", f"${9 + i // 4}")
        lines += step.replace("$BYTE", str(i % 4))
    return lines + "sub.u32 $0, word, 0xFB000000; }"


_WORD = tl.constexpr(_word(_CODE))
_STOCHASTIC_WORD = tl.constexpr(_word(_STOCHASTIC_CODE))


@triton.jit
def sign_bit(p):
    """8 where fp32 p is negative (-0 is, a NaN is not), else 0; int32."""
    return tl.where(p != p, 0, (p.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def clamped_magnitude(p):
    """min(|p|, 6), 6 for a NaN."""
    a = tl.abs(p)
    return tl.where(a < 6.0, a, 6.0)


@triton.jit
def fp4_code(p):
    """int32 codes 0 to 15 of fp32 p: nearest even, saturating."""
    a = clamped_magnitude(p)
    t = tl.minimum(a * 2.0 + 8388608.0, a + 8388610.0)
    t = tl.minimum(t, a * 0.5 + 8388612.0)
    return (t.to(tl.int32, bitcast=True) & 7) | sign_bit(p)


@triton.jit
def fp4_code_to_float(code):
    """fp32 values of int32 codes."""
    # The bits of the code at the end of the exponent are a number too small by 2^126.
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def stochastic_fp4_code(p, noise):
    """int32 codes of fp32 p, rounded up with the probability that ``noise``, 0 to 255, decides."""
    a = clamped_magnitude(p)
    power = tl.maximum(a.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    spacing = power.to(tl.float32, bitcast=True) * 0.5
    total = noise.to(tl.float32) * (spacing * 0.00390625) + a
    total = tl.where(total < 6.0, total, 6.0)
    # 1 / spacing, a power of two, by its exponent: 2 for power 1, 1 for 2 and 0.5 for 4.
    inverse = (0x7F800000 - power).to(tl.float32, bitcast=True)
    multiple = (total * inverse).to(tl.int32)
    return (multiple + ((power - 0x3F800000) >> 22)) | sign_bit(p)


@triton.jit
def fp4_word(p):
    """uint32 words whose i-th nibble is the code of the fp32 tile ``p[i]``, nearest even."""
    if INTERPRETED:
        word = fp4_code(p[0])
        for i in tl.static_range(1, 8):
            word = word | (fp4_code(p[i]) << (4 * i))
        word = word.to(tl.uint32, bitcast=True)
    else:
        word = tl.inline_asm_elementwise(
            _WORD,
            "=r,f,f,f,f,f,f,f,f",
            [p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return word


@triton.jit
def stochastic_fp4_word(p, noise, second):
    """The same rounded stochastically; byte i of the two uint32 words is the noise of ``p[i]``."""
    if INTERPRETED:
        word = stochastic_fp4_code(p[0], noise & 0xFF)
        for i in tl.static_range(1, 4):
            word = word | (stochastic_fp4_code(p[i], (noise >> (8 * i)) & 0xFF) << (4 * i))
        for i in tl.static_range(4):
            code = stochastic_fp4_code(p[4 + i], (second >> (8 * i)) & 0xFF)
            word = word | (code << (16 + 4 * i))
        word = word.to(tl.uint32, bitcast=True)
    else:
        word = tl.inline_asm_elementwise(
            _STOCHASTIC_WORD,
            "=r,f,f,f,f,f,f,f,f,r,r",
            [p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], noise, second],
            dtype=tl.uint32,
            is_pure=True,
            pack=1,
        )
    return word
