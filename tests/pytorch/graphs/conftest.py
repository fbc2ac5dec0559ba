# SPDX-License-Identifier: Apache-2.0
"""Without CUDA a stand-in runs captured functions again, which tests all but the capture."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "module"))

# pylint: disable=wrong-import-position
from graph_support import Rerun

from transformer_engine.pytorch import graph


@pytest.fixture(autouse=True)
def capturing_somehow(request, monkeypatch):
    """The stand-in, unless the test runs on CUDA."""
    names = request.fixturenames
    if "device" in names and request.getfixturevalue("device") == "cpu":
        monkeypatch.setattr(graph, "CudaGraphs", Rerun)
        monkeypatch.setattr(graph, "_need_cuda", lambda: None)
