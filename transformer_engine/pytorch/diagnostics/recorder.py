# SPDX-License-Identifier: Apache-2.0
"""Writes down what a module really does, while it does it.

For the time of one call, three things are exchanged for ones that also take notes: the lookup of a
backend (``core.ops.select``), the two functions of each module op (``dynamo.custom_op.OPS``) and
autograd's saving of tensors (``saved_tensors_hooks``); modules get forward hooks. All of them pass
everything through. There is no second description of a module that could differ from it.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Iterator, Optional

import torch
from torch import Tensor

from ..backends.registry import Choice, Request
from ..core import ops
from ..core.python_quantizers import is_python
from ..dynamo.custom_op import OPS
from ..formats.activations import activation_width
from ..formats.layout import padded_rows
from ..formats.spec import decode_quant
from ..quantized_tensor import QuantizedTensor
from .kept import Held, Kept, OpCall, Place
from .modules import OURS, module_row
from .rows import LeafRow, ModuleRow, OperandRow
from .words import PRODUCED, leaf_purpose, operand_name, produced_operand, quant_words


class Frame:
    """A module op that is running: where, in which direction, and the names of its tensors."""

    def __init__(self, place: Place, backward: bool, named) -> None:
        self.place, self.backward = place, backward
        self.named = [(name, t) for name, t in named if t is not None]
        self.labels = {id(tensor): name for name, tensor in self.named}

    def label(self, tensor: Tensor) -> Optional[str]:
        """The name that ``tensor`` has in this op."""
        return self.labels.get(id(tensor))

    def name(self, tensor: Tensor, name: Optional[str]) -> None:
        """Give ``tensor`` a name; it is kept, because the name goes by identity."""
        if name is not None:
            self.named.append((name, tensor))
            self.labels[id(tensor)] = name


class _Thread(threading.local):
    """Where a thread is: CUDA backward passes run in threads of their own."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.frame: Optional[Frame] = None
        self.unpacked: Optional[OpCall] = None
        self.last = Place()  # of the last backward


