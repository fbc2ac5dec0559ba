# SPDX-License-Identifier: Apache-2.0
"""Single options of an encoded ``QuantSpec``, read by string operations that compilers trace."""

from __future__ import annotations

from dataclasses import replace

from ..constants import TE_DType, DType
from ..formats.spec import decode_quant

DTYPE_OF_FORMAT = {
    "e4m3": DType.kFloat8E4M3,
    "e5m2": DType.kFloat8E5M2,
    "e2m1": DType.kFloat4E2M1,
}
_FORMAT_OF_DTYPE = {dtype: fmt for fmt, dtype in DTYPE_OF_FORMAT.items()}


def fp8_format(fp8_dtype) -> str:
    """``"e4m3"`` or ``"e5m2"`` for a ``DType``, its integer, or a torch float8 dtype."""
    fmt = _FORMAT_OF_DTYPE.get(TE_DType.get(fp8_dtype, fp8_dtype))
    if fmt not in ("e4m3", "e5m2"):
        raise ValueError(
            f"fp8_dtype is {fp8_dtype!r}, which is no 8-bit floating-point type. "
            "Use DType.kFloat8E4M3 or DType.kFloat8E5M2."
        )
    return fmt


def kind_of(quant: str) -> str:
    """The kind, for example ``"mxfp8"``; ``""`` if nothing is quantized."""
    return quant.split(",", 1)[0]


def dtype_of(quant: str) -> DType:
    """``DType`` of the codes."""
    return DTYPE_OF_FORMAT[quant.split(",")[1]]


def has_option(quant: str, option: str) -> bool:
    """Whether ``option``, for example ``"dim=2"``, is among the options."""
    return option in quant.split(",")


def starts_option(quant: str, name: str) -> bool:
    """Whether the option ``name`` is there, with any value."""
    return f",{name}=" in quant


def without_options(quant: str, *names: str) -> str:
    """``quant`` without the options of these names."""
    return ",".join([p for p in quant.split(",") if p.split("=")[0] not in names])


def with_swizzled(quant: str, swizzled: bool) -> str:
    """``quant`` for scales in the order of GEMMs, or for compact ones."""
    return replace(decode_quant(quant), swizzled=swizzled).encode()
