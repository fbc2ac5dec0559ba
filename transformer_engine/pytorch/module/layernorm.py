# SPDX-License-Identifier: Apache-2.0
"""``LayerNorm``."""

from __future__ import annotations

import warnings

from ._norm_module import NormModule, deprecated_margin


class LayerNorm(NormModule):
    r"""Applies :math:`y = (x - \mu) / \sqrt{\sigma^2 + \epsilon} \cdot \gamma + \beta`.

    Parameters
    ----------
    normalized_shape : int or iterable of int
        Trailing dimensions that the norm acts over; the shape of ``weight`` and ``bias``.
    eps : float
        Added to the (biased) variance.
    sequence_parallel : bool, optional
        If given, set as attribute on the parameters, for tensor-parallel frameworks.
    zero_centered_gamma : bool
        Scale by ``1 + weight``; the weight then starts at zero.
    device, dtype
        Where and in which precision the parameters are made (``params_dtype`` is an alias).
    sm_margin : int or dict
        Kept for compatibility.
    """

    kind = "LayerNorm"
    fwd_ln_sm_margin = deprecated_margin("forward", "fwd_ln_sm_margin")
    bwd_ln_sm_margin = deprecated_margin("backward", "bwd_ln_sm_margin")
    inf_ln_sm_margin = deprecated_margin("inference", "inf_ln_sm_margin")

    def reset_layer_norm_parameters(self) -> None:
        """Deprecated name of ``reset_parameters``."""
        warnings.warn(
            "reset_layer_norm_parameters is deprecated; use reset_parameters.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.reset_parameters()
