# SPDX-License-Identifier: Apache-2.0
"""Shapes of compiled calls: how many graphs, equal to eager, and what a bad shape says.

PyTorch itself makes a graph of its own for size 1 and for size 0 of a dynamic dimension, unless the
dimension is marked unbacked; all sizes from 2 on share one.
"""

import pytest
import torch

from compile_support import (
    FFN,
    GEMM_MODULES,
    K,
    N,
    OTHER_RECIPES,
    Twins,
    build,
    graphs,
    random,
    recipe_of,
    with_recipe,
)

# Every module and every per-tensor recipe, but not all pairs.
FEW = [("Linear", "delayed"), ("LayerNormLinear", "none"), ("LayerNormMLP", "current")]
CASES = [*FEW, ("Linear", "current"), ("LayerNormMLP", "delayed")]
CASES += [("LayerNorm", "none"), ("RMSNorm", "none")]
# The other recipes, on one module each; and one of each format.
OTHERS = [(GEMM_MODULES[i % 3], recipe) for i, recipe in enumerate(OTHER_RECIPES)]
FORMATS = [("Linear", "nvfp4"), ("LayerNormMLP", "mxfp8"), ("LayerNormLinear", "block")]


def marked(*dims, mark=torch._dynamo.mark_dynamic):
    """A ``view`` that marks dimensions of the input."""

    def view(x):
        for dim in dims:
            mark(x, dim)
        return x

    return view


def steps(twins, shapes, recipe, device, **options):
    """One training step for each input shape; the number of graphs after each."""
    counts = []
    for i, shape in enumerate(shapes):
        twins.step(random(*shape, device=device, seed=i), recipe, seed=i, **options)
        counts.append(graphs())
    return counts


@pytest.mark.feature("dynamic batch", modes=("eager", "compiled"))
@pytest.mark.parametrize("kind,recipe", CASES)
def test_mark_dynamic(kind, recipe, device):
    """One graph for all batches, one more for a single row, one more for none."""
    twins, recipe = Twins(build(kind, device)), recipe_of(recipe)
    shapes = [(rows, K) for rows in (16, 32, 48, 7, 1, 0, 1, 0, 2, 64)]
    counts = steps(twins, shapes, recipe, device, view=marked(0))
    assert counts[:4] == [1] * 4
    assert counts[4] <= 2 and counts[5] <= 3
    assert counts[5:] == [counts[5]] * 5


@pytest.mark.parametrize("kind,recipe", OTHERS)
def test_any_number_of_rows(kind, recipe, device):
    """No number of rows is refused by any other recipe, nor gets a graph of its own."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    shapes = [(rows, K) for rows in (33, 7, 1, 0, 128)]
    assert steps(twins, shapes, recipe, device, view=marked(0)) == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("kind,recipe", CASES)
def test_dynamic_true(kind, recipe, device):
    """``dynamic=True``: one graph from the first call on."""
    twins, recipe = Twins(build(kind, device), dynamic=True), recipe_of(recipe)
    assert steps(twins, [(16, K), (32, K), (48, K), (7, K)], recipe, device) == [1] * 4


@pytest.mark.parametrize("kind,recipe", CASES + FORMATS)
def test_automatic_dynamic(kind, recipe, device):
    """Default: the second size makes the batch dynamic; then the number of graphs stays."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    shapes = [(16, K), (16, K), (32, K), (48, K), (7, K), (16, K)]
    assert steps(twins, shapes, recipe, device) == [1, 1, 2, 2, 2, 2]


UNBACKED = [(*case, "aot_eager") for case in CASES + OTHERS[::2]]
UNBACKED += [("LayerNormMLP", recipe, "inductor") for recipe in ("delayed", "nvfp4")]


@pytest.mark.parametrize("kind,recipe,backend", UNBACKED)
def test_mark_unbacked(kind, recipe, backend, device):
    """An unbacked batch: one graph for every size, one row and no row included."""
    twins = Twins(build(kind, device, recipe=recipe), backend=backend)
    recipe = recipe_of(recipe)
    unbacked = marked(0, mark=torch._dynamo.decorators.mark_unbacked)
    shapes = [(rows, K) for rows in (16, 0, 1, 7)]
    assert steps(twins, shapes, recipe, device, view=unbacked) == [1] * 4


