# SPDX-License-Identifier: Apache-2.0
"""Parameters, options and helpers shared by the modules that contain GEMMs."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..core.wgrad import WeightGradStore
from ..distributed import get_distributed_world_size, set_tensor_model_parallel_attributes
from ..quantization import FP8GlobalStateManager
from ..quantized_tensor import QuantizedTensor
from ..utils import divide, get_default_init_method
from .base import Call, TransformerEngineBaseModule, resolve_device
from .quantized_edges import edge_quantizer, high_precision, quantize_gradient_of
from .split import concatenated, share_buffer, split_sizes

GEMM_PARALLEL_MODES = ("row", "column", None)


class GemmModule(TransformerEngineBaseModule):
    """Adds to the base class what construction and forward of every GEMM module need."""

    def _set_parallel(
        self, parallel_mode, tp_group, tp_size: int, sequence_parallel: bool, symmetric_ar_type
    ) -> None:
        if parallel_mode not in GEMM_PARALLEL_MODES:
            raise AssertionError(
                f"parallel_mode is {parallel_mode!r}, but must be 'row', 'column' or None."
            )
        self.parallel_mode = parallel_mode
        self.symmetric_ar_type = symmetric_ar_type
        if tp_group is None:
            self.tp_size = tp_size
            if tp_size == 1:
                self.set_tensor_parallel_group(None)
        else:
            self.tp_size = get_distributed_world_size(tp_group)
            self.set_tensor_parallel_group(tp_group)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def _set_userbuffers(self, ag, rs, rs_dgrad, bulk_dgrad, bulk_wgrad, ub_name) -> None:
        """Keep the overlap options; they only tune speed under sequence parallelism."""
        column = self.parallel_mode == "column" and self.sequence_parallel
        row = self.parallel_mode == "row" and self.sequence_parallel
        self.ub_overlap_ag_fprop = ag and column
        self.ub_overlap_rs_fprop = rs and row
        self.ub_overlap_ag_dgrad = ag and row
        self.ub_overlap_rs_dgrad = rs_dgrad and column
        self.ub_bulk_dgrad = bulk_dgrad and column and not rs_dgrad
        self.ub_bulk_wgrad = bulk_wgrad and column and not rs_dgrad
        self.ub_name = ub_name

    def _set_training_options(self, fuse_wgrad_accumulation: bool, delay_wgrad_compute: bool):
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.wgrad_store = WeightGradStore(delay_wgrad_compute, self.ub_bulk_wgrad)

    # --- parameters ------------------------------------------------------------------------------

    def _make_parameter(self, name, shape, dtype, device, init_fn, tracker=None, slot=None) -> None:
        data = torch.empty(
            shape, dtype=dtype or torch.get_default_dtype(), device=resolve_device(device)
        )
        self.register_parameter(
            name,
            torch.nn.Parameter(data),
            init_fn=init_fn,
            get_rng_state_tracker=tracker,
            fp8_meta_index=slot,
        )

    def _make_bias(self, name: str, size: int, dtype, device) -> None:
        """A zero-initialised bias; without bias a plain empty tensor that is no parameter."""
        if self.use_bias:
            self._make_parameter(name, (size,), dtype, device, torch.nn.init.zeros_)
        else:
            dtype = dtype or torch.get_default_dtype()
            setattr(self, name, torch.empty(0, dtype=dtype, device=resolve_device(device)))

    def _make_gemm_parameters(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        return_bias: bool,
        params_dtype,
        parameters_split,
        device,
        init_method,
        get_rng_state_tracker,
    ) -> None:
        """Weight and bias of a single linear layer, split over output features if asked for."""
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self.gemm_bias_unfused_add = self.parallel_mode == "row" and self.apply_bias
        self.get_rng_state_tracker = get_rng_state_tracker
        column, row = self.parallel_mode == "column", self.parallel_mode == "row"
        names, sizes = split_sizes(parameters_split, out_features, self.tp_size if column else 1)
        self.in_features = divide(in_features, self.tp_size) if row else in_features
        self.out_features = divide(out_features, self.tp_size) if column else out_features
        prefixes = [name.rstrip("_") + "_" if name else "" for name in names]
        self.weight_names = [f"{prefix}weight" for prefix in prefixes]
        self.bias_names = [f"{prefix}bias" for prefix in prefixes]
        self.parameter_split_sizes = sizes
        init_fn = init_method or get_default_init_method()
        for name, size in zip(self.weight_names, sizes):
            shape = (size, self.in_features)
            self._make_parameter(
                name, shape, params_dtype, device, init_fn, get_rng_state_tracker, 1
            )
        for name, size in zip(self.bias_names, sizes):
            self._make_bias(name, size, params_dtype, device)

    def _finish_init(self, device) -> None:
        """Run the initialisers, unless the parameters are on meta."""
        self.reset_parameters(defer_init=resolve_device(device).type == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Materialise and initialise the parameters, and set their tensor-parallel attributes."""
        super().reset_parameters(defer_init=defer_init)
        if not defer_init:
            self._set_norm_attributes()
            self._set_parallel_attributes()
            self._share_buffers()
            if self.delay_wgrad_compute:
                for name in (*self.weight_names, *(self.bias_names if self.use_bias else ())):
                    getattr(self, name).skip_backward_post_hook = True

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._share_buffers()
        return self

    def _share_buffers(self) -> None:
        """Lay the pieces of a split weight, and of its bias, behind each other in memory."""
        if hasattr(self, "parameter_split_sizes") and len(self.weight_names) > 1:
            share_buffer([getattr(self, name) for name in self.weight_names])
            if self.use_bias:
                share_buffer([getattr(self, name) for name in self.bias_names])

    def _set_norm_attributes(self) -> None:
        """Overridden by modules that contain a norm."""

    def _set_parallel_attributes(self) -> None:
        """Mark weight and bias for tensor-parallel frameworks (also with tp_size 1)."""
        for name in self.weight_names:
            self._mark_tensor_parallel(name, 1 if self.parallel_mode == "row" else 0)
        for name in self.bias_names if self.use_bias else ():
            if self.parallel_mode == "column":
                self._mark_tensor_parallel(name, 0)
            elif self.parallel_mode == "row":
                getattr(self, name).sequence_parallel = self.sequence_parallel

    def _mark_tensor_parallel(self, name: str, dim: int) -> None:
        param = getattr(self, name)
        if not hasattr(param, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(param, True, dim, 1)

    # --- forward ---------------------------------------------------------------------------------

    def _weight_and_bias(self) -> tuple[Tensor, Optional[Tensor]]:
        """Weight and bias of a single linear layer, recombined if they are split."""
        if len(self.weight_names) == 1:
            weight = getattr(self, self.weight_names[0])
            return weight, getattr(self, self.bias_names[0]) if self.use_bias else None
        weight = concatenated([getattr(self, name) for name in self.weight_names])
        if not self.use_bias:
            return weight, None
        return weight, concatenated([getattr(self, name) for name in self.bias_names])

    def _begin_linear(self, inp: Tensor, norm: tuple, first: Optional[bool], fp8_grad: bool):
        """Begin a call of a module with one GEMM: ``(call, weight, bias)`` in the activation dtype.

        ``norm`` are the norm's parameters, ``first`` is ``is_first_microbatch``.
        """
        weight, bias = self._weight_and_bias()
        inp = high_precision(inp)
        call = self._begin(inp, self.in_features, (*norm, weight, bias), first)
        if fp8_grad and call.spec:
            call = call._replace(x=quantize_gradient_of(self, call.x, call.spec, call.scaling))
        return call, self._cast(call, weight), self._cast(call, bias)

    def _finish_linear(self, call: Call, y: Tensor, fp8_output: bool) -> Tensor:
        """``y``, quantized if asked for and if a recipe is active."""
        if not (fp8_output and call.spec):
            return y
        return edge_quantizer(self, call.spec, "x", call.scaling)(y)

    def call_obstacle(
        self, is_first_microbatch=None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> str:
        """Why a call with these arguments can not be traced; empty if it can."""
        del is_first_microbatch
        if FP8GlobalStateManager.is_fp8_enabled():
            if fp8_output:
                return "fp8_output=True: Dynamo can not make a quantized tensor inside of a graph."
            if fp8_grad and torch.is_grad_enabled():
                return "fp8_grad=True: a graph has plain tensors as gradients."
        return self.unsupported_in_graph()

    @staticmethod
    def _cast(call: Call, tensor: Optional[Tensor]) -> Optional[Tensor]:
        """``tensor`` in the activation dtype; differentiable. Quantized weights stay."""
        if tensor is None or tensor.dtype == call.x.dtype or isinstance(tensor, QuantizedTensor):
            return tensor
        return tensor.to(call.x.dtype)

    @staticmethod
    def _grad_of(*tensors: Optional[Tensor]) -> bool:
        """Whether the gradient of any of ``tensors`` is wanted."""
        if not torch.is_grad_enabled():
            return False
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
        return False

    def _grad_below_norm(self, call: Call, ln_weight, ln_bias) -> bool:
        """Whether the gradient of the norm's output is wanted."""
        return self._grad_of(call.x, ln_weight, ln_bias)

    def extra_repr(self) -> str:
        """Sizes and options, as ``torch.nn.Linear`` prints them."""
        sizes = {
            key: getattr(self, key)
            for key in ("in_features", "out_features", "hidden_size", "size_per_partition")
            if hasattr(self, key)
        }
        options = {
            key: getattr(self, key)
            for key in ("use_bias", "normalization", "activation", "parallel_mode")
            if getattr(self, key, None) is not None
        }
        return ", ".join(f"{key}={value}" for key, value in {**sizes, **options}.items())
