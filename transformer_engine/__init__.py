# SPDX-License-Identifier: Apache-2.0
"""FP8 building blocks for Transformer models, in Python and Triton.

``transformer_engine.common`` holds the recipes, ``transformer_engine.pytorch`` the modules. Both
are imported on first use, so that ``import transformer_engine`` alone costs nothing and needs no
PyTorch.
"""

import importlib

from ._version import __version__

_SUBPACKAGES = ("common", "pytorch")

__all__ = ["__version__", *_SUBPACKAGES]


def __getattr__(name):
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"Module {__name__!r} has no attribute {name!r}.")


def __dir__():
    return sorted({*globals(), *_SUBPACKAGES})
