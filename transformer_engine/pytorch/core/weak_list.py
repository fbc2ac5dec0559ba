# SPDX-License-Identifier: Apache-2.0
"""A list that does not keep its members alive."""

from __future__ import annotations

import weakref
from typing import Any, List


class WeakList:
    """Objects in the order they came in, which all ranks share, without keeping them alive."""

    def __init__(self) -> None:
        self._references: List[weakref.ref] = []

    def add(self, obj: Any) -> None:
        """Append `obj`."""
        self._references.append(weakref.ref(obj))

    def live(self) -> List[Any]:
        """The objects that still exist."""
        found = [reference() for reference in self._references]
        if any(obj is None for obj in found):
            self._references = [r for r, obj in zip(self._references, found) if obj is not None]
            found = [obj for obj in found if obj is not None]
        return found
