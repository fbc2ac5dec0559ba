# SPDX-License-Identifier: Apache-2.0
"""Where the tiles that block-scaled formats quantize come from.

SOURCE is ``"load"`` (the tensor itself), ``"norm"`` (normalized with known statistics),
``"activation"`` or ``"gradient"`` (of an activation). All give tiles of the dtype of ``x``, the
values that get quantized (fp32 ones with UNROUNDED), and zero outside of the tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation_math import activation_of, activation_slopes_of, load_halves
from .common import INTERPRETED
from .norm_kernels import load_gain, load_shift, normalized
from .tiles import load_tile


@triton.jit
def tile_position(tile, columns, BN: tl.constexpr):
    """Row and column number (int64) of a tile of ``columns`` padded to 128, columns first."""
    across = tl.cdiv(tl.cdiv(columns, 128) * 128, BN)
    return (tile // across).to(tl.int64), (tile % across).to(tl.int64)


@triton.jit
def grouped_tile_position(
    tile, M, columns, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """The same with GROUP rows of tiles walked together, down each of their columns in turn.

    Programs that run at the same time then write scales that lie together in memory. The last
    group has the rows of tiles that are left.
    """
    across = tl.cdiv(tl.cdiv(columns, 128) * 128, BN)
    group = tile // (across * GROUP)
    inside = tile % (across * GROUP)
    height = tl.minimum(tl.cdiv(M, 128) * 128 // BM - group * GROUP, GROUP)
    return (group * GROUP + inside % height).to(tl.int64), (inside // height).to(tl.int64)


@triton.jit
def rounded(v, dtype: tl.constexpr):
    """fp32 ``v`` in ``dtype``; two values at a time, for which the GPU has faster instructions."""
    if INTERPRETED or dtype == tl.float32:
        out = v.to(dtype)
    elif dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [v], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        out = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [v], dtype=tl.float16, is_pure=True, pack=2
        )
    return out


@triton.jit
def load_source(x, dy, rm, rn, M, F, SOURCE: tl.constexpr, GATED: tl.constexpr):
    """What rows rm and columns rn < F are made of: three tiles, as they lie in memory."""
    a, g = load_halves(x, rm, rn, M, F, GATED)
    d = a
    if SOURCE == "gradient":
        d = load_tile(dy, rm, rn, F, M, F)
    return a, g, d


@triton.jit
def make_tiles(
    loaded, w, b, mean, rstd, limit, alpha, offset, rm, rn, M, F, dtype: tl.constexpr,
    SOURCE: tl.constexpr, LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, UNROUNDED: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """Tiles of what was loaded; a gated gradient gives two, others the same one twice."""
    limit = tl.cast(limit, tl.float32)
    alpha = tl.cast(alpha, tl.float32)
    offset = tl.cast(offset, tl.float32)
    a, g, d = loaded
    if SOURCE == "load":
        v = a
        second = v
    elif SOURCE == "norm":
        gain = load_gain(w, rn, rn < F, ZERO_CENTERED)[None, :]
        shift = load_shift(b, rn, rn < F, HAS_BIAS)[None, :]
        v = normalized(a, mean, rstd, gain, shift, rm, M, LAYER_NORM, HAS_BIAS)
        # Beyond F it is made of the mean.
        v = tl.where((rn < F)[None, :], v, 0.0)
        if not UNROUNDED:
            v = rounded(v, dtype)
        second = v
    elif SOURCE == "activation":
        v = activation_of(a, g, rm, M, limit, alpha, offset, ACT, GATED, CLAMPED)
        v = rounded(v, dtype)
        second = v
    else:
        v, second = activation_slopes_of(d, a, g, rm, M, limit, alpha, offset, ACT, GATED, CLAMPED)
        v = rounded(v, dtype)
        second = rounded(second, dtype)
    return v, second


@triton.jit
def source_tiles(
    x, dy, w, b, mean, rstd, limit, alpha, offset, rm, rn, M, F,
    SOURCE: tl.constexpr, LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, UNROUNDED: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """Rows rm and columns rn < F; a gated gradient gives two tiles, others the same one twice."""
    loaded = load_source(x, dy, rm, rn, M, F, SOURCE, GATED)
    return make_tiles(
        loaded, w, b, mean, rstd, limit, alpha, offset, rm, rn, M, F, x.dtype.element_ty,
        SOURCE, LAYER_NORM, HAS_BIAS, ZERO_CENTERED, UNROUNDED, ACT, GATED, CLAMPED,
    )  # fmt: skip
