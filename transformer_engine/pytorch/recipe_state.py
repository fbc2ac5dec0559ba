# SPDX-License-Identifier: Apache-2.0
"""What a recipe means for the quantizer slots of one module and direction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Optional, Sequence, Union

import torch
from torch import Tensor

from ..common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from .availability import check_recipe_support
from .constants import TE_DType, DType
from .core.config import operand_text
from .formats.spec import decode_quant
from .tensor import Float8Quantizer
from .tensor.from_spec import quantizer_from_spec


def get_fp8_torch_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> torch.dtype:
    """FP8 dtype of forward tensors, or of gradients with `fprop_tensor=False`: E5M2 where the
    format says so.
    """
    fp8_format = fp8_recipe.fp8_format
    if fp8_format == Format.E4M3 or (fp8_format == Format.HYBRID and fprop_tensor):
        return torch.float8_e4m3fn
    return torch.float8_e5m2


def get_fp8_te_dtype(fp8_recipe: Recipe, fprop_tensor: bool = True) -> DType:
    """As `get_fp8_torch_dtype`, as a `DType`."""
    return TE_DType[get_fp8_torch_dtype(fp8_recipe, fprop_tensor)]


def get_fp4_te_dtype(fp4_recipe: Recipe) -> DType:
    """`DType` of FP4 tensors. Raises ValueError unless `fp4_format` is `Format.E2M1`."""
    if fp4_recipe.fp4_format == Format.E2M1:
        return DType.kFloat4E2M1
    raise ValueError(f"fp4_format must be Format.E2M1, not {fp4_recipe.fp4_format}.")


def get_fp8_max(fp8_recipe: Recipe, fprop_tensor: bool = True) -> float:
    """Largest finite value of `get_fp8_torch_dtype`."""
    largest = fp8_recipe.fp8_format.value
    return largest.max_fwd if fprop_tensor else largest.max_bwd


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Multiple that the rows of grouped inputs are padded to."""
    if isinstance(recipe, CustomRecipe):
        return recipe.quantization_alignment
    if isinstance(recipe, MXFP8BlockScaling):
        return 32
    if isinstance(recipe, NVFP4BlockScaling):
        return 128
    return 16


@dataclass(frozen=True)
class QuantizerRole:
    """What a tensor is for: which kind of module, which of its tensors, and the module's name.

    `module_type` is for example "linear"; `tensor_type` "input", "weight", "output", "grad_output"
    or "grad_input".
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.module_type}:{self.tensor_type}:{self.name}"


class QuantizerRequest:
    """Base of what a `CustomRecipe` factory may return instead of a quantizer: a wish for managed
    state.
    """


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Wish for delayed scaling in a slot; the fields are those of `DelayedScaling`."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Union[str, Callable] = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True


_FORWARD_TENSORS = ("input", "weight", "output")
_BACKWARD_TENSORS = ("grad_output", "grad_input")


class RecipeState:
    """What one recipe means for `num_quantizers` slots of the "forward" or "backward" direction of
    a module.

    `roles`: one `QuantizerRole` per slot, or None for the order input, weight, output (forward) and
    grad_output, grad_input (backward), repeated per GEMM. `dtype`: FP8 type of the direction.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: Optional[torch.device] = None,
        roles: Optional[Sequence[Optional[QuantizerRole]]] = None,
    ) -> None:
        if mode not in ("forward", "backward"):
            raise ValueError(f'mode must be "forward" or "backward", not {mode!r}.')
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(
                f"There are {num_quantizers} quantizers but {len(roles)} roles; give one role per"
                " quantizer."
            )
        self.recipe = recipe
        self.mode = mode
        self.num_quantizers = num_quantizers
        self.device = device
        self.roles = roles
        self.dtype = get_fp8_te_dtype(recipe, mode == "forward")

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: Optional[torch.device] = None,
        roles: Optional[Sequence[Optional[QuantizerRole]]] = None,
    ) -> "RecipeState":
        """The state that fits `recipe`. Raises RuntimeError for what is no recipe, or one whose
        options exclude each other.
        """
        check_recipe_support(recipe)
        states = (
            (recipe.delayed, DelayedScalingRecipeState),
            (recipe.float8_current_scaling, Float8CurrentScalingRecipeState),
            (recipe.mxfp8, MXFP8BlockScalingRecipeState),
            (recipe.float8_block_scaling, Float8BlockScalingRecipeState),
            (recipe.nvfp4, NVFP4BlockScalingRecipeState),
            (recipe.custom, CustomRecipeState),
        )
        state = next(state for fits, state in states if fits())
        return state(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)

    def _slot_role(self, index: int) -> Optional[QuantizerRole]:
        """The role given for slot `index`, if any."""
        return None if self.roles is None else self.roles[index]

    def _slot_tensor_type(self, index: int) -> str:
        """ "input", "weight", ...: from the role where it says so, else from the position."""
        names = _FORWARD_TENSORS if self.mode == "forward" else _BACKWARD_TENSORS
        role = self._slot_role(index)
        if role is not None and role.tensor_type in names:
            return role.tensor_type
        return names[index % len(names)]

    def quant(self, index: int) -> str:
        """Encoded `QuantSpec` of slot `index`, for example "current,e4m3" ("" for none)."""
        tensor_type = self._slot_tensor_type(index)
        key = "g" if self.mode == "backward" else "w" if tensor_type == "weight" else "x"
        return operand_text(self.recipe._spec, key)

    def make_quantizers(self) -> list:
        """A quantizer for each slot, in both orientations."""
        return [
            quantizer_from_spec(decode_quant(self.quant(i)), self.device)
            for i in range(self.num_quantizers)
        ]

    def inherit_state_from(self, other: "RecipeState") -> bool:
        """Take over what `other` accumulated; False if there is nothing to take over."""
        return False


