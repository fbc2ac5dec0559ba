# SPDX-License-Identifier: Apache-2.0
"""Contexts that switch quantization on, and everything about recipes that other code imports from
here.
"""

from __future__ import annotations

import warnings
from contextlib import ContextDecorator
from typing import Any, Optional

import torch

from ..common.recipe import Recipe
from .availability import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    check_recipe_support,
    get_default_fp8_recipe,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from .core.update_rule import amax_and_scale_update as _amax_and_scale_update
from .core.update_rule import compute_amax_and_update_history as _compute_amax_and_update_history
from .core.update_rule import compute_scaling_factor as _compute_scaling_factor
from .core.update_rule import default_sf_compute as _default_sf_compute
from .core.update_rule import get_amax_and_update_history as _default_get_amax_and_update_history
from .core.update_rule import update_amax_history as _update_amax_history
from .fp8_global_state import FP8GlobalState, FP8GlobalStateManager
from .recipe_state import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    DelayedScalingRequest,
    Float8BlockScalingRecipeState,
    Float8CurrentScalingRecipeState,
    MXFP8BlockScalingRecipeState,
    NVFP4BlockScalingRecipeState,
    QuantizerRequest,
    QuantizerRole,
    RecipeState,
    get_align_size_for_quantization,
    get_fp4_te_dtype,
    get_fp8_max,
    get_fp8_te_dtype,
    get_fp8_torch_dtype,
)

__all__ = [
    "CustomRecipeState",
    "DelayedScalingRecipeState",
    "DelayedScalingRequest",
    "FP8GlobalState",
    "FP8GlobalStateManager",
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
    "QuantizerRequest",
    "QuantizerRole",
    "RecipeState",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "check_recipe_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_align_size_for_quantization",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "get_fp4_te_dtype",
    "get_fp8_max",
    "get_fp8_te_dtype",
    "get_fp8_torch_dtype",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
    "split_and_copy",
]


def _refuse_recipes(context: str, **arguments) -> None:
    """Raise if a recipe was given as another argument than ``recipe``: it would not be used."""
    for name, value in arguments.items():
        if isinstance(value, Recipe):
            raise TypeError(
                f"The argument `{name}` of te.{context} got a recipe: write"
                f" te.{context}(recipe={type(value).__name__}(...))."
            )


class autocast:  # pylint: disable=invalid-name
    """Context in which modules compute in low precision.

    .. code-block:: python

        with te.autocast(recipe=Float8CurrentScaling()):
            out = model(inp)

    * `enabled`: False switches low precision off, also inside of another ``autocast``
    * `calibrating`: record amaxes for delayed scaling while computing in high precision (with
      ``enabled=False``). Scales stay until
      ``FP8GlobalStateManager.reduce_and_update_fp8_tensors()`` renews them
    * `recipe`: a recipe of ``transformer_engine.common.recipe``; None takes `get_default_recipe`
    * `amax_reduction_group`: process group over which delayed scaling reduces amaxes; None is the
      default group

    The fields of the recipe are read on entry. The innermost context counts. Delayed scaling renews
    its forward scales when the outermost context ends without an exception, with gradients enabled.
    An instance can be used again after it ended, not while it is active. It may be entered inside
    compiled code, around it, or both; inside, Dynamo wants it made in the compiled function too
    (the recipe may come from outside).

    Raises TypeError if another argument is a recipe.

    Raises ValueError if a field of the recipe was assigned what its constructor would not take.

    Raises RuntimeError if the instance is active already, or if this version does not compute the
    recipe; nothing has changed then. Hardware is never a reason: what it lacks is computed by other
    means, with the same numbers.
    """

    __slots__ = (
        "enabled",
        "calibrating",
        "recipe",
        "amax_reduction_group",
        "_graph",
        "_active",
        "_saved",
    )

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Optional[Recipe] = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        others = {"calibrating": calibrating, "amax_reduction_group": amax_reduction_group}
        _refuse_recipes("autocast", enabled=enabled, **others)
        self.enabled = enabled
        self.calibrating = calibrating
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group
        self._graph = _graph
        self._active = False
        self._saved = None

    def __enter__(self) -> "autocast":
        if self._active:
            raise RuntimeError(
                "This autocast is active already. Make another instance for the inner region; an"
                " instance can be used"
                " again only after it ended."
            )
        saved = FP8GlobalStateManager.snapshot()
        FP8GlobalStateManager.autocast_enter(
            self.enabled, self.calibrating, self.recipe, self.amax_reduction_group, self._graph
        )
        self._saved = saved
        self._active = True
        return self

    def __exit__(self, exc_type, exc_value, traceback) -> None:
        self._active = False
        FP8GlobalStateManager.restore(self._saved)
        self._saved = None
        FP8GlobalStateManager.autocast_exit(self.enabled, self._graph, exc_type is not None)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Optional[Recipe] = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """Deprecated name of `autocast`."""
    _deprecated("fp8_autocast is deprecated; use autocast, with recipe and amax_reduction_group.")
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


