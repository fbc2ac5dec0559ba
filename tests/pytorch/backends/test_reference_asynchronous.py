# SPDX-License-Identifier: Apache-2.0
"""The plain-torch leaves never make the host wait for a CUDA device."""

import pytest
import torch

import references
from transformer_engine.pytorch.backends import reference
from transformer_engine.pytorch.formats.fp8 import fp8_matmul_operand

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def error_on_synchronization():
    """Turns every wait into an error."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


QUANTS = (
    "",
    "current,e4m3",
    "delayed,e5m2",
    "block,e4m3",
    "block,e5m2,pow2=1,dim=2",
    "mxfp8,e4m3,swizzled=1",
    "mxfp8,e4m3,dim=2",
    "nvfp4,e2m1,dim=2",
    "nvfp4,e2m1,rht=1,swizzled=1,stochastic=1",
    "nvfp4,e2m1,row_scaled=1",
    "nvfp4,e2m1,four_over_six=mae,e4m3_max=256",
)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.usefixtures("error_on_synchronization")
def test_no_synchronization(quant):
    q = bool(quant)
    x = torch.zeros(24, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(64, device="cuda")
    rng = torch.ones(2, dtype=torch.int64, device="cuda") if "stochastic" in quant else None
    scale, history = torch.ones(2, device="cuda"), torch.ones(4, 2, device="cuda")
    forward_quant = quant.replace(",stochastic=1", "")  # only gradients are rounded by chance
    for kind, bias in (("LayerNorm", weight), ("RMSNorm", None)):
        _, mean, rstd, *_ = reference.norm_forward(
            x, weight, bias, 1e-5, True, kind, forward_quant, scale, 1, q, q, True
        )
        reference.norm_backward(x, x, x, mean, rstd, weight, True, kind, True, True)
    for act in references.ACTIVATIONS:
        dy = x if act in references.UNGATED else x[:, :32].contiguous()
        options = (act, 7.0, 1.702, 1.0)
        reference.activation_forward(x, *options, forward_quant, scale, 1, q, q, True)
        reference.activation_backward(dy, x, *options, quant, scale, 1, q, q, True, True, rng)
    reference.bias_grad(x)
    reference.record_amax_(history, [scale[:1], scale[1:]], [1, 0])
    reference.delayed_scaling_update_(history, scale, 448.0, 0.0, "max")
    if q:
        row, col, scale_inv, col_scale_inv, amax, col_amax = reference.quantize(
            x, quant, scale, 1, None, True, True, rng
        )
        if col_scale_inv is None:
            col_scale_inv = scale_inv
            for data in (row, col):
                fp8_matmul_operand(data, quant.split(",")[1])
        reference.dequantize(row, scale_inv, amax, quant, False, torch.bfloat16)
        reference.dequantize(col, col_scale_inv, col_amax, quant, True, torch.bfloat16)
