# SPDX-License-Identifier: Apache-2.0
"""Where the tiles that block-scaled formats quantize come from.

SOURCE is ``"load"`` (the tensor itself), ``"norm"`` (normalized with known statistics),
``"activation"`` or ``"gradient"`` (of an activation). All give tiles of the dtype of ``x``, the
values that get quantized (fp32 ones with UNROUNDED), and zero outside of the tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation_math import activation_slope_tiles, activation_tile
from .common import INTERPRETED
from .norm_kernels import load_gain, load_shift, normalized_tile
from .tiles import load_tile


@triton.jit
def tile_position(tile, columns, BN: tl.constexpr):
    """Row and column number (int64) of a tile of ``columns`` padded to 128, columns first."""
    across = tl.cdiv(columns, 128) * 128 // BN
    return (tile // across).to(tl.int64), (tile % across).to(tl.int64)


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
def source_tiles(
    x, dy, w, b, mean, rstd, limit, alpha, offset, rm, rn, M, F,
    SOURCE: tl.constexpr, LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, UNROUNDED: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr,
    CLAMPED: tl.constexpr,
):  # fmt: skip
    """Rows rm and columns rn < F; a gated gradient gives two tiles, others the same one twice."""
    limit = tl.cast(limit, tl.float32)
    alpha = tl.cast(alpha, tl.float32)
    offset = tl.cast(offset, tl.float32)
    if SOURCE == "load":
        v = load_tile(x, rm, rn, F, M, F)
        second = v
    elif SOURCE == "norm":
        gain = load_gain(w, rn, rn < F, ZERO_CENTERED)[None, :]
        shift = load_shift(b, rn, rn < F, HAS_BIAS)[None, :]
        v = normalized_tile(x, mean, rstd, gain, shift, rm, rn, M, F, LAYER_NORM, HAS_BIAS)
        # Beyond F it is made of the mean.
        v = tl.where((rn < F)[None, :], v, 0.0)
        if not UNROUNDED:
            v = rounded(v, x.dtype.element_ty)
        second = v
    elif SOURCE == "activation":
        v = activation_tile(x, rm, rn, M, F, limit, alpha, offset, ACT, GATED, CLAMPED)
        v = rounded(v, x.dtype.element_ty)
        second = v
    else:
        v, second = activation_slope_tiles(
            dy, x, rm, rn, M, F, limit, alpha, offset, ACT, GATED, CLAMPED
        )
        v = rounded(v, x.dtype.element_ty)
        second = rounded(second, x.dtype.element_ty)
    return v, second
