# SPDX-License-Identifier: Apache-2.0
"""What a call of a module is: its recipe, and whether a compiler takes it."""

from __future__ import annotations

from ..dynamo.capability import compile_obstacle
from ..fp8_global_state import FP8GlobalStateManager
from ..module._norm_module import NormModule
from ..module.base import TransformerEngineBaseModule
from .rows import ModuleRow
from .words import recipe_words

OURS = (TransformerEngineBaseModule, NormModule)


def module_row(
    module, name: str, call: int, recomputed: bool, args: tuple, kwargs: dict
) -> ModuleRow:
    """The row of the call ``module(*args, **kwargs)`` that is about to run."""
    recipe, precision = active_recipe(isinstance(module, NormModule))
    given = args[0] if args else kwargs.get("inp")
    reason = compile_obstacle(module, *args, **kwargs)
    return ModuleRow(
        *(name, type(module).__name__, call, recipe, precision, not reason, reason),
        tuple(getattr(given, "shape", ())),
        str(getattr(given, "dtype", "")).removeprefix("torch."),
        recomputed,
    )


def active_recipe(norm: bool) -> tuple[str, str]:
    """Class name of the active recipe, "" if none is, and what it means for a module in words."""
    state = FP8GlobalStateManager.quantization_state
    recipe = state.fp8_recipe
    if recipe is None or not (state.fp8_enabled or state.fp8_calibration):
        return "", "none active: high precision"
    words = recipe_words(recipe)
    if not state.fp8_enabled:
        words = f"high precision, calibrating {words}"
    return type(recipe).__name__, words + "; a norm by itself is never quantized" * norm
