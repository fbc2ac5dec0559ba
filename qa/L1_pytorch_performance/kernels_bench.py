# SPDX-License-Identifier: Apache-2.0
"""Time and bandwidth of each Triton kernel of the pointwise leaf ops, on one GPU.

    python qa/L1_pytorch_performance/kernels_bench.py [--only swiglu] [--sweep] [--json out.jsonl]

Bandwidth is the bytes that must move (inputs read as often as the algorithm reads them, outputs
written once, bf16 inputs) over the median time of ``triton.testing.do_bench``, whose cache flush
keeps inputs in DRAM. ``--sweep`` also tries other tiles for the large shapes and prints the best
three of each kernel. The first line names GPU, driver, torch and Triton.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Callable, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CURRENT, DELAYED = "current,e4m3", "delayed,e4m3"
SHAPES = ((8192, 4096), (8192, 14336), (512, 1024))
TILES = [(m, n, w) for m in (32, 64, 128) for n in (64, 128) for w in (4, 8)]
# With rows of tiles that are walked together; of "block" strips ahead, warps, registers.
MXFP8_TILES = [(32, n, w, g) for n in (64, 128, 256) for w in (1, 2, 4) for g in (1, 4, 16)]
NVFP4_TILES = [(m, n, w, 1) for m in (64, 128) for n in (64, 128) for w in (2, 4, 8)]
STRIPS = [(a, *w) for a in (1, 2, 4) for w in ((4, 168), (8, 80), (8, 128), (8, None), (16, 64))]
BLOCK_SCALED = (
    "block,e4m3,pow2=1",
    "block,e4m3",
    "block,e4m3,dim=2,pow2=1",
    "mxfp8,e4m3",
    "mxfp8,e4m3,swizzled=1",
    "mxfp8,e4m3,dim=2",
    "nvfp4,e2m1",
    "nvfp4,e2m1,dim=2",
    "nvfp4,e2m1,rht=1",
    "nvfp4,e2m1,rht=1,stochastic=1",
    "nvfp4,e2m1,row_scaled=1",
    "nvfp4,e2m1,four_over_six=mae",
)
BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


class Case(NamedTuple):
    """One measurement: what runs, and the bytes it must move."""

    name: str
    run: Callable
    moved: int
    tiles: tuple  # (module, attribute) that choose its tile, for the sweep
    candidates: list = TILES


def cast_cases(kernels, rows, columns):
    """quantize, dequantize and bias_grad of [rows, columns]."""
    n = rows * columns
    x = torch.randn(rows, columns, **BF16)
    scale = torch.ones(1, device="cuda")
    row = torch.zeros(rows, columns, dtype=torch.uint8, device="cuda")
    tiles = (("cast", "cast_block"),)

    def quantize(quant, amax, columnwise):
        return lambda: kernels.quantize(x, quant, scale, 0, amax, True, columnwise, None)

    yield Case("quantize delayed", quantize(DELAYED, None, True), 4 * n, tiles)
    yield Case("quantize delayed, row only", quantize(DELAYED, None, False), 3 * n, tiles)
    yield Case("quantize current", quantize(CURRENT, None, True), 6 * n, tiles)
    yield Case("quantize current, amax given", quantize(CURRENT, scale, True), 4 * n, tiles)

    def dequantize():
        return kernels.dequantize(row, scale, None, CURRENT, False, torch.bfloat16)

    yield Case("dequantize", dequantize, 3 * n, ())
    yield Case("bias_grad", lambda: kernels.bias_grad(x), 2 * n, ())


def norm_cases(kernels, rows, columns):
    """LayerNorm and RMSNorm of [rows, columns]."""
    n = rows * columns
    x, dy = torch.randn(rows, columns, **BF16), torch.randn(rows, columns, **BF16)
    weight, bias = torch.ones(columns, **BF16), torch.zeros(columns, **BF16)
    scale = torch.ones(1, device="cuda")
    cast = (("cast", "cast_block"), ("norm", "cast_block"))
    for kind in ("LayerNorm", "RMSNorm"):
        shift = bias if kind == "LayerNorm" else None

        def forward(quant, want_output, kind=kind, shift=shift):
            return lambda: kernels.norm_forward(
                x, weight, shift, 1e-5, False, kind, quant, scale, 0, True, True, want_output
            )

        _, mean, rstd, *_ = forward("", False)()

        def backward(kind=kind, mean=mean, rstd=rstd):
            return kernels.norm_backward(dy, None, x, mean, rstd, weight, False, kind, True, True)

        yield Case(f"{kind} forward", forward("", False), 4 * n, ())
        yield Case(f"{kind} forward delayed", forward(DELAYED, False), 5 * n, cast)
        yield Case(f"{kind} forward current", forward(CURRENT, False), 6 * n, cast)
        yield Case(f"{kind} forward current + output", forward(CURRENT, True), 8 * n, cast)
        yield Case(f"{kind} backward", backward, 6 * n, ())


def activation_cases(kernels, rows, width):
    """gelu and swiglu with output [rows, width]."""
    n = rows * width
    scale = torch.ones(1, device="cuda")
    tiles = (("activation", "activation_block"),)
    for act, gates in (("gelu", 1), ("swiglu", 2)):
        x = torch.randn(rows, width * gates, **BF16)
        dy = torch.randn(rows, width, **BF16)
        for quant in ("", DELAYED, CURRENT):
            label = quant.partition(",")[0] or "bf16"
            shared = (act, 7.0, 1.702, 1.0, quant, scale, 0, True, True, False)
            read, written = 2 * gates, 2  # bytes per element of the output
            again = read if label == "current" else 0

            def forward(x=x, shared=shared):
                return kernels.activation_forward(x, *shared)

            yield Case(f"{act} forward {label}", forward, (read + written + again) * n, tiles)
            read, written = 2 * gates + 2, 2 * gates
            again = read if label == "current" else 0
            for bias_grad in (False, True):

                def backward(x=x, dy=dy, shared=shared, bias_grad=bias_grad):
                    return kernels.activation_backward(dy, x, *shared, bias_grad, None)

                suffix = " + bias" if bias_grad else ""
                moved = (read + written + again) * n
                yield Case(f"{act} backward {label}{suffix}", backward, moved, tiles)


def written_bytes(quant):
    """Bytes of data and scales per element, in one orientation."""
    return {"block": 1 + 1 / 32, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}[quant.split(",")[0]]


def block_tiles(quant):
    """(places, candidates) of a sweep."""
    if quant.startswith("block"):
        return (("block_scaled", "strip_options"),), STRIPS
    return (("block_scaled", "block_tile"),), MXFP8_TILES if quant[0] == "m" else NVFP4_TILES


def block_cases(kernels, rows, columns):
    """quantize and dequantize of [rows, columns] with block scales."""
    n = rows * columns
    x = torch.randn(rows, columns, **BF16)
    rng = torch.tensor([7, 9], device="cuda")
    for quant in BLOCK_SCALED:
        reads = 1 if not quant.startswith("nvfp4") else 3 if "row_scaled" in quant else 2
        for columnwise in (True, False):

            def quantize(quant=quant, columnwise=columnwise):
                return kernels.quantize(x, quant, None, 0, None, True, columnwise, rng)

            moved = 2 * (reads - (reads == 3 and not columnwise)) * n
            moved += (1 + columnwise) * written_bytes(quant) * n
            suffix = "" if columnwise else ", row only"
            yield Case(f"quantize {quant}{suffix}", quantize, moved, *block_tiles(quant))
        if quant in BLOCK_SCALED[0:7:2]:
            q = quantize()

            def dequantize(quant=quant, q=q):
                arguments = (q.row, q.scale_inv, q.amax, quant, False, torch.bfloat16)
                return kernels.dequantize(*arguments)

            yield Case(f"dequantize {quant}", dequantize, (2 + written_bytes(quant)) * n, ())


def block_norm_cases(kernels, rows, columns):
    """Norms of [rows, columns] that quantize with block scales."""
    n = rows * columns
    x = torch.randn(rows, columns, **BF16)
    weight, bias = torch.ones(columns, **BF16), torch.zeros(columns, **BF16)
    for kind in ("LayerNorm", "RMSNorm"):
        for quant in BLOCK_SCALED[0:9:2]:

            def forward(kind=kind, quant=quant):
                shift = bias if kind == "LayerNorm" else None
                return kernels.norm_forward(
                    x, weight, shift, 1e-5, False, kind, quant, None, 0, True, True, False
                )

            reads = 3 if "rht" in quant else 2
            moved = (2 * reads + 2 * written_bytes(quant)) * n
            yield Case(f"{kind} forward {quant}", forward, moved, *block_tiles(quant))


def block_activation_cases(kernels, rows, width):
    """gelu and swiglu with output [rows, width] that quantize with block scales."""
    n = rows * width
    rng = torch.tensor([7, 9], device="cuda")
    for act, gates in (("gelu", 1), ("swiglu", 2)):
        x = torch.randn(rows, width * gates, **BF16)
        dy = torch.randn(rows, width, **BF16)
        for quant in BLOCK_SCALED[0:9:2]:
            shared = (act, 7.0, 1.702, 1.0, quant, None, 0, True, True, False)
            reads = 2 if quant.startswith("nvfp4") else 1

            def forward(x=x, shared=shared):
                return kernels.activation_forward(x, *shared)

            def backward(x=x, dy=dy, shared=shared):
                return kernels.activation_backward(dy, x, *shared, True, rng)

            written = 2 * written_bytes(quant)
            tiles = block_tiles(quant)
            moved = (2 * gates * reads + written) * n
            yield Case(f"{act} forward {quant}", forward, moved, *tiles)
            moved = ((2 * gates + 2) * reads + gates * written) * n
            yield Case(f"{act} backward {quant} + bias", backward, moved, *tiles)


def state_cases(kernels):
    """The small kernels of delayed scaling; only their time matters."""
    history = torch.rand(1024, 6, device="cuda")
    scale = torch.ones(6, device="cuda")
    amaxes = [torch.rand(1, device="cuda") for _ in range(6)]
    slots = list(range(6))
    record = 12 * len(slots)
    yield Case("record_amax_", lambda: kernels.record_amax_(history, amaxes, slots), record, ())

    def update():
        kernels.delayed_scaling_update_(history, scale, 448.0, 0.0, "max")

    yield Case("delayed_scaling_update_", update, 8 * history.numel(), ())


def measure(case: Case) -> float:
    """Median microseconds."""
    from triton.testing import do_bench

    return do_bench(case.run, warmup=10, rep=50, return_mode="median") * 1e3


def sweep(case: Case) -> list:
    """(microseconds, *candidate) of the best three candidates, mostly (BM, BN, warps)."""
    import importlib

    package = "transformer_engine.pytorch.backends.triton."
    places = [(importlib.import_module(package + module), name) for module, name in case.tiles]
    saved = [getattr(module, name) for module, name in places]
    found = []
    try:
        for tile in case.candidates:
            for module, name in places:
                setattr(module, name, lambda *_, tile=tile: tile)
            found.append((round(measure(case), 1), *tile))
    finally:
        for (module, name), function in zip(places, saved):
            setattr(module, name, function)
    return sorted(found)[:3]


def machine() -> dict:
    """What the numbers were measured with."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    gpu = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    return {"gpu": gpu, "driver": driver, **versions}


