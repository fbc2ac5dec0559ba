# SPDX-License-Identifier: Apache-2.0
"""te.explain says what happens, gives the reasons that warnings give, and changes nothing."""

import copy
import warnings

import pytest
import torch
from diagnostics_support import (
    BF16,
    F,
    GEMM_MODULES,
    K,
    M,
    N,
    NORMS,
    assert_unchanged,
    bits,
    build,
    fingerprint,
    given,
    under,
)
from module.recipe_list import ALL_RECIPES, CUSTOM, recipe_of
from torch._dynamo.utils import counters

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.backends.registry import device_capability, triton_missing
from transformer_engine.pytorch.core import ops
from transformer_engine.pytorch.diagnostics.words import quant_words, recipe_words

RECIPES = ("none", *ALL_RECIPES)
FALLBACK = "Falling back to eager execution under torch.compile: "
# Leaf ops of a training step in high precision, and with per-tensor scales, in order.
LEAVES = {
    "Linear": ("gemm fprop", "bias_grad bias gradient", "gemm dgrad", "gemm wgrad"),
    "LayerNormLinear": (
        *("norm_forward high precision", "gemm fprop", "bias_grad bias gradient"),
        *("gemm dgrad", "gemm wgrad", "norm_backward input and norm parameters"),
    ),
    "LayerNormMLP": (
        *("norm_forward high precision", "gemm fc1.fprop", "activation_forward high precision"),
        *("gemm fc2.fprop", "bias_grad bias gradient", "gemm fc2.dgrad", "gemm fc2.wgrad"),
        *("activation_backward high precision", "gemm fc1.dgrad", "gemm fc1.wgrad"),
        "norm_backward input and norm parameters",
    ),
}
QUANTIZED_LEAVES = {
    "Linear": (
        *("quantize weight", "quantize input", "gemm fprop", "bias_grad bias gradient"),
        *("quantize grad_output", "gemm dgrad", "gemm wgrad"),
    ),
    "LayerNormLinear": (
        *("quantize weight", "norm_forward input", "gemm fprop", "bias_grad bias gradient"),
        *("quantize grad_output", "gemm dgrad", "gemm wgrad"),
        "norm_backward input and norm parameters",
    ),
    "LayerNormMLP": (
        *("quantize fc1.weight", "quantize fc2.weight", "norm_forward fc1.input"),
        *("gemm fc1.fprop", "activation_forward fc2.input", "gemm fc2.fprop"),
        *("bias_grad bias gradient", "quantize fc2.grad_output", "gemm fc2.dgrad"),
        *("gemm fc2.wgrad", "activation_backward fc1.grad_output", "gemm fc1.dgrad"),
        *("gemm fc1.wgrad", "norm_backward input and norm parameters"),
    ),
}


def named(rows):
    """Leaf ops with their purposes."""
    return tuple(f"{row.leaf} {row.purpose}" for row in rows)


def expected_gemm(recipe, device):
    """``(backend, row of the hardware, its reason)`` of a GEMM with operands of a plain recipe."""
    if recipe == "none":
        return "torch_mm", None, ""
    hopper = device == "cuda" and device_capability(0)[0] == 9
    if recipe in ("current", "delayed"):
        native, cpu = "cublas_fp8", "cpu has no FP8 tensor cores"
        return ("cublas_fp8", None, "") if hopper else ("dequantized_mm", native, cpu)
    if recipe == "block":
        native = "cublas_block"
        cpu = "cuBLASLt multiplies operands with scales of 128 values on Hopper only"
        return ("cublas_block", None, "") if hopper else ("dequantized_mm", native, cpu)
    if recipe == "mxfp8":
        reason = "MXFP8 GEMMs need a GPU of compute capability 10.x or 11.x"
    else:
        reason = "NVFP4 GEMMs need a GPU of compute capability 10.0 or newer"
    return "dequantized_mm", f"cublas_{recipe}", reason


