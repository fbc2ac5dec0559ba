# SPDX-License-Identifier: Apache-2.0
"""The signal-to-quantization-noise ratio of each format, measured by its definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backends import reference_quantize
from .formats.hadamard import SIZE, hadamard_matrix
from .formats.spec import QuantSpec


class Noise(NamedTuple):
    """Signal-to-quantization-noise ratio of one format in one orientation.

    ``ratios`` has one value in dB for each kind of data of `sample`.
    """

    name: str
    quant: str
    orientation: str
    ratios: dict[str, float]


DATA = ("normal", "heavy-tailed", "sparse")
# The name of each format, what it is quantized with, and the orientations that differ.
FORMATS: tuple[tuple[str, QuantSpec, tuple], ...] = (
    ("E4M3, one scale", QuantSpec("current", "e4m3"), ("both",)),
    ("E4M3, one power-of-two scale", QuantSpec("current", "e4m3", pow2=True), ("both",)),
    ("E5M2, one scale", QuantSpec("current", "e5m2"), ("both",)),
    ("E4M3, 1x128 blocks", QuantSpec("block", "e4m3", pow2=True), ("row", "column")),
    ("E4M3, 1x128 blocks, fp32 scales", QuantSpec("block", "e4m3"), ("row", "column")),
    ("E4M3, 128x128 blocks", QuantSpec("block", "e4m3", pow2=True, dim=2), ("both",)),
    ("MXFP8 E4M3, 1x32 blocks", QuantSpec("mxfp8", "e4m3"), ("row", "column")),
    ("MXFP8 E5M2, 1x32 blocks", QuantSpec("mxfp8", "e5m2"), ("row", "column")),
    ("MXFP8 E4M3, 32x32 blocks", QuantSpec("mxfp8", "e4m3", dim=2), ("both",)),
    ("NVFP4, 1x16 blocks", QuantSpec("nvfp4", "e2m1"), ("row", "column")),
    ("NVFP4, 1x16 blocks, Hadamard", QuantSpec("nvfp4", "e2m1", rht=True), ("column",)),
    ("NVFP4, 1x16 blocks, stochastic", QuantSpec("nvfp4", "e2m1", stochastic=True), ("row",)),
    ("NVFP4, 1x16 blocks, 4 or 6", QuantSpec("nvfp4", "e2m1", four_over_six="mse"), ("row",)),
    ("NVFP4, 16x16 blocks", QuantSpec("nvfp4", "e2m1", dim=2), ("both",)),
)


def sample(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Random bf16 data ``[rows, columns]`` on the CPU, independent of the device.

    ``"normal"``: standard normal. ``"heavy-tailed"``: Student's t distribution of 3 degrees of
    freedom. ``"sparse"``: standard normal, of which 95% are zero.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, columns, generator=generator)

    x = normal()
    if kind == "heavy-tailed":
        x = x / ((normal() ** 2 + normal() ** 2 + normal() ** 2) / 3).sqrt()
    elif kind == "sparse":
        x = x * (torch.rand(rows, columns, generator=generator) >= 0.95)
    elif kind != "normal":
        raise ValueError(f"There is no data of kind {kind!r}; use one of {', '.join(DATA)}.")
    return x.bfloat16()


def restored(x: Tensor, spec: QuantSpec, columnwise: bool) -> Tensor:
    """fp64 values of ``x [M, K]`` after quantizing it and back, with one orientation's bytes.

    The Hadamard transform, if there is one, is undone. M and K are multiples of 128.
    """
    rng = torch.zeros(2, dtype=torch.int64, device=x.device) if spec.stochastic else None
    text = spec.encode()
    q = reference_quantize.quantize(x, text, None, None, None, not columnwise, columnwise, rng)
    data = q.col if columnwise else q.row
    scales = q.col_scale_inv if columnwise and not spec.per_tensor else q.scale_inv
    amax = q.col_amax if columnwise else q.amax
    values = reference_quantize.dequantize(data, scales, amax, text, columnwise, torch.float32)
    values = values.double()
    if columnwise and spec.kind != "mxfp8":
        if spec.rht:  # an orthogonal matrix
            matrix = hadamard_matrix(spec.sign_mask, x.device).double()
            values = (values.view(-1, SIZE) @ matrix.t()).view(values.shape)
        values = values.t()
    return values[: x.shape[0], : x.shape[1]]


def decibels(x: Tensor, y: Tensor) -> float:
    """``10 log10(sum x² / sum (x - y)²)``, infinite for equal values."""
    x, y = x.double(), y.double()
    signal, noise = float((x**2).sum()), float(((x - y) ** 2).sum())
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64)))


def signal_to_noise(
    device: torch.device, rows: int = 1024, columns: int = 1024, seed: int = 0
) -> list[Noise]:
    """Quantize each kind of data to each format and back, by the definition of the formats.

    The data is bf16 ``[rows, columns]``, both multiples of 128. Orientations are ``"row"``,
    ``"column"``, or ``"both"`` where they have the same values.
    """
    data = {kind: sample(kind, rows, columns, seed).to(device) for kind in DATA}
    results = []
    for name, spec, orientations in FORMATS:
        for orientation in orientations:
            columnwise = orientation == "column"
            ratios = {kind: decibels(x, restored(x, spec, columnwise)) for kind, x in data.items()}
            results.append(Noise(name, spec.encode(), orientation, ratios))
    return results
