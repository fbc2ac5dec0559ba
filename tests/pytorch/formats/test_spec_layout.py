# SPDX-License-Identifier: Apache-2.0
"""Quantizations as strings, and the buffers that belong to them."""

import itertools

import pytest
import torch

from transformer_engine.pytorch.formats.layout import (
    NOTHING,
    PRODUCERS,
    LayoutFlags,
    emits_swizzled_scales,
    padded_rows,
    produced_spec,
    quantized_layout,
)
from transformer_engine.pytorch.formats.spec import KINDS, PER_TENSOR, QuantSpec, decode_quant

VALUES = {
    "pow2": (False, True),
    "eps": (0.0, 1e-7),
    "dim": (1, 2),
    "swizzled": (False, True),
    "unrounded": (0, 1, 2),
    "rht": (False, True),
    "sign_mask": (0xD7E8, 0),
    "stochastic": (False, True),
    "row_scaled": (False, True),
    "four_over_six": ("", "mae", "mse"),
    "e4m3_max": (448, 256),
}
MEANINGFUL = {
    "delayed": (),
    "current": ("pow2", "eps"),
    "block": ("pow2", "eps", "dim"),
    "mxfp8": ("dim", "swizzled", "unrounded"),
    "nvfp4": tuple(VALUES)[2:4] + tuple(VALUES)[5:],
}
FORMATS = {"nvfp4": ("e2m1",)}
EXCLUDE = [
    *(("four_over_six", "rht"), ("four_over_six", "stochastic"), ("row_scaled", "rht")),
    *(("row_scaled", "stochastic"), ("row_scaled", "dim"), ("rht", "dim")),
]


def is_valid(options):
    """Whether the options of a kind agree with each other, by the list of what excludes what."""
    changed = {name for name, value in options.items() if value != VALUES[name][0]}
    if "e4m3_max" in changed and "four_over_six" not in changed:
        return False
    return not any(set(pair) <= changed for pair in EXCLUDE)


def combinations(kind):
    """Every combination of the options that mean something for a kind."""
    names = MEANINGFUL[kind]
    for fmt in FORMATS.get(kind, ("e4m3", "e5m2")):
        for values in itertools.product(*(VALUES[name] for name in names)):
            yield fmt, dict(zip(names, values))


@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_of_options(kind):
    made = {}
    refused = 0
    for fmt, options in combinations(kind):
        if not is_valid(options):
            with pytest.raises(ValueError):
                QuantSpec(kind, fmt, **options)
            refused += 1
            continue
        spec = QuantSpec(kind, fmt, **options)
        text = spec.encode()
        assert decode_quant(text) == spec and hash(decode_quant(text)) == hash(spec)
        assert decode_quant(text).encode() == text and decode_quant(text) is decode_quant(text)
        made[text] = spec
    total = len(list(combinations(kind)))
    assert len(made) == total - refused  # no two share a string
    assert (refused > 0) == (kind == "nvfp4")
    assert all(spec.per_tensor == (kind in PER_TENSOR) for spec in made.values())


def test_strings_by_hand():
    for spec, text in (
        (QuantSpec("current", "e4m3"), "current,e4m3"),
        (QuantSpec("block", "e4m3", pow2=True, dim=2), "block,e4m3,pow2=1,dim=2"),
        (QuantSpec("current", "e5m2", eps=1e-7), "current,e5m2,eps=1e-07"),
        (
            QuantSpec("nvfp4", "e2m1", four_over_six="mse", e4m3_max=256),
            "nvfp4,e2m1,four_over_six=mse,e4m3_max=256",
        ),
        (
            QuantSpec("nvfp4", "e2m1", rht=True, sign_mask=0, stochastic=True),
            "nvfp4,e2m1,rht=1,sign_mask=0,stochastic=1",
        ),
    ):
        assert spec.encode() == text and decode_quant(text) == spec
    assert decode_quant("") is None


@pytest.mark.parametrize("kind", KINDS)
def test_options_that_mean_nothing_are_refused(kind):
    fmt = FORMATS.get(kind, ("e4m3",))[0]
    for name, (_, value, *_) in VALUES.items():
        if name not in MEANINGFUL[kind]:
            with pytest.raises(ValueError, match=f"{name}=.*{kind}.*Leave it"):
                QuantSpec(kind, fmt, **{name: value})


@pytest.mark.parametrize(
    "fields, words",
    [
        (("later", "e4m3"), "kind is 'later'.*delayed, current, block, mxfp8, nvfp4"),
        (("mxfp8", "e2m1"), "fmt is 'e2m1'.*e4m3, e5m2"),
        (("nvfp4", "e4m3"), "fmt is 'e4m3'.*e2m1"),
    ],
)
def test_unknown_names_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        QuantSpec(*fields)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"dim": 3}, "dim is 3"),
        ({"four_over_six": "max"}, "four_over_six is 'max'.*mae.*mse"),
        ({"four_over_six": "mae", "e4m3_max": 300}, "e4m3_max is 300.*448, or 256"),
        ({"e4m3_max": 256}, "e4m3_max is 256.*four_over_six"),
        ({"row_scaled": True, "dim": 2}, "row_scaled with dim=2"),
    ],
)
def test_values_outside_the_list_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        QuantSpec("nvfp4", "e2m1", **options)


@pytest.mark.parametrize(
    "text, words",
    [
        ("current,e4m3,wide=1", "'wide=1'.*option=value"),
        ("current,e4m3,pow2", "'pow2'.*option=value"),
        ("current,e4m3,0,0.0", "'0'.*option=value"),
        ("current", "fmt is ''"),
        ("e4m3", "kind is 'e4m3'"),
        ("delayed,e4m3,pow2=1", "pow2=True.*delayed"),
    ],
)
def test_strings_that_are_no_quantization_are_refused(text, words):
    with pytest.raises(ValueError, match=words):
        decode_quant(text)


# ----------------------------------------------------------------------------------------- layouts


# Rows 96 and columns 160: row, col, scale_inv, col_scale_inv. The columnwise buffer of block
# scaling is padded to whole blocks.
BY_HAND = [
    (QuantSpec("current", "e4m3"), (96, 160), (160, 96), (1,), None),
    (QuantSpec("delayed", "e5m2"), (96, 160), (160, 96), (1,), None),
    (QuantSpec("block", "e4m3"), (96, 160), (160, 128), (2, 96), (1, 160)),
    (QuantSpec("block", "e4m3", dim=2), (96, 160), (160, 128), (1, 4), (2, 4)),
    (QuantSpec("mxfp8", "e4m3"), (96, 160), (96, 160), (128, 8), (4, 256)),
    (QuantSpec("nvfp4", "e2m1"), (96, 80), (160, 48), (128, 12), (256, 8)),
]


@pytest.mark.parametrize("spec, row, col, scale_inv, col_scale_inv", BY_HAND)
def test_layouts_by_hand(spec, row, col, scale_inv, col_scale_inv):
    layout = quantized_layout(spec, 96, 160, True, True)
    assert (layout.row, layout.col) == (row, col)
    assert (layout.scale_inv, layout.col_scale_inv) == (scale_inv, col_scale_inv)
    bytes_ = spec.kind in ("mxfp8", "nvfp4")
    assert layout.scale_dtype == (torch.uint8 if bytes_ else torch.float32)
    amax = {"current": ((1,), None), "delayed": ((1,), None), "nvfp4": ((1,), (1,))}
    assert (layout.amax, layout.col_amax) == amax.get(spec.kind, (None, None))
    # One orientation has its own buffers only; per-tensor FP8 has one scale for both.
    alone = quantized_layout(spec, 96, 160, True, False)
    assert (alone.row, alone.scale_inv) == (row, scale_inv)
    assert alone.col is alone.col_scale_inv is alone.col_amax is None
    assert alone.amax == layout.amax
    alone = quantized_layout(spec, 96, 160, False, True)
    assert alone.row is None and (alone.col, alone.col_scale_inv) == (col, col_scale_inv)
    assert alone.scale_inv == ((1,) if spec.per_tensor else None)
    assert alone.amax == (layout.amax if spec.per_tensor else None)
    assert alone.col_amax == layout.col_amax


