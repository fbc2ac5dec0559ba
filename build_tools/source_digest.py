# SPDX-License-Identifier: Apache-2.0
"""Prints a digest of the package's sources and of torch's version: the name of a compile cache."""

import hashlib
from importlib.metadata import version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "transformer_engine"


def source_digest() -> str:
    """Return 16 hexadecimal digits that change with the package's Python files and with torch."""
    digest = hashlib.sha256(version("torch").encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    print(source_digest())
