# SPDX-License-Identifier: Apache-2.0
"""Distributed checkpoints: saved and loaded by as many processes, and by other numbers of them."""

import warnings

import processes
import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import (
    WIDE,
    assert_same,
    batch,
    build,
    bytes_of,
    loss_of,
    optimizer_of,
    state_of,
)
from processes import RANKS, folder, needs_distributed
from recipe_list import recipe_of
from tensor_support import QUANTIZERS, random, same_bytes
from test_fsdp2 import shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

# Recipe, and whether the weights are quantized.
CASES = [("none", False), ("current", False), ("delayed", False)]
CASES += [(name, True) for name in ("current", "delayed", "block", "mxfp8", "nvfp4")]
CASES += [("custom_two_formats", True), ("custom_from_dequantized", True)]


def case_id(case):
    return f"{case[0]}{' primary' * case[1]}"


def make(recipe, primary):
    """A model, not yet sharded."""
    return build(recipe if primary else None, WIDE)


def run_steps(model, optimizer, recipe, steps):
    """The same training for everybody; the outputs."""
    outputs = []
    for step in steps:
        y, loss = loss_of(model, batch(step, width=WIDE), recipe_of(recipe), draws=step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y)
    return outputs


def quietly(function, *args, **kwargs):
    """DCP warns that there is one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def save(model, optimizer, path):
    """Model and optimizer."""
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    quietly(dcp.save, parts, checkpoint_id=path)


def load(model, optimizer, path):
    """Into a fresh model and a fresh optimizer."""
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    quietly(dcp.load, parts, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=parts["model"],
        optim_state_dict=parts["optimizer"],
    )


def trained(recipe, primary, sharded):
    """A model and its optimizer after two steps."""
    model = make(recipe, primary)
    model = shard(model) if sharded else model
    optimizer = optimizer_of(model)
    run_steps(model, optimizer, recipe, range(2))
    return model, optimizer


def assert_resumes(recipe, primary, path, rank):
    """What is loaded has the bytes of a model that never stopped, and trains on like it."""
    sharded = rank is not None
    wanted, its_optimizer = trained(recipe, primary, sharded)
    model = make(recipe, primary)
    model = shard(model) if sharded else model
    optimizer = optimizer_of(model)
    load(model, optimizer, path)
    assert_same(bytes_of(model), bytes_of(wanted), "parameter")
    assert_same(state_of(model), state_of(wanted), "state")
    outputs = [
        run_steps(m, o, recipe, range(2, 4))
        for m, o in ((model, optimizer), (wanted, its_optimizer))
    ]
    assert_same(*outputs, "output")
    assert_same(bytes_of(model), bytes_of(wanted), "parameter")


def check_same_number(rank, recipe, primary):
    """Saved by two processes, loaded by two."""
    path = folder() / f"two {case_id((recipe, primary))}"
    save(*trained(recipe, primary, True), path)
    assert_resumes(recipe, primary, path, rank)


def check_one_to_two(rank, recipe, primary):
    """Saved by one process (by the fixture), loaded by two."""
    assert_resumes(recipe, primary, folder() / f"one {case_id((recipe, primary))}", rank)


def check_full_state_dict(rank, recipe):
    """Gathered on rank 0 in high precision, and given out again."""
    model, _ = trained(recipe, True, True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    single, _ = trained(recipe, True, False)
    if rank == 0:
        for name, param in single.named_parameters():
            assert type(state[name]) is torch.Tensor  # pylint: disable=unidiomatic-typecheck
            values = param.detach()
            values = values.dequantize() if hasattr(values, "quant") else values
            assert_same([state[name]], [values], name)
    else:
        assert not state
    fresh = shard(make(recipe, True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(fresh, state, options=options)
    # Quantized from the whole tensor's values, as one process quantizes them.
    whole = make(recipe, True)
    whole.load_state_dict(
        {
            name: value.dequantize() if hasattr(value, "quant") else value
            for name, value in single.state_dict().items()
        }
    )
    assert_same(bytes_of(fresh), bytes_of(whole, rank), "parameter")


def check_high_precision_checkpoint(rank, recipe):
    """A checkpoint of a model in high precision, loaded into quantized shards."""
    path = folder() / "one none"
    model = shard(make(recipe, True))
    state = {"model": get_model_state_dict(model)}
    quietly(dcp.load, state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    source, whole = trained("none", False, False)[0], make(recipe, True)
    with torch.no_grad():
        for ours, theirs in zip(whole.parameters(), source.parameters()):
            ours.copy_(theirs)
    assert_same(bytes_of(model), bytes_of(whole, rank), "parameter")


CHECKS = {
    **{f"two to two {case_id(case)}": (check_same_number, *case) for case in CASES},
    **{f"one to two {case_id(case)}": (check_one_to_two, *case) for case in CASES},
    **{f"full {name}": (check_full_state_dict, name) for name in ("current", "mxfp8", "nvfp4")},
    **{
        f"high precision to {name}": (check_high_precision_checkpoint, name)
        for name in ("current", "mxfp8", "nvfp4")
    },
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the processes found, and where their checkpoints are."""
    path = tmp_path_factory.mktemp("dcp")
    for case in CASES:
        save(*trained(*case, False), path / f"one {case_id(case)}")
    return processes.run_checks("test_dcp", path), path


