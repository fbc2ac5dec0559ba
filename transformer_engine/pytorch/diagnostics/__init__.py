# SPDX-License-Identifier: Apache-2.0
"""Why a module computes as it does, and what it keeps: ``te.explain`` and ``te.memory_report``.

Both run the module once and write down what happens, see ``recorder.py``. Nothing is recorded, and
nothing costs anything, outside of these two functions; what they need is imported when they run.

The rows that they return are described in ``rows.py``, the whole of them in ``report.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .report import Explanation, MemoryReport

__all__ = ["explain", "memory_report"]


def explain(module: torch.nn.Module, *inputs, **kwargs) -> Explanation:
    """Run ``module(*inputs, **kwargs)`` once and say what each part of it did, and why.

    .. code-block:: python

        with te.autocast(recipe=MXFP8BlockScaling()):
            print(te.explain(model, x))

    The call runs under the contexts around it: ``te.autocast``, ``torch.autocast``, grad mode. If
    an output requires a gradient, its backward pass runs as well, with gradients of ones. Then
    everything is as before: no ``.grad`` is written, and random state, buffers, scales, amax
    histories, cached weights, ``main_grad`` and attributes are put back. Hooks of the user do run.

    Args:
        module: any ``torch.nn.Module`` that contains modules of this package, on any device. One
            that ``torch.compile`` wrapped is run in eager, which computes the same with the same
            kernels; so are compiled parts of it. ``DistributedDataParallel`` is taken off.
        inputs, kwargs: what ``module`` is called with.

    Returns:
        An `Explanation`. Printed it is a set of tables; its fields hold the rows: per call of a
        module the recipe and whether ``torch.compile`` takes it or falls back, and the reason; per
        leaf op the backend that ran and those passed over; per operand its quantization and
        orientation; per tensor what is kept for backward, why, and by which formula.

    Raises:
        TypeError: if ``module`` is no ``torch.nn.Module``, or if nothing is given to call it with.
        RuntimeError: inside of compiled code.

    Whatever the module raises passes through, with the state put back.
    """
    from .report import Explanation
    from .run import recorded

    return Explanation.of(recorded(module, inputs, kwargs))


def memory_report(module: torch.nn.Module, *inputs, **kwargs) -> MemoryReport:
    """Run ``module(*inputs, **kwargs)`` once and say what is kept in memory for its backward.

    Arguments, errors and what is left unchanged are those of `explain`.

    Returns:
        A `MemoryReport`. Printed it is a table; ``rows`` are its lines, one per saved tensor, with
        the bytes that the formula of ``docs/diagnostics.rst`` asks for. ``total`` adds up the
        tensors that the modules save and that exist for backward alone; ``autograd_total`` is what
        autograd's own hooks count for the same, by storage.
    """
    from .report import MemoryReport
    from .run import recorded

    return MemoryReport.of(recorded(module, inputs, kwargs))
