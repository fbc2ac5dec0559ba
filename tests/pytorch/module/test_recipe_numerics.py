# SPDX-License-Identifier: Apache-2.0
"""Recipes with scales of blocks against float64 products of operands quantized by the test itself.

A GEMM of quantized operands is exact up to fp32 addition and one rounding, so ``Linear`` is checked
element by element at that level, and so is ``LayerNormLinear`` with the norm output that it
returns. In ``LayerNormMLP`` an intermediate result may lie so close to a rounding boundary of a
format that fp32 and float64 fall on different sides; a band allows for some of them.
"""

from dataclasses import dataclass, replace
from typing import Optional

import pytest
import torch
from eager_support import (
    BF16,
    FP16,
    FP32,
    NORMS,
    UNIT,
    assert_near,
    assert_product,
    build,
    random,
    run,
)
import references
import references_block
from references_block import Blocks

from transformer_engine.common.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

# More than one block of 128, and no multiple of it; a multiple of 16 that is none of 32 has its own
# test, because MXFP8 weights can not have it.
WIDTH, OUT, FFN, ROWS = 160, 192, 224, 77


# --- what the recipes are ---------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """How both orientations of an operand are quantized; None where it is not.

    ``from_row``: columnwise values are made of the dequantized rowwise ones.
    """

    row: Optional[Blocks]
    col: Optional[Blocks]
    from_row: bool = False

    def rows(self, x, dtype, amax=None):
        """float64 values ``[R, C]`` of the rowwise representation."""
        if self.row is None:
            return x
        return references_block.quantize_rows(x, self.row, dtype, amax).exact()

    def dequantized(self, x, dtype, amax=None):
        """As `rows`, as dequantization gives them in ``dtype``."""
        return references_block.quantize_rows(x, self.row, dtype, amax).dequantized(dtype)

    def columns(self, x, dtype, amax=None):
        """float64 values ``[C, R]`` of the columnwise representation; maybe with zeros behind."""
        if self.from_row:
            x, amax = self.dequantized(x, dtype, amax), None
        if self.col is None:
            return x.t()
        return references_block.quantize_columns(x, self.col, dtype, amax).exact()


@dataclass(frozen=True)
class Roles:
    """The operands of a linear layer: input, weight, output gradient; and the backward override."""

    x: Operand
    w: Operand
    g: Operand
    override: str = ""
    custom: bool = False  # results of activations are quantized after they were rounded


def same(how):
    """An operand with one format."""
    return Operand(how, how)


def roles(x, w, g):
    """Three operands of one format each."""
    return Roles(same(x), same(w), same(g))


def tensor_type(role):
    """What a slot is for."""
    return "" if role is None else role.tensor_type


E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


def two_formats(role):
    """MXFP8 forward, FP8 blocks in dgrad, transformed NVFP4 in wgrad."""
    column = NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    row = MXFP8Quantizer(E4M3)
    options = {"rowwise": True, "columnwise": True}
    if tensor_type(role) == "weight":
        column = Float8BlockQuantizer(E4M3, block_scaling_dim=2, **options)
    if tensor_type(role) == "grad_output":
        row = Float8BlockQuantizer(E5M2, block_scaling_dim=1, **options)
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)


def from_dequantized(role):
    """NVFP4 forward; backward in MXFP8 of the values that the forward pass saw."""
    if tensor_type(role) == "grad_output":
        return MXFP8Quantizer(E5M2)
    return HybridQuantizer(
        rowwise_quantizer=NVFP4Quantizer(),
        columnwise_quantizer=MXFP8Quantizer(E4M3),
        columnwise_source="rowwise_dequantized",
    )


def plain_wgrad(role):
    """Square MXFP8 blocks, but the weight gradient in high precision."""
    square = MXFP8Quantizer(E4M3, with_2d_quantization=True)
    if tensor_type(role) == "weight":
        return square
    return HybridQuantizer(rowwise_quantizer=square, columnwise_quantizer=IdentityQuantizer())


MX, MX5, MX2 = Blocks("mxfp8"), Blocks("mxfp8", "e5m2"), Blocks("mxfp8", square=True)
BLOCK, BLOCK2, CURRENT = Blocks("block"), Blocks("block", square=True), Blocks("current")
FP4, FP4_2D, FP4_RHT = Blocks("nvfp4"), Blocks("nvfp4", square=True), Blocks("nvfp4", hadamard=True)


def exact_scales(how, fmt="e4m3"):
    """FP8 blocks whose scales are no powers of two."""
    return replace(how, pow2=False, fmt=fmt)


def nvfp4(**options):
    """The recipe without chance."""
    return NVFP4BlockScaling(disable_stochastic_rounding=True, **options)


RECIPES = {
    "current": (Float8CurrentScaling(), roles(CURRENT, CURRENT, Blocks("current", "e5m2"))),
    "block": (Float8BlockScaling(), roles(BLOCK, BLOCK2, BLOCK)),
    "block_fp32_scales": (
        Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
        roles(exact_scales(BLOCK), exact_scales(BLOCK2), exact_scales(BLOCK, "e5m2")),
    ),
    "block_square_input": (
        Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
        roles(BLOCK2, BLOCK, BLOCK),
    ),
    "block_square_gradient": (
        Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2),
        roles(BLOCK, BLOCK, BLOCK2),
    ),
    "mxfp8": (MXFP8BlockScaling(), roles(MX, MX, MX)),
    "mxfp8_hybrid": (MXFP8BlockScaling(fp8_format=Format.HYBRID), roles(MX, MX, MX5)),
    "mxfp8_2d": (MXFP8BlockScaling(enable_2d_quantization=True), roles(MX, MX2, MX)),
    "nvfp4": (nvfp4(), roles(FP4_RHT, FP4_2D, FP4_RHT)),
    "nvfp4_without_rht": (nvfp4(disable_rht=True), roles(FP4, FP4_2D, FP4)),
    "nvfp4_1d": (nvfp4(disable_2d_quantization=True), roles(FP4_RHT, FP4, FP4_RHT)),
    "nvfp4_row_scaled": (
        nvfp4(disable_rht=True, row_scaled_activation=True),
        roles(replace(FP4, per_row=True), FP4_2D, FP4),
    ),
    "nvfp4_four_over_six": (
        nvfp4(disable_rht=True, nvfp4_4over6="all"),
        roles(
            replace(FP4, error="mae", largest=256.0),
            replace(FP4_2D, error="mae", largest=256.0),
            FP4,
        ),
    ),
    "nvfp4_four_over_six_weights": (
        nvfp4(
            nvfp4_4over6="weights",
            nvfp4_4over6_e4m3_use_256="none",
            nvfp4_4over6_err_mode="MSE",
        ),
        roles(FP4_RHT, replace(FP4_2D, error="mse"), FP4_RHT),
    ),
    "nvfp4_row_scaled_four_over_six": (
        nvfp4(disable_rht=True, row_scaled_activation=True, nvfp4_4over6="activations"),
        roles(replace(FP4, per_row=True, error="mae", largest=256.0), FP4_2D, FP4),
    ),
    "custom_two_formats": (
        CustomRecipe(two_formats),
        Roles(
            Operand(MX, FP4_RHT),
            Operand(MX, BLOCK2),
            Operand(Blocks("block", "e5m2"), FP4_RHT),
            custom=True,
        ),
    ),
    "custom_from_dequantized": (
        CustomRecipe(from_dequantized),
        Roles(Operand(FP4, MX, True), Operand(FP4, MX, True), same(MX5), custom=True),
    ),
    "custom_plain_wgrad": (
        CustomRecipe(plain_wgrad),
        Roles(Operand(MX2, None), same(MX2), Operand(MX2, None), custom=True),
    ),
}
for _override in ("high_precision", "dequantized"):
    for _make, _roles in (
        (Float8CurrentScaling, roles(CURRENT, CURRENT, Blocks("current", "e5m2"))),
        (Float8BlockScaling, roles(BLOCK, BLOCK2, BLOCK)),
        (MXFP8BlockScaling, roles(MX, MX, MX)),
        (NVFP4BlockScaling, roles(FP4_RHT, FP4_2D, FP4_RHT)),
    ):
        RECIPES[f"{_make.__name__}_{_override}"] = (
            _make(backward_override=_override),
            replace(_roles, override=_override),
        )


# --- products -----------------------------------------------------------------------------------


def forward_operands(how: Roles, x, w, dtype, x_amax=None):
    """float64 operands of fprop."""
    return how.x.rows(x, dtype, x_amax), how.w.rows(w, dtype)


def dgrad_operands(how: Roles, dy, w, dtype, dy_amax=None):
    """``(a, b)`` with ``dx = a b^T``."""
    if how.override == "high_precision":
        return dy, w.t()
    if how.override == "dequantized":
        return dy, how.w.dequantized(w, dtype).t()
    g = how.g.rows(dy, dtype, dy_amax)
    return g, how.w.columns(w, dtype)[:, : g.shape[1]]


def wgrad_operands(how: Roles, dy, x, dtype, dy_amax=None, x_amax=None):
    """``(a, b)`` with ``dw = a b^T``."""
    if how.override == "high_precision":
        return dy.t(), x.t()
    if how.override == "dequantized":
        return dy.t(), how.x.dequantized(x, dtype, x_amax).t()
    return how.g.columns(dy, dtype, dy_amax), how.x.columns(x, dtype, x_amax)


def gemm_bias(bias, dtype):
    """The bias that a quantized GEMM adds; bf16 where results are fp32."""
    bias = bias.detach()
    return (bias.to(BF16) if dtype == FP32 else bias).double()


def assert_linear(how: Roles, step, x, weight, bias, grads):
    """The output, and weight, bias and (if it is there) input gradient of a linear layer."""
    dtype, dy, x, w = x.dtype, step.dys[0].double(), x.double(), weight.detach().double()
    bias = None if bias is None else gemm_bias(bias, dtype)
    assert_product(step.outputs[0], *forward_operands(how, x, w, dtype), bias, fp8=True)
    backward = not how.override
    assert_product(grads["weight"], *wgrad_operands(how, dy, x, dtype), fp8=backward)
    if "x" in grads:
        assert_product(grads["x"], *dgrad_operands(how, dy, w, dtype), fp8=backward)
    if bias is not None:
        ones = torch.ones(1, dy.shape[0], dtype=torch.float64, device=dy.device)
        assert_product(grads["bias"][None], ones, dy.t(), fp8=False)
    assert all(t.dtype == dtype for t in (*step.outputs, *grads.values()))


# --- Linear ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (BF16, FP32, FP16), ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_linear(name, dtype, device):
    """All three products of every recipe."""
    recipe, how = RECIPES[name]
    module = build("Linear", device, dtype=dtype, width=WIDTH, out=OUT)
    x = random(ROWS, WIDTH, dtype=dtype, device=device) * 3
    step = run(module, x, recipe)
    assert_linear(how, step, x, module.weight, module.bias, step.grads)


@pytest.mark.parametrize("rows", (1, 7, 33, 128))
@pytest.mark.parametrize("name", RECIPES)
def test_any_number_of_rows(name, rows, device):
    """No number of rows is refused, and padding adds nothing."""
    recipe, how = RECIPES[name]
    module = build("Linear", device, dtype=BF16, width=64, out=96, bias=False)
    x = random(rows, 64, dtype=BF16, device=device)
    step = run(module, x, recipe)
    assert_linear(how, step, x, module.weight, None, step.grads)


@pytest.mark.parametrize("name", RECIPES)
def test_no_rows(name, device):
    """Zeros as weight gradient, an empty output."""
    module = build("Linear", device, dtype=BF16, width=64, out=96)
    step = run(module, random(0, 64, dtype=BF16, device=device), RECIPES[name][0])
    assert step.outputs[0].shape == (0, 96) and step.grads["x"].shape == (0, 64)
    assert not step.grads["weight"].any() and not step.grads["bias"].any()


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith(("block", "nvfp4"))])
def test_features_that_are_multiples_of_16_only(name, device):
    """The weight's columnwise buffer is padded, the gradient that it meets is not."""
    recipe, how = RECIPES[name]
    module = build("Linear", device, dtype=BF16, width=80, out=48)
    x = random(ROWS, 80, dtype=BF16, device=device)
    step = run(module, x, recipe)
    assert_linear(how, step, x, module.weight, module.bias, step.grads)


