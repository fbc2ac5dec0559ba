# SPDX-License-Identifier: Apache-2.0
"""A stand-in for CUDA graphs, so that everything but the capture itself is tested without CUDA."""

from contextlib import contextmanager, nullcontext

import torch


class Rerun:
    """Captures by running, replays by running again; results land in the memory of the first ones.

    What replays must not depend on shows as it does with a graph: a replay reads and writes static
    tensors only.
    """

    def new_pool(self):
        """Nothing to share."""
        return object()

    def warming_up(self):
        """No stream."""
        return nullcontext()

    def capture(self, run, pool):
        """``(what can be replayed, results)``."""
        assert pool is not None
        again = _Again(run)
        return again, again.results

    def replay(self, graph, stream=None, event=None):
        """Run again."""
        del stream, event
        graph.replay()

    @contextmanager
    def same_random_numbers(self):
        """Give the generator back as it was."""
        before = torch.get_rng_state()
        yield
        torch.set_rng_state(before)


class _Again:
    """A function and the tensors that it returned first."""

    def __init__(self, run):
        self.run, self.grad_enabled = run, torch.is_grad_enabled()
        self.results = run()

    def replay(self):
        """Compute the results anew, in place."""
        with torch.set_grad_enabled(self.grad_enabled):
            fresh = self.run()
        for static, value in zip(self.results, fresh):
            if static is not None and static is not value:
                static.data.copy_(value)

    def reset(self):
        """Forget what was captured."""
        self.run = None
