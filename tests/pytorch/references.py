# SPDX-License-Identifier: Apache-2.0
"""Models of the modules in float64, written without the package: formulas, autograd, no kernels.

With ``fp8`` every GEMM operand is replaced by the exact value of its FP8 code, which is found by
searching a table of all codes. With ``dtype`` results are rounded where modules store them in
that dtype. Float64 is wide enough that everything else is exact for the purpose of a comparison.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Optional

import torch

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
_LAYOUT = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}  # exponent bits, mantissa bits, bias


def leaf64(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """A float64 copy that collects a gradient."""
    return None if tensor is None else tensor.detach().double().requires_grad_()


# ---------------------------------------------------------------------------------------- formats


@lru_cache(maxsize=None)
def fp8_table(fmt: str) -> torch.Tensor:
    """float64 values of the 256 codes of a format, from its definition."""
    exponent_bits, mantissa_bits, bias = _LAYOUT[fmt]
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        value = (
            (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        )
        if fmt == "e4m3" and code & 0x7F == 0x7F:
            value = float("nan")
        if fmt == "e5m2" and exponent == (1 << exponent_bits) - 1:
            value = float("nan") if fraction else float("inf")
        values.append(sign * value)
    return torch.tensor(values, dtype=torch.float64)


def fp8_round(values: torch.Tensor, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8) and their float64 values: round to nearest, ties to even, saturate.

    NaN gives the positive NaN code 0x7F.
    """
    values = values.double()
    table = fp8_table(fmt).to(values.device)
    largest = int((table == FP8_MAX[fmt]).nonzero())
    finite = table[: largest + 1]
    magnitude = values.abs().clamp(max=FP8_MAX[fmt])
    above = torch.searchsorted(finite, magnitude.nan_to_num(0.0).contiguous())
    below = (above - 1).clamp(min=0)
    middle = (finite[below] + finite[above]) / 2
    take_above = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    codes = torch.where(take_above, above, below) + 0x80 * torch.signbit(values)
    codes = torch.where(values.isnan(), 0x7F, codes)
    return codes.to(torch.uint8), table[codes]


def current_scale(
    amax: torch.Tensor, fmt: str, pow2: bool = False, eps: float = 0.0
) -> torch.Tensor:
    """fp32 scale of current scaling for one amax."""
    amax = max(float(amax), torch.tensor(eps, dtype=torch.float32).item())
    if amax == 0 or amax == float("inf"):
        return torch.tensor(1.0)
    # The float64 quotient rounded to fp32 is the correctly rounded fp32 quotient.
    scale = torch.tensor(FP8_MAX[fmt] / amax, dtype=torch.float64).float()
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if pow2:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.tensor(0.5), exponent)
    return scale


