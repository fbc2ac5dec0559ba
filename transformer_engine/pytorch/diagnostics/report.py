# SPDX-License-Identifier: Apache-2.0
"""What `te.explain` and `te.memory_report` return, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Optional, Sequence

from ..doctor import table
from .rows import LeafRow, ModuleRow, OperandRow, SavedRow
from .run import Recorded

ROOT = "(root)"
_NOTHING = "Nothing is kept for backward."
_LETTERS = (
    "Formulas: M rows of the input, K its columns, N output features (LayerNormMLP: G of FC1, F"
    " columns of FC2's weight), e bytes per value; up(a, b) rounds a up to a multiple of b."
)


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """What a module keeps for its backward.

    Attributes:
        rows: one `SavedRow` per tensor that autograd holds after the forward pass.
        total: bytes of the rows of kind "kept", by the shapes that the modules selected.
        autograd_total: bytes of the storages that autograd holds and nobody else, counted by
            ``torch.autograd.graph.saved_tensors_hooks``; equal to ``total``.
        required: bytes that the formulas ask for, for those rows of ``total`` that have one.
        after_backward: bytes that autograd still held after the backward pass; None if none ran.
    """

    rows: tuple[SavedRow, ...]
    total: int
    autograd_total: int
    required: int
    after_backward: Optional[int]

    @classmethod
    def of(cls, run: Recorded) -> "MemoryReport":
        """The report of a recorded call."""
        kept = [row for row in run.saved if row.kind == "kept"]
        return cls(
            tuple(run.saved),
            sum(row.storage_bytes if row.op == "torch" else row.bytes for row in kept),
            run.autograd_total,
            sum(row.required for row in kept),
            run.after_backward,
        )

    def bytes_of(self, kind: str) -> int:
        """Bytes of the tensors of one kind."""
        return sum(row.bytes for row in self.rows if row.kind == kind)

    def by_module(self) -> dict[str, int]:
        """Bytes that exist for the backward of each module alone."""
        sums: dict[str, int] = {}
        for row in self.rows:
            size = row.storage_bytes if row.op == "torch" else row.bytes
            sums[row.module] = sums.get(row.module, 0) + size * (row.kind == "kept")
        return sums

    def __str__(self) -> str:
        if not self.rows:
            return _NOTHING
        head = ("module", "tensor", "shape", "bytes", "formula", "whose", "why")
        lines = [saved_table(head, self.rows)]
        if len(self.by_module()) > 1:
            sums = [(_title(name), f"{size:,}") for name, size in self.by_module().items()]
            lines.append(table(("module", "bytes kept"), sums))
        lines.append(_LETTERS)
        lines.append(
            f"kept for backward: {self.total:,} bytes; autograd's own count:"
            f" {self.autograd_total:,}; by the formulas: {self.required:,}"
        )
        others = {k: self.bytes_of(k) for k in ("parameter", "buffer", "input", "cache")}
        texts = [f"{kind} {size:,}" for kind, size in others.items() if size]
        if texts:
            lines.append("held by autograd, but there anyway: " + ", ".join(texts) + " bytes")
        if self.after_backward is not None:
            lines.append(f"held after backward: {self.after_backward:,} bytes")
        return "\n\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Explanation:
    """What each part of a module did, and why; ``str()`` of it is a set of tables.

    Attributes:
        modules: a `ModuleRow` per call of a module of this package, in the order of execution,
            then one per module that was not called.
        leaves: a `LeafRow` per leaf op that ran, in the order of execution.
        operands: an `OperandRow` per quantized operand and orientation.
        memory: the `MemoryReport`; ``saved`` are its rows.
        no_backward: why no backward pass ran, "" if one did.
    """

    modules: tuple[ModuleRow, ...]
    leaves: tuple[LeafRow, ...]
    operands: tuple[OperandRow, ...]
    memory: MemoryReport
    no_backward: str

    @classmethod
    def of(cls, run: Recorded) -> "Explanation":
        """The explanation of a recorded call."""
        notes = run.recorder
        return cls(
            (*notes.modules, *notes.not_called()),
            tuple(notes.leaves),
            tuple(notes.operands),
            MemoryReport.of(run),
            run.no_backward,
        )

    @property
    def saved(self) -> tuple[SavedRow, ...]:
        """A `SavedRow` per tensor that autograd held after the forward pass."""
        return self.memory.rows

    def __str__(self) -> str:
        reasons = _Reasons()
        parts = [_module_table(self.modules)]
        for module, call in _places((*self.modules, *self.leaves)):
            chosen = [
                [row for row in rows if (row.module, row.call) == (module, call)]
                for rows in (self.leaves, self.operands, self.saved)
            ]
            kind = next((row.kind for row in self.modules if row.module == module), "")
            parts += _section(_title(module, call), kind, reasons, *chosen)
        parts += reasons.lines()
        if self.no_backward:
            parts.append(f"Forward only: {self.no_backward}.")
        memory = self.memory
        if memory.rows:
            parts += [_LETTERS, f"Kept for backward in all: {memory.total:,} bytes."]
        return "\n\n".join(parts)

    __repr__ = __str__


# --- tables --------------------------------------------------------------------------------------


class _Reasons:
    """Numbers the reasons why backends were passed over, to print each of them once."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[str, str], int] = {}

    def text(self, passed_over: Iterable[tuple[str, str]]) -> str:
        """Names of backends, each with the number of its reason."""
        numbers = [(name, self._number(name, why)) for name, why in passed_over]
        return ", ".join(f"{name} [{number}]" for name, number in numbers) or "-"

    def _number(self, name: str, why: str) -> int:
        return self.numbers.setdefault((name, why), len(self.numbers) + 1)

    def lines(self) -> list[str]:
        """The numbered reasons, as one paragraph."""
        lines = [f"[{number}] {name}: {why}" for (name, why), number in self.numbers.items()]
        return ["Passed over because\n" + "\n".join(lines)] if lines else []


