# SPDX-License-Identifier: Apache-2.0
"""What ``torch.onnx.export`` makes of this package's ops: QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from typing import Callable

import torch

from . import quantization  # noqa: F401  # pylint: disable=unused-import  # registers the ops

_FLOAT8 = {"e4m3": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2"}
_BLOCK_OPSET = 21  # the first with scales of blocks
_FLOAT8_OPSET = 19  # the first with float8


def _need(opset, version: int, what: str) -> None:
    if opset.version < version:
        raise RuntimeError(
            f"{what} needs ONNX operator set {version}, but the export is for {opset.version}."
            f" Pass opset_version={version} (or a later one) to torch.onnx.export."
        )


def _attributes(opset, block: int) -> dict:
    if not block:
        return {}
    _need(opset, _BLOCK_OPSET, f"A scale for each {block} values (block scaling, MXFP8)")
    return {"axis": 1, "block_size": block}


def translation_table() -> dict[Callable, Callable]:
    """``{op: function that records ONNX nodes}``. Raises ImportError without onnxscript."""
    try:
        import onnxscript  # pylint: disable=import-outside-toplevel
        from onnxscript import ir  # pylint: disable=import-outside-toplevel
    except ImportError as error:
        raise ImportError(
            "te_translation_table needs onnxscript, which torch.onnx.export(dynamo=True) needs as"
            " well: pip install onnx onnxscript (or transformer-engine[onnx])."
        ) from error

    def recorder():
        """Records nodes of the operator set that is exported."""
        return onnxscript.evaluator.default().opset

    def onnx_quantize(x, fmt: str):
        op = recorder()
        _need(op, _FLOAT8_OPSET, "A float8 tensor")
        dtype = getattr(ir.DataType, _FLOAT8[fmt])
        one = op.Constant(value_float=1.0)
        zero = op.Cast(op.Constant(value_float=0.0), to=int(dtype))
        result = op.QuantizeLinear(x, one, zero, saturate=1)
        result.dtype = dtype
        return result

    def onnx_dequantize(data, scale, block: int):
        op = recorder()
        return op.DequantizeLinear(data, scale, **_attributes(op, block))

    ops = torch.ops.transformer_engine
    return {
        ops.onnx_quantize.default: onnx_quantize,
        ops.onnx_dequantize.default: onnx_dequantize,
    }
