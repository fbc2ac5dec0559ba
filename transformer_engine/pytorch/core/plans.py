# SPDX-License-Identifier: Apache-2.0
"""Plans: what an eager call did once, as straight Python code for the calls like it.

A function of leaf ops (``core/module_ops.py``) is pure: its steps depend on its configuration, and
on the shapes, dtypes and devices of its tensors, never on their values. On a GPU most of the time
of a small module goes into finding the same steps again. So the second call of a kind is recorded,
and from the third on a generated function allocates, launches kernels and calls the leaf ops that
are no kernels of ours (GEMMs), in the same order and with the same arguments. A leaf op that does
anything else is called as it is; a function that does something between its leaf ops, such as
`torch.stack`, has no plan and runs as before.

A plan frees what it made after its last use, as the function would at the latest when it returns.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from types import FunctionType, SimpleNamespace
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ..backends.recording import THREAD, Allocation, Launch, Zeros
from ..formats.layout import ScaleAndHistory
from . import ops
from .plan_keys import captured, plan_key as _key

_MOST = 512  # plans that are kept
_PLANS: OrderedDict = OrderedDict()
_SEEN, _REFUSED = object(), object()


def run_planned(function: Callable, static: Any, arguments: tuple, tensors: tuple) -> Any:
    """``function(EAGER, *arguments, *tensors)``, by its plan once there is one.

    ``static`` is hashable and tells ``arguments`` apart; the result is a tensor or a sequence of
    tensors and Nones.
    """
    key = _key(function, static, tensors)
    if key is None:
        return function(ops.EAGER, *arguments, *tensors)
    plan = _PLANS.get(key)
    if isinstance(plan, FunctionType):
        try:
            _PLANS.move_to_end(key)
        except KeyError:
            pass  # another thread has just dropped it
        return plan(*tensors)
    if plan is None:
        _PLANS[key] = _SEEN
        if len(_PLANS) > _MOST:
            _PLANS.popitem(last=False)
    elif plan is _SEEN and not captured(key[0]):
        apart = _apart(tensors)
        if apart is not None:
            results, _PLANS[key] = _recorded(function, arguments, apart)
            return results
    return function(ops.EAGER, *arguments, *tensors)


def _leaf_body(name: str, schema: str) -> Callable:
    """The body of a registered leaf op: no autograd, no ambient autocast, a plan once there is one.

    Two functions are written out for the schema: one takes arguments apart into tensors and the
    rest, which is hashable, the other one calls the leaf op with them. A list of tensors comes
    after all other tensors.
    """
    names, tensors, rest, call = [], [], [], []
    for argument in schema.split(" -> ", maxsplit=1)[0][1:-1].split(", "):
        names.append(argument.split()[1])
        if argument.startswith("Tensor[]"):
            call.append(f"[*tensors[{len(tensors)}:]]")
            tensors.append(f"*{names[-1]}")
        elif argument.startswith("Tensor"):
            call.append(f"tensors[{len(tensors)}]")
            tensors.append(names[-1])
        else:
            call.append(f"rest[{len(rest)}]")
            rest.append(f"tuple({names[-1]})" if "[]" in argument else names[-1])
    source = (
        f"def split({', '.join(names)}):\n return ({''.join(t + ', ' for t in tensors)}),"
        f" ({''.join(r + ', ' for r in rest)})\n"
        f"def {name}(k, rest, *tensors):\n return k.{name}({', '.join(call)})"
    )
    scope: dict = {}
    exec(compile(source, f"<{name}>", "exec"), scope)  # pylint: disable=exec-used
    split, function = scope["split"], scope[name]

    def body(*args):
        given, others = split(*args)
        return ops.below_autograd(run_planned, function, others, (others,), given)

    return body


for _name in ops.PLANNED:
    ops.LIBRARY.impl(_name, _leaf_body(_name, ops.SCHEMAS[_name]), "CompositeExplicitAutograd")


def _apart(tensors: tuple) -> Optional[tuple]:
    """``tensors``, of which no two share memory: a copy is in the place of one that does.

    A recording tells its inputs apart by identity and address, and its plan serves calls whose
    inputs share nothing. None where a copy would have another alignment than the call.
    """
    apart: list = []
    taken: list = []
    for tensor in tensors:
        if tensor is not None:
            start = tensor.data_ptr()
            end = start + max(1, tensor.nbytes)
            if any(start < other_end and other < end for other, other_end in taken):
                if start % 16:
                    return None
                tensor = tensor.detach().clone()
            else:
                taken.append((start, end))
        apart.append(tensor)
    return tuple(apart)


def _recorded(function: Callable, arguments: tuple, tensors: tuple) -> tuple:
    """The results of the call, and its plan or ``_REFUSED``."""
    recording = _Recording(tensors)
    leaves = {name: functools.partial(recording.leaf, name) for name in vars(ops.EAGER)}
    before, THREAD.opaque = THREAD.opaque, False
    try:
        results = function(SimpleNamespace(**leaves), *arguments, *tensors)
        recording.refused |= THREAD.opaque
    finally:
        THREAD.opaque = before
    return results, recording.plan(results)


class _Unknown(Exception):
    """A tensor of which the recording does not know where it came from."""


class _Recording:
    """The steps of one call as lines of code.

    Everything that the call made is kept until it is over, so that no two tensors share an
    identity or an address.
    """

    def __init__(self, tensors: tuple) -> None:
        self.names: dict = {}  # of tensors by identity
        self.kept: list = []
        self.lines: list[str] = []
        self.used: list[list[str]] = []  # names that a line reads
        self.constants: dict = {}
        self.refused = False
        self.inputs = []
        for tensor in tensors:
            name = f"i{len(self.inputs)}"
            self.inputs.append(name)
            if tensor is not None:
                self.names.setdefault(id(tensor), name)

    # --- while it runs ---------------------------------------------------------------------------

    def leaf(self, name: str, *args):
        """Run a leaf op and write down its steps, or its call."""
        before, THREAD.steps = THREAD.steps, []
        steps = THREAD.steps
        try:
            results = getattr(ops.EAGER, name)(*args)
        finally:
            THREAD.steps = before
        self.kept.append((args, results, steps))
        try:
            if not (steps and self._inlined(steps, args, results)):
                run = getattr(ops.EAGER, name)
                if name == "gemm":
                    a, b, *_, a_quant, b_quant, layout, out_dtype, _ = args
                    run = ops.gemm_backend(a, b, a_quant, b_quant, layout, out_dtype)
                self._call(run, args, results)
        except _Unknown:
            self.refused = True
        return results

    def _inlined(self, steps: list, args: tuple, results) -> bool:
        """Write the steps of a leaf op; False, and nothing written, if they are not all of it."""
        names, lines, used = dict(self.names), len(self.lines), len(self.used)
        known = []
        for arg in args:
            known += arg if isinstance(arg, ScaleAndHistory) else (arg,)
        known = [arg for arg in known if isinstance(arg, Tensor)]
        try:
            for step in steps:
                if isinstance(step, Allocation):
                    known.append(step.tensor)
                    shape, strides = tuple(step.tensor.shape), step.strides
                    allocate = self._constant(_allocate())
                    dtype = self._constant(step.tensor.dtype)
                    self._made(f"{{}} = {allocate}({shape}, {strides}, {dtype})", [], step.tensor)
                elif isinstance(step, Zeros):
                    name = self._name(step.tensor)
                    self._line(f"{name}.zero_()", [name])
                elif isinstance(step, Launch):
                    self._launch(step, known)
                else:
                    raise _Unknown
            for result in _sequence(results):
                if result is not None:
                    self._name(result)
        except _Unknown:
            self.names = names
            del self.lines[lines:], self.used[used:]
            return False
        return True

    def _launch(self, step: Launch, known: list) -> None:
        compiled = step.compiled
        run, function = self._constant(compiled.run), self._constant(compiled.function)
        metadata = self._constant(compiled.packed_metadata)
        arguments, used = [], []
        for value in step.values:
            if isinstance(value, Tensor):
                name, offset = self._address(value, known)
                used.append(name)
                arguments.append(f"{name}.data_ptr()" + (f" + {offset}" if offset else ""))
            else:
                arguments.append(self._constant(value))
        grid = ", ".join(map(str, step.grid))
        self._line(
            f"{run}({grid}, s, {function}, {metadata}, None, None, None, {', '.join(arguments)})",
            used,
        )

    def _address(self, tensor: Tensor, known: list) -> tuple[str, int]:
        """The tensor that holds the memory of ``tensor``, and where in it."""
        name = self.names.get(id(tensor))
        if name is not None:
            return name, 0
        start = tensor.data_ptr()
        for whole in known:
            offset = start - whole.data_ptr()
            if whole.is_contiguous() and 0 <= offset < max(1, whole.nbytes):
                return self._name(whole), offset
        raise _Unknown

    def _call(self, run: Callable, args: tuple, results) -> None:
        used: list[str] = []
        text = ", ".join(self._argument(arg, used) for arg in args)
        call = f"{self._constant(run)}({text})"
        if isinstance(results, Tensor):
            self._made(f"{{}} = {call}", used, results)
        elif results is None:
            self._line(call, used)
        else:
            self._made(f"{', '.join(['{}'] * len(results))}, = {call}", used, *results)

    def _argument(self, value, used: list) -> str:
        if isinstance(value, Tensor):
            used.append(self._name(value))
            return used[-1]
        if isinstance(value, ScaleAndHistory):
            given = [self._argument(item, used) for item in value]
            return f"{self._constant(ScaleAndHistory)}({', '.join(given)})"
        if isinstance(value, (list, tuple)):
            items = "".join(f"{self._argument(item, used)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        return self._constant(value)

    def _name(self, tensor: Tensor) -> str:
        name = self.names.get(id(tensor))
        if name is None:
            raise _Unknown
        return name

    def _constant(self, value) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        name = f"c{len(self.constants)}"
        for known, other in self.constants.items():
            if other is value:
                return known
        self.constants[name] = value
        return name

    def _line(self, text: str, used: list) -> None:
        self.lines.append(text)
        self.used.append(list(used))

    def _made(self, text: str, used: list, *tensors) -> None:
        """A line whose braces get the names of new tensors."""
        made = []
        for tensor in tensors:
            if tensor is None:
                made.append("_")
                continue
            if id(tensor) in self.names:
                raise _Unknown  # an op that hands on its argument: nobody says who owns it
            made.append(f"t{len(self.lines)}_{len(made)}")
            self.names[id(tensor)] = made[-1]
        self._line(text.format(*made), [*used, *(name for name in made if name != "_")])

    # --- afterwards ------------------------------------------------------------------------------

    def plan(self, results):
        """The function that does it again; ``_REFUSED`` if that cannot be said."""
        if self.refused:
            return _REFUSED
        try:
            names = [None if t is None else self._name(t) for t in _sequence(results)]
        except _Unknown:
            return _REFUSED
        body = []
        if any("(s, " in line or ", s, " in line for line in self.lines):
            body.append("s = current_stream(current_device())")
        returned, seen = set(names), set()
        freed = []
        for line, used in zip(reversed(self.lines), reversed(self.used)):
            last = sorted({n for n in used if n[0] == "t"} - returned - seen)
            seen.update(last)
            freed.append((line, last))
        for line, last in reversed(freed):
            body.append(line)
            if last:
                body.append(f"del {', '.join(last)}")
        if results is None or isinstance(results, Tensor):
            body.append(f"return {names[0]}")
        else:
            body.append(f"return ({''.join(f'{name}, ' for name in names)})")
        source = f"def plan({', '.join(self.inputs)}):\n " + "\n ".join(body)
        scope = {
            **self.constants,
            "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
            "current_device": getattr(torch._C, "_cuda_getDevice", None),
        }
        exec(compile(source, "<plan>", "exec"), scope)  # pylint: disable=exec-used
        return scope["plan"]


def _allocate() -> Callable:
    from torch._C._dynamo import guards  # pylint: disable=import-outside-toplevel

    return guards._empty_strided_cuda


def _sequence(results) -> tuple:
    if results is None or isinstance(results, Tensor):
        return (results,)
    return tuple(results)
