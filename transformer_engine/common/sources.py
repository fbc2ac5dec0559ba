# SPDX-License-Identifier: Apache-2.0
"""A digest of Python sources, by which caches of compiled code are told apart."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest_of_sources(folder: Path, *versions: str) -> str:
    """Sixteen hexadecimal digits that depend on ``versions`` and each Python file in ``folder``.

    On a file's path below ``folder`` and on its content.
    """
    digest = hashlib.sha256("".join(versions).encode())
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
