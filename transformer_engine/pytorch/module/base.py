# SPDX-License-Identifier: Apache-2.0
"""What ``Linear``, ``LayerNormLinear`` and ``LayerNormMLP`` have in common."""

from __future__ import annotations

import itertools
import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor

from ..core import delayed_scaling
from ..core.config import delayed_stages, gemm_text
from ..core.module_ops import amax_only
from ..core.ops import is_plain, kernels, through_dispatcher
from ..core.phase import PHASE
from ..core.primary_weights import primary_buffers, stand_in
from ..core.update_rule import PYTHON_RULE_IN_GRAPH
from ..core.weights import (
    WeightOperand,
    made_weights,
    quantized_for_one_pass,
    quantized_weight,
    rewritten_weight,
)
from ..core.wgrad import WeightGradStore, give_gradient, plan_fused, run_put_off
from ..custom_recipe import (
    custom_module_spec,
    custom_obstacle,
    custom_update_rule,
    register_module,
)
from ..dynamo.capability import function_transform
from ..dynamo.custom_op import OPS
from ..dynamo.module_function import NO_TRANSFORM, run_module_op
from ..formats.layout import ScaleAndHistory
from ..offload.rules import keep_weights
from ..quantization import FP8GlobalStateManager
from ..quantized_tensor import QuantizedTensor
from ..torch_version import is_exporting
from .checks import (
    autocast_dtype,
    check_first_microbatch,
    check_input,
    check_weight,
    raise_dimension,
    shape_text,
    wanted_gradients,
)
from .extra_state import OptionalExtraState, decode_extra_state, encode_extra_state
from .meta import PrecisionMetadata
from .primary_parameters import (
    attributes_of,
    bind_all_quantizers,
    bind_quantizers,
    describe_quantized,
    keeping_bytes,
    quantized_parameter,
    quantizer_changes,
    restore_attributes,
)
from .sharding import ShardedModule, like, local_of

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
    scaling: Optional[delayed_scaling.DelayedScalingState]
    # Linear stages whose input, and whose weight, is only calibrated.
    calibrated: tuple[str, str] = ("", "")


