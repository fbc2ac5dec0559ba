# SPDX-License-Identifier: Apache-2.0
"""What must be kept for backward: per tensor of a module op who reads it, and the bytes of it.

The letters of the formulas: M rows of the input, K its columns, N output features; in
``LayerNormMLP`` G output features of FC1 and F input features of FC2, whose outputs are K again; e
bytes per value of the activation dtype. ``up(a, b)`` is a rounded up to a multiple of b, ``ceil(a,
b)`` is a / b rounded up. docs/diagnostics.rst has them as a table.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

from ..core.config import ModuleConfig
from ..core.python_quantizers import is_python
from ..formats.layout import quantized_layout
from ..formats.spec import QuantSpec, decode_quant
from .words import labelled_operand, operand_name


class Need(NamedTuple):
    """Why a tensor is kept, the formula of its bytes, and their number."""

    why: str = ""
    formula: str = ""
    bytes: int = 0


class Sizes(NamedTuple):
    """The letters of a call: of the input, of each GEMM's weight ``[out, in]``, bytes per value."""

    rows: int
    columns: int
    weights: tuple
    itemsize: int
    gemms: int


# Buffers of a quantized [R, C] operand in bytes; E8M0, E4M3 and codes are bytes, "4*" is fp32.
_FORMULAS = {
    "row": {
        "delayed": ("R*C", "4"),
        "current": ("R*C", "4"),
        "block1": ("R*C", "4*ceil(C,128)*up(R,4)"),
        "block2": ("R*C", "4*ceil(R,128)*up(ceil(C,128),4)"),
        "mxfp8": ("R*C", "up(R,128)*up(ceil(C,32),4)"),
        "nvfp4": ("R*C/2", "up(R,128)*up(ceil(C,16),4)"),
    },
    "col": {
        "delayed": ("C*up(R,16)", "4"),
        "current": ("C*up(R,16)", "4"),
        "block1": ("C*up(R,128)", "4*ceil(R,128)*up(C,4)"),
        "block2": ("C*up(R,128)", "4*ceil(C,128)*up(ceil(R,128),4)"),
        "mxfp8": ("up(R,32)*C", "up(ceil(R,32),4)*up(C,128)"),
        "nvfp4": ("C*up(R,32)/2", "up(C,128)*up(ceil(R,16),4)"),
    },
}


def needed(name: str, cfg: ModuleConfig, sizes: Sizes) -> Need:
    """Why the module op's backward reads the tensor called ``name``, and how large it is."""
    again = _computed_again(name, cfg, sizes)
    if again is not None:
        return again
    m, k, e = sizes.rows, sizes.columns, sizes.itemsize
    if name == "x" and cfg.norm:
        return Need("the norm's backward reads its input", "e*M*K", e * m * k)
    if name == "ln_weight":
        return Need("the norm's backward scales by it", "e*K", e * k)
    if name in ("mean", "rstd"):
        return Need("the norm's backward reads its statistics", "4*M", 4 * m)
    if name == "h":
        width = sizes.weights[0][0]
        return Need("the activation's backward reads its input", "e*M*G", e * m * width)
    operand = labelled_operand(name)
    if operand is None:
        return Need()
    return _operand(name, cfg, sizes, *operand)


