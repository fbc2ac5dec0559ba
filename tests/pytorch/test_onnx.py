# SPDX-License-Identifier: Apache-2.0
"""ONNX: models with standard quantize and dequantize nodes, run by onnxruntime against eager."""

import collections

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import export
from transformer_engine.pytorch.core import ops
from transformer_engine.pytorch.core.operand import Part, dequantized
from transformer_engine.pytorch.formats.spec import QuantSpec

from deployment_support import BATCH, Recipe, small_model, trained
from compile_support import MODULES, K, assert_same_bits, build, random
from recipe_list import recipe_of

WHY = "ONNX export needs it: pip install transformer-engine[onnx]"
RECIPES = ("current", "delayed", "block", "block_hybrid", "mxfp8", "mxfp8_2d", "custom_square")
# Quantized operands have the same bytes; what differs is the order of fp32 sums, and functions.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(name="onnx")
def onnx_packages():
    """The package onnx, where all packages that these tests need are installed."""
    for name in ("onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=WHY)
    return pytest.importorskip("onnx", reason=WHY)


def to_onnx(model, path, dtype=torch.float32, opset=21):
    """Export with a dynamic batch; returns the nodes of the checked file."""
    import onnx

    with torch.no_grad(), te.onnx_export(enabled=True):
        program = torch.onnx.export(
            model,
            (random(32, K, dtype=dtype),),
            dynamo=True,
            opset_version=opset,
            custom_translation_table=export.te_translation_table,
            dynamic_shapes=({0: BATCH},),
            verbose=False,
        )
    program.save(path)
    onnx.checker.check_model(str(path), full_check=True)
    return onnx.load(path).graph.node


def run_onnx(path, x):
    """The first output of a file for input ``x``, computed by onnxruntime on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (given,), (returned,) = session.get_inputs(), session.get_outputs()
    if x.dtype != torch.bfloat16:
        return torch.from_numpy(session.run(None, {given.name: x.numpy()})[0])
    # numpy has no bf16: bytes in, and the output in memory of torch.
    binding, value = session.io_binding(), onnxruntime.OrtValue
    bytes_in = x.view(torch.uint16).numpy()
    binding.bind_ortvalue_input(given.name, value.ortvalue_from_numpy_with_onnx_type(bytes_in, 16))
    binding.bind_output(returned.name)
    session.run_with_iobinding(binding)
    return torch.from_dlpack(binding.get_outputs()[0]._ortvalue.to_dlpack()).clone()


def assert_close(path, model, dtype):
    """onnxruntime and eager agree for batches that the export did not see."""
    for rows in (48, 80):
        x = random(rows, K, seed=rows, dtype=dtype)
        with torch.no_grad():
            wanted = model(x)
        y = run_onnx(path, x)
        assert y.shape == wanted.shape and y.dtype == dtype
        assert_values_close(y, wanted, TOLERANCE[dtype])


def assert_values_close(y, wanted, tolerance):
    """Relative to the largest value: within the tolerance, but for a few rows.

    Where a sum of another order falls on the other side of a tie between two float8 codes, the next
    product has another operand in that row.
    """
    error = (y.double() - wanted.double()).abs() / wanted.double().abs().max()
    beyond = (error > tolerance).any(1).double().mean()
    assert beyond <= 0.1, f"{beyond:.0%} of the rows are off, up to {error.max()}"
    assert error.max() <= 0.03


def kinds(nodes):
    """How many nodes there are of each type."""
    return collections.Counter(node.op_type for node in nodes)


@pytest.mark.feature("ONNX in high precision", modes=("exported",), others="a form of export")
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_modules_in_high_precision(kind, dtype, onnx, tmp_path):
    """Nodes of ONNX only, none of them for quantization."""
    del onnx
    model = build(kind, dtype=dtype).eval()
    nodes = to_onnx(model, tmp_path / "model.onnx", dtype)
    assert {node.domain for node in nodes} == {""}
    assert not {"QuantizeLinear", "DequantizeLinear"} & set(kinds(nodes))
    assert_close(tmp_path / "model.onnx", model, dtype)


def test_bf16_in_high_precision(onnx, tmp_path):
    """onnxruntime's CPU provider multiplies no bf16, so ONNX's own evaluator judges this file."""
    from onnx.reference import ReferenceEvaluator
    import ml_dtypes

    model, x = small_model(), random(8, K)
    nodes = to_onnx(model, tmp_path / "model.onnx", torch.bfloat16)
    products = [node.output[0] for node in nodes if node.op_type in ("MatMul", "Gemm")]
    types = {v.name: v.type.tensor_type.elem_type for v in _values(onnx, tmp_path / "model.onnx")}
    assert len(products) == 4 and {types[name] for name in products} == {onnx.TensorProto.BFLOAT16}
    y = ReferenceEvaluator(str(tmp_path / "model.onnx")).run(
        None, {"x": x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)}
    )[0]
    with torch.no_grad():
        wanted = model(x).double()
    error = (torch.from_numpy(y.astype("float64")) - wanted).abs().max() / wanted.abs().max()
    assert error <= 2 * TOLERANCE[torch.bfloat16]


def _values(onnx, path):
    graph = onnx.load(path).graph
    return (*graph.value_info, *graph.output)


@pytest.mark.feature(
    "ONNX with QuantizeLinear and DequantizeLinear",
    modes=("exported",),
    others="a form of export",
    modules=("LayerNormMLP",),
)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe, dtype, onnx, tmp_path):
    """Each GEMM multiplies two dequantized float8 tensors."""
    model = Recipe(
        build("LayerNormMLP", dtype=dtype, recipe=recipe, activation="swiglu"), recipe_of(recipe)
    ).eval()
    if recipe == "delayed":
        trained(model, dtype=dtype)
    nodes = to_onnx(model, tmp_path / "model.onnx", dtype)
    assert {node.domain for node in nodes} == {""}
    count = kinds(nodes)
    assert count["QuantizeLinear"] == count["DequantizeLinear"] == 4
    float8 = {v.name: v.type.tensor_type.elem_type for v in _values(onnx, tmp_path / "model.onnx")}
    quantized = [float8[node.input[0]] for node in nodes if node.op_type == "DequantizeLinear"]
    assert set(quantized) == {onnx.TensorProto.FLOAT8E4M3FN}
    assert_close(tmp_path / "model.onnx", model, dtype)


def test_scales_of_blocks_are_an_operand(onnx, tmp_path):
    """MXFP8 dequantizes with a scale for each 32 values of a row."""
    del onnx
    model = Recipe(build("Linear", recipe="mxfp8"), recipe_of("mxfp8")).eval()
    nodes = to_onnx(model, tmp_path / "model.onnx", torch.bfloat16)
    found = [node for node in nodes if node.op_type == "DequantizeLinear"]
    for node in found:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        assert attributes["axis"] == 1 and attributes["block_size"] == 32
    assert len(found) == 2


@pytest.mark.feature("ONNX with QuantizeLinear and DequantizeLinear", modes=("exported",))
def test_delayed_scales_are_constants(onnx, tmp_path):
    """Nothing in the file looks for the largest value of a tensor."""
    del onnx
    model = trained(small_model("delayed", dtype=torch.float32), dtype=torch.float32)
    nodes = to_onnx(model, tmp_path / "model.onnx")
    assert "ReduceMax" not in kinds(nodes)
    assert_close(tmp_path / "model.onnx", model, torch.float32)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.feature(
    "ONNX with QuantizeLinear and DequantizeLinear",
    modes=("exported",),
    no="NVFP4BlockScaling: ONNX has no operators for two levels of scales",
)
def test_recipes_that_onnx_has_not(onnx, tmp_path):
    """The error says which recipes export."""
    del onnx
    with pytest.raises(Exception, match="(?s)NVFP4.*Recipes that export: none.*MXFP8BlockScaling"):
        to_onnx(small_model("nvfp4"), tmp_path / "model.onnx", torch.bfloat16)


def test_old_operator_sets(onnx, tmp_path):
    """Scales of blocks are younger than the exporter's default."""
    del onnx
    model = Recipe(build("Linear", recipe="mxfp8"), recipe_of("mxfp8")).eval()
    with pytest.raises(Exception, match="(?s)32 values.*opset_version=21"):
        to_onnx(model, tmp_path / "model.onnx", torch.bfloat16, opset=20)


@pytest.mark.parametrize("made", ("cached", "primary"))
def test_weights_that_were_quantized_before(made, onnx, tmp_path):
    """Their bytes are not those of an ONNX file: the error says what to do."""
    del onnx
    recipe, options = recipe_of("current"), {}
    with te.quantized_model_init(enabled=made == "primary", recipe=recipe):
        module = te.Linear(K, 48, params_dtype=torch.float32, device="cpu")
    if made == "cached":
        options = {"is_first_microbatch": False}
    model = Recipe(module, recipe, **options).eval()
    with torch.no_grad():
        model(random(32, K, dtype=torch.float32))
    with pytest.raises(Exception, match="(?s)quantized before.*parameters in high precision"):
        to_onnx(model, tmp_path / "model.onnx")


# --- the export mode by itself, without any of the packages --------------------------------------


def test_mode(device):
    """Only in the context, also after an error; eager calls are what they were."""
    model = small_model("current", device)
    x = random(8, K, device=device)
    with torch.no_grad():
        wanted = model(x)
        with te.onnx_export(enabled=False):
            assert not export.is_in_onnx_export_mode()
        with pytest.raises(KeyError), te.onnx_export(enabled=True):
            assert export.is_in_onnx_export_mode()
            assert_same_bits(model(x), wanted, "eager call in export mode")
            raise KeyError
    assert not export.is_in_onnx_export_mode()


def test_warmed_up():
    """Modules that never ran have no delayed scales worth exporting."""
    module = build("Linear")
    with pytest.raises(AssertionError, match="Call it once"):
        export.assert_warmed_up(module)
    module(random(8, K))
    export.assert_warmed_up(module)
    export.assert_warmed_up(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("recipe", ("delayed", "block", "mxfp8_2d", "custom_square"))
def test_exported_program_in_export_mode(recipe):
    """The ops that become ONNX nodes have bodies: the program computes what eager computes."""
    model = small_model(recipe, dtype=torch.float32)
    with torch.no_grad(), te.onnx_export(enabled=True):
        program = torch.export.export(
            model, (random(32, K, dtype=torch.float32),), dynamic_shapes=({0: BATCH},), strict=False
        ).run_decompositions()
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    own = {name for name in names if name.startswith("transformer_engine")}
    assert own == {
        "transformer_engine.onnx_quantize.default",
        "transformer_engine.onnx_dequantize.default",
    }
    x = random(80, K, seed=1, dtype=torch.float32)
    with torch.no_grad():
        y, wanted = program.module()(x), model(x)
    assert_values_close(y, wanted, TOLERANCE[torch.float32])


@pytest.mark.parametrize("fmt", ("e4m3", "e5m2"))
def test_opcheck(fmt, device):
    """Shapes and devices of both ops; torch's check of schemas can not compare float8 tensors."""
    from transformer_engine.pytorch.onnx import quantization  # registers them

    del quantization
    own = torch.ops.transformer_engine
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x = random(5, 40, device=device, dtype=torch.float32) * 200
    torch.library.opcheck(own.onnx_quantize.default, (x, fmt), test_utils=checks)
    data = own.onnx_quantize(x, fmt)
    for block, shape in ((0, ()), (32, (5, 2))):
        scale = torch.full(shape, 0.25, device=device)
        arguments = (data, scale, block)
        torch.library.opcheck(own.onnx_dequantize.default, arguments, test_utils=checks)


SPECS = (
    QuantSpec("current", "e4m3"),
    QuantSpec("current", "e5m2", pow2=True),
    QuantSpec("block", "e4m3", pow2=True),
    QuantSpec("block", "e4m3", dim=2),
    QuantSpec("block", "e5m2", eps=1e-2),
    QuantSpec("mxfp8", "e4m3"),
    QuantSpec("mxfp8", "e5m2", dim=2),
)


def hard_values(kind):
    """Blocks of every magnitude, ties between codes, zeros, and amaxes that are powers of two."""
    x = random(64, 256, dtype=torch.float32)
    if kind == "random":
        return x
    if kind == "zeros":
        return torch.zeros_like(x)
    if kind == "powers":
        exponents = torch.randint(-60, 60, x.shape, generator=torch.Generator().manual_seed(0))
        return torch.exp2(exponents.float()) * x.sign()
    if kind == "tiny":
        return x * torch.exp2(torch.linspace(-140, -60, 64)).unsqueeze(1)
    return x.bfloat16().float()  # many quotients of two bf16 numbers lie between two codes


@pytest.mark.parametrize("values", ("random", "zeros", "powers", "tiny", "ties"))
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.encode())
def test_bytes_and_scales_are_those_of_the_kernels(spec, values):
    """Every value of the tensor that ONNX makes equals that of the format's definition."""
    from transformer_engine.pytorch.onnx.leaves import ONNX

    x, quant = hard_values(values), spec.encode()
    row, _, scale_inv, _, amax, _ = ops.EAGER.quantize(x, quant, None, 0, None, True, False, None)
    wanted = dequantized(ops.EAGER, Part(row, scale_inv, amax, quant), torch.float32)
    buffers = ONNX.quantize(x, quant, None, 0, None, True, False, None)
    assert_same_bits(buffers.row.view(torch.uint8), row, "bytes")
    y = ONNX.dequantize(buffers.row, buffers.scale_inv, None, quant, False, torch.float32)
    assert_same_bits(y, wanted, "values")
