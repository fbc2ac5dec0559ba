# SPDX-License-Identifier: Apache-2.0
"""Triton bias gradients and the state of delayed scaling."""

import pytest
import torch
from triton_support import DEVICE, REASON, assert_close, poison_empty

from transformer_engine.pytorch.backends import reference
from transformer_engine.pytorch.backends import triton as kernels

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    poison_empty(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 40), (1, 16), (37, 50), (129, 70), (600, 33)])
def test_bias_grad(shape, dtype):
    torch.manual_seed(0)
    dy = torch.randn(shape, device=DEVICE).to(dtype)
    got = kernels.bias_grad(dy)
    assert_close(got, reference.bias_grad(dy), scale=max(shape[0], 1) ** 0.5)
    assert torch.equal(got, kernels.bias_grad(dy))


def test_importing_the_package_does_not_import_triton():
    import subprocess
    import sys

    code = (
        "import sys; from transformer_engine.pytorch.backends import triton as t;"
        "assert 'quantize' in dir(t) and not hasattr(t, 'gemm');"
        "sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("slots", [[2], [0, 1, 3], [3, 3, 1, 0, 2, 1], list(range(4)) * 3])
def test_record_amax(slots):
    torch.manual_seed(len(slots))
    history = torch.rand(5, 4, device=DEVICE)
    amaxes = [torch.rand(1, device=DEVICE) * 2 for _ in slots]
    expected = history.clone()
    reference.record_amax_(expected, amaxes, slots)
    kernels.record_amax_(history, amaxes, slots)
    assert torch.equal(history, expected)


@pytest.mark.parametrize("old, amax, new", [(1.0, NAN, 1.0), (NAN, 2.0, 2.0), (1.0, INF, INF)])
def test_record_amax_drops_nan(old, amax, new):
    history = torch.tensor([[0.5, old], [7.0, 7.0]], device=DEVICE)
    kernels.record_amax_(history, [torch.tensor([amax], device=DEVICE)], [1])
    assert history.tolist() == [[0.5, new], [7.0, 7.0]]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0.0, 2.0])
@pytest.mark.parametrize("length", [1, 2, 3, 16, 200])
def test_delayed_scaling_update(length, margin, algo):
    torch.manual_seed(length)
    history = torch.rand(length, 7, device=DEVICE) * 3
    # Nothing seen; infinite; so small that the scale overflows; zero throughout.
    history[0, 1], history[0, 2], history[:, 3], history[:, 4] = 0.0, INF, 1e-42, 0.0
    if length > 2:
        history[2, 5] = NAN
    scale = torch.rand(7, device=DEVICE) + 1
    expected = history.clone(), scale.clone()
    reference.delayed_scaling_update_(*expected, 448.0, margin, algo)
    kernels.delayed_scaling_update_(history, scale, 448.0, margin, algo)
    assert torch.equal(scale, expected[1])
    torch.testing.assert_close(history, expected[0], rtol=0, atol=0, equal_nan=True)


def test_delayed_scaling_update_of_nothing_and_of_an_unknown_algorithm():
    history, scale = torch.zeros(3, 0, device=DEVICE), torch.zeros(0, device=DEVICE)
    kernels.delayed_scaling_update_(history, scale, 448.0, 0.0, "max")
    with pytest.raises(ValueError, match="'min'"):
        kernels.delayed_scaling_update_(history, scale, 448.0, 0.0, "min")
