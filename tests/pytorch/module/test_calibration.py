# SPDX-License-Identifier: Apache-2.0
"""Calibration in high precision, then FP8 inference, as `docs/recipes.rst` describes it."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from compile_support import GEMM_MODULES, K, Twins, build, random

SMALL = 1e-4  # far below what FP8 resolves with scales of 1
ROWS = 16


def calibrating(module, x, recipe):
    """High precision, while amaxes are recorded."""
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        return module(x)


def inference(module, x, recipe):
    """In FP8; leaves the scales alone."""
    with torch.no_grad(), te.autocast(recipe=recipe):
        return module(x)


@pytest.mark.feature("calibration", modes=("eager", "compiled"))
@pytest.mark.parametrize("grad", (True, False), ids=("grad", "no_grad"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_scales_of_calibration(kind, grad, device):
    """Regions record and leave scales alone; one call renews them; checkpoints have them."""
    recipe = DelayedScaling()
    module = build(kind, device, bias=False)
    twins = Twins(module, calibrating)
    data = [random(ROWS, K, device=device, seed=i) * SMALL * (i + 1) for i in (2, 1, 0)]
    with torch.set_grad_enabled(grad):
        wanted = [twins.forward(x, recipe, x_grad=grad).outputs[0][0] for x in data]
    assert (module._delayed_scaling.fwd_scale == 1).all()

    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
    twins.compare()
    scale = module._delayed_scaling.fwd_scale.cpu()
    for gemm, name in enumerate(module.weight_names):
        amax = getattr(module, name).detach().abs().max().float().cpu()
        assert scale[3 * gemm + 1] == 448.0 / amax
        assert scale[3 * gemm + 2] == 1  # outputs are not quantized
    if kind == "Linear":
        assert scale[0] == 448.0 / max(x.abs().max() for x in data).float().cpu()

    fresh = build(kind, device, seed=1, bias=False)
    fresh.load_state_dict(module.state_dict())
    for x, y in zip(data, wanted):
        out = inference(module, x, recipe)
        # E4M3 has three bits of mantissa: an operand is off by 2**-4 of itself at most.
        assert (out - y).norm() < 2**-4 * module.num_gemms * y.norm()
        assert torch.equal(inference(fresh, x, recipe), out)
    assert torch.equal(module._delayed_scaling.fwd_scale.cpu(), scale)


def test_without_renewal(device):
    """What the call is for: with scales of 1 small inputs are lost."""
    recipe, x = DelayedScaling(), random(ROWS, K, device=device) * SMALL
    module = build("Linear", device, bias=False)
    wanted = calibrating(module, x, recipe)
    assert (inference(module, x, recipe) - wanted).norm() > 0.5 * wanted.norm()
