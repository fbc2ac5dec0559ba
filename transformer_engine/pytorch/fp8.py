# SPDX-License-Identifier: Apache-2.0
"""Deprecated: the names of ``transformer_engine.pytorch.quantization`` under the module's former
name.
"""

import warnings

from ..common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from .quantization import (
    DelayedScalingRecipeState,
    Float8CurrentScalingRecipeState,
    FP8GlobalStateManager,
    RecipeState,
    _amax_and_scale_update,
    _compute_amax_and_update_history,
    _compute_scaling_factor,
    _default_get_amax_and_update_history,
    _default_sf_compute,
    _update_amax_history,
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    check_recipe_support,
    fp8_autocast,
    fp8_model_init,
    get_default_fp8_recipe,
    get_fp4_te_dtype,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
    split_and_copy,
)

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRecipeState",
    "FP8GlobalStateManager",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingRecipeState",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "RecipeState",
    "_amax_and_scale_update",
    "_compute_amax_and_update_history",
    "_compute_scaling_factor",
    "_default_get_amax_and_update_history",
    "_default_sf_compute",
    "_update_amax_history",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "split_and_copy",
]

warnings.warn(
    "transformer_engine.pytorch.fp8 is deprecated; import from"
    " transformer_engine.pytorch.quantization.",
    DeprecationWarning,
    stacklevel=2,
)
