# SPDX-License-Identifier: Apache-2.0
"""What tests show about features, for docs/features.rst (build_tools/feature_table.py makes it).

``@pytest.mark.feature(name, modes=..., modules=..., no=..., needs=..., others=...,
other_modules=...)`` is what a test shows if it passes: that the feature works, or, with ``no``, why
it is refused.

- ``modes``: of "eager", "compiled", "exported"
- ``modules``: all three by default; a test with a parameter ``kind`` speaks for that module alone
- ``needs``: "cuda" if only a run on a GPU shows it; see build_tools/feature_table.py
- ``others``: why the feature is not tested in the modes that are left; ``other_modules``: in the
  modules that are left

With TE_FEATURE_REPORT=FILE in the environment a run writes a JSON list of these claims, each with
the outcome of its test ("collected" with ``--collect-only``). Works with pytest-xdist as well.
"""

import json
import os
from pathlib import Path

import pytest
import torch

MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP")
MODES = ("eager", "compiled", "exported")
_VARIABLE = "TE_FEATURE_REPORT"
_found = []


def trained_feature(name, modes=("eager", "compiled"), **options):
    """A marker for what has no meaning in an exported program."""
    others = "part of training, not of an exported program"
    return pytest.mark.feature(name, modes=modes, others=others, **options)


def claims_of(item):
    """The claims of a collected test, without an outcome."""
    parameters = getattr(item, "callspec", None)
    kind = parameters.params.get("kind") if parameters else None
    on_cpu = parameters is not None and parameters.params.get("device") == "cpu"
    for mark in item.iter_markers("feature"):
        name, options = mark.args[0], mark.kwargs
        modules = options.get("modules", (kind,) if kind is not None else MODULES)
        assert set(options["modes"]) <= set(MODES), f"{item.nodeid}: modes of {name}"
        yield {
            "feature": name,
            "modules": [module for module in modules if module in MODULES],
            "modes": list(options["modes"]),
            "no": options.get("no", ""),
            "needs": options.get("needs", ""),
            "shown": not (on_cpu and options.get("needs") == "cuda"),
            "others": options.get("others", ""),
            "other_modules": options.get("other_modules", ""),
        }


def attach(items):
    """Let the reports of tests carry their claims, also out of worker processes."""
    for item in items:
        for claim in claims_of(item):
            item.user_properties.append(("feature", claim))


def record(report):
    """Keep what a finished test showed."""
    if report.when == "call" or report.outcome != "passed":
        for name, claim in report.user_properties:
            if name == "feature":
                _found.append(_with_outcome(claim, report.outcome))


def _with_outcome(claim, outcome):
    """A claim with what came out of its test, which shows nothing without the device it needs.

    ``where``: the device and the version of torch, where they matter.
    """
    shown = claim["shown"] or outcome == "failed"
    where = ""
    if claim["needs"] == "cuda" and torch.cuda.is_available():
        where = f"{torch.cuda.get_device_name()}, torch {torch.__version__.partition('+')[0]}"
    kept = {key: value for key, value in claim.items() if key != "shown"}
    return {**kept, "outcome": outcome if shown else "skipped", "where": where}


def write(session):
    """Write the file that the environment names; workers leave it to the main process."""
    target = os.environ.get(_VARIABLE)
    if not target or "PYTEST_XDIST_WORKER" in os.environ:
        return
    found = _found
    if session.config.option.collectonly:
        found = [
            _with_outcome(claim, "collected") for item in session.items for claim in claims_of(item)
        ]
    unique = sorted({json.dumps(claim, sort_keys=True) for claim in found})
    Path(target).write_text("[\n" + ",\n".join(unique) + "\n]\n", encoding="utf-8")
