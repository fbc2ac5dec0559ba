# SPDX-License-Identifier: Apache-2.0
"""Capturing with CUDA: the only part of ``make_graphed_callables`` that touches a device."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional

import torch
from torch import Tensor

from ..rng_states import get_all_rng_states


class CudaGraphs:
    """Captures functions as CUDA graphs and replays them."""

    def new_pool(self) -> Any:
        """A memory pool that graphs may share."""
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """A stream apart, as capturing will use one; all work is done afterwards."""
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def capture(self, run: Callable[[], List[Optional[Tensor]]], pool: Any) -> tuple:
        """``(graph, results)`` of ``run()``; replaying the graph writes into the results."""
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        with torch.cuda.graph(graph, pool=pool):
            results = run()
        return graph, results

    def replay(self, graph: Any, stream: Any = None, event: Any = None) -> None:
        """Replay on ``stream``, for whose end (or for ``event`` in it) the current stream waits."""
        if stream is None:
            graph.replay()
            return
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.replay()
        if event is None:
            current.wait_stream(stream)
        else:
            current.wait_event(event)

    @contextmanager
    def same_random_numbers(self) -> Iterator[None]:
        """Give the random number streams back as they were."""
        named = {name: state.get_state() for name, state in get_all_rng_states().items()}
        default, host = torch.cuda.get_rng_state(), torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(host)
            torch.cuda.set_rng_state(default)
            for name, state in get_all_rng_states().items():
                if name in named:
                    state.set_state(named[name])
