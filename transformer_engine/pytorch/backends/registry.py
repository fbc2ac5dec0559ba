# SPDX-License-Identifier: Apache-2.0
"""The backend table: which implementations each leaf op has, what each needs, which is taken.

A row answers one question, ``why_not(request)``: the empty string means "usable", anything else is
the reason, a full sentence part that warnings, errors and ``te.explain`` print as it is. Rows are
tried in order; the first usable one is taken. The choice never depends on the number of rows of an
operand, so a compiled graph with a dynamic batch cannot pick a different kernel than eager does.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, NamedTuple

import torch

from ..formats.spec import QuantSpec, decode_quant


class Request(NamedTuple):
    """What a leaf op is asked to run on."""

    leaf: str
    device: torch.device
    dtype: torch.dtype
    quant: str = ""  # of the result, or of the first GEMM operand
    b_quant: str = ""  # of the second GEMM operand
    alignment: int = 1  # of the feature dimensions of a quantized GEMM, see ``ops.gemm_alignment``


@dataclass(frozen=True)
class Row:
    """One implementation of some leaf ops."""

    name: str
    leaves: frozenset[str]
    module: str
    why_not: Callable[[Request], str]


class Choice(NamedTuple):
    """The implementation taken for a request and the ones passed over, with reasons."""

    name: str
    run: Callable
    passed_over: tuple[tuple[str, str], ...]


POINTWISE_LEAVES = frozenset(
    {
        "quantize",
        "dequantize",
        "norm_forward",
        "norm_backward",
        "activation_forward",
        "activation_backward",
        "bias_grad",
        "record_amax_",
        "delayed_scaling_update_",
    }
)
_PACKAGE = "transformer_engine.pytorch.backends"
_GLUON_RELEASES = ("3.6",)  # of Triton whose Gluon, an experimental language, has our kernels run
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@functools.lru_cache(maxsize=None)
def device_capability(index: int) -> tuple[int, int]:
    """Compute capability of CUDA device ``index``."""
    return torch.cuda.get_device_capability(index)


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of ``device``; (0, 0) where it is no CUDA device (that is there)."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return device_capability(device.index or 0)


def has_fp8_tensor_cores(device: torch.device) -> bool:
    """Whether the GPU multiplies FP8 operands in hardware (compute capability 8.9 and newer)."""
    return device.type == "cuda" and device_capability(device.index or 0) >= (8, 9)


def needs_transposed_operands(device: torch.device) -> bool:
    """Whether FP8 GEMMs take only operands whose contracted dimension is the last one.

    True up to Hopper (and for the CPU, which mirrors it); Blackwell data-center parts also multiply
    the other layouts.
    """
    if device.type != "cuda":
        return True
    major, _ = device_capability(device.index or 0)
    return not (10 <= major < 12 or major >= 13)


@functools.lru_cache(maxsize=1)
def triton_missing() -> str:
    """Why Triton can not be used on this machine; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return ""


def gluon_missing() -> str:
    """Why kernels written in Triton's Gluon can not be used on this machine; empty if they can."""
    missing = triton_missing()
    if missing:
        return missing
    version = importlib.import_module("triton").__version__
    if ".".join(version.split(".")[:2]) not in _GLUON_RELEASES:
        releases = " and ".join(_GLUON_RELEASES)
        return f"the kernel is written in the Gluon of Triton {releases}, and this is {version}"
    return ""


def _triton_why_not(request: Request) -> str:
    if request.device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {request.device.type}"
    if request.dtype not in _FLOATS and request.dtype is not torch.uint8:
        return f"the Triton kernels take float32, bfloat16 and float16, not {request.dtype}"
    if request.quant and device_capability(request.device.index or 0) < (8, 9):
        return "Triton casts to FP8 only on GPUs of compute capability 8.9 and newer"
    if "rht" in request.quant and request.dtype not in (torch.bfloat16, torch.uint8):
        return f"the Triton kernels transform bfloat16 values, not {request.dtype}"
    return triton_missing()


def _kinds(request: Request) -> tuple[QuantSpec, QuantSpec]:
    return decode_quant(request.quant), decode_quant(request.b_quant)


def _per_tensor_why_not(request: Request) -> str:
    if not request.quant:
        return "the operands are not quantized"
    a, b = _kinds(request)
    if not (a.per_tensor and b.per_tensor):
        return "the operands do not both have one scale per tensor"
    if not has_fp8_tensor_cores(request.device):
        return f"{request.device} has no FP8 tensor cores"
    if a.fmt == b.fmt == "e5m2":
        return "cuBLASLt does not multiply E5M2 by E5M2"
    if request.alignment < 16:
        return "cuBLASLt wants in_features and out_features to be multiples of 16 for FP8"
    return ""


def _not_both_blocks(request: Request) -> str:
    """Why no row for scales of 128 values takes these operands; empty if one may."""
    if not request.quant:
        return "the operands are not quantized"
    a, b = _kinds(request)
    if not a.kind == b.kind == "block":
        return "the operands do not both have scales of 128 values"
    return ""