def _title(module: str, call: int = 1) -> str:
    return (module or ROOT) + (f" (call {call})" if call > 1 else "")


def _places(rows: Sequence) -> list[tuple[str, int]]:
    """Modules and calls in the order of their first row; modules that were not called left out."""
    called = [(r.module, r.call) for r in rows if not (isinstance(r, ModuleRow) and r.call == 0)]
    return list(dict.fromkeys(called))


def _module_table(rows: Sequence[ModuleRow]) -> str:
    lines = []
    for row in rows:
        if row.call == 0:
            lines.append((_title(row.module), row.kind, "-", "-", "not called"))
            continue
        compiles = "yes" if row.compiles else f"falls back to eager: {row.reason}"
        name = _title(row.module, row.call) + (", recomputed" if row.recomputed else "")
        shape = f"{list(row.input_shape)} {row.input_dtype}"
        lines.append((name, row.kind, shape, row.precision, compiles))
    if not lines:
        return "The module contains no module of transformer_engine.pytorch."
    return table(("module", "class", "input", "recipe", "torch.compile"), lines)


def _section(
    title: str,
    kind: str,
    reasons: _Reasons,
    leaves: Sequence[LeafRow],
    operands: Sequence[OperandRow],
    saved: Sequence[SavedRow],
) -> list[str]:
    parts = []
    if leaves:
        head = ("pass", "leaf op", "for", "backend", "passed over")
        lines = [
            (r.direction, r.leaf, r.purpose, r.backend, reasons.text(r.passed_over)) for r in leaves
        ]
        parts.append(f"{title}, {kind}\n" + table(head, lines) if kind else table(head, lines))
    if operands:
        head = ("operand", "orientation", "made by", "shape", "quantization")
        parts.append(table(head, [_operand_line(row) for row in operands]))
    if saved:
        parts.append(saved_table(("kept", "shape", "bytes", "formula", "whose", "why"), saved))
    return parts


def _operand_line(row: OperandRow) -> tuple:
    shape = f"{row.rows} x {row.columns}"
    if row.padding:
        shape += f", {row.rows} rows padded to {row.rows + row.padding}"
    return row.operand, row.orientation, row.made_by, shape, row.meaning


def saved_table(head: Sequence[str], rows: Iterable[SavedRow]) -> str:
    """Rows of saved tensors; with a column for the module if ``head`` has one."""
    lines = []
    for row in rows:
        shape = f"{list(row.shape)} {str(row.dtype).removeprefix('torch.')}"
        name = row.name or "(of PyTorch)"
        line = (name, shape, f"{row.bytes:,}", row.formula or "-", row.kind, row.why)
        lines.append((_title(row.module, row.call), *line) if head[0] == "module" else line)
    return table(head, lines)
