# SPDX-License-Identifier: Apache-2.0
"""Every shape and stride of inputs and gradients in eager, and special values."""

from functools import partial

import pytest
import torch
from eager_support import (
    BF16,
    DRAWS,
    FP16,
    FP32,
    GEMM_MODULES,
    K,
    MODULES,
    N,
    OTHER_CASES,
    OTHER_RECIPES,
    UNIT,
    assert_product,
    assert_steps_near,
    build,
    fp8_band,
    model,
    random,
    run,
)
from recipe_list import out_features, recipe_of
from references import Fp8

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

RECIPES = {"none": lambda: None, "current": Float8CurrentScaling, "delayed": DelayedScaling}
CASES = [(kind, r) for kind in MODULES for r in RECIPES if r == "none" or kind in GEMM_MODULES]
ALL_RECIPES = {**RECIPES, **{name: partial(recipe_of, name) for name in OTHER_RECIPES}}
ALL_CASES = CASES + OTHER_CASES


def width(kind, recipe="none"):
    """Width of the output of a test module."""
    return out_features(recipe, N) if kind in ("Linear", "LayerNormLinear") else K


def assert_same(step, expected):
    """Two steps on differently shaped inputs gave the same numbers."""
    for a, b in zip(step.outputs, expected.outputs):
        assert torch.equal(a.flatten(), b.flatten())
    for key, grad in expected.grads.items():
        assert torch.equal(step.grads[key].flatten(), grad.flatten()), key


# --- leading dimensions --------------------------------------------------------------------------


@pytest.mark.parametrize("kind,recipe", ALL_CASES)
@pytest.mark.parametrize("lead", ((12,), (3, 4), (2, 3, 2), (12, 1), (1, 12, 1, 1), (1,), (1, 1)))
def test_leading_dimensions(kind, recipe, lead, device):
    """The output has the leading dimensions of the input, and the numbers of the flattened one."""
    rows = 1
    for size in lead:
        rows *= size
    x = random(*lead, K, dtype=BF16, device=device)
    dy = random(rows, width(kind, recipe), seed=1, dtype=BF16, device=device)
    shaped = dy.view(*lead, width(kind, recipe))
    one, other = (make(kind, device, recipe) for _ in range(2))
    step = run(one, x, ALL_RECIPES[recipe](), [shaped])
    flat = run(other, x.view(rows, K), ALL_RECIPES[recipe](), [dy])
    assert step.outputs[0].shape == shaped.shape and step.grads["x"].shape == x.shape
    assert_same(step, flat)


def make(kind, device, recipe):
    """A bf16 module whose width fits the recipe."""
    options = {"recipe": recipe} if kind in GEMM_MODULES else {}
    return build(kind, device, dtype=BF16, **options)


@pytest.mark.parametrize("kind,recipe", ALL_CASES)
def test_one_dimensional_input(kind, recipe, device):
    """A vector gives ``[1, out]`` from a GEMM module, a vector from a norm; its gradient is one."""
    x = random(K, dtype=BF16, device=device)
    step = run(make(kind, device, recipe), x, ALL_RECIPES[recipe]())
    assert step.outputs[0].shape == ((1, width(kind, recipe)) if kind in GEMM_MODULES else (K,))
    assert step.grads["x"].shape == (K,)
    dy = step.dys[0].view(1, -1)
    other = make(kind, device, recipe)
    assert_same(step, run(other, x.view(1, K), ALL_RECIPES[recipe](), [dy]))


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
@pytest.mark.parametrize("lead", ((), (6,), (2, 3), (0,), (3, 0)))
def test_shape_of_the_norm_output(kind, lead, device):
    """It is that of the input."""
    module = build(kind, device, return_layernorm_output=True)
    x = random(*lead, K, device=device)
    step = run(module, x)
    assert step.outputs[1].shape == x.shape
    torch.testing.assert_close(
        step.outputs[1].reshape(-1, K),
        torch.nn.functional.layer_norm(
            x.reshape(-1, K), (K,), module.layer_norm_weight, module.layer_norm_bias
        ),
    )


