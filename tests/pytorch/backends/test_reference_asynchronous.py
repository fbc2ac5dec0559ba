# SPDX-License-Identifier: Apache-2.0
"""The plain-torch leaves never make the host wait for a CUDA device."""

import pytest
import torch

import references
from transformer_engine.pytorch.backends import reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def error_on_synchronization():
    """Turns every wait into an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("quant", ["", "current,e4m3,0,0.0", "delayed,e5m2,0,0.0"])
@pytest.mark.usefixtures("error_on_synchronization")
def test_no_synchronization(quant):
    q = bool(quant)
    x = torch.zeros(24, 32, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(32, device="cuda")
    scale, history = torch.ones(2, device="cuda"), torch.ones(4, 2, device="cuda")
    for kind, bias in (("LayerNorm", weight), ("RMSNorm", None)):
        _, mean, rstd, *_ = reference.norm_forward(
            x, weight, bias, 1e-5, True, kind, quant, scale, 1, q, q, True
        )
        reference.norm_backward(x, x, x, mean, rstd, weight, True, kind, True, True)
    for act in references.ACTIVATIONS:
        dy = x if act in references.UNGATED else x[:, :16].contiguous()
        options = (act, 7.0, 1.702, 1.0, quant, scale, 1, q, q, True)
        reference.activation_forward(x, *options)
        reference.activation_backward(dy, x, *options, True)
    reference.bias_grad(x)
    reference.record_amax_(history, [scale[:1], scale[1:]], [1, 0])
    reference.delayed_scaling_update_(history, scale, 448.0, 0.0, "max")
    if q:
        row, col, scale_inv, _ = reference.quantize(x, quant, scale, 1, None, True, True)
        for data in (row, col):
            reference.dequantize(data, scale_inv, quant, torch.bfloat16)
            reference.fp8_matmul_operand(data, quant)
