# SPDX-License-Identifier: Apache-2.0
"""How one tensor is to be quantized, as a value and as a short string.

Operators of ``torch.library`` take plain schemas only, so a quantization crosses them as a string;
``decode_quant`` turns it back into the (cached, hashable) value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

KINDS = ("delayed", "current")
FP8_FORMATS = ("e4m3", "e5m2")


@dataclass(frozen=True)
class QuantSpec:
    """Quantization of one tensor.

    Attributes:
        kind: ``"delayed"`` (the scale comes from the amax history) or ``"current"`` (the scale
            comes from the amax of the tensor itself).
        fmt: ``"e4m3"`` or ``"e5m2"``.
        pow2: round the scale towards zero to a power of two (current scaling only).
        eps: the amax is raised to at least this value (current scaling only).

    Raises:
        ValueError: if a field has a value outside these.
    """

    kind: str
    fmt: str
    pow2: bool = False
    eps: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"QuantSpec.kind is {self.kind!r}, which names no quantization. "
                f"Use one of {', '.join(KINDS)}."
            )
        if self.fmt not in FP8_FORMATS:
            raise ValueError(
                f"QuantSpec.fmt is {self.fmt!r}, which names no 8-bit format. "
                f"Use one of {', '.join(FP8_FORMATS)}."
            )
        if self.kind == "delayed" and (self.pow2 or self.eps != 0.0):
            raise ValueError(
                f"QuantSpec has pow2={self.pow2} and eps={self.eps} with kind 'delayed', whose "
                "scale is not computed from the tensor. Leave both at their defaults."
            )

    def encode(self) -> str:
        """The string form, for example ``"current,e4m3,0,0.0"``."""
        return f"{self.kind},{self.fmt},{int(self.pow2)},{float(self.eps)}"


@lru_cache(maxsize=None)
def decode_quant(text: str) -> Optional[QuantSpec]:
    """The inverse of ``QuantSpec.encode``; ``""`` (no quantization) gives ``None``."""
    if not text:
        return None
    fields = text.split(",")
    if len(fields) != 4:
        raise ValueError(
            f"The quantization string {text!r} has {len(fields)} fields. "
            "It must read 'kind,format,pow2,eps', as QuantSpec.encode() writes it."
        )
    kind, fmt, pow2, eps = fields
    return QuantSpec(kind, fmt, bool(int(pow2)), float(eps))