class DelayedScalingRecipeState(RecipeState):
    """Delayed scaling: `scale` ``[num_quantizers]`` and `amax_history` ``[length,
    num_quantizers]``, fp32.

    A state with `owner`, the `core.delayed_scaling.DelayedScalingState` of a module, shows the
    module's live tensors; writing into them changes the module. Otherwise the tensors are its own:
    ones, and zeros.
    """

    def __init__(self, recipe: DelayedScaling, *, owner=None, **options) -> None:
        super().__init__(recipe, **options)
        self._owner = owner
        if owner is None:
            count, length = self.num_quantizers, recipe.amax_history_len
            self._scale = torch.ones(count, dtype=torch.float32, device=self.device)
            self._history = torch.zeros(length, count, dtype=torch.float32, device=self.device)

    @property
    def scale(self) -> Tensor:
        """Scales of the slots, fp32 ``[num_quantizers]``."""
        if self._owner is None:
            return self._scale
        return self._owner.fwd_scale if self.mode == "forward" else self._owner.bwd_scale

    @scale.setter
    def scale(self, value: Tensor) -> None:
        self.scale.copy_(value)

    @property
    def amax_history(self) -> Tensor:
        """Amaxes of the slots, fp32 ``[length, num_quantizers]``; row 0 is the one in use."""
        if self._owner is None:
            return self._history
        return self._owner.fwd_history if self.mode == "forward" else self._owner.bwd_history

    @amax_history.setter
    def amax_history(self, value: Tensor) -> None:
        if self._owner is not None:
            self._owner.resize(value.shape[0])
        elif self._history.shape[0] != value.shape[0]:
            self._history = self._history.new_zeros(value.shape[0], self.num_quantizers)
        self.amax_history.copy_(value)

    def make_quantizers(self) -> list:
        """Quantizers on views of the scales and of row 0 of the history."""
        return [
            Float8Quantizer(self.scale[i : i + 1], self.amax_history[0, i : i + 1], self.dtype)
            for i in range(self.num_quantizers)
        ]

    def inherit_state_from(self, other: RecipeState) -> bool:
        same = isinstance(other, DelayedScalingRecipeState) and other.mode == self.mode
        if not same or other.amax_history.shape != self.amax_history.shape:
            return False
        self.scale = other.scale
        self.amax_history = other.amax_history
        return True


class Float8CurrentScalingRecipeState(RecipeState):
    """Current scaling: every scale comes from the tensor itself, so nothing is kept."""


class Float8BlockScalingRecipeState(RecipeState):
    """FP8 with scales of 128 values: nothing is kept."""


class NVFP4BlockScalingRecipeState(RecipeState):
    """NVFP4: nothing is kept."""


class MXFP8BlockScalingRecipeState(RecipeState):
    """MXFP8: nothing is kept. Square blocks are for slots whose role says that they hold the weight
    of a linear layer.
    """

    def quant(self, index: int) -> str:
        role = self._slot_role(index)
        square = role is not None and role.module_type in ("linear", "grouped_linear")
        text = super().quant(index)
        return text if square else replace(decode_quant(text), dim=1).encode()


class CustomRecipeState(RecipeState):
    """What the `qfactory` of a `CustomRecipe` answers for each slot.

    Slots that get a `DelayedScalingRequest` share one `DelayedScalingRecipeState`, `delayed`, which
    has the same `owner`. Raises ValueError if the factory answers None, or different requests for
    delayed scaling.
    """

    def __init__(self, recipe: CustomRecipe, *, owner=None, **options) -> None:
        super().__init__(recipe, **options)
        if self.roles is None:
            names = _FORWARD_TENSORS if self.mode == "forward" else _BACKWARD_TENSORS
            self.roles = [
                QuantizerRole("", names[i % len(names)]) for i in range(self.num_quantizers)
            ]
        self._answers = [ask_factory(recipe.qfactory, role) for role in self.roles]
        request = common_request(self._answers)
        self.delayed: Optional[DelayedScalingRecipeState] = None
        if request is not None:
            options["roles"] = self.roles
            recipe = delayed_recipe(request)
            self.delayed = DelayedScalingRecipeState(recipe, owner=owner, **options)

    def make_quantizers(self) -> list:
        delayed = [] if self.delayed is None else self.delayed.make_quantizers()
        return [
            delayed[i] if isinstance(answer, QuantizerRequest) else answer
            for i, answer in enumerate(self._answers)
        ]


def ask_factory(qfactory: Callable, role: Optional[QuantizerRole]):
    """The quantizer or `QuantizerRequest` that a factory gives for `role`; ValueError for None."""
    answer = qfactory(role)
    if answer is None:
        raise ValueError(
            f"The qfactory of the CustomRecipe returned None for the role {role}. Return a"
            " quantizer; an IdentityQuantizer leaves the tensor in high precision."
        )
    return answer


def delayed_recipe(request: DelayedScalingRequest) -> DelayedScaling:
    """The recipe that `request` is a part of."""
    return DelayedScaling(**vars(request), backward_override=None)


def common_request(answers: Sequence) -> Optional[DelayedScalingRequest]:
    """The `DelayedScalingRequest` among `answers`, None if there is none; ValueError if two of them
    differ.
    """
    requests = [answer for answer in answers if isinstance(answer, DelayedScalingRequest)]
    for request in requests:
        if request != requests[0]:
            raise ValueError(
                f"The qfactory of the CustomRecipe made two different DelayedScalingRequests,"
                f" {requests[0]} and {request}. All of one module must be equal."
            )
    return requests[0] if requests else None
