# SPDX-License-Identifier: Apache-2.0
"""How delayed scales are renewed: the parameters of the update, and the update written in plain
torch.

The parameters travel as one short string, because a string is a constant of a compiled graph, and
graphs are made anew when it changes (numbers that change become symbols there). It is made by
``quantization.autocast``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from ...common.recipe import Recipe
from ..environment import constant_in_graphs, unfused_fp8_update

PYTHON_RULE_IN_GRAPH = (
    "DelayedScaling with a function as amax_compute_algo or scaling_factor_compute_algo cannot be"
    ' compiled. Use amax_compute_algo "max" or "most_recent" and scaling_factor_compute_algo None,'
    " or leave the module out of torch.compile."
)


class UpdateRule(NamedTuple):
    """Parameters of the update of one recipe.

    * `length`: rows of the amax history
    * `algo`: "max", "most_recent", or "python" if the recipe holds functions of the user
    * `margin`: the scale is divided by 2**margin
    * `fwd_max`, `bwd_max`: largest finite values of the forward and backward FP8 types
    * `unfused`: use ``amax_and_scale_update`` instead of the leaf op
    * `group`: name of the process group that amaxes are reduced over; "" for none
    * `recipe`: the recipe, for its functions; None unless `algo` is "python"
    """

    length: int
    algo: str
    margin: float
    fwd_max: float
    bwd_max: float
    unfused: bool
    group: str
    recipe: Optional[Any] = None


def rule_of(recipe: Recipe, group: Any) -> Union[str, UpdateRule]:
    """How delayed scales are renewed under `recipe`; "" for recipes without delayed scaling.

    `group`: process group over which the recipe may want amaxes reduced; None is the default group.
    Returns a string, which `decode_rule` reads. It ends with whether NVTE_UNFUSED_FP8_UPDATE is set
    and the name of the group, "" where nothing is reduced. For recipes with functions of the user
    it returns the decoded rule; no graph can be made then, and while one is it raises RuntimeError.
    """
    if not recipe.delayed():
        return ""
    name = _reduction_group(group) if recipe.reduce_amax else ""
    rule = f"{recipe._update_rule},{int(unfused_fp8_update())},{name}"
    if isinstance(recipe.amax_compute_algo, str) and recipe.scaling_factor_compute_algo is None:
        return rule
    if torch.compiler.is_compiling():
        raise RuntimeError(PYTHON_RULE_IN_GRAPH)
    return decode_rule(rule)._replace(recipe=recipe)


@constant_in_graphs
def _reduction_group(group: Any) -> str:
    """Name of the process group that amaxes are reduced over; "" if there is only one rank."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    if distributed.get_world_size(group) <= 1:
        return ""
    # The graph needs the collectives' shape functions, which this module registers.
    from torch.distributed import _functional_collectives

    del _functional_collectives
    return (distributed.group.WORLD if group is None else group).group_name


def decode_rule(rule: Union[str, UpdateRule]) -> UpdateRule:
    """The parameters that a rule made by `rule_of` says."""
    if not isinstance(rule, str):
        return rule
    length, algo, margin, fwd_max, bwd_max, _, unfused, group = rule.split(",", 7)
    return UpdateRule(
        int(length), algo, float(margin), float(fwd_max), float(bwd_max), unfused == "1", group
    )


def default_sf_compute(amax: Tensor, scale: Tensor, fp8_max: float, margin: float) -> Tensor:
    """Scales ``fp8_max / amax / 2**margin`` for `amax` ``[n]``.

    The old `scale` stays where amax is zero or not finite; an infinite quotient becomes the largest
    fp32.
    """
    new = (fp8_max / amax) / (2.0**margin)
    new = torch.where(amax > 0.0, new, scale)
    new = torch.where(torch.isfinite(amax), new, scale)
    return torch.where(torch.isinf(new), torch.full_like(new, torch.finfo(new.dtype).max), new)


def update_amax_history(history: Tensor) -> Tensor:
    """Roll `history` ``[L, n]`` one row back and zero row 0, in place; returns it."""
    if history.shape[0] > 1:
        history.copy_(torch.roll(history, -1, 0))
    history[0].zero_()
    return history


def get_amax_and_update_history(history: Tensor, algo: str) -> tuple[Tensor, Tensor]:
    """``(history, amax [n])`` with amax by `algo`, "max" or "most_recent"; rolls `history` in
    place.
    """
    amax = torch.amax(history, dim=0) if algo == "max" else history[0].clone()
    return update_amax_history(history), amax


def compute_amax_and_update_history(history: Tensor, algo) -> tuple[Tensor, Tensor]:
    """As `get_amax_and_update_history`; `algo` may also be a function ``f(history) -> amax``."""
    if callable(algo):
        amax = algo(history)
        return update_amax_history(history), amax
    return get_amax_and_update_history(history, algo)


def compute_scaling_factor(amax: Tensor, scale: Tensor, fp8_max: float, recipe) -> Tensor:
    """New scales by the recipe's own function, or by `default_sf_compute`."""
    if recipe.scaling_factor_compute_algo is None:
        return default_sf_compute(amax, scale, fp8_max, recipe.margin)
    return recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe)


def amax_and_scale_update(history: Tensor, scale: Tensor, fp8_max: float, recipe) -> None:
    """Renew `scale` ``[n]`` from `history` ``[L, n]`` and roll the history, both in place, in plain
    torch.

    Unlike the leaf op ``delayed_scaling_update_`` it also rolls slots whose newest amax is 0.
    """
    history, amax = compute_amax_and_update_history(history, recipe.amax_compute_algo)
    scale.copy_(compute_scaling_factor(amax, scale, fp8_max, recipe))


def unfused_update(history: Tensor, scale: Tensor, fp8_max: float, rule: UpdateRule) -> None:
    """`amax_and_scale_update` of a recipe (functions of the user) or of a rule (traceable)."""
    if rule.recipe is not None:
        with torch.no_grad():
            amax_and_scale_update(history, scale, fp8_max, rule.recipe)
        return
    history, amax = get_amax_and_update_history(history, rule.algo)
    scale.copy_(default_sf_compute(amax, scale, fp8_max, rule.margin))
