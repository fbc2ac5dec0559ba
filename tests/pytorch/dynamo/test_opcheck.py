# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck on every op: schema, autograd registration, fakes, AOT, dynamic shapes."""

import itertools

import pytest
import torch

from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.core.config import operand_text
from transformer_engine.pytorch.core.ops import GRAPH
from transformer_engine.pytorch.core.weights import quantized_weight
from transformer_engine.pytorch.dynamo.custom_op import OPS, save_plan, saved_tensors
from transformer_engine.pytorch.core.weights import made_weights

CURRENT, DELAYED = "current,e4m3", "delayed,e4m3"
BLOCK, MXFP8, NVFP4 = "block,e4m3,pow2=1", "mxfp8,e4m3,swizzled=1", "nvfp4,e2m1,swizzled=1"
QUANTS = (
    CURRENT,
    "current,e5m2,pow2=1,eps=0.5",
    DELAYED,
    BLOCK,
    "block,e5m2,dim=2",
    MXFP8,
    "mxfp8,e5m2",
    "mxfp8,e4m3,dim=2,swizzled=1",
    "mxfp8,e4m3,dim=2",
    NVFP4,
    "nvfp4,e2m1,dim=2",
    "nvfp4,e2m1,rht=1",
    "nvfp4,e2m1,rht=1,sign_mask=0,stochastic=1",
    "nvfp4,e2m1,stochastic=1,dim=2",
    "nvfp4,e2m1,swizzled=1,row_scaled=1",
    "nvfp4,e2m1,four_over_six=mse",
    "nvfp4,e2m1,dim=2,four_over_six=mae,e4m3_max=256",
)
DETERMINISTIC = tuple(quant for quant in QUANTS if "stochastic" not in quant)
NORMS = ("LayerNorm", "RMSNorm")
M, K, N = 24, 64, 96


@pytest.fixture(autouse=True)
def constant_draws(monkeypatch):
    """Stochastic rounding draws the same numbers each time.

    ``opcheck`` runs an op several times and compares; without this, ops that draw could not take
    part in the check of AOTAutograd, which is the only one that runs module ops as leaf ops.
    """

    def constant(low, high, size, *, dtype, device):
        del low, high
        return torch.full(size, 1234567, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "randint", constant)


def tensor(device, *shape, dtype=torch.bfloat16, grad=False):
    """A random tensor."""
    return (torch.randn(*shape, device=device) * 0.5).to(dtype).requires_grad_(grad)


def scales(device, count):
    """Delayed-scaling scales that are powers of two, as a fresh vector."""
    return torch.full((count,), 2.0, device=device)


def scale_for(quant, device, count=6):
    """The scales that a quantization reads, None if it reads none."""
    return scales(device, count) if "delayed" in quant else None


def draw_for(quant, device):
    """The random state that a quantization reads, None if it reads none."""
    return torch.tensor([5, 6], device=device) if "stochastic" in quant else None


def quantized(x, quant):
    """Both orientations of ``x``, each as ``(data, scale_inv, amax)``."""
    row, col, scale_inv, col_scale_inv, amax, col_amax = GRAPH.quantize(
        x, quant, scale_for(quant, x.device), 1, None, True, True, draw_for(quant, x.device)
    )
    needed = quant.startswith("nvfp4")
    return (row, scale_inv, amax if needed else None), (
        col,
        scale_inv if col_scale_inv is None else col_scale_inv,
        col_amax if needed else None,
    )


# --- leaf ops -------------------------------------------------------------------------------------


def quantize_samples(device):
    """``(leaf, arguments)`` of plain quantization and its inverse."""
    x = tensor(device, M, K)
    amax = x.abs().amax().float().reshape(1)
    for quant in QUANTS:
        scale, rng = scale_for(quant, device, 3), draw_for(quant, device)
        for row, col in ((True, False), (False, True), (True, True)):
            yield "quantize", (x, quant, scale, 1, None, row, col, rng)
        for columnwise, (data, scale_inv, data_amax) in enumerate(quantized(x, quant)):
            args = (data, scale_inv, data_amax, quant, bool(columnwise), torch.bfloat16)
            yield "dequantize", args
    for quant in (CURRENT, NVFP4, "nvfp4,e2m1,rht=1"):
        yield "quantize", (x, quant, None, 0, amax, True, True, None)
    yield "quantize", (x, CURRENT, None, 0, None, False, False, None)
    yield "rng_state", (x,)
    yield "rng_state", (x, torch.tensor([5, 6], device=device), 1)


