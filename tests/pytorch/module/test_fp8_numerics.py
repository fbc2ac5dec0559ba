# SPDX-License-Identifier: Apache-2.0
"""FP8 recipes against float64 arithmetic on operands that the test quantizes itself.

A GEMM of quantized operands is exact up to fp32 addition and one rounding, so ``Linear`` is checked
element by element at that level. In modules with a norm or an activation an intermediate result may
lie so close to a rounding boundary of FP8 that fp32 and float64 fall on different sides. One such
code is off by at most 1/8 of its value; `fp8_band` allows for some of them.
"""

import pytest
import torch
from eager_support import (
    BF16,
    FP16,
    FP32,
    GEMM_MODULES,
    K,
    N,
    NORMS,
    assert_near,
    assert_product,
    assert_steps_near,
    build,
    fp8_band,
    model,
    random,
    run,
)
import references
from references import Fp8

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    QParams,
)

ROWS = 24
FORMATS = {Format.HYBRID: "e5m2", Format.E4M3: "e4m3"}  # of the gradient; the rest is E4M3


def assert_linear(step, x, module, fp8, override=None):
    """All results of one step of ``Linear`` are products of the quantized operands."""
    dtype, dy = x.dtype, step.dys[0].double()
    x, w = x.double(), module.weight.detach().double()
    x_q, w_q, dy_q = fp8.fake(x, "x"), fp8.fake(w, "w"), fp8.fake(dy, "g")
    bias = None
    if module.use_bias and not module.return_bias:
        bias = module.bias.detach()
        # A quantized GEMM with fp32 results adds a bf16 bias.
        bias = (bias.to(BF16) if dtype == FP32 else bias).double()
    assert_product(step.outputs[0], x_q, w_q, bias, fp8=True)
    if override == "high_precision":
        x_q, w_q, dy_q = x, w, dy
    elif override == "dequantized":
        x_q, w_q, dy_q = x_q.to(dtype).double(), w_q.to(dtype).double(), dy
    assert_product(step.grads["x"], dy_q, w_q.t(), fp8=override is None)
    assert_product(step.grads["weight"], dy_q.t(), x_q.t(), fp8=override is None)
    if module.use_bias and not module.return_bias:
        ones = torch.ones(1, dy.shape[0], dtype=torch.float64, device=dy.device)
        assert_product(step.grads["bias"][None], ones, dy.t(), fp8=False)
    assert all(t.dtype == dtype for t in (*step.outputs, *step.grads.values()))


# --- Linear, current scaling ---------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (FP32, BF16, FP16))
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("pow2", (False, True))
@pytest.mark.parametrize("bias", (False, True))
def test_linear_current_scaling(dtype, fmt, pow2, bias, device):
    """Forward, dgrad and wgrad, for both formats and both kinds of scales."""
    module = build("Linear", device, dtype=dtype, bias=bias)
    x = random(ROWS, K, dtype=dtype, device=device) * 3
    step = run(module, x, Float8CurrentScaling(use_power_2_scales=pow2, fp8_format=fmt))
    assert_linear(step, x, module, Fp8(g=FORMATS[fmt], pow2=pow2))


def test_e4m3_and_e5m2_gradients_differ(device):
    """The format of the gradient reaches the backward GEMMs (a tolerance would hide it)."""
    module, x = build("Linear", device), random(ROWS, K, device=device)
    hybrid = run(module, x, Float8CurrentScaling())
    e4m3 = run(module, x, Float8CurrentScaling(fp8_format=Format.E4M3))
    assert torch.equal(hybrid.outputs[0], e4m3.outputs[0])
    exact = model(module, x, hybrid.dys)
    errors = [
        ((step.grads["x"].double() - exact.grads["x"]).norm() / exact.grads["x"].norm()).item()
        for step in (hybrid, e4m3)
    ]
    # Half a step of E5M2 is 1/8, of E4M3 1/16 of the value; the weight is E4M3 in both.
    assert 0.03 < errors[0] < 0.09 and 0.015 < errors[1] < 0.05


@pytest.mark.parametrize(
    "slot,role",
    [("fp8_quant_fwd_inp", "x"), ("fp8_quant_fwd_weight", "w"), ("fp8_quant_bwd_grad", "g")],
)
def test_quantization_parameters_of_one_tensor(slot, role, device):
    """``QParams`` assigned to a recipe act on the tensor that they name, and on no other."""
    recipe = Float8CurrentScaling()
    setattr(recipe, slot, QParams(power_2_scale=True, amax_epsilon=50.0))
    module, x = build("Linear", device, bias=False), random(ROWS, K, device=device)
    step = run(module, x, recipe)
    plain, special = Fp8(), Fp8(pow2=True, eps=50.0)
    operands = {}
    for name, tensor in (("x", x), ("w", module.weight.detach()), ("g", step.dys[0])):
        operands[name] = (special if name == role else plain).fake(tensor.double(), name)
    assert_product(step.outputs[0], operands["x"], operands["w"], fp8=True)
    assert_product(step.grads["x"], operands["g"], operands["w"].t(), fp8=True)
    assert_product(step.grads["weight"], operands["g"].t(), operands["x"].t(), fp8=True)