def _block_why_not(request: Request) -> str:
    reason = _not_both_blocks(request)
    if reason:
        return reason
    a, b = _kinds(request)
    if capability_of(request.device)[0] != 9:
        return "cuBLASLt multiplies operands with scales of 128 values on Hopper only"
    if _cuda_version() < (12, 9):
        return "cuBLASLt has block scaling from CUDA 12.9 on"
    if a.dim == b.dim == 2:
        return "cuBLASLt does not multiply two operands with 128x128 blocks"
    if not a.fmt == b.fmt == "e4m3":
        return "torch's scaled_mm takes E4M3 operands only with scales of 128 values"
    if request.alignment < 16:
        return "cuBLASLt wants in_features and out_features to be multiples of 16 for FP8"
    return ""


def _triton_block_why_not(request: Request) -> str:
    reason = _not_both_blocks(request)
    if reason:
        return reason
    if capability_of(request.device)[0] != 9:
        return "the Triton kernel for scales of 128 values is made for Hopper GPUs"
    if request.alignment < 16:
        return "the Triton kernel wants in_features and out_features to be multiples of 16"
    return gluon_missing()


def _mxfp8_why_not(request: Request) -> str:
    if not request.quant:
        return "the operands are not quantized"
    a, b = _kinds(request)
    if not a.kind == b.kind == "mxfp8":
        return "the operands are not both MXFP8"
    if not (10, 0) <= capability_of(request.device) < (12, 0):
        return "MXFP8 GEMMs need a GPU of compute capability 10.x or 11.x"
    if request.alignment < 32:
        return "MXFP8 GEMMs want in_features and out_features to be multiples of 32"
    return ""


def _nvfp4_why_not(request: Request) -> str:
    if not request.quant:
        return "the operands are not quantized"
    a, b = _kinds(request)
    if not a.kind == b.kind == "nvfp4":
        return "the operands are not both NVFP4"
    if capability_of(request.device) < (10, 0):
        return "NVFP4 GEMMs need a GPU of compute capability 10.0 or newer"
    if request.alignment < 32:
        return "NVFP4 GEMMs want in_features and out_features to be multiples of 32"
    return ""


def _mm_why_not(request: Request) -> str:
    return "the operands are quantized" if request.quant else ""


@functools.lru_cache(maxsize=None)
def _cuda_version() -> tuple[int, ...]:
    """Version of CUDA that PyTorch was built with; ``(0,)`` for a build without."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


def _always(_: Request) -> str:
    return ""


_GEMM = frozenset({"gemm"})
ROWS: tuple[Row, ...] = (
    Row("torch_mm", _GEMM, "cublas:plain_gemm", _mm_why_not),
    Row("cublas_fp8", _GEMM, "cublas:per_tensor_gemm", _per_tensor_why_not),
    Row("cublas_block", _GEMM, "cublas:block_gemm", _block_why_not),
    Row("triton_block", _GEMM, "triton.block_gemm:block_gemm", _triton_block_why_not),
    Row("cublas_mxfp8", _GEMM, "cublas_blackwell:mxfp8_gemm", _mxfp8_why_not),
    Row("cublas_nvfp4", _GEMM, "cublas_blackwell:nvfp4_gemm", _nvfp4_why_not),
    Row("dequantized_mm", _GEMM, "emulated_gemm:dequantized_gemm", _always),
    Row("triton", POINTWISE_LEAVES, "triton", _triton_why_not),
    Row("reference", POINTWISE_LEAVES | {"accumulate_"}, "reference", _always),
)

_forced: list[str] = []


@functools.lru_cache(maxsize=None)
def select(request: Request) -> Choice:
    """Take the first usable implementation for ``request`` and say why others were passed over."""
    passed_over = []
    for row in ROWS:
        if request.leaf not in row.leaves:
            continue
        reason = row.why_not(request)
        if not reason and _forced and row.name != _forced[-1] and request.leaf != "gemm":
            reason = f"force_backend({_forced[-1]!r}) is active"
        if reason:
            passed_over.append((row.name, reason))
            continue
        module, _, function = row.module.partition(":")
        implementation = getattr(
            importlib.import_module(f"{_PACKAGE}.{module}"), function or request.leaf
        )
        return Choice(row.name, implementation, tuple(passed_over))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over) or "no row names it"
    raise RuntimeError(f"No backend can run {request.leaf} on {request.device}: {reasons}.")


def forced_backends() -> tuple:
    """What `force_backend` asks for at the moment."""
    return tuple(_forced)


@contextmanager
def force_backend(name: str) -> Iterator[None]:
    """Run pointwise leaf ops with the backend called ``name`` (for tests and debugging)."""
    _forced.append(name)
    select.cache_clear()
    try:
        yield
    finally:
        _forced.pop()
        select.cache_clear()
