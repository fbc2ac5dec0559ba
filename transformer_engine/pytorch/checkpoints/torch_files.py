# SPDX-License-Identifier: Apache-2.0
"""Tensors inside of pickles, and files of ``torch.save``, read without ``torch.load``.

A tensor that is pickled alone is ``torch._utils._rebuild_tensor_v2`` of a storage, and a storage is
``torch.storage._load_from_bytes`` of the bytes of a small ``torch.save`` file in the old format.
That format is five pickles one after another (magic number, protocol version, properties of the
machine, the value, the keys of its storages) and then, per storage, the number of its elements in
8 little-endian bytes and their bytes. The new format is an uncompressed ZIP archive of the pickle
``data.pkl`` and one file per storage. All these pickles are interpreted by `machine`. Neither
importing nor calling anything is needed for that, and the memory used is bounded by the size of
the file.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from typing import Any, BinaryIO, Mapping, Optional

import torch
from torch import Tensor

from .machine import Machine
from .values import Meaning, Name, Reading, Refused, refuse_name

_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_PROTOCOL_VERSION = 1001
# What zipfile raises for damaged archives; RuntimeError is for encrypted ones.
_ARCHIVE_ERRORS = (
    *(zipfile.BadZipFile, EOFError, LookupError, NotImplementedError, OSError, OverflowError),
    *(RuntimeError, ValueError, struct.error),
)
_STORAGE_DTYPES = {
    ("torch", "BFloat16Storage"): torch.bfloat16,
    ("torch", "BoolStorage"): torch.bool,
    ("torch", "ByteStorage"): torch.uint8,
    ("torch", "CharStorage"): torch.int8,
    ("torch", "DoubleStorage"): torch.float64,
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "IntStorage"): torch.int32,
    ("torch", "LongStorage"): torch.int64,
    ("torch", "ShortStorage"): torch.int16,
}


class Storage:
    """Elements of one dtype in memory; ``data`` may be filled after tensors were made of it."""

    __slots__ = ("dtype", "data")

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        self.dtype, self.data = dtype, bytearray(size * dtype.itemsize)

    def __len__(self) -> int:
        return len(self.data) // self.dtype.itemsize


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**48


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= 8 and all(map(_is_size, value))


def rebuild_tensor(arguments: tuple) -> Tensor:
    """The tensor of ``(storage, offset, size, strides, requires_grad, hooks, ...)``."""
    if len(arguments) < 4 or not isinstance(arguments[0], Storage):
        raise Refused("builds a tensor from something else than a storage")
    storage, offset, sizes, strides = arguments[:4]
    plain = _is_size(offset) and _is_shape(sizes) and _is_shape(strides)
    if not plain or len(sizes) != len(strides):
        raise Refused("builds a tensor with sizes that are no sizes")
    count = math.prod(sizes)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    if count and (count > len(storage) or last >= len(storage)):
        raise Refused(
            f"builds a tensor of {count:.6g} elements beyond the {len(storage)} of its storage"
        )
    if not count:
        return torch.empty(sizes, dtype=storage.dtype)
    return torch.frombuffer(storage.data, dtype=storage.dtype).as_strided(sizes, strides, offset)


def _no_items(arguments: tuple) -> dict:
    if arguments:
        raise Refused("makes an OrderedDict from values")
    return {}


# What the pickle of a torch.save file may name. Storages are only parts of persistent ids.
FILE_TABLE: Mapping[tuple, Meaning] = {
    ("torch._utils", "_rebuild_tensor_v2"): Meaning(call=rebuild_tensor),
    ("collections", "OrderedDict"): Meaning(call=_no_items),
    **dict.fromkeys(_STORAGE_DTYPES, Meaning()),
}


class _Storages:
    """The storages of one file, by their keys; ``limit`` is the size of the file in bytes."""

    def __init__(self, limit: int) -> None:
        self.known: dict[str, Storage] = {}
        self.left = limit

    def find(self, identity: Any) -> Storage:
        """The storage of ``("storage", class, key, place, elements[, None])``."""
        if not isinstance(identity, tuple) or len(identity) not in (5, 6):
            raise Refused("refers to data that is no storage")
        word, kind, key, _, size, *view = identity
        plain = word == "storage" and isinstance(key, str) and _is_size(size)
        if not plain or view not in ([], [None]):
            raise Refused("refers to a storage in an unknown way")
        if not isinstance(kind, Name) or (kind.module, kind.name) not in _STORAGE_DTYPES:
            raise Refused("has a storage of an unknown kind")
        dtype = _STORAGE_DTYPES[kind.module, kind.name]
        if key not in self.known:
            self.left -= size * dtype.itemsize
            if self.left < 0:
                raise Refused(f"announces a storage of {size:.6g} elements that it does not have")
            self.known[key] = self.make(dtype, size, key)
        return self.known[key]

    def make(self, dtype: torch.dtype, size: int, key: str) -> Storage:
        """A storage that is filled later."""
        del key
        return Storage(dtype, size)


class _ArchivedStorages(_Storages):
    """Storages of the new format, read from the archive at once."""

    def __init__(self, limit: int, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(limit)
        self.archive, self.folder = archive, folder

    def make(self, dtype: torch.dtype, size: int, key: str) -> Storage:
        storage = Storage(dtype, size)
        _fill(storage, _member(self.archive, f"{self.folder}data/{key}"))
        return storage


def _fill(storage: Storage, content: bytes) -> None:
    if len(content) != len(storage.data):
        raise Refused("has a storage of another size than it says")
    storage.data[:] = content


def read_file(content: bytes, table: Mapping[tuple, Meaning]) -> Reading:
    """The value in the file that ``torch.save`` wrote, whose pickle may name what ``table`` says.

    Raises `Refused` for anything else.
    """
    if content.startswith(b"PK"):
        return _read_archive(content, table)
    return _read_stream(io.BytesIO(content), len(content), table)


def _read_stream(stream: BinaryIO, size: int, table: Mapping[tuple, Meaning]) -> Reading:
    for expected in (_MAGIC_NUMBER, _PROTOCOL_VERSION):
        found = Machine({}).run(stream).value
        if not isinstance(found, int) or found != expected:
            raise Refused("is no file of torch.save")
    properties = Machine({}).run(stream).value
    if not isinstance(properties, dict) or properties.get("little_endian") is not True:
        raise Refused("holds numbers that are not little-endian")
    storages = _Storages(size)
    reading = Machine(table, storages.find).run(stream)
    keys = Machine({}).run(stream).value
    if not isinstance(keys, list) or any(not isinstance(key, str) for key in keys):
        raise Refused("has no list of its storages")
    if sorted(keys) != sorted(storages.known):
        raise Refused("does not have the storages that its tensors need")
    for key in keys:
        storage, head = storages.known[key], stream.read(8)
        if len(head) != 8 or struct.unpack("<q", head)[0] != len(storage):
            raise Refused("has a storage of another size than it says")
        _fill(storage, stream.read(len(storage.data)))
    return reading


def _read_archive(content: bytes, table: Mapping[tuple, Meaning]) -> Reading:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            folder = _folder(archive)
            order = f"{folder}byteorder"
            if order in archive.namelist() and _member(archive, order) != b"little":
                raise Refused("holds numbers that are not little-endian")
            storages = _ArchivedStorages(len(content), archive, folder)
            pickled = io.BytesIO(_member(archive, f"{folder}data.pkl"))
            return Machine(table, storages.find).run(pickled)
    except _ARCHIVE_ERRORS as error:
        raise Refused("is in a damaged archive") from error


def _folder(archive: zipfile.ZipFile) -> str:
    """The folder with the one ``data.pkl``, with the slash behind it."""
    found = [name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"]]
    if len(found) != 1:
        raise Refused("is in an archive that torch.save did not write")
    return found[0][: -len("data.pkl")]


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    info: Optional[zipfile.ZipInfo] = archive.NameToInfo.get(name)
    if info is None:
        raise Refused(f"needs {name[:100]!a}, which its archive does not have")
    if info.compress_type != zipfile.ZIP_STORED:  # so that a file is never larger than its archive
        raise Refused("is in a compressed archive")
    return archive.read(info)


def pickle_table(size: int) -> dict[tuple, Meaning]:
    """What a pickle of ``size`` bytes outside of a torch.save file may name: tensors.

    One table per pickle, because it counts: the same bytes, loaded again and again, would fill the
    memory.
    """
    left = size

    def load_from_bytes(arguments: tuple) -> Storage:
        nonlocal left
        if len(arguments) != 1 or type(arguments[0]) not in (bytes, bytearray):
            raise Refused("loads a storage from something else than bytes")
        content = arguments[0]
        left -= len(content)
        if left < 0:
            raise Refused("loads more bytes than it has")
        reading = _read_stream(io.BytesIO(content), len(content), FILE_TABLE)
        for name in reading.unknown:
            refuse_name(name)
        if not isinstance(reading.value, Storage):
            raise Refused("loads something else than a storage")
        return reading.value

    return {
        ("torch._utils", "_rebuild_tensor_v2"): Meaning(call=rebuild_tensor),
        ("torch.storage", "_load_from_bytes"): Meaning(call=load_from_bytes),
        ("collections", "OrderedDict"): Meaning(call=_no_items),
    }