@pytest.mark.parametrize("override", ("high_precision", "dequantized"))
@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("bias", (False, True))
def test_linear_backward_override(override, dtype, bias, device):
    """Quantized forward, high-precision backward, of the original or the dequantized operands."""
    module = build("Linear", device, dtype=dtype, bias=bias)
    x = random(ROWS, K, dtype=dtype, device=device)
    step = run(module, x, Float8CurrentScaling(backward_override=override))
    assert_linear(step, x, module, Fp8(), override)


def test_backward_override_can_change_between_calls(device):
    """It is read at forward and counts for that forward's backward."""
    module, x = build("Linear", device), random(ROWS, K, device=device)
    recipe = Float8CurrentScaling()
    for override in (None, "high_precision", "dequantized", None):
        recipe.backward_override = override
        assert_linear(run(module, x, recipe), x, module, Fp8(), override)


# --- Linear, delayed scaling ---------------------------------------------------------------------


class Delayed:
    """Delayed scaling of one tensor, simulated: the history as a list, newest last."""

    def __init__(self, fmt, recipe):
        self.largest = references.FP8_MAX[fmt]
        self.recipe, self.history, self.scale = recipe, [], 1.0

    def see(self, tensor):
        """The end of a step in which ``tensor`` was quantized."""
        amax = tensor.abs().max().item()
        if amax == 0:
            return
        self.history = [*self.history, amax][-self.recipe.amax_history_len :]
        amax = max(self.history) if self.recipe.amax_compute_algo == "max" else amax
        quotient = torch.tensor(self.largest * 2.0**-self.recipe.margin, dtype=torch.float64) / amax
        self.scale = quotient.float().item()


@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize(
    "fmt,algo,length,margin",
    [
        (Format.HYBRID, "max", 3, 0),
        (Format.HYBRID, "most_recent", 3, 1),
        (Format.E4M3, "max", 2, 2),
        (Format.E4M3, "most_recent", 1, 0),
        (Format.HYBRID, "max", 1, 0),
    ],
)
def test_linear_delayed_scaling(dtype, fmt, algo, length, margin, device):
    """Seven steps: the scales of each come from the amaxes of the steps before, to the last bit."""
    module = build("Linear", device, dtype=dtype)
    recipe = DelayedScaling(
        margin=margin, fp8_format=fmt, amax_history_len=length, amax_compute_algo=algo
    )
    tensors = {"x": Delayed("e4m3", recipe), "w": Delayed("e4m3", recipe)}
    tensors["g"] = Delayed(FORMATS[fmt], recipe)
    for i, size in enumerate((1.0, 8.0, 0.5, 0.0, 2.0, 2.0, 1e-3)):
        x = random(ROWS, K, dtype=dtype, device=device, seed=i) * size
        dy = random(ROWS, N, dtype=dtype, device=device, seed=50 + i) * size
        scales = {f"{key}_scale": tensor.scale for key, tensor in tensors.items()}
        step = run(module, x, recipe, dys=[dy])
        assert_linear(step, x, module, Fp8(g=FORMATS[fmt], **scales))
        for key, tensor in (("x", x), ("w", module.weight), ("g", dy)):
            tensors[key].see(tensor.double())
        forward, backward = module.fp8_meta["scaling_fwd"], module.fp8_meta["scaling_bwd"]
        assert forward.scale.tolist() == [tensors["x"].scale, tensors["w"].scale, 1.0]
        assert backward.scale.tolist() == [tensors["g"].scale, 1.0]
        assert (forward.amax_history[0] == 0).all() and forward.amax_history.shape == (length, 3)
        kept = [] if length == 1 else tensors["x"].history[1 - length :]
        assert forward.amax_history[length - len(kept) :, 0].tolist() == kept


