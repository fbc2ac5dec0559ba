# SPDX-License-Identifier: Apache-2.0
"""What pickled ``_extra_state`` entries of checkpoints may do; names of the reference package.

``set_extra_state`` of the modules reads states of recipes without state and of delayed scaling
without unpickling them (see `checkpoints.machine`), so it needs no permission for those. The
functions here answer the question that the reference asks: whether a payload is to be unpickled.
"""

from __future__ import annotations

from typing import Any

from .checkpoints import reference_state
from .checkpoints.recipes import RECIPE_POLICIES as _RECIPE_POLICIES
from .checkpoints.recipes import CheckpointExtraStatePolicy, policy_of
from .checkpoints.values import Refused
from .environment import UNSAFE_PICKLE_EXTRA_STATE_ENV, unsafe_pickle_extra_state_enabled

__all__ = [
    "CheckpointExtraStatePolicy",
    "UNSAFE_PICKLE_EXTRA_STATE_ENV",
    "_RECIPE_POLICIES",
    "extra_state_pickle_advisory",
    "is_stateless_recipe",
    "should_load_extra_state_pickle",
    "unsafe_pickle_extra_state_enabled",
]


def is_stateless_recipe(recipe: Any) -> bool:
    """Whether checkpoints hold nothing for ``recipe``; False where it can not be told."""
    return policy_of(recipe) is CheckpointExtraStatePolicy.STATELESS


def extra_state_pickle_advisory(context: str) -> str:
    """What to do about a pickled state of ``context`` that is not unpickled: a sentence that names
    the environment variable.
    """
    return reference_state.advisory(context)


def should_load_extra_state_pickle(payload: bytes, context: str) -> bool:
    """Whether the pickle ``payload`` is to be unpickled for real; nothing of it is executed here.

    False for pickles with nothing to restore: those that name no class, and those of recipes
    without state. True for others if NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1.

    Raises
    ------
    RuntimeError
        The pickle holds state, or something unknown, or is damaged, and the variable is not set.
    """
    try:
        if not _may_hold_state(payload):
            return False
        why = "holds the state of delayed scaling"
    except Refused as refusal:
        why = str(refusal)
    if unsafe_pickle_extra_state_enabled():
        return True
    raise RuntimeError(
        f"The pickle in {context} is one that {why}. {extra_state_pickle_advisory(context)}"
    )


def _may_hold_state(payload: bytes) -> bool:
    """Whether a readable payload has, or by its recipe should have, scales."""
    content = reference_state.read(payload)
    recipe = content.get("recipe") if isinstance(content, dict) else None
    delayed = CheckpointExtraStatePolicy.STATEFUL_FP8_DELAYED_SCALING
    if recipe is not None and policy_of(recipe) is delayed:
        return True
    return reference_state.scales_of(content) is not None
