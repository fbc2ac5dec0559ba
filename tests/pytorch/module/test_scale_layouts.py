# SPDX-License-Identifier: Apache-2.0
"""In which order each kernel writes block scales, over everything that decides it.

The order of scales is part of the quantization string that a kernel obeys, and a consumer finds in
its own string. For both modules that contain a norm, on a GPU of compute capability 10.0 as on a
CPU, these tests compare

* the string that each kernel was given with a rule that the test states itself,
* the bytes that it wrote with a compact quantization of the same values, sorted by the formula of
  the swizzled order,
* the string under which a GEMM reads a buffer, in forward and in backward, with the one under which
  the buffer was written,
* the shapes and the presence of results with what the fake of the module op says,
* the strings in compiled graphs, and the results, with eager.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from compile_support import Twins, graphs, random, recorded_runs, with_recipe

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling
from transformer_engine.pytorch.backends import reference, registry
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.core import operand as operands
from transformer_engine.pytorch.core import ops, weights
from transformer_engine.pytorch.core.config import ModuleConfig
from transformer_engine.pytorch.dynamo import custom_op
from transformer_engine.pytorch.formats.layout import LayoutFlags, Quantized
from transformer_engine.pytorch.tensor import MXFP8Quantizer

BLACKWELL, NO_GPU = (10, 0), (0, 0)
KINDS, NORMS = ("LayerNormLinear", "LayerNormMLP"), ("LayerNorm", "RMSNorm")
# (rows, hidden width, output width of the linear layer, width inside of the MLP)
SHAPES = {
    "aligned": (256, 128, 256, 384),
    "64_rows": (64, 128, 128, 128),
    "unaligned": (77, 160, 96, 224),
}


def square_mxfp8(role):
    """Square MXFP8 blocks for inputs too, which only a custom recipe gives."""
    del role
    return MXFP8Quantizer(DType.kFloat8E4M3, with_2d_quantization=True)


RECIPES = {
    "mxfp8": MXFP8BlockScaling,
    "mxfp8_2d": lambda: CustomRecipe(square_mxfp8),
    "nvfp4": lambda: NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4_without_rht": lambda: NVFP4BlockScaling(True, True),
    "nvfp4_four_over_six": lambda: NVFP4BlockScaling(True, True, nvfp4_4over6="all"),
    "nvfp4_row_scaled": lambda: NVFP4BlockScaling(True, True, row_scaled_activation=True),
}


@dataclass(frozen=True)
class Surroundings:
    """What the environment and the device say."""

    cudnn: bool = False
    fusion: bool = True
    capability: tuple = BLACKWELL

    def install(self, monkeypatch):
        """Make it so."""
        monkeypatch.setenv("NVTE_NORM_FWD_USE_CUDNN", str(int(self.cudnn)))
        monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT_CAST_FUSION", str(int(not self.fusion)))
        for module in (operands, weights):
            monkeypatch.setattr(module, "capability_of", lambda device: self.capability)

    def options(self, quant: str, producer: str, rows: int, columns: int) -> set:
        """Which of "swizzled" and "unrounded" a result has, by the rules of the formats."""
        if quant.startswith("mxfp8"):
            aligned = rows % 128 == 0 and columns % 128 == 0
            return {"unrounded"} if self.cudnn and producer == "norm" and aligned else {"swizzled"}
        if producer == "quantize":
            return {"swizzled"}
        if self.capability != BLACKWELL:
            return set()
        if "rht" in quant:
            wanted = self.fusion and rows % 64 == 0 and columns % 128 == 0
        else:
            square = "dim=2" in quant and "four_over_six" not in quant
            wanted = square and rows % 128 == 0 and columns % 128 == 0
        return {"swizzled"} if wanted else set()


def build(kind, norm, shape, want, device="cpu", seed=0):
    """A bf16 module with random parameters."""
    _, width, out, ffn = SHAPES[shape]
    sizes = (width, out) if kind == "LayerNormLinear" else (width, ffn)
    options = {"normalization": norm, "return_layernorm_output": want, "device": device}
    if kind == "LayerNormMLP":
        options["activation"] = "srelu"
    module = getattr(te, kind)(*sizes, params_dtype=torch.bfloat16, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return module


# --- what eager does ----------------------------------------------------------------------------


class Recorder:
    """Everything that was quantized, and all GEMMs, of the calls while it is installed."""

    def __init__(self, monkeypatch, module):
        self.weights = {param.data_ptr() for param in module.parameters()}
        self.backward, self.made, self.gemms = False, [], []
        self._patch(monkeypatch, "quantize", self._quantize)
        monkeypatch.setattr(ops.EAGER, "release", lambda *tensors: None)  # they are looked at
        self._patch(monkeypatch, "norm_forward", self._norm)
        self._patch(monkeypatch, "activation_forward", self._activation_forward)
        self._patch(monkeypatch, "activation_backward", self._activation_backward)
        self._patch(monkeypatch, "gemm", self._gemm)

    @staticmethod
    def _patch(monkeypatch, name, record):
        leaf = getattr(ops.EAGER, name)

        def recorded(*args):
            results = leaf(*args)
            record(leaf, args, results)
            return results

        monkeypatch.setattr(ops.EAGER, name, recorded)

    def _note(self, producer, quant, source, buffers, amax=None):
        """``source`` are the values that were quantized; fp32 ones where they were not rounded."""
        if quant:
            self.made.append((producer, quant, source, Quantized(*buffers), amax))

    def _quantize(self, leaf, args, results):
        del leaf
        x, quant = args[:2]
        producer = "bias_grad" if self.backward else "quantize"
        producer = "weight" if x.data_ptr() in self.weights else producer
        self._note(producer, quant, x, results)

    def _norm(self, leaf, args, results):
        x, weight, bias, eps, zero_centered, kind, quant, _, _, _, _, want = args
        if quant:
            x = x.float() if "unrounded" in quant else x
            plain = ("", None, 0, False, False, True)
            source = leaf(x, weight, bias, eps, zero_centered, kind, *plain)[0]
            # The reference package quantizes a norm output that is returned in a call of its own.
            self._note("quantize" if want else "norm", quant, source, results[3:])

    def _activation_forward(self, leaf, args, results):
        x, *parameters, quant = args[:6]
        plain = ("", None, 0, False, False, True)
        source, exact = (leaf(t, *parameters, *plain)[0] for t in (x, x.float()))
        self._note("activation", quant, source, results[1:], exact.abs().max().view(1))

    def _activation_backward(self, leaf, args, results):
        dy, x, *parameters, quant = args[:7]
        plain = ("", None, 0, False, False, True, False, None)
        source, exact = (
            leaf(*tensors, *parameters, *plain)[0] for tensors in ((dy, x), (dy.float(), x.float()))
        )
        self._note("activation", quant, source, results[1:-1], exact.abs().max().view(1))

    def _gemm(self, leaf, args, results):
        del leaf, results
        a, b, _, a_scale, b_scale, _, _, a_quant, b_quant, *_ = args
        self.gemms += [(a, a_scale, a_quant), (b, b_scale, b_quant)]

    def strings(self):
        """Quantization strings in the order in which they were used."""
        return [quant for _, quant, *_ in self.made]


def training_step(recorder, module, recipe, rows, width):
    """A forward and a backward of both outputs."""
    outputs = with_recipe(module, random(rows, width).requires_grad_(), recipe)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    recorder.backward = True
    torch.autograd.backward(outputs, [random(*y.shape, seed=i + 1) for i, y in enumerate(outputs)])


def unswizzled(scales):
    """Bytes ``[R, C]`` in their logical order, by the formula of the swizzled one."""
    rows, columns = scales.shape
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tile = (i // 128) * (columns // 4) + j // 4
    offset = tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    return scales.flatten()[offset.flatten()].view(rows, columns)


def assert_bytes(quant, source, buffers, amax):
    """The buffers hold a compact quantization of ``source``, its scales in the order stated."""
    compact = ",".join(part for part in quant.split(",") if part != "swizzled=1")
    if not quant.startswith("nvfp4") or "rht" in quant or "row_scaled" in quant:
        amax = None
    present = (buffers.row is not None, buffers.col is not None)
    wanted = Quantized(*reference.quantize(source, compact, None, 0, amax, *present, None))
    swizzled = "swizzled=1" in quant
    for name, got, want in zip(Quantized._fields, buffers, wanted):
        assert (got is None) == (want is None), name
        if got is None:
            continue
        assert got.shape == want.shape and got.dtype == want.dtype, name
        if name == "scale_inv" and swizzled:
            got = unswizzled(got)
        if name == "col_scale_inv" and swizzled:
            # MXFP8 does not transpose columnwise buffers, but swizzles the transpose.
            transposed = quant.startswith("mxfp8")
            columns = got.shape[0] if transposed else got.shape[1]
            got = unswizzled(got.flatten().view(-1, columns))
            got = got.t() if transposed else got
        assert torch.equal(got, want), f"{name} of {quant}"


def assert_reads(recorder):
    """Each operand of a GEMM is read as what it was written as."""
    written = {}
    for _, quant, _, buffers, _ in recorder.made:
        for data, scale_inv in (
            (buffers.row, buffers.scale_inv),
            (buffers.col, buffers.col_scale_inv),
        ):
            if data is not None:
                written[data.data_ptr()] = (quant, scale_inv)
    assert len(recorder.gemms) in (6, 12)
    for data, scale_inv, quant in recorder.gemms:
        made_as, made_scale_inv = written[data.data_ptr()]
        assert quant == made_as and scale_inv.data_ptr() == made_scale_inv.data_ptr()


CASES = [
    (kind, norm, recipe, shape, Surroundings(cudnn, fusion))
    for kind, norm, recipe, shape in itertools.product(KINDS, NORMS, RECIPES, SHAPES)
    for cudnn, fusion in itertools.product((False, True), (True, False))
    if fusion or recipe.startswith("nvfp4")
]
CASES += [
    (kind, "RMSNorm", recipe, shape, Surroundings(capability=NO_GPU))
    for kind, recipe, shape in itertools.product(KINDS, RECIPES, SHAPES)
]


def case_name(value):
    """Test id of a part of a case."""
    if not isinstance(value, Surroundings):
        return value
    gpu = "blackwell" if value.capability == BLACKWELL else "cpu"
    return f"{gpu}-cudnn={value.cudnn}-fusion={value.fusion}"


@pytest.mark.parametrize("kind,norm,recipe,shape,where", CASES, ids=case_name)
def test_layouts(kind, norm, recipe, shape, where, monkeypatch):
    """Strings, bytes and readers of everything that a training step quantizes."""
    where.install(monkeypatch)
    for want in (False, True):
        module = build(kind, norm, shape, want)
        with monkeypatch.context() as patch:
            recorder = Recorder(patch, module)
            training_step(recorder, module, RECIPES[recipe](), *SHAPES[shape][:2])
        producers = [producer for producer, *_ in recorder.made]
        assert ("norm" in producers) != want
        for producer, quant, source, buffers, amax in recorder.made:
            found = {part.partition("=")[0] for part in quant.split(",")[2:]}
            expected = where.options(quant, producer, *source.shape)
            assert found & {"swizzled", "unrounded"} == expected, (producer, quant)
            assert_bytes(quant, source, buffers, amax)
        assert_reads(recorder)


def test_every_layout_occurs(monkeypatch):
    """The cases above are not all alike: norms leave both orders, rounded and unrounded."""
    seen = set()
    for _, norm, recipe, shape, where in CASES:
        if norm == "RMSNorm" and where.capability == BLACKWELL:
            with monkeypatch.context() as patch:
                where.install(patch)
                quant = {"mxfp8": "mxfp8,e4m3,swizzled=1", "nvfp4": "nvfp4,e2m1,swizzled=1,rht=1"}
                quant = quant.get(recipe)
                if quant is not None:
                    flags = LayoutFlags(where.cudnn, where.fusion)
                    cfg, device = ModuleConfig(flags=flags), torch.device("cpu")
                    rows, width = SHAPES[shape][:2]
                    seen.add(operands.made_quant(cfg, quant, "norm", rows, width, device))
    assert seen == {
        "mxfp8,e4m3,swizzled=1",
        "mxfp8,e4m3,unrounded=1",
        "nvfp4,e2m1,swizzled=1,rht=1",
        "nvfp4,e2m1,rht=1",
    }


# --- what a compiler is told ----------------------------------------------------------------------


def description(tensor):
    """What a compiler relies on."""
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.stride())


@pytest.mark.parametrize("kind,norm,recipe,shape,where", CASES[::3], ids=case_name)
def test_fakes(kind, norm, recipe, shape, where, monkeypatch):
    """The fakes of the module ops, and of each norm, answer what the real ones return."""
    where.install(monkeypatch)
    calls, norm_calls = recorded_runs(monkeypatch), []
    norm_forward = ops.EAGER.norm_forward

    def recorded_norm(*args):
        norm_calls.append((ops.GRAPH.norm_forward, args, norm_forward(*args)))
        return norm_calls[-1][-1]

    monkeypatch.setattr(ops.EAGER, "norm_forward", recorded_norm)
    rows, width, *_ = SHAPES[shape]
    for want in (False, True):
        outputs = with_recipe(
            build(kind, norm, shape, want), random(rows, width).requires_grad_(), RECIPES[recipe]()
        )
        outputs = outputs if want else (outputs,)
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert len(calls) == 4 and len(norm_calls) == 2
    for op, arguments, results in calls + norm_calls:
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            answers = op(*fakes)
        assert [*map(description, answers)] == [*map(description, results)], op


def collecting(strings):
    """A backend that notes the quantization strings of the leaf ops in its graphs."""

    def compiler(graph, _):
        for node in graph.graph.nodes:
            name = str(node.target)
            if name.startswith("transformer_engine.") and "gemm" not in name:
                strings.extend(a for a in node.args if isinstance(a, str) and a[:5] in KNOWN)
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=compiler)


KNOWN = ("mxfp8", "nvfp4")
# Each module, norm and recipe in all shapes; flags and the returned output in turn.
COMPILED = [
    (kind, norm, recipe, shape, Surroundings(i % 2 == 1, i % 3 != 2), i % 5 < 2)
    for i, (kind, norm, recipe, shape) in enumerate(
        itertools.product(KINDS, NORMS, RECIPES, SHAPES)
    )
]


@pytest.mark.parametrize("kind,norm,recipe,shape,where,want", COMPILED, ids=case_name)
def test_compiled(kind, norm, recipe, shape, where, want, monkeypatch):
    """The graph asks for the layouts that eager asks for, and gives the same bits."""
    where.install(monkeypatch)
    monkeypatch.setattr(custom_op, "stays_whole", lambda *_: False)  # leaf ops show their strings
    strings = []
    module = build(kind, norm, shape, want)
    twins = Twins(module, backend=collecting(strings))
    rows, width, *_ = SHAPES[shape]
    with monkeypatch.context() as patch:
        recorder = Recorder(patch, twins.eager)
        forward = twins.forward(random(rows, width), RECIPES[recipe]())
        recorder.backward = True
        forward.backward()
    # Of eager, and of the graph when it ran.
    assert sorted(2 * strings) == sorted(recorder.strings()) and strings
    assert graphs() == 1


@pytest.mark.parametrize("recipe", ("mxfp8", "nvfp4"))
def test_dynamic_rows(recipe, monkeypatch):
    """A graph serves all batches of its alignment; another alignment gets another graph."""
    Surroundings(cudnn=True).install(monkeypatch)
    twins, kept = Twins(build("LayerNormMLP", "RMSNorm", "aligned", False)), RECIPES[recipe]()
    counts = []
    for seed, rows in enumerate((128, 256, 384, 77, 33, 128, 96)):
        twins.step(random(rows, 128, seed=seed), kept, seed=seed)
        counts.append(graphs())
    # The second batch makes the size dynamic.
    assert counts[:3] == [1, 2, 2] and counts[3:] == [3] * 4


@pytest.mark.parametrize("cudnn", (False, True))
@pytest.mark.parametrize("recipe", ("mxfp8", "nvfp4", "nvfp4_without_rht"))
def test_unbacked_rows(recipe, cudnn, monkeypatch):
    """Where the graph does not know the rows, it chooses an order that is right for all of them.

    Whether the norm's fp32 result is quantized is then decided by the kernel.
    """

    def unbacked(x):
        torch._dynamo.decorators.mark_unbacked(x, 0)
        return x

    Surroundings(cudnn=cudnn).install(monkeypatch)
    twins, kept = Twins(build("LayerNormMLP", "RMSNorm", "aligned", False)), RECIPES[recipe]()
    for seed, rows in enumerate((128, 7, 64, 0, 1, 256)):
        twins.step(random(rows, 128, seed=seed), kept, seed=seed, view=unbacked)
    assert graphs() == 1


def test_capability_is_that_of_the_output_device(monkeypatch):
    """Not that of the current device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(registry, "device_capability", {0: (9, 0), 1: (10, 0)}.get)
    for index, swizzled in ((0, False), (1, True)):
        device = torch.device("cuda", index)
        assert registry.capability_of(device) == ((9, 0), (10, 0))[index]
        quant = "nvfp4,e2m1,swizzled=1,rht=1"
        made = operands.made_quant(ModuleConfig(), quant, "norm", 128, 128, device)
        assert ("swizzled" in made) == swizzled
        quant = "nvfp4,e2m1,dim=2,swizzled=1"
        assert ("swizzled" in weights.made_weight_quant(quant, 128, 256, device)) == swizzled