def test_one_region_with_two_uses(device):
    """Both uses take the old scales; history and scales move by one step, with the larger amax."""
    module = build("Linear", device, out=K, bias=False)
    recipe = DelayedScaling(amax_history_len=4)
    x = random(ROWS, K, device=device)
    run(module, x, recipe)
    state = module._delayed_scaling
    scales = {"x_scale": state.fwd_scale[0].item(), "w_scale": state.fwd_scale[1].item()}
    fp8 = Fp8(**scales, g_scale=state.bwd_scale[0].item())
    first, second = x.clone().requires_grad_(), (3 * x).requires_grad_()
    dys = [random(ROWS, K, device=device, seed=seed) * size for seed, size in ((7, 5.0), (8, 1.0))]
    with te.autocast(recipe=recipe):
        outputs = [module(first), module(second)]
    torch.autograd.backward(outputs, dys)
    w = fp8.fake(module.weight.detach().double(), "w")
    for leaf, y, dy in zip((first, second), outputs, dys):
        assert_product(y, fp8.fake(leaf.detach().double(), "x"), w, fp8=True)
        assert_product(leaf.grad, fp8.fake(dy.double(), "g"), w.t(), fp8=True)
    amaxes = [second.detach().abs().max().item(), max(dy.abs().max().item() for dy in dys)]
    for history, amax in zip((state.fwd_history, state.bwd_history), amaxes):
        # One row per step: the first step, this step; the row in use and the oldest are zero.
        assert history[3, 0] == amax and history[2, 0] > 0 and (history[:2, 0] == 0).all()
    assert state.bwd_scale[0].item() == torch.tensor(57344 / amaxes[1]).item()


def test_delayed_scaling_saturates(device):
    """A value beyond the range of the old scale becomes the largest code, not infinity or NaN."""
    module = build("Linear", device, bias=False)
    recipe = DelayedScaling()
    run(module, torch.ones(16, K, device=device), recipe)
    scale = module.fp8_meta["scaling_fwd"].scale.clone()
    x = random(16, K, device=device) * 100
    step = run(module, x, recipe)
    w = Fp8(x_scale=1.0, w_scale=scale[1].item()).fake(module.weight.detach().double(), "w")
    clipped = Fp8(x_scale=scale[0].item(), w_scale=1.0).fake(x.double(), "x")
    # The largest code, 448, times the reciprocal of the scale, which is 448 for a step of ones.
    largest = 448 * (1 / scale[0].cpu()).item()
    assert scale[0] == 448 and (clipped.abs() == largest).double().mean() > 0.9
    assert clipped.abs().max() == largest
    assert_product(step.outputs[0], clipped, w, fp8=True)


def test_delayed_scaling_does_not_move_without_gradients(device):
    """Inference uses the scales that training left, and leaves them."""
    module, recipe = build("Linear", device), DelayedScaling(amax_history_len=2)
    x = random(ROWS, K, device=device)
    run(module, x, recipe)
    scales = module.fp8_meta["scaling_fwd"].scale.clone()
    with torch.no_grad(), te.autocast(recipe=recipe):
        first = module(x)
        module(100 * x)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(module(x), first)
    assert torch.equal(module.fp8_meta["scaling_fwd"].scale, scales)


def test_calibration(device):
    """``enabled=False, calibrating=True`` computes in high precision and records amaxes."""
    module, recipe = build("Linear", device), DelayedScaling()
    x = random(ROWS, K, device=device)
    expected = module(x)
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        assert torch.equal(module(x), expected)
    history = module.fp8_meta["scaling_fwd"].amax_history
    assert history.max(0).values.tolist()[:2] == [
        x.abs().max().item(),
        module.weight.abs().max().item(),
    ]


# --- modules with a norm -------------------------------------------------------------------------


def fp8_of(module, recipe):
    """The model's quantization for the next step of ``module``: formats, and its present scales."""
    grad = FORMATS[recipe.fp8_format]
    if not recipe.delayed():
        fp8 = Fp8(g=grad, pow2=recipe.use_power_2_scales)
        return (fp8, fp8) if module.num_gemms == 2 else fp8
    forward = module.fp8_meta["scaling_fwd"].scale.tolist()
    backward = module.fp8_meta["scaling_bwd"].scale.tolist()
    pairs = [
        Fp8(g=grad, x_scale=forward[3 * i], w_scale=forward[3 * i + 1], g_scale=backward[2 * i])
        for i in range(module.num_gemms)
    ]
    return tuple(pairs) if module.num_gemms == 2 else pairs[0]


MODULE_OPTIONS = (
    {},
    {"normalization": "RMSNorm", "bias": False},
    {"zero_centered_gamma": True, "return_layernorm_output": True},
    {"normalization": "RMSNorm", "return_bias": True, "return_layernorm_output": True},
)


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("options", MODULE_OPTIONS, ids=str)
def test_modules_with_current_scaling(kind, dtype, fmt, options, device):
    """Outputs and gradients, among them those through the returned norm output."""
    activation = {"activation": "swiglu"} if kind == "LayerNormMLP" else {}
    module = build(kind, device, dtype=dtype, **options, **activation)
    recipe = Float8CurrentScaling(fp8_format=fmt)
    x = random(ROWS, K, dtype=dtype, device=device)
    step = run(module, x, recipe)
    want = model(module, x, step.dys, fp8_of(module, recipe), dtype)
    assert_steps_near(step, want, fp8_band(dtype, device), dtype)


