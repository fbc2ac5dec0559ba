# SPDX-License-Identifier: Apache-2.0
"""What the recipes are made of: formats, per-tensor and per-GEMM parameters, the base class,
checks.
"""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, NamedTuple, Optional

from .. import environment

FROM_ENVIRONMENT = "<taken from the environment>"

BACKWARD_OVERRIDES = (None, "high_precision", "dequantized")


class RecipeError(ValueError):
    """A recipe was asked for with values that do not belong together, or that it cannot hold."""


class _FormatHelper(NamedTuple):
    """Largest finite values of the types that the forward and the backward pass use."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which 8-bit (or 4-bit) types the forward and the backward pass use.

    ``Format.X.value.max_fwd`` and ``.max_bwd`` are the largest finite values.

    * `E2M1`: FP4 in both passes
    * `E4M3`: FP8 with 4 exponent bits in both passes
    * `E5M2`: FP8 with 5 exponent bits in both passes (no recipe trains with it)
    * `HYBRID`: E4M3 forward, E5M2 backward
    """

    E2M1 = _FormatHelper(max_fwd=6, max_bwd=6)
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


@dataclass(frozen=True)
class MMParams:
    """Parameters of one GEMM.

    `use_split_accumulator`: add partial sums in full fp32 instead of the tensor core's shorter
    accumulator.
    """

    use_split_accumulator: bool = True

    def __post_init__(self):
        if not isinstance(self.use_split_accumulator, bool):
            raise RecipeError(
                "MMParams.use_split_accumulator must be True or False, not"
                f" {self.use_split_accumulator!r}."
            )


@dataclass(frozen=True)
class QParams:
    """Parameters of the quantization of one tensor role.

    * `power_2_scale`: round the scale down to a power of two
    * `amax_epsilon`: smallest amax that a scale is computed from
    * `random_hadamard_transform`, `stochastic_rounding`, `fp4_2d_quantization`: NVFP4 only
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


# What frameworks pass to every recipe of theirs, and no version of a recipe reads any more.
_KNOWN_TO_DO_NOTHING = ("interval", "params_dtype", "device")


@environment.constant_in_graphs
def _warn_of_unknown(cls: type, names: str) -> None:
    """Warn that a constructor got keywords that do nothing; at trace time under torch.compile."""
    known = [field.name for field in fields(cls) if field.init]
    later = [field.name for field in fields(cls) if not field.init]
    for name in names.split(","):
        text = f"{cls.__name__} has no argument {name!r}: it is ignored."
        near = difflib.get_close_matches(name, known, n=1)
        if name in later:
            text += f" Assign the attribute {name!r} after the recipe is made."
        elif near:
            text += f" Did you mean {near[0]!r}?"
        else:
            text += f" Its arguments are {', '.join(known)}."
        warnings.warn(text, UserWarning, stacklevel=4)


class Recipe:
    """Base class of all recipes.

    A recipe is a set of plain fields. They are checked when it is made. They may be assigned
    afterwards, one after the other, through values that do not fit each other; contexts refuse a
    recipe whose fields a constructor would not take, with its words. Two recipes of one class are
    equal if all fields are. Recipes are not hashable, because they can change. Unknown keyword
    arguments of a constructor do nothing, so that code written for other versions keeps working; a
    warning names them, and the field that may have been meant.

    Every assignment renews two strings, `_spec` and `_update_rule`, which say all that decides the
    numbers. They are what a compiled graph is bound to: it is traced again when they change, and
    recipes of equal value share it.
    """

    _spec = ""
    _update_rule = ""
    _complete = False
    # What is wrong with fields that were assigned later; "" if nothing is.
    _problem = ""
    # Of each recipe: the class whose constructor checks, its arguments, and its other fields.
    _checked_by: Optional[type] = None
    _argument_names: tuple = ()
    _other_names: tuple = ()

    def __setattr__(self, name: str, value: Any) -> None:
        changed = self._complete
        object.__setattr__(self, name, value)
        if not self._complete:
            return
        # Always an attribute of the instance: graphs are bound to where it is found.
        object.__setattr__(self, "_problem", self._find_problem(name) if changed else "")
        if not self._problem:
            self._renew()

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        object.__setattr__(self, "_complete", True)
        object.__setattr__(self, "_problem", self._find_problem(""))
        if not self._problem:
            self._renew()

    def _find_problem(self, assigned: str) -> str:
        """What the constructor says about the values of the fields; "" if it takes them.

        The field ``assigned`` gets the value that the constructor makes of it, as True of 1.
        """
        if self._checked_by is None:
            return ""
        arguments = {name: getattr(self, name) for name in self._argument_names}
        try:
            checked = self._checked_by(**arguments)
            for name in self._other_names:
                as_instance(name, getattr(self, name), QParams)
        except RecipeError as error:
            return str(error)
        if assigned in self._argument_names:
            object.__setattr__(self, assigned, getattr(checked, assigned))
        return ""

    def _conflict(self) -> str:
        """Which fields exclude each other, with the cure; "" if that can not be said by fields."""
        return ""

    @classmethod
    def _note_unknown(cls, unknown: dict) -> None:
        """Warn of keywords of the constructor that do nothing."""
        names = [name for name in unknown if name not in _KNOWN_TO_DO_NOTHING]
        # Frameworks always pass it, as (False, False, False) where nothing is to be overridden.
        precision = unknown.get("override_linear_precision")
        if not (isinstance(precision, (tuple, list)) and any(precision)):
            names = [name for name in names if name != "override_linear_precision"]
        if names:
            _warn_of_unknown(cls, ",".join(names))

    def _renew(self) -> None:
        object.__setattr__(self, "_spec", self._describe())
        object.__setattr__(self, "_update_rule", self._describe_update())

    def _describe(self) -> str:
        """The string that modules compute by; "" where this version of the package does not compute
        the recipe.
        """
        return ""

    def _describe_update(self) -> str:
        """The string that the update of delayed scales computes by; "" for recipes without such an
        update.
        """
        return ""

    def __repr__(self) -> str:
        values = []
        for field in fields(self):
            value = getattr(self, field.name)
            shown = value.name if isinstance(value, Format) else repr(value)
            values.append(f"{field.name}={shown}")
        return f"{type(self).__name__}({', '.join(values)})"

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is `NVFP4BlockScaling`."""
        return False

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is `MXFP8BlockScaling`."""
        return False

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is `DelayedScaling`."""
        return False

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is `Float8CurrentScaling`."""
        return False

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether this is `DelayedScaling` or `Float8CurrentScaling`."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is `Float8BlockScaling`."""
        return False

    @classmethod
    def custom(cls) -> bool:
        """Whether this is `CustomRecipe`."""
        return False