@pytest.mark.parametrize("name", ("block", "mxfp8", "nvfp4", "nvfp4_four_over_six"))
def test_blocks_without_values_and_with_outliers(name, device):
    """Zero rows, zero columns, and values that differ by many orders of magnitude."""
    recipe, how = RECIPES[name]
    module = build("Linear", device, dtype=BF16, width=WIDTH, out=OUT)
    x = random(ROWS, WIDTH, device=device)
    x = x * 10.0 ** random(ROWS, WIDTH, device=device, seed=1).clamp(-2, 2)
    x[5:40], x[:, 32:70] = 0.0, 0.0
    with torch.no_grad():
        module.weight[:, 64:100] = 0.0
        module.weight[3] *= 1000.0
    x = x.to(BF16)
    step = run(module, x, recipe)
    assert_linear(how, step, x, module.weight, module.bias, step.grads)


def test_recipes_differ(device):
    """What the recipes of one format change does reach the results, and the part that it should."""
    module = build("Linear", device, dtype=BF16, width=WIDTH, out=OUT)
    x = random(ROWS, WIDTH, dtype=BF16, device=device)
    with torch.no_grad():  # so that neighbours have different scales
        module.weight *= 4.0 ** (torch.arange(OUT, device=device) % 5)[:, None]
        module.weight *= 4.0 ** (torch.arange(WIDTH, device=device) % 3)
        x *= 4.0 ** (torch.arange(ROWS, device=device) % 3)[:, None]
    steps = {name: run(module, x, recipe) for name, (recipe, _) in RECIPES.items()}

    def equal(one, other):
        results = [(step.outputs[0], *step.grads.values()) for step in (steps[one], steps[other])]
        return [torch.equal(a, b) for a, b in zip(*results)]

    # Output, gradient of the input, of the weight, of the bias.
    assert equal("block", "block_fp32_scales") == [False, False, False, True]
    assert equal("mxfp8", "mxfp8_hybrid") == [True, False, False, True]
    assert equal("mxfp8", "mxfp8_2d") == [False, False, True, True]
    assert equal("nvfp4", "nvfp4_without_rht") == [True, True, False, True]
    assert equal("nvfp4", "nvfp4_1d") == [False, False, True, True]
    assert equal("nvfp4_without_rht", "nvfp4_row_scaled") == [False, True, False, True]
    assert equal("nvfp4", "nvfp4_four_over_six_weights") == [False, False, True, True]
    assert equal("nvfp4_without_rht", "nvfp4_four_over_six") == [False, False, False, True]


