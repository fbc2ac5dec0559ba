# SPDX-License-Identifier: Apache-2.0
"""What is kept for backward: the report against autograd and against formulas written here again.

Then the promises about it: a compiled module keeps no more than an eager one, nothing survives the
backward pass, and nothing grows from step to step.
"""

import copy
import gc
import re
import weakref
from pathlib import Path

import pytest
import torch
from feature_report import trained_feature
from diagnostics_support import BF16, F, GEMM_MODULES, K, M, N, NORMS, build, given, under
from module.recipe_list import ALL_RECIPES, out_features, recipe_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import MXFP8BlockScaling

RECIPES = ("none", *ALL_RECIPES)
ROOT = Path(__file__).resolve().parents[2]

# What is kept of the input and of the weight of a GEMM: an orientation and a format, or "hp".
KEPT = {
    "none": ("hp", "hp"),
    "current": ("col fp8", "col fp8"),
    "delayed": ("col fp8", "col fp8"),
    "block": ("col block1", "col block2"),
    "block_hybrid": ("col block1", "col block1"),
    "mxfp8": ("col mxfp8", "col mxfp8"),
    "mxfp8_2d": ("col mxfp8", "col mxfp8"),
    "nvfp4": ("col nvfp4", "col nvfp4"),
    "nvfp4_plain": ("col nvfp4", "col nvfp4"),
    "nvfp4_row_scaled": ("col nvfp4rows", "col nvfp4"),
    "nvfp4_four_over_six": ("col nvfp4", "col nvfp4"),
    "current_hp": ("hp", "hp"),
    "mxfp8_hp": ("hp", "hp"),
    "block_dq": ("row block1", "row block2"),
    "mxfp8_dq": ("row mxfp8", "row mxfp8"),
    "nvfp4_dq": ("row nvfp4", "row nvfp4"),
    "custom_square": ("col mxfp8", "col mxfp8"),
    "custom_two_formats": ("col nvfp4", "col block2"),
    "custom_from_dequantized": ("col mxfp8", "col mxfp8"),
    "custom_forward_only": ("hp", "hp"),
    "custom_delayed": ("col fp8", "col fp8"),
}


