# SPDX-License-Identifier: Apache-2.0
"""Recipes with one scale per tensor: delayed scaling and current scaling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional, Union

from .. import environment
from ._base import (
    FROM_ENVIRONMENT,
    Format,
    MMParams,
    QParams,
    Recipe,
    RecipeError,
    as_backward_override,
    as_bool,
    as_choice,
    as_fp8_format,
    as_instance,
    as_int,
    fp8_type_name,
)
from ._spec import module_spec, quantization


@dataclass(init=False, repr=False)
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, taken from the amaxes (largest magnitudes) of earlier steps.

    After each step, ``scale = fp8_max / amax / 2**margin`` with the amax of the history, for every
    tensor.

    * `margin`: how many powers of two the scale stays below the largest possible one
    * `fp8_format`: `Format.HYBRID` or `Format.E4M3`
    * `amax_history_len`: how many steps the history holds
    * `amax_compute_algo`: "max" (over the history), "most_recent", or a function ``f(history) ->
      amax`` where history is fp32 ``[amax_history_len, tensors]``
    * `scaling_factor_compute_algo`: None, or a function ``f(amax, old_scale, fp8_max, recipe) ->
      scale``
    * `reduce_amax`: take the maximum of the amaxes over the ranks of the `amax_reduction_group` of
      the autocast
    * `fp8_dpa`, `fp8_mha`: attention only
    * `backward_override`: must be None; the backward pass is always quantized

    Raises `RecipeError` (a ValueError) for any other value.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Union[str, Callable] = "max"
    scaling_factor_compute_algo: Optional[Callable] = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = None

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.HYBRID,
        amax_history_len: int = 1024,
        amax_compute_algo: Union[str, Callable] = "max",
        scaling_factor_compute_algo: Optional[Callable] = None,
        reduce_amax: bool = True,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: Optional[str] = FROM_ENVIRONMENT,
        **unknown,
    ) -> None:
        self._note_unknown(unknown)
        self.margin = as_int("margin", margin)
        self.fp8_format = as_fp8_format("fp8_format", fp8_format)
        self.amax_history_len = as_int("amax_history_len", amax_history_len, minimum=1)
        if not callable(amax_compute_algo):
            as_choice("amax_compute_algo", amax_compute_algo, ("max", "most_recent"))
        self.amax_compute_algo = amax_compute_algo
        if scaling_factor_compute_algo is not None and not callable(scaling_factor_compute_algo):
            raise RecipeError(
                "scaling_factor_compute_algo must be None or a function of (amax, scale, fp8_max,"
                f" recipe), not {scaling_factor_compute_algo!r}."
            )
        self.scaling_factor_compute_algo = scaling_factor_compute_algo
        self.reduce_amax = as_bool("reduce_amax", reduce_amax)
        self.fp8_dpa = as_bool("fp8_dpa", fp8_dpa)
        self.fp8_mha = as_bool("fp8_mha", fp8_mha)
        if backward_override == FROM_ENVIRONMENT:
            environment.warn_that_delayed_scaling_has_no_backward_override()
        elif backward_override is not None:
            raise RecipeError(
                f"backward_override must be None for DelayedScaling, not {backward_override!r}. Use"
                " Float8CurrentScaling if the backward pass shall not be quantized."
            )
        self.backward_override = None
        self._complete = True

    def _describe(self) -> str:
        forward = quantization("delayed", fp8_type_name(self.fp8_format, True))
        backward = quantization("delayed", fp8_type_name(self.fp8_format, False))
        return module_spec(forward, forward, backward, (False, True, True))

    def _describe_update(self) -> str:
        algo = self.amax_compute_algo
        if not isinstance(algo, str) or self.scaling_factor_compute_algo is not None:
            algo = "python"
        largest = self.fp8_format.value
        return (
            f"{self.amax_history_len},{algo},{self.margin},{largest.max_fwd},{largest.max_bwd},"
            f"{int(self.reduce_amax)}"
        )

    @classmethod
    def delayed(cls) -> bool:
        return True


@dataclass(init=False, repr=False)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale per tensor, taken from the tensor itself.

    * `use_power_2_scales`: round the scales down to powers of two (default:
      NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES)
    * `fp8_format`: `Format.HYBRID` or `Format.E4M3`
    * `fp8_gemm_fprop`, `fp8_gemm_dgrad`, `fp8_gemm_wgrad`: `MMParams` of the three GEMMs of a
      linear layer
    * `fp8_dpa`, `fp8_mha`: attention only
    * `backward_override`: None, "high_precision" (backward from the unquantized operands) or
      "dequantized" (backward in high precision from the dequantized operands); default:
      NVTE_BACKWARD_OVERRIDE

    The attributes `fp8_quant_fwd_inp`, `fp8_quant_fwd_weight` and `fp8_quant_bwd_grad` hold the
    `QParams` of input, weight and output gradient. They are not constructor arguments; assign them.

    Raises `RecipeError` (a ValueError) for any other value.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_gemm_wgrad: MMParams = MMParams(use_split_accumulator=True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = None
    fp8_quant_fwd_inp: QParams = field(init=False)
    fp8_quant_fwd_weight: QParams = field(init=False)
    fp8_quant_bwd_grad: QParams = field(init=False)

    def __init__(
        self,
        use_power_2_scales: Optional[bool] = None,
        fp8_format: Format = Format.HYBRID,
        fp8_gemm_fprop: Optional[MMParams] = None,
        fp8_gemm_dgrad: Optional[MMParams] = None,
        fp8_gemm_wgrad: Optional[MMParams] = None,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: Optional[str] = FROM_ENVIRONMENT,
        **unknown,
    ) -> None:
        self._note_unknown(unknown)
        if use_power_2_scales is None:
            use_power_2_scales = environment.power_2_current_scales()
        self.use_power_2_scales = as_bool("use_power_2_scales", use_power_2_scales)
        self.fp8_format = as_fp8_format("fp8_format", fp8_format)
        self.fp8_gemm_fprop = _gemm("fp8_gemm_fprop", fp8_gemm_fprop, False)
        self.fp8_gemm_dgrad = _gemm("fp8_gemm_dgrad", fp8_gemm_dgrad, True)
        self.fp8_gemm_wgrad = _gemm("fp8_gemm_wgrad", fp8_gemm_wgrad, True)
        self.fp8_dpa = as_bool("fp8_dpa", fp8_dpa)
        self.fp8_mha = as_bool("fp8_mha", fp8_mha)
        self.backward_override = as_backward_override(backward_override)
        self.fp8_quant_fwd_inp = QParams(power_2_scale=self.use_power_2_scales)
        self.fp8_quant_fwd_weight = QParams(power_2_scale=self.use_power_2_scales)
        self.fp8_quant_bwd_grad = QParams(power_2_scale=self.use_power_2_scales)
        self._complete = True

    def _describe(self) -> str:
        forward = fp8_type_name(self.fp8_format, True)
        backward = fp8_type_name(self.fp8_format, False)
        gemms = (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        return module_spec(
            _current(forward, self.fp8_quant_fwd_inp),
            _current(forward, self.fp8_quant_fwd_weight),
            _current(backward, self.fp8_quant_bwd_grad),
            tuple(gemm.use_split_accumulator for gemm in gemms),
            self.backward_override,
        )

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True


def _gemm(name: str, params: Optional[MMParams], split_accumulator: bool) -> MMParams:
    if params is None:
        return MMParams(use_split_accumulator=split_accumulator)
    return as_instance(name, params, MMParams)


def _current(type_name: str, params: QParams) -> str:
    return quantization(
        "current", type_name, pow2=params.power_2_scale, eps=float(params.amax_epsilon)
    )
