# SPDX-License-Identifier: Apache-2.0
"""Which gradients a compiled module gives: outputs alone and together, frozen parameters, repeated
and deferred backward passes."""

import pytest
import torch

from transformer_engine.pytorch.dynamo import capability

from compile_support import (
    GEMM_MODULES,
    K,
    NORMS,
    OTHER_RECIPES,
    RECIPES,
    Twins,
    build,
    graphs,
    random,
    recipe_of,
    with_recipe,
)

# Every module and every per-tensor recipe, but not all pairs; one of each format.
FEW = [("Linear", "delayed"), ("LayerNormLinear", "current"), ("LayerNormMLP", "delayed")]
FORMATS = [("LayerNormMLP", "nvfp4"), ("LayerNormLinear", "mxfp8"), ("Linear", "block")]


def freeze(twins, frozen):
    """Freeze the parameters whose name contains one of ``frozen``; unfreeze the others."""
    for module in (twins.module, twins.eager):
        for name, param in module.named_parameters():
            param.requires_grad_(not any(part in name for part in frozen))


# --- outputs --------------------------------------------------------------------------------------


OUTPUT_CASES = [
    (kind, recipe, "aot_eager")
    for kind in ("LayerNormLinear", "LayerNormMLP")
    for recipe in RECIPES
]
OUTPUT_CASES += [("LayerNormLinear", "delayed", "inductor"), ("LayerNormMLP", "none", "inductor")]
OUTPUT_CASES += [
    (("LayerNormLinear", "LayerNormMLP")[i % 2], recipe, "aot_eager")
    for i, recipe in enumerate(OTHER_RECIPES)
]


@pytest.mark.feature(
    "norm output returned, with its gradient",
    modes=("eager", "compiled"),
    other_modules="the module has no norm",
)
@pytest.mark.parametrize("kind,recipe,backend", OUTPUT_CASES)
def test_gradients_through_any_output(kind, recipe, backend, device):
    """Through the output, through the norm output, through both; none of them is mixed up."""
    options = {"return_layernorm_output": True, "normalization": NORMS[kind[-1] == "P"]}
    module = build(kind, device, recipe=recipe, **options)
    twins, recipe = Twins(module, backend=backend), recipe_of(recipe)
    for seed, outputs in enumerate(((0,), (1,), (0, 1), (1,))):
        twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed, outputs=outputs)
        twins.zero_grad()
    assert graphs() == 1


@pytest.mark.parametrize(
    "kind,recipe", (("LayerNormLinear", "delayed"), ("LayerNormMLP", "current"))
)
def test_outputs_used_in_the_graph(kind, recipe, device):
    """Losses of the output, the norm output, both and the returned bias, within the graph."""

    def call(module, x, recipe, a, b, c):
        y, bias, ln_out = with_recipe(module, x, recipe)
        loss = (y + bias).sum() * a if a else 0
        loss = loss + ln_out.square().sum() * b if b else loss
        return loss + bias.sum() * c if c else loss

    module = build(kind, device, return_layernorm_output=True, return_bias=True)
    twins, recipe = Twins(module, call), recipe_of(recipe)
    for seed, factors in enumerate(((1, 0, 0), (0, 1, 0), (1, 2, 0), (0, 1, 3), (1, 1, 1))):
        twins.step(random(16, K, device=device, seed=seed), recipe, *factors, seed=seed)
        twins.zero_grad()


def test_norm_output_changed_in_place(device):
    """Writing into the returned norm output does not reach what backward uses."""

    def call(module, x, recipe):
        y, ln_out = with_recipe(module, x, recipe)
        return y, ln_out.mul_(2)

    for recipe in ("current", "delayed", "mxfp8", "block_dq"):
        module = build("LayerNormLinear", device, recipe=recipe, return_layernorm_output=True)
        twins = Twins(module, call)
        twins.step(random(16, K, device=device), recipe_of(recipe))


# --- frozen parameters ----------------------------------------------------------------------------

