# SPDX-License-Identifier: Apache-2.0
"""Prints a digest of the package's sources and of torch's version: the name of a compile cache.

Run it with the repository on PYTHONPATH.
"""

from importlib.metadata import version
from pathlib import Path

from transformer_engine.common.sources import digest_of_sources

PACKAGE = Path(__file__).resolve().parent.parent / "transformer_engine"

if __name__ == "__main__":
    print(digest_of_sources(PACKAGE, version("torch")))
