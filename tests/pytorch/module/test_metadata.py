# SPDX-License-Identifier: Apache-2.0
"""Precision metadata that frameworks read and write through methods of the base class."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import QuantizerRole


def trained(recipe, compiled=False):
    """A LayerNormMLP after one step under ``recipe``."""
    torch.manual_seed(0)
    module = te.LayerNormMLP(32, 64, device="cpu", name="mlp")

    def step(x):
        with te.autocast(recipe=recipe):
            return module(x)

    run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    run(torch.randn(16, 32)).sum().backward()
    return module


@pytest.mark.parametrize("compiled", [False, True])
def test_scaling_tensors_are_read_and_written(compiled):
    """Copies out, values in, ones and zeros without argument; the recipe state is live."""
    module = trained(DelayedScaling(amax_history_len=4), compiled)
    saved = module.get_fp8_meta_tensors()
    scale, history = saved["scaling_fwd"]
    assert scale.shape == (6,) and history.shape == (4, 6)
    assert (scale[[0, 1, 3, 4]] != 1.0).all() and (history[-1, [0, 1, 3, 4]] > 0.0).all()
    live = module.fp8_meta["scaling_fwd"]
    module.reset_fp8_meta_tensors()
    assert (live.scale == 1.0).all() and (live.amax_history == 0.0).all()
    module.reset_fp8_meta_tensors(saved)
    assert torch.equal(live.scale, scale) and torch.equal(live.amax_history, history)
    with pytest.raises(KeyError):
        module.reset_fp8_meta_tensors({"scaling_fwd": saved["scaling_fwd"]})
    assert torch.equal(live.scale, scale)


def test_history_length_is_adjusted():
    """The first rows stay and new ones are zero."""
    module = trained(DelayedScaling(amax_history_len=4))
    before = module.get_fp8_meta_tensors()["scaling_bwd"][1]
    module.adjust_amax_history_length(6)
    after = module.get_fp8_meta_tensors()["scaling_bwd"][1]
    assert torch.equal(after[:4], before) and (after[4:] == 0.0).all()


def test_without_delayed_scaling_there_are_no_tensors():
    """Current scaling keeps no state; writing is then a no-op."""
    module = trained(Float8CurrentScaling())
    assert module.get_fp8_meta_tensors() is None
    module.reset_fp8_meta_tensors()
    module.adjust_amax_history_length(2)
    assert not module.fp8_meta_tensors_initialized and module.fp8_initialized


def test_quantizer_roles():
    """Three roles per GEMM forward, two backward, repeated cyclically."""
    module = te.LayerNormMLP(32, 64, device="cpu", name="mlp")
    module.output_quantizer_role = QuantizerRole("dpa", "qkv", "next")
    forward = module.get_quantizer_roles(fwd=True, num_quantizers=7)
    assert [r.tensor_type for r in forward] == [
        *("input", "weight", "input", "input", "weight", "qkv", "input")
    ]
    assert [r.name for r in forward[:5]] == ["mlp.fc1", "mlp.fc1", "mlp.fc2", "mlp.fc2", "mlp.fc2"]
    backward = module.get_quantizer_roles(fwd=False, num_quantizers=4)
    assert backward[1] is None
    assert [r.name for r in backward if r is not None] == ["mlp.fc1", "mlp.fc2", "mlp.fc1"]


def test_delayed_weight_gradients_mark_their_parameters():
    """Frameworks skip post-backward hooks of these; norm parameters are not among them."""
    module = te.LayerNormLinear(32, 32, delay_wgrad_compute=True, device="cpu")
    marked = {n for n, p in module.named_parameters() if hasattr(p, "skip_backward_post_hook")}
    assert marked == {"weight", "bias"}


def test_is_fsdp2():
    """False for a module that nobody shards."""
    assert not te.Linear(16, 16, device="cpu").is_fsdp2
