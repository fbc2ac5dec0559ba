# SPDX-License-Identifier: Apache-2.0
"""Rules that black and pylint do not check. Run as a script it exits 1 on a breach.

- Each source file names its licence in one of its first three lines.
- The package takes code away from the compiler in one place only, the announced eager fallback:
  one full graph is what it promises.
- The package reads environment variables in files called environment.py and nowhere else.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "transformer_engine"
SPDX_LINE = "SPDX-License-Identifier: Apache-2.0"
SOURCE_SUFFIXES = {".py", ".sh", ".yml", ".yaml", ".toml"}
SOURCE_NAMES = {"run", ".pylintrc"}  # sources without a suffix
SKIPPED_FOLDERS = {"build", "dist", "__pycache__"}
HIDDEN_FOLDERS_OF_OURS = {".ci", ".github"}
FALLBACK_FILE = "transformer_engine/pytorch/dynamo/capability.py"
ENVIRONMENT_FILE = "environment.py"

HIDES_FROM_COMPILER = re.compile(r"\b(?:_?dynamo|compiler)\.disable\b|\bimport\s+disable\b")
READS_ENVIRONMENT = re.compile(
    r"\bos\.(?:environ|getenv)\b|\bfrom\s+os\s+import\b.*\b(?:environ|getenv)\b"
)


def source_files(root: Path):
    """Yield the files under ``root`` that are sources, caches and environments left out."""
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        folders = set(relative.parts[:-1]) - HIDDEN_FOLDERS_OF_OURS
        if any(name in SKIPPED_FOLDERS or name.startswith(".") for name in folders):
            continue
        if not path.is_file():
            continue
        if path.suffix in SOURCE_SUFFIXES or path.name in SOURCE_NAMES:
            yield path


def licence_breaches(root: Path) -> list:
    """Sources under ``root`` whose first three lines do not name the licence, a sentence each."""
    breaches = []
    for path in source_files(root):
        head = path.read_text(encoding="utf-8").splitlines()[:3]
        if not any(SPDX_LINE in line for line in head):
            breaches.append(
                f"{path.relative_to(root)}: one of the first three lines must be '# {SPDX_LINE}'."
            )
    if not (root / "LICENSE").is_file():
        breaches.append("LICENSE is missing.")
    return breaches


def package_breaches(root: Path) -> list:
    """Lines of the package that hide code from the compiler or read the environment elsewhere."""
    breaches = []
    for path in source_files(root):
        name = path.relative_to(root).as_posix()
        if not name.startswith(PACKAGE + "/") or path.suffix != ".py":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if HIDES_FROM_COMPILER.search(line) and name != FALLBACK_FILE:
                breaches.append(
                    f"{name}:{number}: the compiler may not be disabled here; give the reason to"
                    f" {FALLBACK_FILE}, which falls back with a warning."
                )
            if READS_ENVIRONMENT.search(line) and path.name != ENVIRONMENT_FILE:
                breaches.append(f"{name}:{number}: read the environment in {ENVIRONMENT_FILE}.")
    return breaches


def main() -> int:
    """Print every breach; return the exit status."""
    breaches = licence_breaches(ROOT) + package_breaches(ROOT)
    for breach in breaches:
        print(breach)
    print(f"check_sources: {len(breaches)} breaches" if breaches else "check_sources: ok")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
