# SPDX-License-Identifier: Apache-2.0
"""What ``Linear``, ``LayerNormLinear`` and ``LayerNormMLP`` have in common."""

from __future__ import annotations

import itertools
import math
import operator
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from ..core import delayed_scaling
from ..core.linear import Operand
from ..core.module_ops import amax_only
from ..core.ops import kernels
from ..core.update_rule import PYTHON_RULE_IN_GRAPH
from ..core.weights import weight_operand
from ..dynamo.module_function import run_module_op
from ..quantization import FP8GlobalStateManager
from .extra_state import OptionalExtraState, decode_extra_state, encode_extra_state
from .meta import PrecisionMetadata

_layer_numbers = itertools.count(1)
_NO_BWD_STATE = (None, None, (), None)


@dataclass
class ParameterInit:
    """How a parameter is initialised, and which quantizer slot it has (GEMM weights only)."""

    init_fn: Optional[Callable] = None
    get_rng_state_tracker: Optional[Callable] = None
    fp8_meta_index: Optional[int] = None


class Call(NamedTuple):
    """One forward call: the flattened input and what the surrounding contexts say."""

    x: Tensor  # [rows, in_features], activation dtype, contiguous
    lead: tuple  # leading dimensions of the output
    shape: tuple  # shape of the input as given
    spec: str  # recipe part of the configuration, "" without quantization
    kind: str  # "", "current" or "delayed"
    scaling: Optional[delayed_scaling.DelayedScalingState]


