# SPDX-License-Identifier: Apache-2.0
"""Extra states as the reference package writes them, made with stand-ins for its recipe classes.

The stand-ins have the names and fields of the reference's classes and pickle as those do: as a
class without arguments and a dictionary, in which the library that they are made with may keep keys
of its own.
"""

import enum
import io
import pickle
import sys
import types
from typing import NamedTuple

import torch

PACKAGE = "transformer_engine.common.recipe"


class _FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class _OverrideLinearPrecision(NamedTuple):
    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False


class Format(enum.Enum):
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    HYBRID = _FormatHelper(max_fwd=448, max_bwd=57344)


class _Fields:
    def __init__(self, **fields):
        self.__dict__.update(fields)


NAMES = (
    *("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling"),
    *("NVFP4BlockScaling", "CustomRecipe", "MMParams", "QParams"),
)
CLASSES = {name: type(name, (_Fields,), {}) for name in NAMES}
CLASSES |= {
    "Format": Format,
    "_FormatHelper": _FormatHelper,
    "_OverrideLinearPrecision": _OverrideLinearPrecision,
}
for _name, _cls in CLASSES.items():
    _cls.__module__, _cls.__qualname__ = PACKAGE, _name


def dumped(content, protocol=None):
    """``content`` pickled; stand-ins are named like the classes that they stand for."""
    return _with_stand_ins(lambda: pickle.dumps(content, protocol))


def dumped_file(content, archive=True):
    """``content`` in an ``io.BytesIO`` by ``torch.save``, in its new or its old format."""
    buffer = io.BytesIO()
    options = {"_use_new_zipfile_serialization": archive}
    _with_stand_ins(lambda: torch.save(content, buffer, **options))
    return buffer


def _with_stand_ins(dump):
    fake = types.ModuleType(PACKAGE)
    fake.__dict__.update(CLASSES)
    real = sys.modules.get(PACKAGE)
    sys.modules[PACKAGE] = fake
    try:
        return dump()
    finally:
        if real is None:
            del sys.modules[PACKAGE]
        else:
            sys.modules[PACKAGE] = real


def as_tensor(payload):
    """A pickle as the uint8 tensor of a state dict."""
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def delayed_recipe(**fields):
    """The reference's ``DelayedScaling`` with its defaults."""
    defaults = {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    }
    return CLASSES["DelayedScaling"](**{**defaults, **fields})


def stateless_recipe(name):
    """A recipe that keeps nothing in checkpoints, with a few of its fields."""
    fields = {"fp8_format": Format.E4M3, "backward_override": None, "fp8_dpa": False}
    if name == "Float8CurrentScaling":
        fields["fp8_gemm_fprop"] = CLASSES["MMParams"](use_split_accumulator=False)
        fields["fp8_quant_fwd_inp"] = CLASSES["QParams"](power_2_scale=True, amax_epsilon=0.0)
    return CLASSES[name](**fields)


def scales(fwd=3, bwd=2, length=4, seed=0):
    """Random scales and histories of a module, under the reference's keys."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "scale_fwd": torch.rand(fwd, generator=generator) + 0.5,
        "amax_history_fwd": torch.rand(length, fwd, generator=generator),
        "scale_bwd": torch.rand(bwd, generator=generator) + 0.5,
        "amax_history_bwd": torch.rand(length, bwd, generator=generator),
    }


def scales_of(module):
    """The scales and histories that ``module`` has, under the reference's keys."""
    state = module._delayed_scaling
    return {
        "scale_fwd": state.fwd_scale.detach().cpu(),
        "amax_history_fwd": state.fwd_history.detach().cpu(),
        "scale_bwd": state.bwd_scale.detach().cpu(),
        "amax_history_bwd": state.bwd_history.detach().cpu(),
    }


EXTRA = {"fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448.0, "fp8_max_bwd": 57344.0}


def delayed_content(values, **fields):
    """The dictionary that the reference pickles for a module with delayed scaling."""
    length = len(values["amax_history_fwd"])
    recipe = delayed_recipe(amax_history_len=length, **fields)
    return {"recipe": recipe, **values, "extra_fp8_variables": dict(EXTRA)}


def old_content(values):
    """The same in early releases: without the recipe, but with the reciprocals of the scales."""
    return {
        **values,
        "scale_inv_fwd": 1 / values["scale_fwd"],
        "scale_inv_bwd": 1 / values["scale_bwd"],
        "extra_fp8_variables": {**EXTRA, "autocast_id_fwd_stack": [1, 2]},
    }
