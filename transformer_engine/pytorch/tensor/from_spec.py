# SPDX-License-Identifier: Apache-2.0
"""Quantizers from the values that recipes and modules describe quantizations with."""

from __future__ import annotations

from ..constants import DType
from ..formats.spec import RHT_SIGN_MASK, QuantSpec
from ..quantized_tensor import Quantizer

DTYPES = {
    "e4m3": DType.kFloat8E4M3,
    "e5m2": DType.kFloat8E5M2,
    "e2m1": DType.kFloat4E2M1,
}


def quantizer_from_spec(spec: QuantSpec, device=None) -> Quantizer:
    """A quantizer that quantizes as ``spec`` says, in both orientations.

    Raises ValueError for delayed scaling, whose quantizers are bound to a state.
    """
    from . import (  # pylint: disable=import-outside-toplevel,cyclic-import
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        MXFP8Quantizer,
        NVFP4Quantizer,
    )

    dtype = DTYPES[spec.fmt]
    if spec.kind == "current":
        quantizer = Float8CurrentScalingQuantizer(
            dtype, device, force_pow_2_scales=spec.pow2, amax_epsilon=spec.eps
        )
    elif spec.kind == "block":
        quantizer = Float8BlockQuantizer(
            dtype,
            rowwise=True,
            columnwise=True,
            amax_epsilon=spec.eps,
            force_pow_2_scales=spec.pow2,
            block_scaling_dim=spec.dim,
        )
    elif spec.kind == "mxfp8":
        quantizer = MXFP8Quantizer(dtype, with_2d_quantization=spec.dim == 2)
    elif spec.kind == "nvfp4":
        if spec.sign_mask not in (0, RHT_SIGN_MASK):
            raise ValueError(f"No NVFP4Quantizer has the Hadamard signs {spec.sign_mask:#x}.")
        quantizer = NVFP4Quantizer(
            dtype,
            with_rht=spec.rht,
            with_post_rht_amax=spec.rht,
            with_2d_quantization=spec.dim == 2,
            stochastic_rounding=spec.stochastic,
            row_scaled_nvfp4=spec.row_scaled,
            nvfp4_use_4over6=bool(spec.four_over_six),
            nvfp4_e4m3_max=spec.e4m3_max,
            nvfp4_4over6_err_mode=spec.four_over_six.upper() or "MAE",
            with_random_sign_mask=spec.sign_mask != 0,
        )
    else:
        raise ValueError(
            "A quantizer of delayed scaling needs a scale and an amax to be bound to; make a"
            " Float8Quantizer."
        )
    return quantizer
