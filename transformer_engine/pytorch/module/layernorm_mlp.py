# SPDX-License-Identifier: Apache-2.0
"""``LayerNormMLP``: norm, fc1, activation, fc2, as one op."""

from __future__ import annotations

from typing import Callable, Optional, Union

import torch
from torch import Tensor

from ..core.config import activation_config
from ..dynamo.capability import compiled_or_eager
from ..environment import bias_gelu_fusion_enabled, gemm_gelu_fusion_enabled
from ..formats.activations import ACTIVATIONS, activation_width, is_gated
from ..utils import divide, get_default_init_method
from .checks import check_construction, check_weight, raise_dimension
from .gemm_module import GemmModule
from .norm_parameters import NormParameters
from .quantized_edges import high_precision

# Defaults of ``activation_params``, read by clamped_swiglu.
CLAMPED_SWIGLU = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


class LayerNormMLP(NormParameters, GemmModule):
    r"""Applies :math:`y = \mathrm{act}(\mathrm{norm}(x) W_1^T + b_1) W_2^T + b_2`.

    Parameters
    ----------
    hidden_size, ffn_hidden_size : int
        ``fc1_weight`` is ``[ffn_hidden_size, hidden_size]`` (twice as many rows for gated
        activations), ``fc2_weight`` is ``[hidden_size, ffn_hidden_size]``.
    activation : str
        One of gelu (tanh form), geglu, glu, qgelu, qgeglu, relu, reglu, srelu, sreglu, silu,
        swiglu, clamped_swiglu. Gated ones activate the first half of fc1's output and multiply by
        the second.
    activation_params : dict, optional
        For clamped_swiglu: ``limit`` (7.0), ``alpha`` (1.702), ``glu_linear_offset`` (1.0).
    output_layer_init_method : callable, optional
        Initialiser of ``fc2_weight``.
    set_parallel_mode : bool
        Run the tensor-parallel collectives (fc1 column-, fc2 row-parallel).
    checkpoint : bool
        Recompute norm, fc1 and activation in backward.

    The other arguments are those of :class:`LayerNormLinear`.
    """

    op_name = "layernorm_mlp"
    fwd_amax_slots = (0, 3)
    bwd_amax_slots = (0, 2)
    num_gemms = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Optional[Callable] = None,
        tp_group=None,
        tp_size: int = 1,
        init_method: Optional[Callable] = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Optional[dict] = None,
        output_layer_init_method: Optional[Callable] = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: Optional[torch.dtype] = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: Optional[int] = None,
        micro_batch_size: Optional[int] = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: Union[torch.device, str, int] = "cuda",
        ub_overlap_ag: bool = False,
        name: Optional[str] = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: Optional[str] = None,
        checkpoint: bool = False,
    ) -> None:
        del seq_length, micro_batch_size  # they warm up a fused kernel of the reference package
        sizes = {"hidden_size": hidden_size, "ffn_hidden_size": ffn_hidden_size}
        check_construction(self, params_dtype, **sizes)
        super().__init__(name)
        self._set_parallel(
            "column" if set_parallel_mode else None,
            tp_group,
            tp_size,
            sequence_parallel,
            symmetric_ar_type,
        )
        self._set_userbuffers(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, None
        )
        self._set_training_options(fuse_wgrad_accumulation, delay_wgrad_compute)
        self.set_parallel_mode = set_parallel_mode
        self.checkpoint = checkpoint
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._set_activation(activation, activation_params)
        self._make_norm_parameters(
            hidden_size, eps, normalization, zero_centered_gamma, params_dtype, device
        )
        self._make_mlp_parameters(
            hidden_size,
            ffn_hidden_size,
            (bias, return_bias),
            params_dtype,
            device,
            (init_method, output_layer_init_method, get_rng_state_tracker),
        )
        self._finish_init(device)

    def _set_activation(self, activation: str, activation_params: Optional[dict]) -> None:
        if activation not in ACTIVATIONS:
            raise NotImplementedError(
                f"Activation {activation!r} is not known to LayerNormMLP; choose one of"
                f" {', '.join(sorted(ACTIVATIONS))}."
            )
        params = dict(CLAMPED_SWIGLU)
        for key, value in (activation_params or {}).items():
            if key not in params:
                raise ValueError(
                    f"activation_params has the key {key!r}; known are {', '.join(params)}."
                )
            params[key] = value
        self.activation = activation
        self.activation_params = activation_params
        self.bias_gelu_nvfusion = bias_gelu_fusion_enabled() and activation == "gelu"
        self.gemm_gelu_fusion = gemm_gelu_fusion_enabled() and activation == "gelu"
        self._activation_config = activation_config(
            activation, params["limit"], params["alpha"], params["glu_linear_offset"]
        )

    def _make_mlp_parameters(self, hidden, ffn, biases, params_dtype, device, inits) -> None:
        init_method, output_init_method, tracker = inits
        self.hidden_size = hidden
        self.use_bias, self.return_bias = biases
        self.apply_bias = self.use_bias and not self.return_bias
        self.gemm_bias_unfused_add = self.apply_bias and self.set_parallel_mode
        self.get_rng_state_tracker = tracker
        self.size_per_partition = divide(ffn, self.tp_size)
        fc1_out = self.size_per_partition * (2 if is_gated(self.activation) else 1)
        default = get_default_init_method()
        shapes = (
            ("fc1", fc1_out, hidden, init_method or default, 1),
            ("fc2", hidden, self.size_per_partition, output_init_method or default, 4),
        )
        for fc, rows, columns, init_fn, slot in shapes:
            self._make_parameter(
                f"{fc}_weight", (rows, columns), params_dtype, device, init_fn, tracker, slot
            )
            self._make_bias(f"{fc}_bias", rows, params_dtype, device)
        self.weight_names = ["fc1_weight", "fc2_weight"]
        self.bias_names = ["fc1_bias", "fc2_bias"]

    def _set_parallel_attributes(self) -> None:
        """Mark the parameters for tensor-parallel frameworks."""
        self._mark_tensor_parallel("fc1_weight", 0)
        self._mark_tensor_parallel("fc2_weight", 1)
        if self.use_bias:
            self._mark_tensor_parallel("fc1_bias", 0)
            if self.set_parallel_mode:
                self.fc2_bias.sequence_parallel = self.sequence_parallel

    @compiled_or_eager
    def forward(self, inp: Tensor, is_first_microbatch: Optional[bool] = None):
        """``inp [..., hidden_size]`` to ``out`` of the same shape.

        Returns ``out``, ``(out, bias)``, ``(out, ln_out)`` or ``(out, bias, ln_out)`` by
        ``return_bias`` and ``return_layernorm_output``; the returned bias is ``fc2_bias``, None
        without a bias. ``is_first_microbatch`` as in :class:`Linear`, for both weights.
        """
        w1, b1 = self.fc1_weight, self.fc1_bias if self.use_bias else None
        w2, b2 = self.fc2_weight, self.fc2_bias if self.use_bias else None
        ln_weight, ln_bias = self.layer_norm_weight, self.layer_norm_bias
        inp = high_precision(inp)
        parameters = (ln_weight, ln_bias, w1, b1, w2, b2)
        call = self._begin(inp, self.hidden_size, parameters, is_first_microbatch)
        self._check_gemms(call)
        ln_weight, ln_bias = self._cast(call, ln_weight), self._cast(call, ln_bias)
        w1, b1 = self._cast(call, w1), self._cast(call, b1)
        w2, b2 = self._cast(call, w2), self._cast(call, b2)
        below_norm = self._grad_below_norm(call, ln_weight, ln_bias)
        below_activation = below_norm or self._grad_of(w1, b1)
        q1 = self._weight(call, 0, w1, is_first_microbatch, below_norm)
        q2 = self._weight(call, 1, w2, is_first_microbatch, below_activation)
        want = self.return_layernorm_output
        y, ln_out = self._run(
            call,
            self.norm_config + ";" + self._activation_config,
            (
                *(call.x, ln_weight, ln_bias, q1.tensor, b1, q2.tensor),
                None if self.return_bias else b2,
            ),
            ("x", "ln_weight", "ln_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
            (q1, q2),
            is_first_microbatch,
            want,
        )
        if not (self.return_bias or want):
            return y
        extra = (b2,) if self.return_bias else ()
        return (y, *extra, ln_out) if want else (y, *extra)

    def _check_gemms(self, call) -> None:
        """Check both GEMMs before anything runs, in a trace as well as in eager."""
        if call.spec:
            # Both before either is quantized, so that an error leaves nothing half done.
            check_weight(self, 0, self.fc1_weight, call.spec)
            check_weight(self, 1, self.fc2_weight, call.spec)
        if self.fc1_weight.shape[1] != self.hidden_size:
            raise_dimension(
                f"GEMM not possible: FC1 of LayerNormMLP '{self.name}' has a weight of shape"
                f" {tuple(self.fc1_weight.shape)}, but its dimension 1 must be {self.hidden_size}"
                " (hidden_size)."
            )
        width = activation_width(self.activation, self.fc1_weight.shape[0])
        if self.fc2_weight.shape[1] != width:
            raise_dimension(
                f"GEMM not possible: FC2 of LayerNormMLP '{self.name}' has a weight of shape"
                f" {tuple(self.fc2_weight.shape)}, but its dimension 1 must be {width}, the width"
                f" of {self.activation} of an FC1 output of width {self.fc1_weight.shape[0]}."
            )
