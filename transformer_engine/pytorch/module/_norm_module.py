# SPDX-License-Identifier: Apache-2.0
"""What ``LayerNorm`` and ``RMSNorm`` have in common."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Optional, Union

import torch
from torch import Tensor

from ..core.config import norm_config
from ..dynamo.capability import compiled_or_eager
from ..dynamo.module_function import run_module_op
from ..environment import norm_sm_margin
from .base import resolve_device
from .checks import autocast_dtype, check_construction, check_input, shape_text, wanted_gradients
from .extra_state import OptionalExtraState

_NO_BWD_STATE = (None, None, (), None)
_MARGINS = (("forward", "FWD"), ("backward", "BWD"), ("inference", "INF"))


class NormModule(OptionalExtraState, torch.nn.Module):
    """A norm over the trailing dimensions ``normalized_shape``, with affine parameters.

    Arithmetic is fp32; the output has the dtype of the weight (of ``torch.autocast`` inside of it)
    and the input is cast to that dtype first, as in the reference package.
    """

    kind = ""
    fsdp_group = None
    name = "norm"

    def __init__(
        self,
        normalized_shape: Optional[Union[int, Iterable[int]]] = None,
        eps: float = 1e-5,
        sequence_parallel: Optional[bool] = None,
        params_dtype: Optional[torch.dtype] = None,
        zero_centered_gamma: bool = False,
        hidden_size: Optional[int] = None,
        *,
        device=None,
        dtype: Optional[torch.dtype] = None,
        sm_margin: Union[int, dict] = 0,
    ) -> None:
        super().__init__()
        if params_dtype is not None:
            if dtype is not None:
                raise RuntimeError(
                    f"{type(self).__name__} was given both dtype={dtype} and its alias"
                    f" params_dtype={params_dtype}; pass one of them."
                )
            dtype = params_dtype
        check_construction(self, dtype)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self._sm_margins = _sm_margins(sm_margin)
        self._config = norm_config(self.kind, eps, zero_centered_gamma)
        shape = self._shape(normalized_shape, hidden_size)
        device = resolve_device("cuda" if device is None else device)
        for name in self._parameter_names():
            data = torch.empty(shape, dtype=dtype or torch.get_default_dtype(), device=device)
            self.register_parameter(name, torch.nn.Parameter(data))
        if device.type != "meta":
            self.reset_parameters()

    def _shape(self, normalized_shape, hidden_size) -> tuple:
        name = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            given = "neither" if normalized_shape is None else "both"
            raise RuntimeError(
                f"{name} was given {given} of normalized_shape and its deprecated alias"
                " hidden_size; pass normalized_shape."
            )
        if hidden_size is not None:
            warnings.warn(
                f"hidden_size of {name} is deprecated; pass normalized_shape.",
                DeprecationWarning,
                stacklevel=4,
            )
            normalized_shape = hidden_size
        shape = normalized_shape if isinstance(normalized_shape, Iterable) else (normalized_shape,)
        for size in (shape := tuple(shape)):
            check_construction(self, None, normalized_shape=size)
        return shape

    def _parameter_names(self) -> tuple:
        return ("weight", "bias") if self.kind == "LayerNorm" else ("weight",)

    def reset_parameters(self, defer_init: Optional[bool] = None) -> None:
        """Materialise parameters that are on meta and set them to the identity."""
        if defer_init is not None:
            warnings.warn(
                "defer_init of reset_parameters is deprecated; build with device='meta'.",
                DeprecationWarning,
                stacklevel=2,
            )
            if defer_init:
                return
        for name in self._parameter_names():
            param = getattr(self, name)
            if param.is_meta:
                data = torch.empty_like(param, device=resolve_device("cuda"))
                param = torch.nn.Parameter(data, requires_grad=param.requires_grad)
                setattr(self, name, param)
            one = name == "weight" and not self.zero_centered_gamma
            with torch.no_grad():
                param.fill_(1.0 if one else 0.0)
            if self.sequence_parallel is not None:
                param.sequence_parallel = self.sequence_parallel

    def call_obstacle(self, *args, **kwargs) -> str:
        """Why a call with these arguments can not be traced; empty: it always can."""
        del args, kwargs
        return self.unsupported_in_graph()

    def unsupported_in_graph(self) -> str:
        """Why this module can not be traced; empty: it always can."""
        return ""

    def get_extra_state(self) -> Tensor:
        """Norms have no state beside their parameters: an empty tensor."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state) -> None:
        """Accept the extra state of any checkpoint; there is nothing to restore."""

    @compiled_or_eager
    def forward(self, inp: Tensor) -> Tensor:
        """``inp [..., *normalized_shape]`` to a tensor of the same shape."""
        weight, bias = self.weight, getattr(self, "bias", None)
        if weight.is_meta and isinstance(inp, Tensor) and not inp.is_meta:
            self.reset_parameters()
            weight, bias = self.weight, getattr(self, "bias", None)
        check_input(self, inp, weight)
        shape = weight.shape
        if tuple(inp.shape[inp.dim() - len(shape) :]) != tuple(shape):
            raise ValueError(
                f"The input of {type(self).__name__} has shape {shape_text(inp.shape)}, but its"
                f" trailing dimensions must be {tuple(shape)} (normalized_shape)."
            )
        dtype = autocast_dtype(inp.device.type) or weight.dtype
        x = inp if inp.dtype == dtype else inp.to(dtype)
        rows, columns = math.prod(inp.shape[: inp.dim() - len(shape)]), math.prod(shape)
        x = x.reshape(rows, columns).contiguous()
        weight = weight.reshape(columns)
        bias = None if bias is None else bias.reshape(columns)
        if weight.dtype != dtype:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        need = wanted_gradients(("x", "ln_weight", "ln_bias"), (x, weight, bias))
        outputs = run_module_op(
            "normalization",
            f"{self._config};need={need}",
            _NO_BWD_STATE,
            (x, weight, bias),
            train=bool(need),
        )
        return outputs[0].view(inp.shape)

    def extra_repr(self) -> str:
        """Shape and options."""
        shape = tuple(self.weight.shape)
        return f"{shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _sm_margins(sm_margin: Union[int, dict]) -> dict:
    """Multiprocessors that norm kernels leave free; kept for API users, kernels here need none."""
    given = dict(sm_margin) if isinstance(sm_margin, dict) else {}
    default = sm_margin if isinstance(sm_margin, int) else 0
    return {key: given.get(key, norm_sm_margin(variable) or default) for key, variable in _MARGINS}


def deprecated_margin(key: str, old: str):
    """A deprecated integer property over ``_sm_margins[key]``."""

    def warn() -> None:
        message = f"{old} is deprecated; use the constructor argument sm_margin."
        warnings.warn(message, DeprecationWarning, stacklevel=3)

    def read(self) -> int:
        warn()
        return self._sm_margins[key]

    def write(self, value: int) -> None:
        warn()
        self._sm_margins[key] = value

    return property(read, write, doc=f"Deprecated: ``_sm_margins[{key!r}]``.")
