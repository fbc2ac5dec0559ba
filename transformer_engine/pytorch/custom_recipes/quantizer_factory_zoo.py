# SPDX-License-Identifier: Apache-2.0
"""Factories that mix formats: different ones in the forward and in the backward GEMMs.

fprop reads the rowwise values of input and weight, dgrad and wgrad their columnwise ones, so what
differs between the passes is a ``HybridQuantizer``.
"""

from __future__ import annotations

from ..constants import DType
from ..quantized_tensor import Quantizer
from ..tensor import HybridQuantizer, IdentityQuantizer, MXFP8Quantizer, NVFP4Quantizer
from .quantizer_factories import Role, current_scaling_factory, is_linear, nvfp4_factory

__all__ = [
    "high_precision_fwd_mxfp8_bwd_factory",
    "mxfp8_fwd_high_precision_bwd_factory",
    "mxfp8_fwd_nvfp4_bwd_factory",
    "nvfp4_1d_weight_factory",
    "nvfp4_linear_fp8_dpa_factory",
    "nvfp4_row_scaled_fwd_high_precision_bwd_factory",
    "nvfp4_row_scaled_fwd_mxfp8_bwd_factory",
]


def _mxfp8() -> Quantizer:
    return MXFP8Quantizer(DType.kFloat8E4M3)


def _row_scaled() -> Quantizer:
    return NVFP4Quantizer(row_scaled_nvfp4=True)


def _passes(role: Role, forward, backward) -> Quantizer:
    """``forward()`` for fprop and ``backward()`` for dgrad and wgrad."""
    if is_linear(role, "grad_output") or is_linear(role, "grad_input"):
        return backward()
    return HybridQuantizer(rowwise_quantizer=forward(), columnwise_quantizer=backward())


def high_precision_fwd_mxfp8_bwd_factory(role: Role) -> Quantizer:
    """fprop in high precision, dgrad and wgrad in MXFP8."""
    return _passes(role, IdentityQuantizer, _mxfp8)


def mxfp8_fwd_high_precision_bwd_factory(role: Role) -> Quantizer:
    """fprop in MXFP8, dgrad and wgrad in high precision."""
    return _passes(role, _mxfp8, IdentityQuantizer)


def mxfp8_fwd_nvfp4_bwd_factory(role: Role) -> Quantizer:
    """fprop in MXFP8, dgrad and wgrad in NVFP4."""
    return _passes(role, _mxfp8, lambda: nvfp4_factory(role))


def nvfp4_1d_weight_factory(role: Role) -> Quantizer:
    """NVFP4 with weights in blocks of 1x16 instead of 16x16."""
    return NVFP4Quantizer() if is_linear(role, "weight") else nvfp4_factory(role)


def nvfp4_row_scaled_fwd_mxfp8_bwd_factory(role: Role) -> Quantizer:
    """fprop in NVFP4 with a global scale per row of the input, dgrad and wgrad in MXFP8."""
    forward = NVFP4Quantizer if is_linear(role, "weight") else _row_scaled
    return _passes(role, forward, _mxfp8)


def nvfp4_row_scaled_fwd_high_precision_bwd_factory(role: Role) -> Quantizer:
    """fprop in NVFP4 with a global scale per row of the input, the rest in high precision."""
    forward = NVFP4Quantizer if is_linear(role, "weight") else _row_scaled
    return _passes(role, forward, IdentityQuantizer)


def nvfp4_linear_fp8_dpa_factory(role: Role) -> Quantizer:
    """NVFP4 for linear layers; the tensors of attention, which have other roles, in FP8."""
    if role is None or is_linear(role):
        return nvfp4_factory(role)
    return current_scaling_factory(role)