def resolve_device(device) -> torch.device:
    """The device to build on; ``"cuda"``, the default, means the CPU where no CUDA is."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return device


class TransformerEngineBaseModule(
    ShardedModule, PrecisionMetadata, OptionalExtraState, torch.nn.Module
):
    """Base of the modules that contain GEMMs.

    Keeps the parameters' initialisers, the cache of quantized weights, and the state of delayed
    scaling; turns the global precision state into the static configuration of a module op.
    """

    op_name = ""
    fwd_amax_slots: tuple = ()
    bwd_amax_slots: tuple = ()
    num_gemms = 1
    checkpoint = False  # recompute in backward what lies between the first norm and the last GEMM

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
        self.init_recipe = state.fp8_recipe if state.fp8_parameters else None
        self.fsdp_wrapped = False
        self.fsdp_group = None
        self._fp8_workspaces: dict = {}
        self.activation_dtype: Optional[torch.dtype] = None
        self.wgrad_accumulation_and_reduce_hooks: list = []
        self.wgrad_store = WeightGradStore()
        self.forwarded_at_least_once = False
        self.next_iter_when_debug_should_be_run = 0
        self.output_quantizer_role = None
        self.grad_input_quantizer_role = None
        self._recipe = None
        register_module(self)
        self._fp8_meta: dict = {"fp8_checkpoint": False, "fp8_group": None}
        self._delayed_scaling: Optional[delayed_scaling.DelayedScalingState] = None
        delayed_scaling.register(self)

    def __setstate__(self, state) -> None:
        # Copies and unpickled modules come in this way, past __init__.
        super().__setstate__(state)
        delayed_scaling.register(self)
        register_module(self)
        bind_quantizers(self)

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

    def _is_parameter(self, weight: Tensor) -> bool:
        """Whether ``weight``, which a module op shall take, is no copy of a parameter."""
        if isinstance(weight, torch.nn.Parameter):
            return True
        # FSDP1 gives views of its flat parameter to the modules.
        single = len(self.weight_names) == self.num_gemms
        return self.fsdp_group is not None and single and autocast_dtype(weight.device.type) is None

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
            if self.primary_weights_in_fp8:
                describe_quantized(self)
            return
        for name, param in list(self.named_parameters(recurse=False)):
            init = self.param_init_meta[name]
            local = local_of(param)
            if local.is_meta or isinstance(local, QuantizedTensor):
                device = resolve_device("cuda") if local.is_meta else local.device
                param = like(param, torch.empty(local.shape, dtype=local.dtype, device=device))
            if init.init_fn is not None:
                with self._rng_context(init.get_rng_state_tracker), torch.no_grad():
                    init.init_fn(param)
            setattr(self, name, param)
            if self.primary_weights_in_fp8 and init.fp8_meta_index is not None:
                setattr(self, name, quantized_parameter(self, param, init.fp8_meta_index))

    def _rng_context(self, get_tracker):
        """The tracker's fork that weight initialisation runs in."""
        if get_tracker is None:
            return nullcontext()
        name = getattr(self, "rng_tracker_name", None)
        return get_tracker().fork(name) if name is not None else get_tracker().fork()

    def _apply(self, fn, recurse=True):
        attributes = attributes_of(self)
        super()._apply(keeping_bytes(fn), recurse)
        restore_attributes(self, attributes)
        # Cached bytes describe the old device; they are made anew when next used.
        self._fp8_workspaces.clear()
        if self._delayed_scaling is not None:
            self._delayed_scaling.move(self.delayed_device())
            bind_quantizers(self)
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
        bind_quantizers(self)

    def call_obstacle(self, *args, **kwargs) -> str:
        """Why a call with these arguments can not be traced; empty if it can."""
        del args, kwargs
        return self.unsupported_in_graph()

    def unsupported_in_graph(self) -> str:
        """Why this module, as configured, can not be traced; empty if it can."""
        if self.wgrad_store.enabled and torch.is_grad_enabled():
            return (
                f"'{self.name}' was built with delay_wgrad_compute=True: its backward leaves GEMMs"
                " to backward_dw(), which a graph, whose results are tensors, can not."
            )
        state = FP8GlobalStateManager.quantization_state
        if state.kind.startswith("custom"):
            return custom_obstacle(self._custom_key, state.spec)
        return "" if isinstance(delayed_scaling.REGION.rule, str) else PYTHON_RULE_IN_GRAPH

    # --- weight gradients ------------------------------------------------------------------------

    def weight_parameters(self) -> list:
        """For each GEMM the list of parameters that its weight consists of."""
        params = [getattr(self, name) for name in self.weight_names]
        return [[param] for param in params] if self.num_gemms > 1 else [params]

    def _get_fp8_params(self) -> Optional[list]:
        """The parameters that are quantized tensors and want a gradient; None if there are none."""
        found = [p for p in self.parameters(recurse=False) if isinstance(p, QuantizedTensor)]
        return [p for p in found if p.requires_grad] or None

    def _put_off(self, fused) -> Callable:
        """What backward hands the operands of its weight gradients to."""

        def hold(held: list) -> None:
            self.wgrad_store.put([held, fused], lambda held, _: run_put_off(held))

        return hold

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are left to ``backward_dw``."""
        return self.wgrad_store.delay_wgrad_compute()

    def backward_dw(self) -> None:
        """Compute the weight gradients of the oldest backward pass that put them off.

        They are added to ``main_grad`` with ``fuse_wgrad_accumulation``, else they replace
        ``.grad``. Nothing happens unless the module was built with ``delay_wgrad_compute=True``.
        """
        if not self.need_backward_dw():
            return
        gradients, (_, fused) = self.wgrad_store.pop()
        plan = {weight.position: weight for weight in fused or ()}
        positions, weights = OPS[self.op_name].weight_positions, self.weight_parameters()
        for gemm, grad in gradients:
            give_gradient(weights[gemm], plan.get(positions[gemm]), grad)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    # --- one forward call ------------------------------------------------------------------------

    def _begin(
        self, inp: Tensor, features: int, parameters: tuple, is_first_microbatch: Optional[bool]
    ) -> Call:
        """Check the call, flatten the input and read the surrounding contexts."""
        check_first_microbatch(self, is_first_microbatch)
        check_input(self, inp, parameters[0])
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
        return Call(inp.contiguous(), lead, shape, *self._precision())

    def _precision(self) -> tuple:
        """``spec``, ``scaling`` and ``calibrated`` of a ``Call``."""
        spec, rule = self._recipe_and_rule()
        calibrated = ("0,1", "0,1") if spec == "" else ("", "")
        if FP8GlobalStateManager.quantization_state.kind == "custom_calibrating":
            calibrated = (delayed_stages(spec, "x"), delayed_stages(spec, "w"))
            spec = ""
        if rule == "":
            return spec, None, ("", "")
        scaling = delayed_scaling.state_of(self, rule)
        delayed_scaling.enter(scaling, rule)
        return spec, scaling, calibrated

    def _recipe_and_rule(self) -> tuple:
        """The recipe part of the configuration, and the update rule of delayed scaling ("" without
        it).
        """
        state = FP8GlobalStateManager.quantization_state
        spec, rule = state.spec, delayed_scaling.REGION.rule
        if state.kind.startswith("custom"):
            rule = custom_update_rule(self._custom_key, spec)
            spec = custom_module_spec(self._custom_key, spec)
        return spec, rule

    def _begin_eager(self) -> None:
        """Bookkeeping that a trace must not record.

        Attribute writes in a traced forward break ``torch.utils.checkpoint`` in compiled code.
        """
        state = FP8GlobalStateManager.quantization_state
        if state.fp8_enabled and function_transform():
            raise RuntimeError(NO_TRANSFORM)  # before anything is quantized
        self.forwarded_at_least_once = True
        self.fp8, self.fp8_calibration = state.fp8_enabled, state.fp8_calibration
        if not (state.fp8_enabled or state.fp8_calibration):
            return
        if self.init_recipe is not None and self._recipe is None:
            changes = quantizer_changes(self.init_recipe, state.fp8_recipe)
            if changes:
                warnings.warn(
                    f"Quantizer is being updated, this may affect model behavior: '{self.name}' was"
                    f" made with {changes[0]} and runs with {changes[1]}.",
                    stacklevel=5,
                )
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
        self, call: Call, gemm: int, weight: Tensor, is_first_microbatch, columnwise: bool
    ) -> WeightOperand:
        """The weight of linear stage ``gemm`` as quantized operand (Nones if it is not)."""
        slot = 3 * gemm + 1
        primary = isinstance(weight, QuantizedTensor)
        if not (primary or is_plain(weight) or torch.compiler.is_compiling()):
            self._refuse_shard(weight)
        tensor = weight
        if primary:
            if torch.compiler.is_compiling():
                bind_all_quantizers()
            else:
                bind_quantizers(self)
            # As in the reference package, which says nothing for a module of two GEMMs.
            warn = self.num_gemms == 1
            tensor = stand_in(weight, call.spec, gemm, call.x.dtype, warn)
        if not call.spec:
            if str(gemm) in call.calibrated[1]:
                amax = amax_only(kernels(), tensor.detach())
                delayed_scaling.record_forward(call.scaling, [amax], [slot])
            return WeightOperand(tensor)
        quant = gemm_text(call.spec, "w", gemm)
        if quant == "":
            return WeightOperand(tensor)
        check_weight(self, gemm, weight, call.spec)
        if PHASE.backward_follows and is_first_microbatch is not None:
            columnwise = True  # what is cached now is for the training step that follows
        elif is_first_microbatch and not through_dispatcher() and PHASE.recomputing:
            is_first_microbatch = False  # it was cached by the first pass
        backward, columnwise = columnwise, columnwise and "bwd=" not in call.spec
        if primary:
            label = self.weight_names[gemm]
            buffers = primary_buffers(self, label, weight, quant, columnwise)
            if self.weights_are_gathered:
                keep_weights(*buffers)
            return WeightOperand(tensor, buffers, weight.quant)
        scale = None if call.scaling is None else call.scaling.fwd_scale
        if self.weights_are_gathered and self._is_parameter(weight):
            operand = quantized_for_one_pass(weight, quant, scale, slot, backward, columnwise)
        else:
            key = self.weight_names[gemm] if self.num_gemms > 1 else "weight"
            common = (self._fp8_workspaces, key, weight, quant, scale, slot)
            keep = FP8GlobalStateManager.weight_update_flag(weight.device)
            if self.weights_are_gathered:
                operand = quantized_weight(*common, None, columnwise)
            elif keep is not None:
                operand = rewritten_weight(*common, keep, columnwise)
            else:
                if self._folds(call):
                    scales = ScaleAndHistory(scale, call.scaling.fwd_history)
                    common = (*common[:4], scales, slot)
                operand = quantized_weight(*common, is_first_microbatch, columnwise)
        keep_weights(*operand.buffers)
        return operand

    def _folds(self, call: Call) -> bool:
        """Whether leaf ops fold amaxes into the histories themselves: in eager, of one recipe."""
        return (
            call.scaling is not None
            and not through_dispatcher()
            and FP8GlobalStateManager.quantization_state.kind == "delayed"
        )

    def _run(
        self,
        call: Call,
        static: str,
        tensors: tuple,
        names: tuple,
        weights: tuple,
        is_first_microbatch: Optional[bool],
        want: bool = False,
    ):
        """Run the module op; returns ``(y, ln_out or None)`` in the shapes that users see.

        ``tensors``, with ``names``, are the op's inputs before the buffers of ``weights``.
        """
        need = wanted_gradients(names, tensors)
        scaling = call.scaling
        exporting = is_exporting()
        if exporting and scaling is not None and call.spec:
            need = ""  # a program has no backward scales that it could renew
        config = f"{static};{call.spec};need={need};out={'norm' if want else ''}"
        if call.spec:
            config += made_weights(weights, call.spec)
        elif call.calibrated[0]:
            config += f";cal={call.calibrated[0]}"
        bwd_state = _NO_BWD_STATE
        if scaling is not None and call.spec and (need or PHASE.backward_follows):
            rule = delayed_scaling.backward_rule(scaling)
            if FP8GlobalStateManager.quantization_state.fp8_graph_capturing:
                rule = None  # renewed between replays
            bwd_state = (scaling.bwd_scale, scaling.bwd_history, self.bwd_amax_slots, rule)
        keep_weights(*tensors[1:])  # all but the input
        for weight in weights:
            tensors = (*tensors, *weight.buffers)
        fused, main_grads, store = None, (), None
        if need and self.fuse_wgrad_accumulation and not exporting:
            if FP8GlobalStateManager.weight_update_flag() is not None:
                is_first_microbatch = None  # only the device knows: main_grad is always added to
            fused, main_grads = plan_fused(
                self,
                self.weight_parameters(),
                OPS[self.op_name].weight_positions,
                call.x.dtype,
                is_first_microbatch,
            )
            if main_grads:
                config += f";dw={str(main_grads[0].dtype)[6:]}"
        if need and self.wgrad_store.enabled and not exporting:
            config += ";delay=1"
            store = self._put_off(fused)
        fwd_scale = None if scaling is None else scaling.fwd_scale
        fwd_history = scaling.fwd_history if call.spec and self._folds(call) else None
        if need and self.checkpoint:
            fwd_history = None  # the second pass must leave it alone
            config += ";recompute=1"
            if scaling is not None:
                # Backward reads the scale of now, which is renewed in place; Inductor would drop
                # a clone().
                fwd_scale = kernels().after(fwd_scale, fwd_scale)
        outputs = run_module_op(
            self.op_name,
            config,
            bwd_state,
            (*tensors, fwd_scale),
            train=bool(need),
            want=want,
            fwd_history=fwd_history,
            fused=fused,
            main_grads=main_grads,
            store=store,
        )
        if bwd_state[0] is not None:  # not before: a call that raised has no backward
            delayed_scaling.enter_backward(scaling)
        if scaling is not None:
            amaxes = list(outputs[len(outputs) - len(self.fwd_amax_slots) :])
            slots = list(self.fwd_amax_slots)
            for gemm, weight in enumerate(weights):
                if "delayed" in weight.quant:
                    amaxes.append(weight.amax)
                    slots.append(3 * gemm + 1)
            delayed_scaling.record_forward(scaling, amaxes, slots)
        y = outputs[0]
        if len(call.lead) != 1:
            # Not a view: sharded training marks outputs, and loses its mark on a view that the user
            # changes in place.
            y = torch.ops.aten._unsafe_view.default(y, (*call.lead, y.shape[-1]))
        return (y, outputs[1].view(call.shape)) if want else (y, None)
