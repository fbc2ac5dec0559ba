# SPDX-License-Identifier: Apache-2.0
"""The delayed-scaling state in an ``_extra_state`` that the reference package wrote.

Such a state is a pickled dictionary, in a uint8 tensor or (by early releases) in an ``io.BytesIO``
that ``torch.save`` wrote to. Its keys:

* ``recipe``: absent in early releases, which knew no other recipe than delayed scaling
* ``scale_fwd`` fp32 ``[n_fwd]``, ``amax_history_fwd`` fp32 ``[length, n_fwd]``, and ``_bwd``
* ``extra_fp8_variables``, ``scale_inv_fwd``, ``scale_inv_bwd`` (early releases): not needed

Modules that are made of operations nest two such dictionaries under ``forward`` and ``backward``.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..environment import UNSAFE_PICKLE_EXTRA_STATE_ENV, unsafe_pickle_extra_state_enabled
from .machine import Machine
from .recipes import RECIPE_TABLE, CheckpointExtraStatePolicy, is_recipe, policy_of
from .torch_files import FILE_TABLE, pickle_table, read_file
from .values import Record, Refused, refuse_name

_KEYS = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")


class Scales(NamedTuple):
    """Scales fp32 ``[slots]`` and amax histories fp32 ``[length, slots]`` of both directions."""

    fwd_scale: Tensor
    fwd_history: Tensor
    bwd_scale: Tensor
    bwd_history: Tensor


def advisory(context: str) -> str:
    """What to do about a pickle of ``context`` that is not read: a sentence."""
    return (
        f"If the file of {context} comes from a source that you trust, set"
        f" {UNSAFE_PICKLE_EXTRA_STATE_ENV}=1 to unpickle it, which can run any code that is in it;"
        " or drop the key from the checkpoint: delayed scaling then starts with scales of one."
    )


def read(state: Any) -> Any:
    """The value of a pickle (bytes) or of a torch.save file (``io.BytesIO``), executing nothing.

    Recipes come as `Record`. Raises `Refused` for what is not on the list of names.
    """
    if isinstance(state, io.BytesIO):
        reading = read_file(state.getvalue(), {**FILE_TABLE, **RECIPE_TABLE})
    else:
        table = {**pickle_table(len(state)), **RECIPE_TABLE}
        reading = Machine(table).run(io.BytesIO(state))
    if not reading.names:
        return None  # neither a recipe nor a tensor
    factory = _recipe_of(reading.value, "qfactory")
    for name in reading.unknown:
        if name is not factory:  # which is never looked up
            refuse_name(name)
    return reading.value


def _recipe_of(content: Any, field: str) -> Any:
    """A field of the recipe in ``content``, None without."""
    recipe = content.get("recipe") if isinstance(content, dict) else None
    return recipe.fields.get(field) if isinstance(recipe, Record) else None


def load(state: Any, context: str) -> Optional[Scales]:
    """The scales in ``state`` (bytes or ``io.BytesIO``) of the reference; None if it has none.

    Only with NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 a pickle that can not be read so is unpickled.

    Raises
    ------
    RuntimeError
        The state holds something else. The text says what, and what can be done.
    """
    try:
        return scales_of(read(state))
    except Refused as refusal:
        if not unsafe_pickle_extra_state_enabled():
            raise RuntimeError(
                f"The _extra_state of {context} is taken for a pickle, but one that {refusal}."
                f" Pickles are read without executing anything in them. {advisory(context)}"
            ) from refusal
    try:
        return scales_of(_unpickled(state))
    except Refused as refusal:
        raise RuntimeError(
            f"The _extra_state of {context} was unpickled, as {UNSAFE_PICKLE_EXTRA_STATE_ENV}=1"
            f" asks for, but it {refusal}. Drop the key from the checkpoint: delayed scaling then"
            " starts with scales of one."
        ) from refusal


def _unpickled(state: Any) -> Any:
    """What the user asked for by the environment variable."""
    if isinstance(state, io.BytesIO):
        state.seek(0)
        return torch.load(state, map_location="cpu", weights_only=False)
    return pickle.loads(state)


def scales_of(content: Any) -> Optional[Scales]:
    """The scales of delayed scaling in the dictionary of a state; None if it has none.

    Raises `Refused` if it is no such dictionary or not complete.
    """
    if content is None:
        return None
    if not isinstance(content, dict):
        raise Refused("holds no dictionary")
    if content and set(content) <= {"forward", "backward"}:
        return _no_scales_of_operations(content)
    recipe = content.get("recipe")
    if recipe is None and not set(_KEYS) & set(content):
        return None
    if recipe is not None and not is_recipe(recipe):
        raise Refused("holds a recipe that is none")
    policy = None if recipe is None else policy_of(recipe)
    if policy is CheckpointExtraStatePolicy.STATELESS:
        return None
    if policy is CheckpointExtraStatePolicy.DYNAMIC:
        if set(_KEYS) & set(content):
            raise Refused(
                "holds scales of a CustomRecipe, whose meaning only its qfactory knows; they are"
                " not restored"
            )
        return None
    return Scales(*map(content.get, _KEYS)) if _complete(content) else None


def _no_scales_of_operations(content: dict) -> None:
    for name, part in content.items():
        if not isinstance(part, dict):
            raise Refused(f"holds something else than a dictionary as {name!r}")
        if set(part) - {"recipe", "extra_fp8_variables"}:
            raise Refused(
                f"holds the {name!r} state of a module made of operations, which has no place in a"
                " module of another kind"
            )


def _complete(content: dict) -> bool:
    """Whether all scales and histories are there (else `Refused`) and fit each other."""
    for key in _KEYS:
        dims = 2 if "history" in key else 1
        value = content.get(key)
        if not isinstance(value, Tensor) or value.dim() != dims or not value.is_floating_point():
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else "no tensor"
            raise Refused(f"has {found} as {key!r}, not a floating-point tensor of {dims} dims")
    for direction in ("fwd", "bwd"):
        slots, history = len(content[f"scale_{direction}"]), content[f"amax_history_{direction}"]
        if history.shape[1] != slots or history.shape[0] == 0:
            raise Refused(
                f"has {slots} slots in 'scale_{direction}', but an 'amax_history_{direction}' of"
                f" shape {tuple(history.shape)}"
            )
    fwd, bwd = len(content["amax_history_fwd"]), len(content["amax_history_bwd"])
    if fwd != bwd:
        raise Refused(f"has amax histories of {fwd} and {bwd} rows, not of one length")
    return True
