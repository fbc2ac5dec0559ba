# SPDX-License-Identifier: Apache-2.0
"""What a replay demands of its caller: inputs like the captured ones, and memory that stayed."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..quantized_tensor import QuantizedTensor


def given_tensors(unit, args: tuple, kwargs: dict) -> List[Tensor]:
    """The tensors of a call, in the order of the static ones.

    Raises TypeError or ValueError if they are not like those of the sample arguments.
    """
    name = type(unit.module).__name__
    missing = [key for key in unit.kwargs if key not in kwargs]
    if missing:
        raise TypeError(
            f"The graphed {name} was captured with the keyword arguments {', '.join(unit.kwargs)};"
            f" {', '.join(missing)} must be given too."
        )
    given = tree_flatten((args, {key: kwargs[key] for key in unit.kwargs}))[0]
    if len(given) != len(unit.inputs):
        raise TypeError(
            f"The graphed {name} was captured with {len(unit.inputs)} tensors as input, but is"
            f" called with {len(given)}."
        )
    for i, (static, tensor) in enumerate(zip(unit.inputs, given)):
        _check_input(f"Input {i} of the graphed {name}", static, tensor)
    return given


def _check_input(label: str, static: Tensor, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or tensor.shape != static.shape:
        found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(
            f"{label} must be a tensor of shape {tuple(static.shape)}, as captured, not {found}. A"
            " graph has one shape; capture another graph for another one."
        )
    if tensor.dtype != static.dtype:
        raise ValueError(
            f"{label} must be {static.dtype}, as captured, not {tensor.dtype}. Cast it, or capture"
            " the graph with a sample of that dtype."
        )
    if tensor.requires_grad and not static.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{label} requires a gradient, but the sample argument did not, so the graph computes"
            " none. Capture it with a sample that has requires_grad=True, or detach the input."
        )


class Place(NamedTuple):
    """Where a graph finds the values of one parameter, and the ``main_grad`` it adds to.

    Addresses; 0 for what there is not.
    """

    values: Tuple[int, ...]
    main_grad: int


def places(params: Sequence[Tensor], modules: Sequence[Any]) -> List[Place]:
    """The places of ``params``, which ``modules`` of ours (and others) use."""
    fused = {
        id(piece)
        for module in modules
        if getattr(module, "fuse_wgrad_accumulation", False)
        for pieces in module.weight_parameters()
        for piece in pieces
    }
    return [Place(_values(p), _main_grad(p) if id(p) in fused else 0) for p in params]


def _values(param: Tensor) -> Tuple[int, ...]:
    if not isinstance(param, QuantizedTensor):
        return (param.data_ptr(),)
    return tuple(0 if part is None else part.data_ptr() for part in param.operand_buffers())


def _main_grad(param: Tensor) -> int:
    target = getattr(param, "main_grad", None)
    return target.data_ptr() if isinstance(target, Tensor) else 0


def check_places(unit) -> None:
    """Raise RuntimeError if a parameter is not where it was captured."""
    for param, then in zip(unit.params, unit.places):
        moved = any(old not in (0, new) for old, new in zip(then.values, _values(param)))
        if moved or then.main_grad not in (0, _main_grad(param)):
            names = {id(p): name for name, p in unit.module.named_parameters()}
            what = "" if moved else "main_grad of "
            raise RuntimeError(
                f"The {what}parameter {names.get(id(param), '')!r} of the graphed"
                f" {type(unit.module).__name__} is not in the memory where its CUDA graph was"
                " captured: it was moved, cast or replaced. Call make_graphed_callables again, or"
                " change the values in place."
            )
