# SPDX-License-Identifier: Apache-2.0
"""What an import costs and does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_engine.pytorch as te

ROOT = Path(__file__).resolve().parents[2]

HEAVY = (
    "triton",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch.aot_autograd",
    "torch.distributed._functional_collectives",
    "numpy",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "torch.onnx",
)


def in_new_process(code):
    """What `code` leaves in its variable `answer`, from a fresh interpreter."""
    script = f"import json\n{code}\nprint(json.dumps(answer))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_adds_little_to_torch():
    answer = in_new_process(
        "import time, sys, threading, torch\n"
        "before = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        "import transformer_engine.pytorch\n"
        "seconds = time.perf_counter() - start\n"
        f"heavy = [n for n in {HEAVY!r} if n in sys.modules and n not in before]\n"
        "answer = {'seconds': seconds, 'heavy': heavy, 'threads': threading.active_count()}"
    )
    assert answer["heavy"] == [] and answer["threads"] == 1
    # Half a second on an idle machine; tests run side by side.
    assert answer["seconds"] < 2.0


def test_top_level_is_lazy():
    answer = in_new_process(
        "import sys, transformer_engine as te\n"
        "first = 'torch' in sys.modules or 'transformer_engine.common' in sys.modules\n"
        "names = {'common', 'pytorch'} <= set(dir(te))\n"
        "recipe = te.common.recipe.DelayedScaling\n"
        "second = 'torch' in sys.modules\n"
        "te.pytorch\n"
        "answer = [first, names, second, 'torch' in sys.modules, te.__version__]"
    )
    assert answer == [False, True, False, True, "2.20.2"]


def test_unknown_attribute_of_the_top_level():
    answer = in_new_process(
        "import transformer_engine as te\n"
        "try:\n    te.jax\n"
        "except AttributeError as error:\n    answer = str(error)"
    )
    assert "jax" in answer


def test_what_the_package_does_not_have():
    """Names of the reference package that are absent say what to use; others are unknown."""
    with pytest.raises(AttributeError, match="TransformerLayer.*use LayerNormLinear"):
        te.TransformerLayer  # pylint: disable=pointless-statement
    with pytest.raises(AttributeError, match="has no attribute 'Linaer'$"):
        te.Linaer  # pylint: disable=pointless-statement,no-member
    assert not hasattr(te, "GroupedLinear")


def test_deprecated_module_warns():
    answer = in_new_process(
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    import transformer_engine.pytorch.fp8\n"
        "answer = [str(w.message) for w in seen if 'transformer_engine.pytorch.fp8' in"
        " str(w.message)]"
    )
    assert len(answer) == 1
