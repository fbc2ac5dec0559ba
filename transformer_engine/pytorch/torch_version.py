# SPDX-License-Identifier: Apache-2.0
"""The version of PyTorch as a tuple that can be compared."""

import re
from functools import lru_cache
from typing import Tuple

import torch


@lru_cache(maxsize=None)
def torch_version() -> Tuple[int, ...]:
    """``(major, minor, patch)`` of the running PyTorch; suffixes such as "a0+git" are left out."""
    return tuple(int(number) for number in re.findall(r"\d+", str(torch.__version__))[:3])