class Recorder:
    """The notes: rows in the order of execution, and `Kept`."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.modules: list[ModuleRow] = []
        self.leaves: list[LeafRow] = []
        self.operands: list[OperandRow] = []
        self.kept = Kept()
        self.backward_runs = False
        self._names = {id(module): _clean(name) for name, module in root.named_modules()}
        self._calls: dict[str, int] = {}
        self._open: list[OpCall] = []
        self._thread = _Thread()
        self._select = ops.select

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take notes of what happens in this context."""
        registered = dict(OPS)
        with ExitStack() as stack:
            for module in self.root.modules():
                for handle in self._hooks(module):
                    stack.callback(handle.remove)
            stack.callback(setattr, ops, "select", self._select)
            stack.callback(OPS.update, registered)
            ops.select = self._watched_select
            for name, op in registered.items():
                OPS[name] = replace(
                    op,
                    forward=partial(self._forward, name, op),
                    backward=partial(self._backward, op),
                )
            yield

    def saving(self):
        """Context in which autograd's saving is watched."""
        return torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: self.kept.take(tensor, self._place()), self._unpack
        )

    def not_called(self) -> list[ModuleRow]:
        """Rows for the modules of this package that no call reached."""
        called = {row.module for row in self.modules}
        return [
            ModuleRow(name, type(module).__name__, 0)
            for module in self.root.modules()
            if isinstance(module, OURS) and (name := self._names[id(module)]) not in called
        ]

    # --- modules ---------------------------------------------------------------------------------

    def _hooks(self, module: torch.nn.Module) -> list:
        return [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module, args, kwargs) -> None:
        name = self._names[id(module)]
        if not isinstance(module, OURS):
            self._thread.places.append(Place(name))
            return
        call = self._calls[name] = self._calls.get(name, 0) + 1
        primary = [
            isinstance(getattr(module, weight), QuantizedTensor)
            for weight in getattr(module, "weight_names", ())
        ]
        gemms = getattr(module, "num_gemms", 1)
        self._thread.places.append(Place(name, call, gemms, tuple(primary)))
        self.modules.append(module_row(module, name, call, self.backward_runs, args, kwargs))

    def _leave(self, *_) -> None:
        if self._thread.places:  # not if a hook before ours has failed
            self._thread.places.pop()

    def _place(self) -> Place:
        here = self._thread
        if here.frame is not None:
            return here.frame.place
        if here.places:
            return here.places[-1]
        return here.last if self.backward_runs else Place()

    # --- module ops ------------------------------------------------------------------------------

    @contextmanager
    def _framed(self, frame: Frame) -> Iterator[None]:
        here = self._thread
        outer, here.frame = here.frame, frame
        try:
            yield
        finally:
            here.frame = outer

    def _forward(self, name: str, op, k, cfg, *tensors):
        frame = Frame(self._place(), False, zip(op.inputs, tensors))
        with self._framed(frame):
            results = op.forward(k, cfg, *tensors)
        self._ready_weights(frame, cfg)
        if cfg.need:
            call = OpCall(frame.place, name, cfg)
            self._open.append(call)
            self.kept.plan(call, op, tensors, results)
        return results

    def _backward(self, op, k, cfg, *tensors):
        place = self._thread.last = self._closed(op, cfg)
        names = [argument.name for argument in op.backward_op._schema.arguments]
        if hasattr(k, "put_off"):
            k = SimpleNamespace(**{**vars(k), "put_off": partial(self._put_off, place, k.put_off)})
        with self._framed(Frame(place, True, zip(names, tensors))):
            return op.backward(k, cfg, *tensors)

    def _unpack(self, held: Held) -> Tensor:
        if held.call is not None:
            self._thread.unpacked = held.call
        return held.tensor

    def _closed(self, op, cfg) -> Place:
        """The place of the forward call that a backward belongs to.

        It is the one whose tensors were unpacked just now. One that saved nothing is the last of
        its like, since autograd goes backwards.
        """
        call, self._thread.unpacked = self._thread.unpacked, None
        if call is None:
            like = [c for c in self._open if OPS[c.op].backward_op is op.backward_op]
            call = next((c for c in reversed(like) if c.cfg is cfg), None)
        if call in self._open:
            self._open.remove(call)
        return self._place() if call is None else call.place

    def _put_off(self, place: Place, put_off, gemm: int, *operands):
        purpose = operand_name(place.gemms, gemm, "wgrad") + ", left to backward_dw()"
        self.leaves.append(
            LeafRow(*place[:2], "backward", "gemm", purpose, "put off", (), (), operands[-1])
        )
        return put_off(gemm, *operands)

    # --- leaf ops --------------------------------------------------------------------------------

    def _watched_select(self, request: Request) -> Choice:
        choice = self._select(request)
        return choice._replace(run=partial(self._leaf, request, choice))

    def _leaf(self, request: Request, choice: Choice, *args):
        results = choice.run(*args)
        frame = self._thread.frame
        place = self._place() if frame is None else frame.place
        backward = (
            self.backward_runs and not self._thread.places if frame is None else frame.backward
        )
        frame = frame or Frame(place, backward, ())
        names, returns = _schema_names(request.leaf)
        values = dict(zip(names, args))
        purpose = leaf_purpose(request.leaf, values, place.gemms, frame.label)
        quants = (request.quant, request.b_quant) if request.leaf == "gemm" else (request.quant,)
        direction = "backward" if backward else "forward"
        self.leaves.append(
            LeafRow(
                *(place.module, place.call, direction, request.leaf, purpose, choice.name),
                *(choice.passed_over, quants, request.dtype),
            )
        )
        if request.leaf == "dequantize":
            frame.name(results, frame.label(values["data"]))
        elif "row" in returns:
            self._produced(request, values, dict(zip(returns, results)), frame)
        return results

    def _produced(self, request: Request, values: dict, results: dict, frame: Frame) -> None:
        """Names for what a producing leaf op made, and rows for the orientations among it."""
        leaf, place = request.leaf, frame.place
        label, plain = PRODUCED.get(leaf) or (frame.label(values["x"]), "row")
        if results[plain] is not None:
            frame.name(results[plain], label)
        if results["row"] is None and results["col"] is None:
            return
        rows, columns = values["x"].shape
        if leaf == "activation_forward":
            columns = activation_width(values["act"], columns)
        operand = produced_operand(leaf, values, place.gemms, frame.label)
        for orientation, name in (("rowwise", "row"), ("columnwise", "col")):
            if results[name] is not None:
                frame.name(results[name], label)
                self._operand(frame, operand, orientation, request.quant, leaf, rows, columns)

    def _operand(
        self, frame: Frame, operand: str, orientation: str, quant: str, maker: str, rows, columns
    ) -> None:
        words, padding = quant_words(quant, orientation == "columnwise"), 0
        if orientation == "columnwise":
            padding = padded_rows(rows, decode_quant(quant).kind) - rows
        self.operands.append(
            OperandRow(
                *(frame.place.module, frame.place.call),
                "backward" if frame.backward else "forward",
                *(operand, orientation, quant, words, maker, rows, columns, padding),
            )
        )

    def _ready_weights(self, frame: Frame, cfg) -> None:
        """Rows for weights that this call did not quantize: cached ones, and quantized primary
        ones."""
        place, by_name = frame.place, dict(frame.named)
        made = {row.operand for row in self.operands if (row.module, row.call) == place[:2]}
        for gemm in range(place.gemms):
            operand = operand_name(place.gemms, gemm, "weight")
            prefix, key = ("w", "weight")
            if place.gemms > 1:
                prefix, key = f"w{gemm + 1}", f"fc{gemm + 1}_weight"
            if operand in made or key not in by_name:
                continue
            primary = gemm < len(place.primary) and place.primary[gemm]
            maker, shape = "parameter" if primary else "cache", by_name[key].shape
            for orientation, suffix in (("rowwise", "row"), ("columnwise", "col")):
                quant = getattr(cfg.gemms[gemm].w, suffix)
                if f"{prefix}_{suffix}" in by_name and quant and not is_python(quant):
                    self._operand(frame, operand, orientation, quant, maker, *shape)


@lru_cache(maxsize=None)
def _schema_names(leaf: str) -> tuple[tuple, tuple]:
    """Names of the arguments and results of a leaf op."""
    schema = getattr(torch.ops.transformer_engine, leaf).default._schema
    return tuple(a.name for a in schema.arguments), tuple(r.name for r in schema.returns)


def _clean(name: str) -> str:
    """A qualified name without what ``torch.compile`` puts into it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