# --- leaf ops and backends ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_leaf_ops_in_high_precision(kind, device):
    explanation = te.explain(build(kind, device), given(device))
    assert named(explanation.leaves) == LEAVES[kind]
    assert not explanation.operands and explanation.no_backward == ""


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_leaf_ops_with_scales(kind, device):
    with under("current"):
        explanation = te.explain(build(kind, device), given(device))
    assert named(explanation.leaves) == QUANTIZED_LEAVES[kind]
    forward = QUANTIZED_LEAVES[kind].index("bias_grad bias gradient")
    directions = [row.direction for row in explanation.leaves]
    assert directions == ["forward"] * forward + ["backward"] * (len(directions) - forward)


@pytest.mark.parametrize("recipe", ("none", "current", "delayed", "block", "mxfp8", "nvfp4"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_backends_and_reasons(kind, recipe, device):
    """What ran is what the table of backends chose, and why the others did not."""
    if device == "cuda" and device_capability(0)[0] != 9:
        pytest.skip("the expectations are those of Hopper")
    with under(recipe):
        explanation = te.explain(build(kind, device, recipe), given(device))
    backend, native, reason = expected_gemm(recipe, device)
    gemms = [row for row in explanation.leaves if row.leaf == "gemm"]
    assert len(gemms) == (6 if kind == "LayerNormMLP" else 3)
    for row in gemms:
        if (device, recipe, row.backend) == ("cuda", "block", "dequantized_mm"):
            continue  # an operand is padded to 128 rows: out_features is no multiple of that
        assert row.backend == backend
        if native is not None:
            assert dict(row.passed_over)[native] == reason
        if recipe != "none":
            assert dict(row.passed_over)["torch_mm"] == "the operands are quantized"
        if reason:
            assert reason in str(explanation)
    others = [row for row in explanation.leaves if row.leaf != "gemm"]
    for row in others:
        if device == "cpu":
            why = (("triton", "Triton kernels run on CUDA devices, not on cpu"),)
            assert (row.backend, row.passed_over) == ("reference", why)
        elif recipe in ("none", "current", "delayed"):
            assert row.backend == ("reference" if triton_missing() else "triton")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_reported_leaves_are_those_that_ran(kind, recipe, device, monkeypatch):
    """Against a log of every request for a backend, made by the same call without te.explain."""
    module, x, log = build(kind, device, recipe), given(device), []
    original = ops.select

    def logged(request):
        log.append(request)
        return original(request)

    with under(recipe):
        explanation = te.explain(module, x)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "select", logged)
            module(x).sum().backward()
    got = [(row.leaf, row.dtype, row.backend, row.quants[0]) for row in explanation.leaves]
    wanted = [(r.leaf, r.dtype, original(r).name, r.quant) for r in log]
    assert got == wanted and got


# --- operands ------------------------------------------------------------------------------------


def operands(explanation):
    """``{(operand, orientation): row}``"""
    found = {(row.operand, row.orientation): row for row in explanation.operands}
    assert len(found) == len(explanation.operands)
    return found


@pytest.mark.parametrize("recipe", ALL_RECIPES)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_orientations_of_operands(kind, recipe, device):
    """Those that the three GEMMs of each linear stage multiply, and no others."""
    with under(recipe):
        explanation = te.explain(build(kind, device, recipe), given(device))
    forward_only = recipe.endswith(("_hp", "_dq")) or recipe == "custom_forward_only"
    wanted = set()
    for stage in ("fc1.", "fc2.") if kind == "LayerNormMLP" else ("",):
        wanted |= {(f"{stage}input", "rowwise"), (f"{stage}weight", "rowwise")}
        if not forward_only:
            names = ("input", "weight", "grad_output")
            wanted |= {(f"{stage}{name}", "columnwise") for name in names}
            wanted.add((f"{stage}grad_output", "rowwise"))
    assert set(operands(explanation)) == wanted


PADDED = {"current": 16, "delayed": 16, "block": 128, "mxfp8": 32, "nvfp4": 32}


@pytest.mark.parametrize("rows", (5, 32, 130))
@pytest.mark.parametrize("recipe", PADDED)
def test_padding(recipe, rows, device):
    with under(recipe):
        explanation = te.explain(build("LayerNormMLP", device, recipe), given(device, rows))
    for (operand, orientation), row in operands(explanation).items():
        lines = {"fc1.weight": F, "fc2.weight": K}.get(operand, rows)
        padding = -lines % PADDED[recipe] if orientation == "columnwise" else 0
        assert (row.rows, row.padding) == (lines, padding), (operand, orientation)
        assert row.columns == (
            F if operand in ("fc1.grad_output", "fc2.input", "fc2.weight") else K
        )
        if padding and lines == rows:
            assert f"{rows} rows padded to {rows + padding}" in str(explanation)


@pytest.mark.parametrize(
    "recipe,operand,orientation,words",
    (
        ("current", "input", "rowwise", "FP8 E4M3, one scale from its own amax"),
        ("current", "grad_output", "columnwise", "FP8 E5M2, one scale from its own amax"),
        ("delayed", "weight", "columnwise", "FP8 E4M3, one scale from the amax history"),
        ("block", "input", "rowwise", "FP8 E4M3, fp32 power-of-two scales of 1x128 blocks"),
        ("block", "input", "columnwise", "FP8 E4M3, fp32 power-of-two scales of 128x1 blocks"),
        ("block", "weight", "rowwise", "FP8 E4M3, fp32 power-of-two scales of 128x128 blocks"),
        (
            *("mxfp8", "grad_output", "columnwise"),
            "MXFP8 E4M3, E8M0 scales of 32x1 blocks, scales swizzled for the GEMM",
        ),
        (
            *("nvfp4", "input", "columnwise"),
            "NVFP4 E2M1, E4M3 scales of 16x1 blocks and one fp32 scale, scales swizzled for the"
            " GEMM, after a random Hadamard transform",
        ),
        (
            *("nvfp4_row_scaled", "input", "rowwise"),
            "NVFP4 E2M1, E4M3 scales of 1x16 blocks and one fp32 scale per row, scales swizzled"
            " for the GEMM",
        ),
        (
            *("custom_two_formats", "input", "rowwise"),
            "MXFP8 E4M3, E8M0 scales of 1x32 blocks, scales swizzled for the GEMM",
        ),
        (
            *("custom_two_formats", "weight", "columnwise"),
            "FP8 E4M3, fp32 power-of-two scales of 128x128 blocks",
        ),
    ),
)
def test_words(recipe, operand, orientation, words, device):
    with under(recipe):
        explanation = te.explain(build("Linear", device, recipe), given(device))
    row = operands(explanation)[operand, orientation]
    assert row.meaning == words and words in str(explanation)


def test_words_of_rare_options():
    assert quant_words("") == "high precision"
    assert "amax at least 0.5" in quant_words("current,e4m3,eps=0.5")
    assert "one power-of-two scale" in quant_words("current,e4m3,pow2=1")
    assert "rounded stochastically" in quant_words("nvfp4,e2m1,stochastic=1")
    text = quant_words("nvfp4,e2m1,four_over_six=mse,e4m3_max=256")
    assert "becomes 4 or 6, by MSE" in text and "up to 256" in text
    assert "unrounded fp32" in quant_words("mxfp8,e4m3,unrounded=1")
    assert "Hadamard" not in quant_words("nvfp4,e2m1,rht=1")
    assert "Python quantizer" in quant_words("python:3")


def test_cached_and_primary_weights(device):
    """Weights that the call does not quantize say where they are from."""
    module, x = build("LayerNormMLP", device), given(device)
    with under("current"):
        module(x, is_first_microbatch=True)
        explanation = te.explain(module, x, is_first_microbatch=False)
    assert "quantize fc1.weight" not in named(explanation.leaves)
    found = operands(explanation)
    for key in (("fc1.weight", "rowwise"), ("fc2.weight", "columnwise")):
        assert found[key].made_by == "cache" and "current" in found[key].quant
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        module = build("Linear", device, "mxfp8")
    with under("mxfp8"):
        explanation = te.explain(module, x)
    assert operands(explanation)["weight", "columnwise"].made_by == "parameter"


# --- modules, recipes, fallbacks ------------------------------------------------------------------


class Model(torch.nn.Module):
    """Nested modules: one used twice, one never, one in an autocast of its own."""

    def __init__(self, device, compiled=False):
        super().__init__()
        self.first = torch.nn.ModuleDict({"norm": build("LayerNorm", device)})
        inner = build("LayerNormLinear", device, "mxfp8", bias=False)
        self.twice = torch.compile(inner, backend="aot_eager") if compiled else inner
        self.back = te.Linear(96, K, params_dtype=BF16, device=device)
        self.unused = build("Linear", device)

    def forward(self, x):
        x = self.first["norm"](x)
        for _ in range(2):
            x = self.back(torch.nn.functional.gelu(self.twice(x)))
        with te.autocast(recipe=MXFP8BlockScaling()):
            return self.back(self.twice(x))


@pytest.mark.feature(
    "te.explain",
    modes=("compiled",),
    modules=("LayerNormLinear",),
    others="a program has no modules to explain",
)
@pytest.mark.parametrize("compiled", (False, True))
def test_names_calls_and_recipes(compiled, device):
    model = Model(device, compiled)
    with under("current"):
        explanation = te.explain(model, given(device))
    rows = [(row.module, row.kind, row.call, row.recipe) for row in explanation.modules]
    current, mxfp8 = "Float8CurrentScaling", "MXFP8BlockScaling"
    assert rows == [
        ("first.norm", "LayerNorm", 1, current),
        ("twice", "LayerNormLinear", 1, current),
        ("back", "Linear", 1, current),
        ("twice", "LayerNormLinear", 2, current),
        ("back", "Linear", 2, current),
        ("twice", "LayerNormLinear", 3, mxfp8),
        ("back", "Linear", 3, mxfp8),
        ("unused", "Linear", 0, ""),
    ]
    norm = explanation.modules[0]
    assert "a norm by itself is never quantized" in norm.precision
    assert norm.input_shape == (M, K) and norm.input_dtype == "bfloat16"
    for row in explanation.leaves:  # also in backward the call is the right one
        if row.leaf == "gemm":
            assert row.quants[0].startswith("mxfp8" if row.call == 3 else "current")
    for module in ("twice", "back"):
        for call in (1, 2, 3):
            mine = [r for r in explanation.leaves if (r.module, r.call) == (module, call)]
            gemms = [r.purpose for r in mine if r.leaf == "gemm"]
            assert gemms == ["fprop", "dgrad", "wgrad"]
    text = str(explanation)
    assert "twice (call 3), LayerNormLinear" in text and "not called" in text


def test_attribution_of_branches(device):
    """Of two modules alike only one has a backward: it is not taken for that of the other."""
    model = torch.nn.ModuleList([build("Linear", device), build("Linear", device)])
    model.forward = lambda x: (model[0](x), model[1](x).detach())
    explanation = te.explain(model, given(device))
    places = {row.module for row in explanation.leaves if row.direction == "backward"}
    assert places == {"0"}
    # With nothing saved for backward, too.
    for module in model:
        module.weight.requires_grad_(False)
    x = given(device, grad=False)
    model.forward = lambda x: (model[0](x).detach(), model[1](x))[1]
    explanation = te.explain(model, x)
    backward = [row for row in explanation.leaves if row.direction == "backward"]
    assert [(row.module, row.leaf) for row in backward] == [("1", "bias_grad")]


def test_no_recipe_and_calibration(device):
    module, x = build("Linear", device), given(device)
    row = te.explain(module, x).modules[0]
    assert (row.recipe, row.precision) == ("", "none active: high precision")
    with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        explanation = te.explain(module, x)
    row = explanation.modules[0]
    assert row.recipe == "DelayedScaling"
    assert row.precision == "high precision, calibrating DelayedScaling()"
    assert [r.purpose for r in explanation.leaves if r.leaf == "quantize"] == ["amax alone"] * 2


def test_recipe_words():
    assert recipe_words(Float8CurrentScaling()) == "Float8CurrentScaling()"
    text = recipe_words(DelayedScaling(amax_history_len=3, margin=2))
    assert text in (
        "DelayedScaling(margin=2, amax_history_len=3)",
        "DelayedScaling(amax_history_len=3, margin=2)",
    )
    assert recipe_words(NVFP4BlockScaling(disable_rht=True)).startswith("NVFP4BlockScaling(")
    custom = recipe_of("custom_square")  # the factory has no default
    assert recipe_words(custom) == f"CustomRecipe(qfactory={custom.qfactory!r})"


def largest(history):
    """An amax of one's own."""
    return history.max(0).values


def obstacles(device):
    """Calls that torch.compile does not take: ``name: (module, recipe, input)``."""
    put_off = build("LayerNormLinear", device, delay_wgrad_compute=True)
    python = DelayedScaling(amax_compute_algo=largest)
    return {
        "python rule": (build("Linear", device), python, given(device)),
        "python rule, MLP": (build("LayerNormMLP", device), python, given(device)),
        "gradients put off": (put_off, None, given(device)),
        "nothing": (build("Linear", device), Float8CurrentScaling(), given(device)),
    }


@pytest.mark.parametrize(
    "case", ("python rule", "python rule, MLP", "gradients put off", "nothing")
)
def test_reasons_are_those_of_the_warning(case, device):
    module, recipe, x = obstacles(device)[case]
    context = te.autocast(enabled=recipe is not None, recipe=recipe)
    with context:
        row = te.explain(module, x).modules[0]
    compiled = torch.compile(module, backend="eager")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with context:
            compiled(x)
    texts = [str(warning.message) for warning in seen]
    texts = [text for text in texts if text.startswith(FALLBACK)]
    assert texts == ([FALLBACK + row.reason] if case != "nothing" else [])
    assert row.compiles == (case == "nothing") and bool(row.reason) != row.compiles


def test_reasons_are_printed(device):
    module, recipe, x = obstacles(device)["gradients put off"]
    with te.autocast(enabled=False, recipe=recipe):
        explanation = te.explain(module, x)
    assert f"falls back to eager: {explanation.modules[0].reason}" in str(explanation)


@pytest.mark.parametrize("reentrant", (False, True))
def test_recomputation(reentrant, device):
    """The second forward pass of torch.utils.checkpoint is marked; reentrant ones refuse."""
    module = build("LayerNormLinear", device)
    model = torch.nn.Sequential(module)
    checkpoint = torch.utils.checkpoint.checkpoint
    model.forward = lambda x: checkpoint(module, x, use_reentrant=reentrant)
    with under("current"):
        explanation = te.explain(model, given(device))
    if reentrant:
        assert "it failed" in explanation.no_backward
        assert "Forward only: it failed" in str(explanation)
        return
    assert [row.recomputed for row in explanation.modules] == [False, True]
    backward = [r for r in explanation.leaves if r.direction == "backward"]
    assert {row.call for row in backward} == {2}
    assert "0 (call 2), recomputed" in str(explanation)
    assert not [row for row in explanation.saved if row.op != "torch"]


@pytest.mark.parametrize("mode", ("no_grad", "inference_mode", "frozen"))
def test_forward_only(mode, device):
    module, x = build("LayerNormMLP", device), given(device, grad=mode != "frozen")
    module.requires_grad_(mode != "frozen")
    context = {"frozen": torch.enable_grad}.get(mode) or getattr(torch, mode)
    with context(), under("current"):
        explanation = te.explain(module, x)
    assert {row.direction for row in explanation.leaves} == {"forward"}
    assert explanation.no_backward == "no output requires a gradient"
    assert "Forward only: no output requires a gradient." in str(explanation)
    assert {row.orientation for row in explanation.operands} == {"rowwise"}
    assert not explanation.saved


@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind, device):
    with under("delayed"):
        explanation = te.explain(build(kind, device), given(device))
    wanted = ("norm_forward high precision", "norm_backward input and norm parameters")
    assert named(explanation.leaves) == wanted


