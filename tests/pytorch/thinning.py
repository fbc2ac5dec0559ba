# SPDX-License-Identifier: Apache-2.0
"""Which cases of the largest matrices run where there is no GPU.

A run of the whole directory on a CPU takes one in so many cases of the tests below, always the same
ones, chosen by a hash of their names so that no parameter is left out in step with another. All of
them run on a machine with a GPU, with ``TEST_WIDE=1``, and wherever files or cases are named or
chosen (``-k``, ``-m``). Functions with few cases are left whole.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter

import torch

ONE_IN = {
    "backends/test_triton_activation.py": 4,
    "backends/test_triton_block_producers.py": 4,
    "backends/test_triton_block_scaled.py": 4,
    "distributed/test_dcp.py": 3,
    "distributed/test_fsdp2.py": 4,
    "graphs/test_graphed_caching.py": 3,
    "graphs/test_graphed_recompute.py": 3,
    "graphs/test_graphed_training.py": 2,
    "graphs/test_weight_flag.py": 3,
    "module/test_compile_cache.py": 6,
    "module/test_compile_cache_life.py": 2,
    "module/test_compile_composition.py": 4,
    "module/test_compile_delayed.py": 2,
    "module/test_compile_dynamic.py": 4,
    "module/test_compile_gradients.py": 5,
    "module/test_compile_matrix.py": 6,
    "module/test_compile_primary.py": 3,
    "module/test_compile_training.py": 4,
    "module/test_compile_transforms.py": 2,
    "module/test_compile_whole.py": 4,
    "module/test_mlp_recompute.py": 2,
    "module/test_primary_weights.py": 2,
    "module/test_recipe_numerics.py": 2,
    "module/test_scale_layouts.py": 6,
    "module/test_wgrad.py": 3,
    "test_checkpoint.py": 3,
    "test_cpu_offload.py": 2,
    "test_explain.py": 2,
    "test_export_options.py": 3,
    "test_memory_report.py": 2,
    "test_onnx.py": 3,
}
FEW = 8


def narrow(config) -> bool:
    """Whether this run takes a part."""
    chosen = config.option.keyword or config.option.markexpr or config.option.collectonly
    named = any(not os.path.isdir(arg) for arg in config.args)
    wide = os.environ.get("TEST_WIDE") == "1" or torch.cuda.is_available()
    return not (chosen or named or wide)


def thin(config, items: list) -> None:
    """Take cases out of ``items``; pytest counts them as deselected."""
    if not narrow(config):
        return
    functions = Counter(_function(item) for item in items)
    left_out = [
        item
        for item in items
        if functions[_function(item)] > FEW
        and zlib.crc32(item.name.encode()) % ONE_IN.get(_file(item), 1)
    ]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def _file(item) -> str:
    return item.nodeid.split("::")[0].removeprefix("tests/pytorch/")


def _function(item) -> str:
    return item.nodeid.split("[")[0]
