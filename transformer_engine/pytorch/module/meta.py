# SPDX-License-Identifier: Apache-2.0
"""The precision metadata that users and frameworks read off a module, derived on demand.

Forward keeps nothing but the recipe and, for delayed scaling, the scaling state; dictionaries and
quantizer objects are made when somebody looks.
"""

from __future__ import annotations

from ...common.recipe import DelayedScaling
from ..quantization import DelayedScalingRecipeState, RecipeState, get_fp8_max

DIRECTIONS = (("scaling_fwd", "forward"), ("scaling_bwd", "backward"))


def fp8_meta_of(module) -> dict:
    """``module.fp8_meta``: one dictionary per module, refreshed at each look."""
    meta, recipe = module._fp8_meta, module._recipe
    if recipe is None and module._delayed_scaling is not None:
        # Only compiled code has run, which writes no attributes; the scaling state is live.
        recipe = DelayedScaling(amax_history_len=module._delayed_scaling.fwd_history.shape[0])
    meta["fp8_checkpoint"] = module.fp8 or module.fp8_calibration
    if recipe is None:
        return meta
    if meta.get("recipe") != recipe or meta.get("_scaling") is not module._delayed_scaling:
        meta["recipe"] = recipe
        meta["_scaling"] = module._delayed_scaling
        meta["num_gemms"] = module.num_gemms
        meta["fp8_max_fwd"] = get_fp8_max(recipe, True)
        meta["fp8_max_bwd"] = get_fp8_max(recipe, False)
        for (key, mode), slots in zip(DIRECTIONS, module.delayed_slots()):
            meta[key] = _recipe_state(module, recipe, mode, slots)
    return meta


def _recipe_state(module, recipe, mode: str, slots: int) -> RecipeState:
    """The recipe state of one direction; with delayed scaling it shows the live tensors."""
    options = {"mode": mode, "num_quantizers": slots, "device": module.delayed_device()}
    if recipe.delayed() and module._delayed_scaling is not None:
        return DelayedScalingRecipeState(recipe, owner=module._delayed_scaling, **options)
    return RecipeState.create(recipe, **options)


def quantizers_of(module) -> dict:
    """``module.quantizers``: the quantizers of the last recipe, empty lists before any."""
    meta = fp8_meta_of(module)
    if "recipe" not in meta:
        return {key: [] for key, _ in DIRECTIONS}
    return {key: meta[key].make_quantizers() for key, _ in DIRECTIONS}
