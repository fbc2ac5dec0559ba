# SPDX-License-Identifier: Apache-2.0
"""Bare storages of quantized tensors."""

from .float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from .float8_tensor_storage import Float8TensorStorage
from .hybrid_tensor_storage import HybridQuantizedTensorStorage
from .identity_tensor_storage import IdentityTensorStorage
from .mxfp8_tensor_storage import MXFP8TensorStorage
from .nvfp4_tensor_storage import NVFP4TensorStorage

__all__ = [
    "Float8BlockwiseQTensorStorage",
    "Float8TensorStorage",
    "HybridQuantizedTensorStorage",
    "IdentityTensorStorage",
    "MXFP8TensorStorage",
    "NVFP4TensorStorage",
]