def norm_samples(device):
    """``(leaf, arguments)`` of the norms; nothing of theirs is rounded stochastically."""
    x, w, b = tensor(device, M, K), tensor(device, K), tensor(device, K)
    rstd = torch.ones(M, device=device)
    quants = ("", *DETERMINISTIC, "mxfp8,e4m3,unrounded=1", "mxfp8,e4m3,unrounded=2")
    for i, (quant, want) in enumerate(itertools.product(quants, (True, False))):
        kinds = NORMS if quant in ("", CURRENT, DELAYED) else (NORMS[i % 3 > 0],)
        for kind in kinds:
            bias, mean = (b, torch.zeros(M, device=device)) if kind == "LayerNorm" else (None, None)
            args = (1e-5, True, kind, quant, scale_for(quant, device, 3), 0)
            yield "norm_forward", (x, w, bias, *args, bool(quant), bool(quant) and want, want)
            if not quant:
                args = (mean, rstd, w, True, kind)
                yield "norm_backward", (x, x if want else None, x, *args, True, want)


def activation_samples(device):
    """``(leaf, arguments)`` of the activations."""
    x, h = tensor(device, M, K), tensor(device, M, 2 * K)
    for i, quant in enumerate(("", *QUANTS)):
        for act in ("gelu", "swiglu") if i < 4 else (("gelu", "swiglu")[i % 2],):
            dy = h if act == "gelu" else x
            args = (act, 7.0, 1.702, 1.0, quant, scale_for(quant, device), 3)
            layouts = (bool(quant), bool(quant) and i % 3 != 0)
            if quant in ("", *DETERMINISTIC):
                yield "activation_forward", (h, *args, *layouts, not quant)
            options = (not quant or i % 2 == 0, i % 4 != 3, draw_for(quant, device))
            yield "activation_backward", (dy, h, *args, *layouts, *options)


# What the two operands of a GEMM may be: each format, and those of a recipe that differ.
GEMMS = (*((quant, quant) for quant in QUANTS), ("block,e4m3", "block,e4m3,dim=2"))
GEMMS += (("nvfp4,e2m1,row_scaled=1", "nvfp4,e2m1,dim=2"), ("mxfp8,e5m2", MXFP8))
GEMMS += ((CURRENT, MXFP8), (BLOCK, NVFP4))


def gemm_samples(device):
    """``(leaf, arguments)`` of products, in every layout that modules ask for."""
    x, w = tensor(device, M, K), tensor(device, N, K)
    plain = {"TN": (x, w), "NN": (x, tensor(device, K, N)), "NT": (x, tensor(device, M, N))}
    for layout, operands in plain.items():
        rest = (*(None,) * 5, "", "", layout, torch.bfloat16, False)
        yield "gemm", (*operands, *rest)
    bias = tensor(device, N)
    for i, (a_quant, b_quant) in enumerate(GEMMS):
        (a, *_), (b, *_) = (quantized(x, a_quant), quantized(w, b_quant))
        yield "gemm", gemm_arguments(a, b, bias if i % 2 else None, a_quant, b_quant, "TN")
        (_, a), (_, b) = quantized(x, a_quant), quantized(tensor(device, M, N), b_quant)
        if a_quant.startswith("mxfp8") == b_quant.startswith("mxfp8"):
            layout = "NT" if a_quant.startswith("mxfp8") else "TN"
            yield "gemm", gemm_arguments(b, a, None, b_quant, a_quant, layout)
    (a, _), (_, b) = quantized(tensor(device, M, N), MXFP8), quantized(w, MXFP8)
    yield "gemm", gemm_arguments(a, b, None, MXFP8, MXFP8, "NN")


def gemm_arguments(a, b, bias, a_quant, b_quant, layout):
    """Arguments of the gemm leaf for operands ``(data, scale_inv, amax)``."""
    scale_and_amax = (a[1], b[1], a[2], b[2])
    return (a[0], b[0], bias, *scale_and_amax, a_quant, b_quant, layout, torch.bfloat16, True)


def other_samples(device):
    """``(leaf, arguments)`` of the rest."""
    x = tensor(device, M, K)
    amax = x.abs().amax().float().reshape(1)
    yield "bias_grad", (x,)
    yield "after", (x, amax)
    for keep in (torch.zeros(1, device=device), torch.ones(1, device=device)):
        for quant in (CURRENT, "delayed,e4m3", "mxfp8,e4m3", "nvfp4,e2m1"):
            scale, taken = scale_for(quant, device, 3), torch.zeros(1, device=device)
            old = GRAPH.quantize(x, quant, scale, 1, None, True, True, None)
            yield "requantize_", (x, quant, scale, 1, None, keep, *old, taken)
            part = (old[0], None, *old[2:3], None, *old[4:5], None)
            yield "requantize_", (x, quant, scale, 1, None, keep, *part, None)
    for name in ("bfloat16", "float16", "float32"):
        yield "rounded", (x, name)
    history = torch.zeros(4, 3, device=device)
    for add in (True, False):
        yield "accumulate_", (tensor(device, N, K, dtype=torch.float32), tensor(device, N, K), add)
    yield "record_amax_", (history, [amax, amax], [0, 2])
    yield "delayed_scaling_update_", (history, scales(device, 3), 448.0, 0.0, "max")
    both = (history, scales(device, 3), [amax, amax], [0, 2], 448.0, 0.0, "max")
    yield "record_and_update_", both


