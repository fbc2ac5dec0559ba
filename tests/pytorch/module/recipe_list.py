# SPDX-License-Identifier: Apache-2.0
"""Every kind of recipe under a short name, for tests that must hold for all of them."""

from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.recipe_state import DelayedScalingRequest
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


# --- factories of custom recipes ------------------------------------------------------------------


def tensor_type(role):
    """What a slot is for; slots that modules do not quantize may have no role."""
    return "" if role is None else role.tensor_type


def block(fmt=E4M3, dim=1):
    """A quantizer of scales of 128 values."""
    return Float8BlockQuantizer(fmt, rowwise=True, columnwise=True, block_scaling_dim=dim)


def square_mxfp8(role):
    """Square MXFP8 blocks for input and weight, which no other recipe has for inputs."""
    if tensor_type(role).startswith("grad"):
        return MXFP8Quantizer(E5M2)
    return MXFP8Quantizer(E4M3, with_2d_quantization=True)


def two_formats(role):
    """MXFP8 in the forward GEMM; dgrad with FP8 blocks, wgrad with transformed NVFP4."""

    def transformed(**options):
        return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, **options)

    if tensor_type(role) == "weight":
        return HybridQuantizer(
            rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=block(dim=2)
        )
    if tensor_type(role) == "grad_output":
        return HybridQuantizer(
            rowwise_quantizer=block(E5M2),
            columnwise_quantizer=transformed(stochastic_rounding=True),
        )
    return HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=transformed()
    )


def from_dequantized(role):
    """NVFP4 forward; backward in MXFP8 of the values that the forward pass saw."""
    if tensor_type(role).startswith("grad"):
        return MXFP8Quantizer(E4M3)
    return HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(),
        columnwise_quantizer=MXFP8Quantizer(E4M3),
        columnwise_source="rowwise_dequantized",
    )


def forward_only(role):
    """Current scaling in the forward GEMM, backward in high precision."""
    if tensor_type(role).startswith("grad"):
        return IdentityQuantizer()
    return HybridQuantizer(
        rowwise_quantizer=Float8CurrentScalingQuantizer(E4M3, "cpu"),
        columnwise_quantizer=IdentityQuantizer(),
    )


def managed(role):
    """Delayed scaling, as a request."""
    del role
    return DelayedScalingRequest(amax_history_len=3)


# --- the recipes ----------------------------------------------------------------------------------

_MAKERS = {
    "none": lambda: None,
    "current": Float8CurrentScaling,
    "delayed": lambda: DelayedScaling(amax_history_len=3),
    "block": Float8BlockScaling,
    "block_hybrid": lambda: Float8BlockScaling(
        True, Format.HYBRID, w_block_scaling_dim=1, grad_block_scaling_dim=2
    ),
    "mxfp8": MXFP8BlockScaling,
    "mxfp8_2d": lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling,  # transformed, stochastic, square blocks for weights
    "nvfp4_plain": lambda: NVFP4BlockScaling(True, True, True),
    "nvfp4_row_scaled": lambda: NVFP4BlockScaling(True, row_scaled_activation=True),
    "nvfp4_four_over_six": lambda: NVFP4BlockScaling(True, nvfp4_4over6="all"),
    "current_hp": lambda: Float8CurrentScaling(backward_override="high_precision"),
    "block_dq": lambda: Float8BlockScaling(backward_override="dequantized"),
    "mxfp8_hp": lambda: MXFP8BlockScaling(backward_override="high_precision"),
    "mxfp8_dq": lambda: MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4_dq": lambda: NVFP4BlockScaling(backward_override="dequantized"),
    "custom_square": lambda: CustomRecipe(square_mxfp8),
    "custom_two_formats": lambda: CustomRecipe(two_formats),
    "custom_from_dequantized": lambda: CustomRecipe(from_dequantized),
    "custom_forward_only": lambda: CustomRecipe(forward_only),
    "custom_delayed": lambda: CustomRecipe(managed),
}

PER_TENSOR = ("current", "delayed")
BLOCKS = tuple(name for name in _MAKERS if name.startswith(("block", "mxfp8", "nvfp4")))
BLOCKS = tuple(name for name in BLOCKS if not name.endswith(("_hp", "_dq")))
OVERRIDES = tuple(name for name in _MAKERS if name.endswith(("_hp", "_dq")))
CUSTOM = tuple(name for name in _MAKERS if name.startswith("custom"))
ALL_RECIPES = tuple(name for name in _MAKERS if name != "none")
# Recipes whose weights must have multiples of 32 as both dimensions.
_MULTIPLES_OF_32 = ("mxfp8", "custom_square", "custom_two_formats", "custom_from_dequantized")


def recipe_of(name):
    """A new recipe of the given name; None for "none"."""
    return _MAKERS[name]()


def out_features(name, default):
    """Width of the output of a linear layer that fits the recipe."""
    return 96 if name.startswith(_MULTIPLES_OF_32) else default
