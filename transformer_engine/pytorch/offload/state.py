# SPDX-License-Identifier: Apache-2.0
"""Which offload context is active."""

from __future__ import annotations

from typing import Any


class Active:
    """``context``: the one that a layer runs in, or None; one instance, ``ACTIVE``."""

    def __init__(self) -> None:
        self.context: Any = None


ACTIVE = Active()
