# SPDX-License-Identifier: Apache-2.0
"""What the quantizers and the quantized tensors of all formats have in common.

The formats are in ``tensor/``.
"""

from .tensor._quantizer import Quantizer
from .tensor._saving import prepare_for_saving, restore_from_func_ctx, restore_from_saved
from .tensor._storage import QuantizedTensorStorage
from .tensor._tensor import QuantizedTensor

__all__ = [
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
]