def up(value, multiple):
    """Rounded up to a multiple."""
    return -(-value // multiple) * multiple


def ceil(value, by):
    """Divided and rounded up."""
    return -(-value // by)


def part(name, kept, rows, columns):
    """``{tensor: bytes}`` of what is kept of a quantized ``[rows, columns]`` operand."""
    orientation, kind = kept.split()
    if orientation == "col" and kind != "mxfp8":
        rows, columns = columns, rows  # columnwise buffers are those of the transpose
    if kind == "fp8":
        return {f"{name}_data": rows * up(columns, 16), f"{name}_scale_inv": 4}
    padded = orientation == "col"
    if kind == "mxfp8" and padded:
        sizes = up(rows, 32) * columns, up(ceil(rows, 32), 4) * up(columns, 128)
    elif kind == "mxfp8":
        sizes = rows * columns, up(rows, 128) * up(ceil(columns, 32), 4)
    elif kind == "block1":
        width = up(columns, 128) if padded else columns
        sizes = rows * width, 4 * ceil(columns, 128) * up(rows, 4)
    elif kind == "block2":
        width = up(columns, 128) if padded else columns
        sizes = rows * width, 4 * ceil(rows, 128) * up(ceil(columns, 128), 4)
    else:
        width = up(columns, 32) if padded else columns
        sizes = rows * width // 2, up(rows, 128) * up(ceil(columns, 16), 4)
        amax = 4 * rows if kind == "nvfp4rows" else 4
        sizes = (*sizes, amax)
    return {f"{name}_{key}": size for key, size in zip(("data", "scale_inv", "amax"), sizes)}


def expected(kind, recipe, rows, gated=False, dw=True, below=True, norm="LayerNorm"):
    """``{tensor: bytes}`` that backward reads; ``dw``: weights are trained, ``below``: what is
    before them too.
    """
    x_kept, w_kept = KEPT[recipe]
    out = out_features(recipe, N)
    found = {}
    if kind != "Linear" and below:
        found = {"x": 2 * rows * K, "ln_weight": 2 * K, "rstd": 4 * rows}
        if norm == "LayerNorm":
            found["mean"] = 4 * rows
    first = "x" if kind == "Linear" else "ln_out"
    if dw:
        found.update({first: 2 * rows * K} if x_kept == "hp" else part("x", x_kept, rows, K))
    if kind != "LayerNormMLP":
        weight = {"weight": 2 * out * K} if w_kept == "hp" else part("w", w_kept, out, K)
        return {**found, **(weight if below else {})}
    wide = F * (2 if gated else 1)
    if dw:
        found.update({"a": 2 * rows * F} if x_kept == "hp" else part("a", x_kept, rows, F))
    if dw or below:
        found["h"] = 2 * rows * wide
    weights = {"fc1_weight": (wide, K), "fc2_weight": (K, F)}
    for i, (name, shape) in enumerate(weights.items()):
        if below or (i == 1 and dw):
            hp = {name: 2 * shape[0] * shape[1]}
            found.update(hp if w_kept == "hp" else part(f"w{i + 1}", w_kept, *shape))
    return found


class Watch:
    """What autograd holds, by hooks of its own: storages, and whether they are still held."""

    def __init__(self):
        self.held = []

        def pack(tensor):
            box = [tensor]
            holder = _Holder(box)
            self.held.append((weakref.ref(holder), weakref.ref(tensor.untyped_storage())))
            return holder

        self.context = torch.autograd.graph.saved_tensors_hooks(pack, lambda h: h.box[0])

    def __enter__(self):
        self.context.__enter__()
        return self

    def __exit__(self, *error):
        self.context.__exit__(*error)

    def tensors(self):
        """The tensors that are held now."""
        return [ref().box[0] for ref, _ in self.held if ref() is not None]

    def bytes(self, *others):
        """Bytes of the storages that are held now and that ``others`` do not lie in."""
        known = {t.untyped_storage()._cdata for t in others if t is not None}
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in self.tensors()}
        return sum(s.nbytes() for key, s in storages.items() if key not in known)


class _Holder:
    def __init__(self, box):
        self.box = box


def outputs(y):
    """As a tuple, those that have a gradient."""
    return [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None and t.requires_grad]


def check(module, x, recipe, wanted, **kwargs):
    """The report's tensors, bytes and totals are those wanted, and those of autograd."""
    with under(recipe):
        report = te.memory_report(module, x, **kwargs)
        explained = te.explain(module, x, **kwargs)
        with Watch() as watch:
            y = module(x, **kwargs)
    assert {row.name: row.bytes for row in report.rows} == wanted
    assert [row.required for row in report.rows] == [row.bytes for row in report.rows]
    assert explained.saved == report.rows
    assert {row.op for row in report.rows} <= {
        {
            "Linear": "linear",
            "LayerNormLinear": "layernorm_linear",
            "LayerNormMLP": "layernorm_mlp",
        }.get(type(module).__name__)
    }
    # Autograd itself, in a call that nobody explains.
    assert sum(t.numel() * t.element_size() for t in watch.tensors()) == sum(wanted.values())
    there = watch.bytes(x, *module.parameters())
    assert report.total == report.autograd_total == report.required == there
    own = {"x"} | {n for n, _ in module.named_parameters()} | {"ln_weight"}
    if type(module).__name__ != "Linear" or x.requires_grad:
        kept = sum(size for name, size in wanted.items() if name not in own)
        assert report.total == kept
    for row in report.rows:
        assert row.kind == (
            "kept" if row.name not in own else "input" if row.name == "x" else "parameter"
        ), row
    if outputs(y):
        assert report.after_backward == 0
    return report


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.feature(
    "te.memory_report; compiled code keeps no more",
    modes=("eager",),
    others="see gradients of an exported program",
)
@pytest.mark.parametrize("rows", (M, 160))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_bytes(kind, recipe, rows, device):
    wanted = expected(kind, recipe, rows)
    report = check(build(kind, device, recipe), given(device, rows), recipe, wanted)
    assert all(row.why and row.formula for row in report.rows)


FROZEN = {
    "weights": ((True, False, True), {"dw": False}),
    "input and norm": ((False, True, False), {"below": False}),
    "everything but the input": ((True, False, False), {"dw": False}),
    "everything but the norm": ((False, False, True), {"dw": False}),
    "everything": ((False, False, False), None),
}


@pytest.mark.parametrize("case", FROZEN)
@pytest.mark.parametrize("recipe", ("none", "current", "delayed", "mxfp8", "nvfp4", "block_dq"))
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_frozen_parts(kind, recipe, case, device):
    """Only what a wanted gradient needs is kept."""
    (x_grad, w_grad, norm_grad), arguments = FROZEN[case]
    module = build(kind, device, recipe)
    for name, param in module.named_parameters():
        param.requires_grad_(norm_grad if name.startswith("layer_norm") else w_grad)
    if kind == "Linear":
        norm_grad = False
    wanted = {} if arguments is None else expected(kind, recipe, M, **arguments)
    if not (x_grad or w_grad or norm_grad):
        wanted = {}
    check(module, given(device, grad=x_grad), recipe, wanted)


def test_bias_alone_keeps_nothing(device):
    module = build("Linear", device)
    module.weight.requires_grad_(False)
    check(module, given(device, grad=False), "current", {})


@pytest.mark.parametrize("recipe", ("none", "current", "mxfp8", "nvfp4"))
@pytest.mark.parametrize("kind", ("LayerNormLinear", "LayerNormMLP"))
def test_returned_norm_output(kind, recipe, device):
    """It is kept for backward only where wgrad multiplies it in high precision."""
    module = build(kind, device, recipe, return_layernorm_output=True, normalization="RMSNorm")
    check(module, given(device), recipe, expected(kind, recipe, M, norm="RMSNorm"))


@pytest.mark.parametrize("activation", ("gelu", "swiglu", "relu", "clamped_swiglu", "srelu", "glu"))
@pytest.mark.parametrize("recipe", ("none", "delayed", "block"))
def test_activations(recipe, activation, device):
    gated = activation in ("swiglu", "clamped_swiglu", "glu")
    module = build("LayerNormMLP", device, recipe, activation=activation)
    check(module, given(device), recipe, expected("LayerNormMLP", recipe, M, gated))


@pytest.mark.parametrize("recipe", ("none", "current", "block", "mxfp8", "nvfp4"))
def test_checkpointed_mlp(recipe, device):
    """No activation but the input: weights, and what fc1 and the norm need to run again."""
    module = build("LayerNormMLP", device, recipe, checkpoint=True)
    wanted = expected("LayerNormMLP", recipe, M)
    for name in list(wanted):
        if name.split("_")[0] in ("mean", "rstd", "h", "a") or name in ("x_data", "x_scale_inv"):
            del wanted[name]
    wanted.pop("x_amax", None)
    wanted.pop("ln_out", None)
    wanted.update(ln_bias=2 * K, fc1_bias=2 * F)
    if recipe != "none":
        row = part("w1", f"row {KEPT[recipe][1].split()[1]}", F, K)
        if recipe == "current":
            row["w1_data"] = F * K
        wanted.update(
            {name.replace("w1", "w1_row").replace("_data", ""): size for name, size in row.items()}
        )
    with under(recipe):
        report = te.memory_report(module, given(device))
        explanation = te.explain(module, given(device))
    assert {row.name: row.bytes for row in report.rows} == wanted
    assert [row.required for row in report.rows] == [row.bytes for row in report.rows]
    assert report.total == report.autograd_total and report.after_backward == 0
    again = [r for r in explanation.leaves if r.direction == "backward"][:3]
    first = [r for r in explanation.leaves if r.leaf != "quantize"][:3]
    assert [(r.leaf, r.purpose, r.quants) for r in again] == [
        (r.leaf, r.purpose, r.quants) for r in first
    ]


@pytest.mark.parametrize("recipe", ("none", "current", "mxfp8", "nvfp4"))
def test_original_input(recipe, device):
    """save_original_input keeps the input, which is there anyway, for its quantized copy."""
    module = build("Linear", device, recipe, save_original_input=True)
    wanted = expected("Linear", recipe, M, dw=False) | {"x": 2 * M * K}
    check(module, given(device), recipe, wanted)


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("kind", (*GEMM_MODULES, *NORMS))
def test_inference_keeps_nothing(kind, context, device):
    with context(), under("current"):
        report = te.memory_report(build(kind, device), given(device))
    assert not report.rows and report.total == report.autograd_total == 0
    assert report.after_backward is None and str(report) == "Nothing is kept for backward."


@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind, device):
    report = te.memory_report(build(kind, device), given(device))
    wanted = {"x": 2 * M * K, "ln_weight": 2 * K, "rstd": 4 * M}
    if kind == "LayerNorm":
        wanted["mean"] = 4 * M
    assert {row.name: row.bytes for row in report.rows} == wanted
    assert [row.required for row in report.rows] == [row.bytes for row in report.rows]


