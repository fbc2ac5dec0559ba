# SPDX-License-Identifier: Apache-2.0
"""The norm inside of ``LayerNormLinear`` and ``LayerNormMLP``."""

from __future__ import annotations

import torch

from ..core.config import norm_config
from ..environment import norm_sm_margin

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class NormParameters:
    """Adds ``layer_norm_weight`` and ``layer_norm_bias`` (None for RMSNorm) to a GEMM module."""

    def _make_norm_parameters(
        self, features: int, eps: float, normalization: str, zero_centered: bool, dtype, device
    ) -> None:
        if normalization not in NORMALIZATIONS:
            raise AssertionError(
                f"normalization is {normalization!r}, but must be 'LayerNorm' or 'RMSNorm'."
            )
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered
        self.fwd_ln_sm_margin = norm_sm_margin("FWD")
        self.bwd_ln_sm_margin = norm_sm_margin("BWD")
        self.inf_ln_sm_margin = norm_sm_margin("INF")
        self.norm_config = norm_config(normalization, eps, zero_centered)
        start = torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_
        self._make_parameter("layer_norm_weight", (features,), dtype, device, start)
        if normalization == "LayerNorm":
            self._make_parameter(
                "layer_norm_bias", (features,), dtype, device, torch.nn.init.zeros_
            )
        else:
            self.layer_norm_bias = None

    def _set_norm_attributes(self) -> None:
        """Sequence parallelism leaves partial norm gradients; frameworks look for this mark."""
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        if self.layer_norm_bias is not None:
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel
