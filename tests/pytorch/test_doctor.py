# SPDX-License-Identifier: Apache-2.0
"""The doctor's numbers against theory and an independent quantizer; the documentation's tables."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from transformer_engine.pytorch import doctor, signal_to_noise as noise
from transformer_engine.pytorch.backends import registry
from transformer_engine.pytorch.formats.spec import QuantSpec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "formats.rst"


@pytest.fixture(scope="module", name="measured")
def fixture_measured():
    """Ratios by the name and orientation of a format."""
    return {(row.name, row.orientation): row.ratios for row in noise.signal_to_noise("cpu")}


# --- signal to noise -----------------------------------------------------------------------------


def expected_of_normal(mantissa_bits):
    """Ratio in dB of a standard normal value that is rounded to a floating-point format.

    A value between 2^e and 2^(e+1) is off by a uniform error of variance step^2 / 12, with the step
    2^(e - mantissa_bits); scales only shift e by less than one binade, which averages out.
    """
    error = 0.0
    for exponent in range(-12, 4):
        low, high = 2.0**exponent, 2.0 ** (exponent + 1)
        probability = math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))
        error += probability * (2.0 ** (exponent - mantissa_bits)) ** 2 / 12
    return -10 * math.log10(error)


def test_the_theory_is_what_is_known():
    assert 31 < expected_of_normal(3) < 32 and 25 < expected_of_normal(2) < 26
    assert expected_of_normal(3) - expected_of_normal(2) == pytest.approx(6.02, abs=0.01)


@pytest.mark.parametrize("bits,fmt", ((3, "E4M3"), (2, "E5M2")))
def test_fp8_has_the_noise_of_its_mantissa(bits, fmt, measured):
    """With any scale; the range of FP8 is wide enough for all three kinds of data."""
    found = 0
    for (name, _), ratios in measured.items():
        if fmt in name and "fp32" not in name:
            found += 1
            assert ratios["normal"] == pytest.approx(expected_of_normal(bits), abs=0.35), name
            assert ratios["heavy-tailed"] == pytest.approx(expected_of_normal(bits), abs=0.6), name
            assert ratios["sparse"] == pytest.approx(expected_of_normal(bits), abs=0.35), name
    assert found >= 3


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = [m / 8 * 2.0**-6 for m in range(8)]
E4M3 += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
E4M3 = torch.tensor(E4M3, dtype=torch.float64)


def nearest(x, values):
    """Of ``values`` (sorted, not negative) the one nearest to each |x|, with the sign of x."""
    middles = (values[1:] + values[:-1]) / 2
    return values[torch.bucketize(x.abs().contiguous(), middles)] * x.sign()


def independent_nvfp4(x, ideal_scales=False):
    """NVFP4 of the rows of x in float64, by tables of the values of E2M1 and E4M3."""
    assert E4M3[-1] == 448
    blocks = x.double().view(-1, 16)
    unit = x.double().abs().max() / (448 * 6)
    scales = blocks.abs().amax(1, keepdim=True) / 6 / unit
    if not ideal_scales:
        scales = nearest(scales, E4M3)
    step = torch.where(scales == 0, 1.0, scales * unit)
    return (nearest(blocks / step, E2M1) * step).view(x.shape)


@pytest.mark.parametrize("kind", noise.DATA)
def test_nvfp4_has_the_noise_of_an_independent_quantizer(kind, measured):
    x = noise.sample(kind, 1024, 1024)
    got = measured["NVFP4, 1x16 blocks", "row"][kind]
    assert got == pytest.approx(noise.decibels(x, independent_nvfp4(x)), abs=0.02)
    if kind == "normal":
        ideal = noise.decibels(x, independent_nvfp4(x, ideal_scales=True))
        assert ideal - 0.5 < got < ideal + 0.1
        assert 19.5 < got < 21.5


@pytest.mark.parametrize("kind", noise.DATA)
def test_ratios_are_in_order(kind, measured):
    ratio = {key: value[kind] for key, value in measured.items()}
    for orientation in ("row", "column"):
        mxfp8 = [ratio[f"MXFP8 {fmt}, 1x32 blocks", orientation] for fmt in ("E4M3", "E5M2")]
        assert mxfp8[0] > mxfp8[1]
        assert mxfp8[0] > ratio["NVFP4, 1x16 blocks", orientation] + 2
        scales = ratio["E4M3, 1x128 blocks, fp32 scales", orientation]
        assert scales > ratio["E4M3, 1x128 blocks", orientation]
    plain = ratio["NVFP4, 1x16 blocks", "row"]
    assert ratio["NVFP4, 1x16 blocks, 4 or 6", "row"] > plain
    assert ratio["NVFP4, 16x16 blocks", "both"] < plain - 1
    # Rounding to either neighbour by chance doubles the variance of a uniform error.
    assert plain - ratio["NVFP4, 1x16 blocks, stochastic", "row"] > 2.5
    if kind == "normal":
        assert plain - ratio["NVFP4, 1x16 blocks, stochastic", "row"] == pytest.approx(3, abs=0.4)
    else:  # the transform makes any data like normal data
        normal = measured["NVFP4, 1x16 blocks", "row"]["normal"]
        transformed = ratio["NVFP4, 1x16 blocks, Hadamard", "column"]
        assert transformed == pytest.approx(normal, abs=0.5) or kind == "sparse"


@pytest.mark.parametrize("text", ("block", "mxfp8", "nvfp4"))
def test_columns_are_the_rows_of_the_transpose(text):
    """Bit by bit, where nothing is transformed."""
    spec = QuantSpec(text, "e2m1" if text == "nvfp4" else "e4m3")
    x = noise.sample("heavy-tailed", 256, 384)
    other = noise.restored(x.t().contiguous(), spec, False).t()
    assert torch.equal(noise.restored(x, spec, True), other)


def test_orientations_called_both_are_the_same():
    x = noise.sample("normal", 256, 384)
    for name, spec, orientations in noise.FORMATS:
        if orientations == ("both",):
            assert torch.equal(noise.restored(x, spec, True), noise.restored(x, spec, False)), name


def test_devices_agree(device, measured):
    for row in noise.signal_to_noise(device):
        for kind, ratio in measured[row.name, row.orientation].items():
            assert row.ratios[kind] == pytest.approx(ratio, abs=1e-6)


def test_samples_have_their_distributions():
    normal, heavy, sparse = (noise.sample(kind, 1024, 1024).double() for kind in noise.DATA)
    assert abs(normal.mean()) < 0.005 and abs(normal.std() - 1) < 0.005
    # Two-sided quantiles of Student's t with 3 degrees of freedom: 5% and 0.1%.
    assert float((heavy.abs() > 3.182).double().mean()) == pytest.approx(0.05, abs=0.002)
    assert float((heavy.abs() > 12.924).double().mean()) == pytest.approx(0.001, abs=0.0003)
    assert float((sparse == 0).double().mean()) == pytest.approx(0.95, abs=0.002)
    assert float(sparse[sparse != 0].std()) == pytest.approx(1, abs=0.02)
    with pytest.raises(ValueError, match="normal, heavy-tailed, sparse"):
        noise.sample("uniform", 2, 2)


def test_decibels():
    x = torch.tensor([3.0, 4.0])
    assert noise.decibels(x, x) == math.inf
    assert noise.decibels(x, x + torch.tensor([0.3, 0.4])) == pytest.approx(20, abs=1e-5)
    assert noise.decibels(x, torch.zeros(2)) == 0


# --- what runs where -----------------------------------------------------------------------------


def test_everything_is_emulated_on_the_cpu():
    rows = doctor.products("cpu")
    assert {row.recipe for row in rows} == set(doctor.default_recipes())
    assert len(rows) == 3 * len(doctor.default_recipes())
    for row in rows:
        assert not row.native and row.backend == "dequantized_mm" and row.reason
        assert row.quantizer == "reference" and "not on cpu" in row.quantizer_reason


def test_operands_of_the_products():
    """Of a recipe with three different quantizations."""
    rows = {row.product: row.operands for row in doctor.products("cpu") if "NVFP4" in row.recipe}
    x, w, g = rows["fprop"][0], rows["fprop"][1], rows["dgrad"][0]
    assert "rht=1" in x and "dim=2" in w and "stochastic=1" in g
    assert rows == {"fprop": (x, w), "dgrad": (g, w), "wgrad": (g, x)}


@pytest.fixture(name="gpu")
def fixture_gpu(monkeypatch):
    """Lets the backend table think that there is a GPU of some capability."""

    def pretend(capability, cuda=(12, 9), gluon=""):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(registry, "device_capability", lambda index: capability)
        monkeypatch.setattr(registry, "_cuda_version", lambda: cuda)
        monkeypatch.setattr(registry, "gluon_missing", lambda: gluon)
        kernel = f"{registry.__package__}.triton.block_gemm"  # whether Triton is there or not
        monkeypatch.setitem(sys.modules, kernel, SimpleNamespace(block_gemm=None))
        registry.select.cache_clear()
        return torch.device("cuda", 0)

    yield pretend
    monkeypatch.undo()
    registry.select.cache_clear()


def test_reasons_follow_the_device(gpu):
    """Old CUDA on Hopper: block scaling is emulated and says so, unless Triton multiplies."""
    rows = doctor.products(gpu((9, 0), (12, 6)))
    block = [row for row in rows if row.recipe == "Float8BlockScaling"]
    assert [(row.native, row.backend, row.reason) for row in block] == [
        (True, "triton_block", "")
    ] * 3
    rows = doctor.products(gpu((9, 0), (12, 6), "Triton is old"))
    block = [row for row in rows if row.recipe == "Float8BlockScaling"]
    assert len(block) == 3 and all("12.9" in row.reason and not row.native for row in block)
    assert all(row.native and row.reason == "" for row in rows if row.recipe == "DelayedScaling")


# Columns of the documentation's matrix, and a capability of each.
HARDWARE = {
    "CPU": None,
    "before 8.9": (8, 0),
    "8.9": (8, 9),
    "9.0": (9, 0),
    "10.x, 11.x": (10, 0),
    "12.x": (12, 0),
}


def tables():
    """The simple tables of the page: lists of rows of cells."""
    found, lines = [], PAGE.read_text(encoding="utf-8").splitlines()
    rules = [i for i, line in enumerate(lines) if re.fullmatch(r"=+(  =+)+", line)]
    for top, middle, bottom in zip(rules[::3], rules[1::3], rules[2::3]):
        edges = [(m.start(), m.end()) for m in re.finditer("=+", lines[top])]
        edges[-1] = (edges[-1][0], None)
        rows = [lines[top + 1], *lines[middle + 1 : bottom]]
        found.append([[row[start:end].strip() for start, end in edges] for row in rows])
    return found


def table_with(cell):
    (found,) = [table for table in tables() if table[0][0] == cell]
    return found


def test_the_matrix_of_the_documentation_is_that_of_the_backend_table(gpu):
    head, *rows = table_with("recipe")
    assert head[1:] == list(HARDWARE)
    documented = {row[0]: row[1:] for row in rows}
    assert set(documented) == {f"``{name}``" for name in doctor.default_recipes()}
    for column, capability in enumerate(HARDWARE.values()):
        device = torch.device("cpu") if capability is None else gpu(capability)
        products: dict = {}
        for row in doctor.products(device):
            products.setdefault(row.recipe, []).append((row.product, row.native))
        for recipe, answers in products.items():
            native = [product for product, is_native in answers if is_native]
            expected = "native" if len(native) == 3 else ", ".join(native) or "emulated"
            said = documented[f"``{recipe}``"][column]
            assert said.removesuffix(" (n)") == expected, (recipe, column)
            assert said.endswith("(n)") == (expected != "emulated" and capability != (9, 0))


def test_the_ratios_of_the_documentation_are_the_measured_ones(measured):
    head, *rows = table_with("format")
    assert tuple(head[2:]) == noise.DATA
    assert [(row[0], row[1]) for row in rows] == list(measured)
    for row in rows:
        for kind, cell in zip(noise.DATA, row[2:], strict=True):
            assert float(cell) == pytest.approx(measured[row[0], row[1]][kind], abs=0.1), row


# --- printing ------------------------------------------------------------------------------------


def test_tables_are_aligned():
    text = doctor.table(("a", "head"), [("wide cell", ""), ("x", "y")])
    assert text.splitlines() == [
        "=========  ====",
        "a          head",
        "=========  ====",
        "wide cell  \\",
        "x          y",
        "=========  ====",
    ]


def test_products_that_are_computed_alike_share_a_line(gpu):
    text = doctor.product_table(doctor.products(gpu((9, 0))))
    assert re.search(r"^DelayedScaling +fprop, dgrad, wgrad +native +cublas_fp8", text, re.M)
    assert re.search(r"^Float8BlockScaling, HYBRID +fprop +native +cublas_block", text, re.M)
    assert re.search(r"^Float8BlockScaling, HYBRID +dgrad, wgrad +native +triton_block", text, re.M)
    text = doctor.product_table(doctor.products(gpu((9, 0), gluon="Triton is old")))
    assert re.search(r"^Float8BlockScaling, HYBRID +dgrad, wgrad +emulated .*E4M3", text, re.M)


def test_the_report_says_what_was_never_run(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(doctor, "signal_to_noise", lambda device: [])
    monkeypatch.setattr(doctor, "native_support", lambda device: [])
    assert doctor.NOT_RUN in doctor.report(gpu((10, 0)))
    assert doctor.NOT_RUN not in doctor.report(gpu((9, 0)))


def test_it_runs_as_a_program(device):
    command = [sys.executable, "-m", "transformer_engine.pytorch.doctor", "--device", device]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    for word in (torch.__version__, "is_nvfp4_available", *doctor.default_recipes(), *noise.DATA):
        assert word in done.stdout
    assert all(name in done.stdout for name, _, _ in noise.FORMATS)
    assert not done.stderr
