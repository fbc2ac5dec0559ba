# SPDX-License-Identifier: Apache-2.0
"""What happens to weight gradients beside being returned: added to ``main_grad``, or put off.

Fused accumulation (``fuse_wgrad_accumulation``): the gradient is computed in the dtype of the
parameter's ``main_grad`` and added to it, or written over it, by a small mutating op in the
backward formula. Delayed gradients (``delay_wgrad_compute``): backward keeps the operands of the
GEMM, and ``backward_dw`` multiplies them later.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from .linear import wgrad
from .ops import kernels


class FusedWeight(NamedTuple):
    """How the gradient of one GEMM weight is added to ``main_grad``; constants of a graph.

    ``position``: of the gradient among those that the module op returns; ``rows``: of the pieces
    that the weight ``[sum of rows, columns]`` consists of; ``accumulate``: per piece, add instead
    of write over; ``dummy``: "" returns no gradient to autograd, "empty" and "zeros" return such a
    tensor, of ``dtype``; ``owners``: weak references to the parameters, in eager, whose destination
    is looked up again in backward.
    """

    position: int
    rows: tuple
    columns: int
    accumulate: tuple
    dummy: str
    dtype: torch.dtype
    owners: tuple = ()


def main_grad_of(param: Tensor, owner: str) -> Tensor:
    """The tensor that the gradient of ``param`` is added to.

    Raises RuntimeError if there is none, or if it does not fit.
    """
    target = param.get_main_grad() if hasattr(param, "__fsdp_param__") else None
    target = getattr(param, "main_grad", None) if target is None else target
    if target is None:
        raise RuntimeError(
            f"fuse_wgrad_accumulation=True, but a weight of {owner} of shape {tuple(param.shape)}"
            " has no main_grad to accumulate into. Set weight.main_grad = torch.zeros_like(weight,"
            " dtype=torch.float32) before the forward pass, or leave the option off."
        )
    if tuple(target.shape) != tuple(param.shape):
        raise RuntimeError(
            f"The main_grad of a weight of {owner} has shape {tuple(target.shape)}, but the weight"
            f" has {tuple(param.shape)}. They must be the same."
        )
    return target


def plan_fused(
    module,
    weights: list,
    positions: tuple,
    dtype: torch.dtype,
    is_first_microbatch: Optional[bool],
) -> tuple[tuple, tuple]:
    """``(plan, main_grads)`` of a call: a ``FusedWeight`` per trained GEMM weight, destinations.

    ``weights``: for each GEMM the list of parameters that its weight consists of. ``dtype``: of the
    weights as the module op takes them.
    """
    plan, targets = [], []
    compiling = torch.compiler.is_compiling()
    label = f"{type(module).__name__} '{module.name}'"
    for pieces, position in zip(weights, positions):
        if not pieces[0].requires_grad:
            continue
        flagged = all(hasattr(piece, "grad_added_to_main_grad") for piece in pieces)
        zeros = any(getattr(piece, "zero_out_wgrad", False) for piece in pieces)
        accumulate = tuple(
            not is_first_microbatch and not getattr(piece, "overwrite_main_grad", False)
            for piece in pieces
        )
        rows = tuple(piece.shape[0] for piece in pieces)
        dummy = ("zeros" if zeros else "empty") if flagged else ""
        for piece in pieces:
            targets.append(main_grad_of(piece, label))
            if compiling and flagged:
                # What Python does in a compiled backward is not repeated at run time.
                piece.grad_added_to_main_grad = True
        owners = () if compiling else tuple(weakref.ref(piece) for piece in pieces)
        plan.append(
            FusedWeight(position, rows, pieces[0].shape[1], accumulate, dummy, dtype, owners)
        )
    for target in targets:
        if target.dtype != targets[0].dtype:
            raise RuntimeError(
                f"The main_grads of {label} are {targets[0].dtype} and {target.dtype}. Give all of"
                " them the same dtype."
            )
    return tuple(plan), tuple(targets)


def accumulate_fused(plan: tuple, main_grads: tuple, results: list) -> None:
    """Add the weight gradients among ``results`` to their destinations, and replace them there."""
    piece = 0
    for weight in plan:
        targets = main_grads[piece : piece + len(weight.rows)]
        piece += len(weight.rows)
        results[weight.position] = accumulate_one(weight, targets, results[weight.position])


def accumulate_one(weight: FusedWeight, main_grads: tuple, grad: Tensor) -> Optional[Tensor]:
    """Add one weight gradient to its destinations; returns what autograd gets instead."""
    if weight.owners:
        main_grads = [_present_main_grad(owner()) for owner in weight.owners]
    parts = [grad] if len(weight.rows) == 1 else list(torch.split(grad, weight.rows))
    for target, part, accumulate in zip(main_grads, parts, weight.accumulate):
        kernels().accumulate_(target, part, accumulate)
    return dummy_gradient(weight, grad.shape, grad.device)


def _present_main_grad(param: Optional[Tensor]) -> Tensor:
    """The destination that a parameter has in backward, which may be another one by then."""
    if param is None:
        raise AssertionError(
            "A weight was deleted before its backward pass with fuse_wgrad_accumulation. Keep the"
            " module alive until then."
        )
    if hasattr(param, "grad_added_to_main_grad"):
        param.grad_added_to_main_grad = True
    return main_grad_of(param, "a module")


def dummy_gradient(weight: FusedWeight, shape, device: torch.device) -> Optional[Tensor]:
    """What autograd gets in the place of an accumulated gradient."""
    if weight.dummy == "":
        return None
    if torch.compiler.is_compiling():
        return torch.zeros(shape, dtype=weight.dtype, device=device)
    return get_dummy_wgrad(shape, weight.dtype, weight.dummy == "zeros", device)


def run_put_off(held: list) -> list:
    """``(gemm, weight gradient)`` of each GEMM that backward put off, in its order."""
    with torch.no_grad():
        return [
            (gemm, wgrad(kernels(), cfg, gemm, dy, x, dtype)) for gemm, cfg, dy, x, dtype in held
        ]


def give_gradient(pieces: list, weight: Optional[FusedWeight], grad: Tensor) -> None:
    """Add a gradient that was put off to main_grad, or make it the ``.grad`` of its parameters."""
    if weight is not None:
        accumulate_one(weight, (), grad)
        return
    for piece, part in zip(pieces, torch.split(grad, [piece.shape[0] for piece in pieces])):
        piece.grad = part.to(piece.dtype)


_DUMMIES: dict = {}


def get_dummy_wgrad(shape, dtype: torch.dtype, zero: bool = False, device=None) -> Tensor:
    """A tensor to stand for a gradient that is elsewhere: one memory per shape, dtype and device.

    ``zero`` fills it with zeros. The device is the current CUDA device by default, or the CPU.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    key = (tuple(shape), dtype, device)
    if key not in _DUMMIES:
        _DUMMIES[key] = torch.empty(tuple(shape), dtype=dtype, device=device)
    if zero:
        _DUMMIES[key].zero_()
    return _DUMMIES[key].detach()


