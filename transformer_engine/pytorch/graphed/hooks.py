# SPDX-License-Identifier: Apache-2.0
"""Hooks of the user that run when a callable is warmed up and captured, never at a replay."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional

_KINDS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


class CaptureHooks(NamedTuple):
    """``{id: hook(module)}`` of each kind."""

    forward_pre_hooks: Optional[Dict[Any, Callable]] = None
    forward_hooks: Optional[Dict[Any, Callable]] = None
    backward_pre_hooks: Optional[Dict[Any, Callable]] = None
    backward_hooks: Optional[Dict[Any, Callable]] = None

    def around_forward(self, module, run: Callable):
        """``run()`` between the forward hooks."""
        _call(self.forward_pre_hooks, module)
        result = run()
        _call(self.forward_hooks, module)
        return result

    def around_backward(self, module, run: Callable):
        """``run()`` between the backward hooks."""
        _call(self.backward_pre_hooks, module)
        result = run()
        _call(self.backward_hooks, module)
        return result


def _call(hooks: Optional[Dict[Any, Callable]], module) -> None:
    for hook in (hooks or {}).values():
        hook(module)


def capture_hooks(given: Optional[dict]) -> CaptureHooks:
    """The hooks of one callable; ValueError for a kind that there is not."""
    unknown = [kind for kind in given or {} if kind not in _KINDS]
    if unknown:
        raise ValueError(
            f"capture_time_hooks has the kind {unknown[0]!r}; there are {', '.join(_KINDS)}."
        )
    return CaptureHooks(**(given or {}))
