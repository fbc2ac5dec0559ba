# SPDX-License-Identifier: Apache-2.0
"""Whether a forward pass will be, or is being, run a second time in backward."""

from __future__ import annotations

from typing import Optional


class Phase:
    """One instance, `PHASE`, because traced code can read attributes of an instance.

    * `backward_follows`: gradients are off now, but the same forward pass will run again with
      gradients (the first pass of a reentrant checkpoint), so its side effects are those of
      training
    * `recomputing`: this is the second pass; only eager code looks
    * `uses`: while the first pass of ``te.checkpoint`` runs, ids of the states of delayed scaling
      that eager calls used
    """

    def __init__(self) -> None:
        self.backward_follows = False
        self.recomputing = False
        self.uses: Optional[set] = None


PHASE = Phase()
