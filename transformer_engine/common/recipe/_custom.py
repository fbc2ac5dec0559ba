# SPDX-License-Identifier: Apache-2.0
"""The recipe that asks the user's own function for each quantizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

from ._base import (
    FROM_ENVIRONMENT,
    Format,
    Recipe,
    RecipeError,
    as_backward_override,
    as_bool,
    as_instance,
    as_int,
)


@dataclass(init=False, repr=False)
class CustomRecipe(Recipe):
    """Every tensor is quantized as a function of the user says.

    * `qfactory`: function of a `QuantizerRole`, called once per tensor; it returns a quantizer or a
      `QuantizerRequest`
    * `fp8_format`: format that is reported where one is asked for
    * `fp8_dpa`, `fp8_mha`: attention only
    * `backward_override`: None, "high_precision" or "dequantized"; default: NVTE_BACKWARD_OVERRIDE
    * `quantization_alignment`: multiple that grouped inputs are padded to

    Raises `RecipeError` (a ValueError) for any other value, and TypeError without `qfactory`.
    """

    qfactory: Callable
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = None
    quantization_alignment: int = 128

    def __init__(
        self,
        qfactory: Callable,
        fp8_format: Format = Format.HYBRID,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: Optional[str] = FROM_ENVIRONMENT,
        quantization_alignment: int = 128,
        **unknown,
    ) -> None:
        self._note_unknown(unknown)
        if not callable(qfactory):
            raise RecipeError(f"qfactory must be a function of a QuantizerRole, not {qfactory!r}.")
        self.qfactory = qfactory
        self.fp8_format = as_instance("fp8_format", fp8_format, Format)
        self.fp8_dpa = as_bool("fp8_dpa", fp8_dpa)
        self.fp8_mha = as_bool("fp8_mha", fp8_mha)
        self.backward_override = as_backward_override(backward_override)
        self.quantization_alignment = as_int("quantization_alignment", quantization_alignment)
        if self.quantization_alignment <= 0:
            raise RecipeError(
                f"quantization_alignment must be positive, not {self.quantization_alignment}."
            )
        self._complete = True

    def _describe(self) -> str:
        fields = _Fields(self.qfactory, self.fp8_format, self.backward_override)
        return f"custom:{_number(fields)}"

    @classmethod
    def custom(cls) -> bool:
        return True


class _Fields(NamedTuple):
    """The fields of a custom recipe that decide numbers. Functions are compared by identity."""

    qfactory: Callable
    fp8_format: Format
    backward_override: Optional[str]


# Recipes by their number: those of equal fields share one.
_NUMBERED: list[_Fields] = []


def _number(fields: _Fields) -> int:
    if fields not in _NUMBERED:
        _NUMBERED.append(fields)
    return _NUMBERED.index(fields)


def fields_of(text: str) -> _Fields:
    """The fields of the custom recipe whose `_spec` is `text`."""
    return _NUMBERED[int(text.partition(":")[2])]