def test_delayed_weight_gradients(device):
    module, x = build("LayerNormMLP", device, delay_wgrad_compute=True), given(device)
    before = fingerprint(module)
    with under("current"):
        explanation = te.explain(module, x)
    put_off = [row for row in explanation.leaves if row.backend == "put off"]
    texts = ["fc2.wgrad, left to backward_dw()", "fc1.wgrad, left to backward_dw()"]
    assert [row.purpose for row in put_off] == texts
    assert_unchanged(before, fingerprint(module))


def test_without_modules_of_ours(device):
    model = torch.nn.Linear(K, N).to(device)
    explanation = te.explain(model, torch.randn(M, K, device=device))
    assert explanation.modules == explanation.leaves == ()
    assert "contains no module of transformer_engine" in str(explanation)


def test_wrong_arguments(device):
    with pytest.raises(TypeError, match="take a torch.nn.Module, not a function"):
        te.explain(largest, given(device))
    for report in (te.explain, te.memory_report):
        with pytest.raises(TypeError, match=r"te.explain\(module, x\) for this Linear"):
            report(build("Linear", device))
    compiled = torch.compile(te.explain, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="can not be part of compiled code"):
        compiled(build("Linear", device), given(device))


# --- nothing changes ------------------------------------------------------------------------------


def train(module, x, recipe, first=None):
    """One step in a region of its own."""
    arguments = {} if first is None else {"is_first_microbatch": first}
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **arguments)
    y.sum().backward()
    return y


