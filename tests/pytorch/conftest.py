# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests of transformer_engine.pytorch."""

import os
import sys

import pytest
import torch
from torch._C._dynamo import guards

import feature_report
import thinning

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
if os.environ.get("TEST_DEVICE"):  # run the tests of one of them only
    DEVICES = [os.environ["TEST_DEVICE"]]

# Test processes that run side by side would wait for each other's threads most of the time.
torch.set_num_threads(1)


def pytest_configure(config):
    """Markers of these tests."""
    config.addinivalue_line(
        "markers",
        "feature(name, modes, modules, no, others, other_modules): a row of docs/features.rst",
    )


def pytest_collection_modifyitems(config, items):
    """See thinning.py and feature_report.py, the latter also for the two below."""
    thinning.thin(config, items)
    feature_report.attach(items)


def pytest_report_header(config):
    """Say so where not all cases run."""
    if thinning.narrow(config):
        return "a part of the largest matrices (tests/pytorch/thinning.py); TEST_WIDE=1 runs all"
    return None


def pytest_runtest_logreport(report):
    """For each phase of each test."""
    feature_report.record(report)


def pytest_sessionfinish(session):
    """After the last test."""
    feature_report.write(session)


@pytest.fixture(params=DEVICES)
def device(request):
    """Each device there is."""
    return request.param


@pytest.fixture(autouse=True)
def fresh_state():
    """No test sees FP8 state or compiled code that another one left behind."""
    yield
    quantization = sys.modules.get("transformer_engine.pytorch.quantization")
    if quantization is not None:
        quantization.FP8GlobalStateManager.reset()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def _poison(tensor):
    """Fill fresh memory so that reading it before writing it shows."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(0xA5) if tensor.dtype == torch.uint8 else tensor.fill_(0x5A)


@pytest.fixture
def poison_empty(monkeypatch):
    """``torch.empty``, ``empty_like`` and ``new_empty`` return NaN or 0xA5 bytes, not leftovers."""
    _forget_plans()  # they know how memory was taken

    def poisoned(function):
        return lambda *args, **kwargs: _poison(function(*args, **kwargs))

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (guards, "_empty_strided_cuda"),  # of the Triton backend
    ):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    yield
    _forget_plans()


def _forget_plans():
    plans = sys.modules.get("transformer_engine.pytorch.core.plans")
    if plans is not None:
        plans._PLANS.clear()
