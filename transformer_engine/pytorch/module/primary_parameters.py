# SPDX-License-Identifier: Apache-2.0
"""Makes the quantized parameters of ``quantized_model_init`` and keeps what belongs to them."""

from __future__ import annotations

import types
from dataclasses import fields
from typing import Callable, Optional

import torch

from ..core import delayed_scaling
from ..core.config import gemm_text, operand_text
from ..core.python_quantizers import is_python
from ..core.update_rule import rule_of
from ..custom_recipe import custom_module_spec, custom_update_rule
from ..environment import constant_in_graphs
from ..quantized_tensor import QuantizedTensor
from ..tensor import Float8Quantizer, share_amax
from .sharding import like, local_of, shard_group

_INITIAL = "_high_precision_init_val"


def quantized_parameter(module, param: torch.nn.Parameter, slot: int) -> torch.nn.Parameter:
    """``param`` quantized by the quantizer that the module's init recipe has for ``slot``.

    A quantizer that leaves tensors in high precision, or that the user wrote, gives ``param`` back.
    Of a DTensor the local part is quantized, with the amax of the whole. Raises RuntimeError if the
    weight is split into several parameters.
    """
    quantizer = _quantizer_of(module, slot)
    if quantizer is None:
        return param
    local, group = local_of(param).detach(), shard_group(param)
    with torch.no_grad():
        if group is None:
            values = quantizer(local)
        else:
            values = quantizer.make_empty(local.shape, dtype=local.dtype, device=local.device)
            share_amax(values, group)
            quantizer.update_quantized(local, values)
    if not isinstance(values, QuantizedTensor) or values.quant == "":
        return param
    made = like(param, values)
    if module.preserve_high_precision_init_val:
        setattr(made, _INITIAL, local.to("cpu", copy=True))
        _bind_initial_value(made)
    return made


def describe_quantized(module) -> None:
    """Let weights on the meta device say how they will be quantized.

    FSDP2 asks when it shards them, which is before they are materialised.
    """
    for name, init in module.param_init_meta.items():
        param = module._parameters.get(name)
        if init.fp8_meta_index is None or param is None:
            continue
        quantizer = _quantizer_of(module, init.fp8_meta_index)
        if quantizer is None:
            continue
        made = quantizer.make_empty(param.shape, dtype=param.dtype, device="meta")
        if made.quant:
            setattr(module, name, torch.nn.Parameter(made, requires_grad=param.requires_grad))


def _quantizer_of(module, slot: int):
    """The quantizer that the init recipe has for ``slot``; None if the user wrote it."""
    if len(module.weight_names) > module.num_gemms:
        raise RuntimeError(
            f"{type(module).__name__} '{module.name}' has parameters_split, which quantized primary"
            " weights can not have: blocks of values would cross the pieces. Leave one of the two"
            " out."
        )
    recipe = module.init_recipe
    rule = rule_of(recipe, None)
    if recipe.custom():
        rule = custom_update_rule(module._custom_key, recipe._spec)
        spec = custom_module_spec(module._custom_key, recipe._spec)
        if is_python(gemm_text(spec, "w", slot // 3)):
            return None
    if rule != "" and module.delayed_device() is not None:
        delayed_scaling.state_of(module, rule)
    slots, _ = module.delayed_slots()
    quantizer = module._recipe_state(recipe, "forward", slots).make_quantizers()[slot]
    quantizer.internal = False
    quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
    return quantizer


def quantizer_changes(made, active) -> Optional[tuple[str, str]]:
    """How two recipes differ, each as a text; None if they quantize weights alike."""
    rules = [
        (r._spec if r.custom() else operand_text(r._spec, "w"), r._update_rule)
        for r in (made, active)
    ]
    if rules[0] == rules[1]:
        return None
    values = [{f.name: getattr(r, f.name) for f in fields(r)} for r in (made, active)]
    return tuple(
        f"{type(recipe).__name__}("
        + ", ".join(f"{k}={v!r}" for k, v in ours.items() if k in theirs and theirs[k] != v)
        + ")"
        for recipe, ours, theirs in zip((made, active), values, reversed(values))
    )


class _BoundMethod:
    """A function bound to a parameter; unlike a method it can be pickled together with it."""

    def __init__(self, function: Callable, owner: torch.nn.Parameter) -> None:
        self.__func__ = function
        self.__self__ = owner

    def __call__(self):
        return self.__func__(self.__self__)


def _bind_initial_value(param: torch.nn.Parameter) -> None:
    param.get_high_precision_init_val = _BoundMethod(_get_initial, param)
    param.clear_high_precision_init_val = _BoundMethod(_clear_initial, param)


def _get_initial(param):
    """The value before it was quantized, on the CPU; None once it was cleared."""
    return getattr(param, _INITIAL, None)


def _clear_initial(param) -> None:
    """Free the value before it was quantized."""
    if hasattr(param, _INITIAL):
        delattr(param, _INITIAL)


def keeping_bytes(fn):
    """``fn``, a function for ``nn.Module._apply``; but where it only changes the dtype of a
    quantized tensor, that is its nominal dtype, and the bytes stay.
    """

    def apply(tensor):
        result = fn(tensor)
        if not isinstance(tensor, QuantizedTensor) or isinstance(result, QuantizedTensor):
            return result
        if result.dtype == tensor.dtype and not torch.equal(result, tensor.dequantize()):
            return result
        return tensor.make_like(tensor.detach().to(result.device), dtype=result.dtype)

    return apply


def attributes_of(module) -> dict[str, dict]:
    """What users and this file attached to the quantized parameters of ``module``, by name."""
    found = {}
    for name, param in module._parameters.items():
        if isinstance(param, QuantizedTensor):
            own = {*param._buffers(), *param._options(), "_shape", "_is_param"}
            found[name] = {k: v for k, v in vars(param).items() if k not in own}
    return found


def restore_attributes(module, attributes: dict[str, dict]) -> None:
    """Put back what ``attributes_of`` found: ``nn.Module.to`` makes new parameters."""
    for name, values in attributes.items():
        param = module._parameters[name]
        for key, value in values.items():
            if isinstance(value, (types.MethodType, _BoundMethod)):
                value = type(value)(value.__func__, param)
            setattr(param, key, value)


def bind_quantizers(module) -> None:
    """Let the quantizers of delayed scaling read and write the module's present state.

    The state is made anew when the module moves or its history changes length.
    """
    state = module._delayed_scaling
    if state is None:
        return
    for name, param in module._parameters.items():
        quantizer = param._quantizer if isinstance(param, QuantizedTensor) else None
        if isinstance(quantizer, Float8Quantizer):
            slot = module.param_init_meta[name].fp8_meta_index
            quantizer.scale = state.fwd_scale[slot : slot + 1]
            quantizer.amax = state.fwd_history[0, slot : slot + 1]


@constant_in_graphs
def bind_all_quantizers() -> bool:
    """``bind_quantizers`` for all modules there are: a trace may have made states of any."""
    for module in delayed_scaling.live_modules():
        bind_quantizers(module)
    return True
