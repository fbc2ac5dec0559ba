# SPDX-License-Identifier: Apache-2.0
"""A small module with delayed scaling, for tests of the state and not of the modules that have it.

Its operands pass through the leaf ops: a compiler must not recompute them in the backward from
scales that changed.
"""

import torch

from transformer_engine.pytorch.core import delayed_scaling
from transformer_engine.pytorch.core.ops import kernels
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

E4M3, E5M2 = "delayed,e4m3", "delayed,e5m2"


def quantized(x, quant, scale, slot):
    """``(x as the format holds it, amax [1])``, by the leaf ops."""
    k = kernels()
    row, _, scale_inv, _, amax, _ = k.quantize(x, quant, scale, slot, None, True, False, None)
    return k.dequantize(row, scale_inv, None, quant, False, x.dtype), amax


class ToyFunction(torch.autograd.Function):
    """``x * w`` with quantized operands; quantized gradients in the backward. All are ``[rows,
    features]``.
    """

    @staticmethod
    def forward(ctx, x, w, fwd_scale, bwd_scale, bwd_history, update):
        x_q, amax_x = quantized(x, E4M3, fwd_scale, 0)
        w_q, amax_w = quantized(w, E4M3, fwd_scale, 1)
        ctx.save_for_backward(x_q, w_q)
        ctx.bwd_scale, ctx.bwd_history, ctx.update = bwd_scale, bwd_history, update
        ctx.mark_non_differentiable(amax_x, amax_w)
        return x_q * w_q, amax_x, amax_w

    @staticmethod
    def backward(ctx, dy, *_):
        x_q, w_q = ctx.saved_tensors
        dy_q, amax = quantized(dy.contiguous(), E5M2, ctx.bwd_scale, 0)
        delayed_scaling.record_backward(ctx.bwd_history, [amax], [0])
        if ctx.update is not None:
            delayed_scaling.update_backward(ctx.bwd_history, ctx.bwd_scale, ctx.update)
        return dy_q * w_q, (dy_q * x_q).sum(0, keepdim=True), None, None, None, None


class Toy(torch.nn.Module):
    """``x * w``, ``x [rows, features]``, ``w [1, features]``, with three forward and two backward
    slots.
    """

    def __init__(self, features=8, seed=0, device="cpu"):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = torch.nn.Parameter(torch.randn(1, features, generator=generator).to(device))
        self._delayed_scaling = None
        delayed_scaling.register(self)

    def __setstate__(self, state):
        super().__setstate__(state)
        delayed_scaling.register(self)

    def delayed_slots(self):
        """Slots of one GEMM."""
        return 3, 2

    def delayed_device(self):
        """Where the parameters are, None on meta."""
        return None if self.w.is_meta else self.w.device

    def forward(self, x):
        state = FP8GlobalStateManager.quantization_state
        if state.kind != "delayed":
            return x * self.w
        scaling = delayed_scaling.state_of(self, delayed_scaling.REGION.rule)
        delayed_scaling.enter(scaling, delayed_scaling.REGION.rule)
        update = delayed_scaling.enter_backward(scaling) if torch.is_grad_enabled() else None
        y, amax_x, amax_w = ToyFunction.apply(
            x, self.w, scaling.fwd_scale, scaling.bwd_scale, scaling.bwd_history, update
        )
        delayed_scaling.record_forward(scaling, [amax_x, None, amax_w], [0, 2, 1])
        return y
