# SPDX-License-Identifier: Apache-2.0
"""Export of modules to ONNX, with standard quantize and dequantize nodes.

.. code-block:: python

    from transformer_engine.pytorch.export import te_translation_table

    with torch.no_grad(), te.autocast(recipe=recipe), te.onnx_export(enabled=True):
        torch.onnx.export(model, (x,), "model.onnx", dynamo=True, opset_version=21,
                          custom_translation_table=te_translation_table)
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator

import torch

from .core import ops

# Without te_translation_table, which importing "*" would make.
__all__ = ["assert_warmed_up", "is_in_onnx_export_mode", "onnx_export"]


def is_in_onnx_export_mode() -> bool:
    """Whether `onnx_export` is active."""
    return ops.recorded_leaves() is not ops.GRAPH


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Context in which graphs of modules are written with operators that ONNX has.

    Call ``torch.onnx.export(..., dynamo=True, custom_translation_table=te_translation_table)`` in
    it. Eager calls are not changed. Delayed scaling is exported with the scales that the modules
    have; other recipes compute theirs in the model. Block scaling and MXFP8 need
    ``opset_version=21``; NVFP4 raises RuntimeError, naming the recipes that export.
    """
    if not enabled:
        yield
        return
    from .onnx.leaves import ONNX  # pylint: disable=import-outside-toplevel

    before = ops.recorded_leaves()
    ops.record_leaves(ONNX)
    try:
        yield
    finally:
        ops.record_leaves(before)


def assert_warmed_up(module: torch.nn.Module) -> None:
    """Raise AssertionError if `module`, a module with GEMMs, never ran a forward pass.

    A delayed-scaling module that never ran has no scales worth exporting.
    """
    if not getattr(module, "forwarded_at_least_once", True):
        raise AssertionError(
            f"{type(module).__name__} '{module.name}' never ran. Call it once with typical data"
            " before it is exported."
        )


def __getattr__(name: str) -> Any:
    # Made when it is asked for: onnxscript is optional.
    if name == "te_translation_table":
        from .onnx import translation  # pylint: disable=import-outside-toplevel

        return translation.translation_table()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
