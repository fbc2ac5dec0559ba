# SPDX-License-Identifier: Apache-2.0
"""Reading environment variables, and the defaults that recipes take from them.

A variable is read when it is asked for, never when a module is imported, so setting one with
``os.environ`` works at any time before the recipe (or module) that uses it is made.
"""

import os
import warnings


def constant_in_graphs(fn):
    """Let Dynamo call `fn` once, while it traces, and keep the answer as a constant of the graph.

    Same mark as ``torch.compiler.assume_constant_result`` sets, without importing Dynamo (about a
    second). Arguments must be constants, or objects that the graph is then bound to; the result
    must be None, a bool, an int or a string.
    """
    fn._dynamo_marked_constant = True
    return fn


@constant_in_graphs
def text(name: str, default: str = "") -> str:
    """Value of the variable `name`, or `default` where it is not set."""
    return os.environ.get(name, default)


@constant_in_graphs
def flag(name: str, default: bool = False) -> bool:
    """True if the variable `name` is "1", False if it is "0" or empty, `default` where it is not
    set.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    if value not in ("", "0", "1"):
        raise ValueError(
            f'Environment variable {name} is {value!r}; set it to "0" or "1", or unset it.'
        )
    return value == "1"


@constant_in_graphs
def integer(name: str, default: int = 0) -> int:
    """Value of the variable `name` as an integer, or `default` where it is not set."""
    value = os.environ.get(name)
    if value is None or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"Environment variable {name} is {value!r}; set it to an integer, or unset it."
        ) from None


def set_flags() -> list[str]:
    """``NAME=value`` of every variable of this package (``NVTE_...``) that is set, sorted."""
    return sorted(f"{name}={value}" for name, value in os.environ.items() if name[:5] == "NVTE_")


@constant_in_graphs
def backward_override() -> str:
    """Default `backward_override` of the recipes that have one ("" for none):
    NVTE_BACKWARD_OVERRIDE.
    """
    return os.environ.get("NVTE_BACKWARD_OVERRIDE", "")


@constant_in_graphs
def warn_that_delayed_scaling_has_no_backward_override() -> None:
    """Tell the user that NVTE_BACKWARD_OVERRIDE does nothing here. Runs at trace time under
    torch.compile.
    """
    if os.environ.get("NVTE_BACKWARD_OVERRIDE"):
        warnings.warn(
            "NVTE_BACKWARD_OVERRIDE is set, but DelayedScaling cannot override its backward pass;"
            " the variable is"
            " ignored for this recipe. Use Float8CurrentScaling if the override is needed.",
            stacklevel=3,
        )


def power_2_current_scales() -> bool:
    """Default of `Float8CurrentScaling.use_power_2_scales`."""
    return flag("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES")


def f32_block_scales() -> bool:
    """Default of `Float8BlockScaling.use_f32_scales`."""
    return flag("NVTE_FP8_BLOCK_SCALING_FP32_SCALES")


def nvfp4_flag(suffix: str) -> bool:
    """Default of a boolean field of `NVFP4BlockScaling`: NVTE_NVFP4_<suffix>."""
    return flag("NVTE_NVFP4_" + suffix)


def nvfp4_text(suffix: str, default: str) -> str:
    """Default of a string field of `NVFP4BlockScaling`: NVTE_NVFP4_<suffix>."""
    return text("NVTE_NVFP4_" + suffix, default)
