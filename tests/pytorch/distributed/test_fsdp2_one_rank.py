# SPDX-License-Identifier: Apache-2.0
"""FSDP2 on a mesh of one rank, where nothing is gathered: numbers are those without FSDP2."""

import copy

import processes
import pytest
import torch
from models import Model, assert_same, batch, build, bytes_of, state_of, train
from recipe_list import ALL_RECIPES, recipe_of

import transformer_engine.pytorch as te

PRIMARY = [name for name in ALL_RECIPES if name != "custom_delayed"]
pytestmark = processes.needs_distributed


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """This process by itself."""
    store = tmp_path_factory.mktemp("one_rank") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def check(model, mesh, recipe, width, **options):
    """Two steps: outputs, the bytes of parameters, and scaling state."""
    from torch.distributed.fsdp import fully_shard

    single, recipe = copy.deepcopy(model), recipe_of(recipe)
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    data = [batch(step, width=width) for step in range(2)]
    assert_same(train(model, recipe, data), train(single, recipe, data), "output")
    assert_same(bytes_of(model), bytes_of(single), "parameter")
    assert_same(state_of(model), state_of(single), "state")


@pytest.mark.parametrize("recipe", PRIMARY)
def test_quantized_parameters(recipe, mesh):
    """Bytes that are not gathered, scales included, are there in forward and backward."""
    check(build(recipe, 128), mesh, recipe, 128)


@pytest.mark.parametrize("options", ({}, {"reshard_after_forward": False}), ids=("freed", "kept"))
@pytest.mark.parametrize("recipe", ("none", "nvfp4"))
def test_options(recipe, options, mesh):
    """Parameters in high precision, and wholes that stay from forward to backward."""
    check(build(None if recipe == "none" else recipe, 64), mesh, recipe, 64, **options)


def test_any_number_of_rows(mesh):
    """A whole tensor cuts no block, whatever its number of rows."""
    with te.quantized_model_init(recipe=recipe_of("block")):
        layer = te.Linear(64, 200, params_dtype=torch.bfloat16, device="cpu")
    check(Model(layer), mesh, "block", 64)
