# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernel for FP8 operands with scales of 128 values.

The numbers need a Hopper GPU; what the kernel is compiled to, its launch and when it is chosen do
not.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from transformer_engine.pytorch.backends import cublas, recording, registry
from transformer_engine.pytorch.backends.registry import Request, select

ROOT = Path(__file__).resolve().parents[3]
GLUON = not registry.gluon_missing()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_gluon = pytest.mark.skipif(not GLUON, reason=registry.gluon_missing() or "Gluon is there")
needs_hopper = pytest.mark.skipif(
    not (HOPPER and GLUON), reason="The kernel runs on Hopper GPUs, with Triton's Gluon."
)
ROWS, SQUARE = "block,{}", "block,{},dim=2"
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
PAIRS = [
    (ROWS.format("e4m3"), SQUARE.format("e4m3")),
    (ROWS.format("e4m3"), ROWS.format("e4m3")),
    (SQUARE.format("e4m3"), ROWS.format("e4m3")),
    (SQUARE.format("e4m3"), SQUARE.format("e4m3")),
    (ROWS.format("e5m2"), SQUARE.format("e4m3")),
    (ROWS.format("e5m2"), ROWS.format("e4m3")),
    (SQUARE.format("e4m3"), ROWS.format("e5m2")),
]


def up(n, multiple):
    """``n`` rounded up."""
    return -(-n // multiple) * multiple


def operand(rows, depth, quant, seed, exact):
    """``(bytes, scales, fp64 values)``; ``exact`` ones have products and sums without rounding."""
    generator = torch.Generator().manual_seed(seed)
    fmt, square = quant.split(",")[1], "dim=2" in quant
    if exact:
        values = torch.randint(-3, 4, (rows, depth), generator=generator).float()
    else:
        values = torch.randn(rows, depth, generator=generator) * 60
    data = values.to(FP8[fmt])
    blocks = up(depth, 128) // 128
    shape = (up(rows, 128) // 128, up(blocks, 4)) if square else (blocks, up(rows, 4))
    if exact:
        scales = torch.exp2(torch.randint(-1, 2, shape, generator=generator).float())
    else:
        scales = torch.rand(shape, generator=generator) + 0.5
    if square:
        spread = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :depth]
    else:
        spread = scales[:, :rows].t().repeat_interleave(128, 1)[:, :depth]
    values = data.double() * spread.double()
    return data.view(torch.uint8).cuda(), scales.cuda(), values.cuda()


def multiply(a, b, quants, dtype=torch.float32, bias=None):
    """The kernel on two operands of `operand`."""
    from transformer_engine.pytorch.backends.triton.block_gemm import block_gemm

    return block_gemm(a[0], b[0], bias, a[1], b[1], None, None, *quants, "TN", dtype, False)


SHAPES = [(1, 128, 128), (300, 272, 400), (130, 16, 4112), (2000, 1200, 2064)]


@needs_hopper
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quants", PAIRS, ids=" x ".join)
def test_sums_that_need_no_rounding_are_exact(quants, shape):
    rows, columns, depth = shape
    a = operand(rows, depth, quants[0], 1, exact=True)
    b = operand(columns, depth, quants[1], 2, exact=True)
    want = a[2] @ b[2].t()
    assert torch.equal(multiply(a, b, quants).double(), want)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(multiply(a, b, quants, dtype), want.to(dtype))


@needs_hopper
@pytest.mark.parametrize("quants", PAIRS, ids=" x ".join)
def test_rounding_is_that_of_tensor_cores(quants):
    """Those keep 13 bits below the largest of 32 products; blocks are added in fp32."""
    a, b = operand(500, 2048, quants[0], 3, False), operand(400, 2048, quants[1], 4, False)
    difference = (multiply(a, b, quants).double() - a[2] @ b[2].t()).abs()
    assert (difference / (a[2].abs() @ b[2].abs().t())).max() < 2e-4
    if quants in PAIRS[:3]:
        theirs = cublas.block_gemm(
            a[0], b[0], None, a[1], b[1], None, None, *quants, "TN", torch.float32, False
        )
        their_difference = (theirs.double() - a[2] @ b[2].t()).norm()
        assert difference.norm() < 1.05 * their_difference


@needs_hopper
@pytest.mark.parametrize("quants", (PAIRS[0], PAIRS[1], PAIRS[5]), ids=" x ".join)
def test_neither_the_tile_nor_the_number_of_rows_changes_a_bit(quants, monkeypatch):
    from transformer_engine.pytorch.backends.triton import block_gemm as host

    a, b = operand(700, 1040, quants[0], 5, False), operand(528, 1040, quants[1], 6, False)
    results = []
    for tile in host._TILES:
        monkeypatch.setattr(host, "tile_shape", lambda *_, tile=tile: tile[:3])
        results.append(multiply(a, b, quants))
    monkeypatch.undo()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    for rows in (1, 33, 384):
        scales = torch.zeros(a[1].shape[0], up(rows, 4), device="cuda")
        scales[:, :rows] = a[1][:, :rows]
        few = (a[0][:rows].contiguous(), scales)
        assert torch.equal(multiply(few, b, quants), results[0][:rows])


@needs_hopper
def test_bias_unaligned_operands_and_empty_ones():
    quants = PAIRS[0]
    a, b = operand(64, 256, quants[0], 7, True), operand(128, 256, quants[1], 8, True)
    bias = torch.arange(128.0, device="cuda")
    want = a[2] @ b[2].t() + bias
    assert torch.equal(multiply(a, b, quants, bias=bias).double(), want)
    shifted = torch.empty(a[0].numel() + 8, dtype=torch.uint8, device="cuda")[8:].view(64, 256)
    shifted.copy_(a[0])
    assert shifted.data_ptr() % 16
    assert torch.equal(multiply((shifted, a[1]), b, quants, bias=bias).double(), want)
    none = multiply((a[0][:0], a[1][:, :0]), b, quants, torch.bfloat16)
    assert none.shape == (0, 128) and none.dtype == torch.bfloat16


@needs_hopper
def test_a_captured_launch_reads_its_operands_anew():
    quants = PAIRS[5]
    a, b = operand(512, 384, quants[0], 9, True), operand(256, 384, quants[1], 10, True)
    other = operand(512, 384, quants[0], 11, True)
    multiply(a, b, quants)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = multiply(a, b, quants)
    a[0].copy_(other[0])
    a[1].copy_(other[1])
    graph.replay()
    assert torch.equal(y.double(), other[2] @ b[2].t())


# --- what needs no GPU ----------------------------------------------------------------------------

_COMPILE = """
import json, re, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from transformer_engine.pytorch.backends.triton import block_gemm as host

found = []
for tile, dtype, a_type, a_square, b_square in json.loads(sys.argv[1]):
    (m, n, stages, _), out = host._TILES[tile], getattr(torch, dtype)
    *layouts, width = host._layouts(m, n, out)
    name = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    blocks = (f"{a_type}[{64 * m}, 128]", f"fp8e4nv[{n}, 128]", f"fp32[{64 * m}]", f"fp32[{n}]")
    layouts = (*layouts[:3], layouts[2], layouts[3])
    blocks = (*blocks, f"{name}[64, {width}]")
    types = [f"tensordesc<{block},{layout!r}>" for block, layout in zip(blocks, layouts)]
    values = dict(MI=m, BN=n, STAGES=stages, GROUP=8, A_SQUARE=a_square, B_SQUARE=b_square)
    types += ["*fp32"] * 2 + ["i32"] * 5 + ["constexpr"] * len(values)
    signature = dict(zip(host._KERNEL.names, types, strict=True))
    attributes = {(i,): [["tt.divisibility", 16]] for i in (5, 6, 8, 9)}
    kernel = triton.compile(
        GluonASTSource(host.block_gemm_kernel, signature, values, attributes),
        target=GPUTarget("cuda", 90, 32),
        options=dict(num_warps=4, maxnreg=host.MAX_REGISTERS),
    )
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name]
        done = subprocess.run(
            [*command, "-o", "/dev/null"], capture_output=True, text=True, check=True
        )
    products = set(re.findall(r"wgmma.mma_async.sync.aligned.(\\S+)", kernel.asm["ptx"]))
    found.append((kernel.metadata.shared, sorted(products), done.stderr))
print(json.dumps(found))
"""
_VARIANTS = [
    (0, "bfloat16", "fp8e4nv", False, True),
    (0, "float32", "fp8e5", False, False),
    (2, "float16", "fp8e4nv", True, False),
]


@needs_gluon
def test_what_it_is_compiled_to():
    """For Hopper, on any machine: no register is spilled, no product made to wait, all fits."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, json.dumps(_VARIANTS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    columns = (128, 128, 32)
    for variant, (shared, products, said) in zip(_VARIANTS, json.loads(done.stdout), strict=True):
        fmt = "e5m2" if variant[2] == "fp8e5" else "e4m3"
        assert products == [f"m64n{columns[variant[0]]}k32.f32.{fmt}.e4m3"]
        assert "0 bytes spill stores, 0 bytes spill loads" in said
        assert "wgmma" not in said  # ptxas warns where it serializes them
        assert shared <= 227 << 10


@pytest.fixture(name="pretended")
def fixture_pretended(monkeypatch):
    """Lets the backend table think that there is a GPU of some capability, CUDA and Triton."""

    def pretend(capability=(9, 0), cuda=(12, 9), gluon=""):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(registry, "device_capability", lambda index: capability)
        monkeypatch.setattr(registry, "_cuda_version", lambda: cuda)
        monkeypatch.setattr(registry, "gluon_missing", lambda: gluon)
        kernel = f"{registry.__package__}.triton.block_gemm"  # whether Triton is there or not
        monkeypatch.setitem(sys.modules, kernel, SimpleNamespace(block_gemm=None))
        select.cache_clear()

        def choose(a, b, alignment=128):
            device = torch.device("cuda", 0)
            choice = select(Request("gemm", device, torch.bfloat16, a, b, alignment))
            return choice.name, dict(choice.passed_over).get("triton_block", "")

        return choose

    yield pretend
    monkeypatch.undo()
    select.cache_clear()


def test_it_multiplies_what_cublaslt_does_not(pretended):
    choose = pretended()
    for quants in PAIRS[:3]:
        assert choose(*quants)[0] == "cublas_block", quants
    for quants in PAIRS[3:]:
        assert choose(*quants) == ("triton_block", ""), quants
    choose = pretended(cuda=(12, 6))
    for quants in PAIRS:
        assert choose(*quants) == ("triton_block", ""), quants


def test_what_passes_it_over(pretended):
    name, reason = pretended(gluon="Triton is old")(*PAIRS[4])
    assert (name, reason) == ("dequantized_mm", "Triton is old")
    for capability in ((8, 9), (10, 0)):
        name, reason = pretended(capability)(*PAIRS[4])
        assert name == "dequantized_mm" and "made for Hopper" in reason
    choose = pretended()
    name, reason = choose(*PAIRS[4], alignment=1)
    assert name == "dequantized_mm" and "multiples of 16" in reason
    name, reason = choose("mxfp8,e4m3", "mxfp8,e4m3")
    assert name == "dequantized_mm" and "scales of 128 values" in reason


def test_the_gluon_of_another_release_is_not_used(monkeypatch):
    monkeypatch.setattr(registry, "triton_missing", lambda: "")
    for version, there in (("3.6.0", True), ("3.6.1", True), ("3.5.1", False), ("3.60.0", False)):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
        assert (registry.gluon_missing() == "") == there
        assert there or version in registry.gluon_missing()
    monkeypatch.setattr(registry, "triton_missing", lambda: "it is not there")
    assert registry.gluon_missing() == "it is not there"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed.")
def test_launches_with_descriptors_are_remembered_but_not_repeated_by_plans(monkeypatch):
    """The launcher encodes the descriptor of each call, so that one must reach it."""
    from transformer_engine.pytorch.backends.triton import launch

    compiled_for, ran = [], []

    class Jit:  # pylint: disable=too-few-public-methods
        arg_names = ("x", "BM")
        params = (
            SimpleNamespace(is_constexpr=False, do_not_specialize=False),
            SimpleNamespace(is_constexpr=True, do_not_specialize=False),
        )

        def __getitem__(self, grid):
            def run(*args, **_):
                compiled_for.append(args)
                return SimpleNamespace(
                    run=lambda *given: ran.append(given), function=1, packed_metadata=2
                )

            return run

    def descriptor(block):
        return SimpleNamespace(
            base=torch.zeros(8), block_shape=block, layout="swizzled", padding="zero"
        )

    monkeypatch.setattr(launch, "JITFunction", Jit)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    kernel = launch.launched(Jit())
    steps = []
    monkeypatch.setattr(recording.THREAD, "steps", steps)
    first, second = descriptor([64, 128]), descriptor([64, 128])
    for x in (first, second, descriptor([32, 128])):
        kernel[(3,)](x, BM=64)
    assert [args[0].block_shape for args in compiled_for] == [[64, 128], [32, 128]]
    assert ran == [(3, 1, 1, 7, 1, 2, None, None, None, second, 64)]
    assert steps == [recording.Opaque()] * 3