FROZEN = {
    "Linear": ("weight", "bias"),
    "LayerNormLinear": ("layer_norm", "layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    "LayerNormMLP": ("layer_norm", "fc1", "fc2", "fc1_weight", "fc2_weight", "fc1_bias", "bias"),
    "LayerNorm": ("weight", "bias"),
    "RMSNorm": ("weight",),
}
FROZEN_CASES = [(kind, part, True) for kind, parts in FROZEN.items() for part in (*parts, "")]
FROZEN_CASES += [(kind, part, False) for kind, parts in FROZEN.items() for part in (parts[0], "")]


@pytest.mark.feature(
    "frozen parameters",
    modes=("eager", "compiled"),
    others="part of training, not of an exported program",
)
@pytest.mark.parametrize("kind,part,x_grad", FROZEN_CASES)
def test_frozen_parameters(kind, part, x_grad, device):
    """Exactly the gradients that are wanted, with and without the input's."""
    recipe = None if kind in NORMS else recipe_of("current" if x_grad else "delayed")
    twins = Twins(build(kind, device))
    freeze(twins, (part,))
    y, *_ = twins.step(random(16, K, device=device), recipe, x_grad=x_grad)
    names = [key for key, _ in twins.module.named_parameters()]
    assert y.requires_grad == (x_grad or any(part not in key for key in names))
    for key, param in twins.module.named_parameters():
        assert (param.grad is not None) == (part not in key)


OTHER_FROZEN = [
    ("LayerNormMLP", part, recipe)
    for part in FROZEN["LayerNormMLP"]
    for recipe in ("nvfp4", "custom_two_formats")
]
OTHER_FROZEN += [("LayerNormMLP", part, "mxfp8_dq") for part in ("fc1", "fc2_weight")]
OTHER_FROZEN += [("LayerNormLinear", part, "mxfp8") for part in ("layer_norm", "weight", "bias")]
OTHER_FROZEN += [("Linear", part, "block") for part in FROZEN["Linear"]]


@pytest.mark.parametrize("kind,part,recipe", OTHER_FROZEN)
def test_frozen_parameters_of_other_recipes(kind, part, recipe, device):
    """The same, with and without the input's in turn."""
    twins, kept = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    freeze(twins, (part,))
    for x_grad in (True, False):
        twins.step(random(16, K, device=device), kept, x_grad=x_grad)
        for key, param in twins.module.named_parameters():
            assert (param.grad is not None) == (part not in key)


TOGGLED = [(*case, "aot_eager") for case in FEW] + [("LayerNormMLP", "current", "inductor")]
TOGGLED += [("LayerNormMLP", "nvfp4", "aot_eager")]


@pytest.mark.feature(
    "requires_grad switched between calls",
    modes=("eager", "compiled"),
    others="part of training, not of an exported program",
)
@pytest.mark.parametrize("kind,recipe,backend", TOGGLED)
def test_requires_grad_toggled_after_compilation(kind, recipe, backend, device):
    """Freezing and unfreezing is noticed by compiled code, on every torch version."""
    twins = Twins(build(kind, device, recipe=recipe), backend=backend)
    recipe = recipe_of(recipe)
    everything = [name for name, _ in twins.module.named_parameters()]
    sequence = [(), ("weight",), (), tuple(everything), ("bias",), tuple(everything)]
    for seed, frozen in enumerate(sequence):
        freeze(twins, frozen)
        for x_grad in (True, False)[seed % 2 :]:
            x = random(16, K, device=device, seed=seed)
            y, *_ = twins.step(x, recipe, seed=seed, x_grad=x_grad)
            assert y.requires_grad == (x_grad or len(frozen) < len(everything))
            twins.zero_grad()


def test_toggle_between_training_and_inference(device):
    """Frozen while a no_grad graph was made; trained afterwards."""
    twins = Twins(build("LayerNormLinear", device))
    x, recipe = random(16, K, device=device), recipe_of("current")
    freeze(twins, ("",))
    with torch.no_grad():
        twins.compiled(x, recipe)
    twins.step(x, recipe, x_grad=False)
    freeze(twins, ())
    twins.step(x, recipe)
    assert all(param.grad is not None for param in twins.module.parameters())


def test_guards_are_complete():
    """The guard shortcut of torch 2.11 and 2.12 that misses ``requires_grad`` is off."""
    capability.prepare_for_dynamo()
    if torch.__version__ < "2.13":
        assert not torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags


@pytest.mark.parametrize("kind,recipe", FEW)
def test_parameters_replaced(kind, recipe, device):
    """``param.data`` swapped, a new ``Parameter`` object, loaded states: compiled code follows."""
    twins, recipe = Twins(build(kind, device)), recipe_of(recipe)
    other, x = build(kind, device, seed=7), random(16, K, device=device)
    twins.step(x, recipe)
    for seed, change in enumerate(("data", "parameter", "load_state_dict", "double_steps")):
        for module in (twins.module, twins.eager):
            for name, param in list(module.named_parameters()):
                new = other.get_parameter(name).detach().clone() * (seed + 1)
                if change == "data":
                    param.data = new
                elif change == "parameter":
                    setattr(module, name, torch.nn.Parameter(new))
            if change == "load_state_dict":
                module.load_state_dict(other.state_dict())
        twins.zero_grad()
        twins.step(x, recipe, seed=seed)


# --- several backward passes ----------------------------------------------------------------------


@pytest.mark.feature(
    "gradient accumulation",
    modes=("eager", "compiled"),
    others="part of training, not of an exported program",
)
@pytest.mark.parametrize("kind,recipe", FEW + FORMATS)
def test_accumulation(kind, recipe, device):
    """Gradients add up over backward passes without zero_grad."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    for seed in range(3):
        twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)
    assert graphs() == 1


@pytest.mark.parametrize("kind,recipe", FEW + FORMATS)
def test_retain_graph(kind, recipe, device):
    """A second backward through the same forward gives the same again."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    forward = twins.forward(random(16, K, device=device), recipe)
    forward.backward(retain_graph=True)
    forward.backward(retain_graph=True)
    forward.backward(seed=5)
    twins.step(random(16, K, device=device), recipe)


DEFERRED = [(*case, order) for case in FEW for order in ("in_order", "reversed", "mixed")]
DEFERRED += [(*case, "mixed") for case in FORMATS]


@pytest.mark.feature(
    "several forward passes before their backward",
    modes=("eager", "compiled"),
    others="part of training, not of an exported program",
)
@pytest.mark.parametrize("kind,recipe,order", DEFERRED)
def test_deferred_backward(kind, recipe, order, device):
    """Several forward passes first, then the backward passes in any order (pipelines)."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    for minibatch in range(2):
        waiting = []
        for i in range(3):
            seed = 10 * minibatch + i
            waiting.append((twins.forward(random(16, K, device=device, seed=seed), recipe), seed))
        if order == "reversed":
            waiting.reverse()
        elif order == "mixed":
            waiting = [waiting[1], waiting[2], waiting[0]]
        for forward, seed in waiting:
            forward.backward(seed=seed)
        twins.zero_grad()
    assert graphs() == 1


@pytest.mark.parametrize("kind,recipe", FEW + FORMATS)
def test_backward_interrupted_by_inference(kind, recipe, device):
    """An inference call between forward and backward disturbs neither."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    for seed in range(2):
        forward = twins.forward(random(16, K, device=device, seed=seed), recipe)
        with torch.no_grad():
            twins.forward(random(16, K, device=device, seed=9), recipe, x_grad=False)
        forward.backward(seed=seed)
        twins.zero_grad()


@pytest.mark.parametrize("kind,recipe", FEW + FORMATS)
def test_forward_without_backward(kind, recipe, device):
    """Dropped forward passes leave the same state behind."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    for seed in range(4):
        forward = twins.forward(random(16, K, device=device, seed=seed), recipe)
        if seed % 2:
            forward.backward(seed=seed)
        else:
            del forward
            twins.compare()


def test_autograd_grad_of_some_inputs(device):
    """``torch.autograd.grad`` for the weight only, then for the input only."""
    twins, recipe = Twins(build("LayerNormMLP", device)), recipe_of("current")
    forward = twins.forward(random(16, K, device=device), recipe)
    found = []
    for module, x, outputs in zip((twins.module, twins.eager), forward.inputs, forward.outputs):
        loss = outputs[0].float().square().sum()
        (dw,) = torch.autograd.grad(loss, module.fc1_weight, retain_graph=True)
        (dx,) = torch.autograd.grad(loss, x)
        found.append((dw, dx))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_whole_training_step_in_the_graph(kind, device):
    """A hook on the output and one on a weight see the same gradients."""
    seen = []

    def call(module, x, recipe):
        y = with_recipe(module, x, recipe)
        return torch.nn.functional.mse_loss(y.float(), torch.ones_like(y, dtype=torch.float32))

    twins, recipe = Twins(build(kind, device), call), recipe_of("delayed")
    for module in (twins.module, twins.eager):
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for seed in range(2):
        seen.clear()
        twins.step(random(16, K, device=device, seed=seed), recipe, seed=seed)
        assert len(seen) == 2 * len(list(twins.module.parameters()))
    assert graphs() == 1
