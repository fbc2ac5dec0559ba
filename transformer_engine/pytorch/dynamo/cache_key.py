# SPDX-License-Identifier: Apache-2.0
"""Makes PyTorch's caches of compiled code notice that this package changed.

Their keys hold the graph and torch's own source, but of an op only its name. What a module op
consists of, and the shapes that a leaf op answers, are Python of this package: code compiled for
another state of it must not be found, nor what was compiled under other flags of the environment.
``torch.compiler.config.cache_key_tag`` is part of the keys of both caches (of FX graphs and of
AOTAutograd).
"""

from __future__ import annotations

import functools
from pathlib import Path

from ...common.sources import digest_of_sources
from ..environment import set_flags

_PACKAGE = Path(__file__).resolve().parents[2]
_NAME = "transformer_engine"


@functools.lru_cache(maxsize=None)
def source_digest() -> str:
    """Sixteen hexadecimal digits that depend on every Python file of the package."""
    return digest_of_sources(_PACKAGE)


def tag_cache_keys() -> None:
    """Add the digest and the flags to the tag that the process has, or renew them there.

    What else the tag holds, separated by ";", is the user's and stays in front.
    """
    from torch.compiler import config  # pylint: disable=import-outside-toplevel

    others = [part for part in config.cache_key_tag.split(";") if part and not _is_ours(part)]
    ours = ",".join([f"{_NAME}={source_digest()}", *set_flags()])
    tag = ";".join([*others, ours])
    if config.cache_key_tag != tag:
        config.cache_key_tag = tag


def _is_ours(part: str) -> bool:
    return part.startswith(f"{_NAME}=")
