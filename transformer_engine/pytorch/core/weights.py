# SPDX-License-Identifier: Apache-2.0
"""Provides a GEMM weight as a quantized operand: fresh, newly cached, or from the cache.

The module ops only see bytes and scales; whether these were made a moment ago or an hour ago is
decided here, for all modules, in eager and in traced code.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..backends.registry import capability_of
from ..environment import constant_in_graphs, layout_flags
from ..formats.layout import NOTHING, Quantized, ScaleAndHistory, produced_spec
from ..formats.spec import decode_quant
from ..quantized_tensor import QuantizedTensorStorage
from ..tensor import hybrid_storage, storage_from_quantized
from .config import has_columns
from .operand import Part, dequantized, quantized_leaf
from .ops import kernels, through_dispatcher
from .phase import PHASE
from .plans import run_planned
from .python_quantizers import is_python


class WeightOperand(NamedTuple):
    """The buffers of a quantized weight, and the text of how they were made.

    ``tensor`` is what the module op takes as the weight, for its gradient and for GEMMs that are
    not quantized.
    """

    tensor: Tensor
    buffers: Quantized = NOTHING
    quant: str = ""
    amax: Optional[Tensor] = None  # if it was quantized now
    again: bool = False  # backward quantizes ``tensor`` again instead of keeping buffers
    in_place: bool = False  # the buffers are those of a cache, and are rewritten in place


def quantized_weight(
    cache: dict,
    key: str,
    weight: Tensor,
    quant: str,
    scale: Optional[Tensor],
    slot: int,
    is_first_microbatch: Optional[bool],
    columnwise: bool,
) -> WeightOperand:
    """The operand of ``weight [N, K]``, quantized as the text ``quant`` of an operand says.

    ``is_first_microbatch``: None quantizes and leaves the cache alone; True quantizes and replaces
    the entry ``key`` (never in place: the backward of an earlier microbatch may still read the old
    one); False takes the entry, or makes it where there is none, or where it has another format or
    lacks the columnwise buffers that a training step needs.
    """
    quant = made_weight_quant(quant, weight.shape[0], weight.shape[1], weight.device)
    if is_python(quant):
        is_first_microbatch = None  # what the user's class makes has no storage to be cached in
    if is_first_microbatch is False:
        entry = cache.get(key)
        if entry is not None and usable(entry, quant, columnwise):
            return WeightOperand(weight, entry.operand_buffers(), quant)
    with torch.no_grad():
        buffers = _quantize(weight.detach(), quant, scale, slot, columnwise)
    if is_first_microbatch is not None:
        entry = _entry(buffers, quant, weight)
        entry.without_grad = not (torch.is_grad_enabled() or PHASE.backward_follows)
        cache[key] = entry
    return WeightOperand(weight, buffers, quant, buffers.amax)


def rewritten_weight(
    cache: dict,
    key: str,
    weight: Tensor,
    quant: str,
    scale: Optional[Tensor],
    slot: int,
    keep: Tensor,
    columnwise: bool,
) -> WeightOperand:
    """The operand that the cache holds under ``key``, written anew by the device's decision.

    ``keep`` (fp32 [1]) is read on the device: 1 leaves the bytes of the entry as they are, anything
    else makes them those of ``weight``. The buffers stay the same, so one captured graph serves
    both. Where there is no entry that fits, it is made, whatever ``keep`` says.
    """
    made = made_weight_quant(quant, weight.shape[0], weight.shape[1], weight.device)
    entry = cache.get(key)
    if is_python(made):
        return quantized_weight(cache, key, weight, quant, scale, slot, None, columnwise)
    if entry is None or not usable(entry, made, columnwise):
        _refuse_capture(weight)
        fresh = quantized_weight(cache, key, weight, quant, scale, slot, True, columnwise)
        return WeightOperand(weight, fresh.buffers, made, fresh.amax, in_place=True)
    buffers = entry.operand_buffers()
    with torch.no_grad():
        amax = _rewrite(buffers, weight.detach(), made, scale, slot, keep)
    return WeightOperand(weight, buffers, made, amax, in_place=True)


def _refuse_capture(weight: Tensor) -> None:
    """An entry that a CUDA graph makes is made again at each replay, whatever the flag says."""
    if torch.compiler.is_compiling() or not weight.is_cuda:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"The quantized weight of shape {tuple(weight.shape)} is captured in a CUDA graph under"
            " the flag of set_skip_fp8_weight_update_tensor, but it is not in the module's cache,"
            " or not in this format. Run the module once, with the same recipe and with gradients,"
            " before the capture."
        )


def _rewrite(old: Quantized, weight: Tensor, quant: str, scale, slot: int, keep: Tensor) -> Tensor:
    """Write ``weight`` into the buffers ``old``; returns the rowwise amax, 0 where they stay."""
    parts = quant.split("|")
    amax = torch.zeros(1, dtype=torch.float32, device=weight.device)
    if len(parts) == 1:
        _rewrite_leaf(weight, quant, scale, slot, keep, old, amax)
        return amax
    row_quant, col_quant = parts[:2]
    source = weight
    if row_quant:
        row = old._replace(col=None, col_scale_inv=None, col_amax=None)
        _rewrite_leaf(weight, row_quant, scale, slot, keep, row, amax)
        if len(parts) > 2:
            part = Part(old.row, old.scale_inv, old.amax, row_quant)
            source = dequantized(kernels(), part, weight.dtype)
    if col_quant and old.col is not None:
        # Per-tensor FP8 has one scale, which is the rowwise one of the leaf's result.
        shared = col_quant.startswith(("delayed", "current"))
        scales = (old.col_scale_inv, None) if shared else (None, old.col_scale_inv)
        col = Quantized(None, old.col, *scales, None, old.col_amax)
        _rewrite_leaf(source, col_quant, scale, slot, keep, col, None if row_quant else amax)
    return amax


def _rewrite_leaf(x, quant: str, scale, slot: int, keep: Tensor, old: Quantized, amax) -> None:
    rng = kernels().rng_state(x) if "stochastic" in quant else None
    kernels().requantize_(x, quant, scale, slot, rng, keep, *old, amax)


def quantized_for_one_pass(
    weight: Tensor,
    quant: str,
    scale: Optional[Tensor],
    slot: int,
    backward: bool,
    columnwise: bool,
) -> WeightOperand:
    """The operand of a weight that is gathered for each pass and freed in between (FSDP).

    Its bytes would outlive the gathered weight until backward (or longer, in a cache), so they are
    made for the forward pass only. Backward finds the weight gathered again, and quantizes it with
    the scale of the forward pass, where that is a state. ``backward``: whether there will be one;
    ``columnwise``: whether it reads columnwise data.
    """
    quant = made_weight_quant(quant, weight.shape[0], weight.shape[1], weight.device)
    again = backward and _gives_the_same_again(quant)
    with torch.no_grad():
        buffers = _quantize(weight.detach(), quant, scale, slot, columnwise and not again)
        if again and "delayed" in quant:
            buffers = buffers._replace(col_scale_inv=scale[slot : slot + 1].clone())
    return WeightOperand(weight, buffers, quant, buffers.amax, again)


@constant_in_graphs
def _gives_the_same_again(quant: str) -> bool:
    """Whether one orientation, quantized later, has the bytes that it has beside the other one."""
    parts = quant.split("|")
    if is_python(quant) or "stochastic" in quant or len(parts) > 2:
        return False
    return len(parts) == 1 or "delayed" not in quant


def in_place(weights: tuple) -> bool:
    """Whether a weight's buffers are rewritten in place."""
    for weight in weights:
        if weight.in_place:
            return True
    return False


