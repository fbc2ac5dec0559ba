# SPDX-License-Identifier: Apache-2.0
"""How recipes describe themselves to modules: one short string.

``x=...;w=...;g=...`` name the quantization of GEMM inputs, weights and output gradients, as
``pytorch.formats.spec.QuantSpec.encode`` writes it; ``acc=f,d,w`` says whether fprop, dgrad and
wgrad use the split accumulator; ``bwd=...`` is the backward override, if there is one.
"""

from __future__ import annotations

from typing import Optional


def quantization(kind: str, fmt: str, **options) -> str:
    """The quantization of one tensor; options that are False, None, "" or 0 are left out."""
    parts = [f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in options.items() if v]
    return ",".join([kind, fmt, *parts])


def module_spec(x: str, w: str, g: str, split: tuple, override: Optional[str] = None) -> str:
    """The whole string; `split` are three bools."""
    accumulators = ",".join(str(int(flag)) for flag in split)
    text = f"x={x};w={w};g={g};acc={accumulators}"
    return text if override is None else f"{text};bwd={override}"
