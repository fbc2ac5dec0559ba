# SPDX-License-Identifier: Apache-2.0
"""Transformer layers in low precision for PyTorch, in eager and in one compiled graph.

``import transformer_engine.pytorch as te``
"""

from . import (
    constants,
    cpu_offload,
    distributed,
    export,
    module,
    quantization,
    quantized_tensor,
    tensor,
    utils,
)
from .constants import DType
from .cpu_offload import (
    ManualOffloadSynchronizer,
    get_cpu_offload_context,
    mark_not_offload,
)
from .diagnostics import explain, memory_report
from .distributed import CudaRNGStatesTracker, checkpoint
from .export import onnx_export
from .graph import make_graphed_callables
from .module import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from .quantization import (
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from .tensor import *  # pylint: disable=wildcard-import
from .tensor import (
    _make_float8_blockwise_tensor_in_reduce_ex,
    _make_float8_tensor_in_reduce_ex,
    _make_hybrid_quantized_tensor_in_reduce_ex,
    _make_identity_tensor_in_reduce_ex,
    _make_mxfp8_tensor_in_reduce_ex,
    _make_nvfp4_tensor_in_reduce_ex,
)
from .utils import get_device_compute_capability

__all__ = [
    "CudaRNGStatesTracker",
    "DType",
    "DelayedScalingRequest",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "ManualOffloadSynchronizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "constants",
    "cpu_offload",
    "distributed",
    "explain",
    "export",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "get_default_recipe",
    "get_device_compute_capability",
    "graph",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "mark_not_offload",
    "memory_report",
    "module",
    "onnx_export",
    "quantization",
    "quantized_model_init",
    "quantized_tensor",
    "tensor",
    "utils",
    *tensor.__all__,
]


def __getattr__(name: str):
    absent = {
        "DotProductAttention": "use torch.nn.functional.scaled_dot_product_attention",
        "GroupedLinear": "use a Linear for each group",
        "MultiheadAttention": "use LayerNormLinear, scaled_dot_product_attention and Linear",
        "TransformerLayer": "use LayerNormLinear, scaled_dot_product_attention and LayerNormMLP",
    }
    hint = f": it is not in this package; {absent[name]}" if name in absent else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