# --- LayerNormLinear ------------------------------------------------------------------------------


def norm_grads(module, x, dln):
    """float64 gradients of the norm's input, weight and bias for the gradient ``dln``."""
    names = ("layer_norm_weight", "layer_norm_bias")
    params = {name: references.leaf64(getattr(module, name, None)) for name in names}
    x = references.leaf64(x)
    arguments = (module.eps, module.zero_centered_gamma, module.normalization)
    references.norm(x, *params.values(), *arguments).backward(dln)
    return {"x": x.grad, **{name: p.grad for name, p in params.items() if p is not None}}


@pytest.mark.parametrize("dtype", (BF16, FP32), ids=str)
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("name", RECIPES)
def test_layernorm_linear(name, normalization, dtype, device):
    """The products take the norm output as returned; the norm's backward is that of the dgrad."""
    recipe, how = RECIPES[name]
    options = {"dtype": dtype, "width": WIDTH, "out": OUT, "normalization": normalization}
    module = build("LayerNormLinear", device, return_layernorm_output=True, **options)
    x = random(ROWS, WIDTH, dtype=dtype, device=device)
    step = run(module, x, recipe)
    ln_out, d_ln_out = step.outputs[1], step.dys[1].double()
    norm = [module.layer_norm_weight, module.layer_norm_bias, module.eps, False, normalization]
    norm[:2] = [None if p is None else p.detach().double() for p in norm[:2]]
    assert_near(ln_out, references.norm(x.double(), *norm), 2 * UNIT[dtype], "norm output")
    gemm = {key: step.grads[key] for key in ("weight", "bias")}
    assert_linear(how, step, ln_out, module.weight, module.bias, gemm)
    dy, w = step.dys[0].double(), module.weight.detach().double()
    a, b = dgrad_operands(how, dy, w, dtype)
    wanted = norm_grads(module, x, (a @ b.t()).to(dtype).double() + d_ln_out)
    band = 2.0**-8 if x.is_cuda and dtype == FP32 else 2 * UNIT[dtype] + 2.0**-18
    for key, grad in wanted.items():
        assert_near(step.grads[key], grad, band, f"gradient of {key}")

    quiet = build("LayerNormLinear", device, **options)
    one, other = run(module, x, recipe, [step.dys[0], None]), run(quiet, x, recipe, step.dys[:1])
    if x.is_cuda and dtype == FP32:
        # Two kernels and one fused one may differ in the last bit of fp32, and so in a scale.
        assert_near(one.outputs[0], other.outputs[0], 2.0**-8, "output")
        return
    assert torch.equal(one.outputs[0], other.outputs[0]), "the returned norm output changes y"
    for key, grad in other.grads.items():
        assert torch.equal(one.grads[key], grad), key


