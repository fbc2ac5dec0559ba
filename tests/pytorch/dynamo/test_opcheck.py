# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck on every op: schema, autograd registration, fakes, AOT, dynamic shapes."""

import itertools

import pytest
import torch

from transformer_engine.pytorch.core.ops import GRAPH
from transformer_engine.pytorch.dynamo.custom_op import OPS

CURRENT, CURRENT_G = "current,e4m3,0,0.0", "current,e5m2,0,0.0"
DELAYED, DELAYED_G = "delayed,e4m3,0,0.0", "delayed,e5m2,0,0.0"
RECIPES = {
    "none": "",
    "current": f"x={CURRENT};w={CURRENT};g={CURRENT_G};acc=0,1,1",
    "delayed": f"x={DELAYED};w={DELAYED};g={DELAYED_G};acc=0,1,1",
    "high_precision": f"x={CURRENT};w={CURRENT};g={CURRENT_G};acc=0,1,1;bwd=high_precision",
    "dequantized": f"x={CURRENT};w={CURRENT};g={CURRENT_G};acc=0,1,1;bwd=dequantized",
}
M, K, N = 24, 32, 48


def tensor(device, *shape, dtype=torch.bfloat16, grad=False):
    """A random tensor."""
    return (torch.randn(*shape, device=device) * 0.5).to(dtype).requires_grad_(grad)


def scales(device, count):
    """Delayed-scaling scales that are powers of two, as a fresh vector."""
    return torch.full((count,), 2.0, device=device)


def leaf_samples(device):
    """``(leaf, arguments)``, covering the presence of every optional argument and output."""
    x, h = tensor(device, M, K), tensor(device, M, 2 * K)
    w, b = tensor(device, K), tensor(device, K)
    amax = x.abs().amax().float().reshape(1)
    yield "bias_grad", (x,)
    for quant, (row, col) in itertools.product(
        (CURRENT, DELAYED), ((True, False), (False, True), (True, True))
    ):
        scale = scales(device, 3) if quant == DELAYED else None
        yield "quantize", (x, quant, scale, 1, None, row, col)
    yield "quantize", (x, CURRENT, None, 0, amax, True, True)
    row, col, scale_inv, _ = GRAPH.quantize(x, CURRENT, None, 0, None, True, True)
    yield "dequantize", (row, scale_inv, CURRENT, torch.bfloat16)
    for kind, quant, want in itertools.product(
        ("LayerNorm", "RMSNorm"), ("", CURRENT, DELAYED), (True, False)
    ):
        bias, mean = (b, torch.zeros(M, device=device)) if kind == "LayerNorm" else (None, None)
        scale = scales(device, 3) if quant == DELAYED else None
        args = (1e-5, True, kind, quant, scale, 0, bool(quant), bool(quant), want)
        yield "norm_forward", (x, w, bias, *args)
        rstd = torch.ones(M, device=device)
        yield "norm_backward", (x, x if want else None, x, mean, rstd, w, True, kind, True, want)
    for quant, act in itertools.product(("", CURRENT, DELAYED), ("gelu", "swiglu")):
        scale = scales(device, 6) if quant == DELAYED else None
        args = (act, 7.0, 1.702, 1.0, quant, scale, 3, bool(quant), bool(quant), not quant)
        yield "activation_forward", (h, *args)
        dy = h if act == "gelu" else x
        yield "activation_backward", (dy, h, *args, True)
    for layout, (left, right) in {
        "TN": (x, tensor(device, N, K)),
        "NN": (x, tensor(device, K, N)),
        "NT": (x, tensor(device, M, N)),
    }.items():
        yield "gemm", (left, right, None, None, None, "", "", layout, torch.bfloat16, False)
    quantized = (row, row, None, scale_inv, scale_inv, CURRENT, CURRENT)
    yield "gemm", (*quantized, "TN", torch.bfloat16, True)
    history = torch.zeros(4, 3, device=device)
    yield "record_amax_", (history, [amax, amax], [0, 2])
    yield "delayed_scaling_update_", (history, scales(device, 3), 448.0, 0.0, "max")
    del col


LEAVES = sorted(vars(GRAPH))


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf(leaf, device):
    """Every leaf op passes all checks for every combination of optional arguments."""
    torch.manual_seed(0)
    samples = [args for name, args in leaf_samples(torch.device(device)) if name == leaf]
    assert samples
    for args in samples:
        torch.library.opcheck(getattr(GRAPH, leaf), args)


def weight_bytes(device, weight, quant):
    """``(row, col, scale_inv)`` of a quantized weight, Nones without quantization."""
    if not quant:
        return None, None, None
    scale = scales(device, 6) if quant == DELAYED else None
    return GRAPH.quantize(weight.detach(), quant, scale, 1, None, True, True)[:3]


def module_sample(name, device, recipe, need, bias=True, norm="LayerNorm", want=False):
    """Arguments of a module op."""
    spec = RECIPES[recipe]
    quant = {"none": "", "delayed": DELAYED}.get(recipe, CURRENT)

    def make(key, *shape):
        return tensor(device, *shape, grad=key in need)

    x = make("x", M, K)
    ln = (make("ln_weight", K), make("ln_bias", K) if norm == "LayerNorm" else None)
    fwd_scale = scales(device, 6) if quant == DELAYED else None
    config = f"norm={norm},1e-05,0;act=swiglu,7.0,1.702,1.0;{spec};need={','.join(need)}"
    config += ";out=norm" if want else ""
    if name == "normalization":
        return (x, *ln, config)
    if name == "layernorm_mlp":
        w1, w2 = make("fc1_weight", 2 * N, K), make("fc2_weight", K, N)
        b1 = make("fc1_bias", 2 * N) if bias else None
        b2 = make("fc2_bias", K) if bias else None
        quantized = (*weight_bytes(device, w1, quant), *weight_bytes(device, w2, quant))
        return (x, *ln, w1, b1, w2, b2, *quantized, fwd_scale, config)
    w, b = make("weight", N, K), make("bias", N) if bias else None
    head = (x,) if name == "linear" else (x, *ln)
    return (*head, w, b, *weight_bytes(device, w, quant), fwd_scale, config)


MODULES = sorted(OPS)


# A lone norm is never quantized, and LayerNormMLP takes no backward_override.
APPLICABLE = {
    "normalization": ("none",),
    "layernorm_mlp": ("none", "current", "delayed"),
    "linear": tuple(RECIPES),
    "layernorm_linear": tuple(RECIPES),
}


@pytest.mark.parametrize("name,recipe", [(n, r) for n in MODULES for r in APPLICABLE[n]])
def test_module(name, recipe, device):
    """Every module op passes all checks: all gradients, some, none; with and without options."""
    torch.manual_seed(0)
    device, op = torch.device(device), OPS[name]
    everything = op.gradients
    for need, options in (
        (everything, {}),
        (everything[1:], {"norm": "RMSNorm", "bias": False, "want": op.outputs == 2}),
        (everything[:1], {"want": op.outputs == 2}),
        ((), {}),
    ):
        if options.get("norm") == "RMSNorm" or not options.get("bias", True):
            gone = {"ln_bias", "bias", "fc1_bias", "fc2_bias"}
            need = tuple(n for n in need if n not in gone)
        args = module_sample(name, device, recipe, need, **options)
        torch.library.opcheck(op.forward_op, args)


def test_every_op_is_covered():
    """No op of the library is missing from the two tests above."""
    registered = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("transformer_engine::")
    }
    backwards = {f"{name}_backward" for name in MODULES}
    assert registered == set(LEAVES) | set(MODULES) | backwards
