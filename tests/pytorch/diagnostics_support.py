# SPDX-License-Identifier: Apache-2.0
"""What the tests of te.explain and te.memory_report share: modules, and what may not change."""

import random as python_random

import torch
from module.recipe_list import out_features, recipe_of

import transformer_engine.pytorch as te
from transformer_engine.pytorch.core import delayed_scaling, ops
from transformer_engine.pytorch.dynamo.custom_op import OPS
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

M, K, N, F = 5, 64, 48, 96  # rows, width of the input, of a linear layer's output, of the MLP
GEMM_MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP")
NORMS = ("LayerNorm", "RMSNorm")
BF16 = torch.bfloat16


def build(kind, device, recipe="none", **options):
    """A bf16 module whose width fits the recipe."""
    sizes = {"LayerNormMLP": (K, F), "LayerNorm": (K,), "RMSNorm": (K,)}
    sizes = sizes.get(kind, (K, out_features(recipe, N)))
    torch.manual_seed(0)
    name = "dtype" if kind in NORMS else "params_dtype"
    return getattr(te, kind)(*sizes, **{name: BF16}, device=device, **options)


def given(device, rows=M, grad=True, seed=1):
    """A bf16 input."""
    values = torch.randn(rows, K, generator=torch.Generator().manual_seed(seed))
    return values.to(device=device, dtype=BF16).requires_grad_(grad)


def under(recipe):
    """te.autocast with the recipe of that name; off for "none"."""
    recipe = recipe_of(recipe)
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def bits(tensor):
    """The bytes of a tensor."""
    flat = tensor.detach().contiguous().flatten()
    return bytes(flat.view(torch.uint8).cpu().numpy().tobytes()) if flat.numel() else b""


def fingerprint(module):
    """Everything that a call can change: values by their bytes, objects by their identity."""
    found = {"rng": bits(torch.get_rng_state()), "python": python_random.getstate()}
    if torch.cuda.is_available():
        found["cuda"] = [bits(state) for state in torch.cuda.get_rng_state_all()]
    for name, param in module.named_parameters():
        found[name] = _tensor(param), param.grad, dict(vars(param))
        found[f"{name}.grad"] = None if param.grad is None else bits(param.grad)
        found[f"{name}.main_grad"] = _tensor(getattr(param, "main_grad", None))
    for name, buffer in module.named_buffers():
        found[name] = _tensor(buffer)
    for name, child in module.named_modules():
        found[f"{name}.attributes"] = dict(vars(child))
        found[f"{name}.members"] = {
            key: list(value.items()) if isinstance(value, dict) else list(value)
            for key, value in vars(child).items()
            if isinstance(value, (dict, list, set))
        }
        if getattr(child, "wgrad_store", None) is not None:
            found[f"{name}.wgrad"] = list(child.wgrad_store.context)
    for i, state in enumerate(delayed_scaling.live_states()):
        tensors = (state.fwd_scale, state.fwd_history, state.bwd_scale, state.bwd_history)
        found[f"scaling{i}"] = dict(vars(state)), [bits(t) for t in tensors]
    found["global"] = dict(vars(FP8GlobalStateManager.quantization_state))
    found["region"] = dict(vars(delayed_scaling.REGION))
    found["hooks"] = ops.select, dict(OPS)
    return found


def _tensor(tensor):
    """Value, identity and version of a tensor, of what it consists of for a quantized one."""
    if tensor is None:
        return None
    if isinstance(tensor, te.QuantizedTensor):
        return [_tensor(part) for part in tensor.operand_buffers()]
    return tensor.data_ptr(), tensor._version, bits(tensor)


def assert_unchanged(before, after):
    """The same objects, the same bytes."""
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert _same(value, after[key]), f"{key} changed: {value} became {after[key]}"


def _same(a, b):
    if isinstance(a, (list, tuple)) and isinstance(b, type(a)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (bytes, str, int, float, bool)):
        return a == b
    return a is b