def resolve_device(device) -> torch.device:
    """The device to build on; ``"cuda"``, the default, means the CPU where no CUDA is."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return device


class TransformerEngineBaseModule(PrecisionMetadata, OptionalExtraState, torch.nn.Module):
    """Base of the modules that contain GEMMs.

    Keeps the parameters' initialisers, the cache of quantized weights, and the state of delayed
    scaling; turns the global precision state into the static configuration of a module op.
    """

    op_name = ""
    fwd_amax_slots: tuple = ()
    bwd_amax_slots: tuple = ()
    num_gemms = 1

    def __init__(self, name: Optional[str] = None) -> None:
        super().__init__()
        state = FP8GlobalStateManager.quantization_state
        self.name = name if name is not None else f"Layer_{next(_layer_numbers)}"
        self.fp8 = False
        self.fp8_calibration = False
        self.tp_group = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta: dict[str, ParameterInit] = {}
        self.primary_weights_in_fp8 = state.fp8_parameters
        self.preserve_high_precision_init_val = state.high_precision_init_val
        self.fsdp_wrapped = False
        self.fsdp_group = None
        self._fp8_workspaces: dict = {}
        self.activation_dtype: Optional[torch.dtype] = None
        self.wgrad_accumulation_and_reduce_hooks: list = []
        self.wgrad_store = None
        self.forwarded_at_least_once = False
        self.next_iter_when_debug_should_be_run = 0
        self.output_quantizer_role = None
        self.grad_input_quantizer_role = None
        self._recipe = None
        self._fp8_meta: dict = {"fp8_checkpoint": False, "fp8_group": None}
        self._delayed_scaling: Optional[delayed_scaling.DelayedScalingState] = None
        delayed_scaling.register(self)

    def __setstate__(self, state) -> None:
        # Copies and unpickled modules come in this way, past __init__.
        super().__setstate__(state)
        delayed_scaling.register(self)

    def fast_setattr(self, name: str, value) -> None:
        """Write a plain attribute past ``nn.Module.__setattr__``; not for parameters."""
        self.__dict__[name] = value

    def module_setattr(self, name: str, value) -> None:
        """Ordinary ``nn.Module.__setattr__``."""
        super().__setattr__(name, value)

    def set_tensor_parallel_group(self, group) -> None:
        """Set the tensor-parallel process group."""
        self.tp_group = group
        self.tp_group_initialized = True

    @property
    def is_fsdp2(self) -> bool:
        """Whether ``fully_shard`` (FSDP2) manages this module."""
        return any(cls.__name__ == "FSDPModule" for cls in type(self).__mro__)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable) -> None:
        """Register a hook that ``backward_dw`` runs after the weight gradients exist."""
        self.wgrad_accumulation_and_reduce_hooks.append(hook)

    # --- parameters ------------------------------------------------------------------------------

    def register_parameter(self, name, param, **init) -> None:
        """Register a parameter; ``init_fn``, ``get_rng_state_tracker``, ``fp8_meta_index`` are kept
        for ``reset_parameters`` (from the first registration only)."""
        super().register_parameter(name, param)
        if name not in self.param_init_meta:
            self.param_init_meta[name] = ParameterInit(**init)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Materialise parameters that are on meta and run every initialiser in place."""
        if defer_init:
            return
        for name, param in list(self.named_parameters(recurse=False)):
            init = self.param_init_meta[name]
            if param.is_meta:
                param = torch.nn.Parameter(
                    torch.empty_like(param, device=resolve_device("cuda")),
                    requires_grad=param.requires_grad,
                )
            if init.init_fn is not None:
                with self._rng_context(init.get_rng_state_tracker), torch.no_grad():
                    init.init_fn(param)
            setattr(self, name, param)

    def _rng_context(self, get_tracker):
        """The tracker's fork that weight initialisation runs in."""
        if get_tracker is None:
            return nullcontext()
        name = getattr(self, "rng_tracker_name", None)
        return get_tracker().fork(name) if name is not None else get_tracker().fork()

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        # Cached bytes describe the old device; they are made anew when next used.
        self._fp8_workspaces.clear()
        if self._delayed_scaling is not None:
            self._delayed_scaling.move(self.delayed_device())
        return self

    # --- delayed scaling -------------------------------------------------------------------------

    def delayed_device(self) -> Optional[torch.device]:
        """Device for the scaling state; None while the parameters are on meta."""
        for param in self.parameters():  # a parametrized weight lies deeper
            return None if param.is_meta else param.device
        return None

    def get_extra_state(self) -> Tensor:
        """Delayed-scaling state as a flat uint8 tensor; empty without such state."""
        return encode_extra_state(self)

    def set_extra_state(self, state) -> None:
        """Load what ``get_extra_state`` made."""
        decode_extra_state(self, state)

    def unsupported_in_graph(self) -> str:
        """Why this module, as configured, can not be traced; empty if it can."""
        if FP8GlobalStateManager.quantization_state.kind != "delayed":
            return ""
        return "" if isinstance(delayed_scaling.REGION.rule, str) else PYTHON_RULE_IN_GRAPH

    # --- one forward call ------------------------------------------------------------------------

    def _begin(self, inp: Tensor, features: int, parameters: tuple) -> Call:
        """Check the call, flatten the input and read the surrounding contexts."""
        if not torch.compiler.is_compiling():
            self._begin_eager()
        self._check_parallel()
        if inp.dim() == 0 or inp.shape[-1] != features:
            raise_dimension(
                f"GEMM not possible: the input of {type(self).__name__} '{self.name}' has shape"
                f" {shape_text(inp.shape)}, but its last dimension must be {features}"
                " (in_features)."
                " Pass an input of that width, or build the module with the width of the input."
            )
        dtype = self._activation_dtype(inp, parameters)
        if inp.dtype != dtype:
            inp = inp.to(dtype)
        shape = inp.shape
        lead = shape[:-1] if inp.dim() > 1 else (1,)
        if inp.dim() != 2:
            inp = inp.reshape(math.prod(lead), features)
        state = FP8GlobalStateManager.quantization_state
        kind, scaling = state.kind, None
        if kind == "delayed" or calibrates(state):
            scaling = delayed_scaling.state_of(self, state.fp8_recipe)
            delayed_scaling.enter(scaling)
        return Call(inp.contiguous(), lead, shape, state.spec, kind, scaling)

    def _begin_eager(self) -> None:
        """Bookkeeping that a trace must not record.

        Attribute writes in a traced forward break ``torch.utils.checkpoint`` in compiled code.
        """
        state = FP8GlobalStateManager.quantization_state
        self.forwarded_at_least_once = True
        self.fp8, self.fp8_calibration = state.fp8_enabled, state.fp8_calibration
        if not (state.fp8_enabled or state.fp8_calibration):
            return
        old, new = type(self._recipe), type(state.fp8_recipe)
        if self._recipe is not None and not (issubclass(old, new) or issubclass(new, old)):
            warnings.warn(
                f"Recipe type changed from {old.__name__} to {new.__name__}: '{self.name}'"
                " quantizes cached weights of another format anew when they are next used.",
                stacklevel=5,
            )
        self._recipe = state.fp8_recipe

    def _check_parallel(self) -> None:
        """Tensor parallelism is not computed yet: say so instead of computing something else."""
        if self.tp_size > 1:
            raise RuntimeError(
                f"{type(self).__name__} '{self.name}' was built for tp_size={self.tp_size}, but"
                " this version does not run tensor-parallel modules yet. Build it with tp_size=1."
            )

    def _activation_dtype(self, inp: Tensor, parameters: tuple) -> torch.dtype:
        """Compute and output dtype: torch.autocast's, else the input's, which parameters share."""
        autocast = autocast_dtype(inp.device.type)
        if autocast is not None:
            return autocast
        dtype = inp.dtype
        for param in parameters:
            if param is not None and param.dtype != dtype:
                raise TypeError(
                    f"The input of {type(self).__name__} '{self.name}' is {dtype}, but a parameter"
                    f" of shape {tuple(param.shape)} is {param.dtype}. Cast one of them, or run"
                    " inside torch.autocast."
                )
        return dtype

    def _weight(
        self, call: Call, key: str, weight: Tensor, slot: int, is_first_microbatch, columnwise: bool
    ) -> Operand:
        """The GEMM weight as quantized operand (all None without quantization)."""
        if not call.spec:
            if call.scaling is not None:  # calibrating
                amax = amax_only(kernels(), weight.detach())
                delayed_scaling.record_forward(call.scaling, [amax], [slot])
            return Operand()
        check_fp8_weight(self, key, weight)
        scale = None if call.scaling is None else call.scaling.fwd_scale
        operand, amax = weight_operand(
            self._fp8_workspaces,
            key,
            weight,
            weight_spec(call.spec),
            scale,
            slot,
            is_first_microbatch,
            columnwise and "bwd=" not in call.spec,
        )
        if call.scaling is not None and amax is not None:
            delayed_scaling.record_forward(call.scaling, [amax], [slot])
        return operand

    def _run(self, call: Call, static: str, tensors: tuple, names: tuple, want: bool = False):
        """Run the module op; returns ``(y, ln_out or None)`` in the shapes that users see."""
        need = wanted_gradients(names, tensors)
        scaling = call.scaling
        config = f"{static};{call.spec};need={need};out={'norm' if want else ''}"
        if scaling is not None and not call.spec:
            config += ";cal=1"
        bwd_state = _NO_BWD_STATE
        if call.kind == "delayed" and need:
            rule = delayed_scaling.enter_backward(scaling)
            bwd_state = (scaling.bwd_scale, scaling.bwd_history, self.bwd_amax_slots, rule)
        fwd_scale = None if scaling is None else scaling.fwd_scale
        outputs = run_module_op(
            self.op_name, config, bwd_state, (*tensors, fwd_scale), train=bool(need), want=want
        )
        if scaling is not None:
            amaxes = outputs[len(outputs) - len(self.fwd_amax_slots) :]
            delayed_scaling.record_forward(scaling, list(amaxes), list(self.fwd_amax_slots))
        y = outputs[0].view(*call.lead, outputs[0].shape[-1])
        return (y, outputs[1].view(call.shape)) if want else (y, None)


