# SPDX-License-Identifier: Apache-2.0
"""The state that ``autocast`` and ``quantized_model_init`` set and modules read.

There is one `FP8GlobalState` instance. It is changed in place and never replaced, because traced
code can write to attributes of an instance, and a graph stays bound to the instance that it was
traced with. The state belongs to the process, as in the reference package: threads that quantize
with different recipes at the same time are not supported.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..common.recipe import Recipe
from .availability import (
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    check_recipe_support,
    get_default_recipe,
)
from .core import delayed_scaling
from .core.phase import PHASE
from .core.update_rule import rule_of


class FP8GlobalState:
    """The state, see `FP8GlobalStateManager`.

    What modules read: `fp8_enabled`; `kind`, "" without quantization, else what `kind_of` says
    ("custom_calibrating" where a custom recipe only calibrates); `spec`, the recipe as a string, ""
    without quantization (``x=...;w=...;g=...;acc=...``, with
    ``;bwd=...`` where the recipe overrides the backward pass); `fp8_recipe`; `fp8_calibration`;
    `fp8_parameters` and `high_precision_init_val` of ``quantized_model_init``. `spec` is taken from
    the recipe when an autocast is entered.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Give every attribute the value it has outside of all contexts."""
        self.fp8_enabled = False
        self.fp8_calibration = False
        self.fp8_recipe: Optional[Recipe] = None
        self.fp8_distributed_group: Any = None
        self.is_first_fp8_module = False
        self.fp8_graph_capturing = False
        self.kind = ""
        self.spec = ""
        self.autocast_depth = 0
        self.fp8_parameters = False
        self.high_precision_init_val = False
        self.fp8_tensors_recompute_buffer: list = []
        self.skip_fp8_weight_update_tensor: Optional[Tensor] = None


def kind_of(recipe: Recipe) -> str:
    """ "delayed", "custom" or "stateless": what modules must do beyond reading `spec`."""
    if recipe.delayed():
        return "delayed"
    return "custom" if recipe.custom() else "stateless"


def refuse_recomputation(recipe: Recipe) -> None:
    """Raise where delayed scaling is entered during a backward pass by an unknown recomputation.

    Its region has ended and renewed the scales already: it would quantize with other scales than
    the forward pass did. Where the calls of the forward pass were noted (``recompute.py``), modules
    see those scales.
    """
    if torch.compiler.is_compiling() or not recipe.delayed():
        return
    if torch._C._current_graph_task_id() == -1:
        return
    from .recompute import recomputation_is_known

    if not recomputation_is_known():
        raise RuntimeError(
            "te.autocast with DelayedScaling was entered during a backward pass, as checkpoints do"
            " that recompute a function which opens te.autocast. The scales of the forward pass are"
            " gone by then. Use te.checkpoint, or open te.autocast around the whole step, backward"
            " included, or use Float8CurrentScaling."
        )


def _training() -> bool:
    """Whether gradients are on, now or in the second pass of a reentrant checkpoint."""
    if torch.is_grad_enabled() or PHASE.backward_follows:
        return True
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    from .recompute import in_reentrant_checkpoint

    return in_reentrant_checkpoint()


class FP8GlobalStateManager:
    """Functions on the one `FP8GlobalState`, `quantization_state`, under the names that other
    packages call.
    """

    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        """Forget every context that is open. For tests."""
        cls.quantization_state.clear()
        delayed_scaling.REGION.rule = ""
        delayed_scaling.finish_region(False)

    # --- reading --------------------------------------------------------------------------------

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether an enabled ``autocast`` is active."""
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether the active ``autocast`` calibrates: amaxes are recorded, but nothing is
        quantized.
        """
        return cls.quantization_state.fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether ``quantized_model_init`` is active."""
        return cls.quantization_state.fp8_parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether ``quantized_model_init(preserve_high_precision_init_val=True)`` is active."""
        return cls.quantization_state.high_precision_init_val

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether a CUDA graph is being captured, by our own means or any other; False while
        compiling.
        """
        if torch.compiler.is_compiling():
            return False
        if cls.quantization_state.fp8_graph_capturing:
            return True
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The active recipe, or the default one."""
        recipe = cls.quantization_state.fp8_recipe
        return get_default_recipe() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The process group that amaxes are reduced over, as given to ``autocast``."""
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True at the first call after the outermost ``autocast`` was entered."""
        state = cls.quantization_state
        first = state.is_first_fp8_module
        state.is_first_fp8_module = False
        return first

    is_fp8_available = staticmethod(check_fp8_support)
    is_mxfp8_available = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available = staticmethod(check_nvfp4_support)

    # --- autocast -------------------------------------------------------------------------------

    @classmethod
    def get_autocast_state(cls) -> Tuple:
        """What `set_autocast_state` takes: enabled, calibrating, recipe, group, first module,
        capturing.
        """
        state = cls.quantization_state
        return (
            state.fp8_enabled,
            state.fp8_calibration,
            state.fp8_recipe,
            state.fp8_distributed_group,
            state.is_first_fp8_module,
            state.fp8_graph_capturing,
        )

    @classmethod
    def set_autocast_state(cls, autocast_state: Tuple) -> None:
        """Make the contexts that `get_autocast_state` saw the active ones (for recomputation in
        backward).
        """
        enabled, calibrating, recipe, group, first, capturing = autocast_state
        spec, kind, rule = "", "", ""
        if recipe is not None and (enabled or calibrating):
            rule = rule_of(recipe, group)
        if recipe is not None and enabled:
            spec, kind = recipe._spec, kind_of(recipe)
        elif recipe is not None and calibrating and recipe.custom():
            # Which operands have delayed scaling, each module asks the factory.
            spec, kind = recipe._spec, "custom_calibrating"
        cls.restore((enabled, calibrating, recipe, group, first, capturing, spec, kind, rule))

    @classmethod
    def snapshot(cls) -> Tuple:
        """`get_autocast_state` and what was derived from the recipe; for `restore`."""
        state = cls.quantization_state
        return (*cls.get_autocast_state(), state.spec, state.kind, delayed_scaling.REGION.rule)

    @classmethod
    def restore(cls, saved: Tuple) -> None:
        """Go back to a `snapshot`."""
        state = cls.quantization_state
        (
            state.fp8_enabled,
            state.fp8_calibration,
            state.fp8_recipe,
            state.fp8_distributed_group,
            state.is_first_fp8_module,
            state.fp8_graph_capturing,
            state.spec,
            state.kind,
            delayed_scaling.REGION.rule,
        ) = saved

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Optional[Recipe] = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Begin an ``autocast``. If this raises, nothing has changed."""
        state = cls.quantization_state
        if fp8_recipe is None and (enabled or calibrating):
            fp8_recipe = get_default_recipe()
        if enabled or calibrating:
            check_recipe_support(fp8_recipe)
        if enabled:
            refuse_recomputation(fp8_recipe)
        outermost = state.autocast_depth == 0
        first = True if outermost else state.is_first_fp8_module
        cls.set_autocast_state((enabled, calibrating, fp8_recipe, fp8_group, first, _graph))
        state.autocast_depth += 1
        if outermost:
            delayed_scaling.begin_region()

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool, failed: bool = False) -> None:
        """End an ``autocast``. The outermost one, if enabled, renews the forward scales of delayed
        scaling.
        """
        state = cls.quantization_state
        if state.autocast_depth > 0:  # `reset` in between has ended all regions
            state.autocast_depth -= 1
        if state.autocast_depth == 0:
            update = enabled and not _graph and not failed and _training()
            delayed_scaling.finish_region(update)

    # --- delayed scaling ------------------------------------------------------------------------

    @staticmethod
    def add_fp8_tensors_to_global_buffer(fp8_meta: dict) -> None:
        """Nothing has to be done: modules are known from their construction on."""
        del fp8_meta

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        """Renew the forward (or backward) scales of every module that has recorded amaxes.

        For code that captures CUDA graphs, inside of which no scale is renewed. Slots without a new
        amax stay.
        """
        states = [state for state in delayed_scaling.live_states() if state.rule != ""]
        if forward:
            delayed_scaling.update_forward(states)
            return
        for state in states:
            delayed_scaling.update_backward(state.bwd_history, state.bwd_scale, state.rule)

    @staticmethod
    def reduce_tensor_across_group_op_max(tensor: Tensor, group: Any) -> None:
        """Maximum of `tensor` over the ranks of `group`, in place; nothing without
        torch.distributed.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Set the flag, fp32 ``[1]`` on the current device, that tells captured graphs to keep
        cached weights.
        """
        state = cls.quantization_state
        if state.skip_fp8_weight_update_tensor is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            state.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32, device=device)
        state.skip_fp8_weight_update_tensor.fill_(skip)

    @classmethod
    def weight_update_flag(cls, device: Optional[torch.device] = None) -> Optional[Tensor]:
        """The flag of `set_skip_fp8_weight_update_tensor` while a CUDA graph is captured, or in
        ``autocast(_graph=True)``; else None. With a `device` it is there.
        """
        state = cls.quantization_state
        flag = state.skip_fp8_weight_update_tensor
        if flag is None:
            return None
        if not (state.fp8_graph_capturing or cls.fp8_graph_capturing()):
            return None
        return flag if device is None or flag.device == device else flag.to(device)

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> Optional[Tensor]:
        """The flag of `set_skip_fp8_weight_update_tensor`; None if it was never set."""
        return cls.quantization_state.skip_fp8_weight_update_tensor

    # --- recomputation of activations -------------------------------------------------------------

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict) -> None:
        """Stash the forward scales and history of a module, first in, first out, before a forward
        pass.
        """
        buffer = cls.quantization_state.fp8_tensors_recompute_buffer
        position = fp8_meta.setdefault("global_fp8_buffer_pos_fwd_recompute", len(buffer))
        if position == len(buffer):
            buffer.append(deque())
        tensors = fp8_meta["scaling_fwd"]
        buffer[position].append((tensors.amax_history.clone(), tensors.scale.clone()))

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict) -> None:
        """Put the oldest stashed tensors into the module, and keep the present ones for
        `restore_fp8_meta_tensors`.
        """
        tensors = fp8_meta["scaling_fwd"]
        fp8_meta["updated_amax_history_fwd"] = tensors.amax_history.clone()
        fp8_meta["updated_scale_fwd"] = tensors.scale.clone()
        position = fp8_meta["global_fp8_buffer_pos_fwd_recompute"]
        history, scale = cls.quantization_state.fp8_tensors_recompute_buffer[position].popleft()
        tensors.amax_history.copy_(history)
        tensors.scale.copy_(scale)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict) -> None:
        """Undo `get_old_fp8_meta_tensors_for_recompute`."""
        tensors = fp8_meta["scaling_fwd"]
        tensors.amax_history.copy_(fp8_meta["updated_amax_history_fwd"])
        tensors.scale.copy_(fp8_meta["updated_scale_fwd"])

    # --- names ----------------------------------------------------------------------------------

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Key of a direction in `fp8_meta`."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fwd_bwd_key(forward: bool = True) -> str:
        """Name of a direction."""
        return "forward" if forward else "backward"

    @staticmethod
    def get_buffer_info() -> str:
        """Key in `fp8_meta` under which the reference package notes where a module's tensors are
        listed.
        """
        return "buffer_index_and_autocast_key"

    @staticmethod
    def get_unique_autocast_key(recipe: Optional[Recipe] = None, group: Any = None) -> str:
        """A string that is the same for autocasts with equal recipes and the same process group."""
        return f"recipe={recipe!r},group={None if group is None else id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe, fp8_group: Any) -> str:
        """`get_unique_autocast_key` with the name of a direction in front."""
        key = cls.get_unique_autocast_key(fp8_recipe, fp8_group)
        return f"{cls.get_fwd_bwd_key(forward)}_{key}"

    @staticmethod
    def split_key_in_buffer(key: str) -> Tuple[bool, str]:
        """``(forward, autocast key)`` of a string made by `get_key_in_buffer`."""
        direction, autocast_key = key.split("_", 1)
        return direction == "forward", autocast_key
