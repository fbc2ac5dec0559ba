# SPDX-License-Identifier: Apache-2.0
"""Puts everything back that a call of a module changes."""

from __future__ import annotations

import copy
import random
from collections import deque
from contextlib import contextmanager
from typing import Callable, Iterator

import torch
from torch import Tensor

from ..core import delayed_scaling
from ..core.phase import PHASE
from ..core.wgrad import WeightGradStore
from ..fp8_global_state import FP8GlobalStateManager

Restore = Callable[[], None]


@contextmanager
def unchanged(root: torch.nn.Module) -> Iterator[None]:
    """Context that leaves ``root`` and the state of the package as they were, also on an error.

    That are random states, attributes of modules and parameters (cached weights, ``.grad``,
    ``main_grad``, columnwise data of quantized weights), buffers, and the scales and amax histories
    of all modules that have some. Values of parameters are not copied: no call changes them.
    """
    restores = [_random_state()]
    for module in root.modules():
        restores.append(_attributes(module))
        store = module.__dict__.get("wgrad_store")
        if isinstance(store, WeightGradStore):
            restores.append(_attributes(store))
    for param in root.parameters():
        restores += [_attributes(param), _gradient(param)]
        if isinstance(getattr(param, "main_grad", None), Tensor):
            restores.append(_values(param.main_grad))
    restores += [_values(buffer) for buffer in root.buffers()]
    for state in delayed_scaling.live_states():
        tensors = (state.fwd_scale, state.fwd_history, state.bwd_scale, state.bwd_history)
        restores += [_attributes(state), *map(_values, tensors)]
    restores += [
        _attributes(PHASE),
        _attributes(delayed_scaling.REGION),
        _attributes(FP8GlobalStateManager.quantization_state),
    ]
    try:
        yield
    finally:
        for restore in restores:
            restore()


def _random_state() -> Restore:
    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return restore


def _attributes(owner) -> Restore:
    """Restores the attributes of an object, and the members of containers among them.

    What did not change is not written: compiled code guards some of these dictionaries.
    """
    kept = [(owner.__dict__, dict(owner.__dict__))]
    kept += [
        (value, copy.copy(value))
        for value in owner.__dict__.values()
        if isinstance(value, (dict, list, set, deque))
    ]

    def restore() -> None:
        for container, members in kept:
            if not _same(container, members):
                container.clear()
                fill = (
                    container.extend if isinstance(container, (list, deque)) else container.update
                )
                fill(members)

    return restore


def _same(container, members) -> bool:
    if len(container) != len(members):
        return False
    if isinstance(container, dict):
        return all(a == b and container[a] is members[b] for a, b in zip(container, members))
    if isinstance(container, set):
        return container == members
    return all(a is b for a, b in zip(container, members))


def _gradient(param: Tensor) -> Restore:
    grad = param.grad

    def restore() -> None:
        if param.grad is not grad:
            param.grad = grad

    return restore


def _values(tensor: Tensor) -> Restore:
    with torch.no_grad():
        values = tensor.detach().clone()

    def restore() -> None:
        # Not written where equal, because a write counts as a change of what autograd has saved.
        if not tensor.is_meta and not torch.equal(_comparable(tensor), _comparable(values)):
            with torch.no_grad():
                tensor.copy_(values)

    return restore


def _comparable(tensor: Tensor) -> Tensor:
    """``tensor`` as something that torch can compare, which float8 is not everywhere."""
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.detach().view(torch.uint8) if narrow else tensor.detach()
