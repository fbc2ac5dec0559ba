# SPDX-License-Identifier: Apache-2.0
"""docs/features.rst says what the markers of the tests say, and the table tells failures apart."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import feature_report

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("table", ROOT / "build_tools" / "feature_table.py")
feature_table = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(feature_table)


def test_the_committed_table_is_not_stale(tmp_path):
    """The tests that exist now, if they pass, make the table that is in docs."""
    marked = [
        str(path)
        for path in sorted((ROOT / "tests" / "pytorch").rglob("test_*.py"))
        if re.search(r"mark\.feature|trained_feature", path.read_text(encoding="utf-8"))
    ]
    target = tmp_path / "claims.json"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "feature", *marked],
        cwd=ROOT,
        env={**environment, "TE_FEATURE_REPORT": str(target), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    claims = json.loads(target.read_text(encoding="utf-8"))
    table = feature_table.table(claims, feature_table.kept_claims())
    committed = (ROOT / "docs" / "features.rst").read_text(encoding="utf-8")
    how = "TE_FEATURE_REPORT=f.json pytest -m feature; python build_tools/feature_table.py f.json"
    assert table == committed, f"docs/features.rst is stale. Make it anew: {how}"


def claim(outcome, **changes):
    """One test's claim."""
    values = {"feature": "f", "modules": ["Linear"], "modes": ["eager"], "no": "", "others": ""}
    values.update(other_modules="", needs="", where="", outcome=outcome)
    return {**values, **changes}


def cells(*claims, kept=()):
    """The cells of the first row, and the notes."""
    text = feature_table.table(claims, kept)
    row = next(line for line in text.splitlines() if line.startswith("f "))
    return re.split(r"  +", row)[1:], re.findall(r"^\d+\. (.*)$", text, re.M)


def test_cells():
    """What one result makes of a cell."""
    rest = ["\\- (1)"] * 8
    assert cells(claim("passed")) == (["yes", *rest], ["no test of it yet"])
    assert cells(claim("passed"), claim("skipped"))[0] == ["yes", *rest]
    assert cells(claim("passed"), claim("failed"))[0] == ["FAILED", *rest]
    assert cells(claim("skipped"))[0] == ["\\- (1)", *rest]
    found, notes = cells(claim("passed", no="because"))
    assert found[0] == "no (1)" and notes == ["because", "no test of it yet"]
    assert cells(claim("passed"), claim("passed", no="because"))[0][0] == "some (1)"
    found, notes = cells(claim("passed", others="of eager", other_modules="of Linear"))
    assert found == ["yes", *["\\- (1)"] * 2, *["\\- (2)"] * 6]
    assert notes == ["of eager", "of Linear"]


def test_cells_that_need_a_gpu():
    """They say which GPU showed it; a run without one neither claims it nor takes it back."""
    rest = ["\\- (2)"] * 8
    there = claim("passed", needs="cuda", where="GPU")
    for outcome in ("skipped", "collected"):
        found, notes = cells(claim(outcome, needs="cuda"))
        assert found == ["\\- (1)", *rest] and notes == [feature_table.NO_GPU, "no test of it yet"]
        found, notes = cells(claim(outcome, needs="cuda"), kept=feature_table.to_keep([there]))
        assert found == ["yes (1)", *rest] and notes[0] == "needs CUDA; tested on GPU"
        other = {**there, "feature": "g"}
        assert cells(claim(outcome, needs="cuda"), kept=[other])[0] == ["\\- (1)", *rest]
    assert cells(claim("failed", needs="cuda"), kept=[there])[0][0] == "FAILED"
    failed = claim("failed", needs="cuda", where="GPU")
    assert feature_table.to_keep([there, failed, claim("passed")]) == []


def test_the_stand_in_for_a_gpu_shows_nothing():
    """A test that passed with device="cpu" is no claim of what needs CUDA; one that failed is."""
    kept = {"needs": "cuda", "shown": False}
    assert feature_report._with_outcome(kept, "passed")["outcome"] == "skipped"
    assert feature_report._with_outcome(kept, "failed")["outcome"] == "failed"
    assert feature_report._with_outcome({**kept, "shown": True}, "passed")["outcome"] == "passed"
