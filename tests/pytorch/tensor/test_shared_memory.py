# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors in shared memory, and through interfaces that read memory directly.

The tensors have no memory of their own, so torch would crash: each test is a process of its own.
"""

import os
import subprocess
import sys

import pytest

# Each recipe with another format; a child process writes, its parent reads.
SHARED_BETWEEN_PROCESSES = """
import os, torch
import transformer_engine.pytorch as te
from recipe_list import recipe_of

torch.set_num_threads(1)
for name in ("delayed", "current", "block", "mxfp8", "nvfp4_plain", "custom_two_formats"):
    with te.quantized_model_init(recipe=recipe_of(name)):
        module = te.LayerNormMLP(64, 96, params_dtype=torch.bfloat16, device="cpu")
    before = {key: param.detach().clone() for key, param in module.named_parameters()}
    assert not module.fc1_weight.is_shared()
    assert module.share_memory() is module
    for key, param in module.named_parameters():
        assert param.is_shared() and torch.equal(param, before[key]), (name, key)
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            module.fc1_weight.copy_(torch.full_like(module.fc1_weight, 2.0))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
    assert (module.fc1_weight.dequantize() == 2).all(), name
    assert torch.equal(module.fc2_weight, before["fc2_weight"]), name
    with te.autocast(recipe=recipe_of(name)):
        module(torch.randn(32, 64, dtype=torch.bfloat16)).sum().backward()
    assert module.fc1_weight.grad.abs().sum() > 0, name
"""

# Every kind of quantizer, for what torch's own code would read at address 0.
OTHER_INTERFACES = """
import torch
from tensor_support import QUANTIZERS

x = torch.randn(64, 96, dtype=torch.bfloat16)
for name, make in QUANTIZERS.items():
    q = make("cpu")(x)
    values = q.dequantize()
    assert torch.equal(torch.from_dlpack(q), values), name
    assert torch.equal(q.share_memory_().dequantize(), values) and q.is_shared(), name
    q.apply_(lambda value: 1.0)
    assert (q.dequantize() == 1).all(), name
"""


@pytest.mark.parametrize("script", (SHARED_BETWEEN_PROCESSES, OTHER_INTERFACES))
def test_no_crash(script):
    """Other processes see what one writes; values leave and enter through Python and DLPack."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = [os.path.dirname(tests[: -len("/pytorch")]), f"{tests}/module", f"{tests}/tensor"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