@pytest.mark.parametrize("kind,recipe", ALL_CASES)
@pytest.mark.parametrize("lead", ((0,), (3, 0), (0, 0), (2, 0, 4)))
def test_no_rows(kind, recipe, lead, device):
    """Empty output and input gradient; zeros as parameter gradients; scales as before."""
    out = width(kind, recipe)
    module, recipe = make(kind, device, recipe), ALL_RECIPES[recipe]()
    if recipe is not None:
        run(module, random(8, K, dtype=BF16, device=device), recipe)
    scaling = getattr(module, "_delayed_scaling", None)
    before = None if scaling is None else [scaling.fwd_scale.clone(), scaling.bwd_scale.clone()]
    step = run(module, random(*lead, K, dtype=BF16, device=device), recipe)
    assert step.outputs[0].shape == (*lead, out) and step.outputs[0].dtype == BF16
    assert step.grads["x"].shape == (*lead, K)
    for name, param in module.named_parameters():
        assert step.grads[name].shape == param.shape and (step.grads[name] == 0).all()
    if before is not None:
        assert torch.equal(scaling.fwd_scale, before[0])
        assert torch.equal(scaling.bwd_scale, before[1])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", (FP32, BF16))
def test_linear_with_1_to_40_rows(recipe, dtype, device):
    """Every number of rows is exact under every recipe: no multiple is asked for."""
    module, recipe = build("Linear", device, dtype=dtype, bias=False), RECIPES[recipe]()
    w = module.weight.detach().double()
    for rows in range(1, 41):
        x = random(rows, K, dtype=dtype, device=device, seed=rows)
        scales = {}
        if recipe is not None and recipe.delayed():
            state = module.fp8_meta if module.fp8_initialized else None
            names = ("x_scale", "w_scale", "g_scale")
            values = (1.0, 1.0, 1.0)
            if state is not None:
                values = (
                    *state["scaling_fwd"].scale.tolist()[:2],
                    state["scaling_bwd"].scale[0].item(),
                )
            scales = dict(zip(names, values))
        step = run(module, x, recipe)
        operands = {"x": x.double(), "w": w, "g": step.dys[0].double()}
        if recipe is not None:
            operands = {key: Fp8(**scales).fake(value, key) for key, value in operands.items()}
        fp8 = recipe is not None
        assert_product(step.outputs[0], operands["x"], operands["w"], fp8=fp8)
        assert_product(step.grads["x"], operands["g"], operands["w"].t(), fp8=fp8)
        assert_product(step.grads["weight"], operands["g"].t(), operands["x"].t(), fp8=fp8)


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_modules_with_1_to_40_rows(kind, recipe, device):
    """Against the float64 model; the band for FP8 is that of test_fp8_numerics.py."""
    activation = {"activation": "swiglu"} if kind == "LayerNormMLP" else {}
    for rows in (*range(1, 18), 31, 32, 33, 40):
        module = build(kind, device, **activation)
        x, active = random(rows, K, device=device, seed=rows), RECIPES[recipe]()
        step = run(module, x, active)
        fp8 = None
        if recipe != "none":
            fp8 = Fp8(x_scale=1.0, w_scale=1.0, g_scale=1.0) if recipe == "delayed" else Fp8()
            fp8 = (fp8, fp8) if kind == "LayerNormMLP" else fp8
        want = model(module, x, step.dys, fp8, FP32 if fp8 else None)
        assert_steps_near(step, want, fp8_band(FP32, device) if fp8 else 16 * UNIT[FP32], FP32)


# --- strides -------------------------------------------------------------------------------------

VIEWS = {
    "transposed": (lambda t: t.t(), (K, 12)),
    "every second column": (lambda t: t[:, ::2], (12, 2 * K)),
    "every second row": (lambda t: t[::2], (24, K)),
    "offset by one element": (lambda t: t[:, 1:], (12, K + 1)),
    "expanded rows": (lambda t: t.expand(12, K), (1, K)),
    "expanded columns": (lambda t: t.expand(12, K), (12, 1)),
    "permuted": (lambda t: t.permute(1, 2, 0), (K, 3, 4)),
    "swapped leading": (lambda t: t.transpose(0, 1), (3, 4, K)),
    "unaligned storage": (lambda t: t[1:].view(12, K), (12 * K + 1,)),
}


@pytest.mark.parametrize("kind,recipe", ALL_CASES)
@pytest.mark.parametrize("view", VIEWS)
def test_strided_inputs(kind, recipe, view, device):
    """The numbers of a contiguous copy, and the gradient arrives at the leaf."""
    function, shape = VIEWS[view]
    leaf = random(*shape, dtype=BF16, device=device, grad=True)
    module, active = make(kind, device, recipe), ALL_RECIPES[recipe]()
    x = function(leaf)
    with te.autocast(enabled=active is not None, recipe=active):
        y = module(x)
    dy = random(*y.shape, seed=1, dtype=BF16, device=device)
    torch.manual_seed(DRAWS)
    y.backward(dy)
    other = make(kind, device, recipe)
    expected = run(other, x.detach().contiguous(), ALL_RECIPES[recipe](), [dy])
    assert torch.equal(y, expected.outputs[0])
    for name, param in module.named_parameters():
        assert torch.equal(param.grad, expected.grads[name])
    other = leaf.detach().clone().requires_grad_()
    function(other).backward(expected.grads["x"])
    assert torch.equal(leaf.grad, other.grad)


