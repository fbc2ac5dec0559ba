#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Device time of LayerNormMLP over tokens and hidden sizes, beside the matrix products alone.

The step (forward and backward) is captured in a CUDA graph, as in ``modules_bench.py``, which also
checks each recipe once before it is timed here. Sizes are powers of two and some that are no
multiples of 128, which show whether there are cliffs. The figure is TFLOP/s of the six products: a
step of T tokens, hidden size H and feed-forward size F with a gated activation has 18 T H F FLOP.

Usage: scaling_bench.py [--recipes a,b] [--out DIR]
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch

from modules_bench import RECIPES, Case, captured, fault, median_us, versions

TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
HIDDEN = (512, 1024, 2048, 4096, 8192, 16384)
UNEVEN_TOKENS = (1000, 4104, 8200)  # a multiple of 8 is what FP8 products need
UNEVEN_HIDDEN = (1040, 4112)  # multiples of 16, likewise
WIDTH = 4096  # hidden size of the series over tokens
ROWS = 8192  # tokens of the series over hidden sizes
RATIO = 3  # feed-forward size over hidden size


def points() -> list[tuple[str, int, int]]:
    """``(series, tokens, hidden)`` of everything that is measured."""
    over_tokens = [("tokens", t, WIDTH) for t in sorted((*TOKENS, *UNEVEN_TOKENS))]
    over_hidden = [("hidden", ROWS, h) for h in sorted((*HIDDEN, *UNEVEN_HIDDEN))]
    return over_tokens + over_hidden


def measure(recipe: str, tokens: int, hidden: int, check: bool) -> dict:
    """Microseconds and TFLOP/s of one point, or what was wrong."""
    shape = (tokens, hidden, RATIO * hidden, "RMSNorm", "swiglu")
    try:
        case = Case(shape, recipe, "graph")
        wrong = fault(case, recipe) if check else ""
        if wrong:
            return {"wrong": wrong}
        us = median_us(captured(case.step), warm=2, groups=3)
        return {"us": us, "tflops": round(18 * tokens * hidden * RATIO * hidden / us / 1e6, 1)}
    except (RuntimeError, ValueError) as error:  # better a hole than no table
        return {"wrong": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        case = None
        torch.cuda.empty_cache()


def table(rows: list[dict], recipes: list[str]) -> str:
    """A line for each point, a column of TFLOP/s for each recipe."""
    lines = [f"{'tokens':>8}{'hidden':>8}" + "".join(f"{r:>10}" for r in recipes)]
    for series, tokens, hidden in points():
        found = {
            r["recipe"]: r
            for r in rows
            if (r["series"], r["tokens"], r["hidden"]) == (series, tokens, hidden)
        }
        cells = "".join(f"{found[r].get('tflops', 'wrong'):>10}" for r in recipes)
        lines.append(f"{tokens:>8}{hidden:>8}{cells}")
    return "\n".join(lines)


def plot(rows: list[dict], recipes: list[str], path: pathlib.Path) -> None:
    """Both series as curves; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, series in zip(axes, ("tokens", "hidden")):
        for recipe in recipes:
            found = [r for r in rows if (r["series"], r["recipe"]) == (series, recipe)]
            found = [r for r in found if "tflops" in r]
            axis.plot([r[series] for r in found], [r["tflops"] for r in found], "o-", label=recipe)
        axis.set_xscale("log", base=2)
        axis.set_xlabel(series)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("TFLOP/s of forward and backward")
    axes[0].set_title(f"LayerNormMLP, hidden size {WIDTH}")
    axes[1].set_title(f"LayerNormMLP, {ROWS} tokens")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Measure, print, keep and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--recipes", default="none,delayed,current,block", help=",".join(RECIPES))
    parser.add_argument("--out", type=pathlib.Path, help="directory for dated result files")
    options = parser.parse_args()
    recipes, rows, about = options.recipes.split(","), [], versions()
    print(json.dumps(about), flush=True)
    for recipe in recipes:
        for i, (series, tokens, hidden) in enumerate(points()):
            where = {"series": series, "recipe": recipe, "tokens": tokens, "hidden": hidden}
            rows.append({**where, **measure(recipe, tokens, hidden, check=i == 0)})
    print(table(rows, recipes))
    for row in rows:
        if "wrong" in row:
            print(json.dumps(row))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = f"{about['date'][:10]}-{about['gpu'].replace(' ', '-').lower()}-scaling"
        (options.out / f"{stem}.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
        plot(rows, recipes, options.out / f"{stem}.svg")


if __name__ == "__main__":
    main()