def test_cached_weights_are_there_anyway(device):
    module, x = build("LayerNormMLP", device), given(device)
    with under("current"):
        fresh = te.memory_report(module, x)
        cached = te.memory_report(module, x, is_first_microbatch=True)
        module(x, is_first_microbatch=True)
        again = te.memory_report(module, x, is_first_microbatch=False)
    weights = [row.bytes for row in fresh.rows if row.name.startswith(("w1_", "w2_"))]
    for report in (cached, again):
        assert report.bytes_of("cache") == sum(weights) > 0
        assert report.total == report.autograd_total == fresh.total - sum(weights)
        assert f"cache {sum(weights):,}" in str(report)


def test_primary_weights_are_parameters(device):
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        module = build("LayerNormLinear", device, "mxfp8")
    with under("mxfp8"):
        report = te.memory_report(module, given(device))
    kinds = {row.name: row.kind for row in report.rows}
    assert kinds["w_data"] == kinds["w_scale_inv"] == "parameter"
    assert report.total == report.autograd_total == report.required


def test_models(device):
    """Between modules of ours and PyTorch's own: every storage counts once."""
    model = torch.nn.Sequential(
        build("LayerNormLinear", device, bias=False),
        torch.nn.GELU(),
        torch.nn.Linear(N, K, dtype=BF16, device=device),
        build("LayerNormMLP", device, activation="swiglu"),
        build("Linear", device),
    )
    x = given(device)
    with under("current"):
        report = te.memory_report(model, x)
        with Watch() as watch:
            y = model(x)  # lives, and with it what is kept
    there = watch.bytes(x, *model.parameters())
    assert y.requires_grad
    assert report.total == report.autograd_total == there > 0
    assert sum(report.by_module().values()) == report.total
    assert set(report.by_module()) == {"0", "1", "2", "3", "4"}
    assert report.after_backward == 0
    # The second GELU's input is saved by it, and the layer after it saves its output.
    assert [row.op for row in report.rows if row.module in "12"] == ["torch"] * 3
    text = str(report)
    assert f"kept for backward: {report.total:,} bytes" in text and "(of PyTorch)" in text


