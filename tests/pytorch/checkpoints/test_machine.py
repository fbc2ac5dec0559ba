# SPDX-License-Identifier: Apache-2.0
"""The pickle reader: of plain data and tensors it reads what pickle reads; it runs nothing."""

import copyreg
import io
import pickle
import random
import resource
import time
import zipfile

import hostile_pickles as hostile
import pytest
import reference_payloads as reference
import torch

from transformer_engine.common.recipe import Format
from transformer_engine.pytorch.checkpoints import reference_state
from transformer_engine.pytorch.checkpoints.machine import Machine
from transformer_engine.pytorch.checkpoints.torch_files import FILE_TABLE, pickle_table, read_file
from transformer_engine.pytorch.checkpoints.values import Record, Refused

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def read(payload):
    return Machine(pickle_table(len(payload))).run(io.BytesIO(payload)).value


def refusal(payload, reader=reference_state.read):
    """Why ``payload`` is refused."""
    with pytest.raises(Refused) as caught:
        reader(payload)
    return str(caught.value)


# --- plain data ----------------------------------------------------------------------------------


def scalar(rng):
    """Any value that may be a key."""
    return rng.choice(
        (
            None,
            True,
            rng.randint(-(2**70), 2**70),
            rng.randint(-300, 300),
            rng.random(),
            -0.0,
            float("inf"),
            "text\n\u20ac\\" * rng.randint(0, 60),
            bytes(rng.randint(0, 255) for _ in range(rng.randint(0, 300))),
        )
    )


