# SPDX-License-Identifier: Apache-2.0
"""What the eager module tests share: random modules, their float64 models, and error measures."""

from typing import NamedTuple, Optional

import recipe_list
import torch
import references

import transformer_engine.pytorch as te

K, N, FFN = 64, 48, 96  # width of the input, of a linear layer's output, of the MLP
GEMM_MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP")
NORMS = ("LayerNorm", "RMSNorm")
MODULES = (*GEMM_MODULES, *NORMS)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Largest relative error of rounding to the format: 2^-p for a significand of p bits.
OTHER_RECIPES = (*recipe_list.BLOCKS, *recipe_list.OVERRIDES, *recipe_list.CUSTOM)
# Each on one module, for what need not be tried with all pairs.
OTHER_CASES = [(GEMM_MODULES[i % 3], recipe) for i, recipe in enumerate(OTHER_RECIPES)]
DRAWS = 77  # seed of the stochastic rounding of each pass
UNIT = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}


def build(
    kind, device="cpu", seed=0, dtype=FP32, width=K, out=None, ffn=FFN, recipe="none", **options
):
    """A module all of whose parameters are random: norm weights and biases too.

    ``recipe``: name of the recipe that it will run with, which its output width must fit.
    """
    out = recipe_list.out_features(recipe, N) if out is None else out
    sizes = {"Linear": (width, out), "LayerNormLinear": (width, out), "LayerNormMLP": (width, ffn)}
    module = getattr(te, kind)(
        *sizes.get(kind, (width,)), params_dtype=dtype, device=device, **options
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in module.named_parameters():
            values = torch.randn(param.shape, generator=generator)
            if param.dim() == 2:
                values = values / param.shape[1] ** 0.5
            elif name.endswith("norm_weight") or kind in NORMS and name == "weight":
                values = values * 0.2 + (0.0 if module.zero_centered_gamma else 1.0)
            param.copy_(values)
    return module


def random(*shape, device="cpu", seed=0, dtype=FP32, grad=False):
    """Normally distributed values, the same on every device."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(device).requires_grad_(grad)


def construct(kind, device="cpu", **options):
    """A small module as its constructor leaves it."""
    sizes = {"Linear": (32, 48), "LayerNormLinear": (32, 48), "LayerNormMLP": (32, 64)}
    return getattr(te, kind)(*sizes.get(kind, (32,)), device=device, **options)


class Step(NamedTuple):
    """Outputs of a forward pass, the gradients given to them, and those that backward left."""

    outputs: tuple
    dys: list
    grads: dict


def as_tuple(outputs) -> tuple:
    """Outputs of a module as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def output_grads(outputs, seed=1000) -> list:
    """A random gradient for every output, None for an output that has none."""
    return [
        None if y is None or not y.requires_grad else random(*y.shape, seed=seed + i).to(y)
        for i, y in enumerate(outputs)
    ]


def run(module, x, recipe=None, dys=None, draws=DRAWS, **arguments) -> Step:
    """One training step of ``module`` on a copy of ``x``; gradients are those of this step.

    ``draws``: seed of the stochastic rounding in each pass; None leaves the generator alone.
    """
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    if draws is not None:
        torch.manual_seed(draws)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        outputs = as_tuple(module(x, **arguments))
    dys = output_grads(outputs) if dys is None else dys
    pairs = [(y, dy) for y, dy in zip(outputs, dys) if dy is not None]
    if draws is not None:
        torch.manual_seed(draws)
    torch.autograd.backward(*zip(*pairs))
    grads = {name: param.grad for name, param in module.named_parameters()}
    detached = tuple(None if y is None else y.detach() for y in outputs)
    return Step(detached, dys, {"x": x.grad, **grads})


def model(module, x, dys, fp8=None, dtype=None) -> Step:
    """The same step by formulas in float64, of the values that the module holds.

    ``fp8``: None, an ``Fp8``, or a pair of them for LayerNormMLP; ``dtype``: what intermediate
    results are rounded to.
    """
    params = {name: references.leaf64(p) for name, p in module.named_parameters()}
    x = references.leaf64(x)
    outputs = _outputs(module, params, x, fp8, dtype)
    pairs = [(y, dy.double()) for y, dy in zip(outputs, dys) if dy is not None]
    torch.autograd.backward(*zip(*pairs))
    grads = {name: p.grad for name, p in params.items()}
    detached = tuple(None if y is None else y.detach() for y in outputs)
    return Step(detached, dys, {"x": x.grad, **grads})


def _outputs(module, params, x, fp8, dtype) -> tuple:
    """All outputs of the float64 model, in the module's order."""
    kind = type(module).__name__
    if kind in NORMS:
        return (references.norm(x, *_norm_arguments(module, params, "", kind)),)
    last = "fc2_bias" if kind == "LayerNormMLP" else "bias"
    bias = None if module.return_bias else _gemm_bias(params.get(last), fp8, dtype)
    if kind == "Linear":
        outputs = (references.linear(x, params["weight"], bias, fp8=fp8),)
    else:
        norm = _norm_arguments(module, params, "layer_norm_", module.normalization)
        options = dict(zip(("eps", "zero_centered", "normalization"), norm[2:]))
        want_norm = module.return_layernorm_output
        options.update(fp8=fp8, dtype=dtype, return_norm=want_norm)
        if kind == "LayerNormLinear":
            outputs = references.layernorm_linear(x, *norm[:2], params["weight"], bias, **options)
        else:
            gemms = (params["fc1_weight"], _gemm_bias(params.get("fc1_bias"), fp8, dtype))
            gemms += (params["fc2_weight"], bias)
            options["act"] = module.activation
            options.update(_clamps(module))
            outputs = references.layernorm_mlp(x, *norm[:2], *gemms, **options)
        outputs = as_tuple(outputs)
    extra = (params.get(last),) if module.return_bias else ()
    return (outputs[0], *extra, *outputs[1:])


def _norm_arguments(module, params, prefix, normalization) -> tuple:
    weight, bias = params[f"{prefix}weight"], params.get(f"{prefix}bias")
    return weight, bias, module.eps, module.zero_centered_gamma, normalization


def _gemm_bias(bias, fp8, dtype):
    """A quantized GEMM with fp32 results adds a bf16 bias; its gradient is not rounded."""
    if bias is None or fp8 is None or dtype not in (None, FP32):
        return bias
    return bias + (bias.to(BF16).double() - bias).detach()


def _clamps(module) -> dict:
    params = module.activation_params or {}
    names = {"limit": "limit", "alpha": "alpha", "glu_linear_offset": "offset"}
    return {names[key]: value for key, value in params.items()}


# --- state ---------------------------------------------------------------------------------------

STATE = ("fwd_scale", "fwd_history", "bwd_scale", "bwd_history")  # of delayed scaling


def train(module, recipe, steps):
    """All results of some training steps with an optimizer, and the scaling state after each."""
    results = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    param = next(module.parameters())
    for step in steps:
        x = random(16, K, dtype=param.dtype, device=param.device, seed=step)
        done = run(module, x, recipe)
        optimizer.step()
        results += [
            *done.outputs,
            *done.grads.values(),
            *(p.detach().clone() for p in module.parameters()),
        ]
        state = getattr(module, "_delayed_scaling", None)
        if state is not None:
            results += [getattr(state, field).clone() for field in STATE]
    return results


def assert_equal(a, b):
    """Two lists of tensors are equal bit by bit."""
    assert len(a) == len(b)
    for one, two in zip(a, b):
        assert one.dtype == two.dtype and torch.equal(one, two)


# --- errors --------------------------------------------------------------------------------------


def relative_error(got, want) -> float:
    """``||got - want|| / ||want||`` in float64."""
    want = want.double()
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-300)).item()