@pytest.mark.feature(
    "distributed checkpoints",
    modes=("eager",),
    others="saved and loaded outside of compiled and exported code",
)
@needs_distributed
@pytest.mark.parametrize("label", CHECKS)
def test_two_processes(found, label):
    processes.assert_passed(found[0], label)


@needs_distributed
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_two_to_one(found, case):
    """Saved by two processes, loaded by this one."""
    processes.assert_passed(found[0], f"two to two {case_id(case)}")
    assert_resumes(*case, found[1] / f"two {case_id(case)}", None)


@needs_distributed
@pytest.mark.parametrize("recipe", ("mxfp8", "current"))
def test_rows_from_high_precision(found, recipe):
    """Rows of a tensor can be quantized by themselves unless their scale is that of all rows."""
    state = {"model": make(recipe, True).state_dict()}
    path = found[1] / "two none"
    processes.assert_passed(found[0], "two to two none")
    if recipe == "current":
        with pytest.raises(BaseException, match="its scale depends on all rows"):
            quietly(dcp.load, state, checkpoint_id=path)
        return
    quietly(dcp.load, state, checkpoint_id=path)
    source, whole = trained("none", False, False)[0], make(recipe, True)
    with torch.no_grad():
        whole[1].weight.copy_(source[1].weight)
    assert same_bytes(state["model"]["1.weight"], whole[1].weight)


# --- parts that are written to ------------------------------------------------------------------


@pytest.mark.parametrize("swizzled", (False, True))
@pytest.mark.parametrize("name", QUANTIZERS)
def test_narrow_writes_to_the_whole(name, swizzled, device):
    """Bytes of rows of one tensor take the place of those of another, in both orientations."""
    quantizer = QUANTIZERS[name](device)
    quantizer.optimize_for_gemm = swizzled
    shape, rows = (384, 160), slice(128, 256)
    x, y = random(shape, device), random(shape, device, seed=1)
    # One amax for both, also of transformed columns, so that scales of all rows agree.
    x[0, 0] = 100.0
    y[:16] = x[:16]
    if name == "nvfp4_row_scaled":  # columnwise, each column of the whole has an amax
        quantizer.set_usage(columnwise=False)
    whole, source = quantizer(x), quantizer(y)
    version = whole._version
    part = whole.narrow(0, 128, 128).detach()
    assert isinstance(part, type(whole)) and torch.equal(part, x_values(quantizer, x)[rows])
    part.copy_(source.narrow(0, 128, 128))
    x[rows] = y[rows]
    assert same_bytes(whole, quantizer(x)) and whole._version > version
    clone = whole.narrow(0, 0, 128).clone()
    clone.zero_()  # a copy of a part is no part
    assert same_bytes(whole, quantizer(x))


def x_values(quantizer, x):
    """What ``x`` is after quantization."""
    return quantizer(x).dequantize()


def test_narrow_where_blocks_are_cut(device):
    """Values, as from a slice."""
    q = QUANTIZERS["mxfp8"](device)(random((64, 96), device))
    assert torch.equal(q.narrow(0, 3, 5), q.dequantize()[3:8])
    assert torch.equal(q.narrow(1, 32, 32), q.dequantize()[:, 32:64])
    assert type(q.narrow(0, 0, 64)) is type(q)  # pylint: disable=unidiomatic-typecheck
    with pytest.raises(RuntimeError):
        q.narrow(0, 60, 5)


def test_ranks_of_this_file():
    """The shards above are halves."""
    assert WIDE % (128 * RANKS) == 0
