# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the PyTorch front-end reads.

Each is a small function, called when a module is made or a context is entered, so setting a
variable after the package was imported has an effect. In compiled code the value is read while
tracing and is a constant of the graph. The variables that give recipes their defaults are in
``transformer_engine.common.environment``.
"""

from ..common.environment import constant_in_graphs, flag, integer, set_flags, text
from .formats.layout import LayoutFlags

__all__ = [
    "UNSAFE_PICKLE_EXTRA_STATE_ENV",
    "bias_gelu_fusion_enabled",
    "constant_in_graphs",
    "flag",
    "gemm_gelu_fusion_enabled",
    "integer",
    "layout_flags",
    "norm_sm_margin",
    "nvtx_enabled",
    "set_flags",
    "text",
    "unfused_fp8_update",
    "unsafe_pickle_extra_state_enabled",
]

UNSAFE_PICKLE_EXTRA_STATE_ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def unfused_fp8_update() -> bool:
    """NVTE_UNFUSED_FP8_UPDATE=1: update delayed scales by the rule that also updates slots without
    a new amax.
    """
    return flag("NVTE_UNFUSED_FP8_UPDATE")


def layout_flags() -> LayoutFlags:
    """What decides in which order kernels write block scales.

    NVTE_NORM_FWD_USE_CUDNN=1: as the reference package's norms do when they use cuDNN.
    NVTE_NVFP4_DISABLE_RHT_CAST_FUSION=1: the Hadamard transform and the cast are separate kernels.
    """
    return LayoutFlags(
        flag("NVTE_NORM_FWD_USE_CUDNN"), not flag("NVTE_NVFP4_DISABLE_RHT_CAST_FUSION")
    )


def norm_sm_margin(direction: str) -> int:
    """Streaming multiprocessors that norm kernels leave free; `direction` is "FWD", "BWD" or "INF".

    NVTE_FWD_LAYERNORM_SM_MARGIN, NVTE_BWD_LAYERNORM_SM_MARGIN, NVTE_INF_LAYERNORM_SM_MARGIN.
    """
    return integer(f"NVTE_{direction}_LAYERNORM_SM_MARGIN")


def bias_gelu_fusion_enabled() -> bool:
    """NVTE_BIAS_GELU_NVFUSION (default 1): what `LayerNormMLP.bias_gelu_nvfusion` says."""
    return flag("NVTE_BIAS_GELU_NVFUSION", True)


def gemm_gelu_fusion_enabled() -> bool:
    """NVTE_GEMM_GELU_FUSION (default 0): what `LayerNormMLP.gemm_gelu_fusion` says."""
    return flag("NVTE_GEMM_GELU_FUSION")


def nvtx_enabled() -> bool:
    """NVTE_NVTX_ENABLED=1: mark ranges for NVIDIA's profilers."""
    return flag("NVTE_NVTX_ENABLED")


def unsafe_pickle_extra_state_enabled() -> bool:
    """NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1: unpickle ``_extra_state`` entries of checkpoints that
    can not be read otherwise, which can run any code that is in them.
    """
    return flag(UNSAFE_PICKLE_EXTRA_STATE_ENV)
