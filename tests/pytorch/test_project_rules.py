# SPDX-License-Identifier: Apache-2.0
"""Rules of the source tree, and what a wheel made from it holds."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from build_tools import check_sources  # pylint: disable=wrong-import-position
from build_tools.version import package_version  # pylint: disable=wrong-import-position

LICENCE = f"# {check_sources.SPDX_LINE}\n"


def test_sources_name_their_licence():
    assert not check_sources.licence_breaches(ROOT)


def test_package_keeps_the_compiler_on_and_reads_the_environment_in_one_file():
    assert not check_sources.package_breaches(ROOT)


def variables_read(monkeypatch):
    """The environment variables of this package that its functions ask for, all of them called."""
    from transformer_engine.common import environment as common
    from transformer_engine.common.recipe import NVFP4BlockScaling
    from transformer_engine.pytorch import environment

    class Recorder(dict):
        def get(self, key, default=None):
            names.add(key)
            return default

    names = set()
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", Recorder(os.environ))
        for module in (common, environment):
            for function in vars(module).values():
                if inspect.isfunction(function) and not inspect.signature(function).parameters:
                    function()
        for direction in ("FWD", "BWD", "INF"):
            environment.norm_sm_margin(direction)
        NVFP4BlockScaling()
    return {name for name in names if name.startswith("NVTE_")}


def test_docs_list_every_variable(monkeypatch):
    text = (ROOT / "docs" / "index.rst").read_text(encoding="utf-8")
    listed = re.findall(r"^``(NVTE_\w+)`` ", text, re.MULTILINE)
    assert len(listed) == len(set(listed)) and set(listed) == variables_read(monkeypatch)
    # None is read elsewhere: not one more name in the sources, apart from prefixes of names.
    sources = (ROOT / "transformer_engine").rglob("*.py")
    named = re.findall(r"\bNVTE_\w*[A-Z0-9]\b", "".join(f.read_text("utf-8") for f in sources))
    assert set(named) <= set(listed)


@pytest.mark.parametrize(
    "line",
    [
        "@torch._dynamo.disable",
        "@torch._dynamo.disable()",
        "f = torch.compiler.disable(f)",
        "from torch._dynamo import disable",
        "flag = os.environ.get('X')",
        "flag = os.getenv('X')",
        "from os import environ",
    ],
)
def test_a_breach_is_found(tmp_path, line):
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (tmp_path / "LICENSE").write_text("text")
    (package / "good.py").write_text(LICENCE + "import os\n")
    (package / "bad.py").write_text(LICENCE + line + "\n")
    breaches = check_sources.package_breaches(tmp_path)
    assert len(breaches) == 1 and breaches[0].startswith("transformer_engine/pytorch/bad.py:2:")
    assert not check_sources.licence_breaches(tmp_path)


def test_a_missing_licence_line_is_found(tmp_path):
    (tmp_path / "LICENSE").write_text("text")
    (tmp_path / "good.sh").write_text("#!/bin/sh\n" + LICENCE)
    (tmp_path / "bad.yml").write_text("on: push\n\n\n" + LICENCE)
    assert [b.split(":")[0] for b in check_sources.licence_breaches(tmp_path)] == ["bad.yml"]


def test_wheel_is_pure_python_and_complete(tmp_path):
    pytest.importorskip("setuptools")
    source, out = tmp_path / "source", tmp_path / "wheel"
    # A copy, so that no build/ folder of an earlier state takes part and none is left behind.
    for name in ("setup.py", "pyproject.toml", "README.rst", "LICENSE", "MANIFEST.in"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name in ("build_tools", "transformer_engine"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    # A build environment has no torch; this one refuses to be imported.
    (source / "torch.py").write_text("raise RuntimeError('setup.py imports torch')\n")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(out), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr

    (wheel,) = out.iterdir()
    assert wheel.name == f"transformer_engine-{package_version()}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata_name = next(name for name in names if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
    packed = {name for name in names if ".dist-info/" not in name}
    expected = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "transformer_engine").rglob("*.py")
    }
    assert packed == expected
    required = [r for r in metadata.get_all("Requires-Dist") if "extra" not in r]
    assert required == ["torch>=2.11"]
    assert metadata["License"] == "Apache-2.0" or metadata["License-Expression"] == "Apache-2.0"
