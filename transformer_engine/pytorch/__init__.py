# SPDX-License-Identifier: Apache-2.0
"""Transformer layers in low precision for PyTorch, in eager and in one compiled graph.

``import transformer_engine.pytorch as te``
"""

from . import constants, distributed, module, quantization, quantized_tensor, tensor, utils
from .constants import DType
from .module import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from .quantization import (
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from .quantized_tensor import (
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_saved,
)
from .tensor import Float8CurrentScalingQuantizer, Float8Quantizer, Float8TensorStorage
from .utils import get_device_compute_capability

__all__ = [
    "DType",
    "DelayedScalingRequest",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8TensorStorage",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "autocast",
    "constants",
    "distributed",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "module",
    "quantization",
    "quantized_model_init",
    "prepare_for_saving",
    "quantized_tensor",
    "restore_from_saved",
    "tensor",
    "utils",
]