class quantized_model_init(ContextDecorator):  # pylint: disable=invalid-name
    """Context, or decorator, in which modules are made with quantized primary weights.

    .. code-block:: python

        with te.quantized_model_init(recipe=MXFP8BlockScaling()):
            model = te.Linear(1024, 1024)

    The weights of GEMMs are then quantized tensors (``te.QuantizedTensor``), without a copy in high
    precision; biases and norm parameters are not. Optimizers and loading of checkpoints quantize
    what they write. Run such modules under ``te.autocast`` with the same kind of recipe; outside of
    it they compute with the dequantized weights.

    * `enabled`: False switches it off inside of another such context
    * `recipe`: recipe of the weights; None takes `get_default_recipe`
    * `preserve_high_precision_init_val`: keep the initial values in high precision as well, on the
      CPU: ``param.get_high_precision_init_val()``, ``param.clear_high_precision_init_val()``

    Raises RuntimeError on entry if `recipe` has options that exclude each other.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Optional[Recipe] = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        keep = preserve_high_precision_init_val
        _refuse_recipes(
            "quantized_model_init", enabled=enabled, preserve_high_precision_init_val=keep
        )
        self.enabled = enabled
        self.recipe = recipe
        self.preserve_high_precision_init_val = preserve_high_precision_init_val
        self._saved: list = []

    def __enter__(self) -> "quantized_model_init":
        recipe = self.recipe
        if self.enabled:
            recipe = get_default_recipe() if recipe is None else recipe
            check_recipe_support(recipe)
        state = FP8GlobalStateManager.quantization_state
        self._saved.append((state.fp8_parameters, state.high_precision_init_val, state.fp8_recipe))
        state.fp8_parameters = self.enabled
        state.high_precision_init_val = self.preserve_high_precision_init_val
        if self.enabled:
            state.fp8_recipe = recipe
        return self

    def __exit__(self, exc_type, exc_value, traceback) -> None:
        state = FP8GlobalStateManager.quantization_state
        saved = self._saved.pop()
        state.fp8_parameters, state.high_precision_init_val, state.fp8_recipe = saved


def fp8_model_init(
    enabled: bool = True,
    recipe: Optional[Recipe] = None,
    preserve_high_precision_init_val: bool = False,
) -> quantized_model_init:
    """Deprecated name of `quantized_model_init`."""
    _deprecated("fp8_model_init is deprecated; use quantized_model_init.")
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _deprecated(message: str) -> None:
    # Dynamo cannot trace warnings in every version, and code is traced more often than it is read.
    if not torch.compiler.is_compiling():
        warnings.warn(message, DeprecationWarning, stacklevel=3)


def split_and_copy(buffer: torch.Tensor, outputs: list, chunk_sizes: list) -> None:
    """Copy consecutive pieces of `buffer` with the lengths `chunk_sizes` into the tensors
    `outputs`.
    """
    for output, piece in zip(outputs, torch.split(buffer, chunk_sizes)):
        output.copy_(piece)
