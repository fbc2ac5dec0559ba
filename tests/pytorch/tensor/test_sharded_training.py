# SPDX-License-Identifier: Apache-2.0
"""Quantized parameters under FSDP2 and DDP, on two processes, against one process."""

# pylint: disable=unidiomatic-typecheck  # the very class is meant

import copy
import os
import traceback

import pytest
import torch
from tensor_support import QUANTIZERS, buffers, random, same_bytes

RANKS = 2
SHAPE = (256, 160)
NAMES = list(QUANTIZERS)


class Linear(torch.nn.Module):
    """A linear layer with a quantized weight."""

    def __init__(self, name):
        super().__init__()
        x = random(SHAPE, dtype=torch.bfloat16)
        quantizer = QUANTIZERS[name]("cpu")
        if name == "nvfp4_row_scaled":  # columnwise, each column of the whole has an amax
            quantizer.set_usage(columnwise=False)
        self.weight = torch.nn.Parameter(quantizer(x))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


def train(layer, weight, steps=3):
    """Some steps of Adam; the outputs."""
    optimizer = torch.optim.Adam([weight], lr=0.05)
    outputs = []
    for step in range(steps):
        y = layer(random((8, SHAPE[1]), seed=step))
        outputs.append(y.detach().clone())
        (y * random(y.shape, seed=10 + step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def check_fsdp(name, rank):
    """Bytes of every shard and of the gathered weight are those of one process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer, single = Linear(name), Linear(name)
    kind = type(single.weight)
    fully_shard(layer, mesh=init_device_mesh("cpu", (RANKS,)))
    shard = layer.weight._local_tensor
    assert type(shard) is kind and shard.shape == (SHAPE[0] // RANKS, SHAPE[1])
    assert same_bytes(shard, single.weight.detach().split(SHAPE[0] // RANKS)[rank])
    for actual, expected in zip(train(layer, layer.weight), train(single, single.weight)):
        assert torch.equal(actual, expected)
    layer.unshard()
    assert type(layer.weight) is kind and layer.weight.shape == SHAPE
    assert same_bytes(layer.weight.detach(), single.weight.detach())
    layer.reshard()
    assert sum(b.numel() for b in buffers(layer.weight._local_tensor) if b is not None) < (
        0.6 * sum(b.numel() for b in buffers(single.weight) if b is not None)
    )


def check_ddp(name, rank):
    """All ranks agree, bit by bit, whatever they start with."""
    layer = Linear(name)
    with torch.no_grad():
        layer.weight.mul_(1.0 + rank)
    wrapped = torch.nn.parallel.DistributedDataParallel(layer)
    train(wrapped, layer.weight)
    mine = [None if b is None else b.clone() for b in buffers(layer.weight)]
    everybody = [None] * RANKS
    torch.distributed.all_gather_object(everybody, mine)
    for a, b in zip(*everybody):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))
    assert not same_bytes(layer.weight, Linear(name).weight)


def check_errors(rank):
    """Sizes that do not divide are refused before anything is sent."""
    del rank

    class Mesh:
        """As much of a mesh as is looked at."""

        @staticmethod
        def size():
            return 3

        @staticmethod
        def get_group():
            return None

    shard = Linear("mxfp8").weight.detach()
    with pytest.raises(ValueError, match="no multiple of 3"):
        shard.fsdp_pre_all_gather(Mesh, (700, SHAPE[1]), None, None, None)
    rows = copy.deepcopy(QUANTIZERS["block_1d"]("cpu"))(random((64, 160)))
    with pytest.raises(ValueError, match="no multiple of 128"):
        rows.fsdp_pre_all_gather(Mesh, (192, 160), None, None, None)
    row_scaled = QUANTIZERS["nvfp4_row_scaled"]("cpu")(random((64, 160)))
    with pytest.raises(ValueError, match="Drop them"):
        row_scaled.fsdp_pre_all_gather(Mesh, (192, 160), None, None, None)


def work(rank, store, results):
    """One process: every check, and what went wrong."""
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    checks = [(f"fsdp {name}", check_fsdp, (name, rank)) for name in NAMES]
    checks += [(f"ddp {name}", check_ddp, (name, rank)) for name in NAMES]
    checks += [("errors", check_errors, (rank,))]
    for label, check, arguments in checks:
        try:
            check(*arguments)
        except Exception:  # pylint: disable=broad-exception-caught
            results.put((label, traceback.format_exc()))
        else:
            results.put((label, ""))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What the checks of all processes found, by label."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    store = tmp_path_factory.mktemp("sharded") / "store"
    processes = [
        context.Process(target=work, args=(rank, str(store), results)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    count = RANKS * (2 * len(NAMES) + 1)
    found = {}
    for _ in range(count):
        label, problem = results.get(timeout=300)  # or a process has died
        found.setdefault(label, []).append(problem)
    for process in processes:
        process.join(60)
    return found


@pytest.mark.parametrize(
    "label", [f"{kind} {name}" for kind in ("fsdp", "ddp") for name in NAMES] + ["errors"]
)
def test_two_processes(outcome, label):
    assert outcome[label] == ["", ""], outcome[label][0] or outcome[label][1]