@pytest.mark.feature("te.explain", modes=("eager",), others="a program has no modules to explain")
@pytest.mark.parametrize("used", (False, True))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_nothing_changes(kind, recipe, used, device):
    """Before and after are equal bit by bit, on a fresh module and on one that has trained."""
    module, x = build(kind, device, recipe), given(device)
    used_recipe = recipe_of(recipe)
    if used:
        train(module, x, used_recipe, True)
    gradient = x.grad
    outside = fingerprint(module)
    with te.autocast(enabled=used_recipe is not None, recipe=used_recipe):
        inside = fingerprint(module)
        for first in (None, True, False):
            explanation = te.explain(module, x, is_first_microbatch=first)
            assert explanation.no_backward == ""
            assert_unchanged(inside, fingerprint(module))
    te.explain(module, x)
    te.memory_report(module, x)
    after = fingerprint(module)
    assert_unchanged(outside, after)
    assert x.grad is gradient


@pytest.mark.parametrize("recipe", ("none", "current", "delayed", "nvfp4", "custom_delayed"))
def test_training_goes_on_as_if_nothing_was(recipe, device):
    """Steps with te.explain between and within them equal steps without, random numbers too."""
    explained = build("LayerNormMLP", device, recipe)
    plain = copy.deepcopy(explained)
    results = {}
    for module in (explained, plain):
        torch.manual_seed(3)
        results[module] = []
        used_recipe = recipe_of(recipe)
        for step in range(4):
            x = given(device, seed=step)
            with te.autocast(enabled=used_recipe is not None, recipe=used_recipe):
                y = module(x, is_first_microbatch=step % 2 == 0)
                if module is explained:
                    te.explain(module, x, is_first_microbatch=step % 2 == 0)
                y = y + module(x, is_first_microbatch=False)
                if module is explained:
                    te.memory_report(module, x, is_first_microbatch=True)
            y.sum().backward()
            results[module] += [bits(y), bits(x.grad), bits(torch.rand(2))]
        results[module] += [bits(param.grad) for param in module.parameters()]
        results[module] += [bits(module.get_extra_state())]
    assert results[explained] == results[plain]


