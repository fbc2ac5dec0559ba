#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time one forward + backward of LayerNormMLP and LayerNormLinear, and check it before timing.

A case is a module, a recipe and a mode. Gradients are reset each step; a figure is the median of
five groups of steps, in microseconds. Modes:

* eager: weights quantized at each step
* cached: eager with ``is_first_microbatch=False``
* compile: ``torch.compile(fullgraph=True)``
* reduce-overhead: the same with ``mode="reduce-overhead"``
* graph: the eager step captured in a CUDA graph and replayed: the device's time without the host
* graph-cached: the same with ``is_first_microbatch=False``
* memory: MiB that an eager forward keeps for backward (without its output), and the peak of forward
  and backward, above what was there before: parameters, input and output gradient

A case whose results are wrong (against an fp32 model of torch modules for the high-precision case
and a loose band for FP8; compiled against eager bit for bit) is reported as wrong and not timed.

Usage: modules_bench.py [--cases a,b] [--recipes a,b] [--modes a,b] [--shape name=tokens,hidden,ffn]
                        [--out DIR]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

HERE = pathlib.Path(__file__).parent
CASES = {  # tokens, hidden, ffn, norm, activation (None: LayerNormLinear)
    "mlp_small": (512, 1024, 4096, "LayerNorm", "gelu"),
    "mlp_7b": (8192, 4096, 14336, "RMSNorm", "swiglu"),
    "mlp_70b": (8192, 8192, 28672, "RMSNorm", "swiglu"),
    "lin_small": (512, 1024, 3072, "LayerNorm", None),
    "lin_7b": (8192, 4096, 6144, "RMSNorm", None),
}
RECIPES = {
    "none": None,
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
NATIVE = "none,delayed,current,block"  # what an H200 multiplies in hardware
MODES = ("eager", "cached", "compile", "reduce-overhead", "graph", "graph-cached", "memory")
TOLERANCE = {  # relative L2 error
    "none": 0.03,
    "delayed": 0.15,
    "current": 0.15,
    "block": 0.12,
    "mxfp8": 0.12,
    "nvfp4": 0.6,
}


class Case:
    """A module, its input and its step."""

    def __init__(self, shape, recipe_name: str, mode: str) -> None:
        tokens, hidden, ffn, norm, activation = shape
        torch.manual_seed(0)
        options = {"normalization": norm, "bias": False, "params_dtype": torch.bfloat16}
        if activation is not None:
            options["activation"] = activation
            self.module = te.LayerNormMLP(hidden, ffn, device="cuda", **options)
        else:
            self.module = te.LayerNormLinear(hidden, ffn, device="cuda", **options)
        width = hidden if activation is not None else ffn
        self.x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.x.requires_grad_()
        self.grad = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        self.norm, self.activation = norm, activation
        self.recipe = RECIPES[recipe_name]() if RECIPES[recipe_name] is not None else None
        self.first = False if "cached" in mode else None
        self.run = self.forward
        if "cached" in mode:
            self.forward(self.x, True).backward(self.grad)
            self.reset()
        elif mode in ("compile", "reduce-overhead"):
            torch._dynamo.reset()
            options = {"mode": mode} if mode == "reduce-overhead" else {}
            self.run = torch.compile(self.forward, fullgraph=True, **options)

    def forward(self, x, first=None):
        """The module inside of the recipe's autocast."""
        first = self.first if first is None else first
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.module(x, is_first_microbatch=first)

    def reset(self) -> None:
        """Drop all gradients."""
        self.x.grad = None
        for param in self.module.parameters():
            param.grad = None

    def step(self) -> None:
        """One forward + backward."""
        if self.run is not self.forward:
            torch.compiler.cudagraph_mark_step_begin()
        self.run(self.x).backward(self.grad)
        self.reset()

    def results(self, run) -> list[torch.Tensor]:
        """Output, input gradient and weight gradients of one step."""
        if run is not self.forward:
            torch.compiler.cudagraph_mark_step_begin()
        torch.manual_seed(1)  # of stochastic rounding
        y = run(self.x)
        y.backward(self.grad)
        grads = [p.grad.clone() for p in self.module.parameters()]
        found = [y.detach().clone(), self.x.grad.clone(), *grads]
        self.reset()
        return found

    def model(self) -> list[torch.Tensor]:
        """The same results from plain torch functions in fp32."""
        x = self.x.detach().float().requires_grad_()
        params = [p.detach().float().requires_grad_() for p in self.module.parameters()]
        if self.norm == "RMSNorm":
            h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * params[0]
            rest = params[1:]
        else:
            h = torch.nn.functional.layer_norm(x, x.shape[-1:], params[0], params[1])
            rest = params[2:]
        h = h @ rest[0].t()
        if self.activation == "swiglu":
            a, b = h.chunk(2, -1)
            h = torch.nn.functional.silu(a) * b
        elif self.activation == "gelu":
            h = torch.nn.functional.gelu(h, approximate="tanh")
        y = h @ rest[1].t() if self.activation is not None else h
        y.backward(self.grad.float())
        return [y.detach(), x.grad, *(p.grad for p in params)]


def fault(case: Case, recipe: str, warm: int = 3) -> str:
    """What is wrong with the case's results; empty if nothing is."""
    for _ in range(warm):  # delayed scaling needs history; a compiled run must be past its warm-up
        eager = case.results(case.forward)
    for name, got, want in zip(("y", "dx", "dw", "dw", "dw", "dw"), eager, case.model()):
        error = float((got.float() - want).norm() / want.norm())
        if not error < TOLERANCE[recipe]:
            return f"{name}: relative error {error:.3g} against the fp32 model"
    if case.run is not case.forward and recipe != "delayed":
        for _ in range(warm):
            compiled = case.results(case.run)
        if not all(torch.equal(a, b) for a, b in zip(eager, compiled)):
            return "compiled and eager results differ"
    return ""


def median_us(step, warm: int = 8, groups: int = 5) -> float:
    """Median over groups of the mean time of a step; a group is 30 steps, fewer of slow ones."""
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    steps = max(5, min(30, int(0.25 / (time.perf_counter() - start))))
    times = []
    for _ in range(groups):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / steps * 1e6)
    return round(statistics.median(times), 1)


