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
    """What this thread records: ``steps``, the list that its leaf ops add to, or None; ``opaque``,
    whether the function that calls them did something that must be done anew each time.
    """

    steps: Optional[list] = None
    opaque = False


THREAD = _Thread()


def note(step: tuple) -> None:
    """Add a step, if somebody records this thread."""
    if THREAD.steps is not None:
        THREAD.steps.append(step)


def refuse() -> None:
    """Say that a function does something between its leaf ops that no recording can repeat."""
    THREAD.opaque = True