@pytest.mark.parametrize("kind,recipe", FEW + FORMATS)
def test_two_dynamic_dimensions(kind, recipe, device):
    """Sequence and batch of a 3-D input vary on their own."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    shapes = [(16, 2, K), (8, 3, K), (5, 7, K), (2, 2, K), (16, 4, K)]
    assert steps(twins, shapes, recipe, device, view=marked(0, 1)) == [1] * 5


@pytest.mark.parametrize("shape", ((K,), (1, K), (6, 2, K), (3, 1, K), (2, 3, 4, K), (0, 3, K)))
@pytest.mark.parametrize("kind,recipe", FEW + CASES[-2:] + FORMATS)
def test_ranks(kind, recipe, shape, device):
    """Inputs of one to four dimensions; a gemm module gives a 1-D input a leading dimension."""
    twins = Twins(build(kind, device, recipe=recipe))
    y, *_ = twins.step(random(*shape, device=device), recipe_of(recipe))
    lead = shape[:-1] if len(shape) > 1 or kind in ("LayerNorm", "RMSNorm") else (1,)
    assert y.shape[:-1] == torch.Size(lead)
    assert graphs() == 1


RETURNED = [("LayerNormLinear", "delayed", "inductor"), ("LayerNormMLP", "current", "inductor")]
RETURNED += [
    (("LayerNormMLP", "LayerNormLinear")[i % 2], recipe, "aot_eager")
    for i, recipe in enumerate(OTHER_RECIPES)
]


@pytest.mark.parametrize("kind,recipe,backend", RETURNED)
def test_returned_norm_output(kind, recipe, backend, device):
    """The returned norm output follows the dynamic shape of the input, gradient included."""
    options = {"return_layernorm_output": True, "return_bias": True}
    module = build(kind, device, recipe=recipe, **options)
    twins, recipe = Twins(module, backend=backend, dynamic=True), recipe_of(recipe)
    for i, (rows, columns) in enumerate(((4, 3), (5, 2), (2, 9))):
        x = random(rows, columns, K, device=device, seed=i)
        _, _, ln_out = twins.step(x, recipe, seed=i)
        assert ln_out.shape == x.shape
    assert graphs() == 1


@pytest.mark.parametrize("first", (K, N, FFN, 3))
@pytest.mark.parametrize("kind,recipe", FEW + FORMATS[:2])
def test_batch_equals_a_feature_dimension(kind, recipe, first, device):
    """A batch as large as a feature dimension, or the amax history, does not fix the batch."""
    twins, recipe = Twins(build(kind, device, recipe=recipe)), recipe_of(recipe)
    shapes = [(first, K), (16, K), (5, K), (first, K)]
    assert steps(twins, shapes, recipe, device, view=marked(0)) == [1] * 4


def test_dynamic_true_with_batch_equal_to_width(device):
    """``dynamic=True`` ties equal sizes of an input (torch's rule): one graph more, then stable."""
    twins = Twins(build("Linear", device), dynamic=True)
    assert steps(twins, [(K, K), (16, K), (K, K), (48, K)], None, device)[1:] == [2, 2, 2]


VIEWS = {
    "transposed": (lambda t: t.t(), (K, 24)),
    "every_second_column": (lambda t: t[:, ::2], (24, 2 * K)),
    "every_second_row": (lambda t: t[::2], (24, K)),
    "expanded": (lambda t: t.expand(24, K), (1, K)),
    "permuted": (lambda t: t.permute(1, 0, 2), (4, 6, K)),
    "narrow": (lambda t: t[3:], (24, K)),
    # Counts as contiguous, whatever the stride of its only row; Inductor makes such tensors.
    "one_row": (lambda t: t.as_strided((1, K), (1, 1)), (1, K)),
}


LAYOUTS = [
    (kind, layout, "aot_eager")
    for kind in ("Linear", "LayerNormMLP", "LayerNorm")
    for layout in sorted(VIEWS)
]
LAYOUTS += [("LayerNormLinear", layout, "aot_eager") for layout in ("transposed", "expanded")]
LAYOUTS += [("LayerNormMLP", layout, "inductor") for layout in ("transposed", "expanded")]


@pytest.mark.feature("inputs that are not contiguous", modes=("eager", "compiled"))
@pytest.mark.parametrize("kind,layout,backend", LAYOUTS)
def test_non_contiguous_input(kind, layout, backend, device):
    """Any strides of the input give the same bits, and the gradient arrives at its owner."""
    view, shape = VIEWS[layout]
    recipe = None if kind in ("LayerNorm", "RMSNorm") else recipe_of("current")
    twins = Twins(build(kind, device), backend=backend)
    twins.step(random(*shape, device=device), recipe, view=view, grad="transposed")
    assert graphs() == 1


@pytest.mark.parametrize("kind,recipe", FEW)
def test_input_made_in_the_graph(kind, recipe, device):
    """Input and gradient are intermediate values of one graph, with strides of their own."""

    def call(module, x, recipe):
        y = with_recipe(module, (x * 2).t(), recipe)
        return (y.t() * y.sum()).relu()

    twins = Twins(build(kind, device), call, backend="aot_eager")
    twins.step(random(K, 24, device=device), recipe_of(recipe))
    assert graphs() == 1


@pytest.mark.parametrize("how", ("mark_dynamic", "default"))
@pytest.mark.parametrize("kind", ("Linear", "LayerNormMLP", "RMSNorm"))
def test_bad_width_while_tracing(kind, how, device):
    """A wrong last dimension is named while tracing, and good calls go on in their graph."""
    twins = Twins(build(kind, device))
    recipe = None if kind in ("LayerNorm", "RMSNorm") else recipe_of("current")
    view = marked(0) if how == "mark_dynamic" else None
    twins.step(random(16, K, device=device), recipe, view=view)
    with pytest.raises(Exception, match=r"input.* 32\)"):
        twins.compiled(random(16, 32, device=device), recipe)
    with pytest.raises(Exception, match="input.* 128\\)"):
        twins.compiled(random(2, 8, 2 * K, device=device), recipe)
    before = graphs()
    twins.step(random(16, K, device=device, seed=1), recipe, view=view)
    assert graphs() == before


def test_many_sizes_add_no_graph(device):
    """A batch that changes with every call never reaches the recompile limit."""
    twins = Twins(build("LayerNormMLP", device))
    with torch._dynamo.config.patch(recompile_limit=3):
        for rows in range(2, 40):
            twins.forward(random(rows, K, device=device, seed=rows), recipe_of("current"))
    assert graphs() == 2