# --- LayerNormMLP ---------------------------------------------------------------------------------


def mlp_model(module, how: Roles, x, dy):
    """``(output, gradients)`` in float64, rounded to the dtype of ``x`` where modules store."""
    dtype = x.dtype
    x, dy = x.double(), dy.double()
    p = {key: param.detach().double() for key, param in module.named_parameters()}

    def stored(values):
        return values.to(dtype).double()

    def largest(values):
        """A global scale is that of the activation's result before it was rounded."""
        return references_block.float32(values.abs().max())

    shift = p.get("layer_norm_bias")
    norm = (p["layer_norm_weight"], shift, module.eps, False, module.normalization)
    ln_out = stored(references.norm(x, *norm))
    a, b = forward_operands(how, ln_out, p["fc1_weight"], dtype)
    h = stored(a @ b.t() + gemm_bias(module.fc1_bias, dtype))
    h = references.leaf64(h)
    exact = references.activation(h, module.activation)
    act, act_amax = stored(exact.detach()), largest(exact.detach())
    if how.override == "high_precision" or how.custom:
        act_amax = None
    a, b = forward_operands(how, act, p["fc2_weight"], dtype, act_amax)
    y = stored(a @ b.t() + gemm_bias(module.fc2_bias, dtype))

    a, b = wgrad_operands(how, dy, act, dtype, None, act_amax)
    grads = {"fc2_weight": a @ b.t(), "fc2_bias": dy.sum(0)}
    a, b = dgrad_operands(how, dy, p["fc2_weight"], dtype)
    exact.backward(stored(a @ b.t()))
    dh, dh_amax = stored(h.grad), None if how.custom else largest(h.grad)
    a, b = wgrad_operands(how, dh, ln_out, dtype, dh_amax)
    grads.update(fc1_weight=a @ b.t(), fc1_bias=dh.sum(0))
    a, b = dgrad_operands(how, dh, p["fc1_weight"], dtype, dh_amax)
    grads.update(norm_grads(module, x.to(dtype), stored(a @ b.t())))
    return y, grads


