# SPDX-License-Identifier: Apache-2.0
"""The plain-torch body of every leaf except the GEMM. These define the numbers.

They run on any device, do not synchronize with an accelerator, use explicit dtypes (the caller
disables ambient autocast) and return fresh tensors. Other backends must give the same FP8 bytes
and scales for the same values, and agree to the last bits of the output dtype elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats.fp8 import FLOAT32_MAX
from .reference_activation import activation_backward, activation_forward
from .reference_norm import norm_backward, norm_forward
from .reference_quantize import dequantize, quantize

__all__ = [
    "accumulate_",
    "activation_backward",
    "activation_forward",
    "bias_grad",
    "delayed_scaling_update_",
    "dequantize",
    "norm_backward",
    "norm_forward",
    "quantize",
    "record_amax_",
]


def bias_grad(dy: Tensor) -> Tensor:
    """Sum of ``dy`` [M, N] over the rows, in fp32, rounded once to the dtype of ``dy``; [N]."""
    return dy.sum(0, dtype=torch.float32).to(dy.dtype)


def accumulate_(total: Tensor, part: Tensor, add: bool) -> None:
    """``total += part`` or, without ``add``, ``total = part``, in the dtype of ``total``."""
    if add:
        total.add_(part)
    else:
        total.copy_(part)


def record_amax_(history: Tensor, amaxes: list[Tensor], slots: list[int]) -> None:
    """Raise ``history[0, slot]`` to each amax (fp32, one element), ignoring NaNs, in place.

    ``history`` is fp32 [L, n]; row 0 collects what was seen since the last update.
    """
    for amax, slot in zip(amaxes, slots):
        cell = history[0, slot : slot + 1]
        torch.fmax(cell, amax.view(1), out=cell)


def delayed_scaling_update_(
    history: Tensor, scale: Tensor, fp8_max: float, margin: float, algo: str
) -> None:
    """New scales from the amax history, and a history ready for the next step; in place.

    Args:
        history: fp32 [L, n]; row 0 holds the amaxes since the last update, the last row the newest
            of the earlier ones. A column whose row 0 is 0 (nothing was seen) is left as it is,
            and so is its scale.
        scale: fp32 [n], becomes ``fp8_max * 2^-margin / amax``; kept where the amax is not a
            positive finite number, the largest fp32 where the quotient overflows.
        algo: ``"max"`` over the history or ``"most_recent"``.
    """
    latest = history[0].clone()
    if algo == "max":
        amax = torch.where(torch.isnan(history), 0.0, history).amax(0)
    elif algo == "most_recent":
        amax = latest
    else:
        raise ValueError(
            f"The amax compute algorithm is {algo!r}. Use 'max' or 'most_recent', or give the "
            "recipe a function."
        )
    seen = latest != 0
    rolled = torch.roll(history, -1, 0)
    rolled[0].zero_()
    history.copy_(torch.where(seen, rolled, history))
    # A true division: `number / tensor` would be reciprocal-then-multiply, which rounds twice.
    quotient = torch.div(torch.full_like(amax, fp8_max * 2.0**-margin), amax)
    quotient = torch.where(torch.isinf(quotient), FLOAT32_MAX, quotient)
    valid = seen & torch.isfinite(amax) & (amax > 0)
    scale.copy_(torch.where(valid, quotient, scale))
