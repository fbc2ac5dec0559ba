# SPDX-License-Identifier: Apache-2.0
"""What the hardware does natively, and whether a recipe can be computed.

The two are different things: every recipe runs on every device, because quantization
is defined by arithmetic and a GEMM that the hardware lacks is done on the dequantized operands. The
`is_*_available` functions speak about native support only.
"""

from __future__ import annotations

import functools
from typing import Tuple, Union

import torch

from ..common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    RecipeError,
)
from .environment import constant_in_graphs
from .formats.spec import decode_quant
from .utils import get_device_compute_capability

NO_DEVICE = "No CUDA device is there."


def _cuda_version() -> Tuple[int, ...]:
    """Version of CUDA that PyTorch was built with; ``(0,)`` for a build without."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


@constant_in_graphs
def _why_not(feature: str) -> str:
    """Why the current device has no native support of `feature`; "" if it has."""
    capability = get_device_compute_capability()
    if capability == (0, 0):
        return NO_DEVICE
    return _REASONS[feature](capability)


def _why_no_fp8(capability: Tuple[int, int]) -> str:
    if capability >= (9, 0):
        return ""
    if capability < (8, 9):
        return "Device compute capability 8.9 or higher required for FP8 execution."
    if _cuda_version() < (12, 1):
        return "CUDA version 12.1 or higher required for FP8 execution on compute capability 8.9."
    return ""


def _why_no_mxfp8(capability: Tuple[int, int]) -> str:
    if capability >= (12, 0):
        return "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
    if capability < (10, 0):
        return "Device compute capability 10.0 or higher required for MXFP8 execution."
    return ""


def _why_no_block_scaling(capability: Tuple[int, int]) -> str:
    if capability < (9, 0) or _cuda_version() < (12, 9):
        return (
            "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA 12.9 or"
            " newer."
        )
    return ""


def _why_no_nvfp4(capability: Tuple[int, int]) -> str:
    if capability < (10, 0):
        return "Device compute capability 10.0 or higher required for NVFP4 execution."
    return ""


_REASONS = {
    "fp8": _why_no_fp8,
    "mxfp8": _why_no_mxfp8,
    "block": _why_no_block_scaling,
    "nvfp4": _why_no_nvfp4,
}


def _answer(feature: str, return_reason: bool) -> Union[bool, Tuple[bool, str]]:
    reason = _why_not(feature)
    return (reason == "", reason) if return_reason else reason == ""


def is_fp8_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether the current device has native FP8 GEMMs; with `return_reason` also why not ("" if it
    has).
    """
    return _answer("fp8", return_reason)


def is_mxfp8_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether the current device has native MXFP8 GEMMs; with `return_reason` also why not ("" if
    it has).
    """
    return _answer("mxfp8", return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether the current device has native GEMMs with FP8 block scales; with `return_reason` also
    why not.
    """
    return _answer("block", return_reason)


def is_nvfp4_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether the current device has native NVFP4 GEMMs; with `return_reason` also why not ("" if
    it has).
    """
    return _answer("nvfp4", return_reason)


def is_bf16_available(return_reason: bool = False) -> Union[bool, Tuple[bool, str]]:
    """Whether the device computes in bfloat16 (CPUs do); with `return_reason` also why not ("" if
    it does).
    """
    capability = get_device_compute_capability()
    reason = ""
    if (0, 0) < capability < (8, 0):
        reason = "Device compute capability 8.0 or higher required for BF16 execution."
    return (reason == "", reason) if return_reason else reason == ""


def check_fp8_support() -> Tuple[bool, str]:
    """``is_fp8_available(return_reason=True)``."""
    return _answer("fp8", True)


def check_mxfp8_support() -> Tuple[bool, str]:
    """``is_mxfp8_available(return_reason=True)``."""
    return _answer("mxfp8", True)


def check_fp8_block_scaling_support() -> Tuple[bool, str]:
    """``is_fp8_block_scaling_available(return_reason=True)``."""
    return _answer("block", True)


def check_nvfp4_support() -> Tuple[bool, str]:
    """``is_nvfp4_available(return_reason=True)``."""
    return _answer("nvfp4", True)


def check_recipe_support(recipe: Recipe) -> None:
    """Raise a RuntimeError if `recipe` is none, or has options that exclude each other, and a
    `RecipeError` (a ValueError) if a field was assigned what a constructor would not take. Hardware
    is never a reason.
    """
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise RuntimeError(
            f"A recipe must be an instance, and {recipe.__name__} is the class: pass"
            f" {recipe.__name__}()."
        )
    if not isinstance(recipe, Recipe):
        raise RuntimeError(
            f"A recipe must be an instance of transformer_engine.common.recipe.Recipe, not"
            f" {type(recipe).__name__}."
        )
    if recipe._problem:
        raise RecipeError(
            f"{type(recipe).__name__} was changed to what it can not be: {recipe._problem}"
        )
    problem = _spec_problem(recipe._spec)
    if problem:
        problem = recipe._conflict() or problem
        raise RuntimeError(f"{type(recipe).__name__} can not be computed as configured: {problem}")


@constant_in_graphs
def _spec_problem(spec: str) -> str:
    """Why the quantizations that a recipe's text names make no sense; "" if they do."""
    return _cached_problem(spec)


@functools.lru_cache(maxsize=None)
def _cached_problem(spec: str) -> str:
    operands = {}
    for part in spec.split(";"):
        key, _, text = part.partition("=")
        if key in ("x", "w", "g"):
            try:
                operands[key] = decode_quant(text)
            except ValueError as error:
                return str(error)
    return "" if "bwd=" in spec else _transform_problem(operands)


def _transform_problem(operands: dict) -> str:
    """Why the Hadamard transforms of the operands of a backward GEMM do not cancel; "" if they do.

    Columnwise values are transformed, rowwise ones never are.
    """
    x, w, g = (getattr(operands.get(key), "rht", False) for key in "xwg")
    if w:
        return (
            "fp4_quant_fwd_weight has random_hadamard_transform=True, but dgrad multiplies the"
            " weight by rowwise gradients, which fp4_quant_bwd_grad never transforms. Assign"
            " fp4_quant_fwd_weight a QParams without random_hadamard_transform."
        )
    if x != g:
        return (
            f"fp4_quant_fwd_inp has random_hadamard_transform={x} and fp4_quant_bwd_grad has"
            f" random_hadamard_transform={g}, but wgrad multiplies the two, and the transform"
            " cancels only if both have it. Assign both QParams with the same value, or make the"
            " recipe with disable_rht=True."
        )
    return ""


def get_default_recipe() -> Recipe:
    """The recipe where none is given.

    As in the reference package: `MXFP8BlockScaling` where the hardware has it,
    `Float8CurrentScaling` on devices of compute capability 12.0 and newer, `DelayedScaling` on
    older ones. Without a CUDA device `Float8CurrentScaling`.
    """
    capability = get_device_compute_capability()
    if is_mxfp8_available():
        return MXFP8BlockScaling()
    if (0, 0) < capability < (12, 0):
        return DelayedScaling()
    return Float8CurrentScaling()


# The name that the function had before recipes other than FP8 existed.
get_default_fp8_recipe = get_default_recipe