def test_shared_memory_counts_once(device):
    """One input for two modules; a view of a larger tensor is charged with what it keeps alive."""
    pair = torch.nn.ModuleList([build("Linear", device), build("Linear", device)])
    pair.forward = lambda x: pair[0](2 * x) + pair[1](x[:, :K])
    report = te.memory_report(pair, given(device))
    assert report.total == report.autograd_total == 2 * M * K

    def same_input(x):
        x = 2 * x
        return pair[0](x) + pair[1](x)

    pair.forward = same_input
    report = te.memory_report(pair, given(device))
    assert [row.kind for row in report.rows if row.name == "x"] == ["kept", "shared"]
    assert report.total == report.autograd_total == 2 * M * K


def test_formulas_are_formulas(device):
    """Evaluated with the letters of the call they give the bytes."""
    names = {"up": up, "ceil": ceil, "M": 160, "K": K, "F": F, "G": 2 * F, "e": 2}
    for kind in GEMM_MODULES:
        for recipe in RECIPES:
            module = build(
                kind, device, recipe, **({"activation": "swiglu"} if kind == "LayerNormMLP" else {})
            )
            with under(recipe):
                report = te.memory_report(module, given(device, 160))
            names["N"] = out_features(recipe, N)
            for row in report.rows:
                value = eval(row.formula, {}, names)  # pylint: disable=eval-used
                assert value == row.bytes, (kind, recipe, row)


def test_torch_autocast_copies_are_kept(device):
    """Parameters in fp32 are cast; the casts exist for backward."""
    torch.manual_seed(0)
    module = te.LayerNormLinear(K, N, device=device)
    x = torch.randn(M, K, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        report = te.memory_report(module, x)
        with Watch() as watch:
            y = module(x)
    assert y.requires_grad
    assert report.total == report.autograd_total == watch.bytes(x, *module.parameters())
    weight = next(row for row in report.rows if row.name == "weight")
    assert weight.kind == "kept" and weight.bytes == 2 * N * K


# --- compiled against eager -----------------------------------------------------------------------

# Every recipe and every module, but not all pairs.
PAIRS = [("LayerNormMLP", recipe) for recipe in RECIPES]
PAIRS += [(kind, r) for kind in GEMM_MODULES[:2] for r in ("none", "delayed", "nvfp4", "mxfp8_dq")]


@pytest.mark.feature(
    "te.memory_report; compiled code keeps no more",
    modes=("compiled",),
    others="see gradients of an exported program",
)
@trained_feature("saved tensors freed by backward", modes=("compiled",))
@pytest.mark.parametrize("kind,recipe", PAIRS)
def test_compiled_keeps_no_more(kind, recipe, device):
    """What AOTAutograd saves between its forward and backward graph, by storage."""
    module, x = build(kind, device, recipe), given(device)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = {}
    for name, call in (("eager", copy.deepcopy(module)), ("compiled", compiled)):
        with under(recipe):
            call(x)  # states and graphs exist
            with Watch() as watch:
                y = call(x)
        others = (call if name == "eager" else module).parameters()
        found[name] = watch.bytes(x, *others)
        torch.autograd.backward(outputs(y), [torch.ones_like(t) for t in outputs(y)])
        assert watch.tensors() == []
    assert found["compiled"] <= found["eager"]


@pytest.mark.parametrize("recipe", ("none", "delayed"))
def test_inductor_keeps_no_more(recipe, device):
    module, x = build("LayerNormMLP", device, recipe, activation="swiglu"), given(device)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True)
    found = []
    for call in (copy.deepcopy(module), compiled):
        with under(recipe):
            call(x)
            with Watch() as watch:
                y = call(x)
        others = module.parameters() if call is compiled else call.parameters()
        found.append(watch.bytes(x, *others))
        del y
    assert found[1] <= found[0]


