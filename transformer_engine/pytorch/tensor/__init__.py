# SPDX-License-Identifier: Apache-2.0
"""Quantizers and quantized tensors, one file per format family."""

import torch

from ..constants import DType
from ._from_quantized import hybrid_storage, storage_from_quantized
from ._fsdp import share_amax
from ._pickle import makers
from ._quantizer import Quantizer, _make_quantizer
from ._saving import prepare_for_saving, restore_from_func_ctx, restore_from_saved
from ._storage import QuantizedTensorStorage
from ._tensor import QuantizedTensor
from .float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8BlockwiseQTensorStorage,
    _make_float8_blockwise_tensor_in_reduce_ex,
)
from .float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
    _make_float8_tensor_in_reduce_ex,
)
from .hybrid_tensor import (
    HybridQuantizedTensor,
    HybridQuantizedTensorStorage,
    HybridQuantizer,
    _make_hybrid_quantized_tensor_in_reduce_ex,
)
from .identity_tensor import (
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
    _make_identity_tensor_in_reduce_ex,
)
from .mxfp8_tensor import (
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
    _make_mxfp8_tensor_in_reduce_ex,
)
from .nvfp4_tensor import (
    NVFP4Quantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
    _make_nvfp4_tensor_in_reduce_ex,
)

__all__ = [
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "hybrid_storage",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
    "share_amax",
    "storage_from_quantized",
]

# What torch.load(weights_only=True) may call or make: constructors of plain data, nothing else.
torch.serialization.add_safe_globals(
    [
        *makers(),
        _make_quantizer,
        DType,
        Float8BlockQuantizer,
        Float8BlockwiseQTensor,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        Float8Tensor,
        HybridQuantizedTensor,
        HybridQuantizer,
        IdentityQuantizer,
        IdentityTensor,
        MXFP8Quantizer,
        MXFP8Tensor,
        NVFP4Quantizer,
        NVFP4Tensor,
    ]
)