class _Fifo(deque):
    """``queue.Queue`` by name, without its locks, which can not be copied or pickled."""

    put = deque.append
    get = deque.popleft
    qsize = deque.__len__

    def empty(self) -> bool:
        """Whether nothing is waiting."""
        return not self


class WeightGradStore:
    """First in, first out: the weight-gradient GEMMs that ``backward_dw`` computes later.

    Args:
        delay_wgrad_compute: whether anything is put off at all.
        ub_bulk_wgrad: must be False together with it, because the overlapped communication of
            userbuffers happens in backward.
    """

    def __init__(self, delay_wgrad_compute: bool = False, ub_bulk_wgrad: bool = False) -> None:
        self.context = _Fifo()
        self.enabled = False
        self._bulk = ub_bulk_wgrad
        if delay_wgrad_compute:
            self.enable_delay_wgrad_compute()

    def delay_wgrad_compute(self) -> bool:
        """Whether weight gradients are put off."""
        return self.enabled

    def enable_delay_wgrad_compute(self) -> None:
        """Put weight gradients off from now on. AssertionError with userbuffers."""
        if self._bulk:
            raise AssertionError(
                "delay_wgrad_compute can not be combined with ub_bulk_wgrad; switch one off."
            )
        self.enabled = True

    def disable_delay_wgrad_compute(self) -> None:
        """Compute weight gradients in backward again."""
        self.enabled = False

    def put(self, tensors: list, function: Callable) -> None:
        """Keep ``function(*tensors)`` for later."""
        if not self.enabled:
            raise AssertionError("put() was called, but delay_wgrad_compute is off.")
        self.context.put([tensors, function])

    def pop(self) -> tuple:
        """``(function(*tensors), tensors)`` of the oldest entry. RuntimeError if there is none."""
        if self.context.qsize() == 0:
            raise RuntimeError(
                "No weight gradient is waiting: backward_dw() was called more often than backward."
            )
        tensors, function = self.context.get()
        return function(*tensors), tensors

    def assert_empty(self) -> None:
        """Raise AssertionError if entries are left."""
        if self.context.qsize() != 0:
            raise AssertionError(
                f"{self.context.qsize()} weight gradients are still waiting for backward_dw()."
            )
