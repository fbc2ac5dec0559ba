# SPDX-License-Identifier: Apache-2.0
"""Where a leaf op that is being recorded tells what it does; see ``core/plans.py``."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Optional

from torch import Tensor


class Allocation(NamedTuple):
    """Memory that a leaf took."""

    tensor: Tensor
    strides: tuple


class Zeros(NamedTuple):
    """Memory that a leaf set to zero."""

    tensor: Tensor


class Launch(NamedTuple):
    """A kernel that a leaf launched: what Triton's ``CompiledKernel.run`` takes."""

    compiled: Any
    grid: tuple
    values: list


class Opaque(NamedTuple):
    """Something that can only be done by calling the leaf."""


class _Thread(threading.local):
    """The list that this thread's leaf ops add to, or None."""

    steps: Optional[list] = None


THREAD = _Thread()


def note(step: tuple) -> None:
    """Add a step, if somebody records this thread."""
    if THREAD.steps is not None:
        THREAD.steps.append(step)
