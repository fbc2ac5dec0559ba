# SPDX-License-Identifier: Apache-2.0
"""Tiles of activations and of their gradients in fp32; the formulas are the reference's.

ACT names the nonlinearity: gelu, sigmoid, qgelu, relu, srelu, silu or scaled_silu (silu with the
factor alpha inside of the sigmoid, of clamped_swiglu).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import INTERPRETED
from .tiles import load_tile, widen


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), within about 4 ulp; exact limits for infinite x.

    ``1 / (1 + tl.exp(-x))`` takes fifteen instructions, most of them for subnormal intermediate
    values that do not matter here, and would bound the kernels by arithmetic. The constants are
    -log2(e) and 1.
    """
    if INTERPRETED:
        s = 1.0 / (1.0 + tl.exp(-x))
    else:
        s = tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return s


@triton.jit
def activate(a, alpha, ACT: tl.constexpr):
    """f(a) in fp32. Where a NaN must survive a comparison, the comparison is false for it."""
    if ACT == "relu":
        f = tl.where(a < 0.0, 0.0, a)
    elif ACT == "srelu":
        root = tl.where(a < 0.0, 0.0, a)
        f = root * root
    elif ACT == "sigmoid":
        f = sigmoid(a)
    elif ACT == "silu":
        f = a * sigmoid(a)
    elif ACT == "scaled_silu":
        f = a * sigmoid(alpha * a)
    elif ACT == "qgelu":
        f = a * sigmoid(1.702 * a)
    else:
        f = a * sigmoid(a * (2 * 0.79788456 + (2 * 0.03567741) * a * a))
    return f


@triton.jit
def activate_and_backward(a, d, alpha, ACT: tl.constexpr):
    """f(a) and f'(a) * d in fp32."""
    if ACT == "relu":
        f = tl.where(a < 0.0, 0.0, a)
        da = tl.where(a <= 0.0, 0.0, d)
    elif ACT == "srelu":
        root = tl.where(a < 0.0, 0.0, a)
        f = root * root
        da = root * d * 2.0
    elif ACT == "sigmoid":
        f = sigmoid(a)
        da = f * (1.0 - f) * d
    else:
        if ACT == "silu":
            s = sigmoid(a)
            slope = a
        elif ACT == "scaled_silu":
            s = sigmoid(alpha * a)
            slope = alpha * a
        elif ACT == "qgelu":
            s = sigmoid(1.702 * a)
            slope = 1.702 * a
        else:
            s = sigmoid(a * (2 * 0.79788456 + (2 * 0.03567741) * a * a))
            slope = a * (2 * 0.79788456 + (2 * 0.1070322243) * a * a)
        f = a * s
        da = (s + slope * (s * (1.0 - s))) * d
    return f, da


@triton.jit
def clamp_gate(g, limit):
    """clamp(g, -limit, limit); a NaN stays."""
    return tl.where(g > limit, limit, tl.where(g < -limit, -limit, g))


@triton.jit
def row_length(F, GATED: tl.constexpr):
    """Elements of a row of x. A sum, for 2 * F would look better aligned than F (rows_of_quads)."""
    if GATED:
        length = F + F
    else:
        length = F
    return length


@triton.jit
def load_halves(x, rm, rn, M, F, GATED: tl.constexpr):
    """Tiles of the activated half and of the gate, as they lie in memory; the first twice."""
    stride = row_length(F, GATED)
    a = load_tile(x, rm, rn, stride, M, F)
    if GATED:
        g = load_tile(x + F, rm, rn, stride, M, F)
    else:
        g = a
    return a, g


@triton.jit
def activation_of(
    a, g, rm, M, limit, alpha, offset, ACT: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """fp32 output tile; +0 in rows beyond M, because every activation is 0 at 0 or gated by 0."""
    a = widen(a)
    if GATED:
        g = widen(g)
        if CLAMPED:
            a = tl.where(a > limit, limit, a)
            g = tl.where((rm < M)[:, None], clamp_gate(g, limit) + offset, 0.0)
        out = activate(a, alpha, ACT) * g
    else:
        out = activate(a, alpha, ACT)
    return out


@triton.jit
def activation_slopes_of(
    d, a, g, rm, M, limit, alpha, offset, ACT: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """fp32 gradient tiles of the activated half and of the gate (the same one twice if ungated)."""
    d = widen(d)
    a = widen(a)
    if GATED:
        g = widen(g)
        if CLAMPED:
            f, da = activate_and_backward(tl.where(a > limit, limit, a), d, alpha, ACT)
            gate = tl.where((rm < M)[:, None], clamp_gate(g, limit) + offset, 0.0)
            # At -inf the formula is NaN and its limit 0.
            da = tl.where((a > limit) | (a == float("-inf")), 0.0, da * gate)
            dg = tl.where((g > limit) | (g < -limit), 0.0, f * d)
        else:
            f, da = activate_and_backward(a, d, alpha, ACT)
            da = da * g
            dg = f * d
    else:
        f, da = activate_and_backward(a, d, alpha, ACT)
        dg = da
    return da, dg


@triton.jit
def activation_tile(
    x, rm, rn, M, F, limit, alpha, offset, ACT: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """``activation_of`` rows rm and columns rn < F."""
    a, g = load_halves(x, rm, rn, M, F, GATED)
    return activation_of(a, g, rm, M, limit, alpha, offset, ACT, GATED, CLAMPED)


@triton.jit
def activation_slope_tiles(
    dy, x, rm, rn, M, F, limit, alpha, offset, ACT: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """``activation_slopes_of`` rows rm and columns rn < F."""
    d = load_tile(dy, rm, rn, F, M, F)
    a, g = load_halves(x, rm, rn, M, F, GATED)
    return activation_slopes_of(d, a, g, rm, M, limit, alpha, offset, ACT, GATED, CLAMPED)
