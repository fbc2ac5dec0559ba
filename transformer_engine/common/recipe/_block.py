# SPDX-License-Identifier: Apache-2.0
"""Recipes with one scale per block of values: MXFP8, FP8 block scaling and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

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

_SPLIT = (False, True, True)  # the accumulators where a recipe does not say


@dataclass(init=False, repr=False)
class MXFP8BlockScaling(Recipe):
    """FP8 with one power-of-two scale per 32 values (OCP Microscaling Formats specification 1.0).

    * `margin`: kept for compatibility
    * `fp8_format`: `Format.E4M3` or `Format.HYBRID`
    * `fp8_dpa`, `fp8_mha`: attention only
    * `backward_override`: None, "high_precision" or "dequantized"; default: NVTE_BACKWARD_OVERRIDE
    * `enable_2d_quantization`: 32x32 blocks for the weights of linear layers

    Raises `RecipeError` (a ValueError) for any other value.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = None
    enable_2d_quantization: bool = False

    def __init__(
        self,
        margin: int = 0,
        fp8_format: Format = Format.E4M3,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: Optional[str] = FROM_ENVIRONMENT,
        enable_2d_quantization: bool = False,
        **unknown,
    ) -> None:
        self._note_unknown(unknown)
        self.margin = as_int("margin", margin)
        self.fp8_format = as_fp8_format("fp8_format", fp8_format)
        self.fp8_dpa = as_bool("fp8_dpa", fp8_dpa)
        self.fp8_mha = as_bool("fp8_mha", fp8_mha)
        self.backward_override = as_backward_override(backward_override)
        self.enable_2d_quantization = as_bool("enable_2d_quantization", enable_2d_quantization)
        self._complete = True

    def _describe(self) -> str:
        forward = fp8_type_name(self.fp8_format, True)
        backward = fp8_type_name(self.fp8_format, False)
        dim = 2 if self.enable_2d_quantization else None
        return module_spec(
            quantization("mxfp8", forward, swizzled=True),
            quantization("mxfp8", forward, dim=dim, swizzled=True),
            quantization("mxfp8", backward, swizzled=True),
            _SPLIT,
            self.backward_override,
        )

    @classmethod
    def mxfp8(cls) -> bool:
        return True


