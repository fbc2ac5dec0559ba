# SPDX-License-Identifier: Apache-2.0
"""What the tests of quantized primary weights share: modules, bytes, and the bytes that must be."""

import block_references
import recipe_list
import references
import torch
from eager_support import BF16, K, random

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.custom_recipes.quantizer_factories import high_precision_factory

OUT = 96  # width of the output of a linear layer, and of the MLP; fits every format
# The class of a weight by the recipe that it was made with.
CLASSES = {
    "delayed": te.Float8Tensor,
    "current": te.Float8Tensor,
    "block": te.Float8BlockwiseQTensor,
    "mxfp8": te.MXFP8Tensor,
    "nvfp4": te.NVFP4Tensor,
    "custom_two_formats": te.HybridQuantizedTensor,
    "custom_identity": torch.nn.Parameter,
}
RECIPES = tuple(CLASSES)
QUANTIZED = tuple(name for name in RECIPES if name != "custom_identity")
WEIGHTS = {
    "Linear": ("weight",),
    "LayerNormLinear": ("weight",),
    "LayerNormMLP": ("fc1_weight", "fc2_weight"),
}


def recipe_of(name):
    """A new recipe of the given name."""
    if name == "custom_identity":
        return CustomRecipe(high_precision_factory)
    return recipe_list.recipe_of(name)


def initial(shape, dtype=BF16):
    """The values that `make` gives a weight of this shape."""
    return (random(*shape, seed=shape[0]) / shape[1] ** 0.5).to(dtype)


def fill(weight):
    """Initialise a weight with them."""
    weight.copy_(initial(weight.shape, weight.dtype))


def make(kind, recipe, device="cpu", dtype=BF16, init=None, **options):
    """A module whose weights are quantized by the recipe of this name (None: they are not), and
    whose other parameters are random; ``init`` are more arguments of ``quantized_model_init``.
    """
    options["init_method"] = fill
    if kind == "LayerNormMLP":
        options["output_layer_init_method"] = fill
    recipe = recipe_of(recipe) if isinstance(recipe, str) else recipe
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe, **(init or {})):
        module = getattr(te, kind)(K, OUT, params_dtype=dtype, device=device, **options)
    with torch.no_grad():
        for seed, (name, param) in enumerate(module.named_parameters()):
            if param.dim() == 1:
                param.copy_(random(*param.shape, seed=seed) * 0.2 + name.endswith("norm_weight"))
    return module


def twin_of(module):
    """A module of the same kind with the same values, none of them quantized."""
    param = next(iter(weights(module).values()))
    twin = make(type(module).__name__, None, param.device, param.dtype)
    with torch.no_grad():
        for ours, theirs in zip(twin.parameters(), module.parameters()):
            ours.copy_(theirs)
    return twin


def weights(module):
    """The weights of the GEMMs by name."""
    return {name: getattr(module, name) for name in WEIGHTS[type(module).__name__]}


def buffers(tensor):
    """Every buffer of a quantized tensor, or a plain tensor itself, as it is."""
    if not isinstance(tensor, te.QuantizedTensor):
        return [tensor.detach()]
    return tensor.prepare_for_saving()[0]


def snapshot(tensor):
    """Copies of the buffers."""
    return [None if buffer is None else buffer.clone() for buffer in buffers(tensor)]


def same_bytes(a, b):
    """Whether two tensors (or lists of buffers) consist of the same bytes."""
    a, b = [t if isinstance(t, list) else buffers(t) for t in (a, b)]
    return all(
        (x is None and y is None)
        or (x is not None and y is not None and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def values(tensor, columnwise=False):
    """fp32 values of the rowwise or of the columnwise data."""
    if not isinstance(tensor, te.QuantizedTensor):
        return tensor.detach().float()
    tensor = tensor.detach()
    if columnwise:
        tensor.update_usage(rowwise_usage=False)
    return tensor.dequantize(dtype=torch.float32)


def codes(tensor, columnwise=False):
    """Codes, one per element, of the rowwise data, or of the columnwise data as those of rows of
    the transpose.
    """
    found = tensor.operand_buffers()
    data = (found.col if columnwise else found.row).cpu()
    rows, columns = tensor.shape[::-1] if columnwise else tensor.shape
    parts = tensor.quant.split("|")
    quant = parts[-1 if columnwise else 0]
    if quant.startswith("nvfp4"):
        data = torch.stack((data & 15, data >> 4), -1).flatten(-2)
    if columnwise and quant.startswith("mxfp8"):
        data = data.t()
    return data[:rows, :columns]


def _per_tensor(x, scale=None):
    data, exact, scale = references.quantized(x, "e4m3", scale)
    inverse = (1.0 / scale.double()).float().double()
    return data, (exact * inverse).float()


def _blocks(rows):
    return torch.from_numpy(rows.codes), torch.from_numpy(rows.values).float()


def _mxfp8(x):
    return _blocks(block_references.mxfp8(x, "e4m3"))


def _square_block(x):
    return _blocks(block_references.block(x, "e4m3", pow2=True, square=True))


def _square_nvfp4(x):
    return _blocks(block_references.nvfp4(x, square=True))


# Rowwise and columnwise quantization of a weight, written without the package.
_REFERENCES = {
    "delayed": (lambda x: _per_tensor(x, 1.0),) * 2,
    "current": (_per_tensor,) * 2,
    "block": (_square_block,) * 2,
    "mxfp8": (_mxfp8,) * 2,
    "nvfp4": (_square_nvfp4,) * 2,
    "custom_two_formats": (_mxfp8, _square_block),
}


def expected(recipe, x, columnwise=False):
    """``(codes, fp32 values)`` of ``x`` quantized as a weight; columnwise ones of the transpose."""
    x = x.detach().cpu()
    return _REFERENCES[recipe][columnwise](x.t().contiguous() if columnwise else x)


def assert_quantized_from(weight, recipe, x, columnwise=True):
    """The bytes of ``weight`` are those of ``x``, in both orientations."""
    for columns in (False, True)[: 1 + columnwise]:
        data, exact = expected(recipe, x, columns)
        exact = exact.t() if columns else exact
        assert torch.equal(codes(weight, columns), data)
        assert torch.equal(values(weight, columns).cpu(), exact)
