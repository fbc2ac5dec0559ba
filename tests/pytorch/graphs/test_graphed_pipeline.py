# SPDX-License-Identifier: Apache-2.0
"""Graphs for each microbatch of a pipeline."""

import copy

import pytest
from compile_support import K, assert_same_modules, build, gradient, random, recipe_of
from graph_support import ROWS, region, graphed, sample_of, assert_same_results

from transformer_engine.pytorch.graphed.schedule import (
    Event,
    pipelined_schedule,
    plain_schedule,
    shared_buffers,
)


def run_pipeline(order, calls, recipe, device, seed):
    """Outputs and input gradients of one minibatch; ``calls[chunk][microbatch]`` are its layers."""
    done, inputs, outputs, results = {step: 0 for step in order}, {}, {}, []
    with region(recipe):
        for move in order:
            place = abs(move), done[move]
            done[move] += 1
            if move > 0:
                x = random(ROWS, K, device=device, seed=100 * seed + 10 * place[0] + place[1])
                inputs[place] = y = x.requires_grad_()
                for call in calls[place[0]][place[1]]:
                    y = call(y)
                outputs[place] = y
                results.append(y.detach().clone())
            else:
                y = outputs.pop(place)
                y.backward(gradient(y, seed=place[1]))
                results.append(inputs[place].grad.clone())
    return results


def test_passes_out_of_order(device):
    """A pass that was captured later may have written where an earlier one kept something."""
    module = build("Linear", device)
    samples = ((sample_of(device),), (sample_of(device),))
    first, second = graphed((module,), samples, _order=[1, 1, -1, -1])
    x = random(ROWS, K, device=device)
    y = first(x), second(x)
    y[1].sum().backward()
    with pytest.raises(RuntimeError, match="captured after it was replayed before it"):
        y[0].sum().backward()
    y = first(x), second(x)  # in order: as before
    for out in y:
        out.sum().backward()
    keeping = graphed((module,), samples, _order=[1, 1, -1, -1], retain_graph_in_backward=True)
    y = [unit(x) for unit in keeping]
    for out in reversed(y):
        out.sum().backward()


@pytest.mark.parametrize("reuse", (False, True))
@pytest.mark.parametrize("recipe", ("none", "current", "delayed"))
def test_interleaved_pipeline(recipe, reuse, device):
    """Two chunks of one and two layers, three microbatches."""
    order = [1, 2, 1, -2, 2, -1, 1, -2, 2, -1, -2, -1]
    layers = [build("LayerNormMLP", device, seed=i) for i in range(3)]
    twins, kept = copy.deepcopy(layers), recipe_of(recipe)
    made = graphed(
        tuple(layers),
        tuple((sample_of(device),) for _ in range(9)),
        kept,
        _order=order,
        _num_layers_per_chunk=[1, 2],
        _reuse_graph_input_output_buffers=reuse,
    )
    assert isinstance(made, tuple) and len(made) == 9
    units = {1: [[made[m]] for m in range(3)], 2: [made[3 + 2 * m : 5 + 2 * m] for m in range(3)]}
    eager = {1: [twins[:1]] * 3, 2: [twins[1:]] * 3}
    for seed in range(2):
        results = [run_pipeline(order, calls, kept, device, seed) for calls in (units, eager)]
        assert_same_results(*results)
    for layer, twin in zip(layers, twins):
        assert_same_modules(layer, twin)
    inputs = {unit.inputs[0].data_ptr() for unit in made}
    assert len(inputs) == (4 if reuse else 9)
    for unit in made:
        unit.reset()
    with pytest.raises(RuntimeError, match="was reset"):
        made[0](random(ROWS, K, device=device))


def test_schedules():
    """Which unit is which, and who shares input buffers."""
    plain = plain_schedule(2)
    assert plain.callables == [0, 1]
    assert plain.events == [Event(True, 0), Event(True, 1), Event(False, 1), Event(False, 0)]
    pipeline = pipelined_schedule([1, 2, 1, 2, -2, -1, -2, -1], 3, [2, 1], 6)
    assert pipeline.callables == [0, 1, 0, 1, 2, 2]
    forward = [event.unit for event in pipeline.events if event.forward]
    backward = [event.unit for event in pipeline.events if not event.forward]
    assert forward == [0, 1, 4, 2, 3, 5] and backward == [4, 1, 0, 5, 3, 2]
    even = pipelined_schedule([1, -1, 1, -1], 2, None, 4)
    assert even.callables == [0, 1, 0, 1]
    assert shared_buffers(even, ["s"] * 4) == [0, 1, 0, 1]
    assert shared_buffers(even, ["s", "s", "t", "s"]) == [0, 1, 2, 1]
    assert shared_buffers(pipeline, ["s"] * 6) == list(range(6))


@pytest.mark.parametrize(
    "order,count,layers,samples,match",
    [
        ([], 1, None, 0, "list of integers"),
        ([1, 0, -1], 1, None, 1, "list of integers"),
        ([1, 1.5, -1], 1, None, 1, "list of integers"),
        ([1, -1, 2], 2, None, 2, "Chunk 2 has 1 forward and 0 backward"),
        ([1, -1, -2], 1, None, 1, "chunk 2, but no forward"),
        ([-1], 1, None, 1, "chunk 1, but no forward"),
        ([-1, 1], 1, None, 1, "before its forward"),
        ([1, 2, -2, -1], 3, None, 3, "divided evenly"),
        ([1, 2, -2, -1], 3, [1, 1], 3, "_num_layers_per_chunk is"),
        ([1, 2, -2, -1], 2, None, 3, "must have 2 entries"),
    ],
)
def test_impossible_schedules(order, count, layers, samples, match):
    """Each names what does not fit."""
    with pytest.raises(ValueError, match=match):
        pipelined_schedule(order, count, layers, samples)
