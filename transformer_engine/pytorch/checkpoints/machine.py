# SPDX-License-Identifier: Apache-2.0
"""A pickle reader that executes nothing: it interprets the instructions itself.

Why not ``pickle.Unpickler`` with a ``find_class`` of our own: there the payload still drives
Python's object protocol. REDUCE calls whatever lies on the stack, BUILD calls ``__setstate__`` or
sets attributes of whatever it is given (the builders that ``find_class`` handed out included),
NEWOBJ calls ``__new__``, EXT looks into ``copyreg``, and a memo index of a few bytes makes the C
version allocate gigabytes. Each would have to be fenced in. Here nothing of that exists: a global
is only ever looked up in a closed table of (module, name) pairs, what the table gives is a function
of this package over checked, inert values, and every instruction that is not listed below is
refused. No module is imported, no attribute is read or set by a name from the payload, and no value
of the payload is ever called.

Time and memory grow with the length of the payload only. Keys of dictionaries and members of sets
are plain scalars, because the hash of a tuple that holds itself many times never ends.
"""

from __future__ import annotations

import pickletools
import struct
from typing import Any, BinaryIO, Callable, Mapping, Optional

from .values import Meaning, Name, Reading, Record, Refused, refuse_name

# A state of the reference package has some hundred instructions.
MAX_INSTRUCTIONS = 200_000

# What reading instructions of a damaged payload raises; Warning where warnings are errors.
_DAMAGE = (ValueError, TypeError, LookupError, OverflowError, struct.error, Warning)
_IGNORED = frozenset({"PROTO", "FRAME"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_KEYS = (str, int, bool, float, bytes, type(None))
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Machine:
    """Interprets one pickle; ``persistent`` resolves persistent ids, None refuses them."""

    def __init__(
        self, table: Mapping[tuple, Meaning], persistent: Optional[Callable[[Any], Any]] = None
    ) -> None:
        self.table, self.persistent = table, persistent
        self.stack: list = []
        self.below: list = []  # the stacks below each mark
        self.memo: dict = {}
        self.names: list = []

    def run(self, source: BinaryIO) -> Reading:
        """The value of the pickle at the position of ``source``, which ends up behind it.

        A global outside the table is allowed as long as nothing is done with it, and listed.

        Raises `Refused` for everything that is not described here.
        """
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(source)):
                if count >= MAX_INSTRUCTIONS:
                    raise Refused(f"has more than {MAX_INSTRUCTIONS} instructions")
                if opcode.name != "STOP":
                    self._step(opcode.name, argument)
            value = self.stack.pop()
        except _DAMAGE as error:
            raise Refused("is damaged or no pickle at all") from error
        unknown = [name for name in self.names if (name.module, name.name) not in self.table]
        return Reading(value, self.names, unknown)

    def _step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            size = _TUPLES[name]
            if len(self.stack) < size:
                raise IndexError("too few values")
            self.stack[-size:] = [tuple(self.stack[-size:])]
        elif name in _STEPS:
            _STEPS[name](self, argument)
        elif name not in _IGNORED:
            raise Refused(f"uses the instruction {name}, which is not read")

    # --- stack and memo --------------------------------------------------------------------------

    def _mark(self, _) -> None:
        self.below.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list:
        """What lies above the last mark, which is taken away."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def _pop(self, _) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._since_mark()

    def _duplicate(self, _) -> None:
        self.stack.append(self.stack[-1])

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _memoize(self, _) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    # --- containers ------------------------------------------------------------------------------

    def _top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise Refused(f"adds items to what is no {kind.__name__}")
        return self.stack[-1]

    def _append(self, _) -> None:
        item = self.stack.pop()
        self._top(list).append(item)

    def _append_many(self, _) -> None:
        items = self._since_mark()
        self._top(list).extend(items)

    def _set_item(self, _) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._top(dict)[_key(key)] = value

    def _set_many(self, _) -> None:
        items = self._since_mark()
        self._top(dict).update(_pairs(items))

    def _add_many(self, _) -> None:
        items = self._since_mark()
        self._top(set).update(map(_key, items))

    # --- objects ---------------------------------------------------------------------------------

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise Refused("names a global by something else than two strings")
        found = Name(module, name)
        self.names.append(found)
        self.stack.append(found)

    def _global(self, argument: str) -> None:
        self._name(*argument.split(" ", 1))

    def _stack_global(self, _) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._name(module, name)

    def _use(self, how: str, target: Any, arguments: Any) -> None:
        if not isinstance(target, Name):
            raise Refused("calls a value that is not a global")
        function = getattr(self.table.get((target.module, target.name)), how, None)
        if function is None:
            refuse_name(target)
        if not isinstance(arguments, tuple):
            raise Refused(f"gives {target} arguments that are no tuple")
        self.stack.append(function(arguments))

    def _reduce(self, _) -> None:
        arguments, target = self.stack.pop(), self.stack.pop()
        self._use("call", target, arguments)

    def _new_object(self, _) -> None:
        arguments, target = self.stack.pop(), self.stack.pop()
        self._use("new", target, arguments)

    def _new_object_with_keywords(self, _) -> None:
        keywords = self.stack.pop()
        if not isinstance(keywords, dict) or keywords:
            raise Refused("makes an object with keyword arguments")
        self._new_object(None)

    def _build(self, _) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise Refused("sets the state of a value that has none")
        self.stack[-1].build(state)

    def _persistent(self, _) -> None:
        if self.persistent is None:
            raise Refused("refers to data outside of itself (a persistent id)")
        self.stack.append(self.persistent(self.stack.pop()))


def _key(value: Any) -> Any:
    if type(value) not in _KEYS:
        raise Refused(f"has a {type(value).__name__} as key or member, where only scalars may be")
    return value


def _pairs(items: list) -> dict:
    if len(items) % 2:
        raise ValueError("a key has no value")
    return {_key(key): value for key, value in zip(items[::2], items[1::2])}


def _pushing(make: Callable[[Machine], Any]) -> Callable[[Machine, Any], None]:
    """The step that pushes what ``make`` gives."""

    def step(machine: Machine, _: Any) -> None:
        value = make(machine)
        machine.stack.append(value)

    return step


# pylint: disable=protected-access  # the table of the class above
_STEPS: dict[str, Callable[[Machine, Any], None]] = {
    "MARK": Machine._mark,
    "POP": Machine._pop,
    "POP_MARK": lambda machine, _: (machine._since_mark(), None)[1],
    "DUP": Machine._duplicate,
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), Machine._put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), Machine._get),
    "MEMOIZE": Machine._memoize,
    "EMPTY_LIST": _pushing(lambda machine: []),
    "EMPTY_DICT": _pushing(lambda machine: {}),
    "EMPTY_SET": _pushing(lambda machine: set()),
    "LIST": _pushing(Machine._since_mark),
    "TUPLE": _pushing(lambda machine: tuple(machine._since_mark())),
    "DICT": _pushing(lambda machine: _pairs(machine._since_mark())),
    "FROZENSET": _pushing(lambda machine: frozenset(map(_key, machine._since_mark()))),
    "APPEND": Machine._append,
    "APPENDS": Machine._append_many,
    "SETITEM": Machine._set_item,
    "SETITEMS": Machine._set_many,
    "ADDITEMS": Machine._add_many,
    "GLOBAL": Machine._global,
    "STACK_GLOBAL": Machine._stack_global,
    "REDUCE": Machine._reduce,
    "NEWOBJ": Machine._new_object,
    "NEWOBJ_EX": Machine._new_object_with_keywords,
    "BUILD": Machine._build,
    "BINPERSID": Machine._persistent,
}
