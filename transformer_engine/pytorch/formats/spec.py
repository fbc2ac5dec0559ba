# SPDX-License-Identifier: Apache-2.0
"""How one tensor is to be quantized, as a value and as a short string.

Operators of ``torch.library`` take plain schemas only, so a quantization crosses them as a string;
``decode_quant`` turns it back into the (cached, hashable) value.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Optional

FORMATS = {
    "delayed": ("e4m3", "e5m2"),
    "current": ("e4m3", "e5m2"),
    "block": ("e4m3", "e5m2"),
    "mxfp8": ("e4m3", "e5m2"),
    "nvfp4": ("e2m1",),
}
KINDS = tuple(FORMATS)
PER_TENSOR = ("delayed", "current")
# Signs of the random Hadamard transform: bit i is set where the i-th one is -1.
RHT_SIGN_MASK = 0xD7E8

# Norms under NVTE_NORM_FWD_USE_CUDNN quantize unrounded results if this divides the rows.
WHOLE_ROWS = 128

# The options that mean something for a kind; the others must keep their defaults.
_OPTIONS = {
    "delayed": (),
    "current": ("pow2", "eps"),
    "block": ("dim", "pow2", "eps"),
    "mxfp8": ("dim", "swizzled", "unrounded"),
    "nvfp4": (
        *("dim", "swizzled", "rht", "sign_mask", "stochastic"),
        *("row_scaled", "four_over_six", "e4m3_max"),
    ),
}


@dataclass(frozen=True)
class QuantSpec:
    """Quantization of one tensor.

    Attributes:
        kind: ``"delayed"`` (FP8, the scale comes from the amax history), ``"current"`` (FP8, the
            scale comes from the amax of the tensor itself), ``"block"`` (FP8, fp32 scales of 128
            values), ``"mxfp8"`` (FP8, E8M0 scales of 32 values) or ``"nvfp4"`` (FP4, E4M3 scales of
            16 values and one fp32 scale).
        fmt: ``"e4m3"``, ``"e5m2"`` or, for ``"nvfp4"``, ``"e2m1"``.
        pow2: round the scale towards zero to a power of two (current and block scaling).
        eps: the amax is raised to at least this value (current and block scaling).
        dim: 1 for blocks along the contracted dimension, 2 for square blocks.
        swizzled: block scales are stored in the order that Blackwell's GEMMs read (``swizzle.py``).
        unrounded: 1 where a norm quantizes its fp32 result instead of the one rounded to its dtype
            (MXFP8), 2 where that is so if the rows are a multiple of 128, which a graph that does
            not know its rows can not say (``decode_for_rows``).
        rht: random Hadamard transform of the columnwise values, with the signs of ``sign_mask``.
        stochastic: round FP4 codes stochastically.
        row_scaled: one global FP4 scale per row.
        four_over_six: "" or the error, "mae" or "mse", by which each block chooses whether its
            largest value becomes 4 or 6.
        e4m3_max: largest block scale, 448 or (with ``four_over_six``) 256.

    Raises:
        ValueError: if a field has a value outside these, or one that does nothing for the kind.
    """

    kind: str
    fmt: str
    pow2: bool = False
    eps: float = 0.0
    dim: int = 1
    swizzled: bool = False
    unrounded: int = 0
    rht: bool = False
    sign_mask: int = RHT_SIGN_MASK
    stochastic: bool = False
    row_scaled: bool = False
    four_over_six: str = ""
    e4m3_max: int = 448

    def __post_init__(self) -> None:
        if self.kind not in FORMATS:
            raise ValueError(
                f"QuantSpec.kind is {self.kind!r}, which names no quantization. "
                f"Use one of {', '.join(KINDS)}."
            )
        if self.fmt not in FORMATS[self.kind]:
            raise ValueError(
                f"QuantSpec.fmt is {self.fmt!r}, which names no format of kind {self.kind!r}. "
                f"Use one of {', '.join(FORMATS[self.kind])}."
            )
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default and name not in _OPTIONS[self.kind]:
                raise ValueError(
                    f"QuantSpec has {name}={getattr(self, name)!r}, which means nothing for kind "
                    f"{self.kind!r}. Leave it at {default!r}."
                )
        if self.dim not in (1, 2):
            raise ValueError(f"QuantSpec.dim is {self.dim}; blocks are 1- or 2-dimensional.")
        if self.unrounded not in (0, 1, 2):
            raise ValueError(f"QuantSpec.unrounded is {self.unrounded}. Use 0, 1 or 2.")
        self._check_nvfp4()

    def _check_nvfp4(self) -> None:
        if self.four_over_six not in ("", "mae", "mse"):
            raise ValueError(
                f'QuantSpec.four_over_six is {self.four_over_six!r}; use "", "mae" or "mse".'
            )
        if self.e4m3_max not in (448, 256) or (self.e4m3_max == 256 and not self.four_over_six):
            raise ValueError(
                f"QuantSpec.e4m3_max is {self.e4m3_max}. Use 448, or 256 with four_over_six."
            )
        conflicts = (
            (self.four_over_six and self.rht, "four_over_six", "rht"),
            (self.four_over_six and self.stochastic, "four_over_six", "stochastic"),
            (self.row_scaled and self.rht, "row_scaled", "rht"),
            (self.row_scaled and self.stochastic, "row_scaled", "stochastic"),
            (self.row_scaled and self.dim == 2, "row_scaled", "dim=2"),
            (self.rht and self.dim == 2, "rht", "dim=2"),
        )
        for conflict, first, second in conflicts:
            if conflict:
                raise ValueError(
                    f"NVFP4 quantization cannot combine {first} with {second}. Switch one off."
                )

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the whole tensor, in both orientations."""
        return self.kind in PER_TENSOR

    def encode(self) -> str:
        """The string form: kind, format, and what differs from the defaults.

        For example ``"current,e4m3"`` or ``"block,e4m3,pow2=1,dim=2"``.
        """
        parts = [self.kind, self.fmt]
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                parts.append(f"{name}={int(value) if isinstance(default, bool) else value}")
        return ",".join(parts)


_DEFAULTS = {f.name: f.default for f in fields(QuantSpec) if f.name not in ("kind", "fmt")}


@lru_cache(maxsize=None)
def decode_quant(text: str) -> Optional[QuantSpec]:
    """The inverse of ``QuantSpec.encode``; ``""`` (no quantization) gives ``None``."""
    if not text:
        return None
    kind, *rest = text.split(",")
    options = {}
    for part in rest[1:]:
        name, _, value = part.partition("=")
        if name not in _DEFAULTS or not value:
            raise ValueError(
                f"The quantization string {text!r} has the part {part!r}. It must read "
                "'kind,format,option=value,...', as QuantSpec.encode() writes it."
            )
        default = _DEFAULTS[name]
        options[name] = bool(int(value)) if isinstance(default, bool) else type(default)(value)
    return QuantSpec(kind, rest[0] if rest else "", **options)


def decode_for_rows(text: str, rows: int) -> Optional[QuantSpec]:
    """``decode_quant`` for a tensor of ``rows`` rows, where that decides about ``unrounded``."""
    spec = decode_quant(text)
    if spec is None or spec.unrounded != 2:
        return spec
    return replace(spec, unrounded=int(rows % WHOLE_ROWS == 0))
