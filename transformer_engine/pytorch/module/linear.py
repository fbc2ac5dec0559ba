# SPDX-License-Identifier: Apache-2.0
"""``Linear``: ``y = x W^T + b``."""

from __future__ import annotations

from typing import Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from ..core.config import gemm_text
from ..dynamo.capability import compiled_or_eager
from .checks import check_construction
from .gemm_module import GemmModule


class Linear(GemmModule):
    r"""Applies :math:`y = x W^T + b`, in low precision inside of ``te.autocast``.

    Drop-in for ``torch.nn.Linear`` with the reference package's argument order: the third
    positional argument is ``sequence_parallel``, not ``bias``.

    Parameters
    ----------
    in_features, out_features : int
        Global sizes; ``weight`` is ``[out_features, in_features]``, ``bias`` ``[out_features]``.
    init_method : callable, optional
        In-place weight initialiser; default is a normal distribution with sigma 0.023.
    get_rng_state_tracker, rng_tracker_name
        Zero-argument callable whose result has ``.fork([name])``; weights are initialised in it.
    bias : bool
        Whether there is a bias.
    return_bias : bool
        Do not add the bias but return it as second element (None without a bias).
    params_dtype : torch.dtype, optional
        Default ``torch.get_default_dtype()``.
    parallel_mode : {None, "column", "row"}
        Which dimension of the weight is split over ``tp_size`` ranks.
    parameters_split : tuple of str, or dict of str to int, optional
        Split the weight (and bias) by output feature into parameters ``<name>_weight``.
    save_original_input : bool
        Keep the input itself for backward, not its quantized copy, and quantize it again there:
        saves memory where the input is alive anyway. Not with delayed scaling.
    device : str, torch.device or int
        ``"cuda"`` means the CPU where there is no CUDA device; ``"meta"`` defers initialisation to
        ``reset_parameters``.
    """

    op_name = "linear"
    fwd_amax_slots = (0,)
    bwd_amax_slots = (0,)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group=None,
        tp_size: int = 1,
        get_rng_state_tracker: Optional[Callable] = None,
        rng_tracker_name: Optional[str] = None,
        init_method: Optional[Callable] = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: Optional[torch.dtype] = None,
        parallel_mode: Optional[str] = None,
        parameters_split: Optional[Union[Tuple[str, ...], Dict[str, int]]] = None,
        device: Union[torch.device, str, int] = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: Optional[str] = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: Optional[str] = None,
        save_original_input: bool = False,
        name: Optional[str] = None,
    ) -> None:
        sizes = {"in_features": in_features, "out_features": out_features}
        check_construction(self, params_dtype, **sizes)
        super().__init__(name)
        self._set_parallel(parallel_mode, tp_group, tp_size, sequence_parallel, symmetric_ar_type)
        self._set_userbuffers(
            ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name
        )
        self._set_training_options(fuse_wgrad_accumulation, delay_wgrad_compute)
        self.rng_tracker_name = rng_tracker_name
        self.save_original_input = save_original_input
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
    ) -> Union[Tensor, Tuple[Tensor, Optional[Tensor]]]:
        """``inp [..., in_features]`` to ``[..., out_features]``; a 1-D input gives ``[1, out]``.

        ``is_first_microbatch``: None quantizes the weight at each call; True also caches it; False
        takes the cached one. ``fp8_output``: quantize ``out`` with the recipe's format (a
        ``te.QuantizedTensor``); ``fp8_grad``: the same for the input's gradient; both do nothing
        outside of ``te.autocast``. ``inp`` may be quantized. Returns ``out`` or ``(out, bias)``.
        """
        call, weight, bias = self._begin_linear(inp, (), is_first_microbatch, fp8_grad)
        grad = torch.is_grad_enabled()
        operand = self._weight(call, 0, weight, is_first_microbatch, grad and call.x.requires_grad)
        added = None if self.return_bias else bias
        y, _ = self._run(
            call,
            "orig=1" if self._saves_original(call.spec) else "",
            (call.x, operand.tensor, added),
            ("x", "weight", "bias"),
            (operand,),
            is_first_microbatch,
        )
        y = self._finish_linear(call, y, fp8_output)
        return (y, bias) if self.return_bias else y

    def _saves_original(self, spec: str) -> bool:
        """Whether backward shall quantize the original input again, to save its quantized copy."""
        if not (self.save_original_input and spec) or "bwd=" in spec:
            return False
        quant = gemm_text(spec, "x", 0)
        if "delayed" in quant:
            raise ValueError(
                f"Linear '{self.name}' has save_original_input=True, which delayed scaling can not"
                " have: its scales will have changed by the backward pass. Use another recipe."
            )
        return "stochastic" not in quant  # the second quantization would give other values
