# SPDX-License-Identifier: Apache-2.0
"""AOTInductor packages: compiled once, loaded by a fresh process, bit for bit what eager computes.

One package holds a module for each recipe, because what takes time is the C++ compiler.
"""

import shutil

import pytest
import torch

from deployment_support import BATCH, Recipe, exported, process
from compile_support import K, assert_same_bits, build, random
from recipe_list import recipe_of

RECIPES = ("none", "current", "delayed", "block", "mxfp8", "nvfp4", "custom_two_formats")
KINDS = ("LayerNormMLP", "LayerNormLinear", "Linear")

LOADING = """
import sys, torch
import transformer_engine.pytorch  # registers the ops
torch.set_num_threads(1)
folder = sys.argv[1]
run = torch._inductor.aoti_load_package(folder + "/model.pt2")
with torch.no_grad():
    torch.save([run(x) for x in torch.load(folder + "/x.pt")], folder + "/y.pt")
print("done")
"""


def package(program, folder):
    """Compile a program to ``model.pt2``."""
    torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(folder / "model.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # half the time
    )


def torch_fails_itself(device, folder):
    """Whether a package of modules of torch ends the process that loads it, too."""
    model = torch.nn.Sequential(torch.nn.Linear(K, 48), torch.nn.GELU())
    model = model.to(device, torch.bfloat16)
    inputs = [random(24, K, device=device)]
    with torch.no_grad():
        package(torch.export.export(model, (inputs[0],), dynamic_shapes=({0: BATCH},)), folder)
    torch.save(inputs, folder / "x.pt")
    return process(LOADING, folder).returncode < 0


class EveryRecipe(torch.nn.Module):
    """A module for each recipe, all called with the same input."""

    def __init__(self, device):
        super().__init__()
        self.models = torch.nn.ModuleList(
            Recipe(build(KINDS[i % 3], device, seed=i, recipe=recipe), recipe_of(recipe))
            for i, recipe in enumerate(RECIPES)
        )

    def forward(self, x):
        """``x [rows, K]``."""
        return tuple(model(x) for model in self.models)


@pytest.mark.feature("AOTInductor package", modes=("exported",), others="a form of export")
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_package_in_a_fresh_process(device, tmp_path):
    """Each recipe, a dynamic batch, the leaf ops called by the package's C++ code."""
    model = EveryRecipe(device).eval()
    inputs = [random(rows, K, device=device, seed=rows) for rows in (24, 80)]
    with torch.no_grad():
        program = exported(model, random(32, K, device=device))
        package(program, tmp_path)
        wanted = [model(x) for x in inputs]
    torch.save(inputs, tmp_path / "x.pt")
    done = process(LOADING, tmp_path)
    if done.returncode < 0 and torch_fails_itself(device, tmp_path):
        pytest.skip("packages of torch.nn.Linear end the process here, too: torch can load none")
    assert done.stdout.endswith("done\n"), f"exit status {done.returncode}: {done.stderr[-3000:]}"
    for outputs, expected in zip(torch.load(tmp_path / "y.pt"), wanted):
        for recipe, a, b in zip(RECIPES, outputs, expected):
            assert_same_bits(a, b, f"{recipe}, {a.shape[0]} rows")
