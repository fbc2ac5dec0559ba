# SPDX-License-Identifier: Apache-2.0
"""Recipes: how tensors are quantized. See `Recipe` for what they have in common.

Recipes do not depend on PyTorch. Which of them the modules of this version compute is said by
``transformer_engine.pytorch.autocast``, which refuses the others.
"""

from dataclasses import fields as _fields

from ._base import BACKWARD_OVERRIDES as _BACKWARD_OVERRIDES
from ._base import Format, MMParams, QParams, Recipe, RecipeError, _FormatHelper
from ._block import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from ._custom import CustomRecipe
from ._per_tensor import DelayedScaling, Float8CurrentScaling

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "RecipeError",
]

# Checkpoints name the classes by the module where users find them, so that other versions can load
# them.
for _cls in (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
    RecipeError,
    _FormatHelper,
):
    _cls.__module__ = __name__
for _cls in Recipe.__subclasses__():
    _cls._checked_by = _cls
    _cls._argument_names = tuple(field.name for field in _fields(_cls) if field.init)
    _cls._other_names = tuple(field.name for field in _fields(_cls) if not field.init)
del _cls