def leaf_samples(device):
    """``(leaf, arguments)``, covering the presence of every optional argument and output."""
    for samples in (
        quantize_samples,
        norm_samples,
        activation_samples,
        gemm_samples,
        other_samples,
    ):
        yield from samples(device)


LEAVES = sorted(vars(GRAPH))


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf(leaf, device):
    """Every leaf op passes all checks for every combination of optional arguments."""
    torch.manual_seed(0)
    samples = [args for name, args in leaf_samples(torch.device(device)) if name == leaf]
    assert samples
    for args in samples:
        # In a schema a dtype is text.
        args = [str(arg)[6:] if isinstance(arg, torch.dtype) else arg for arg in args]
        torch.library.opcheck(getattr(torch.ops.transformer_engine, leaf).default, args)


# --- module ops -----------------------------------------------------------------------------------


def spec_of(recipe):
    """What modules compute by; "" without a recipe."""
    return "" if recipe is None else recipe._spec


OVERRIDES = {"high_precision": "hp", "dequantized": "dq"}
RECIPES = {
    "none": "",
    "current": spec_of(Float8CurrentScaling()),
    "delayed": spec_of(DelayedScaling()),
    "block": spec_of(Float8BlockScaling()),
    "block_hybrid": spec_of(
        Float8BlockScaling(True, Format.HYBRID, w_block_scaling_dim=1, grad_block_scaling_dim=2)
    ),
    "mxfp8": spec_of(MXFP8BlockScaling()),
    "mxfp8_2d": spec_of(MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True)),
    "nvfp4": spec_of(NVFP4BlockScaling()),
    "nvfp4_plain": spec_of(NVFP4BlockScaling(True, True, True)),
    "nvfp4_row_scaled": spec_of(NVFP4BlockScaling(True, row_scaled_activation=True)),
    "nvfp4_four_over_six": spec_of(NVFP4BlockScaling(True, nvfp4_4over6="all")),
}
for _override, _short in OVERRIDES.items():
    for _make in (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling):
        _name = _make.__name__.removesuffix("Scaling").removesuffix("Block").lower()
        RECIPES[f"{_name}_{_short}"] = spec_of(_make(backward_override=_override))
# Operands whose orientations differ, as a CustomRecipe can make them: two formats, the columnwise
# values from the dequantized rowwise ones, one orientation or one operand in high precision.
_MX, _FP4 = "mxfp8,e4m3,swizzled=1", "nvfp4,e2m1,swizzled=1,rht=1"
RECIPES |= {
    "custom_two_formats": f"x={_MX}|{_FP4};w={_MX}|{BLOCK};g={BLOCK}|{_FP4},stochastic=1",
    "custom_from_row": f"x={NVFP4}|{_MX}|dq;w={NVFP4}|{NVFP4},dim=2|dq;g={NVFP4}|{_MX}",
    "custom_forward_only": f"x={CURRENT}|;w={CURRENT}|;g=",
    "custom_backward_only": f"x=|{BLOCK};w=|{BLOCK};g={BLOCK}",
    "custom_wgrad_plain": f"x={_MX}|;w={_MX};g={_MX}|",
    "custom_delayed": f"x={DELAYED}|{_MX};w={DELAYED}|{BLOCK};g={BLOCK}|{_MX}",
    "custom_fc2": f"x={_MX};w={_MX};g={_MX};x2={NVFP4};w2={NVFP4};g2={NVFP4}",
}
RECIPES = {
    name: f"{spec};custom=1;acc=0,1,1" if name.startswith("custom") else spec
    for name, spec in RECIPES.items()
}


def weight_operand(weight, spec, gemm):
    """The weight as a module hands it to its op."""
    quant = operand_text(spec, "w2") if gemm else ""
    quant = quant or operand_text(spec, "w")
    scale = scale_for(quant, weight.device)
    return quantized_weight({}, "w", weight, quant, scale, 1, None, "bwd=" not in spec)


