#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Host time of one training step of small modules: eager, compiled, and compiled to CUDA graphs.

Tensors are so small that a GPU waits for the host: a figure is what Python, PyTorch and this
package take to launch a step. On the CPU the arithmetic, in plain torch, is part of the figure, so
only differences between modes say something there. ``nn`` is the same model of ``torch.nn``
modules, which is the floor that PyTorch itself sets for a mode.

A figure is the smallest of several groups of steps, in microseconds: forward, backward, and both
with the gradients' reset. Compiled gradients are compared with those of eager before.

Usage: host_time.py [--device cpu|cuda] [--modules mlp,linear] [--recipes nn,none,delayed,current]
                    [--modes eager,compile,reduce-overhead]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# pylint: disable=wrong-import-position
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.doctor import table

ROWS, HIDDEN, FFN = 16, 64, 128
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}  # CPUs are slow in bf16
RECIPES = {
    "none": None,
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
MODES = ("eager", "compile", "reduce-overhead")
HEAD = ("module", "recipe", "mode", "forward", "backward", "step")
GROUPS, STEPS, WARM = 7, 50, 10


def build(module: str, recipe: str, device: str) -> nn.Module:
    """The module under test, or its model of ``torch.nn``."""
    torch.manual_seed(0)
    options, dtype = {"bias": False, "device": device}, DTYPES[device]
    if recipe != "nn":
        options["params_dtype"] = dtype
        if module == "mlp":
            return te.LayerNormMLP(HIDDEN, FFN, **options)
        return te.LayerNormLinear(HIDDEN, FFN, **options)
    options["dtype"] = dtype
    layers = [nn.LayerNorm(HIDDEN, device=device, dtype=dtype)]
    layers.append(nn.Linear(HIDDEN, FFN, **options))
    if module == "mlp":
        layers += [nn.GELU("tanh"), nn.Linear(FFN, HIDDEN, **options)]
    return nn.Sequential(*layers)


class Step:
    """Forward and backward of a module in a mode."""

    def __init__(self, module: str, recipe: str, mode: str, device: str) -> None:
        torch._dynamo.reset()
        self.module = build(module, recipe, device)
        self.recipe = RECIPES[recipe]() if RECIPES.get(recipe) else None
        x = torch.randn(ROWS, HIDDEN, device=device, dtype=DTYPES[device])
        self.x = x.requires_grad_()
        self.run = self.call
        if mode != "eager":
            options = {} if mode == "compile" else {"mode": mode}
            self.run = torch.compile(self.call, fullgraph=True, **options)
        self.cudagraphs = mode == "reduce-overhead"
        self.grad = torch.randn_like(self.call(self.x).detach())

    def call(self, x):
        """The module inside of the recipe's region."""
        if self.recipe is None:
            return self.module(x)
        with te.autocast(enabled=True, recipe=self.recipe):
            return self.module(x)

    def once(self) -> tuple[float, float]:
        """One step; its seconds in forward and in backward."""
        if self.cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        start = time.perf_counter()
        y = self.run(self.x)
        middle = time.perf_counter()
        y.backward(self.grad)
        end = time.perf_counter()
        self.reset()
        return middle - start, end - middle

    def reset(self) -> None:
        """Drop all gradients."""
        self.x.grad = None
        for param in self.module.parameters():
            param.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """Of the input and the parameters, after three steps, so that graphs are replayed."""
        for _ in range(2):
            self.once()
        if self.cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.run(self.x).backward(self.grad)
        found = [t.grad.clone() for t in (self.x, *self.module.parameters())]
        self.reset()
        return found


def measure(step: Step, device: str) -> list[str]:
    """Microseconds of forward, backward and step: each the smallest mean of a group of steps."""
    for _ in range(WARM):
        step.once()
    groups = []
    for _ in range(GROUPS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        parts = [step.once() for _ in range(STEPS)]
        if device == "cuda":
            torch.cuda.synchronize()
        whole = time.perf_counter() - start
        groups.append((*(sum(part) for part in zip(*parts)), whole))
    return [f"{min(figures) / STEPS * 1e6:.0f}" for figures in zip(*groups)]


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--modules", default="mlp,linear")
    parser.add_argument("--recipes", default="nn,none,delayed,current")
    parser.add_argument("--modes", default=",".join(MODES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for module in arguments.modules.split(","):
        for recipe in arguments.recipes.split(","):
            wanted = None
            for mode in arguments.modes.split(","):
                if mode == "reduce-overhead" and arguments.device != "cuda":
                    continue  # CUDA graphs
                step = Step(module, recipe, mode, arguments.device)
                found = step.gradients()
                if wanted is not None and recipe != "nn":  # Inductor rounds less often than eager
                    same = all(torch.equal(a, b) for a, b in zip(found, wanted))
                    figures = measure(step, arguments.device) if same else ["wrong"] * 3
                else:
                    figures = measure(step, arguments.device)
                wanted = found if mode == "eager" else wanted
                lines.append((module, recipe, mode, *figures))
    print(
        f"LayerNormMLP({HIDDEN}, {FFN}) and LayerNormLinear({HIDDEN}, {FFN}), {ROWS} rows,"
        f" {arguments.device}, torch {torch.__version__}, microseconds\n"
    )
    print(table(HEAD, lines))


if __name__ == "__main__":
    main()