def up(value, multiple):
    """Rounded up to a multiple."""
    while value % multiple:
        value += 1
    return value


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 33, 128, 129, 300])
@pytest.mark.parametrize("columns", [32, 160, 512])
def test_layouts_of_any_shape(rows, columns):
    m, k = rows, columns

    def layout(kind, **options):
        fmt = FORMATS.get(kind, ("e4m3",))[0]
        return quantized_layout(QuantSpec(kind, fmt, **options), m, k, True, True)[:6]

    for kind in PER_TENSOR:
        assert layout(kind) == ((m, k), (k, up(m, 16)), (1,), None, (1,), None)
    block = ((m, k), (k, up(m, 128)))
    kb, mb = up(k, 128) // 128, up(m, 128) // 128
    assert layout("block") == (*block, (kb, up(m, 4)), (mb, up(k, 4)), None, None)
    assert layout("block", dim=2) == (*block, (mb, up(kb, 4)), (kb, up(mb, 4)), None, None)
    scales = ((up(m, 128), up(k // 32, 4)), (up(up(m, 32) // 32, 4), up(k, 128)))
    for options in ({}, {"dim": 2}, {"swizzled": True}):
        assert layout("mxfp8", **options) == ((m, k), (up(m, 32), k), *scales, None, None)
    data = ((m, k // 2), (k, up(m, 32) // 2))
    scales = ((up(m, 128), up(k // 16, 4)), (up(k, 128), up(up(m, 16) // 16, 4)))
    for options in ({}, {"dim": 2}, {"swizzled": True}, {"rht": True}):
        assert layout("nvfp4", **options) == (*data, *scales, (1,), (1,))
    assert layout("nvfp4", row_scaled=True) == (*data, *scales, (m,), (k,))
    # What is contracted over is padded the same way for both operands of a GEMM.
    for kind, multiple in (("current", 16), ("block", 128), ("mxfp8", 32), ("nvfp4", 32)):
        assert padded_rows(m, kind) == up(m, multiple)


def test_nothing_is_no_buffer():
    for spec, *_ in BY_HAND[2:]:
        assert quantized_layout(spec, 96, 160, False, False)[:6] == tuple(NOTHING)


# -------------------------------------------------------------------------- who swizzles the scales

BLACKWELL = [(10, 0), (10, 3), (11, 0)]
OTHERS = [(0, 0), (8, 9), (9, 0), (12, 0), (12, 1)]
SHAPES = [(128, 128), (256, 384), (64, 128), (128, 256), (64, 144), (128, 144), (48, 128), (32, 32)]
NO_FUSION = LayoutFlags(rht_fusion=False)
CUDNN = LayoutFlags(cudnn_norm=True)


def produced(spec, producer, shape, capability=(9, 0), flags=LayoutFlags()):
    """``produced_spec``, which may change ``swizzled`` and ``unrounded`` only."""
    out = produced_spec(spec, producer, *shape, capability, flags)
    options = {f: getattr(spec, f) for f in spec.__dataclass_fields__}
    options.update(swizzled=out.swizzled, unrounded=out.unrounded)
    assert out == QuantSpec(**options)
    return out


@pytest.mark.parametrize("kind", ["delayed", "current", "block"])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_formats_without_an_order_are_left_alone(kind, producer):
    spec = QuantSpec(kind, "e4m3")
    for shape, capability in itertools.product(SHAPES, BLACKWELL + OTHERS):
        assert produced_spec(spec, producer, *shape, capability, CUDNN) == spec


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("wish", [False, True])
def test_mxfp8_kernels_grant_the_wish(producer, wish):
    spec = QuantSpec("mxfp8", "e4m3", swizzled=wish)
    for shape, capability in itertools.product(SHAPES, BLACKWELL + OTHERS):
        out = produced(spec, producer, shape, capability)
        assert (out.swizzled, out.unrounded) == (wish, False)
        # The norm of cuDNN quantizes its own fp32 result, compactly, if all blocks are whole.
        out = produced(spec, producer, shape, capability, CUDNN)
        fused = producer == "norm" and shape in ((128, 128), (256, 384), (128, 256))
        assert (out.swizzled, out.unrounded) == (wish and not fused, fused)


def test_a_consumed_unrounded_is_not_inherited():
    spec = QuantSpec("mxfp8", "e4m3", swizzled=True, unrounded=True)
    assert not produced(spec, "quantize", (128, 128), flags=CUDNN).unrounded


NVFP4_KINDS = {
    "plain": {},
    "rht": {"rht": True},
    "rht stochastic": {"rht": True, "stochastic": True},
    "square": {"dim": 2},
    "square stochastic": {"dim": 2, "stochastic": True},
    "square 4/6": {"dim": 2, "four_over_six": "mae"},
    "4/6": {"four_over_six": "mse", "e4m3_max": 256},
    "row-scaled": {"row_scaled": True},
}


@pytest.mark.parametrize("name", NVFP4_KINDS)
def test_nvfp4_kernels_swizzle_where_they_can(name):
    options = NVFP4_KINDS[name]
    wish = QuantSpec("nvfp4", "e2m1", swizzled=True, **options)
    compact = QuantSpec("nvfp4", "e2m1", **options)
    for shape, capability in itertools.product(SHAPES, BLACKWELL + OTHERS):
        for flags in (LayoutFlags(), NO_FUSION, CUDNN):
            # A pass after the plain quantize swizzles whatever its kernel left.
            assert produced(wish, "quantize", shape, capability, flags).swizzled
            can = False
            if capability in BLACKWELL and name in ("rht", "rht stochastic"):
                whole = ((128, 128), (256, 384), (64, 128), (128, 256))
                can = shape in whole and flags is not NO_FUSION
            if capability in BLACKWELL and name in ("square", "square stochastic"):
                can = shape in ((128, 128), (256, 384), (128, 256))
            assert emits_swizzled_scales(wish, *shape, capability, flags) is can
            for producer in ("norm", "activation", "bias_grad"):
                assert produced(wish, producer, shape, capability, flags).swizzled is can
            for producer in PRODUCERS:
                assert produced(compact, producer, shape, capability, flags) == compact


def test_shapes_of_the_hadamard_kernel_by_hand():
    spec = QuantSpec("nvfp4", "e2m1", rht=True, swizzled=True)
    shapes = [(64, 128), (128, 256), (64, 144), (128, 144), (48, 128)]
    emitted = [emits_swizzled_scales(spec, *shape, (10, 0), LayoutFlags()) for shape in shapes]
    assert emitted == [True, True, False, False, False]
