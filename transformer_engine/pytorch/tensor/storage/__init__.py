# SPDX-License-Identifier: Apache-2.0
"""Bare storages of quantized tensors."""

from .float8_tensor_storage import Float8TensorStorage

__all__ = ["Float8TensorStorage"]
