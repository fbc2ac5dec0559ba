# SPDX-License-Identifier: Apache-2.0
"""What the tests of exported programs share: small models with a recipe, and files for processes.

Everything here is also imported by the scripts that those tests run in fresh processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "pytorch" / "module"))
sys.path.append(str(ROOT))  # behind a copy of the package that a test put on the path

import recipe_list  # pylint: disable=wrong-import-position
from compile_support import K, build, random  # pylint: disable=wrong-import-position

import transformer_engine.pytorch as te  # pylint: disable=wrong-import-position

BATCH = torch.export.Dim("batch", min=2, max=4096)
# With gradients block scaling keeps scales of 128 rows: torch takes one of them for a constant 1.
LARGE_BATCH = torch.export.Dim("batch", min=129, max=4096)


class Recipe(torch.nn.Module):
    """A model that opens its own autocast; ``options`` go to the wrapped module."""

    def __init__(self, module, recipe, **options):
        super().__init__()
        self.module, self.recipe, self.options = module, recipe, options

    def forward(self, x):
        """``x [rows, K]``."""
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.module(x, **self.options)


def small_model(recipe="none", device="cpu", dtype=torch.bfloat16, seed=0):
    """All three modules with GEMMs one after another, under the named recipe, in eval mode."""
    width = recipe_list.out_features(recipe, 48)
    middle = te.Linear(width, K, params_dtype=dtype, device=device)
    with torch.no_grad():
        for param in middle.parameters():
            param.copy_(random(*param.shape, device=device, seed=seed + 2) * 0.2)
    layers = torch.nn.Sequential(
        build("LayerNormLinear", device, seed, dtype, recipe=recipe),
        middle,
        torch.nn.ReLU(),
        build("LayerNormMLP", device, seed + 1, dtype, recipe=recipe, activation="swiglu"),
    )
    return Recipe(layers, recipe_list.recipe_of(recipe)).eval()


def trained(model, device="cpu", dtype=torch.bfloat16, steps=2):
    """``model`` after training steps, so that delayed scaling has scales; gradients dropped."""
    for seed in range(steps):
        model(random(32, K, device=device, seed=seed, dtype=dtype)).sum().backward()
    model.zero_grad()
    return model


def exported(model, example, strict=False, batch=BATCH):
    """The exported program, whose first dimension is dynamic."""
    return torch.export.export(model, (example,), strict=strict, dynamic_shapes=({0: batch},))


def te_ops(program):
    """Names of this package's ops in a graph, in order."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    prefix = "transformer_engine."
    return [name.removeprefix(prefix).partition(".")[0] for name in names if prefix in name]


def python(script, *arguments, **environment):
    """Run a script in a fresh process whose path holds only the package; returns its output."""
    done = process(script, *arguments, **environment)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def process(script, *arguments, **environment):
    """What a script did in a fresh process whose path holds only the package."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        cwd=os.sep,  # "-c" puts the working directory first on the path
        capture_output=True,
        text=True,
        check=False,
    )
