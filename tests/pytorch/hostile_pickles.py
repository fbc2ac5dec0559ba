# SPDX-License-Identifier: Apache-2.0
"""Pickles that try to run code, to fill the memory or to confuse the reader."""

import pickle
import struct

REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
LOAD = b"ctorch.storage\n_load_from_bytes\n"
RECIPE = b"ctransformer_engine.common.recipe\nDelayedScaling\n"


def text(value):
    """The instruction that pushes a string."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def data(value):
    """The instruction that pushes bytes."""
    return b"B" + struct.pack("<I", len(value)) + value


def number(value):
    """The instruction that pushes a large integer."""
    return pickle.dumps(value, 2)[2:-1]


def system(command):
    """``os.system(command)``, as the simplest attack has it."""
    return b"cos\nsystem\n" + text(command) + b"\x85R"


def running(path):
    """Pickles that make the file ``path`` when they are unpickled, and what an error must name."""
    command = f"touch {path}"
    code = f"__import__('pathlib').Path({str(path)!r}).touch()"
    getter = b"cbuiltins\ngetattr\n"
    imported = b"cbuiltins\n__import__\n" + text("os") + b"\x85R"
    stacked = text("os") + text("system") + b"\x93"
    partial = b"cfunctools\npartial\n(cos\nsystem\n" + text(command) + b"tR"
    return {
        "GLOBAL": (system(command) + b".", "os.system"),
        "STACK_GLOBAL": (stacked + text(command) + b"\x85R.", "os.system"),
        "eval": (b"cbuiltins\neval\n" + text(code) + b"\x85R.", "builtins.eval"),
        "exec": (b"cbuiltins\nexec\n" + text(code) + b"\x85R.", "builtins.exec"),
        "getattr": (
            getter + imported + text("system") + b"\x86R" + text(command) + b"\x85R.",
            "builtins.__import__",
        ),
        "dotted name": (
            text("torch") + text("serialization.os.system") + b"\x93" + text(command) + b"\x85R.",
            "torch.serialization.os.system",
        ),
        "partial": (partial + b")R.", "functools.partial"),
        "INST": (b"(" + text(command) + b"ios\nsystem\n.", "INST"),
        "OBJ": (b"(cos\nsystem\n" + text(command) + b"o.", "OBJ"),
        "NEWOBJ": (
            b"csubprocess\nPopen\n" + b"(](" + text("touch") + text(str(path)) + b"et\x81.",
            "subprocess.Popen",
        ),
        "NEWOBJ_EX": (
            b"csubprocess\nPopen\n)}" + text("args") + text(command) + b"s\x92.",
            "keyword arguments",
        ),
        "memo": (
            REBUILD + b"q\x000" + b"cos\nsystem\nq\x000h\x00" + text(command) + b"\x85R.",
            "os.system",
        ),
        "below a mark": (b"cos\nsystem\n(" + text(command) + b"tR.", "os.system"),
        "in a recipe": (
            RECIPE + b")\x81}" + text("margin") + system(command) + b"sb.",
            "os.system",
        ),
        "as state": (RECIPE + b")\x81" + system(command) + b"b.", "os.system"),
        "in the storage": (
            REBUILD + b"(" + LOAD + data(system(command) + b".") + b"\x85Rtr.",
            "os.system",
        ),
        "storage of torch.load": (
            b"ctorch.serialization\nload\n" + b"c_io\nBytesIO\n" + data(b"") + b"\x85R\x85R.",
            "_io.BytesIO",
        ),
    }


def stream(magic=None, version=None, info=None, value=None, keys=None, rest=b""):
    """A file of the old format of torch.save, with the pickles that are given."""
    parts = [
        magic or pickle.dumps(0x1950A86A20F9469CFC6C, 2),
        version or pickle.dumps(1001, 2),
        info or pickle.dumps({"little_endian": True}, 2),
        value or pickle.dumps(None, 2),
        keys or pickle.dumps([], 2),
        rest,
    ]
    return b"".join(parts)


def storage(size, kind=b"torch\nFloatStorage\n", key="0", more=b""):
    """Instructions for a persistent id of ``size`` elements."""
    words = text("storage") + b"c" + kind + text(key) + text("cpu")
    return b"(" + words + number(size) + more + b"tQ"


def nested(**parts):
    """A pickle that loads a storage from such a file."""
    return LOAD + data(stream(**parts)) + b"\x85R."


def tensor(sizes, strides, offset=0, elements=4):
    """A pickle of a tensor of ``elements`` floats, with freely chosen sizes."""
    value = struct.pack(f"<q{elements}f", elements, *range(elements))
    content = nested(value=storage(elements) + b".", keys=pickle.dumps(["0"], 2), rest=value)[:-1]
    shape = b"".join(map(number, sizes)), b"".join(map(number, strides))
    arguments = content + number(offset) + b"(" + shape[0] + b"t(" + shape[1] + b"t\x89"
    return REBUILD + b"(" + arguments + b"ccollections\nOrderedDict\n)RtR."