GRADIENTS = {
    "transposed": lambda y: random(*y.shape[::-1], seed=1).permute(*range(y.dim())[::-1]),
    "expanded scalar": lambda y: torch.tensor(0.5).expand(y.shape),
    "expanded row": lambda y: random(y.shape[-1], seed=1).expand(y.shape),
    "expanded column": lambda y: random(*y.shape[:-1], 1, seed=1).expand(y.shape),
    "every second column": lambda y: random(*y.shape[:-1], 2 * y.shape[-1], seed=1)[..., ::2],
}


@pytest.mark.parametrize("kind,recipe", ALL_CASES)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_strided_gradients(kind, recipe, gradient, device):
    """Output gradients of any strides, as ``sum()`` and ``transpose`` hand them back."""
    x = random(3, 5, K, dtype=BF16, device=device)
    results = []
    for contiguous in (False, True):
        module, active = make(kind, device, recipe), ALL_RECIPES[recipe]()
        leaf = x.clone().requires_grad_()
        with te.autocast(enabled=active is not None, recipe=active):
            y = module(leaf)
        dy = GRADIENTS[gradient](y).to(y)
        if not contiguous:
            dy = GRADIENTS[gradient](y).to(y.device)
            dy = dy.to(BF16) if "expanded" not in gradient else dy.to(BF16).expand(y.shape)
        torch.manual_seed(DRAWS)
        y.backward(dy.contiguous() if contiguous else dy)
        results.append([leaf.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*results):
        assert a.is_contiguous() and torch.equal(a, b)


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
def test_strided_gradient_of_the_norm_output(kind, device):
    """The second output's gradient may have any strides too."""
    results = []
    for contiguous in (False, True):
        module = build(kind, device, return_layernorm_output=True)
        x = random(12, K, device=device, grad=True)
        y, ln_out = module(x)
        d_ln = random(K, 12, seed=2, device=device).t()
        d_ln = d_ln.contiguous() if contiguous else d_ln
        torch.autograd.backward((y, ln_out), (torch.ones_like(y), d_ln))
        results.append([x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))


# --- feature dimensions --------------------------------------------------------------------------

SIZES = (100, 712, 896)


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("width_in", SIZES)
@pytest.mark.parametrize("width_out", SIZES)
def test_widths_in_high_precision(kind, width_in, width_out, device):
    """Any width works."""
    module = build(kind, device, width=width_in, out=width_out, ffn=width_out)
    x = random(7, width_in, device=device)
    step = run(module, x)
    assert_steps_near(step, model(module, x, step.dys), 16 * UNIT[FP32], FP32)


@pytest.mark.parametrize("sizes", ((3, 5), (1, 1), (69, 37), (17, 1)), ids=str)
@pytest.mark.parametrize("dtype", (FP32, BF16, FP16))
def test_odd_widths_in_high_precision(sizes, dtype, device):
    """Down to one column."""
    module = build("LayerNormMLP", device, width=sizes[0], ffn=sizes[1], dtype=dtype)
    x = random(11, sizes[0], device=device, dtype=dtype)
    step = run(module, x)
    assert step.outputs[0].shape == x.shape and all(t.isfinite().all() for t in step.outputs)
    if sizes[0] > 1:
        want = model(module, x, step.dys, dtype=None if dtype == FP32 else dtype)
        assert_steps_near(step, want, (16 if dtype == FP32 else 4) * UNIT[dtype], dtype)


@pytest.mark.parametrize("recipe", (Float8CurrentScaling, DelayedScaling))
@pytest.mark.parametrize("width_in,width_out", ((896, 712), (896, 896), (16, 8), (32, 104)))
def test_widths_that_fit_fp8(recipe, width_in, width_out, device):
    """Inputs in multiples of 16, outputs in multiples of 8."""
    module = build("Linear", device, width=width_in, out=width_out, bias=False)
    x = random(7, width_in, device=device)
    step = run(module, x, recipe())
    scale = 1.0 if recipe is DelayedScaling else None
    fp8 = Fp8(x_scale=scale, w_scale=scale, g_scale=scale)
    x, w = fp8.fake(x.double(), "x"), fp8.fake(module.weight.detach().double(), "w")
    dy = fp8.fake(step.dys[0].double(), "g")
    assert_product(step.outputs[0], x, w, fp8=True)
    assert_product(step.grads["x"], dy, w.t(), fp8=True)
    assert_product(step.grads["weight"], dy.t(), x.t(), fp8=True)


@pytest.mark.parametrize(
    "recipe", (Float8CurrentScaling(), DelayedScaling()), ids=("current", "delayed")
)
@pytest.mark.parametrize(
    "kind,sizes,dimension,label,size,multiple,cure",
    [
        ("Linear", {"width": 100}, 1, "weight of Linear", 100, 16, 112),
        ("Linear", {"width": 712}, 1, "weight of Linear", 712, 16, 720),
        ("Linear", {"out": 100}, 0, "weight of Linear", 100, 8, 104),
        ("LayerNormLinear", {"width": 72}, 1, "weight of LayerNormLinear", 72, 16, 80),
        ("LayerNormLinear", {"out": 33}, 0, "weight of LayerNormLinear", 33, 8, 40),
        ("LayerNormMLP", {"width": 712}, 1, "FC1 weight of LayerNormMLP", 712, 16, 720),
        ("LayerNormMLP", {"ffn": 100}, 0, "FC1 weight of LayerNormMLP", 100, 8, 112),
        ("LayerNormMLP", {"ffn": 712}, 1, "FC2 weight of LayerNormMLP", 712, 16, 720),
    ],
)
def test_widths_that_do_not_fit_fp8(recipe, kind, sizes, dimension, label, size, multiple, cure):
    """The error names tensor, dimension, value, multiple and cure; nothing was changed by then."""
    assert_refused(recipe, kind, sizes, dimension, label, size, multiple, cure)


@pytest.mark.parametrize(
    "recipe,kind,sizes,dimension,label,size,multiple,cure",
    [
        ("block", "Linear", {"width": 712}, 1, "weight of Linear", 712, 16, 720),
        ("mxfp8", "Linear", {"width": 48, "out": 64}, 1, "weight of Linear", 48, 32, 64),
        ("mxfp8", "LayerNormLinear", {"out": 48}, 0, "weight of LayerNormLinear", 48, 32, 64),
        ("mxfp8_dq", "LayerNormMLP", {"ffn": 48}, 0, "FC1 weight of LayerNormMLP", 48, 32, 64),
        ("nvfp4", "Linear", {"width": 72}, 1, "weight of Linear", 72, 16, 80),
        ("nvfp4", "LayerNormMLP", {"ffn": 72}, 0, "FC1 weight of LayerNormMLP", 72, 16, 80),
        # The forward GEMM is MXFP8, and only the orientation for dgrad is not.
        ("custom_two_formats", "Linear", {"out": 48}, 0, "weight of Linear", 48, 32, 64),
    ],
)
def test_widths_that_do_not_fit_blocks(recipe, kind, sizes, dimension, label, size, multiple, cure):
    """The same for recipes with scales of blocks."""
    assert_refused(recipe_of(recipe), kind, sizes, dimension, label, size, multiple, cure)


def assert_refused(recipe, kind, sizes, dimension, label, size, multiple, cure):
    """The body of both tests above."""
    module = build(kind, name="layers.3", **sizes)
    x = random(8, sizes.get("width", K))
    text = (
        f"^FP8 execution requires dimension {dimension} of the {label} 'layers.3' to be a multiple"
        f" of {multiple}, but it is {size} .*Use {cure}"
    )
    with te.autocast(recipe=recipe), pytest.raises(ValueError, match=text):
        module(x)
    assert module(x).isfinite().all() and not module._fp8_workspaces
    if module._delayed_scaling is not None:
        assert (module._delayed_scaling.fwd_scale == 1).all()


# --- special values ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,recipe", ALL_CASES)
def test_zeros(kind, recipe, device):
    """Zero inputs, weights and gradients give no NaN; a scale of a zero tensor is one."""
    options = {"recipe": recipe} if kind in GEMM_MODULES else {}
    module, active = build(kind, device, **options), ALL_RECIPES[recipe]()
    x = torch.zeros(16, K, device=device)
    step = run(module, x, active)
    assert all(t.isfinite().all() for t in (*step.outputs, *step.grads.values()))
    if kind == "Linear":
        bias = module.bias if recipe == "none" else module.bias.to(BF16).float()
        assert torch.equal(step.outputs[0], bias.expand(16, -1))
        assert (step.grads["weight"] == 0).all()
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    for _ in range(2):
        step = run(
            module,
            random(16, K, device=device),
            active,
            [torch.zeros(16, width(kind, recipe), device=device)],
        )
        assert all((t == 0).all() for t in (*step.outputs, *step.grads.values()))


@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("value", (1e4, 3e38, 1e-30, 1e-38, float("inf"), -float("inf")), ids=str)
def test_one_outlier_with_current_scaling(value, dtype, device):
    """The largest element sets the scale; an infinite one gives scale 1 and saturates."""
    module = build("Linear", device, dtype=dtype, bias=False)
    x = random(16, K, dtype=dtype, device=device)
    if abs(value) < 1:
        x = x * value
    else:
        x[3, 5] = value
    step = run(module, x, Float8CurrentScaling())
    operands = {"x": x.double(), "w": module.weight.detach().double(), "g": step.dys[0].double()}
    operands = {key: Fp8().fake(tensor, key) for key, tensor in operands.items()}
    if value in (float("inf"), -float("inf")):
        assert operands["x"][3, 5] == (448.0 if value > 0 else -448.0)
    if value == 3e38:  # row 3 overflows, as it does without quantization
        assert step.outputs[0][[*range(3), *range(4, 16)]].isfinite().all()
        return
    if value == 1e-38:  # scale and result are subnormal: the scale stops at the largest fp32
        want = operands["x"] @ operands["w"].t()
        assert ((step.outputs[0].double() - want).abs() < 1e-39).all() and want.abs().max() > 1e-38
        return
    assert_product(step.outputs[0], operands["x"], operands["w"], fp8=True)
    assert_product(step.grads["x"], operands["g"], operands["w"].t(), fp8=True)
    assert_product(step.grads["weight"], operands["g"].t(), operands["x"].t(), fp8=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_stays_where_it_is(recipe, device):
    """A NaN spoils its row of the output and its column of the weight gradient, and no scale."""
    module, clean = build("Linear", device, bias=False), build("Linear", device, bias=False)
    x = random(16, K, device=device)
    x[3, 5] = 0.0
    expected = run(clean, x, RECIPES[recipe]())
    x[3, 5] = float("nan")
    step = run(module, x, RECIPES[recipe]())
    y, others = step.outputs[0], [row for row in range(16) if row != 3]
    assert y[3].isnan().all() and torch.equal(y[others], expected.outputs[0][others])
    assert torch.equal(step.grads["x"], expected.grads["x"])
    dw, others = step.grads["weight"], [column for column in range(K) if column != 5]
    assert dw[:, 5].isnan().all()
    assert torch.equal(dw[:, others], expected.grads["weight"][:, others])
    if recipe == "delayed":
        for name in ("fwd_scale", "fwd_history", "bwd_scale"):
            assert torch.equal(
                getattr(module._delayed_scaling, name), getattr(clean._delayed_scaling, name)
            )


def test_infinite_gradient_and_delayed_scaling(device):
    """An overflowed step keeps the old scales; later steps recover when it leaves the history."""
    module, recipe = build("Linear", device), DelayedScaling(amax_history_len=2)
    x, dy = random(16, K, device=device), random(16, N, seed=1, device=device)
    run(module, x, recipe, [dy])
    state = module._delayed_scaling
    scale = state.bwd_scale[0].item()
    bad = dy.clone()
    bad[2, 3] = float("inf")
    step = run(module, x, recipe, [bad])
    assert state.bwd_scale[0].item() == scale and state.fwd_scale.isfinite().all()
    assert step.grads["x"].isfinite().all() and step.grads["weight"].isfinite().all()
    run(module, x, recipe, [dy])
    run(module, x, recipe, [2 * dy])
    assert state.bwd_scale[0].item() == pytest.approx(scale / 2, rel=1e-6)
    assert state.bwd_history.isfinite().all()


EXTREME = [(kind, recipe) for kind in GEMM_MODULES for recipe in RECIPES] + OTHER_CASES


@pytest.mark.parametrize("kind,recipe", EXTREME)
@pytest.mark.parametrize("size", (1e-30, 1e-6, 1e4))
def test_extreme_sizes_stay_finite(kind, recipe, size, device):
    """Two training steps with tiny and with huge activations and gradients."""
    module, active = build(kind, device, recipe=recipe), ALL_RECIPES[recipe]()
    for seed in range(2):
        x = random(16, K, device=device, seed=seed) * size
        dy = random(16, width(kind, recipe), device=device, seed=5 + seed) * size
        step = run(module, x, active, [dy])
        assert all(t.isfinite().all() for t in (*step.outputs, *step.grads.values()))
