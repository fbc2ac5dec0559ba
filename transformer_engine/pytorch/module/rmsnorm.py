# SPDX-License-Identifier: Apache-2.0
"""``RMSNorm``."""

from __future__ import annotations

import warnings

from ._norm_module import NormModule, deprecated_margin


class RMSNorm(NormModule):
    r"""Applies :math:`y = x / \sqrt{\mathrm{mean}(x^2) + \epsilon} \cdot \gamma`.

    Parameters are those of :class:`LayerNorm`; there is no bias. The product with gamma is rounded
    once, after the multiplication (some other implementations round before it).
    """

    kind = "RMSNorm"
    fwd_rmsnorm_sm_margin = deprecated_margin("forward", "fwd_rmsnorm_sm_margin")
    bwd_rmsnorm_sm_margin = deprecated_margin("backward", "bwd_rmsnorm_sm_margin")
    inf_rmsnorm_sm_margin = deprecated_margin("inference", "inf_rmsnorm_sm_margin")

    def reset_rms_norm_parameters(self) -> None:
        """Deprecated name of ``reset_parameters``."""
        warnings.warn(
            "reset_rms_norm_parameters is deprecated; use reset_parameters.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.reset_parameters()