def autocast_dtype(device_type: str) -> Optional[torch.dtype]:
    """The dtype of an active ``torch.autocast`` for this kind of device, None without one."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def calibrates(state) -> bool:
    """Whether amaxes are recorded for delayed scaling while computing in high precision."""
    return state.fp8_calibration and not state.fp8_enabled and state.fp8_recipe.delayed()


def wanted_gradients(names: tuple, tensors: tuple) -> str:
    """Comma-joined names of the tensors whose gradient this call must be able to give."""
    if not torch.is_grad_enabled():
        return ""
    return ",".join([n for n, t in zip(names, tensors) if n and t is not None and t.requires_grad])


def weight_spec(spec: str) -> str:
    """The encoded weight quantization in a recipe's configuration text."""
    start = spec.index("w=") + 2
    return spec[start : spec.index(";", start)]


class DimensionError(ValueError, AssertionError):
    """A tensor's dimension does not fit. Also an AssertionError, which the reference raises."""


def shape_text(shape) -> str:
    """``shape`` for a message; also in a trace the last dimension is a number, not a symbol."""
    sizes = [f"{size}" for size in shape[:-1]] + [f"{operator.index(size)}" for size in shape[-1:]]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def raise_dimension(message: str) -> None:
    """Raise a ``DimensionError`` (in a trace: a ValueError, which Dynamo can carry)."""
    if torch.compiler.is_compiling():
        raise ValueError(message)
    raise DimensionError(message)


def check_fp8_weight(module, key: str, weight: Tensor) -> None:
    """FP8 GEMMs want weights ``[out, in]`` with out % 8 == 0 and in % 16 == 0."""
    for dim, need in ((0, 8), (1, 16)):
        size = weight.shape[dim]
        if size % need != 0:
            label = {"fc1_weight": "FC1 ", "fc2_weight": "FC2 "}.get(key, "")
            # FC1's output is FC2's input, which must fit as well.
            multiple = 16 if key == "fc1_weight" else need
            fitting = math.ceil(size / multiple) * multiple
            raise ValueError(
                f"FP8 execution requires dimension {dim} of the {label}weight of"
                f" {type(module).__name__} '{module.name}' to be a multiple of {need}, but it is"
                f" {size} (shape {tuple(weight.shape)}). Use {fitting},"
                " or run this module outside of te.autocast."
            )
