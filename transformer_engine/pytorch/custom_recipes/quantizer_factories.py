# SPDX-License-Identifier: Apache-2.0
"""Factories that quantize as the built-in recipes do: points to start from for a ``CustomRecipe``.

Each takes the ``QuantizerRole`` of a tensor, or None, and returns a new quantizer.
"""

from __future__ import annotations

from typing import Optional

from ..constants import DType
from ..quantized_tensor import Quantizer
from ..recipe_state import DelayedScalingRequest, QuantizerRole
from ..tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

Role = Optional[QuantizerRole]


def is_linear(role: Role, tensor_type: str = "") -> bool:
    """Whether the tensor belongs to a linear layer, and is its ``tensor_type`` if one is given."""
    if role is None or role.module_type not in ("linear", "grouped_linear"):
        return False
    return tensor_type in ("", role.tensor_type)


def high_precision_factory(role: Role) -> Quantizer:
    """Nothing is quantized."""
    del role
    return IdentityQuantizer()


def delayed_scaling_factory(role: Role) -> DelayedScalingRequest:
    """Delayed scaling with E4M3 forward and E5M2 backward, its state managed by the module."""
    del role
    return DelayedScalingRequest()


def current_scaling_factory(role: Role) -> Quantizer:
    """Current scaling: E5M2 for output gradients, E4M3 for everything else."""
    gradient = is_linear(role, "grad_output")
    dtype = DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3
    return Float8CurrentScalingQuantizer(dtype, device=None)


def float8_block_scaling_factory(role: Role) -> Quantizer:
    """E4M3 with power-of-two scales: of 128x128 values for weights, of 1x128 otherwise."""
    return Float8BlockQuantizer(
        DType.kFloat8E4M3,
        rowwise=True,
        columnwise=True,
        block_scaling_dim=2 if is_linear(role, "weight") else 1,
    )


def mxfp8_factory(role: Role) -> Quantizer:
    """MXFP8 with E4M3."""
    del role
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: Role) -> Quantizer:
    """NVFP4: square blocks for weights, Hadamard transform otherwise, stochastic gradients."""
    if is_linear(role, "weight"):
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(
        with_rht=True,
        with_post_rht_amax=True,
        stochastic_rounding=is_linear(role, "grad_output"),
    )
