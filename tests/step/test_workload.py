"""The user's step: what it may return, what a micro-batch weighs, and what lives between two steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from workloads import Everything, Plain, make_batch, mean_step

from autobatch.errors import InvalidArgument
from autobatch.step.workload import Workload


def test_inference_mode_is_named_where_a_loss_has_no_graph():
    """The step is not at fault."""
    with (
        torch.inference_mode(),
        pytest.raises(InvalidArgument, match=r"without a graph \(torch\.inference_mode\(\) is on"),
    ):
        run(lambda loss: loss)


class Pair(NamedTuple):
    """What a step may return just as well."""

    loss: torch.Tensor
    logits: Any


def run(returned):
    """What a workload makes of a step that returns ``returned(loss)``."""
    model = Plain()
    workload = Workload(model, lambda m, b: returned(mean_step(m, b)))
    return workload.run(make_batch(4, torch.float64))


@pytest.mark.parametrize(
    "returned",
    [
        lambda loss: loss,
        lambda loss: loss.reshape(1),
        lambda loss: loss.reshape(1, 1, 1),
        lambda loss: (loss, None),
        lambda loss: Pair(loss, None),
        lambda loss: loss.float(),
        lambda loss: loss * float("nan"),
    ],
)
def test_a_scalar_loss_is_taken_with_its_graph(returned):
    """Of any shape with one element, alone or as the first of two, of any float type and value."""
    terms, aux = run(returned)
    assert terms[0].loss.shape == ()
    assert terms[0].loss.requires_grad
    assert aux is None


def test_aux_of_any_nest_is_detached():
    """Tensors leave their graph, everything else and the containers stay as they are."""
    terms, aux = run(
        lambda loss: (loss, {"loss": loss, "nested": [(loss * 2,), {"deep": loss}], "name": "x", "count": 3})
    )
    assert aux["name"] == "x"
    assert aux["count"] == 3
    tensors = [aux["loss"], aux["nested"][0][0], aux["nested"][1]["deep"]]
    assert not any(tensor.requires_grad for tensor in tensors)
    assert torch.equal(tensors[1], terms[0].loss.detach() * 2)


def test_the_step_is_called_with_model_and_batch():
    """Exactly these two, by position; an error of its own comes out as it is."""
    model, error = nn.Linear(2, 2), ValueError("mine")

    def step(*arguments):
        assert arguments == (model, "batch")
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        Workload(model, step).call_step("batch")
    assert caught.value is error


def test_parameters_are_the_model_s_and_the_optimizer_s_once_each():
    """Tied ones count once, frozen ones are among them, and so is one that only the optimizer has."""
    model, extra = Everything(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [extra]}])
    found = Workload(model, mean_step, optimizer=optimizer).parameters()
    assert len({id(parameter) for parameter in found}) == len(found) == len(list(model.parameters())) + 1
    assert found[-1] is extra
    assert any(parameter is model.frozen.weight for parameter in found)
    assert len(Workload(model, mean_step).parameters()) == len(found) - 1


def test_resident_tensors_are_all_that_stays_between_steps():
    """Parameters, gradients, buffers and optimizer state."""
    model = Everything()
    optimizer = torch.optim.AdamW(model.parameters())
    mean_step(model, make_batch(6)).backward()
    optimizer.step()
    expected = [*model.parameters(), *model.buffers()]
    expected += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    expected += [value for entry in optimizer.state.values() for value in entry.values()]
    found = list(Workload(model, mean_step, optimizer=optimizer).resident_tensors())
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in expected}
    assert len(found) == len(expected)


def test_optimizer_state_in_lists_is_resident_too():
    """Some optimizers keep their directions in lists."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["old_dirs"] = directions = [torch.ones(3), torch.ones(3)]
    found = {id(tensor) for tensor in Workload(model, mean_step, optimizer=optimizer).resident_tensors()}
    assert directions
    assert {id(direction) for direction in directions} <= found
