# SPDX-License-Identifier: Apache-2.0
"""The static configuration of a module op: one short string outside, a frozen object inside.

Strings cross an op's schema on every torch version, load under ``torch.export`` and compare by
value in guards. The text is ``key=value`` pairs joined by ``;``. It has three parts: what the
module fixed at construction (norm, activation), what the active recipe says (made by
``quantization.autocast``), and what this call needs (which gradients, which extra outputs).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

BACKWARD_OVERRIDES = ("", "high_precision", "dequantized")


@dataclass(frozen=True)
class ModuleConfig:
    """Decoded configuration; every field has the value "off" as default."""

    norm: str = ""
    eps: float = 0.0
    zero_centered: bool = False
    activation: str = ""
    limit: float = 0.0
    alpha: float = 0.0
    offset: float = 0.0
    x: str = ""  # encoded QuantSpecs of GEMM inputs, weights and output gradients
    w: str = ""
    g: str = ""
    fast_fprop: bool = False
    fast_dgrad: bool = False
    fast_wgrad: bool = False
    backward_override: str = ""
    need: frozenset = frozenset()  # names of the inputs whose gradient is wanted
    want_norm_output: bool = False
    calibrate: bool = False  # record amaxes of operands that are not quantized

    def needs(self, *names: str) -> bool:
        """Whether the gradient of any of the named inputs is wanted."""
        return any(name in self.need for name in names)

    @property
    def quantized(self) -> bool:
        """Whether the forward GEMMs take quantized operands."""
        return bool(self.x)

    @property
    def quantized_backward(self) -> bool:
        """Whether the backward GEMMs take quantized operands."""
        return bool(self.g) and not self.backward_override


def norm_config(kind: str, eps: float, zero_centered: bool) -> str:
    """The part of a module that contains a norm."""
    return f"norm={kind},{float(eps)!r},{int(zero_centered)}"


def activation_config(name: str, limit: float, alpha: float, offset: float) -> str:
    """The part of a module that contains an activation."""
    return f"act={name},{float(limit)!r},{float(alpha)!r},{float(offset)!r}"


@functools.lru_cache(maxsize=None)
def decode_config(text: str) -> ModuleConfig:
    """Decode a configuration string; the inverse of joining the parts with ``;``."""
    fields: dict = {}
    for pair in filter(None, text.split(";")):
        key, _, value = pair.partition("=")
        if key == "norm":
            kind, eps, zero_centered = value.split(",")
            fields.update(norm=kind, eps=float(eps), zero_centered=zero_centered == "1")
        elif key == "act":
            name, limit, alpha, offset = value.split(",")
            fields.update(
                activation=name, limit=float(limit), alpha=float(alpha), offset=float(offset)
            )
        elif key == "acc":
            # The recipe speaks of split accumulators, the GEMM call of fast accumulation.
            fprop, dgrad, wgrad = (flag == "0" for flag in value.split(","))
            fields.update(fast_fprop=fprop, fast_dgrad=dgrad, fast_wgrad=wgrad)
        elif key == "bwd":
            fields["backward_override"] = value
        elif key == "need":
            fields["need"] = frozenset(filter(None, value.split(",")))
        elif key == "out":
            fields["want_norm_output"] = value == "norm"
        elif key == "cal":
            fields["calibrate"] = value == "1"
        elif key in ("x", "w", "g"):
            fields[key] = value
        else:
            raise ValueError(f"Unknown key {key!r} in module configuration {text!r}.")
    return ModuleConfig(**fields)