def main() -> None:
    """Print the table, and JSON lines to the file asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="try other tiles on large shapes")
    parser.add_argument("--json", default="", help="append JSON lines to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA GPU; torch finds none.")
    from transformer_engine.pytorch.backends import triton as kernels

    def write(record: dict) -> None:
        if arguments.json:
            with open(arguments.json, "a", encoding="utf-8") as out:
                print(json.dumps(record), file=out)

    print(json.dumps(machine()))
    write(machine())
    makes = (cast_cases, norm_cases, block_cases, block_norm_cases)
    groups = [(shape, make) for shape in SHAPES for make in makes]
    makes = (activation_cases, block_activation_cases)
    groups += [(shape, make) for shape in SHAPES for make in makes]
    groups = [(shape, make(kernels, *shape)) for shape, make in groups]
    groups.append(((1024, 6), state_cases(kernels)))
    print(f"{'kernel':<52}{'shape':>14}{'us':>10}{'TB/s':>8}")
    for shape, cases in groups:
        for case in cases:
            if arguments.only not in case.name:
                continue
            us = measure(case)
            record = {"kernel": case.name, "shape": shape, "us": us, "tbps": case.moved / us / 1e6}
            print(f"{case.name:<52}{str(list(shape)):>14}{us:>10.1f}{record['tbps']:>8.2f}")
            if arguments.sweep and case.tiles and shape[0] * shape[1] > 1 << 21:
                record["best_tiles"] = sweep(case)
                print("    best tiles (us, BM, BN, warps):", *record["best_tiles"])
            write(record)


if __name__ == "__main__":
    main()
