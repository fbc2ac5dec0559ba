# SPDX-License-Identifier: Apache-2.0
"""The place where ``Float8Tensor`` used to be; it is in ``transformer_engine.pytorch.tensor``."""

from .tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
