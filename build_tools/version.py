# SPDX-License-Identifier: Apache-2.0
"""The version of the distribution, read from the package without importing it."""

import re
from pathlib import Path

VERSION_FILE = Path(__file__).resolve().parent.parent / "transformer_engine" / "_version.py"


def package_version() -> str:
    """Return ``__version__`` as written in transformer_engine/_version.py.

    The file is parsed, not imported: importing the package would need torch, which a build
    environment does not have. Raises RuntimeError if the file has no such line.
    """
    text = VERSION_FILE.read_text(encoding="utf-8")
    match = re.search(r"""^__version__\s*=\s*["']([^"']+)["']""", text, flags=re.MULTILINE)
    if match is None:
        raise RuntimeError(f'{VERSION_FILE} has no line of the form __version__ = "1.2.3".')
    return match.group(1)


if __name__ == "__main__":
    print(package_version())
