# SPDX-License-Identifier: Apache-2.0
"""The rows of a report. ``module`` is the qualified name in the module that was explained, "" for
that module itself; ``call`` counts the calls of a module from 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModuleRow:
    """One call of a module of this package; ``call`` is 0 for a module that was not called.

    ``recipe``: class name of the active recipe, "" if none is; ``precision``: that in words.
    ``compiles``: whether ``torch.compile`` takes the call into its graph; else ``reason`` says why
    it falls back to eager, word for word as the warning does. ``recomputed``: the call happened
    during the backward pass, as under ``torch.utils.checkpoint``.
    """

    module: str
    kind: str
    call: int
    recipe: str = ""
    precision: str = ""
    compiles: bool = True
    reason: str = ""
    input_shape: tuple = ()
    input_dtype: str = ""
    recomputed: bool = False


@dataclass(frozen=True)
class LeafRow:
    """One leaf op that ran: ``purpose`` is what for, ``backend`` what ran it.

    ``passed_over``: pairs of another backend's name and the reason why it was not taken.
    ``quants``: the encoded quantizations of its result, or of the two operands of a GEMM; "" for
    none.
    """

    module: str
    call: int
    direction: str  # "forward" or "backward"
    leaf: str
    purpose: str
    backend: str
    passed_over: tuple
    quants: tuple
    dtype: torch.dtype


@dataclass(frozen=True)
class OperandRow:
    """One orientation of a quantized GEMM operand ``[rows, columns]``.

    ``operand``: "input", "weight" or "grad_output", with "fc1." or "fc2." before it in
    ``LayerNormMLP``; ``orientation``: "rowwise" or "columnwise"; ``quant``: the encoded QuantSpec,
    and ``meaning`` the same in words; ``made_by``: the leaf op, or "cache" or "parameter" for
    weights that were quantized before. ``padding``: rows of zeros that a columnwise buffer has more
    than ``rows``.
    """

    module: str
    call: int
    direction: str
    operand: str
    orientation: str
    quant: str
    meaning: str
    made_by: str
    rows: int
    columns: int
    padding: int


@dataclass(frozen=True)
class SavedRow:
    """One tensor that autograd holds for a backward pass.

    ``kind`` says whose memory it is: "kept" for what exists for backward alone; "parameter",
    "buffer", "input" or "cache" (a cached quantized weight) for what is there anyway; "shared" for
    memory that an earlier row counts. ``op``: the module op, or "torch" for one of PyTorch's.
    ``bytes``: of the tensor; ``storage_bytes``: of the memory it lies in. ``why``: what reads it;
    ``formula`` and ``required``: the bytes that must be kept for that, see docs/diagnostics.rst.
    """

    module: str
    call: int
    op: str
    name: str
    kind: str
    shape: tuple
    dtype: torch.dtype
    bytes: int
    storage_bytes: int
    why: str = ""
    formula: str = ""
    required: int = 0
