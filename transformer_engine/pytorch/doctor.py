# SPDX-License-Identifier: Apache-2.0
"""What this machine computes natively, what it emulates and why, and how exact each format is.

``python -m transformer_engine.pytorch.doctor`` prints it; the functions return it as rows:

* `machine`: versions and device
* `native_support`: what the ``te.is_*_available`` functions say
* `products`: for each recipe and matrix product the backend that multiplies, and why it does
* `signal_to_noise.signal_to_noise`: the measured signal-to-quantization-noise ratio of each format
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from contextlib import nullcontext
from typing import Iterable, NamedTuple, Optional, Sequence

import torch

from .._version import __version__
from ..common import recipe as recipes
from . import availability
from .backends.registry import Request, capability_of, select, triton_missing
from .core.config import decode_config
from .formats.spec import decode_quant
from .signal_to_noise import DATA, Noise, signal_to_noise

FEATURE_DIMENSION = 128  # a multiple of what every format wants
# The rows of the backend table that multiply operands of a kind in hardware.
_NATIVE = {
    "delayed": ("cublas_fp8",),
    "current": ("cublas_fp8",),
    "block": ("cublas_block", "triton_block"),
    "mxfp8": ("cublas_mxfp8",),
    "nvfp4": ("cublas_nvfp4",),
}
NOT_RUN = (
    "The MXFP8 and NVFP4 products of this GPU's generation follow the documentation; no test of"
    " this package has run on such a GPU."
)


# --- the machine ---------------------------------------------------------------------------------


def machine(device: Optional[torch.device] = None) -> list[tuple[str, str]]:
    """Names and values of what the results depend on: versions, device, its capability."""
    device = _device(device)
    rows = [
        ("transformer_engine", __version__),
        ("Python", platform.python_version()),
        ("torch", torch.__version__),
        ("CUDA of torch", torch.version.cuda or "none"),
        ("Triton", triton_missing() or importlib.metadata.version("triton")),
    ]
    if device.type == "cuda":
        major, minor = capability_of(device)
        rows.append(("device", f"{device}, {torch.cuda.get_device_name(device)}"))
        rows.append(("compute capability", f"{major}.{minor}"))
    else:
        rows.append(("device", f"{device.type}, {platform.machine()}"))
    return rows


def _device(device: Optional[torch.device]) -> torch.device:
    if device is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device(device)


def native_support(device: Optional[torch.device] = None) -> list[tuple[str, bool, str]]:
    """Name, answer and reason of each ``te.is_*_available`` function, with ``device`` current."""
    names = ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available")
    names += ("is_nvfp4_available", "is_bf16_available")
    device = _device(device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return [(name, *getattr(availability, name)(return_reason=True)) for name in names]


# --- matrix products -----------------------------------------------------------------------------


class Product(NamedTuple):
    """How one of the three matrix products of a linear layer is computed.

    ``recipe`` and ``product`` ("fprop", "dgrad", "wgrad") name it, ``operands`` are the encoded
    quantizations. ``native`` says whether hardware multiplies the format, ``backend`` what does,
    ``reason`` why not the native one ("" if it does). ``quantizer`` is the backend that quantizes,
    ``quantizer_reason`` why not Triton.
    """

    recipe: str
    product: str
    operands: tuple[str, str]
    native: bool
    backend: str
    reason: str
    quantizer: str
    quantizer_reason: str


def default_recipes() -> dict[str, recipes.Recipe]:
    """Each recipe with its default fields, and the variants that other hardware paths run."""
    hybrid = recipes.Format.HYBRID
    return {
        "DelayedScaling": recipes.DelayedScaling(),
        "Float8CurrentScaling": recipes.Float8CurrentScaling(),
        "Float8BlockScaling": recipes.Float8BlockScaling(),
        "Float8BlockScaling, HYBRID": recipes.Float8BlockScaling(fp8_format=hybrid),
        "MXFP8BlockScaling": recipes.MXFP8BlockScaling(),
        "NVFP4BlockScaling": recipes.NVFP4BlockScaling(),
    }


def products(
    device: Optional[torch.device] = None, dtype: torch.dtype = torch.bfloat16
) -> list[Product]:
    """The three products of a linear layer under each recipe, as the backend table decides.

    Feature dimensions are taken to be multiples of 128; other sizes may have other reasons.
    """
    rows: list[Product] = []
    for name, recipe in default_recipes().items():
        config = decode_config(recipe._spec).gemms[0]
        operands = {
            "fprop": (config.x.row, config.w.row),
            "dgrad": (config.g.row, config.w.col),
            "wgrad": (config.g.col, config.x.col),
        }
        rows += [
            _product(name, key, pair, _device(device), dtype) for key, pair in operands.items()
        ]
    return rows


def _product(
    recipe: str, product: str, operands: tuple, device: torch.device, dtype: torch.dtype
) -> Product:
    choice = select(Request("gemm", device, dtype, *operands, FEATURE_DIMENSION))
    native = _NATIVE[decode_quant(operands[0]).kind]
    quantizer = select(Request("quantize", device, dtype, operands[0]))
    return Product(
        recipe,
        product,
        operands,
        choice.name in native,
        choice.name,
        "" if choice.name in native else dict(choice.passed_over)[native[0]],
        quantizer.name,
        dict(quantizer.passed_over).get("triton", ""),
    )


# --- printing ------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns under a rule, as reStructuredText has them."""
    rows = [[str(cell) or "\\" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])


def product_table(rows: Sequence[Product]) -> str:
    """One line for products of a recipe that are computed alike."""
    merged: dict[tuple, list] = {}
    for row in rows:
        runs = "native" if row.native else "emulated"
        key = (row.recipe, runs, row.backend, row.quantizer, row.reason)
        merged.setdefault(key, []).append(row.product)
    lines = [(key[0], ", ".join(names), *key[1:]) for key, names in merged.items()]
    head = ("recipe", "products", "runs", "multiplied by", "quantized by", "not native because")
    return table(head, [(*line[:-1], line[-1] or "-") for line in lines])


def noise_table(rows: Sequence[Noise]) -> str:
    """One line for each format and orientation, ratios in dB."""
    lines = [
        (row.name, row.orientation, *(f"{row.ratios[kind]:.1f}" for kind in DATA)) for row in rows
    ]
    return table(("format", "orientation", *DATA), lines)


def report(device: Optional[torch.device] = None) -> str:
    """All of it as text."""
    device = _device(device)
    support = [
        (name, "yes" if yes else "no", why or "-") for name, yes, why in native_support(device)
    ]
    rows = products(device)
    quantizer_reasons = {row.quantizer_reason for row in rows if row.quantizer_reason}
    parts = [
        table(("what", "which"), machine(device)),
        "Native support, as te.is_*_available says\n\n"
        + table(("function", "answer", "reason"), support),
        "Matrix products of a linear layer (bf16, features that are multiples of 128)\n\n"
        + product_table(rows),
        *(f"Triton does not quantize because {reason}." for reason in sorted(quantizer_reasons)),
        *([NOT_RUN] if capability_of(device) >= (10, 0) else []),
        "Signal-to-quantization-noise ratio in dB, measured on 1024 x 1024 bf16 values\n\n"
        + noise_table(signal_to_noise(device)),
    ]
    return "\n\n".join(parts)


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer_engine.pytorch.doctor", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--device", help="for example cpu or cuda:0; default: the first GPU if any")
    print(report(parser.parse_args(arguments).device))


if __name__ == "__main__":
    main()
