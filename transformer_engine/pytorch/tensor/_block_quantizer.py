# SPDX-License-Identifier: Apache-2.0
"""What quantizers of formats with one scale per block share."""

from __future__ import annotations

from typing import Iterable, Optional

import torch
from torch import Tensor

from ._buffer_quantizer import BufferQuantizer
from ._shapes import matrix_shape


class BlockQuantizer(BufferQuantizer):
    """Blocks of ``block_len`` consecutive values, along rows and columns.

    ``needs_whole_blocks`` says whether a shape that does not divide into blocks is an error.
    """

    block_len = 1
    needs_whole_blocks = True

    def _check(self, shape: tuple, dtype: Optional[torch.dtype] = None) -> None:
        del dtype
        if len(shape) == 0:
            raise ValueError(
                f"{type(self).__name__} can not quantize a tensor without dimensions. Pass one "
                "with at least one."
            )
        if not self.needs_whole_blocks:
            return
        rows, columns = matrix_shape(shape)
        for name, size in (
            ("last dimension", columns),
            ("product of the dimensions before the last one", rows),
        ):
            if size % self.block_len:
                fitting = -(-size // self.block_len) * self.block_len
                raise ValueError(
                    f"{type(self).__name__} can not quantize a tensor of shape {tuple(shape)}: the "
                    f"{name} is {size}, which is no multiple of {self.block_len}. Pad it to "
                    f"{fitting}, or keep this tensor in high precision."
                )

    def is_quantizable(self, tensor: Tensor) -> bool:
        """Whether the tensor has two dimensions or more and divides into blocks both ways."""
        rows, columns = matrix_shape(tensor.shape) if tensor.dim() else (1, 1)
        return tensor.dim() >= 2 and columns % self.block_len == 0 and rows % self.block_len == 0

    def get_scale_shape(self, shape: Iterable[int], columnwise: bool) -> tuple[int, ...]:
        """Shape of the block scales of a tensor of ``shape``, padding included."""
        quantizer = self.copy()
        quantizer.set_usage(rowwise=not columnwise, columnwise=columnwise)
        name = "_columnwise_scale_inv" if columnwise else "_rowwise_scale_inv"
        return quantizer.inner_tensor_specs(shape)[name].shape
