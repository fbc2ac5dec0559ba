# SPDX-License-Identifier: Apache-2.0
"""How long torch.compile takes for forward and backward of a LayerNormMLP, with nothing cached.

    python qa/L1_pytorch_performance/compile_time.py [--device cpu] [--recipes none,current]
                                                     [--backends aot_eager,inductor]

Each line is a process of its own with empty caches. PyTorch's own start (importing and starting the
compiler, measured on ``x + 1``) is a column of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

HIDDEN, FFN, ROWS = 256, 512, 128
RECIPES = ("none", "current", "delayed", "block", "mxfp8", "nvfp4")
BACKENDS = ("aot_eager", "inductor")
HEAD = (
    "recipe",
    "backend",
    "PyTorch's start, s",
    "forward, s",
    "backward, s",
    "graphs",
    "step, ms",
)


def measure(recipe_name: str, backend: str, device: str) -> list:
    """The numbers of a line, in this process, which must be fresh."""
    import torch

    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    recipe = {
        "none": lambda: None,
        "current": recipes.Float8CurrentScaling,
        "delayed": recipes.DelayedScaling,
        "block": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
        "nvfp4": recipes.NVFP4BlockScaling,
    }[recipe_name]()
    module = te.LayerNormMLP(HIDDEN, FFN, params_dtype=torch.bfloat16, device=device)
    x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None

    def timed(run):
        synchronize()
        begin = time.perf_counter()
        result = run()
        synchronize()
        return result, time.perf_counter() - begin

    def forward():
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return compiled(x)

    def one_step():
        forward().sum().backward()

    plus = torch.compile(lambda values: values + 1, backend=backend)
    _, start = timed(lambda: plus(x).sum().backward())
    y, first_forward = timed(forward)
    _, first_backward = timed(y.sum().backward)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - 1
    one_step()
    steps = min(timed(one_step)[1] for _ in range(10))
    return [start, first_forward, first_backward, graphs, steps * 1e3]


def in_new_process(recipe: str, backend: str, device: str) -> list:
    """`measure` in a process that has nothing cached."""
    command = [sys.executable, __file__, "--line", recipe, backend, device]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{recipe} with {backend} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--line", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--backends", default=",".join(BACKENDS))
    arguments = parser.parse_args()
    if arguments.line:
        print(json.dumps(measure(*arguments.line)))
        return
    import torch

    from transformer_engine.pytorch.doctor import table

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    lines = []
    for recipe in arguments.recipes.split(","):
        for backend in arguments.backends.split(","):
            start, forward, backward, graphs, step = in_new_process(recipe, backend, device)
            numbers = (f"{start:.1f}", f"{forward:.1f}", f"{backward:.1f}", graphs, f"{step:.1f}")
            lines.append((recipe, backend, *numbers))
    print(
        f"LayerNormMLP({HIDDEN}, {FFN}), {ROWS} rows, bf16, {device}, torch {torch.__version__}\n"
    )
    print(table(HEAD, lines))


if __name__ == "__main__":
    main()
