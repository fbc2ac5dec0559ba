# SPDX-License-Identifier: Apache-2.0
"""``te.make_graphed_callables``: modules whose forward and backward are CUDA graphs.

A graph is a fixed sequence of kernels on fixed memory, so replaying it costs the host next to
nothing. What must change between replays lies on the device: inputs and output gradients are copied
into static tensors, amaxes are recorded by the graph, scales are renewed between graphs by the
surrounding ``te.autocast`` and after the backward graph, and a flag says whether cached weights are
written anew.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch

from ..common.recipe import Recipe
from .graphed.arguments import (
    check_hooks,
    check_modules,
    check_samples,
    check_torch_autocast,
    check_warmup,
    one_for_each,
    renamed,
)
from .graphed.backend import CudaGraphs
from .graphed.capture import (
    CAPTURING,
    capture_all,
    capturing,
    share_inputs,
    unchanged,
    warm_up,
)
from .graphed.schedule import pipelined_schedule, plain_schedule
from .graphed.unit import Options, Unit
from .quantization import autocast

__all__ = [
    "graph_pool_handle",
    "is_graph_capturing",
    "make_graphed_callables",
    "restore_fp8_tensors",
    "save_fp8_tensors",
    "set_capture_end",
    "set_capture_start",
]

OneOrEach = Union[bool, Tuple[bool, ...], None]


def set_capture_start() -> None:
    """Note that graphs are being captured."""
    CAPTURING.active = True


def set_capture_end() -> None:
    """Note that the capture is over."""
    CAPTURING.active = False


def is_graph_capturing() -> bool:
    """Whether ``make_graphed_callables`` is warming up or capturing."""
    return CAPTURING.active


def graph_pool_handle() -> Any:
    """A memory pool that several graphs may share: what `pool` takes."""
    _need_cuda()
    return torch.cuda.graph_pool_handle()


def save_fp8_tensors(
    modules: Sequence[torch.nn.Module], recipe: Optional[Recipe] = None
) -> Optional[List[Any]]:
    """Copies of the scales and amax histories in `modules`, for `restore_fp8_tensors`.

    None where a given `recipe` has no delayed scaling.
    """
    if recipe is not None and not (recipe.delayed() or recipe.custom()):
        return None
    return [module.get_fp8_meta_tensors() for module in _modules_of_ours(modules)]


def restore_fp8_tensors(
    modules: Sequence[torch.nn.Module], fp8_tensors: Optional[List[Any]]
) -> None:
    """Write back what `save_fp8_tensors` gave, in place; states made since start anew."""
    if fp8_tensors is None:
        return
    for module, tensors in zip(_modules_of_ours(modules), fp8_tensors):
        module.reset_fp8_meta_tensors(tensors)


def _modules_of_ours(modules: Sequence[torch.nn.Module]) -> List[torch.nn.Module]:
    found: Dict[int, torch.nn.Module] = {}
    for root in modules:
        for module in root.modules():
            if hasattr(module, "get_fp8_meta_tensors"):
                found.setdefault(id(module), module)
    return list(found.values())


def make_graphed_callables(
    modules: Any,
    sample_args: Tuple,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Optional[Any] = None,
    fp8_enabled: OneOrEach = None,
    fp8_calibrating: Optional[bool] = None,
    fp8_recipe: Optional[Recipe] = None,
    fp8_group: Any = None,
    fp8_weight_caching: Optional[bool] = None,
    enabled: OneOrEach = None,
    calibrating: Optional[bool] = None,
    recipe: Optional[Recipe] = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: Optional[bool] = None,
    _order: Optional[List[int]] = None,
    _num_layers_per_chunk: Optional[List[int]] = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Optional[Callable] = None,
    post_warmup_hook: Optional[Callable] = None,
    capture_time_hooks: Optional[List[Optional[dict]]] = None,
) -> Any:
    """Replace the forward of `modules` by replays of CUDA graphs, which have a backward.

    * `modules`: a module, or a tuple of modules that run one after the other
    * `sample_args`, `sample_kwargs`: tensors like those of later calls, in a tuple (a dictionary);
      a tuple of them where `modules` is one. They become the static inputs of the graphs. Calls
      must agree with them in shape, dtype and whether they require gradients
    * `num_warmup_iters`: passes before the capture; 0 if each module has run already
    * `allow_unused_input`: inputs and parameters may have no gradient
    * `enabled` (of all, or a tuple for each), `calibrating`, `recipe`, `amax_reduction_group`: of
      ``te.autocast`` in the graphs; `fp8_enabled`, `fp8_calibrating`, `fp8_recipe` and `fp8_group`
      are their former names, `fp8_weight_caching` that of `cache_quantized_params`
    * `cache_quantized_params`: calls must have a keyword ``is_first_microbatch``; with True the
      graph writes its quantized weights anew, with False it uses them as they are. With
      ``fuse_wgrad_accumulation`` the graph adds to ``main_grad`` either way: set it to zero
    * `pool`: memory pool, from `graph_pool_handle`
    * `retain_graph_in_backward`: the backward graph may be replayed several times per forward
    * `clone_param_grads_on_return`: False returns the static gradients of parameters themselves,
      which the next replay overwrites; parameters with ``skip_backward_post_hook`` always do
    * `pre_warmup_hook`, `post_warmup_hook`: called before and after warming up
    * `capture_time_hooks`: for each callable a dictionary with ``forward_pre_hooks``,
      ``forward_hooks``, ``backward_pre_hooks`` and ``backward_hooks``, each ``{id: hook(module)}``;
      called around each pass while warming up and capturing, outside of the captured stream
    * `_order`, `_num_layers_per_chunk`: graphs for each microbatch of an interleaved pipeline, see
      ``pipelined_schedule``; a tuple of callables, one per sample, is returned
    * `_reuse_graph_input_output_buffers`: microbatches share static inputs where the order allows

    A graphed module runs its original forward where ``module.training`` is not as it was captured.
    Calls take the arguments of the samples, and ``cuda_graph_stream`` and ``cuda_graph_event``: the
    stream to replay on, and an event that the calling stream waits for instead of the whole replay.
    Other keyword arguments are ignored. Outputs and gradients of inputs lie in the memory of the
    graph: the next replay overwrites them, and what a backward pass needs. The results have
    ``reset()``, which frees the graphs, and ``backward_dw()``. A ``copy.deepcopy`` has no graphs.

    Scales of delayed scaling are renewed when the ``te.autocast`` around the calls ends, and in
    backward. Capturing leaves scales, histories, gradients (``main_grad`` too) and random numbers
    as they were.

    Raises TypeError, ValueError or RuntimeError for arguments that do not fit, and RuntimeError
    without CUDA. Calls raise ValueError or TypeError for inputs unlike the samples, and
    RuntimeError after ``reset()``, where a parameter or a scale is not in the memory that was
    captured, and for the backward pass of a call that was not the last one.
    """
    enabled = renamed("fp8_enabled", fp8_enabled, "enabled", enabled, False)
    calibrating = renamed("fp8_calibrating", fp8_calibrating, "calibrating", calibrating, False)
    recipe = renamed("fp8_recipe", fp8_recipe, "recipe", recipe, None)
    group = renamed("fp8_group", fp8_group, "amax_reduction_group", amax_reduction_group, None)
    names = "fp8_weight_caching", "cache_quantized_params"
    caching = renamed(names[0], fp8_weight_caching, names[1], cache_quantized_params, False)
    single = not isinstance(modules, tuple)
    if single:
        if _order is not None:
            raise ValueError("_order needs a tuple of modules, the layers of all chunks.")
        modules, sample_args = (modules,), (sample_args,)
        sample_kwargs = None if sample_kwargs is None else (sample_kwargs,)
    enabled = one_for_each(enabled, len(modules))
    check_warmup(num_warmup_iters)
    check_modules(modules)
    schedule = plain_schedule(len(modules))
    if _order is not None:
        layers = _num_layers_per_chunk
        schedule = pipelined_schedule(_order, len(modules), layers, len(sample_args))
    samples = check_samples(sample_args, sample_kwargs, len(schedule.callables))
    hooks = check_hooks(capture_time_hooks, len(modules))
    check_torch_autocast()
    _need_cuda()
    backend = CudaGraphs()

    def unit(i: int, args: tuple, kwargs: dict) -> Unit:
        options = Options(
            lambda: autocast(enabled[i], calibrating, recipe, group, _graph=True),
            backend,
            bool(caching),
            allow_unused_input,
            retain_graph_in_backward,
            clone_param_grads_on_return,
        )
        return Unit(modules[i], args, kwargs, options, hooks[i])

    units = [unit(i, *sample) for i, sample in zip(schedule.callables, samples)]
    if _reuse_graph_input_output_buffers:
        share_inputs(units, schedule)
    unchanging = unchanged(modules, save_fp8_tensors, restore_fp8_tensors, backend)
    with capturing(bool(caching)), unchanging:
        with backend.warming_up():
            warm_up(units, num_warmup_iters, pre_warmup_hook, post_warmup_hook)
        capture_all(units, schedule, backend.new_pool() if pool is None else pool)
    if _order is not None:
        return tuple(units)
    for module, made in zip(modules, units):
        module.forward = made
        module.backward_dw, module.reset = made.backward_dw, made.reset
    return modules[0] if single else modules


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "CUDA graphs need a CUDA device, and torch finds none. Call the modules as they are."
        )
