# SPDX-License-Identifier: Apache-2.0
"""Quantizers and quantized tensors, one file per format family."""

from ..quantized_tensor import (
    QuantizedTensorStorage,
    Quantizer,
    prepare_for_saving,
    restore_from_saved,
)
from .float8_quantizer import Float8CurrentScalingQuantizer, Float8Quantizer
from .float8_tensor import Float8TensorStorage

__all__ = [
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8TensorStorage",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_saved",
]
