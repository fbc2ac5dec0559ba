# SPDX-License-Identifier: Apache-2.0
"""What the torch.compile tests share: a compiled module and an eager twin, compared bit by bit.

The twin is a deep copy from before anything ran, so that it shares neither parameters, nor cached
weights, nor the state of delayed scaling with the module under test. Random numbers are drawn by
both from the same seed, and must be drawn in the same order.
"""

import copy
from dataclasses import dataclass

import torch
from torch._dynamo.utils import counters

import recipe_list

import transformer_engine.pytorch as te
from transformer_engine.pytorch.dynamo import module_function
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

K, N, FFN = 64, 48, 96  # width of the input, of a linear layer's output, of the MLP
GEMM_MODULES = ("Linear", "LayerNormLinear", "LayerNormMLP")
NORMS = ("LayerNorm", "RMSNorm")
MODULES = (*GEMM_MODULES, *NORMS)
RECIPES = ("none", "current", "delayed")
OTHER_RECIPES = (*recipe_list.BLOCKS, *recipe_list.OVERRIDES, *recipe_list.CUSTOM)
# One of each format, for what must hold for all but need not be tried with every option.
FEW_OTHERS = ("block", "mxfp8", "nvfp4", "custom_two_formats", "mxfp8_dq")
DRAWS = 1234  # seed of the stochastic rounding of each pass
STATE = ("fwd_scale", "fwd_history", "bwd_scale", "bwd_history")

recipe_of = recipe_list.recipe_of


