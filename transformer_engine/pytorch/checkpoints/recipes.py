# SPDX-License-Identifier: Apache-2.0
"""The recipes that a checkpoint may hold: their names, their fields, and what state they imply."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Mapping

from ...common import recipe as recipes
from ...common.recipe import Format, Recipe
from .values import Meaning, Record, Refused

PACKAGE = "transformer_engine.common.recipe"


class CheckpointExtraStatePolicy(Enum):
    """What a recipe keeps in checkpoints.

    * ``STATELESS``: nothing
    * ``STATEFUL_FP8_DELAYED_SCALING``: scales and amax histories
    * ``DYNAMIC``: whatever the quantizers of the user's factory keep
    """

    STATELESS = "stateless"
    STATEFUL_FP8_DELAYED_SCALING = "stateful_fp8_delayed_scaling"
    DYNAMIC = "dynamic"


_STATELESS = CheckpointExtraStatePolicy.STATELESS
_DELAYED = CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING
RECIPE_POLICIES: dict[tuple, CheckpointExtraStatePolicy] = {
    (PACKAGE, "DelayedScaling"): _DELAYED,
    (PACKAGE, "Float8CurrentScaling"): _STATELESS,
    (PACKAGE, "MXFP8BlockScaling"): _STATELESS,
    (PACKAGE, "Float8BlockScaling"): _STATELESS,
    (PACKAGE, "NVFP4BlockScaling"): _STATELESS,
    (PACKAGE, "CustomRecipe"): CheckpointExtraStatePolicy.DYNAMIC,
}
# Megatron-LM's subclass of DelayedScaling, which has the same fields.
_DELAYED_SUBCLASSES = (
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"),
    ("megatron.core.transformer.custom_layers.transformer_engine", "TEDelayedScaling"),
)
# Fields that DelayedScaling had in releases before 2.0, and the tuple that one of them holds.
_OLD_FIELDS = frozenset({"interval", "override_linear_precision"})
_FORMATS = {tuple(member.value): member for member in Format}


def policy_of(recipe: Any) -> CheckpointExtraStatePolicy:
    """What ``recipe``, a recipe or the `Record` of one, keeps in checkpoints.

    A subclass does what its base does; what is no recipe at all is ``DYNAMIC``.
    """
    if isinstance(recipe, Record):
        kinds = [recipe.kind]
    else:
        kinds = [(cls.__module__, cls.__name__) for cls in type(recipe).__mro__]
    for kind in kinds:
        if kind in _DELAYED_SUBCLASSES:
            return _DELAYED
        if kind in RECIPE_POLICIES:
            return RECIPE_POLICIES[kind]
    return CheckpointExtraStatePolicy.DYNAMIC


def is_recipe(value: Any) -> bool:
    """Whether ``value`` is a recipe or the `Record` of one."""
    if isinstance(value, Record):
        return value.kind in RECIPE_POLICIES or value.kind in _DELAYED_SUBCLASSES
    return isinstance(value, Recipe)


def _format(arguments: tuple) -> Format:
    # Hashed only if it is flat: the hash of a tuple that holds itself many times never ends.
    largest = _scalars(arguments[0]) if len(arguments) == 1 else None
    if largest not in _FORMATS:
        raise Refused("names a Format that there is not")
    return _FORMATS[largest]


def _scalars(values: Any) -> tuple:
    """The values of a named tuple of up to three numbers."""
    if not isinstance(values, tuple) or len(values) > 3:
        raise Refused("has a tuple of a recipe that is no short tuple")
    if any(type(value) not in (int, float, bool) for value in values):
        raise Refused("has something else than numbers in a tuple of a recipe")
    return values


def _record(kind: tuple, fields: frozenset) -> Meaning:
    def new(arguments: tuple) -> Record:
        if arguments:
            raise Refused(f"makes a {kind[1]} with arguments")
        return Record(kind, fields)

    return Meaning(new=new)


def _table() -> dict[tuple, Meaning]:
    table = {
        (PACKAGE, "Format"): Meaning(call=_format),
        (PACKAGE, "_FormatHelper"): Meaning(new=_scalars),
        (PACKAGE, "_OverrideLinearPrecision"): Meaning(new=_scalars),
    }
    for kind in (*RECIPE_POLICIES, (PACKAGE, "MMParams"), (PACKAGE, "QParams")):
        cls = getattr(recipes, kind[1])
        fields = frozenset(field.name for field in dataclasses.fields(cls))
        if kind[1] == "DelayedScaling":
            fields |= _OLD_FIELDS
            for subclass in _DELAYED_SUBCLASSES:
                table[subclass] = _record(subclass, fields)
        table[kind] = _record(kind, fields)
    return table


RECIPE_TABLE: Mapping[tuple, Meaning] = _table()
