# SPDX-License-Identifier: Apache-2.0
"""What a ``CustomRecipe`` means for one module: its factory is asked once per quantizer slot.

The answer is one string, like the one that the other recipes give for all modules, and is kept with
the module. A compiled graph is bound to the number of the recipe (``CustomRecipe._spec``), which
changes with any field; while a graph is traced the factory runs in plain Python.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any, Union

from ..common.recipe._custom import fields_of
from .core.config import decode_config, operand_text
from .core.python_quantizers import (
    beside_python,
    both_orientations,
    is_python,
    python_text,
    rounding_dtype,
    rounding_text,
    runs_user_code,
)
from .core.update_rule import PYTHON_RULE_IN_GRAPH, UpdateRule, rule_of
from .environment import constant_in_graphs
from .formats.spec import decode_quant
from .quantized_tensor import Quantizer
from .recipe_state import DelayedScalingRequest, ask_factory, common_request, delayed_recipe
from .tensor import HybridQuantizer, IdentityQuantizer

_PACKAGE = __name__.partition(".")[0] + "."


class ModuleRecipe:
    """A custom recipe as one module computes it: the text, and the delayed scaling in it."""

    def __init__(self, module, recipe) -> None:
        slots = {"fwd": 3 * module.num_gemms, "bwd": 2 * module.num_gemms}
        forward, backward = (
            [
                ask_factory(recipe.qfactory, role)
                for role in module.get_quantizer_roles(fwd=key == "fwd", num_quantizers=count)
            ]
            for key, count in slots.items()
        )
        parts = []
        for gemm in range(module.num_gemms):
            answers = (*forward[3 * gemm : 3 * gemm + 2], backward[2 * gemm])
            texts = [answer_text(answer, key != "g") for key, answer in zip("xwg", answers)]
            if any(map(is_python, texts)):
                texts = [beside_python(text) for text in texts]
            parts += [f"{key}{'2' * gemm}={text}" for key, text in zip("xwg", texts)]
        parts += ["acc=0,1,1", "custom=1"]
        if recipe.backward_override is not None:
            parts.append(f"bwd={recipe.backward_override}")
        self.spec = ";".join(parts)
        request = common_request([*forward, *backward])
        self.delayed = None if request is None else delayed_recipe(request)
        check_operands(module, self.spec)

    def rule(self, group: Any) -> Union[str, UpdateRule]:
        """How delayed scales are renewed, "" if there are none."""
        return "" if self.delayed is None else rule_of(self.delayed, group)


def answer_text(answer, forward: bool) -> str:
    """The text of what a factory answered for an operand of the forward or backward pass."""
    if isinstance(answer, DelayedScalingRequest):
        return operand_text(delayed_recipe(answer)._spec, "x" if forward else "g")
    if not isinstance(answer, Quantizer):
        raise ValueError(
            f"The qfactory of the CustomRecipe returned a {type(answer).__name__}. Return a"
            " te.Quantizer, or a te.DelayedScalingRequest for delayed scaling."
        )
    text = quantizer_text(answer)
    return both_orientations(text) if is_python(text) and "|" not in text else text


def quantizer_text(quantizer: Quantizer) -> str:
    """The text of a quantizer as operand of a module's GEMM, see ``OperandConfig``.

    Raises ValueError for a quantizer that has no such text.
    """
    if not type(quantizer).__module__.startswith(_PACKAGE):
        return python_text(quantizer)
    if isinstance(quantizer, IdentityQuantizer):
        return "" if quantizer.dtype is None else rounding_text(quantizer.dtype)
    if isinstance(quantizer, HybridQuantizer):
        row = quantizer_text(quantizer.rowwise_quantizer)
        col = quantizer_text(quantizer.columnwise_quantizer)
        if not (row or col):
            return ""
        from_row = quantizer.columnwise_source == "rowwise_dequantized"
        return f"{row}|{col}|dq" if from_row and row else f"{row}|{col}"
    spec = decode_quant(quantizer.quant)
    if spec.kind == "delayed":
        raise ValueError(
            "The qfactory of the CustomRecipe returned a Float8Quantizer, whose scale modules can"
            " not manage. Return a te.DelayedScalingRequest for delayed scaling."
        )
    # Modules ask for scales in the order of the GEMMs, whatever the quantizer does by itself.
    swizzled = spec.kind in ("mxfp8", "nvfp4")
    return replace(spec, swizzled=True).encode() if swizzled else quantizer.quant


def check_operands(module, spec: str) -> None:
    """Raise ValueError if two operands of a GEMM can not be multiplied."""
    config = decode_config(spec)
    for gemm in range(module.num_gemms):
        operands = config.gemms[gemm]
        label = f"{type(module).__name__} '{module.name}'" + (
            f" FC{gemm + 1}" if module.num_gemms > 1 else ""
        )
        pairs = [("fprop", operands.x.row, operands.w.row, "input", "weight")]
        if not operands.override:
            pairs += [
                ("dgrad", operands.g.row, operands.w.col, "grad_output", "weight"),
                ("wgrad", operands.g.col, operands.x.col, "grad_output", "input"),
            ]
        for name, a, b, a_name, b_name in pairs:
            problem = _mismatch(a, b, name)
            if problem:
                raise ValueError(
                    f"The CustomRecipe gives the {name} GEMM of {label} operands that do not fit:"
                    f" {a_name} {_described(a)} and {b_name} {_described(b)}; {problem}."
                )


def _described(text: str) -> str:
    """The text of one orientation for a message."""
    if runs_user_code(text):
        return "of a class of your own"
    if is_python(text):
        dtype = rounding_dtype(text)
        return f"in high precision, rounded to {dtype}" if dtype else "in high precision"
    return text or "in high precision"


def _mismatch(a: str, b: str, gemm: str) -> str:
    """Why two operands can not be multiplied; only columnwise values are ever transformed."""
    if bool(a) != bool(b):
        return "quantize both or neither"
    if is_python(a) != is_python(b) and not runs_user_code(a + b):
        return "quantize both or neither"
    if is_python(a) != is_python(b):
        return "a quantizer that you wrote needs another one, or an IdentityQuantizer, beside it"
    if not a or is_python(a):
        return ""
    specs = (decode_quant(a), decode_quant(b))
    if gemm == "wgrad" and (specs[0].kind == "mxfp8") != (specs[1].kind == "mxfp8"):
        return (
            "columnwise MXFP8 data keeps the orientation of the tensor, that of other formats is"
            " transposed: give both operands of wgrad MXFP8, or neither (a te.HybridQuantizer"
            " chooses the columnwise format alone)"
        )
    a_signs, b_signs = [spec.sign_mask if spec.rht else None for spec in specs]
    if gemm == "wgrad" and a_signs != b_signs:
        return "both or neither must be transformed (with_rht), with the same signs"
    if gemm == "dgrad" and b_signs is not None:
        return "the gradient's rowwise values are never transformed, so weights must not be either"
    return ""


# Not every torch lets a trace hand over a module as a constant, but all do so with a string.
_MODULES: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_module(module) -> None:
    """Prepare ``module`` for custom recipes; to be called when it is made, copied or unpickled."""
    module._custom_key = f"module {next(_numbers)}"
    module._custom_recipes = {}  # by the number of the recipe, which has a meaning in this process
    _MODULES[module._custom_key] = module


def _module_recipe(key: str, text: str) -> ModuleRecipe:
    """How the module of this key reads the custom recipe whose ``_spec`` is ``text``; made once."""
    module = _MODULES[key]
    known = module._custom_recipes
    if text not in known:
        known[text] = ModuleRecipe(module, fields_of(text))
    return known[text]


@constant_in_graphs
def custom_module_spec(key: str, text: str) -> str:
    """The configuration text of the module ``key`` under the recipe whose ``_spec`` is ``text``."""
    return _module_recipe(key, text).spec


@constant_in_graphs
def custom_obstacle(key: str, text: str) -> str:
    """Why the module ``key`` can not be traced under that recipe; "" if it can.

    Errors are found here as well, so that Dynamo leaves the call, and with it the error, to eager.
    """
    try:
        recipe = _module_recipe(key, text)
    except ValueError as error:
        return str(error)
    if runs_user_code(recipe.spec):
        return (
            f"the CustomRecipe quantizes '{_MODULES[key].name}' with a quantizer class of its own,"
            " whose Python code a graph can not contain; use the quantizers of this package."
        )
    delayed = recipe.delayed
    if delayed is None:
        return ""
    functions = (delayed.amax_compute_algo, delayed.scaling_factor_compute_algo)
    return PYTHON_RULE_IN_GRAPH if any(map(callable, functions)) else ""


@constant_in_graphs
def custom_update_rule(key: str, text: str) -> Union[str, UpdateRule]:
    """How the module's delayed scales are renewed under that recipe; "" if it has none."""
    from .fp8_global_state import FP8GlobalStateManager

    return _module_recipe(key, text).rule(FP8GlobalStateManager.get_fp8_group())