def _computed_again(name: str, cfg: ModuleConfig, sizes: Sizes) -> Optional[Need]:
    """What is kept to run or quantize something a second time; None for other tensors."""
    k, e = sizes.columns, sizes.itemsize
    if name == "x" and cfg.save_input:
        return Need("wgrad quantizes the input again", "e*M*K", e * sizes.rows * k)
    operand = labelled_operand(name)
    if operand is not None and operand[1] == "weight" and operand[0] in cfg.again:
        reader = operand_name(sizes.gemms, operand[0], "dgrad")
        why = f"{reader} quantizes the weight again"
        if name.endswith("scale_inv"):
            return Need(f"{why}: scale", "4", 4)
        letters = _letters("weight", operand[0], sizes)
        return Need(why, _text("e*R*C", letters), e * math.prod(sizes.weights[operand[0]]))
    if not cfg.recompute:
        return None
    if name == "ln_bias":
        return Need("the norm runs again", "e*K", e * k)
    if name == "fc1_bias":
        return Need("fc1 runs again", "e*G", e * sizes.weights[0][0])
    if name == "fwd_scale":
        return Need("fc1 and the norm run again: scales", "24", 24)
    if name == "fc1_weight":
        return Need("fc1 runs again", "e*G*K", e * math.prod(sizes.weights[0]))
    if name.startswith("w1_row"):
        field = name.removeprefix("w1_row").removeprefix("_") or "data"
        spec = decode_quant(cfg.gemms[0].w.row)
        return Need("fc1 runs again", *_buffer(spec, field, "row", sizes.weights[0], ("G", "K")))
    return None


def _letters(kind: str, gemm: int, sizes: Sizes) -> tuple:
    """The letters of rows and columns of an operand."""
    if kind == "input":
        return ("M", "F" if gemm else "K")
    return (("G", "K"), ("K", "F"))[gemm] if sizes.gemms > 1 else ("N", "K")


def _operand(name: str, cfg: ModuleConfig, sizes: Sizes, gemm: int, kind: str) -> Need:
    config, letters = cfg.gemms[gemm], _letters(kind, gemm, sizes)
    if kind == "input":
        which, quants, reader = config.keeps_input(), config.x, "wgrad"
        shape = (sizes.rows, sizes.weights[gemm][1])
    else:
        which, quants, reader = config.keeps_weight(), config.w, "dgrad"
        shape = sizes.weights[gemm]
    reader = operand_name(sizes.gemms, gemm, reader)
    field = next((f for f in ("scale_inv", "amax") if name.endswith(f)), "data")
    if which == "hp" or not name.endswith(("data", "scale_inv", "amax")):
        why = f"{reader} multiplies the {kind} in high precision"
        return Need(why, _text("e*R*C", letters), sizes.itemsize * math.prod(shape))
    quant = getattr(quants, which)
    what = {"data": "values", "scale_inv": "scales", "amax": "amax"}[field]
    if which == "row":
        why = f"{reader} multiplies the dequantized rowwise {kind}: {what}"
    else:
        why = f"{reader} multiplies the columnwise {kind}: {what}"
    if is_python(quant):
        return Need(why, _text("e*R*C", letters), sizes.itemsize * math.prod(shape))
    return Need(why, *_buffer(decode_quant(quant), field, which, shape, letters))


def _text(formula: str, letters: tuple) -> str:
    """``formula`` of R rows and C columns, with the letters of an operand in their place."""
    return formula.replace("R", letters[0]).replace("C", letters[1])


def _buffer(
    spec: QuantSpec, field: str, which: str, shape: tuple, letters: tuple
) -> tuple[str, int]:
    """Formula and bytes of one buffer of a quantized tensor of ``shape``."""
    layout = quantized_layout(spec, *shape, which == "row", which == "col")
    column = which == "col" and not spec.per_tensor
    if field == "amax":
        size = _bytes(layout.col_amax if column else layout.amax, 4)
        return (_text("4*C" if column else "4*R", letters) if spec.row_scaled else "4"), size
    key = spec.kind + (str(spec.dim) if spec.kind == "block" else "")
    formula = _text(_FORMULAS[which][key][field == "scale_inv"], letters)
    if field == "data":
        return formula, _bytes(layout.col if which == "col" else layout.row, 1)
    scales = layout.col_scale_inv if column else layout.scale_inv
    return formula, _bytes(scales, layout.scale_dtype.itemsize)


def _bytes(shape: Optional[tuple], itemsize: int) -> int:
    return 0 if shape is None else math.prod(shape) * itemsize