def quantized(
    x: torch.Tensor,
    fmt: str,
    scale: Optional[torch.Tensor] = None,
    pow2: bool = False,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(codes uint8, float64 values of the codes, fp32 scale)``; current scaling without scale."""
    x = x.double()
    if scale is None:
        magnitude = x.abs().nan_to_num(0.0, posinf=float("inf"))
        amax = magnitude.max() if x.numel() else torch.tensor(0.0)
        scale = current_scale(amax, fmt, pow2, eps)
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    product = (x * scale.double()).float()  # fp32 times fp32 is exact in float64
    codes, values = fp8_round(product, fmt)
    return codes, values, scale


@dataclass(frozen=True)
class Fp8:
    """How the GEMM operands of one linear layer are quantized: formats, and scales if delayed."""

    x: str = "e4m3"
    w: str = "e4m3"
    g: str = "e5m2"
    pow2: bool = False
    eps: float = 0.0
    x_scale: Optional[float] = None
    w_scale: Optional[float] = None
    g_scale: Optional[float] = None

    @property
    def delayed(self) -> bool:
        """Whether scales are given instead of computed."""
        return self.x_scale is not None

    def fake(self, tensor: torch.Tensor, role: str) -> torch.Tensor:
        """float64 values that the operand ``role`` ("x", "w" or "g") has after quantization."""
        _, values, scale = quantized(
            tensor, getattr(self, role), getattr(self, role + "_scale"), self.pow2, self.eps
        )
        return values * (1.0 / scale.double()).float().double()


class _Fp8Linear(torch.autograd.Function):
    """``x @ w^T`` with quantized operands in all three GEMMs."""

    @staticmethod
    def forward(ctx, x, w, fp8):
        x, w = fp8.fake(x, "x"), fp8.fake(w, "w")
        ctx.save_for_backward(x, w)
        ctx.fp8 = fp8
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = ctx.fp8.fake(dy, "g")
        return dy @ w, dy.flatten(0, -2).t() @ x.flatten(0, -2), None


class _Rounded(torch.autograd.Function):
    """Rounds values and gradients to a dtype, in float64."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx, dy):
        return dy.to(ctx.dtype).double(), None


def rounded(x: torch.Tensor, dtype: Optional[torch.dtype]) -> torch.Tensor:
    """``x`` as it looks after being stored in ``dtype``; None leaves it alone."""
    return x if dtype is None else _Rounded.apply(x, dtype)


# ---------------------------------------------------------------------------------------- modules


def layer_norm(x, weight, bias=None, eps=1e-5, zero_centered=False):
    """LayerNorm over the last dimension."""
    gain = weight + 1 if zero_centered else weight
    centered = x - x.mean(-1, keepdim=True)
    y = centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * gain
    return y if bias is None else y + bias


def rms_norm(x, weight, eps=1e-5, zero_centered=False):
    """RMSNorm over the last dimension."""
    gain = weight + 1 if zero_centered else weight
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def norm(x, weight, bias, eps, zero_centered, normalization):
    """``layer_norm`` or ``rms_norm`` by name."""
    if normalization == "RMSNorm":
        return rms_norm(x, weight, eps, zero_centered)
    return layer_norm(x, weight, bias, eps, zero_centered)


def _gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _qgelu(x):
    return x * torch.sigmoid(1.702 * x)


def _silu(x):
    return x * torch.sigmoid(x)


def _srelu(x):
    return torch.relu(x).square()


UNGATED = {"gelu": _gelu, "qgelu": _qgelu, "relu": torch.relu, "srelu": _srelu, "silu": _silu}
GATED = {
    "glu": torch.sigmoid,
    "geglu": _gelu,
    "qgeglu": _qgelu,
    "reglu": torch.relu,
    "sreglu": _srelu,
    "swiglu": _silu,
}
ACTIVATIONS = [*UNGATED, *GATED, "clamped_swiglu"]


def activation(x, name, limit=7.0, alpha=1.702, offset=1.0):
    """One of the twelve activations; gated ones activate the first half of the last dimension."""
    if name in UNGATED:
        return UNGATED[name](x)
    a, g = x.chunk(2, dim=-1)
    if name in GATED:
        return GATED[name](a) * g
    a = torch.where(a > limit, limit, a)
    g = torch.where(g.abs() > limit, torch.sign(g).detach() * limit, g) + offset
    return a * torch.sigmoid(alpha * a) * g


def linear(x, weight, bias=None, *, fp8: Optional[Fp8] = None, dtype=None):
    """``x @ weight^T + bias``."""
    y = x @ weight.t() if fp8 is None else _Fp8Linear.apply(x, weight, fp8)
    return rounded(y if bias is None else y + bias, dtype)


def layernorm_linear(
    x,
    norm_weight,
    norm_bias,
    weight,
    bias=None,
    *,
    eps=1e-5,
    zero_centered=False,
    normalization="LayerNorm",
    fp8: Optional[Fp8] = None,
    dtype=None,
    return_norm=False,
):
    """Norm and linear; with ``return_norm`` also the norm output."""
    y = norm(x, norm_weight, norm_bias, eps, zero_centered, normalization)
    # Delayed scaling quantizes the unrounded norm output, unless that is returned too.
    y = rounded(y, None if fp8 is not None and fp8.delayed and not return_norm else dtype)
    out = linear(y, weight, bias, fp8=fp8, dtype=dtype)
    return (out, y) if return_norm else out


def layernorm_mlp(
    x,
    norm_weight,
    norm_bias,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    *,
    act="gelu",
    eps=1e-5,
    zero_centered=False,
    normalization="LayerNorm",
    fp8: Optional[tuple[Fp8, Fp8]] = None,
    dtype=None,
    return_norm=False,
    **activation_params,
):
    """Norm, linear, activation, linear; ``fp8`` is a pair, one per GEMM."""
    fp8_fc1, fp8_fc2 = fp8 or (None, None)
    hidden = layernorm_linear(
        x,
        norm_weight,
        norm_bias,
        fc1_weight,
        fc1_bias,
        eps=eps,
        zero_centered=zero_centered,
        normalization=normalization,
        fp8=fp8_fc1,
        dtype=dtype,
        return_norm=return_norm,
    )
    hidden, normalized = hidden if return_norm else (hidden, None)
    hidden = activation(hidden, act, **activation_params)
    hidden = rounded(hidden, None if fp8_fc2 is not None and fp8_fc2.delayed else dtype)
    out = linear(hidden, fc2_weight, fc2_bias, fp8=fp8_fc2, dtype=dtype)
    return (out, normalized) if return_norm else out
