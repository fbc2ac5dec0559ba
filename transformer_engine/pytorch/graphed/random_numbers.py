# SPDX-License-Identifier: Apache-2.0
"""No random numbers in what a graph recomputes.

The forward graph and the backward graph advance the generator by themselves, so that numbers drawn
in the first could not be drawn again in the second.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DrawsNothing(TorchDispatchMode):
    """Raises RuntimeError where random numbers are drawn."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _dropout(func, args, kwargs) != 0.0:
            raise RuntimeError(
                f"{func} draws random numbers in te.checkpoint inside of a callable of"
                " make_graphed_callables: its backward graph could not draw the same ones again."
                " Keep dropout and the like outside of te.checkpoint, or switch it off."
            )
        return func(*args, **kwargs)


def _dropout(func, args: tuple, kwargs: dict) -> float:
    """The probability of dropout in attention, which draws nothing with 0; 1 for other ops."""
    for argument, value in zip(func._schema.arguments, args):
        if argument.name == "dropout_p":
            return value
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return kwargs.get("dropout_p", defaults.get("dropout_p", 1.0))
