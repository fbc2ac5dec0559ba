# SPDX-License-Identifier: Apache-2.0
"""Small helpers that modules and other packages use."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from .environment import constant_in_graphs, nvtx_enabled

# --- initialisation -------------------------------------------------------------------------------


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """In-place initialiser with values of N(0, sigma)."""
    # Not a local function: modules keep their initialisers, and modules are pickled.
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """In-place initialiser with values of N(0, sigma / sqrt(2 num_layers)), for layers before a
    residual.
    """
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def init_method_constant(value: float) -> Callable[[Tensor], Tensor]:
    """In-place initialiser that fills with `value`."""
    return functools.partial(torch.nn.init.constant_, val=value)


def get_default_init_method() -> Callable[[Tensor], Tensor]:
    """Initialiser of weights where none is given: N(0, 0.023)."""
    return init_method_normal(0.023)


# --- numbers --------------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise a ValueError unless `denominator` divides `numerator`."""
    if numerator % denominator != 0:
        raise ValueError(f"{numerator} is not divisible by {denominator}.")


def divide(numerator: int, denominator: int) -> int:
    """`numerator / denominator` where that is an integer, a ValueError otherwise."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ceil_div(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, rounded up."""
    return (numerator + denominator - 1) // denominator


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`."""
    if multiple == 0:
        raise ValueError("The multiple to round up to must not be 0.")
    return ceil_div(value, multiple) * multiple


# --- tensors --------------------------------------------------------------------------------------


def requires_grad(*tensors: Optional[Tensor]) -> bool:
    """Whether any of the tensors requires a gradient; None counts as no tensor."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def cast_if_needed(tensor: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    """`tensor` in `dtype`: itself if it has that dtype already; None stays None."""
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype)


def clear_tensor_data(*tensors: Optional[Tensor]) -> None:
    """Free the memory of tensors that are not needed any more; None is skipped."""
    from .quantized_tensor import QuantizedTensorStorage  # imports this module

    for tensor in tensors:
        if isinstance(tensor, QuantizedTensorStorage):
            tensor.clear()
        elif tensor is not None:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Overwrite masked scores (mask True) with -10000, in place."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def check_dim_for_fp8_exec(tensor: Tensor) -> bool:
    """Whether `tensor` fits an FP8 GEMM: last dimension a multiple of 16, product of the others of
    8.
    """
    return tensor.shape[-1] % 16 == 0 and math.prod(tensor.shape[:-1]) % 8 == 0


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    """Raise an AssertionError that names the first tensor `check_dim_for_fp8_exec` says no to."""
    for number, tensor in enumerate(tensors):
        if not check_dim_for_fp8_exec(tensor):
            raise AssertionError(
                "FP8 execution requires the product of all dimensions except the last to be"
                " divisible by 8 and the"
                f" last dimension to be divisible by 16, but tensor {number} has shape"
                f" {tuple(tensor.shape)}. Pad it,"
                " or leave the FP8 region for this call."
            )


def canonicalize_device(device: Optional[torch.device | str | int]) -> torch.device:
    """`device` as a torch.device with an index where its type has any; None is torch's default
    device.
    """
    if device is None:
        device = torch.get_default_device()
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def canonicalize_dtype(dtype: Optional[torch.dtype]) -> torch.dtype:
    """`dtype`, or torch's default dtype for None."""
    return torch.get_default_dtype() if dtype is None else dtype


def canonicalize_process_group(group: Optional[Any]) -> Any:
    """`group`, or the default process group for None."""
    return torch.distributed.group.WORLD if group is None else group


# --- device ---------------------------------------------------------------------------------------


@constant_in_graphs
def _compute_capability_text() -> str:
    if not torch.cuda.is_available():
        return "0.0"
    major, minor = torch.cuda.get_device_capability(torch.cuda.current_device())
    return f"{major}.{minor}"


def get_device_compute_capability() -> Tuple[int, int]:
    """Compute capability ``(major, minor)`` of the current CUDA device; ``(0, 0)`` where there is
    none.
    """
    major, minor = _compute_capability_text().split(".")
    return int(major), int(minor)


def get_cudnn_version() -> Tuple[int, int, int]:
    """Version of cuDNN that PyTorch uses; ``(0, 0, 0)`` where there is none."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if version is None:
        return 0, 0, 0
    # From version 9 the number has two digits for minor and patch each, before that one for minor.
    major_magnitude = 10000 if version >= 90000 else 1000
    major, rest = divmod(version, major_magnitude)
    return major, rest // 100, rest % 100


def is_bf16_compatible() -> bool:
    """Whether the device computes in bfloat16: compute capability 8.0 or newer, and every CPU."""
    capability = get_device_compute_capability()
    return capability == (0, 0) or capability >= (8, 0)


def is_non_tn_fp8_gemm_supported() -> bool:
    """Whether FP8 GEMMs take operands that are not transposed: compute capability 10.x, 11.x, or
    13.0 and newer.
    """
    capability = get_device_compute_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def gpu_autocast_ctx(*args, **kwargs):
    """``torch.autocast`` for CUDA devices."""
    return torch.autocast("cuda", *args, **kwargs)


# --- profiling ------------------------------------------------------------------------------------


def nvtx_range_push(message: str) -> None:
    """Open a range for NVIDIA's profilers if NVTE_NVTX_ENABLED is 1."""
    if nvtx_enabled():
        torch.cuda.nvtx.range_push(message)


def nvtx_range_pop(message: Optional[str] = None) -> None:
    """Close the range opened last if NVTE_NVTX_ENABLED is 1; `message` is for the reader of the
    code.
    """
    del message
    if nvtx_enabled():
        torch.cuda.nvtx.range_pop()


def get_nvtx_range_context(message: str):
    """Context manager around a range for NVIDIA's profilers; does nothing unless NVTE_NVTX_ENABLED
    is 1.
    """
    return torch.cuda.nvtx.range(message) if nvtx_enabled() else nullcontext()
