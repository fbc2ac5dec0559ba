# SPDX-License-Identifier: Apache-2.0
"""Names and numbers that other packages read."""

from enum import Enum, IntEnum
from types import SimpleNamespace

import torch


class DType(IntEnum):
    """Data types under the integers that the C++ interface of the reference package uses."""

    # pylint: disable=invalid-name  # the names of the C++ enum
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, value) -> "DType":
        """`value`, an integer or any enum member convertible to one, as a `DType`."""
        return cls(int(value))


# The data type of a torch dtype, and back.
TE_DType = {
    torch.uint8: DType.kByte,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
}
TE_DType_To_Torch = {te_dtype: dtype for dtype, te_dtype in TE_DType.items()}

# Slots of the quantizers of a module, three per GEMM forward and two per GEMM backward.
FP8FwdTensorIdx = SimpleNamespace(
    GEMM1_INPUT=0,
    GEMM1_WEIGHT=1,
    GEMM1_OUTPUT=2,
    GEMM2_INPUT=3,
    GEMM2_WEIGHT=4,
    GEMM2_OUTPUT=5,
    GEMM3_OUTPUT=8,
)
FP8BwdTensorIdx = SimpleNamespace(
    GRAD_OUTPUT1=0,
    GRAD_INPUT1=1,
    GRAD_OUTPUT2=2,
    GRAD_INPUT2=3,
    GRAD_OUTPUT3=4,
    GRAD_INPUT3=5,
)

# Values per scale.
MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16

GemmParallelModes = ("row", "column", None)

# Builds of PyTorch without distributed have no process groups.
dist_group_type = getattr(torch.distributed, "ProcessGroup", object)


class CPLoadBalancingStrategy(Enum):
    """How attention splits a sequence over the ranks of a context-parallel group."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"
