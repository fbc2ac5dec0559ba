# SPDX-License-Identifier: Apache-2.0
"""Pickles and deep copies of quantized tensors.

A pickle calls one of the ``_make_*_in_reduce_ex`` functions with a dictionary of tensors and plain
values, so that ``torch.load(weights_only=True)`` reads it. Old pickles must stay readable: the
functions keep their names, and entries are only ever added to the dictionary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

_VERSION = 1
_MAKERS: dict[type, Any] = {}


def makes(kind: type):
    """Decorator: the function that pickles of objects of class ``kind`` call."""

    def register(function):
        _MAKERS[kind] = function
        return function

    return register


def makers() -> list:
    """All these functions."""
    return list(_MAKERS.values())


def reduced(tensor: Any) -> tuple:
    """What ``__reduce_ex__`` returns for a quantized tensor or storage.

    Attributes that users set go with a parameter, as they do in torch.
    """
    make = _MAKERS.get(type(tensor))
    if make is None:
        raise TypeError(
            f"{type(tensor).__name__} is a subclass that does not say how it is pickled. Define "
            "__reduce_ex__ in it."
        )
    attributes = _attributes(tensor)
    if attributes.get("_is_param"):
        return make, (_state(tensor),), attributes
    return make, (_state(tensor),)


def _state(tensor: Any) -> dict[str, Any]:
    """What ``rebuilt`` makes an equal object from."""
    return {
        "version": _VERSION,
        "shape": tuple(tensor._shape),
        "device": str(tensor.device),
        "requires_grad": isinstance(tensor, Tensor) and tensor.requires_grad,
        "buffers": tensor._buffers(),
        "options": tensor._options(),
    }


def _attributes(tensor: Any) -> dict[str, Any]:
    """Attributes that are not part of the representation."""
    own = {*tensor._buffers(), *tensor._options(), "_shape"}
    return {name: value for name, value in tensor.__dict__.items() if name not in own}


def rebuilt(kind: type, state: dict[str, Any]) -> Any:
    """The object of class ``kind`` that ``state`` describes.

    Raises:
        RuntimeError: if the pickle was written by a newer version.
    """
    if state["version"] > _VERSION:
        raise RuntimeError(
            f"This pickled {kind.__name__} has format version {state['version']}; the installed "
            f"transformer_engine reads up to {_VERSION}. Update transformer_engine."
        )
    attributes = {**state["buffers"], **state["options"], "_shape": tuple(state["shape"])}
    new = kind._assemble(attributes, torch.device(state["device"]))
    return new.requires_grad_() if state["requires_grad"] else new


def deepcopied(tensor: Any, memo: dict) -> Any:
    """A copy that shares nothing, attributes and gradient included.

    Raises:
        RuntimeError: if the tensor is the result of a recorded operation, as in torch.
    """
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only tensors that users created support deepcopy, and this one is the result of an "
            "operation that autograd recorded. Copy tensor.detach() instead."
        )
    memo[id(tensor)] = new = rebuilt(type(tensor), copy.deepcopy(_state(tensor), memo))
    new.__dict__.update(copy.deepcopy(_attributes(tensor), memo))
    if tensor.grad is not None:
        new.grad = copy.deepcopy(tensor.grad, memo)
    return new
