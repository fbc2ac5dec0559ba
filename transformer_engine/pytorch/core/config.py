# SPDX-License-Identifier: Apache-2.0
"""The static configuration of a module op: one short string outside, a frozen object inside.

Strings cross an op's schema on every torch version, load under ``torch.export`` and compare by
value in guards. The text is ``key=value`` pairs joined by ``;``. It has three parts: what the
module fixed at construction (norm, activation), what the active recipe says (made by
``quantization.autocast``), and what this call needs (which gradients, which extra outputs).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..environment import constant_in_graphs
from ..formats.layout import LayoutFlags

BACKWARD_OVERRIDES = ("", "high_precision", "dequantized")


@dataclass(frozen=True)
class OperandConfig:
    """Quantization of a GEMM operand: encoded ``QuantSpec`` per orientation, "" for none.

    The text is that of both orientations, or ``row|col`` where they differ (a hybrid quantizer);
    ``row|col|dq`` if the columnwise values are made from the dequantized rowwise ones.
    """

    row: str = ""
    col: str = ""
    col_from_row: bool = False

    @property
    def hybrid(self) -> bool:
        """Whether the orientations are quantized separately."""
        return self.row != self.col or self.col_from_row

    @property
    def dequantized_columns(self) -> bool:
        """Whether columnwise values are the dequantized rowwise ones, in high precision."""
        return self.col_from_row and bool(self.row) and not self.col

    @property
    def shares_scale(self) -> bool:
        """Whether one scale serves both orientations."""
        return not self.hybrid and self.row.startswith(("delayed", "current"))


def decode_operand(text: str) -> OperandConfig:
    """Decode the text of one operand."""
    row, *rest = text.split("|")
    return OperandConfig(row, rest[0] if rest else row, len(rest) > 1)


@constant_in_graphs
def has_columns(text: str) -> bool:
    """Whether an operand of this text has columnwise data of its own."""
    return decode_operand(text).col != ""


@dataclass(frozen=True)
class GemmConfig:
    """How the three GEMMs of a linear layer are computed.

    fprop multiplies ``x.row`` and ``w.row``, dgrad ``g.row`` and ``w.col``, wgrad ``g.col`` and
    ``x.col``; a GEMM whose operands have no format is computed in high precision.
    """

    x: OperandConfig = OperandConfig()
    w: OperandConfig = OperandConfig()
    g: OperandConfig = OperandConfig()
    override: str = ""  # of the backward pass: "", "high_precision" or "dequantized"

    @property
    def fprop(self) -> bool:
        """Whether fprop is quantized."""
        return bool(self.x.row)

    @property
    def dgrad(self) -> bool:
        """Whether dgrad is quantized."""
        return bool(self.g.row) and not self.override

    @property
    def wgrad(self) -> bool:
        """Whether wgrad is quantized."""
        return bool(self.g.col) and not self.override

    @property
    def from_dequantized(self) -> bool:
        """Whether backward multiplies the dequantized forward operands."""
        return self.override == "dequantized" and self.fprop

    def keeps_input(self) -> str:
        """What wgrad needs of the input: "col", "row" or "hp"."""
        return "col" if self.wgrad else self._keeps(self.x)

    def keeps_weight(self) -> str:
        """What dgrad needs of the weight: "col", "row" or "hp"."""
        return "col" if self.dgrad else self._keeps(self.w)

    def _keeps(self, operand: OperandConfig) -> str:
        """What a backward GEMM in high precision needs of a forward operand."""
        dequantized = not self.override and operand.dequantized_columns
        return "row" if dequantized or self.from_dequantized else "hp"


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
    gemms: tuple = (GemmConfig(), GemmConfig())  # one per linear stage
    custom: bool = False  # a CustomRecipe: activations are quantized after they were rounded
    flags: LayoutFlags = LayoutFlags()
    fast_fprop: bool = False
    fast_dgrad: bool = False
    fast_wgrad: bool = False
    need: frozenset = frozenset()  # names of the inputs whose gradient is wanted
    want_norm_output: bool = False
    calibrate: tuple = ()  # linear stages whose input, though not quantized, has its amax recorded
    wgrad_dtype: str = ""  # of weight gradients, if it is not that of the activations
    save_input: bool = False  # keep the input itself for wgrad and quantize it again there
    recompute: bool = False  # keep the input only, and run the stages before fc2 again in backward
    delay_wgrad: bool = False  # return the operands of wgrad instead of its result
    again: tuple = ()  # linear stages that keep the weight itself and quantize it in backward again
    free: bool = False  # backward frees what forward kept for nobody else, after its last use

    def needs(self, *names: str) -> bool:
        """Whether the gradient of any of the named inputs is wanted."""
        return any(name in self.need for name in names)


def norm_config(kind: str, eps: float, zero_centered: bool) -> str:
    """The part of a module that contains a norm."""
    return f"norm={kind},{float(eps)!r},{int(zero_centered)}"


def activation_config(name: str, limit: float, alpha: float, offset: float) -> str:
    """The part of a module that contains an activation."""
    return f"act={name},{float(limit)!r},{float(alpha)!r},{float(offset)!r}"


@functools.lru_cache(maxsize=None)
def decode_config(text: str) -> ModuleConfig:
    """Decode a configuration string; the inverse of joining the parts with ``;``.

    ``x``, ``w`` and ``g`` are of both linear stages, ``x2``, ``w2`` and ``g2`` of the second one.
    Of a key that is there twice the last one counts.
    """
    fields: dict = {}
    operands: dict = {}
    override = ""
    flags = LayoutFlags()
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
            override = value
        elif key == "need":
            fields["need"] = frozenset(filter(None, value.split(",")))
        elif key == "out":
            fields["want_norm_output"] = value == "norm"
        elif key == "cal":
            fields["calibrate"] = tuple(int(gemm) for gemm in value.split(","))
        elif key == "dw":
            fields["wgrad_dtype"] = value
        elif key == "orig":
            fields["save_input"] = value == "1"
        elif key == "recompute":
            fields["recompute"] = value == "1"
        elif key == "delay":
            fields["delay_wgrad"] = value == "1"
        elif key == "free":
            fields["free"] = value == "1"
        elif key == "inplace":
            pass  # of interest to autograd only, see ModuleFunction
        elif key == "again":
            fields["again"] = tuple(int(gemm) for gemm in value.split(","))
        elif key == "custom":
            fields["custom"] = value == "1"
        elif key == "cudnn":
            flags = flags._replace(cudnn_norm=value == "1")
        elif key == "rht_fusion":
            flags = flags._replace(rht_fusion=value == "1")
        elif key in ("x", "w", "g", "x2", "w2", "g2"):
            operands[key] = decode_operand(value)
        else:
            raise ValueError(f"Unknown key {key!r} in module configuration {text!r}.")
    first = GemmConfig(**{k: operands[k] for k in "xwg" if k in operands}, override=override)
    second = {k: operands[k + "2"] for k in "xwg" if k + "2" in operands}
    return ModuleConfig(gemms=(first, replace(first, **second)), flags=flags, **fields)


@constant_in_graphs
def delayed_stages(spec: str, key: str) -> str:
    """Linear stages whose operand ``key`` has delayed scaling, as ``cal`` names them."""
    return ",".join(str(gemm) for gemm in (0, 1) if "delayed" in _gemm_text(spec, key, gemm))


def operand_text(text: str, key: str) -> str:
    """The value of ``key`` in a configuration, "" if it is not there."""
    found = ""
    for pair in text.split(";"):
        name, _, value = pair.partition("=")
        if name == key:
            found = value
    return found


@constant_in_graphs
def gemm_text(spec: str, key: str, gemm: int) -> str:
    """The quantization of operand ``key`` ("x", "w" or "g") of linear stage ``gemm``."""
    return _gemm_text(spec, key, gemm)


@functools.lru_cache(maxsize=None)
def _gemm_text(spec: str, key: str, gemm: int) -> str:
    if gemm == 1 and f";{key}2=" in spec:
        key += "2"
    return operand_text(spec, key)