def value(rng, depth):
    """Random nested containers, some parts of which occur twice."""
    if depth == 0:
        return scalar(rng)
    items = [value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    items += items[:1]
    kind = rng.randint(0, 5)
    if kind == 0:
        return {scalar(rng): item for item in items}
    if kind == 1:
        return tuple(items)
    if kind == 2:
        return {scalar(rng) for _ in items}
    if kind == 3:
        return frozenset(scalar(rng) for _ in items)
    return items


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_reads_as_pickle_reads_it(protocol):
    """Of protocols that write sets or bytes by calling something, those are left out."""
    rng, seen = random.Random(protocol), 0
    for _ in range(300):
        payload = pickle.dumps(value(rng, rng.randint(0, 4)), protocol)
        if protocol < 4 and any(word in payload for word in (b"builtin", b"_codecs")):
            continue
        assert repr(read(payload)) == repr(pickle.loads(payload))
        seen += 1
    assert seen > 20


def test_shared_and_recursive_values_keep_their_identity():
    content = {"a": [1]}
    content["b"] = content["a"]
    content["self"] = content
    got = read(pickle.dumps(content))
    assert got["b"] is got["a"] and got["self"] is got


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_read_as_pickle_reads_them(dtype, protocol):
    """Also views, transposes and tensors without elements. Protocol 2 writes bytes by a call."""
    base = (torch.arange(24).reshape(4, 6) % 5).to(dtype)
    content = {"whole": base, "view": base[1:, 2], "turned": base.t(), "none": base[:0]}
    content["scalar"] = base[2, 3]
    payload = pickle.dumps(content, protocol)
    if protocol == 2:
        assert "_codecs.encode" in refusal(payload)
        return
    for key, got in read(payload).items():
        assert got.dtype == dtype and got.stride() == content[key].stride()
        assert torch.equal(got, content[key])


@pytest.mark.parametrize("archive", (True, False), ids=("new", "old"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_files_read_as_torch_reads_them(dtype, archive):
    """Shared storages stay shared."""
    base = (torch.arange(24).reshape(4, 6) % 5).to(dtype)
    content = {"whole": base, "view": base[1:, 2], "list": [base.t(), 1.5, "text", None]}
    buffer = reference.dumped_file(content, archive)
    got = read_file(buffer.getvalue(), FILE_TABLE).value
    buffer.seek(0)
    want = torch.load(buffer, weights_only=True)
    for one, two in ((got["whole"], want["whole"]), (got["view"], want["view"])):
        assert one.dtype == dtype and torch.equal(one, two)
    assert torch.equal(got["list"][0], want["list"][0]) and got["list"][1:] == [1.5, "text", None]
    assert got["whole"].untyped_storage().data_ptr() == got["view"].untyped_storage().data_ptr()


@pytest.mark.parametrize("name", reference.NAMES)
def test_recipes_come_as_records(name):
    """Fields are kept, bookkeeping of the class is not, and no recipe is made."""
    bookkeeping = {"_cached": 1, "__pydantic_fields_set__": {"x"}}
    content = {"recipe": reference.CLASSES[name](**bookkeeping)}
    got = reference_state.read(reference.dumped(content))["recipe"]
    assert isinstance(got, Record) and got.kind == (reference.PACKAGE, name) and got.fields == {}
    if "Params" in name:
        return
    content["recipe"].fp8_format = reference.Format.E4M3
    got = reference_state.read(reference.dumped(content))["recipe"]
    assert got.fields == {"fp8_format": Format.E4M3}


# --- nothing is executed -------------------------------------------------------------------------

ATTACKS = hostile.running("")


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_does_not_run(attack, tmp_path):
    """The error names what the payload wanted; the mark that it wanted to leave is not there."""
    mark = tmp_path / "mark"
    payload, named = hostile.running(mark)[attack]
    for head in (b"", b"\x80\x02", b"\x80\x05"):
        assert named in refusal(head + payload)
    assert not mark.exists()


@pytest.mark.parametrize("attack", ["GLOBAL", "INST", "OBJ", "getattr", "partial", "memo", "eval"])
def test_those_attacks_would_run(attack, tmp_path):
    """With ``pickle`` they do, so the test above means something."""
    mark = tmp_path / "mark"
    pickle.loads(hostile.running(mark)[attack][0])
    assert mark.exists()


@pytest.mark.parametrize("part", ("magic", "version", "info", "value", "keys"))
@pytest.mark.parametrize("attack", ATTACKS)
def test_code_in_nested_files_does_not_run(attack, part, tmp_path):
    mark = tmp_path / "mark"
    payload, _ = hostile.running(mark)[attack]
    file = hostile.stream(**{part: payload})
    assert refusal(hostile.LOAD + hostile.data(file) + b"\x85R.")
    assert refusal(io.BytesIO(file))
    assert not mark.exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_in_archives_does_not_run(attack, tmp_path):
    mark = tmp_path / "mark"
    payload, named = hostile.running(mark)[attack]
    assert named in refusal(archive({"data.pkl": payload})) or attack == "in the storage"
    assert not mark.exists()


def archive(files, folder="archive", method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, content in files.items():
            file.writestr(f"{folder}/{name}", content)
    return buffer


@pytest.mark.parametrize("opcode", (b"\x82\xf1", b"\x83\xf1\x00", b"\x84\xf1\x00\x00\x00"))
def test_registered_extensions_are_not_looked_up(opcode, tmp_path):
    mark = tmp_path / "mark"
    copyreg.add_extension("os", "system", 0xF1)
    try:
        payload = opcode + hostile.text(f"touch {mark}") + b"\x85R."
        assert "EXT" in refusal(payload)
        assert not mark.exists()
        pickle.loads(payload)
        assert mark.exists()
    finally:
        copyreg.remove_extension("os", "system", 0xF1)


def test_names_are_not_imported(tmp_path, monkeypatch):
    """Not even that of a module, whose import would run its code."""
    (tmp_path / "te_hostile.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    payload = b"cte_hostile\nDelayedScaling\n."
    assert "te_hostile.DelayedScaling" in refusal(payload)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "target",
    (hostile.REBUILD, hostile.LOAD, hostile.RECIPE, b"ccollections\nOrderedDict\n)R", b"]", b"}"),
)
def test_state_is_set_on_recipes_only(target):
    """Neither on functions of this package nor on values, and never by a ``__setstate__``."""
    state = b"}" + hostile.text("__setstate__") + hostile.LOAD + b"sb"
    assert "sets the state" in refusal(target + state + b".")


def test_a_function_of_the_table_can_not_be_replaced():
    """A recipe's field that is named like a method is refused, or ignored as bookkeeping."""
    begin = hostile.RECIPE + b")\x81}"
    assert "unknown field 'build'" in refusal(begin + hostile.text("build") + b"Nsb.")
    record = reference_state.read(begin + hostile.text("__class__") + b"Nsb.")
    assert isinstance(record, Record) and record.fields == {}


@pytest.mark.parametrize(
    "payload,named",
    (
        (b"cnumpy.core.multiarray\nscalar\n)R.", "numpy.core.multiarray.scalar"),
        (b"ctorch._utils\n_rebuild_parameter\n)R.", "torch._utils._rebuild_parameter"),
        (b"ctorch\nFloatStorage\n)R.", "torch.FloatStorage"),
        (hostile.RECIPE + b")R.", "DelayedScaling"),
        (b"ctransformer_engine.common.recipe\nRecipe\n)\x81.", "common.recipe.Recipe"),
        (hostile.RECIPE + b"N\x85\x81.", "with arguments"),
        (b"ccollections\nOrderedDict\n]\x85R.", "OrderedDict"),
        (b"ccollections\nOrderedDict\n]R.", "no tuple"),
        (b"K\x01)R.", "calls a value"),
        (b"K\x01)\x81.", "calls a value"),
        (b"K\x01K\x02\x93.", "two strings"),
        (b"K\x01Q.", "persistent id"),
        (b"Pos\n.", "PERSID"),
        (b"\x97.", "NEXT_BUFFER"),
        (b"\x8c\x01a\x98.", "READONLY_BUFFER"),
        (b"K\x01K\x02a.", "adds items"),
        (b"K\x01(K\x02e.", "adds items"),
        (b"]K\x01K\x02s.", "adds items"),
        (hostile.RECIPE + b")\x81K\x01K\x02s.", "adds items"),
        (b"K\x01(K\x02\x90.", "adds items"),
        (b"}]K\x01s.", "a list as key"),
        (b"}(K\x01tK\x01s.", "a tuple as key"),
        (b"\x8f(\x29\x90.", "a tuple as key or member"),
        (b"(]\x91.", "a list as key or member"),
        (b"(]K\x01d.", "a list as key"),
        (b"h\x05.", "damaged"),
        (b"K\x01", "damaged"),
        (b".", "damaged"),
        (b"", "damaged"),
        (b"0.", "damaged"),
        (b"t.", "damaged"),
        (b"\x86.", "damaged"),
        (b"(K\x01d.", "damaged"),
        (b"\xff.", "damaged"),
        (b"cos\n.", "damaged"),
    ),
)
def test_other_instructions_are_refused(payload, named):
    assert named in refusal(payload)


def test_names_in_errors_are_short_and_printable():
    payload = b"c" + b"\x1b[2J" * 100 + b"\nx\n)R."
    message = refusal(payload)
    assert message.isprintable() and len(message) < 400


# --- memory and time -----------------------------------------------------------------------------


@pytest.fixture
def within_limits():
    """The test takes some seconds and some hundred megabytes at most."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    yield
    assert time.perf_counter() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


def bomb(levels=80):
    """Instructions for a tuple that holds itself 2^levels times."""
    return b"K\x01" + b"2\x86" * levels


BIG = 2**50
TENSORS = {
    "more than the storage": hostile.tensor((5,), (1,)),
    "behind the storage": hostile.tensor((2,), (1,), offset=3),
    "far behind": hostile.tensor((2,), (BIG,)),
    "expanded": hostile.tensor((2**30, 2**30), (0, 0)),
    "huge": hostile.tensor((BIG,), (1,)),
    "negative": hostile.tensor((-1,), (1,)),
    "negative stride": hostile.tensor((2,), (-1,), offset=2),
    "negative offset": hostile.tensor((2,), (1,), offset=-1),
    "strides missing": hostile.tensor((2, 2), (1,)),
    "too many dims": hostile.tensor((1,) * 3000, (1,) * 3000),
    "huge numbers": hostile.tensor((2**70000,) * 8, (1,) * 8),
}


@pytest.mark.parametrize("what", TENSORS)
def test_tensors_do_not_outgrow_their_storage(what, within_limits):
    assert "builds a tensor" in refusal(TENSORS[what])


def test_the_tensors_above_are_well_made():
    """But for what they are refused for."""
    assert read(hostile.tensor((2, 2), (1, 2))).tolist() == [[0, 2], [1, 3]]
    assert read(hostile.tensor((0, BIG // 8), (1, 1))).numel() == 0


FILES = {
    "huge": hostile.nested(value=hostile.storage(BIG) + b"."),
    "negative": hostile.nested(value=hostile.storage(-1) + b"."),
    "many": hostile.nested(value=b"".join(hostile.storage(60, key=str(i)) for i in range(99))),
    "unknown kind": hostile.nested(value=hostile.storage(1, b"os\nsystem\n") + b"."),
    "view": hostile.nested(
        value=hostile.storage(1, more=b"(" + hostile.text("0") + b"K\x01K\x01t") + b"."
    ),
    "no content": hostile.nested(value=hostile.storage(1) + b"."),
    "unknown key": hostile.nested(keys=pickle.dumps(["0"], 2), rest=b"\0" * 8),
    "keys twice": hostile.nested(
        value=hostile.storage(1) + b".", keys=pickle.dumps(["0", "0"], 2), rest=b"\0" * 24
    ),
    "other size": hostile.nested(
        value=hostile.storage(1) + b".", keys=pickle.dumps(["0"], 2), rest=b"\2" * 16
    ),
    "cut": hostile.nested(
        value=hostile.storage(1) + b".", keys=pickle.dumps(["0"], 2), rest=b"\1" + b"\0" * 9
    ),
    "magic": hostile.nested(magic=pickle.dumps(7, 2)),
    "version": hostile.nested(version=pickle.dumps("1001", 2)),
    "big-endian": hostile.nested(info=pickle.dumps({"little_endian": False}, 2)),
    "no storage": hostile.nested(value=pickle.dumps([], 2)),
    "unknown name": hostile.nested(
        value=b"cos\nsystem\n0" + hostile.storage(1) + b".",
        keys=pickle.dumps(["0"], 2),
        rest=b"\1" + b"\0" * 11,
    ),
    "no bytes": hostile.LOAD + b"K\x01\x85R.",
    "itself": hostile.nested(value=hostile.LOAD + hostile.data(b"") + b"\x85R."),
    "storage twice": hostile.nested(
        value=hostile.storage(2) + hostile.storage(9)[:-1] + b"Q.", keys=pickle.dumps(["0"], 2)
    ),
}


@pytest.mark.parametrize("what", FILES)
def test_damaged_files_in_pickles_are_refused(what, within_limits):
    assert refusal(FILES[what])


def test_the_same_bytes_are_not_loaded_again_and_again(within_limits):
    """A megabyte, loaded 20000 times."""
    size = 2**18
    file = hostile.stream(
        value=hostile.storage(size) + b".",
        keys=pickle.dumps(["0"], 2),
        rest=size.to_bytes(8, "little") + bytes(4 * size),
    )
    payload = b"](" + hostile.LOAD + b"q\x000" + hostile.data(file) + b"q\x010"
    payload += b"h\x00h\x01\x85R" * 20000 + b"e."
    assert "loads more bytes than it has" in refusal(payload)


@pytest.mark.parametrize(
    "payload",
    (
        b"}" + bomb() + b"Ns.",
        b"\x8f(" + bomb() + b"\x90.",
        b"(" + bomb() + b"\x91.",
        b"ctransformer_engine.common.recipe\nFormat\n" + bomb() + b"\x85R.",
        b"ctransformer_engine.common.recipe\n_FormatHelper\n" + bomb() + b"\x81.",
        hostile.RECIPE + bomb() + b"R.",
        b"K\x01r\xff\xff\xff\x7f0cos\nsystem\n)R.",
        b"\x8d" + (2**62).to_bytes(8, "little") + b"x.",
        b"\x8e" + (2**62).to_bytes(8, "little") + b"x.",
        b"\x8b" + (2**31 - 1).to_bytes(4, "little") + b"x.",
        b"L" + b"9" * 1_000_000 + b"L\n.",
        b"N0" * 1_000_000 + b".",
        b"(" * 100_000 + b".",
        b"]" * 100_001 + b"a" * 99_999 + b"cos\nsystem\n)R.",
    ),
    ids=range(14),
)
def test_memory_and_time_are_bounded(payload, within_limits):
    assert refusal(payload)


def test_deep_nesting_is_no_problem(within_limits):
    """Containers in containers are neither read nor thrown away recursively."""
    for opcode in (b"]" * 90_000 + b"a" * 89_999, b")" + b"\x85" * 90_000):
        assert read(opcode + b".") is not None


def archived(**parts):
    """An archive with one tensor, some of whose files are others."""
    content = {"data.pkl": hostile.storage(2) + b".", "byteorder": b"little", "data/0": b"\0" * 8}
    return {**content, **parts}


ARCHIVES = {
    "big-endian": archive(archived(byteorder=b"big")),
    "compressed": archive(archived(), method=zipfile.ZIP_DEFLATED),
    "no pickle": archive({"data/0": b""}),
    "storage missing": archive({"data.pkl": hostile.storage(2) + b"."}),
    "storage too long": archive(archived(**{"data/0": b"\0" * 9})),
    "storage too large": archive(archived(**{"data.pkl": hostile.storage(BIG) + b"."})),
    "no archive": io.BytesIO(b"PK\3\4" + b"x" * 100),
    "cut": io.BytesIO(archive(archived()).getvalue()[:-30]),
    "empty": io.BytesIO(),
}


@pytest.mark.parametrize("what", ARCHIVES)
def test_damaged_archives_are_refused(what, within_limits):
    assert refusal(ARCHIVES[what])


def test_the_archives_above_are_well_made():
    assert len(read_file(archive(archived()).getvalue(), FILE_TABLE).value) == 2


@pytest.mark.parametrize("kind", ("pickle", "new", "old"))
def test_damage_is_always_refused_or_harmless(kind):
    """Bytes of good payloads are replaced, removed and doubled; no other error comes out."""
    content = reference.delayed_content(reference.scales())
    if kind == "pickle":
        good, wrap = reference.dumped(content), bytes
    else:
        good, wrap = reference.dumped_file(content, kind == "new").getvalue(), io.BytesIO
    rng, refused = random.Random(3), 0
    for _ in range(1500):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(bad))
            change = rng.randint(0, 2)
            if change == 0:
                bad[at] = rng.randint(0, 255)
            elif change == 1:
                del bad[at : at + rng.randint(1, 9)]
            else:
                bad[at:at] = bad[at : at + rng.randint(1, 9)]
        try:
            reference_state.scales_of(reference_state.read(wrap(bytes(bad))))
        except Refused:
            refused += 1
    assert refused > 500


def test_garbage_is_refused():
    """A megabyte of it, whatever instruction it begins with."""
    rng = random.Random(0)
    garbage = rng.randbytes(2**20)
    for first in range(256):
        assert refusal(bytes([first]) + garbage[first:])