def captured(step):
    """The step as a CUDA graph's replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def memory(case: Case) -> dict:
    """MiB kept after a forward and the peak of a step; see the head of the file."""
    for _ in range(3):
        case.step()
    gc.collect()  # what is left of other cases
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = case.run(case.x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(case.grad)
    peak = torch.cuda.max_memory_allocated() - before
    return {"kept": round(kept / 2**20), "peak": round(peak / 2**20)}


def measure(shape, recipe: str, mode: str) -> dict:
    """One row: microseconds, or what was wrong."""
    try:
        case = Case(shape, recipe, mode)
        wrong = fault(case, recipe)
        if wrong:
            return {"wrong": wrong}
        if mode == "memory":
            return memory(case)
        skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        us = median_us(captured(case.step) if mode.startswith("graph") else case.step)
        row = {"us": us}
        if mode == "reduce-overhead":
            skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] - skips
            row["cudagraph_skips"] = skipped
        return row
    except (RuntimeError, ValueError, TypeError) as error:  # better a hole than no table
        return {"wrong": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        torch.cuda.empty_cache()


def versions() -> dict:
    """What the figures depend on."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")
    return {
        "date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver[0],
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformer_engine": _version(),
        "command": " ".join(["python3", *sys.argv]),
    }


def _version() -> str:
    import transformer_engine

    return transformer_engine.__version__


def cell(row: dict) -> str:
    """What the table says of a row."""
    if "kept" in row:
        return f"{row['kept']} / {row['peak']}"
    return str(row.get("us", "wrong"))


def table(rows: list[dict], modes) -> str:
    """Rows as reStructuredText, with the published figures beside them."""
    published = json.loads((HERE / "published_h200.json").read_text())
    head = ["case", "recipe", *modes, "reference eager", "reference graph", "GEMM floor"]
    lines = [head]
    for key in dict.fromkeys((r["case"], r["recipe"]) for r in rows):
        found = {r["mode"]: r for r in rows if (r["case"], r["recipe"]) == key}
        cells = [cell(found[m]) if m in found else "" for m in modes]
        known = published.get(key[0], {}).get(key[1], ["", "", ""])
        lines.append([*key, *cells, *map(str, known)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rule = "  ".join("=" * w for w in widths)
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([rule, text[0], rule, *text[1:], rule])


def main() -> None:
    """Measure what the command line asks for and print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--recipes", default=NATIVE, help=",".join(RECIPES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--shape", action="append", default=[], help="name=tokens,hidden,ffn")
    parser.add_argument("--out", type=pathlib.Path, help="directory for a dated result file")
    options = parser.parse_args()
    cases = {name: CASES[name] for name in options.cases.split(",") if name}
    for text in options.shape:
        name, sizes = text.split("=")
        tokens, hidden, ffn = map(int, sizes.split(","))
        cases[name] = (tokens, hidden, ffn, "RMSNorm", "swiglu")
    modes, rows = options.modes.split(","), []
    about = versions()
    print(json.dumps(about), flush=True)
    for name, shape in cases.items():
        for recipe in options.recipes.split(","):
            for mode in modes:
                row = {"case": name, "recipe": recipe, "mode": mode, **measure(shape, recipe, mode)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    print(table(rows, modes))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = f"{about['date'][:10]}-{about['gpu'].replace(' ', '-').lower()}-modules"
        (options.out / f"{stem}.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
        head = "\n".join(f":{key}: {value}" for key, value in about.items())
        (options.out / f"{stem}.rst").write_text(
            f"Microseconds per forward + backward\n{'=' * 35}\n\n{head}\n\n{table(rows, modes)}\n"
        )
    if any("wrong" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
