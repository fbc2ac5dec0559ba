# SPDX-License-Identifier: Apache-2.0
"""Quantizers of every kind, and helpers that the tests of quantized tensors share."""

import torch

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def _delayed(device):
    scale, amax = torch.full((1,), 20.0, device=device), torch.zeros(1, device=device)
    return Float8Quantizer(scale, amax, E4M3)


def _block(dim):
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


def _hybrid(**options):
    return HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=NVFP4Quantizer(), **options
    )


def _per_tensor_hybrid():
    return HybridQuantizer(
        rowwise_quantizer=Float8CurrentScalingQuantizer(E4M3),
        columnwise_quantizer=Float8CurrentScalingQuantizer(E5M2),
    )


# By name: what makes one, given a device.
QUANTIZERS = {
    "delayed": _delayed,
    "current": lambda device: Float8CurrentScalingQuantizer(E4M3),
    "block_1d": lambda device: _block(1),
    "block_2d": lambda device: _block(2),
    "mxfp8": lambda device: MXFP8Quantizer(E4M3),
    "mxfp8_2d": lambda device: MXFP8Quantizer(E5M2, with_2d_quantization=True),
    "nvfp4": lambda device: NVFP4Quantizer(),
    "nvfp4_2d": lambda device: NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_rht": lambda device: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4_row_scaled": lambda device: NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4_4over6": lambda device: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
    "identity": lambda device: IdentityQuantizer(),
    "hybrid": lambda device: _hybrid(),
    "hybrid_from_row": lambda device: _hybrid(columnwise_source="rowwise_dequantized"),
    "hybrid_per_tensor": lambda device: _per_tensor_hybrid(),
}
# One per storage class.
KINDS = ["current", "block_1d", "mxfp8", "nvfp4", "identity", "hybrid"]


def random(shape, device="cpu", dtype=torch.bfloat16, seed=0):
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)


def buffers(tensor):
    """Every buffer of a quantized tensor, on the CPU, those of parts included."""
    return [None if b is None else b.cpu() for b in tensor.prepare_for_saving()[0]]


def same_bytes(tensor, other):
    """Whether two quantized tensors consist of the same bytes."""
    pairs = list(zip(buffers(tensor), buffers(other), strict=True))
    return all((a is None) == (b is None) for a, b in pairs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs if a is not None
    )


def addresses(tensor):
    """Where the buffers are."""
    return [None if b is None else b.data_ptr() for b in tensor.prepare_for_saving()[0]]


def parts(tensor):
    """The tensor and, of a hybrid one, what it consists of."""
    inner = [p for p in tensor._buffers().values() if isinstance(p, QuantizedTensorStorage)]
    return [tensor, *inner]
