# SPDX-License-Identifier: Apache-2.0
"""The precision metadata that users and frameworks read off a module, derived on demand.

Forward keeps nothing but the recipe and, for delayed scaling, the scaling state; dictionaries and
quantizer objects are made when somebody looks.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from ...common.recipe import DelayedScaling
from ..quantization import (
    CustomRecipeState,
    DelayedScalingRecipeState,
    QuantizerRole,
    RecipeState,
    get_fp8_max,
)
from .primary_parameters import bind_quantizers

DIRECTIONS = (("scaling_fwd", "forward"), ("scaling_bwd", "backward"))


class PrecisionMetadata:
    """``fp8_meta``, ``quantizers`` and their like; a mixin of the modules that contain GEMMs.

    Only eager calls note the recipe (a traced forward writes no attributes). Scales and histories
    of delayed scaling are the live tensors in any case.
    """

    def delayed_slots(self) -> tuple[int, int]:
        """Number of forward and backward quantizer slots."""
        return 3 * self.num_gemms, 2 * self.num_gemms

    @property
    def fp8_initialized(self) -> bool:
        """Whether the module has run with a low-precision recipe."""
        return self._recipe is not None or self._delayed_scaling is not None

    @property
    def fp8_meta_tensors_initialized(self) -> bool:
        """Whether delayed-scaling tensors exist."""
        return self._delayed_scaling is not None

    @property
    def fp8_meta(self) -> dict:
        """Recipe and, per direction, its state: ``scaling_fwd``, ``scaling_bwd``.

        One dictionary per module, refreshed at each look.
        """
        meta, recipe, scaling = self._fp8_meta, self._recipe, self._delayed_scaling
        meta["fp8_checkpoint"] = self.fp8 or self.fp8_calibration
        if recipe is None and scaling is not None:
            recipe = DelayedScaling(amax_history_len=scaling.fwd_history.shape[0])
        if recipe is None:
            return meta
        if meta.get("recipe") != recipe or meta.get("_scaling") is not scaling:
            meta.update(recipe=recipe, _scaling=scaling, num_gemms=self.num_gemms)
            meta["fp8_max_fwd"] = get_fp8_max(recipe, True)
            meta["fp8_max_bwd"] = get_fp8_max(recipe, False)
            for (key, mode), slots in zip(DIRECTIONS, self.delayed_slots()):
                meta[key] = self._recipe_state(recipe, mode, slots)
        return meta

    def _recipe_state(self, recipe, mode: str, slots: int) -> RecipeState:
        """The recipe state of one direction; with delayed scaling it shows the live tensors."""
        roles = self.get_quantizer_roles(fwd=mode == "forward", num_quantizers=slots)
        options = {
            "mode": mode,
            "num_quantizers": slots,
            "device": self.delayed_device(),
            "roles": roles,
        }
        scaling = self._delayed_scaling
        if recipe.delayed() and scaling is not None:
            return DelayedScalingRecipeState(recipe, owner=scaling, **options)
        if recipe.custom():
            return CustomRecipeState(recipe, owner=scaling, **options)
        return RecipeState.create(recipe, **options)

    @property
    def quantizers(self) -> dict:
        """Quantizers of the last recipe: ``scaling_fwd`` 3 per GEMM, ``scaling_bwd`` 2 per GEMM."""
        meta = self.fp8_meta
        if "recipe" not in meta:
            return {key: [] for key, _ in DIRECTIONS}
        return {key: meta[key].make_quantizers() for key, _ in DIRECTIONS}

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> Optional[list]:
        """The role of each quantizer slot; the pattern of one pass is repeated cyclically."""
        roles = []
        for gemm in range(self.num_gemms):
            name = self.name if self.num_gemms == 1 else f"{self.name}.fc{gemm + 1}"
            last = gemm == self.num_gemms - 1
            if fwd:
                roles += [QuantizerRole("linear", kind, name) for kind in ("input", "weight")]
                following = QuantizerRole("linear", "input", f"{self.name}.fc{gemm + 2}")
                roles.append(self.output_quantizer_role if last else following)
            else:
                roles.append(QuantizerRole("linear", "grad_output", name))
                before = QuantizerRole("linear", "grad_output", f"{self.name}.fc{gemm}")
                roles.append(self.grad_input_quantizer_role if gemm == 0 else before)
        return [roles[i % len(roles)] for i in range(num_quantizers)]

    def get_fp8_meta_tensors(self) -> Optional[dict]:
        """Copies ``{"scaling_fwd": [scale, amax_history], "scaling_bwd": [...]}``, None without."""
        scaling = self._delayed_scaling
        if scaling is None:
            return None
        return {
            "scaling_fwd": [scaling.fwd_scale.clone(), scaling.fwd_history.clone()],
            "scaling_bwd": [scaling.bwd_scale.clone(), scaling.bwd_history.clone()],
        }

    def reset_fp8_meta_tensors(self, fp8_meta_tensors: Optional[dict] = None) -> None:
        """Copy what ``get_fp8_meta_tensors`` gave into the state; without argument ones and zeros.

        Raises KeyError if a direction is missing.
        """
        scaling = self._delayed_scaling
        if scaling is None:
            return
        live = {
            "scaling_fwd": (scaling.fwd_scale, scaling.fwd_history),
            "scaling_bwd": (scaling.bwd_scale, scaling.bwd_history),
        }
        if fp8_meta_tensors is None:
            given = {key: (1.0, 0.0) for key in live}
        else:
            given = {key: fp8_meta_tensors[key] for key in live}
        for key, tensors in live.items():
            for target, value in zip(tensors, given[key]):
                _fill(target, value)

    def adjust_amax_history_length(self, length: int, fwd: Optional[bool] = None) -> None:
        """Give the amax histories of delayed scaling ``length`` rows: the first stay, new are zero.

        Both directions share one length; ``fwd`` is accepted for compatibility.
        """
        del fwd
        if self._delayed_scaling is not None:
            self._delayed_scaling.resize(length)
            bind_quantizers(self)


def _fill(target: Tensor, value) -> None:
    """Set ``target`` in place, from a tensor or a number."""
    if isinstance(value, Tensor):
        target.copy_(value)
    else:
        target.fill_(value)
