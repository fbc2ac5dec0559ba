# SPDX-License-Identifier: Apache-2.0
"""What the pickle reader gives beside plain values: records, names, and why it refuses."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, NoReturn, Optional


class Refused(Exception):
    """Why a payload is not read: a phrase that goes on from "a pickle that ..."."""


class Name:
    """A global that the payload names: two strings, whatever they are."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __str__(self) -> str:
        return ascii(f"{self.module}.{self.name}")[1:-1][:200]


class Record:
    """An object of a known class, as its fields: ``fields`` maps their names to values.

    ``kind`` is the pair (module, class name), ``known`` the names that the fields may have.
    """

    __slots__ = ("kind", "known", "fields")

    def __init__(self, kind: tuple, known: frozenset) -> None:
        self.kind, self.known, self.fields = kind, known, {}

    def build(self, state: Any) -> None:
        """Take the fields of ``state``, the dictionary of the object or a pair of dictionaries.

        Names that begin with an underscore are the class's own bookkeeping and left out.
        """
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if part is not None and (not isinstance(part, dict) or len(part) > 100):
                raise Refused(f"gives a {self.kind[1]} a state that is no small dictionary")
            for key, value in (part or {}).items():
                if not isinstance(key, str):
                    raise Refused(f"gives a {self.kind[1]} a field whose name is no string")
                if key.startswith("_"):
                    continue
                if key not in self.known:
                    raise Refused(f"gives a {self.kind[1]} the unknown field {key[:100]!a}")
                self.fields[key] = value


class Meaning(NamedTuple):
    """What a known global does: ``call`` for REDUCE, ``new`` for NEWOBJ; None is refused.

    Both take the tuple of arguments, check it, and return an inert value.
    """

    call: Optional[Callable[[tuple], Any]] = None
    new: Optional[Callable[[tuple], Any]] = None


class Reading(NamedTuple):
    """The value of a pickle, and the globals it names: all, and those that no table knows."""

    value: Any
    names: list
    unknown: list


def refuse_name(name: Name) -> NoReturn:
    """Refuse a payload because of a global."""
    raise Refused(f"names {name}, which is not among the few names that such a state may hold")
