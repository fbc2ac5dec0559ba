# SPDX-License-Identifier: Apache-2.0
"""Models that are trained on several processes, and the same training in one process."""

import copy

import processes  # noqa: F401  # pylint: disable=unused-import  # finds the helpers of other folders
import torch
from compile_support import STATE, scaling_states
from primary_support import buffers
from recipe_list import recipe_of

import transformer_engine.pytorch as te

WIDE = 256  # half of it is a multiple of every block


class Model(torch.nn.Sequential):
    """With a forward that Dynamo takes for the user's: it skips that of torch's class."""

    def forward(self, x):  # pylint: disable=arguments-renamed
        """``x [rows, width]``."""
        for layer in self:
            x = layer(x)
        return x


def build(primary=None, width=64, dtype=torch.bfloat16, device="cpu"):
    """Three modules in a row; ``primary``: the recipe that their weights are quantized by."""
    recipe = None if primary is None else recipe_of(primary)
    options = {"params_dtype": dtype, "device": device}
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        layers = [
            te.LayerNormMLP(width, width, activation="swiglu", **options),
            te.Linear(width, width, **options),
            te.LayerNormLinear(width, width, **options),
        ]
    return Model(*layers)


def batch(seed, rank=0, rows=16, width=64, dtype=torch.bfloat16):
    """The input of one rank."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (torch.randn(rows, width, generator=generator) * (1 + rank)).to(dtype)


def loss_of(model, x, recipe, draws=0, **arguments):
    """Forward pass; ``draws`` seeds stochastic rounding. Returns ``(output, loss)``."""
    torch.manual_seed(draws)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, **arguments)
    return y.detach().clone(), y.float().square().mean()


def optimizer_of(model):
    """One whose step depends on the gradients' values, not only on their signs."""
    return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)


def train(model, recipe, batches, call=None):
    """Steps on ``batches``; the outputs. ``call``: what runs instead of the model itself."""
    optimizer, outputs = optimizer_of(model), []
    for step, x in enumerate(batches):
        y, loss = loss_of(model if call is None else call, x, recipe, draws=step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(y)
    return outputs


def train_ranks(model, recipe, batches_of):
    """What two ranks that average their gradients do, in one process, without communication.

    ``batches_of[rank]``. Each rank has a copy of the model; both start a step with the same values.
    Returns the outputs of each rank.
    """
    ranks = [model, copy.deepcopy(model)]
    optimizer = optimizer_of(model)
    outputs = [[], []]
    for step in range(len(batches_of[0])):
        for rank, replica in enumerate(ranks):
            y, loss = loss_of(replica, batches_of[rank][step], recipe, draws=step)
            loss.backward()
            outputs[rank].append(y)
        for ours, theirs in zip(model.parameters(), ranks[1].parameters()):
            # As both implementations do it: halves are exact, and a sum of two has one order.
            ours.grad = ours.grad / 2 + theirs.grad / 2
        optimizer.step()
        optimizer.zero_grad()
        ranks[1].zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), ranks[1].parameters()):
                theirs.copy_(ours)
    return outputs


def bytes_of(model, rank=None, ranks=2):
    """All bytes of the parameters: of shards as they are; of whole ones ``rank``'s shard."""
    found = []
    for param in model.parameters():
        local = param._local_tensor if hasattr(param, "_local_tensor") else param.detach()
        if rank is not None and local is not param and not hasattr(param, "_local_tensor"):
            local = local.chunk(ranks)[rank]
        found += [None if b is None else b.detach().clone() for b in buffers(local)]
    return found


def state_of(model):
    """The state of delayed scaling of all modules."""
    return [getattr(s, field).clone() for s in scaling_states(model).values() for field in STATE]


def assert_same(tested, wanted, what=""):
    """Two lists of tensors are equal bit by bit."""
    assert len(tested) == len(wanted), what
    for i, (a, b) in enumerate(zip(tested, wanted)):
        assert (a is None) == (b is None), f"{what} {i}"
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape, f"{what} {i}: {a.shape} {b.shape}"
            assert torch.equal(a, b), f"{what} {i}: {(a.float() - b.float()).abs().max()}"