# Relative error allowed for codes on the other side of a rounding boundary. bf16 results differ by
# one rounding here and there, which FP4 turns into a quarter of a value. (Without any such code it
# is 1e-6 in fp32 and 2e-3, the rounding of the results, in bf16.)
BAND = {(FP32, "fp8"): 1e-3, (FP32, "fp4"): 1e-2, (BF16, "fp8"): 1e-2, (BF16, "fp4"): 5e-2}


def uses_fp4(how: Roles):
    """Whether any operand is NVFP4."""
    operands = [part for operand in (how.x, how.w, how.g) for part in (operand.row, operand.col)]
    return any(part is not None and part.kind == "nvfp4" for part in operands)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("activation", ("gelu", "swiglu"))
@pytest.mark.parametrize("name", RECIPES)
def test_layernorm_mlp(name, activation, dtype, device):
    """Both GEMMs and what is between them, forward and backward."""
    recipe, how = RECIPES[name]
    options = {"activation": activation, "normalization": NORMS[activation == "swiglu"]}
    module = build("LayerNormMLP", device, dtype=dtype, width=WIDTH, ffn=FFN, **options)
    x = random(ROWS, WIDTH, dtype=dtype, device=device)
    step = run(module, x, recipe)
    y, grads = mlp_model(module, how, x, step.dys[0])
    band = BAND[dtype, "fp4" if uses_fp4(how) else "fp8"]
    if x.is_cuda:  # the 13 bits of the FP8 tensor cores' sums enter the next quantization
        band *= 5
    if x.is_cuda and dtype == FP32:
        band = max(band, 2.0**-6)  # tensor cores for FP8 truncate sums to about 14 bits
    assert_near(step.outputs[0], y, band, "output")
    assert step.grads.keys() == grads.keys()
    for key, grad in grads.items():
        assert_near(step.grads[key], grad, band, f"gradient of {key}")


