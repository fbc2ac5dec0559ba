# SPDX-License-Identifier: Apache-2.0
"""Formats with block scales in plain Python, written without the package.

One block at a time, straight from the definitions: numbers are ``numpy.float32`` wherever a format
rounds to fp32, codes are found by comparing with every value that a format has. Matrices come as
torch tensors and go as numpy arrays: codes ``[M, K]``, one per element, scales ``[M, K / block]``.
What is columnwise is rowwise of the transpose, so nothing here knows about columns.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy
import references
import torch

F32 = numpy.float32
FLOAT32_MAX = float(numpy.finfo(F32).max)
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass
class Rows:
    """A quantized matrix."""

    codes: numpy.ndarray
    scales: numpy.ndarray  # bytes, or fp32 where scales are fp32
    values: numpy.ndarray  # float64, what the codes stand for before they are rounded to a dtype


# ---------------------------------------------------------------------------------- single numbers


def fp8_codes(values, fmt):
    """Bytes of fp32 values; a NaN is 0x7F."""
    codes, _ = references.fp8_round(torch.from_numpy(numpy.asarray(values, dtype=F32)), fmt)
    return codes.numpy()


def fp8_values(codes, fmt):
    """float64 values of bytes."""
    return references.fp8_table(fmt).numpy()[codes]


@lru_cache(maxsize=None)
def e4m3_code(value):
    """The byte of one number."""
    return int(fp8_codes([value], "e4m3")[0])


@lru_cache(maxsize=None)
def e4m3_value(code):
    """The number of one byte, as fp32."""
    return F32(fp8_values(code, "e4m3"))


def e8m0_code(value):
    """The byte of the smallest power of two >= a non-negative number, saturating."""
    value = float(value)
    if math.isnan(value):
        return 255
    if math.isinf(value):
        return 254
    return next((code for code in range(255) if 2.0 ** (code - 127) >= value), 254)


def fp4_code(value):
    """The E2M1 code nearest to a number, of two equally near ones the even; a NaN is 6."""
    value = float(value)
    if math.isnan(value):
        return 7
    magnitude = min(abs(value), 6.0)
    distances = [abs(magnitude - candidate) for candidate in FP4_VALUES]
    least = min(distances)
    nearest = [code for code in range(8) if distances[code] == least]
    code = nearest[0] if len(nearest) == 1 or nearest[0] % 2 == 0 else nearest[1]
    return code + 8 * (math.copysign(1.0, value) < 0)


def stochastic_fp4_code(value, noise):
    """The E2M1 code of a number for one random byte."""
    value = float(value)
    if math.isnan(value):
        return 7
    magnitude = min(abs(value), 6.0)
    step = 0.5 if magnitude < 2 else 1.0 if magnitude < 4 else 2.0
    total = float(F32(magnitude) + F32(noise / 256 * step))
    total = min(math.floor(total / step) * step, 6.0)
    return FP4_VALUES.index(total) + 8 * (math.copysign(1.0, value) < 0)


def fp4_value(code):
    """The number an E2M1 code stands for."""
    return FP4_VALUES[code % 8] * (-1.0 if code >= 8 else 1.0)


def amax(values):
    """Largest magnitude as fp32; NaNs are dropped."""
    numbers = [abs(float(v)) for v in numpy.asarray(values).reshape(-1) if not math.isnan(v)]
    return F32(max(numbers, default=0.0))


def fp32(x):
    """The values of a torch tensor as a numpy array of fp32."""
    return x.detach().cpu().float().numpy().astype(F32)


def _squares(grid, size):
    """Maximum of each ``size`` rows of a [M, B] grid of amaxes, for all of these rows."""
    out = grid.copy()
    for start in range(0, len(grid), size):
        out[start : start + size] = grid[start : start + size].max(axis=0)
    return out


def _block_amaxes(x, size, square):
    """amax of each ``size`` values of a row, or of ``size`` x ``size`` values."""
    rows, columns = x.shape
    blocks = -(-columns // size)
    grid = numpy.zeros((rows, blocks), dtype=F32)
    for i in range(rows):
        for j in range(blocks):
            grid[i, j] = amax(x[i, j * size : (j + 1) * size])
    return _squares(grid, size) if square and rows else grid


# ---------------------------------------------------------------------------------------- matrices


def mxfp8(x, fmt, square=False):
    """MXFP8 along rows; ``scales`` are E8M0 bytes."""
    x = fp32(x)
    limit = {"e4m3": 0x3B124925, "e5m2": 0x37924925}[fmt]  # 1/448 and 1/57344 in fp32
    limit = numpy.array([limit], dtype=numpy.uint32).view(F32)[0]
    amaxes = _block_amaxes(x, 32, square)
    scales = numpy.zeros(amaxes.shape, dtype=numpy.uint8)
    scaled, powers = numpy.zeros_like(x), numpy.zeros(x.shape)
    with numpy.errstate(all="ignore"):
        for i, j in numpy.ndindex(*amaxes.shape):
            code = e8m0_code(amaxes[i, j] * limit)
            block = slice(32 * j, 32 * j + 32)
            scales[i, j] = code
            scaled[i, block] = x[i, block] * F32(2.0 ** (127 - code))
            powers[i, block] = 2.0 ** (code - 127)
    codes = fp8_codes(scaled, fmt)
    return Rows(codes, scales, fp8_values(codes, fmt) * powers)


def block_scale(amax_, fmt, pow2, eps, largest):
    """fp32 scale of a block by the rule of current scaling."""
    amax_ = float(F32(max(float(amax_), float(F32(eps)))))
    if amax_ in (0.0, math.inf):
        return F32(1.0)
    exact = references.FP8_MAX[fmt] / amax_
    with numpy.errstate(over="ignore"):
        scale = F32(exact)
    scale = F32(largest) if numpy.isinf(scale) else scale
    if pow2:
        scale = F32(2.0 ** (math.frexp(float(scale))[1] - 1))
    return scale


def block(x, fmt, pow2=False, eps=0.0, square=False):
    """FP8 with fp32 scales of 128 values; ``scales`` are the inverse scales."""
    largest = torch.finfo(x.dtype).max
    x = fp32(x)
    amaxes = _block_amaxes(x, 128, square)
    inverse = numpy.zeros(amaxes.shape, dtype=F32)
    scaled, factors = numpy.zeros_like(x), numpy.zeros(x.shape)
    with numpy.errstate(all="ignore"):
        for i, j in numpy.ndindex(*amaxes.shape):
            scale = block_scale(amaxes[i, j], fmt, pow2, eps, largest)
            inverse[i, j] = F32(1.0) / scale
            part = slice(128 * j, 128 * j + 128)
            scaled[i, part] = x[i, part] * scale
            factors[i, part] = float(inverse[i, j])
    codes = fp8_codes(scaled, fmt)
    return Rows(codes, inverse, fp8_values(codes, fmt) * factors)


def nvfp4_encode_scale(global_amax, e4m3_max=448):
    """The fp32 scale of a tensor with this amax."""
    if global_amax == 0:
        return F32(1.0)
    with numpy.errstate(all="ignore"):
        scale = min(F32(e4m3_max * 6) / F32(global_amax), F32(FLOAT32_MAX))
    return scale if scale != 0 else F32(1.0)


def _multiplier(scale_byte, encode):
    with numpy.errstate(all="ignore"):
        decode = F32(1.0) / encode
        product = e4m3_value(int(scale_byte)) * decode
        return min(F32(1.0) / product, F32(FLOAT32_MAX))


def nvfp4(x, global_amax=None, square=False, noise=None):
    """NVFP4 along rows.

    Args:
        global_amax: a number, one per row, or None for that of ``x``.
        noise: bytes [M, K] for stochastic rounding.
    """
    x = fp32(x)
    rows = x.shape[0]
    global_amax = _per_row(global_amax, x)
    amaxes = _block_amaxes(x, 16, square)
    scales = numpy.zeros(amaxes.shape, dtype=numpy.uint8)
    codes = numpy.zeros(x.shape, dtype=numpy.uint8)
    with numpy.errstate(all="ignore"):
        for i in range(rows):
            encode = nvfp4_encode_scale(global_amax[i])
            for j in range(amaxes.shape[1]):
                scaled = min(amaxes[i, j] * (encode * F32(1 / 6)), F32(FLOAT32_MAX))
                scales[i, j] = e4m3_code(float(scaled))
                multiplier = _multiplier(scales[i, j], encode)
                for k in range(16 * j, 16 * j + 16):
                    value = x[i, k] * multiplier
                    codes[i, k] = (
                        fp4_code(value)
                        if noise is None
                        else stochastic_fp4_code(value, int(noise[i, k]))
                    )
    return Rows(codes, scales, nvfp4_values(codes, scales, global_amax))


def _per_row(global_amax, x):
    if global_amax is None:
        global_amax = amax(x)
    return numpy.broadcast_to(numpy.asarray(global_amax, dtype=F32).reshape(-1), (len(x),))


def nvfp4_values(codes, scales, global_amax, e4m3_max=448):
    """float64 values of codes, with the factor of a block rounded to fp32 as it is defined."""
    values = numpy.zeros(codes.shape)
    inverse = F32(1.0 / (6 * e4m3_max))
    with numpy.errstate(all="ignore"):
        for i, k in numpy.ndindex(*codes.shape):
            scale = e4m3_value(int(scales[i, k // 16]))
            factor = (scale * F32(global_amax[i])) * inverse
            values[i, k] = fp4_value(codes[i, k]) * float(factor)
    return values


def _candidate(x, scale_byte, encode, global_amax, error_mode, e4m3_max):
    """Codes and error of 16 values for one scale."""
    multiplier = _multiplier(scale_byte, encode)
    scale = e4m3_value(int(scale_byte))
    codes = [fp4_code(value * multiplier) for value in x]
    error = F32(0.0)
    for code, value in zip(codes, x):
        back = ((F32(fp4_value(code)) * scale) * F32(global_amax)) / F32(6 * e4m3_max)
        difference = back - value
        error = error + (abs(difference) if error_mode == "mae" else difference * difference)
    return codes, error


def _tree(errors):
    """Sum of 16 numbers, halves first."""
    errors = list(errors)
    for distance in (8, 4, 2, 1):
        errors = [errors[i] + errors[i + distance] for i in range(distance)]
    return errors[0]


def four_over_six(x, error_mode, e4m3_max=448, global_amax=None, square=False):
    """NVFP4 along rows where each block maps its largest value to 6 or 4."""
    x = fp32(x)
    rows, columns = x.shape
    global_amax = _per_row(global_amax, x)
    amaxes = _block_amaxes(x, 16, square)
    grid = amaxes.shape
    scales = numpy.zeros((2, *grid), dtype=numpy.uint8)
    codes = numpy.zeros((2, rows, columns), dtype=numpy.uint8)
    errors = numpy.zeros((2, *grid), dtype=F32)
    with numpy.errstate(all="ignore"):
        for i, j in numpy.ndindex(*grid):
            encode = nvfp4_encode_scale(global_amax[i], e4m3_max)
            base = (amaxes[i, j] / F32(6.0)) * encode
            part = slice(16 * j, 16 * j + 16)
            for which, target in ((0, base * F32(1.5)), (1, base)):
                scales[which, i, j] = e4m3_code(float(min(target, F32(448.0))))
                codes[which, i, part], errors[which, i, j] = _candidate(
                    x[i, part], scales[which, i, j], encode, global_amax[i], error_mode, e4m3_max
                )
        if square:
            for start, j, which in numpy.ndindex(-(-rows // 16), grid[1], 2):
                part = errors[which, 16 * start : 16 * start + 16, j]
                total = _tree([*part, *[F32(0.0)] * (16 - len(part))])
                errors[which, 16 * start : 16 * start + 16, j] = total
    four = errors[0] < errors[1]
    picked = numpy.where(four, scales[0], scales[1])
    codes = numpy.where(numpy.repeat(four, 16, axis=1), codes[0], codes[1])
    return Rows(codes, picked, nvfp4_values(codes, picked, global_amax, e4m3_max))


def hadamard(sign_mask):
    """The 16 x 16 matrix of the random Hadamard transform in float64."""
    matrix = torch.zeros(16, 16, dtype=torch.float64)
    for row in range(16):
        for column in range(16):
            sign = (-1) ** bin(row & column).count("1") * (-1) ** (sign_mask >> row & 1)
            matrix[row, column] = sign / 4
    return matrix


# ------------------------------------------------------------------------------------- test inputs

HARD = ["normal", "wide", "zeros", "outlier", "subnormal", "ties", "nan", "inf", "largest", "huge"]


def hard_matrix(kind, rows, columns, dtype, seed=0):
    """A matrix of a kind on which quantization goes wrong easily."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-24, 14, (rows, columns), generator=generator).double())
        x[::3] = x[::3].round()
    elif kind == "zeros":
        x = torch.zeros_like(x)
        x[1::2] = -0.0
    elif kind == "outlier":
        x[rows // 2, columns // 3] = -3e4
    elif kind == "subnormal":
        x = x * 2.0 ** (-130 if dtype != torch.float16 else -20)
    elif kind == "ties":  # few mantissa bits, with a block amax of 6 or 448 now and then
        x = torch.randint(-24, 25, (rows, columns), generator=generator).double() / 4
        x[:, ::32] = 6.0
        x[::2] *= 448 / 6
    elif kind in ("nan", "inf"):
        x[rows // 2, columns // 3] = float(kind)
        x[rows // 3, columns // 2] = -float(kind)
        x[0, :32] = float(kind)
    elif kind == "largest":
        x = torch.where(x > 0, 1.0, -1.0) * torch.finfo(dtype).max
    elif kind == "huge":
        x = x * torch.finfo(dtype).max / 8
    return x.to(dtype)