def assert_near(got, want, limit, what) -> None:
    """The relative error of the whole is at most ``limit``; no element is off by ten times that
    share of the largest one."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if want.numel() == 0:
        return
    error = relative_error(got, want)
    assert error <= limit, f"{what}: relative error {error:.3g} exceeds {limit:.3g}"
    worst = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-300)
    assert worst <= 10 * limit, f"{what}: largest error {worst:.3g} exceeds {10 * limit:.3g}"


def fp8_band(dtype, device) -> float:
    """Relative error allowed where a norm or an activation feeds a quantized GEMM.

    Its result may lie so close to a rounding boundary of FP8 that fp32 and float64 fall on two
    sides of it, which changes that code by up to 1/8. With bf16 the rounded scales differ more
    often, and on CUDA the 13 bits of the FP8 tensor cores' sums enter the next quantization.
    """
    return {FP32: 4e-3, BF16: 3e-2}[dtype] * (5 if device == "cuda" and dtype == FP32 else 1)


def assert_steps_near(got: Step, want: Step, limit, dtypes=None) -> None:
    """Outputs and gradients of two steps agree; ``dtypes`` is one dtype that all must have."""
    assert len(got.outputs) == len(want.outputs)
    assert got.grads.keys() == want.grads.keys()
    pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(got.outputs, want.outputs))]
    pairs += [(f"gradient of {key}", got.grads[key], want.grads[key]) for key in want.grads]
    for what, a, b in pairs:
        if b is None:
            assert a is None or a.numel() == 0, f"{what} is there, but should not be"
            continue
        assert a is not None, f"{what} is missing"
        assert dtypes is None or a.dtype == dtypes, f"{what} is {a.dtype}"
        assert_near(a, b, limit, what)


def assert_product(got, a, b, bias: Optional[torch.Tensor] = None, *, fp8: bool) -> None:
    """``got`` is ``a @ b^T (+ bias)`` of float64 operands, element by element.

    Allowed is one rounding to the dtype of ``got`` and the error of adding up in fp32: at most
    2^-24 of the sum of magnitudes per addition. On CUDA, FP8 tensor cores cut off each
    product 13 bits behind the largest of its group and the running sum, which adds up where all
    products have one sign: 2^-6.3 of the sum of magnitudes was seen on an H200 for 896 of them.
    """
    want = a @ b.t()
    magnitude = a.abs() @ b.abs().t()
    if bias is not None:
        want, magnitude = want + bias, magnitude + bias.abs()
    share = (a.shape[1] + 4) * 2.0**-24
    if fp8 and got.is_cuda:
        share = 2.0**-9 + a.shape[1] * 2.0**-16
    allowed = share * magnitude + UNIT[got.dtype] * want.abs()
    excess = ((got.double() - want).abs() - allowed).max() if want.numel() else -1
    assert excess <= 0, f"an element is off by {excess:.3g} more than allowed"
