# SPDX-License-Identifier: Apache-2.0
"""Norms and activations that quantize with block scales: buffers follow from their own outputs."""

import pytest
import torch
from test_triton_block_scaled import poisoned_memory, same, seed  # pylint: disable=unused-import
from triton_support import DEVICE, REASON, assert_close

from transformer_engine.pytorch.backends import reference
from transformer_engine.pytorch.backends import triton as kernels
from transformer_engine.pytorch.formats.fp8 import amax_of
from transformer_engine.pytorch.formats.layout import Quantized
from transformer_engine.pytorch.formats.spec import decode_quant

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

QUANTS = (
    "block,e4m3,pow2=1",
    "block,e5m2,dim=2",
    "mxfp8,e4m3,swizzled=1",
    "nvfp4,e2m1,dim=2",
    "nvfp4,e2m1,rht=1",
    "nvfp4,e2m1,row_scaled=1",
    "nvfp4,e2m1,four_over_six=mae",
)
PARAMETERS = (2.0, 1.702, -1.0)  # limit, alpha, offset


def norm_inputs(shape, kind):
    torch.manual_seed(shape[0])
    x = (torch.randn(shape, device=DEVICE) * 2 + 1).bfloat16()
    weight = torch.randn(shape[1], device=DEVICE).bfloat16()
    bias = torch.randn(shape[1], device=DEVICE).bfloat16() if kind == "LayerNorm" else None
    return x, weight, bias


def norm(tensors, kind, quant, want_output, orientations=(True, True)):
    return kernels.norm_forward(
        *tensors, 1e-5, True, kind, quant, None, 0, *orientations, want_output
    )


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(
    "kind, shape, want_output",
    [("LayerNorm", (70, 96), False), ("RMSNorm", (40, 160), True), ("LayerNorm", (0, 64), False)],
)
def test_norm(kind, shape, want_output, quant):
    tensors = norm_inputs(shape, kind)
    y, mean, rstd, *_ = norm(tensors, kind, "", True)
    out = norm(tensors, kind, quant, want_output)
    assert (out[0] is not None) == want_output and (out[1] is None) == (mean is None)
    if want_output:
        assert torch.equal(out[0], y)
    assert torch.equal(out[2], rstd)
    same(out[3:], reference.quantize(y, quant, None, 0, None, True, True, None), quant)


@pytest.mark.parametrize("want_output", [False, True])
def test_norm_quantized_before_it_is_rounded(want_output):
    tensors = norm_inputs((70, 96), "RMSNorm")
    quant = "mxfp8,e4m3,unrounded=1"
    exact = norm((tensors[0].float(), *tensors[1:]), "RMSNorm", "", True)[0]
    out = norm(tensors, "RMSNorm", quant, want_output)
    same(out[3:], reference.quantize(exact, quant, None, 0, None, True, True, None), quant)
    if want_output:
        assert torch.equal(out[0], exact.bfloat16())


@pytest.mark.parametrize("rows", [70, 128])
def test_norm_whose_rows_decide(rows):
    tensors = norm_inputs((rows, 96), "RMSNorm")
    known = f"mxfp8,e4m3,unrounded={int(rows == 128)}"
    want = Quantized(*norm(tensors, "RMSNorm", known, False)[3:])
    same(norm(tensors, "RMSNorm", "mxfp8,e4m3,unrounded=2", False)[3:], want, known)


@pytest.mark.parametrize("orientations", [(True, False), (False, True)])
@pytest.mark.parametrize("quant", QUANTS[:1] + QUANTS[2:5])
def test_norm_in_one_orientation(quant, orientations):
    tensors = norm_inputs((40, 64), "RMSNorm")
    y = norm(tensors, "RMSNorm", "", True)[0]
    out = norm(tensors, "RMSNorm", quant, False, orientations)
    same(out[3:], reference.quantize(y, quant, None, 0, None, *orientations, None), quant)


def activation_inputs(shape, gates):
    torch.manual_seed(shape[0])
    x = (torch.randn(shape[0], shape[1] * gates, device=DEVICE) * 3).bfloat16()
    return torch.randn(shape, device=DEVICE).bfloat16(), x


def run(tensors, act, quant, backward, want_output, bias_grad=True, orientations=(True, True)):
    dy, x = tensors
    arguments = (act, *PARAMETERS, quant, None, 0, *orientations, want_output)
    if backward:
        return kernels.activation_backward(dy, x, *arguments, bias_grad, seed())
    return (*kernels.activation_forward(x, *arguments), None)


def check_activation(tensors, act, quant, backward, want_output, orientations=(True, True)):
    values, *_, dbias = run(tensors, act, "", backward, True)
    spec, amax = decode_quant(quant), None
    if spec.kind == "nvfp4" and not (spec.rht or spec.row_scaled):
        # The global amax is that of the values before they are rounded.
        amax = amax_of(run(tuple(t.float() for t in tensors), act, "", backward, True)[0])
    y, *quantized, grad = run(tensors, act, quant, backward, want_output, True, orientations)
    assert (y is not None) == want_output and (grad is None) == (dbias is None)
    if want_output:
        assert torch.equal(y, values)
    if backward:
        assert_close(grad, dbias, scale=8.0 * max(values.shape[0], 1) ** 0.5)
    wanted = reference.quantize(values, quant, None, 0, amax, *orientations, seed())
    same(quantized, wanted, quant)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(
    "act, gates, shape, want_output",
    [
        ("gelu", 1, (40, 96), False),
        ("swiglu", 2, (70, 128), True),
        ("clamped_swiglu", 2, (33, 96), False),  # halves that share blocks of 128
        ("srelu", 1, (0, 64), False),
        ("swiglu", 2, (0, 128), False),
    ],
)
def test_activation(act, gates, shape, want_output, quant, backward):
    check_activation(activation_inputs(shape, gates), act, quant, backward, want_output)


@pytest.mark.parametrize(
    "quant, act, gates, shape",
    [(quant, "swiglu", 2, (140, 256)) for quant in QUANTS[:3]]
    + [(quant, "gelu", 1, (130, 160)) for quant in QUANTS[:3]]
    + [(quant, "gelu", 1, (5, 33)) for quant in QUANTS[:2]],
)
def test_gradient_of_several_tiles(quant, act, gates, shape):
    """Also the sums of columns over several rows of tiles, and rows without alignment."""
    check_activation(activation_inputs(shape, gates), act, quant, True, False)


@pytest.mark.parametrize("orientations", [(True, False), (False, True)])
@pytest.mark.parametrize("quant", QUANTS[:1] + QUANTS[2:5])
def test_gradient_in_one_orientation(quant, orientations):
    tensors = activation_inputs((40, 128), 2)
    check_activation(tensors, "swiglu", quant, True, False, orientations)


@pytest.mark.parametrize("quant", ["nvfp4,e2m1,stochastic=1", "nvfp4,e2m1,rht=1,stochastic=1"])
def test_gradient_rounded_stochastically(quant):
    check_activation(activation_inputs((40, 128), 2), "swiglu", quant, True, False)


def test_gradient_without_that_of_a_bias():
    tensors = activation_inputs((20, 64), 1)
    _, *quantized, dbias = run(tensors, "gelu", QUANTS[0], True, False, bias_grad=False)
    _, *wanted, _ = run(tensors, "gelu", QUANTS[0], True, False, bias_grad=True)
    assert dbias is None
    assert all(torch.equal(q, w) for q, w in zip(quantized, wanted) if w is not None)
