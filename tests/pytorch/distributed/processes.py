# SPDX-License-Identifier: Apache-2.0
"""Runs checks in two processes (gloo, CPU), and says in the first one what went wrong.

A test file has a dictionary ``CHECKS``: for each label a function and its arguments, which both
processes call in this order, after the rank. Processes are started once per file.
"""

import datetime
import importlib
import os
import queue
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch

RANKS = 2
TIMEOUT = datetime.timedelta(seconds=90)  # of a collective whose partner failed

for _folder in ("module", "tensor"):  # their helpers are used here as well
    _path = str(Path(__file__).parent.parent / _folder)
    if _path not in sys.path:
        sys.path.append(_path)

needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="PyTorch without distributed"
)


def work(rank, name, store, results, folder):
    """One process."""
    torch.set_num_threads(1)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    os.environ["TE_TEST_FOLDER"] = folder
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=TIMEOUT
    )
    for label, (check, *arguments) in importlib.import_module(name).CHECKS.items():
        reset()
        try:
            check(rank, *arguments)
        except BaseException:  # pylint: disable=broad-exception-caught
            results.put((label, traceback.format_exc()))
        else:
            results.put((label, ""))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def reset():
    """No check sees what another one left behind."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def run_checks(name, folder):
    """``{label: [problem or "" of each process]}`` of the module ``name``.

    ``folder``: an empty one, whose path the processes find in the environment.
    """
    checks = importlib.import_module(name).CHECKS
    context = torch.multiprocessing.get_context("spawn")
    results, store = context.Queue(), folder / "store"
    processes = [
        context.Process(target=work, args=(rank, name, str(store), results, str(folder)))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    found = {label: [] for label in checks}
    deadline = time.monotonic() + 600
    while sum(len(problems) for problems in found.values()) < RANKS * len(checks):
        try:
            label, problem = results.get(timeout=1)
            found[label].append(problem)
        except queue.Empty:
            dead = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
            if dead or time.monotonic() > deadline:
                break
    for process in processes:
        process.join(30)
        if process.is_alive():
            process.kill()
    return found


def assert_passed(found, label):
    """Fail with what the processes reported."""
    problems = found[label]
    assert len(problems) == RANKS, f"a process ended before it finished {label!r}"
    assert not any(problems), "\n".join(filter(None, problems))


def mesh():
    """Both processes in a row."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (RANKS,))


def folder():
    """The one that `run_checks` was given."""
    return Path(os.environ["TE_TEST_FOLDER"])


def everybody(value):
    """What each rank has."""
    values = [None] * RANKS
    torch.distributed.all_gather_object(values, value)
    return values