def test_main_grad_stays(device):
    module, x = build("LayerNormMLP", device, fuse_wgrad_accumulation=True), given(device)
    for weight in (module.fc1_weight, module.fc2_weight):
        weight.main_grad = torch.full_like(weight, 3.0, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    before = fingerprint(module)
    with under("current"):
        explanation = te.explain(module, x)
    assert [r.purpose for r in explanation.leaves if r.leaf == "accumulate_"] == ["main_grad"] * 2
    for key, value in before.items():
        if "main_grad" in key:  # put back by value, which counts as a write
            before[key] = value if value is None else (value[0], None, value[2])
    after = fingerprint(module)
    for key in before:
        if "main_grad" in key and after[key] is not None:
            after[key] = (after[key][0], None, after[key][2])
    assert_unchanged(before, after)


def test_attributes_and_buffers_stay(device):
    """Modules of the user that count their calls and keep statistics."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = build("Linear", device), torch.nn.BatchNorm1d(N).to(device)
            self.calls, self.seen, self.sizes = 0, [], {}
            self.last = None

        def forward(self, x):
            self.calls += 1
            self.seen.append(self.calls)
            self.sizes[self.calls] = x.shape
            self.last = x
            return self.norm(self.linear(x).float()) + torch.rand(N, device=device)

    module, x = Counting(), given(device)
    module(x)
    before = fingerprint(module)
    te.explain(module, x)
    after = fingerprint(module)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        key = f"norm.{name}"
        assert before[key][2] == after[key][2]
        del before[key], after[key]
    assert_unchanged(before, after)
    assert module.calls == 1 and module.seen == [1] and list(module.sizes) == [1]


def test_an_error_leaves_everything_as_it_was(device):
    module, x = torch.nn.Sequential(build("LayerNormMLP", device), build("Linear", device)), None
    x = given(device)
    wrong = torch.nn.Sequential(module[0], te.Linear(K + 8, N, params_dtype=BF16, device=device))
    before = fingerprint(wrong)
    with under("delayed"), pytest.raises(ValueError, match="last dimension must be 72"):
        te.explain(wrong, x)
    assert_unchanged(before, fingerprint(wrong))
    with under("delayed"):
        assert te.explain(module, x).modules[1].module == "1"


# --- compiled modules -----------------------------------------------------------------------------


class Wrapper(torch.nn.parallel.DistributedDataParallel):
    """DDP without processes."""

    def __init__(self, module):  # pylint: disable=super-init-not-called
        torch.nn.Module.__init__(self)  # pylint: disable=non-parent-init-called
        self.module = module


@pytest.mark.feature(
    "te.explain",
    modes=("compiled",),
    modules=("Linear", "LayerNormMLP"),
    others="a program has no modules to explain",
)
@pytest.mark.parametrize("how", ("wrapped", "in place", "part", "ddp"))
def test_compiled_modules_are_explained_in_eager(how, device):
    """Nothing is compiled for it, no graph is lost by it, and the rows are those of the module."""
    torch._dynamo.reset()
    counters.clear()
    module, x = torch.nn.Sequential(build("LayerNormMLP", device), build("Linear", device)), None
    x = given(device)
    with under("current"):
        wanted = te.explain(module, x)
    explained = module
    if how == "wrapped":
        explained = torch.compile(module, backend="aot_eager")
    elif how == "in place":
        module.compile(backend="aot_eager")
    elif how == "part":
        module[0] = torch.compile(module[0], backend="aot_eager")
    else:
        explained = Wrapper(torch.compile(module, backend="aot_eager"))
    with under("current"):
        got = te.explain(explained, x)
        assert counters["stats"]["unique_graphs"] == 0
        assert str(got) == str(wanted)
        if how == "ddp":
            return
        explained(x).sum().backward()
        graphs = counters["stats"]["unique_graphs"]
        te.explain(explained, x)
        te.memory_report(explained, x)
        explained(x).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.parametrize("recipe", CUSTOM)
def test_custom_recipes_are_named(recipe, device):
    with under(recipe):
        row = te.explain(build("Linear", device, recipe), given(device)).modules[0]
    assert row.recipe == "CustomRecipe" and row.compiles


def test_keyword_arguments_and_nested_inputs(device):
    class Nested(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = build("Linear", device)

        def forward(self, *, batch):
            return {"y": self.linear(inp=batch["x"])}

    x = given(device)
    upstream = x * 2  # must not be differentiated through
    explanation = te.explain(Nested(), batch={"x": upstream, "other": 3})
    assert named(explanation.leaves) == LEAVES["Linear"] and explanation.modules[0].compiles
    upstream.sum().backward()
    assert x.grad is not None
