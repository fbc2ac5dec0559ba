# SPDX-License-Identifier: Apache-2.0
"""Tensors in E4M3 or E5M2 with one fp32 scale: the public names."""

from .float8_quantizer import Float8CurrentScalingQuantizer, Float8Quantizer
from .storage.float8_tensor_storage import Float8TensorStorage, storage_from_bytes

__all__ = [
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8TensorStorage",
    "storage_from_bytes",
]