# --- stochastic rounding --------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased(device):
    """The forward pass is that of nearest rounding; gradients are right on average, and only so."""
    module = build("Linear", device, dtype=FP32, width=64, out=64, bias=False)
    x = random(64, 64, device=device)
    nearest = run(module, x, nvfp4(disable_rht=True))
    recipe, means = NVFP4BlockScaling(disable_rht=True), {"x": 0.0, "weight": 0.0}
    first, draws = None, 64
    for seed in range(draws):
        torch.manual_seed(seed)
        step = run(module, x, recipe, nearest.dys, draws=None)
        assert torch.equal(step.outputs[0], nearest.outputs[0])
        means = {key: mean + step.grads[key] / draws for key, mean in means.items()}
        first = step if first is None else first
    dy, x, w = (t.detach().double() for t in (nearest.dys[0], x, module.weight))
    # Of the gradient itself nothing is lost on average; the other operands are rounded to nearest.
    exact = {
        "x": dy @ same(FP4_2D).columns(w, FP32).t(),
        "weight": dy.t() @ same(FP4).columns(x, FP32).t(),
    }
    for key, mean in means.items():
        once, rounded, averaged = (
            ((grad.double() - exact[key]).norm() / exact[key].norm()).item()
            for grad in (first.grads[key], nearest.grads[key], mean)
        )
        assert averaged < once / 5 and averaged < rounded / 3, (key, once, rounded, averaged)


def test_stochastic_rounding_follows_the_seed(device):
    """Equal seeds give equal bits, other seeds others; every draw of a step is another one."""
    module = build("LayerNormMLP", device, dtype=BF16, width=64, ffn=64)
    x, recipe, results = random(64, 64, dtype=BF16, device=device), NVFP4BlockScaling(), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        results.append(run(module, x, recipe, draws=None).grads)
    same_seed = [torch.equal(results[0][key], results[1][key]) for key in results[0]]
    assert all(same_seed)
    for key in ("x", "fc1_weight", "fc2_weight"):
        assert not torch.equal(results[0][key], results[2][key]), key
    torch.manual_seed(3)
    run(module, x, recipe, draws=None)
    again = run(module, x, recipe, draws=None).grads
    assert not torch.equal(again["fc2_weight"], results[0]["fc2_weight"])