# --- nothing stays --------------------------------------------------------------------------------


@trained_feature("saved tensors freed by backward", modes=("eager",))
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_freed_by_backward(kind, recipe, device):
    """At once, with no help of the garbage collector, and while the output still lives."""
    module, x = build(kind, device, recipe), given(device)
    gc.disable()
    try:
        with under(recipe):
            with Watch() as watch:
                y = module(x)
        assert watch.tensors()
        y.sum().backward()
        assert watch.tensors() == []
    finally:
        gc.enable()
    assert y.grad_fn is not None


def census():
    """Number and bytes of the tensors that exist."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if type(t) in (torch.Tensor, torch.nn.Parameter)
    }
    return len(tensors), sum(storages.values())


STEPS = ("plain", "cache", "inference", "explain", "report")


@pytest.mark.parametrize("recipe", ("none", "current", "delayed", "custom_delayed"))
def test_nothing_grows(recipe, device):
    """Tensors are counted, by the garbage collector, before and after 50 steps of each kind."""
    module, used = build("LayerNormMLP", device, recipe), recipe_of(recipe)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step(kind, i):
        x = given(device, seed=i)
        with te.autocast(enabled=used is not None, recipe=used):
            if kind == "explain":
                te.explain(module, x)
            elif kind == "report":
                te.memory_report(module, x)
            else:
                first = i % 3 == 0 if kind == "cache" else None
                with torch.set_grad_enabled(kind != "inference"):
                    y = module(x, is_first_microbatch=first)
                if kind in ("plain", "cache"):
                    y.sum().backward()
                    optimizer.step()

    counts = []
    for steps in (4, 50):
        for kind in STEPS:
            for i in range(steps):
                step(kind, i)
        counts.append(census())
    # Garbage of other tests may go meanwhile.
    assert counts[1][0] <= counts[0][0] and counts[1][1] <= counts[0][1]


# --- documentation --------------------------------------------------------------------------------


def documentation():
    """The text of the page."""
    return (ROOT / "docs" / "diagnostics.rst").read_text(encoding="utf-8")


def test_the_documented_table():
    """The bytes of each module and recipe are those of the report."""
    lines = re.findall(r"^``(\w+)`` +([\d,]+) +([\d,]+) +([\d,]+)$", documentation(), re.M)
    documented = {line[0]: [int(n.replace(",", "")) for n in line[1:]] for line in lines}
    assert set(documented) >= {"none", "current", "delayed", "block", "mxfp8", "nvfp4", "mxfp8_dq"}
    for recipe, sizes in documented.items():
        measured = []
        for module in (
            te.Linear(128, 256, params_dtype=BF16, device="cpu"),
            te.LayerNormLinear(128, 256, params_dtype=BF16, device="cpu"),
            te.LayerNormMLP(128, 256, activation="swiglu", params_dtype=BF16, device="cpu"),
        ):
            x = torch.zeros(512, 128, dtype=BF16, requires_grad=True)
            with under(recipe):
                measured.append(te.memory_report(module, x).total)
        assert sizes == measured, recipe


def test_the_documented_examples():
    """What the page shows is what is printed."""
    examples = re.findall(r"\.\. code-block:: text\n\n((?:    .*\n|\n)+)", documentation())
    assert len(examples) == 2
    model = torch.nn.Sequential(
        te.LayerNormLinear(64, 96, device="cpu"), te.Linear(96, 64, device="cpu")
    )
    x = torch.randn(5, 64, requires_grad=True)
    with te.autocast(recipe=recipe_of("current")):
        texts = str(te.explain(model, x)), str(te.memory_report(model, x))
    for example, text in zip(examples, texts):
        shown = [line.strip() for line in example.splitlines() if line.strip()]
        printed = [line.strip() for line in text.splitlines()]
        assert len(shown) > 20 and [line for line in shown if line not in printed] == []
