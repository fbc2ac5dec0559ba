# SPDX-License-Identifier: Apache-2.0
"""The version of PyTorch as a tuple that can be compared, and what differs between versions."""

import re
from functools import lru_cache
from typing import Tuple

import torch

from ..common.environment import constant_in_graphs


@lru_cache(maxsize=None)
def torch_version() -> Tuple[int, ...]:
    """``(major, minor, patch)`` of the running PyTorch; suffixes such as "a0+git" are left out."""
    return tuple(int(number) for number in re.findall(r"\d+", str(torch.__version__))[:3])


@constant_in_graphs
def is_exporting() -> bool:
    """Whether ``torch.export`` is tracing.

    The flag itself is read, and for real while Dynamo traces: what torch 2.11 traces takes
    ``torch.compiler.is_exporting()`` for True.
    """
    return torch.compiler._is_exporting_flag