def build(kind, device="cpu", seed=0, dtype=torch.bfloat16, width=K, recipe="none", **options):
    """A module whose parameters are all random: norm weights and biases too.

    ``recipe``: name of the recipe that it will run with, which its width must fit.
    """
    out = recipe_list.out_features(recipe, N)
    sizes = {"Linear": (width, out), "LayerNormLinear": (width, out), "LayerNormMLP": (width, FFN)}
    name = "dtype" if kind in NORMS else "params_dtype"
    options = {name: dtype, "device": device, **options}
    module = getattr(te, kind)(*sizes.get(kind, (width,)), **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, param in module.named_parameters():
            values = torch.randn(param.shape, generator=generator)
            param.copy_(values * 0.2 + (key.endswith("norm_weight") or kind in NORMS))
    return module


def random(*shape, device="cpu", seed=0, dtype=torch.bfloat16):
    """Normally distributed values, the same on every device."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(device)


def gradient(like, kind="random", seed=0):
    """An output gradient: "random", "transposed" (strides reversed), "expanded" (strides 0)."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if kind == "expanded":
        return torch.randn(1, generator=generator).to(like).expand(like.shape)
    shape = like.shape[::-1] if kind == "transposed" else like.shape
    values = torch.randn(shape, generator=generator).to(device=like.device, dtype=like.dtype)
    return values.permute(*range(values.dim())[::-1]) if kind == "transposed" else values


def same_bits(a, b):
    """Whether two tensors (or Nones) are equal in shape, dtype and every bit."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    # view() takes no 0-D tensors to other sizes, and no tensor with strides.
    raw = [t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def assert_same_bits(tested, eager, what):
    """Fail with the largest difference."""
    if not same_bits(tested, eager):
        if tested is None or eager is None or tested.shape != eager.shape:
            shapes = [None if t is None else (tuple(t.shape), t.dtype) for t in (tested, eager)]
            raise AssertionError(f"{what}: compiled has {shapes[0]}, eager has {shapes[1]}")
        difference = (tested.double() - eager.double()).abs().max().item()
        raise AssertionError(
            f"{what}: compiled {tested.dtype} and eager {eager.dtype} differ by up to {difference}"
        )


def scaling_states(module):
    """``{name: state}`` of delayed scaling of all submodules."""
    return {
        name: child._delayed_scaling
        for name, child in module.named_modules()
        if getattr(child, "_delayed_scaling", None) is not None
    }


def assert_same_modules(tested, eager):
    """Parameters, their gradients and the state of delayed scaling are equal bit by bit."""
    for (name, a), (_, b) in zip(tested.named_parameters(), eager.named_parameters()):
        assert_same_bits(a, b, name)
        assert_same_bits(a.grad, b.grad, f"gradient of {name}")
    states, wanted = scaling_states(tested), scaling_states(eager)
    assert list(states) == list(wanted)
    for name, state in states.items():
        for field in STATE:
            a, b = getattr(state, field), getattr(wanted[name], field)
            assert_same_bits(a, b, f"{field} of {name or 'the module'}")


def reset():
    """Forget all compiled code and counters."""
    torch._dynamo.reset()
    counters.clear()
    FP8GlobalStateManager.reset()


def graphs():
    """Graphs that Dynamo has compiled since the last `reset`."""
    return counters["stats"]["unique_graphs"]


def with_recipe(module, x, recipe=None, **kwargs):
    """The usual call: the module inside of its own autocast."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        return module(x, **kwargs)


def plain(module, x, **kwargs):
    """The call without any context."""
    return module(x, **kwargs)


def as_tuple(outputs):
    """Outputs of a module as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass
class Forward:
    """Both forward passes of one step, waiting for their backward."""

    twins: "Twins"
    inputs: tuple  # leaves: of the compiled module, of the eager one
    outputs: tuple

    def backward(self, grad="random", seed=0, outputs=None, retain_graph=False, compare=True):
        """Backward through the outputs (all that have a gradient, or the given indices)."""
        for results in self.outputs:
            torch.manual_seed(DRAWS + 1)
            chosen = range(len(results)) if outputs is None else outputs
            chosen = [
                (results[i], gradient(results[i], grad, seed + i))
                for i in chosen
                if results[i] is not None and results[i].grad_fn is not None
            ]
            if chosen:
                torch.autograd.backward(*zip(*chosen), retain_graph=retain_graph)
        if compare:
            assert_same_bits(*(x.grad for x in self.inputs), "input gradient")
            self.twins.compare()


class Twins:
    """A compiled module and its eager twin, driven in lockstep.

    ``call(module, x, *args, **kwargs)`` is what gets compiled; ``options`` go to ``torch.compile``.
    """

    def __init__(self, module, call=with_recipe, backend="aot_eager", **options):
        reset()
        self.module, self.eager, self.call = module, copy.deepcopy(module), call
        options = {"fullgraph": True, **options}
        if backend is not None:
            options["backend"] = backend

        def closure(*args, **kwargs):
            return call(module, *args, **kwargs)

        self.compiled = torch.compile(closure, **options)

    def forward(self, x, *args, x_grad=True, view=None, eager_only=False, **kwargs):
        """Run both forward passes and compare their outputs; ``view`` is applied to the leaf."""
        call = self.call
        inputs = [x.detach().clone().requires_grad_(x_grad) for _ in range(2)]
        given = inputs if view is None else [view(leaf) for leaf in inputs]
        torch.manual_seed(DRAWS)
        if eager_only:
            tested = call(self.module, given[0], *args, **kwargs)
        else:
            tested = self.compiled(given[0], *args, **kwargs)
        torch.manual_seed(DRAWS)
        eager = call(self.eager, given[1], *args, **kwargs)
        results = as_tuple(tested), as_tuple(eager)
        assert len(results[0]) == len(results[1])
        for i, (a, b) in enumerate(zip(*results)):
            assert_same_bits(a, b, f"output {i}")
            assert a is None or a.requires_grad == b.requires_grad
        return Forward(self, tuple(inputs), results)

    def step(self, x, *args, grad="random", seed=0, outputs=None, **kwargs):
        """One forward and backward on both, everything compared; returns the compiled outputs."""
        forward = self.forward(x, *args, **kwargs)
        forward.backward(grad, seed, outputs)
        return forward.outputs[0]

    def zero_grad(self):
        """Drop the gradients of both."""
        self.module.zero_grad()
        self.eager.zero_grad()

    def compare(self):
        """Parameters, gradients and scaling state are equal."""
        assert_same_modules(self.module, self.eager)


def recorded_runs(monkeypatch):
    """A list that gets ``(op, arguments, results)`` of each eager run of a module op."""
    calls, run = [], module_function._run

    def record(registered, function, config, tensors, history=None, free=False):
        # Without the history amaxes are results, as the registered op returns them; and what is
        # recorded here is not to be freed.
        del history, free
        results = run(registered, function, config, tensors)
        calls.append((registered, (*tensors, config), results))
        return results

    monkeypatch.setattr(module_function, "_run", record)
    return calls