def module_sample(name, device, recipe, need, bias=True, norm="LayerNorm", want=False, again=False):
    """Arguments of a module op; ``again``: backward recomputes what forward does not keep."""
    spec = RECIPES[recipe]

    def make(key, *shape):
        return tensor(device, *shape, grad=key in need)

    x = make("x", M, K)
    ln = (make("ln_weight", K), make("ln_bias", K) if norm == "LayerNorm" else None)
    config = f"norm={norm},1e-05,0;act=swiglu,7.0,1.702,1.0;{spec};need={','.join(need)}"
    config += ";out=norm" if want else ""
    config += ";recompute=1" if again else ""
    if name == "normalization":
        return (x, *ln, config)
    if name == "layernorm_mlp":
        weights = make("fc1_weight", 2 * N, K), make("fc2_weight", K, N)
        b1 = make("fc1_bias", 2 * N) if bias else None
        b2 = make("fc2_bias", K) if bias else None
        tensors = (x, *ln, weights[0], b1, weights[1], b2)
    else:
        weights, b = (make("weight", N, K),), make("bias", N) if bias else None
        tensors = (x, *(() if name == "linear" else ln), *weights, b)
    if not spec:
        return (*tensors, *(None,) * 6 * len(weights), None, config)
    operands = [weight_operand(weight, spec, gemm) for gemm, weight in enumerate(weights)]
    buffers = [buffer for operand in operands for buffer in operand.buffers]
    config += made_weights(tuple(operands), spec)
    return (*tensors, *buffers, scale_for(spec, device), config)


def backward_sample(op, name, args, want):
    """Arguments of the backward op for those of the forward op."""
    *tensors, config = args
    outputs = op.forward_op(*(t if t is None else t.detach() for t in tensors), config)
    grads = [torch.randn_like(outputs[0])]
    if op.outputs == 2:
        grads.append(torch.randn_like(outputs[1]) if want else None)
    scale = (scale_for(config, tensors[0].device),) if op.takes_scale else ()
    saved = saved_tensors(save_plan(name, config), tensors, outputs)
    saved = [t if t is None else t.detach() for t in saved]
    return (*grads, *saved, *scale, config)


WITHOUT_AOT = ("test_schema", "test_autograd_registration", "test_faketensor")
MODULES = sorted(OPS)
CASES = [(n, r) for n in MODULES for r in RECIPES if n != "normalization" or r == "none"]


@pytest.mark.parametrize("name,recipe", CASES)
def test_module(name, recipe, device):
    """Every module op passes all checks: all gradients, some, none; with and without options.

    The AOT check of the forward op compiles the backward op as well; the last two combinations
    check its schema and its fake also on their own.
    """
    torch.manual_seed(0)
    device, op = torch.device(device), OPS[name]
    everything = op.gradients
    for i, (need, options) in enumerate(
        (
            (everything, {}),
            ((), {}),
            (everything[1:], {"norm": "RMSNorm", "bias": False, "want": op.outputs == 2}),
            (everything[:1], {"want": op.outputs == 2}),
        )
    ):
        if options.get("norm") == "RMSNorm" or not options.get("bias", True):
            gone = {"ln_bias", "bias", "fc1_bias", "fc2_bias"}
            need = tuple(n for n in need if n not in gone)
        args = module_sample(name, device, recipe, need, **options)
        torch.library.opcheck(op.forward_op, args)
        if i >= 2:
            args = backward_sample(op, name, args, options["want"])
            torch.library.opcheck(op.backward_op, args, test_utils=WITHOUT_AOT)


@pytest.mark.parametrize("recipe", [*RECIPES, "custom_stochastic"])
def test_recomputing_module(recipe, device, monkeypatch):
    """The same of LayerNormMLP that recomputes in backward."""
    stochastic = f"x={NVFP4},stochastic=1;w={NVFP4};g={NVFP4},stochastic=1;custom=1;acc=0,1,1"
    monkeypatch.setitem(RECIPES, "custom_stochastic", stochastic)
    torch.manual_seed(0)
    device, op = torch.device(device), OPS["layernorm_mlp"]
    for need, want in ((op.gradients, True), (op.gradients[:1], False)):
        args = module_sample("layernorm_mlp", device, recipe, need, want=want, again=True)
        torch.library.opcheck(op.forward_op, args)
        args = backward_sample(op, "layernorm_mlp", args, want)
        torch.library.opcheck(op.backward_op, args, test_utils=WITHOUT_AOT)


WHOLE = ("none", "current", "delayed")


@pytest.mark.parametrize("name,recipe", [case for case in CASES if case[1] in WHOLE])
def test_ops_that_compiled_code_calls(name, recipe, device):
    """The overload without autograd, of which compiled code takes care."""
    torch.manual_seed(0)
    device, op = torch.device(device), OPS[name]
    args = module_sample(name, device, recipe, op.gradients)
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    torch.library.opcheck(getattr(torch.ops.transformer_engine, name).whole, args)


def test_every_op_is_covered():
    """No op of the library is missing from the tests above."""
    registered = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("transformer_engine::")
    }
    backwards = {f"{name}_backward" for name in MODULES}
    assert registered == set(LEAVES) | set(MODULES) | backwards
