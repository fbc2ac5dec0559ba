# SPDX-License-Identifier: Apache-2.0
"""Quantizations and leaf ops in words."""

from __future__ import annotations

from dataclasses import fields
from typing import Optional

from ..core.python_quantizers import is_python, rounding_dtype, runs_user_code
from ..formats.spec import QuantSpec, decode_quant

# Tensors of a module op: the linear stage and the operand that they are, or are a buffer of, in
# which case the name has a suffix. -1 is the last stage.
_OPERANDS = {
    "x": (0, "input"),
    "ln_out": (0, "input"),
    "a": (1, "input"),
    "w": (0, "weight"),
    "w1": (0, "weight"),
    "w2": (1, "weight"),
    "weight": (0, "weight"),
    "fc1_weight": (0, "weight"),
    "fc2_weight": (1, "weight"),
    "dy": (-1, "grad_output"),
    "dh": (0, "grad_output"),
}
_SLOTS = ("input", "weight", "output")  # of each linear stage, in the forward pass
# What the results of a leaf op are called, and the result in high precision.
PRODUCED = {
    "norm_forward": ("ln_out", "y"),
    "activation_forward": ("a", "y"),
    "activation_backward": ("dh", "dx"),
}
_GEMMS = {
    ("input", "weight"): "fprop",
    ("grad_output", "weight"): "dgrad",
    ("grad_output", "input"): "wgrad",
}


# --- quantizations -------------------------------------------------------------------------------


def quant_words(quant: str, columnwise: bool = False) -> str:
    """One orientation of an encoded quantization in words; "" reads "high precision"."""
    if not quant:
        return "high precision"
    if is_python(quant):
        if runs_user_code(quant):
            return "values of the recipe's own Python quantizer, in high precision"
        dtype = rounding_dtype(quant)
        return f"high precision, rounded to {dtype}" if dtype else "high precision"
    spec = decode_quant(quant)
    return ", ".join([_format(spec), *_scales(spec, columnwise), *_options(spec, columnwise)])


def _format(spec: QuantSpec) -> str:
    return {"mxfp8": "MXFP8", "nvfp4": "NVFP4"}.get(spec.kind, "FP8") + " " + spec.fmt.upper()


def _scales(spec: QuantSpec, columnwise: bool) -> list:
    size = {"block": 128, "mxfp8": 32, "nvfp4": 16}.get(spec.kind, 0)
    lines, values = (size, size) if spec.dim == 2 else (1, size)
    block = f"{values}x{lines} blocks" if columnwise else f"{lines}x{values} blocks"
    power = "power-of-two " if spec.pow2 else ""
    if spec.kind == "delayed":
        return ["one scale from the amax history"]
    if spec.kind == "current":
        return [f"one {power}scale from its own amax"]
    if spec.kind == "block":
        return [f"fp32 {power}scales of {block}"]
    if spec.kind == "mxfp8":
        return [f"E8M0 scales of {block}"]
    outer = (
        f"one fp32 scale per {'column' if columnwise else 'row'}"
        if spec.row_scaled
        else "one fp32 scale"
    )
    return [f"E4M3 scales of {block} and {outer}"]


def _options(spec: QuantSpec, columnwise: bool) -> list:
    words = {
        f"amax at least {spec.eps:g}": spec.eps > 0,
        "scales swizzled for the GEMM": spec.swizzled,
        "of the norm's unrounded fp32 result": spec.unrounded == 1,
        "of the norm's unrounded fp32 result if rows are a multiple of 128": spec.unrounded == 2,
        "after a random Hadamard transform": spec.rht and columnwise,
        "rounded stochastically": spec.stochastic,
        f"each block's largest value becomes 4 or 6, by {spec.four_over_six.upper()}": bool(
            spec.four_over_six
        ),
        "block scales up to 256": spec.e4m3_max == 256,
    }
    return [text for text, holds in words.items() if holds]


def recipe_words(recipe) -> str:
    """A recipe with those of its fields that differ from what they are by default."""
    needed = {name for name in ("qfactory",) if hasattr(recipe, name)}  # what has no default
    default = type(recipe)(**{name: getattr(recipe, name) for name in needed})
    names = [field.name for field in fields(recipe) if field.repr]
    pairs = [(name, getattr(recipe, name)) for name in names]
    changed = [
        f"{name}={value!r}"
        for name, value in pairs
        if name in needed or value != getattr(default, name)
    ]
    return f"{type(recipe).__name__}({', '.join(changed)})"


# --- operands ------------------------------------------------------------------------------------


def operand_name(gemms: int, gemm: int, operand: str) -> str:
    """ "input", or "fc1.input" in a module of two GEMMs."""
    return operand if gemms < 2 else f"fc{gemm % gemms + 1}.{operand}"


def labelled_operand(label: Optional[str]) -> Optional[tuple]:
    """``(gemm, operand)`` of a tensor of a module op, by its name; None if it is no operand."""
    if label is None:
        return None
    return _OPERANDS.get(label) or _OPERANDS.get(label.split("_")[0])


def produced_operand(leaf: str, values: dict, gemms: int, label_of) -> str:
    """The operand that a producing leaf op makes from its arguments ``values``."""
    label = PRODUCED[leaf][0] if leaf in PRODUCED else label_of(values["x"])
    operand = labelled_operand(label)
    if operand is None:  # a weight, which is quantized outside of the module op
        gemm, kind = divmod(values["slot"], len(_SLOTS))
        operand = gemm, _SLOTS[kind]
    return operand_name(gemms, *operand)


# --- leaf ops ------------------------------------------------------------------------------------


def leaf_purpose(leaf: str, values: dict, gemms: int, label_of) -> str:
    """What a leaf op is for. ``label_of(tensor)`` is the name of a tensor of the module op."""
    if leaf == "gemm":
        return gemm_purpose(gemms, label_of(values["a"]), label_of(values["b"]))
    if leaf == "quantize" and not (values["rowwise"] or values["columnwise"]):
        return "amax alone"
    if leaf == "dequantize":
        operand = labelled_operand(label_of(values["data"]))
        return "values" if operand is None else "values of " + operand_name(gemms, *operand)
    if leaf == "quantize" or leaf in PRODUCED:
        quantized = values["quant"] != ""
        return produced_operand(leaf, values, gemms, label_of) if quantized else "high precision"
    purposes = {
        "norm_backward": "input and norm parameters",
        "bias_grad": "bias gradient",
        "record_amax_": "amax history",
        "delayed_scaling_update_": "next scales",
        "accumulate_": "main_grad",
    }
    return purposes.get(leaf, "")


def gemm_purpose(gemms: int, a_label: Optional[str], b_label: Optional[str]) -> str:
    """Which GEMM it is, by the names of its operands."""
    a, b = labelled_operand(a_label), labelled_operand(b_label)
    which = None if a is None or b is None else _GEMMS.get((a[1], b[1]))
    return "product" if which is None else operand_name(gemms, b[0], which)
