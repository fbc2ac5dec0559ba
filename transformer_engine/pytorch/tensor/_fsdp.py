# SPDX-License-Identifier: Apache-2.0
"""FSDP2's hooks: parameters sharded along their first dimension are gathered as bytes and scales.

``torch.distributed.fsdp.fully_shard`` calls the two methods of ``ShardedTensor`` on the shard that
a rank owns. Each part of the whole is gathered as it is; only layouts that can be made from the
rowwise one are left out and made afterwards.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..formats.layout import NOTHING, Quantized, ceil_div, quantized_layout
from ..formats.spec import decode_quant
from ._shapes import matrix_shape
from ._slice import BLOCKS, compact, cuts_of, in_order, padded
from ._storage import QuantizedTensorStorage
from ._window import Windows, leaves


class Gathered(NamedTuple):
    """What makes the whole of gathered buffers: the shard, its whole's shape, and the fields."""

    shard: Any
    shape: tuple
    fields: tuple[str, ...]
    rest: Quantized  # what all shards have in common
    columnwise: bool  # whether columnwise data are to be made from the rowwise ones


class Plan(NamedTuple):
    """What ``fsdp_post_all_gather`` needs: one entry for each part, and what was not gathered."""

    parts: tuple[Gathered, ...]
    kept: tuple[Tensor, ...]  # of the only rank: buffers that follow the gathered ones


