# SPDX-License-Identifier: Apache-2.0
"""``LayerNormLinear``: a norm followed by a linear layer, as one op."""

from __future__ import annotations

from typing import Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from ..dynamo.capability import compiled_or_eager
from .checks import check_construction
from .gemm_module import GemmModule
from .norm_parameters import NormParameters


class LayerNormLinear(NormParameters, GemmModule):
    r"""Applies :math:`y = \mathrm{norm}(x) W^T + b`.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of the linear layer; the norm acts over ``in_features``.
    eps : float
        Added to the variance (LayerNorm) or the mean square (RMSNorm).
    normalization : {"LayerNorm", "RMSNorm"}
        RMSNorm has no ``layer_norm_bias``.
    return_layernorm_output : bool
        Also return the norm's output (high precision, the shape of the input), differentiable.
    return_layernorm_output_gathered : bool
        With sequence parallelism return it gathered.
    zero_centered_gamma : bool
        Scale by ``1 + layer_norm_weight``; the weight then starts at zero.

    The other arguments are those of :class:`Linear`.
    """

    op_name = "layernorm_linear"
    fwd_amax_slots = (0,)
    bwd_amax_slots = (0,)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker: Optional[Callable] = None,
        init_method: Optional[Callable] = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: Optional[torch.dtype] = None,
        parallel_mode: Optional[str] = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Optional[Union[Tuple[str, ...], Dict[str, int]]] = None,
        zero_centered_gamma: bool = False,
        device: Union[torch.device, str, int] = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: Optional[str] = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: Optional[str] = None,
        name: Optional[str] = None,
    ) -> None:
        if parallel_mode == "row":
            raise NotImplementedError(
                "LayerNormLinear has no row-parallel mode: a norm needs whole rows. Use"
                " parallel_mode='column', or a norm followed by a row-parallel Linear."
            )
        sizes = {"in_features": in_features, "out_features": out_features}
        check_construction(self, params_dtype, **sizes)
        super().__init__(name)
        self._set_parallel(parallel_mode, tp_group, tp_size, sequence_parallel, symmetric_ar_type)
        self._set_userbuffers(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name
        )
        self._set_training_options(fuse_wgrad_accumulation, delay_wgrad_compute)
        self._make_norm_parameters(
            in_features, eps, normalization, zero_centered_gamma, params_dtype, device
        )
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = (
            return_layernorm_output and return_layernorm_output_gathered
        )
        self._make_gemm_parameters(
            in_features,
            out_features,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parameters_split=parameters_split,
            device=device,
            init_method=init_method,
            get_rng_state_tracker=get_rng_state_tracker,
        )
        self._finish_init(device)

    @compiled_or_eager
    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: Optional[bool] = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ):
        """``inp [..., in_features]`` to ``out [..., out_features]``.

        Returns ``out``, ``(out, bias)``, ``(out, ln_out)`` or ``(out, bias, ln_out)`` by
        ``return_bias`` and ``return_layernorm_output``. Without a bias the returned bias is an
        empty tensor. The other arguments are those of :class:`Linear`.
        """
        ln_weight, ln_bias = self.layer_norm_weight, self.layer_norm_bias
        norm = (ln_weight, ln_bias)
        call, weight, bias = self._begin_linear(inp, norm, is_first_microbatch, fp8_grad)
        ln_weight, ln_bias = self._cast(call, ln_weight), self._cast(call, ln_bias)
        operand = self._weight(
            call,
            0,
            weight,
            is_first_microbatch,
            self._grad_below_norm(call, ln_weight, ln_bias),
        )
        want = self.return_layernorm_output
        added = None if self.return_bias else bias
        y, ln_out = self._run(
            call,
            self.norm_config,
            (call.x, ln_weight, ln_bias, operand.tensor, added),
            ("x", "ln_weight", "ln_bias", "weight", "bias"),
            (operand,),
            is_first_microbatch,
            want,
        )
        y = self._finish_linear(call, y, fp8_output)
        if not (self.return_bias or want):
            return y
        if bias is None:
            bias = getattr(self, self.bias_names[0])
        extra = (bias,) if self.return_bias else ()
        return (y, *extra, ln_out) if want else (y, *extra)