def made_weights(weights: tuple, spec: str) -> str:
    """The part of a configuration that says how weights were made, and scales are laid out."""
    text = "".join([f";w{'2' * i}={weight.quant}" for i, weight in enumerate(weights)])
    if in_place(weights):
        text += ";inplace=1"
    again = ",".join([str(i) for i, weight in enumerate(weights) if weight.again])
    if again:
        text += f";again={again}"
    return text + layout_text() if "swizzled" in spec else text


@constant_in_graphs
def layout_text() -> str:
    """The part of a configuration that the environment decides."""
    flags = layout_flags()
    text = ";cudnn=1" if flags.cudnn_norm else ""
    return text if flags.rht_fusion else text + ";rht_fusion=0"


@constant_in_graphs
def made_weight_quant(quant: str, rows: int, columns: int, device: torch.device) -> str:
    """How a weight ``[rows, columns]`` comes out if it is quantized as ``quant`` asks."""
    if "swizzled" not in quant:
        return quant
    parts = quant.split("|")
    for i, part in enumerate(parts[:2]):
        if "swizzled" in part:
            spec = decode_quant(part)
            made = produced_spec(
                spec, "weight", rows, columns, capability_of(device), layout_flags()
            )
            parts[i] = made.encode()
    return "|".join(parts)


def _quantize(weight: Tensor, quant: str, scale, slot: int, columnwise: bool) -> Quantized:
    """The buffers of ``weight`` in both orientations (rowwise only without ``columnwise``)."""
    parts = quant.split("|")
    if len(parts) == 1:
        return _leaf(weight, quant, scale, slot, True, columnwise)
    row_quant, col_quant = parts[:2]
    from_row = len(parts) > 2
    row = col = NOTHING
    if row_quant:
        row = _leaf(weight, row_quant, scale, slot, True, False)
    if columnwise and col_quant:
        source = weight
        if from_row:
            part = Part(row.row, row.scale_inv, row.amax, row_quant)
            source = dequantized(kernels(), part, weight.dtype)
        col = _leaf(source, col_quant, scale, slot, False, True)
    # Per-tensor FP8 has one scale, which is the rowwise one of the leaf's result.
    col_scale_inv = col.scale_inv if col.col_scale_inv is None else col.col_scale_inv
    return Quantized(row.row, col.col, row.scale_inv, col_scale_inv, row.amax, col.col_amax)


def _leaf(x: Tensor, quant: str, scale, slot: int, rowwise: bool, columnwise: bool) -> Quantized:
    how = (quant, slot, rowwise, columnwise)
    if through_dispatcher():
        return _quantized(kernels(), *how, x, scale)
    scale = scale if isinstance(scale, ScaleAndHistory) else (scale,)
    return Quantized(*run_planned(_quantized, how, how, (x, *scale)))


def _quantized(
    k, quant: str, slot: int, rowwise: bool, columnwise: bool, x: Tensor, scale, history=None
):
    scale = scale if history is None else ScaleAndHistory(scale, history)
    return quantized_leaf(k, x, quant, scale, slot, rowwise, columnwise)


def _entry(buffers: Quantized, quant: str, weight: Tensor) -> QuantizedTensorStorage:
    """The storage that a module's cache holds."""
    make = hybrid_storage if "|" in quant else storage_from_quantized
    return make(buffers, quant, weight.dtype, shape=tuple(weight.shape))


def usable(entry: QuantizedTensorStorage, quant: str, columnwise: bool) -> bool:
    """Whether a cached weight fits the format asked for and holds the layouts needed.

    One that was made without gradients is not for training: tensors of inference mode can not be
    saved for a backward.
    """
    if entry.without_grad and torch.is_grad_enabled():
        return False
    if entry.quant != quant:
        return False
    return not columnwise or entry.operand_buffers().col is not None or not has_columns(quant)
