# SPDX-License-Identifier: Apache-2.0
"""Keeps the random draws of a compiled graph apart, and in the order of eager execution.

Two things would otherwise change what is drawn. AOTAutograd merges equal calls: it knows the random
ops of torch by name, not by their tag, so two draws for the same tensor, as in the backward pass of
``a(x) + b(x)``, would become one, and both layers would round with the same noise. And Inductor
reorders what does not depend on each other. While a graph is traced, each draw therefore gets a
number of its own and the previous draw as arguments.
"""

from __future__ import annotations

import weakref

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ..core.ops import LIBRARY

# Per graph that is being traced: how many draws it has, and the last one of each pass. A draw of a
# backward pass does not take one of the forward pass, which would have to be kept for it.
_DRAWS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _functional(mode, func, types, args, kwargs):
    """Functionalization of a draw.

    Replaces a ``previous`` and ``number`` that are there already: they were right in the graph that
    the call comes from.
    """
    del kwargs
    # Counted per graph, so that each process that traces it finds the same compiled code in caches.
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxies is None:  # a first run, for metadata only
        return mode.__torch_dispatch__(func, types, args[:1])
    draws = _DRAWS.setdefault(proxies.tracer.graph, {"count": 0})
    backward_pass = torch._C._current_graph_task_id()  # -1 in a forward pass
    drawn = mode.__torch_dispatch__(
        func, types, (args[0], draws.get(backward_pass), draws["count"])
    )
    draws["count"] += 1
    draws[backward_pass] = drawn
    return drawn


torch.library.register_torch_dispatch(
    "transformer_engine::rng_state", FunctionalTensorMode, _functional, lib=LIBRARY
)
