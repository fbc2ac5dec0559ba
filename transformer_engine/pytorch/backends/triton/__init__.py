# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the pointwise leaf ops, for CUDA devices.

Importing this package imports neither Triton nor the kernels: a leaf function is found, and its
file imported, when the attribute of its name is first asked for. ``TRITON_INTERPRET=1`` (set before
Triton is imported) runs the same kernels on CPU tensors, which is how their indexing is tested
without a GPU.

The numbers are those of ``backends/reference.py``. FP8 bytes and scales of given high-precision
values match it bit for bit; norms and activations agree to the last bits of the output dtype. All
kernels are deterministic: sums are taken in a fixed order and only maxima use atomics.
"""

from __future__ import annotations

import importlib

# The file of each leaf. No file may bear the name of a leaf: importing it would put the module in
# the place of the function.
LEAVES = {
    "quantize": "cast",
    "dequantize": "cast",
    "norm_forward": "norm",
    "norm_backward": "norm_gradients",
    "activation_forward": "activation",
    "activation_backward": "activation",
    "bias_grad": "reduce",
    "record_amax_": "delayed",
    "delayed_scaling_update_": "delayed",
}


def __getattr__(name: str):
    if name not in LEAVES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = getattr(importlib.import_module(f"{__name__}.{LEAVES[name]}"), name)
    globals()[name] = function
    return function


def __dir__() -> list:
    return sorted({*globals(), *LEAVES})