@dataclass(init=False, repr=False)
class Float8BlockScaling(Recipe):
    """FP8 with one scale per 128 values of a row (1D) or per 128x128 tile (2D).

    * `use_f32_scales`: scales need not be powers of two (default:
      NVTE_FP8_BLOCK_SCALING_FP32_SCALES)
    * `fp8_format`: `Format.E4M3` or `Format.HYBRID`
    * `x_block_scaling_dim`, `w_block_scaling_dim`, `grad_block_scaling_dim`: 1 or 2 for input,
      weight and output gradient; no two operands of one GEMM may both be 2
    * `fp8_gemm_fprop`, `fp8_gemm_dgrad`, `fp8_gemm_wgrad`: `MMParams`, always with the split
      accumulator
    * `fp8_dpa`, `fp8_mha`: must be False
    * `backward_override`: None, "high_precision" or "dequantized"; default: NVTE_BACKWARD_OVERRIDE

    The attributes `fp8_quant_fwd_inp`, `fp8_quant_fwd_weight` and `fp8_quant_bwd_grad` hold the
    `QParams` of the three tensor roles. They are not constructor arguments; assign them.

    Raises `RecipeError` (a ValueError) for any other value.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=True)
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
        use_f32_scales: Optional[bool] = None,
        fp8_format: Format = Format.E4M3,
        x_block_scaling_dim: int = 1,
        w_block_scaling_dim: int = 2,
        grad_block_scaling_dim: int = 1,
        fp8_gemm_fprop: Optional[MMParams] = None,
        fp8_gemm_dgrad: Optional[MMParams] = None,
        fp8_gemm_wgrad: Optional[MMParams] = None,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: Optional[str] = FROM_ENVIRONMENT,
        **unknown,
    ) -> None:
        self._note_unknown(unknown)
        if use_f32_scales is None:
            use_f32_scales = environment.f32_block_scales()
        self.use_f32_scales = as_bool("use_f32_scales", use_f32_scales)
        self.fp8_format = as_fp8_format("fp8_format", fp8_format)
        x_dim = as_choice(
            "x_block_scaling_dim", as_int("x_block_scaling_dim", x_block_scaling_dim), (1, 2)
        )
        w_dim = as_choice(
            "w_block_scaling_dim", as_int("w_block_scaling_dim", w_block_scaling_dim), (1, 2)
        )
        grad_dim = as_choice(
            "grad_block_scaling_dim",
            as_int("grad_block_scaling_dim", grad_block_scaling_dim),
            (1, 2),
        )
        if (x_dim + w_dim == 4) or (grad_dim + w_dim == 4) or (x_dim + grad_dim == 4):
            raise RecipeError(
                "Two operands of one GEMM cannot both have 2D (128x128) blocks:"
                " x_block_scaling_dim is"
                f" {x_dim}, w_block_scaling_dim is {w_dim} and grad_block_scaling_dim is"
                f" {grad_dim}; at most one of"
                " them may be 2."
            )
        self.x_block_scaling_dim = x_dim
        self.w_block_scaling_dim = w_dim
        self.grad_block_scaling_dim = grad_dim
        self.fp8_gemm_fprop = _split_accumulator("fp8_gemm_fprop", fp8_gemm_fprop)
        self.fp8_gemm_dgrad = _split_accumulator("fp8_gemm_dgrad", fp8_gemm_dgrad)
        self.fp8_gemm_wgrad = _split_accumulator("fp8_gemm_wgrad", fp8_gemm_wgrad)
        self.fp8_dpa = _without_attention("fp8_dpa", fp8_dpa)
        self.fp8_mha = _without_attention("fp8_mha", fp8_mha)
        self.backward_override = as_backward_override(backward_override)
        self.fp8_quant_fwd_inp = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_fwd_weight = QParams(power_2_scale=not self.use_f32_scales)
        self.fp8_quant_bwd_grad = QParams(power_2_scale=not self.use_f32_scales)
        self._complete = True

    def _describe(self) -> str:
        forward = fp8_type_name(self.fp8_format, True)
        backward = fp8_type_name(self.fp8_format, False)
        return module_spec(
            _block(forward, self.x_block_scaling_dim, self.fp8_quant_fwd_inp),
            _block(forward, self.w_block_scaling_dim, self.fp8_quant_fwd_weight),
            _block(backward, self.grad_block_scaling_dim, self.fp8_quant_bwd_grad),
            (True, True, True),
            self.backward_override,
        )

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return True


def _block(type_name: str, dim: int, params: QParams) -> str:
    return quantization(
        "block",
        type_name,
        pow2=params.power_2_scale,
        eps=float(params.amax_epsilon),
        dim=dim if dim == 2 else None,
    )


def _split_accumulator(name: str, params: Optional[MMParams]) -> MMParams:
    if params is None:
        return MMParams(use_split_accumulator=True)
    as_instance(name, params, MMParams)
    if not params.use_split_accumulator:
        raise RecipeError(
            f"{name} must be MMParams(use_split_accumulator=True): GEMMs with block scales always"
            f" accumulate in fp32."
        )
    return params


def _without_attention(name: str, value: bool) -> bool:
    if as_bool(name, value):
        raise RecipeError(f"{name} must be False: FP8 attention does not support block scaling.")
    return False


@dataclass(init=False, repr=False)
class NVFP4BlockScaling(Recipe):
    """FP4 (E2M1) with an E4M3 scale per 16 values and one fp32 scale per tensor.

    * `disable_rht`: no random Hadamard transform of the operands of the wgrad GEMM
    * `disable_stochastic_rounding`: round gradients to nearest
    * `disable_2d_quantization`: weights in blocks of 1x16 instead of 16x16
    * `row_scaled_activation`: one fp32 scale per row of the activations
    * `nvfp4_4over6`: which tensors may choose between 4 and 6 as the block maximum: "none",
      "weights", "activations", "all"
    * `nvfp4_4over6_e4m3_use_256`: for which of them block scales are limited to 256 instead of 448
      (same words)
    * `nvfp4_4over6_err_mode`: error that decides between 4 and 6: "MAE" or "MSE"
    * `fp4_format`, `fp8_format`: `Format.E2M1` and `Format.E4M3`, nothing else
    * `fp8_dpa`, `fp8_mha`: attention only
    * `backward_override`: None, "high_precision" or "dequantized"; default: NVTE_BACKWARD_OVERRIDE

    The first seven take their defaults from NVTE_NVFP4_DISABLE_RHT, _DISABLE_STOCHASTIC_ROUNDING,
    _DISABLE_2D_QUANTIZATION, _ROW_SCALED_ACTIVATION, _4OVER6, _4OVER6_E4M3_USE_256 and
    _4OVER6_ERR_MODE. The attributes `fp4_quant_fwd_inp`, `fp4_quant_fwd_weight` and
    `fp4_quant_bwd_grad` hold the `QParams` of the three tensor roles.

    `nvfp4_4over6` of activations, and `row_scaled_activation`, need `disable_rht=True`: contexts
    refuse them with the transform, because the QParams may be assigned after construction.

    Raises `RecipeError` (a ValueError) for any other value.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: Optional[str] = None
    fp4_quant_fwd_inp: QParams = field(init=False)
    fp4_quant_fwd_weight: QParams = field(init=False)
    fp4_quant_bwd_grad: QParams = field(init=False)

    def __init__(
        self,
        disable_rht: Optional[bool] = None,
        disable_stochastic_rounding: Optional[bool] = None,
        disable_2d_quantization: Optional[bool] = None,
        row_scaled_activation: Optional[bool] = None,
        nvfp4_4over6: Optional[str] = None,
        nvfp4_4over6_e4m3_use_256: Optional[str] = None,
        nvfp4_4over6_err_mode: Optional[str] = None,
        fp4_format: Format = Format.E2M1,
        fp8_format: Format = Format.E4M3,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: Optional[str] = FROM_ENVIRONMENT,
        **unknown,
    ) -> None:
        self._note_unknown(unknown)
        self.disable_rht = _nvfp4_flag("disable_rht", disable_rht)
        self.disable_stochastic_rounding = _nvfp4_flag(
            "disable_stochastic_rounding", disable_stochastic_rounding
        )
        self.disable_2d_quantization = _nvfp4_flag(
            "disable_2d_quantization", disable_2d_quantization
        )
        self.row_scaled_activation = _nvfp4_flag("row_scaled_activation", row_scaled_activation)
        self.nvfp4_4over6 = _tensor_group("nvfp4_4over6", nvfp4_4over6, "4OVER6", "none")
        self.nvfp4_4over6_e4m3_use_256 = _tensor_group(
            "nvfp4_4over6_e4m3_use_256", nvfp4_4over6_e4m3_use_256, "4OVER6_E4M3_USE_256", "all"
        )
        if nvfp4_4over6_err_mode is None:
            nvfp4_4over6_err_mode = environment.nvfp4_text("4OVER6_ERR_MODE", "MAE").upper()
        self.nvfp4_4over6_err_mode = as_choice(
            "nvfp4_4over6_err_mode", nvfp4_4over6_err_mode, ("MAE", "MSE")
        )
        self.fp4_format = as_choice("fp4_format", fp4_format, (Format.E2M1,))
        self.fp8_format = as_choice("fp8_format", fp8_format, (Format.E4M3,))
        self.fp8_dpa = as_bool("fp8_dpa", fp8_dpa)
        self.fp8_mha = as_bool("fp8_mha", fp8_mha)
        self.backward_override = as_backward_override(backward_override)
        self.fp4_quant_fwd_inp = QParams(random_hadamard_transform=not self.disable_rht)
        self.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=not self.disable_2d_quantization)
        self.fp4_quant_bwd_grad = QParams(
            random_hadamard_transform=not self.disable_rht,
            stochastic_rounding=not self.disable_stochastic_rounding,
        )
        self._complete = True

    def _describe(self) -> str:
        return module_spec(
            self._quantization(self.fp4_quant_fwd_inp, "activations", self.row_scaled_activation),
            self._quantization(self.fp4_quant_fwd_weight, "weights", False),
            self._quantization(self.fp4_quant_bwd_grad, "", False),
            _SPLIT,
            self.backward_override,
        )

    def _conflict(self) -> str:
        for group, name in (
            ("activations", "fp4_quant_fwd_inp"),
            ("weights", "fp4_quant_fwd_weight"),
        ):
            params, fields = getattr(self, name), []
            if self.nvfp4_4over6 in (group, "all"):
                fields.append((f"nvfp4_4over6={self.nvfp4_4over6!r}", ()))
            if group == "activations" and self.row_scaled_activation:
                fields.append(("row_scaled_activation=True", ("fp4_2d_quantization",)))
            for field_text, excluded in fields:
                for option in ("random_hadamard_transform", "stochastic_rounding", *excluded):
                    if not getattr(params, option):
                        continue
                    cure = f"Assign {name} a QParams without it."
                    if option == "random_hadamard_transform":
                        cure = (
                            "Make the recipe with disable_rht=True, or assign QParams without it"
                            " (fp4_quant_fwd_inp and fp4_quant_bwd_grad)."
                        )
                    return (
                        f"{field_text} cannot be combined with {option} of the {group}, which"
                        f" {name} has. {cure}"
                    )
        return ""

    def _quantization(self, params: QParams, group: str, row_scaled: bool) -> str:
        """One tensor role; `group` is its name in `nvfp4_4over6`, "" for gradients."""
        choosing = group != "" and self.nvfp4_4over6 in (group, "all")
        limited = choosing and self.nvfp4_4over6_e4m3_use_256 in (group, "all")
        return quantization(
            "nvfp4",
            "e2m1",
            dim=2 if params.fp4_2d_quantization else None,
            swizzled=True,
            rht=params.random_hadamard_transform,
            stochastic=params.stochastic_rounding,
            row_scaled=row_scaled,
            four_over_six=self.nvfp4_4over6_err_mode.lower() if choosing else None,
            e4m3_max=256 if limited else None,
        )

    @classmethod
    def nvfp4(cls) -> bool:
        return True


def _nvfp4_flag(name: str, value: Optional[bool]) -> bool:
    if value is None:
        value = environment.nvfp4_flag(name.upper())
    return as_bool(name, value)


def _tensor_group(name: str, value: Optional[str], variable: str, default: str) -> str:
    if value is None:
        value = environment.nvfp4_text(variable, default)
    return as_choice(name, value, ("none", "weights", "activations", "all"))