def as_bool(name: str, value: Any) -> bool:
    """`value` as a bool; 0, 1 and the usual words are accepted."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "0", "no", "off"):
        return False
    raise RecipeError(f"{name} must be True or False, not {value!r}.")


def as_int(name: str, value: Any, minimum: Optional[int] = None) -> int:
    """`value` as an int; strings of digits and floats without a fraction are accepted."""
    number = None
    if isinstance(value, int):
        number = value + 0
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, str) and value.strip().lstrip("+-").isdigit():
        number = int(value)
    if number is None:
        raise RecipeError(f"{name} must be an integer, not {value!r}.")
    if minimum is not None and number < minimum:
        raise RecipeError(f"{name} must be at least {minimum}, not {number}.")
    return number


def as_choice(name: str, value: Any, choices: tuple) -> Any:
    """`value` if it is one of `choices`."""
    if value not in choices:
        raise RecipeError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.")
    return value


def as_instance(name: str, value: Any, kind: type) -> Any:
    """`value` if it is an instance of `kind`."""
    if not isinstance(value, kind):
        raise RecipeError(f"{name} must be a {kind.__name__}, not {value!r}.")
    return value


def as_fp8_format(name: str, value: Any) -> Format:
    """`value` if it is an FP8 format that training is possible with: E4M3 or HYBRID."""
    as_instance(name, value, Format)
    if value == Format.E5M2:
        raise RecipeError(
            f"{name} must not be Format.E5M2: training with E5M2 in the forward pass is not"
            f" supported. Use"
            " Format.HYBRID or Format.E4M3."
        )
    if value == Format.E2M1:
        raise RecipeError(f"{name} must be an FP8 format, Format.HYBRID or Format.E4M3, not E2M1.")
    return value


def as_backward_override(value: Any) -> Optional[str]:
    """`value` if it is a legal `backward_override`; the environment's default if none was given."""
    if value == FROM_ENVIRONMENT:
        value = environment.backward_override() or None
    return as_choice("backward_override", value, BACKWARD_OVERRIDES)


def fp8_type_name(fp8_format: Format, forward: bool) -> str:
    """ "e4m3" or "e5m2": the FP8 type of the forward (or backward) pass."""
    if fp8_format == Format.E4M3 or (fp8_format == Format.HYBRID and forward):
        return "e4m3"
    return "e5m2"