@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
@pytest.mark.parametrize("dtype", (FP32, BF16))
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("options", MODULE_OPTIONS, ids=str)
def test_modules_with_delayed_scaling(kind, dtype, fmt, options, device):
    """The fourth step, with the scales that three steps left."""
    activation = {"activation": "geglu"} if kind == "LayerNormMLP" else {}
    module = build(kind, device, dtype=dtype, **options, **activation)
    recipe = DelayedScaling(fp8_format=fmt, amax_history_len=2)
    for i in range(3):
        run(module, random(ROWS, K, dtype=dtype, device=device, seed=i), recipe)
    fp8 = fp8_of(module, recipe)
    x = random(ROWS, K, dtype=dtype, device=device, seed=9)
    step = run(module, x, recipe)
    assert_steps_near(step, model(module, x, step.dys, fp8, dtype), fp8_band(dtype, device), dtype)


@pytest.mark.parametrize(
    "recipe", (Float8CurrentScaling(), DelayedScaling()), ids=("current", "delayed")
)
@pytest.mark.parametrize("activation", references.ACTIVATIONS)
def test_activations(recipe, activation, device):
    """All twelve activations between two quantized GEMMs."""
    module = build("LayerNormMLP", device, activation=activation)
    x = random(ROWS, K, device=device)
    if recipe.delayed():
        run(module, x, recipe)
    fp8 = fp8_of(module, recipe)
    step = run(module, x, recipe)
    assert_steps_near(step, model(module, x, step.dys, fp8, FP32), fp8_band(FP32, device), FP32)


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("override", ("high_precision", "dequantized"))
@pytest.mark.parametrize("want", (False, True))
def test_layernorm_linear_backward_override(normalization, override, want, device):
    """Quantized forward; backward GEMMs of the norm output, or of its dequantized codes."""
    module = build(
        "LayerNormLinear", device, normalization=normalization, return_layernorm_output=want
    )
    x = random(ROWS, K, device=device)
    step = run(module, x, Float8CurrentScaling(backward_override=override))
    forward = model(module, x, step.dys, Fp8(), FP32)
    for i, output in enumerate(forward.outputs):
        assert_near(step.outputs[i], output, fp8_band(FP32, device), f"output {i}")
    # The backward of the module is that of a high-precision one with other operands: with the
    # dequantized weight, and with the dequantized norm output in place of the norm output.
    backward = build(
        "LayerNormLinear", device, normalization=normalization, return_layernorm_output=want
    )
    normalized = model(backward, x, step.dys)  # of the plain module
    ln_out = references.norm(
        x.double(),
        module.layer_norm_weight.detach().double(),
        None if module.layer_norm_bias is None else module.layer_norm_bias.detach().double(),
        module.eps,
        False,
        normalization,
    )
    if override == "dequantized":
        with torch.no_grad():
            backward.weight.copy_(Fp8().fake(module.weight.detach().double(), "w"))
        normalized = model(backward, x, step.dys)
        ln_out = Fp8().fake(ln_out.float(), "x")
    weight_grad = step.dys[0].double().t() @ ln_out
    limit = 1e-5 if override == "high_precision" else fp8_band(FP32, device)
    assert_near(step.grads["weight"], weight_grad, limit, "gradient of weight")
    for key in step.grads.keys() - {"weight"}:
        assert_near(step.grads[key], normalized.grads[key], 1e-5, f"gradient of {key}")


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize("recipe", (Float8CurrentScaling, DelayedScaling))
def test_repeated_steps_are_equal(kind, recipe, device):
    """Two copies of a module give the same bits over several steps."""
    results = []
    for _ in range(2):
        module, recipe_, steps = build(kind, device, dtype=BF16), recipe(), []
        for i in range(3):
            x = random(ROWS, K, dtype=BF16, device=device, seed=i)
            step = run(module, x, recipe_)
            steps += [*step.outputs, *step.grads.values()]
        results.append(steps)
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("kind", GEMM_MODULES)
@pytest.mark.parametrize(
    "recipe", (Float8CurrentScaling(), DelayedScaling()), ids=("current", "delayed")
)
def test_disabled_inside_enabled_is_high_precision(kind, recipe, device):
    """An inner ``enabled=False`` gives the bits of a module outside of any context."""
    module, x = build(kind, device, dtype=BF16), random(ROWS, K, dtype=BF16, device=device)
    expected = module(x)
    with te.autocast(recipe=recipe):
        quantized = module(x)
        with te.autocast(enabled=False):
            assert torch.equal(module(x), expected)
        assert not torch.equal(quantized, expected)
