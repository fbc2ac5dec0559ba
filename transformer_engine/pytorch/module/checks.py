# SPDX-License-Identifier: Apache-2.0
"""What a call of a module needs, and the errors where dimensions do not fit."""

from __future__ import annotations

import functools
import math
import operator
from typing import Optional

import torch
from torch import Tensor

from ..core.config import gemm_text
from ..core.python_quantizers import is_python
from ..environment import constant_in_graphs
from ..formats.spec import decode_quant


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """The dtype of an active ``torch.autocast`` for this kind of device, None without one."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def wanted_gradients(names: tuple, tensors: tuple) -> str:
    """Comma-joined names of the tensors whose gradient this call must be able to give."""
    if not torch.is_grad_enabled():
        return ""
    return ",".join([n for n, t in zip(names, tensors) if n and t is not None and t.requires_grad])


def check_construction(module, params_dtype, **sizes) -> None:
    """Raise unless ``sizes``, by the names of the arguments, are sizes, and the dtype one of
    parameters.
    """
    kind = type(module).__name__
    for name, size in sizes.items():
        try:
            number = operator.index(size)
        except TypeError as error:
            raise TypeError(
                f"{name} of {kind} is {size!r}, but must be an int, the number of features."
            ) from error
        if number < 0:
            raise ValueError(f"{name} of {kind} is {number}, but must not be negative.")
    if params_dtype is None:
        return
    if not isinstance(params_dtype, torch.dtype):
        raise TypeError(
            f"The params_dtype of {kind} is {params_dtype!r}, but must be a torch.dtype, such as"
            " torch.bfloat16, or None for torch.get_default_dtype()."
        )
    if not params_dtype.is_floating_point or params_dtype.itemsize < 2:
        raise TypeError(
            f"The params_dtype of {kind} is {params_dtype}, but parameters are torch.float32,"
            " torch.bfloat16 or torch.float16. For weights that are kept in low precision build"
            " the module inside te.quantized_model_init(recipe=...)."
        )


def check_first_microbatch(module, flag) -> None:
    """Raise unless ``is_first_microbatch`` is None, True or False."""
    if flag is not None and not isinstance(flag, bool):
        given = repr(flag) if isinstance(flag, (str, int)) else f"a {type(flag).__name__}"
        raise TypeError(
            f"{type(module).__name__} '{module.name}' was called with is_first_microbatch={given},"
            " but it must be None (quantize the weight at each call), True (and cache it) or False"
            " (take the cached one)."
        )


def check_input(module, inp: Tensor, parameter: Tensor) -> None:
    """Raise unless the input of ``module`` is a tensor on the device of ``parameter``, its first.

    Operators that only take memory and read bytes would compute garbage without a word. A module
    on meta takes an input on meta: shapes and dtypes come out.
    """
    if not isinstance(inp, Tensor):
        raise TypeError(
            f"The input of {type(module).__name__} '{module.name}' must be a torch.Tensor, but it"
            f" is {'None' if inp is None else f'a {type(inp).__name__}'}. Pass a tensor, such as"
            " torch.tensor(...) makes, on the device of the parameters."
        )
    device = parameter.device
    if inp.device != device:
        if device.type == "meta":
            cure = (
                "These parameters have no values yet: call the module's reset_parameters(), or"
                " to_empty(device=...) and then reset_parameters() or load_state_dict(...)."
            )
        elif inp.device.type == "meta":
            cure = "This input has no values: pass one that has, or build the module on meta too."
        else:
            cure = f"Move the input with .to('{device}'), or the module with .to('{inp.device}')."
        raise RuntimeError(
            f"The input of {type(module).__name__} '{module.name}' is on {inp.device}, but the"
            f" parameters of the module are on {device}. {cure}"
        )


class DimensionError(ValueError, AssertionError):
    """A tensor's dimension does not fit. Also an AssertionError, which the reference raises."""


def shape_text(shape) -> str:
    """``shape`` for a message; also in a trace the last dimension is a number, not a symbol."""
    sizes = [f"{size}" for size in shape[:-1]] + [f"{operator.index(size)}" for size in shape[-1:]]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def raise_dimension(message: str) -> None:
    """Raise a ``DimensionError`` (in a trace: a ValueError, which Dynamo can carry)."""
    if torch.compiler.is_compiling():
        raise ValueError(message)
    raise DimensionError(message)


# What the formats want of a weight ``[out, in]``: multiples that ``out`` and ``in`` must be.
_WEIGHT_MULTIPLES = {
    "delayed": (8, 16),
    "current": (8, 16),
    "block": (8, 16),
    "mxfp8": (32, 32),
    "nvfp4": (16, 16),
}


@constant_in_graphs
def weight_multiples(spec: str, gemm: int) -> tuple:
    """``(out, in)``: what the dimensions of the weight of linear stage ``gemm`` must divide by."""
    return _weight_multiples(spec, gemm)


@functools.lru_cache(maxsize=None)
def _weight_multiples(spec: str, gemm: int) -> tuple:
    multiples = [(1, 1)]
    for key in ("x", "w", "g"):
        for part in gemm_text(spec, key, gemm).split("|")[:2]:
            if part and not is_python(part):
                multiples.append(_WEIGHT_MULTIPLES[decode_quant(part).kind])
    return max(out for out, _ in multiples), max(width for _, width in multiples)


def check_weight(module, gemm: int, weight: Tensor, spec: str) -> None:
    """Raise if a dimension of the weight does not fit the formats of ``spec``."""
    multiples = weight_multiples(spec, gemm)
    for dim in (0, 1):
        size, need = weight.shape[dim], multiples[dim]
        if size % need != 0:
            label = f"FC{gemm + 1} " if module.num_gemms > 1 else ""
            # FC1's output is FC2's input, which must fit as well.
            multiple = max(multiples) if label == "FC1 " else need
            fitting = math.ceil(size / multiple) * multiple
            raise ValueError(
                f"FP8 execution requires dimension {dim} of the {label}weight of"
                f" {type(module).__name__} '{module.name}' to be a multiple of {need}, but it is"
                f" {size} (shape {tuple(weight.shape)}). Use {fitting},"
                " or run this module outside of te.autocast."
            )