class ShardedTensor(Windows):
    """The hooks, a part of ``QuantizedTensor``."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """``(tensors to gather, what fsdp_post_all_gather needs)``.

        From now on, scales that depend on the whole tensor are computed for the whole. Of a mesh
        of one rank only the first buffer is handed over, see `Plan`.

        Raises:
            ValueError: if the parts are not of equal size, or cut through blocks.
        """
        del outer_stride, module, mp_policy
        rows, ranks = self.shape[0], mesh.size()
        if rows * ranks != outer_size[0]:
            raise ValueError(
                f"A parameter of shape {tuple(outer_size)} can not be sharded over {ranks} ranks "
                f"while it is quantized: dimension 0 is {outer_size[0]}, which is no multiple of "
                f"{ranks}. Choose a size that is, or keep this parameter in high precision."
            )
        inputs, plan = [], []
        share_amax(self, mesh.get_group())
        for part in leaves(self):
            tensors, gathered = _inputs(part, tuple(outer_size))
            inputs.extend(tensors)
            plan.append(gathered)
        # With nothing to gather, fully_shard copies the first tensor and drops the others.
        sent = 1 if ranks == 1 else len(inputs)
        return tuple(inputs[:sent]), Plan(tuple(plan), tuple(inputs[sent:]))

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """The whole tensor, and those of its buffers that are not the gathered memory itself.

        With ``out``, an earlier result, nothing is returned and its buffers are filled again.
        """
        # The whole must not share memory with the shard: it is freed, and the shard is updated.
        outputs = [*all_gather_outputs, *(tensor.clone() for tensor in metadata.kept)]
        wholes = []
        for gathered in metadata.parts:
            count = len(gathered.fields)
            wholes.append(_whole(gathered, outputs[:count]))
            outputs = outputs[count:]
        if out is not None:
            target = getattr(out, "_local_tensor", out)
            for part, whole in zip(leaves(target), wholes):
                _refill(part, whole, all_gather_outputs)
            return None
        if len(wholes) == 1 and wholes[0].layout_fields == self.layout_fields:
            result = wholes[0]._replace(_dtype=param_dtype)
        else:
            names = [name for name, part in self._buffers().items() if part is not None]
            parts = dict(zip(names, wholes))
            result = self._replace(**parts, _shape=wholes[0]._shape, _dtype=param_dtype)
        memory = _addresses(all_gather_outputs)
        buffers = [buffer for whole in wholes for buffer in whole._buffers().values()]
        return result, [b for b in buffers if b is not None and _address(b) not in memory]


def share_amax(shard: QuantizedTensorStorage, group: Any) -> None:
    """From now on, quantize ``shard`` with the amax of the whole, of which ``group`` has parts."""
    for part in leaves(shard):
        if getattr(part._quantizer, "reduces_amax", False):
            part.amax_reduction_group = group


def _inputs(shard: Any, outer_size: tuple) -> tuple[list[Tensor], Gathered]:
    """The buffers of a shard in an order in which their rows can be concatenated."""
    if not shard.quant:
        return [shard._hp_data.contiguous()], Gathered(shard, outer_size, ("",), NOTHING, False)
    spec = decode_quant(shard.quant)
    rows, _ = matrix_shape(shard._shape)
    usages = shard.get_usages()
    block = BLOCKS[spec.kind] if usages["columnwise"] or spec.dim == 2 else 1
    cut = tuple(shard._shape) != outer_size
    if cut and rows % block:
        raise ValueError(
            f"A shard of shape {tuple(shard._shape)} can not be gathered while it is quantized as "
            f"{shard.quant!r}: it has {rows} rows, which is no multiple of {block}. Use fewer "
            "ranks, or keep this parameter in high precision."
        )
    if cut and spec.row_scaled and usages["columnwise"]:
        raise ValueError(
            "Row-scaled NVFP4 parameters can not be sharded with columnwise data, which have one "
            "amax per column of the whole tensor. Drop them: update_usage(columnwise_usage=False)."
        )
    columnwise = usages["columnwise"] and usages["rowwise"] and not shard._why_no_columnwise()
    buffers = compact(shard.operand_buffers(), spec)
    if columnwise:
        buffers = buffers._replace(col=None, col_scale_inv=None, col_amax=None)
    tensors, fields, rest = [], [], {}
    cuts = cuts_of(spec)
    for field, buffer in buffers._asdict().items():
        if buffer is None or field not in cuts:
            rest[field] = buffer
            continue
        dim, unit = cuts[field]
        buffer = buffer.narrow(dim, 0, ceil_div(rows, unit))
        tensors.append((buffer.t() if dim == 1 else buffer).contiguous())
        fields.append(field)
        rest[field] = None
    return tensors, Gathered(shard, outer_size, tuple(fields), Quantized(**rest), columnwise)


def _whole(gathered: Gathered, outputs: list[Tensor]) -> QuantizedTensorStorage:
    """The inverse of ``_inputs``, on the concatenated tensors."""
    shard, shape = gathered.shard, gathered.shape
    if not shard.quant:
        return shard._replace(_hp_data=outputs[0].view(shape), _shape=shape)
    spec = decode_quant(shard.quant)
    made = {f: None if t is None else t.clone() for f, t in gathered.rest._asdict().items()}
    columnwise = "col" in gathered.fields
    layout = quantized_layout(spec, *matrix_shape(shape), "row" in gathered.fields, columnwise)
    cuts = cuts_of(spec)
    for field, output in zip(gathered.fields, outputs):
        output = output.t() if cuts[field][0] == 1 else output
        made[field] = padded(output, getattr(layout, field)).contiguous()
    made = in_order(Quantized(**made), spec)
    whole = shard._replace(
        **shard.attributes_of(made, shape), **shard.default_options(columnwise), _shape=shape
    )
    if gathered.columnwise:
        whole.update_usage(columnwise_usage=True)
    return whole


def _refill(part: Any, whole: Any, outputs: tuple) -> None:
    """Write the buffers of ``whole`` into those of ``part`` that are not gathered memory.

    Autograd may have saved these buffers in the forward pass and expects them in the backward pass:
    they are the same values, gathered again, so it is not told.
    """
    memory = _addresses(outputs)
    for name, buffer in part._buffers().items():
        if buffer is not None and _address(buffer) not in memory:
            with torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(getattr(whole, name))


def _address(tensor: Optional[Tensor]) -> int:
    return tensor.untyped_storage().data_ptr()


def _addresses(tensors) -> set[int]:
    return {_address(tensor) for tensor in tensors}
