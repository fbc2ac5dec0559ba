# SPDX-License-Identifier: Apache-2.0
"""Packaging of transformer-engine: Python files only; nothing is compiled, torch not imported."""

import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 build does not put the project's folder on the path

from build_tools.version import package_version  # pylint: disable=wrong-import-position

EXTRAS = {
    "test": ["pytest>=8", "pytest-xdist>=3.5", "numpy", "transformer-engine[onnx]"],
    "onnx": ["onnx>=1.18", "onnxscript>=0.5", "onnxruntime>=1.22"],
    "demo": ["matplotlib>=3.7", "tqdm>=4.60"],
    # Exact, because another release of either formats or judges the same code differently.
    "lint": ["black==26.10.1", "pylint==4.1.4"],
}

setup(
    name="transformer-engine",
    version=package_version(),
    description="Transformer modules in FP8 for PyTorch: Python and Triton, eager and in one graph",
    long_description=(ROOT / "README.rst").read_text(encoding="utf-8"),
    long_description_content_type="text/x-rst",
    license="Apache-2.0",
    packages=find_packages(include=["transformer_engine", "transformer_engine.*"]),
    python_requires=">=3.10",
    install_requires=["torch>=2.11"],
    extras_require=EXTRAS,
    zip_safe=False,
)
