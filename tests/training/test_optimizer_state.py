"""An optimizer's state, made before its first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from workloads import differences

from autobatch.testing import oom_at
from autobatch.training.update import forget_state, make_state

pytestmark = pytest.mark.quick

OPTIMIZERS = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}
STATELESS_AT_FIRST = ("SGD", "SGD momentum", "Adagrad")


def train(make_optimizer, *, prepared: bool):
    """Values and state after three steps, in the second of which a parameter is used for the first time."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 2)])
    optimizer = make_optimizer(model.parameters())
    for step in range(3):
        inputs = torch.ones(4, 3) * (step + 1)
        (model[0](inputs).square().mean() + (model[1](inputs).square().mean() if step else 0)).backward()
        if prepared:
            make_state(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "values": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "state": {index: dict(entry) for index, entry in enumerate(optimizer.state.values())},
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_on_made_state_is_the_first_step_bit_for_bit(name):
    """Nothing is counted by making it: bias corrections and values are those of an optimizer that made its own."""
    assert not differences(train(OPTIMIZERS[name], prepared=True), train(OPTIMIZERS[name], prepared=False))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in STATELESS_AT_FIRST])
def test_state_is_made_for_what_has_a_gradient_and_forgotten_again(name):
    """All of it, once; parameters without a gradient have none; forgetting leaves the optimizer as it was."""
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = OPTIMIZERS[name]([used, unused])
    used.sum().backward()
    made = make_state(optimizer)
    assert [id(parameter) for parameter in made] == [id(used)]
    assert optimizer.state[used]
    assert unused not in optimizer.state
    assert make_state(optimizer) == []
    forget_state(optimizer, made)
    assert len(optimizer.state) == 0


def test_state_is_made_for_a_parameter_that_has_taken_another_ones_entry():
    """As many entries as parameters, of which one belongs to a parameter that the optimizer no longer holds."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    make_state(optimizer)
    new = nn.Parameter(torch.ones(2))
    optimizer.param_groups[0]["params"][1] = new
    new.sum().backward()
    assert [id(parameter) for parameter in make_state(optimizer)] == [id(new)]


def test_memory_that_ends_over_it_leaves_no_half_made_entry():
    """A half-made entry would be a KeyError in the next step."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    with oom_at(10**9) as counted:
        forget_state(optimizer, make_state(optimizer))
    assert counted.operations >= 6
    for position in range(1, counted.operations + 1):
        with oom_at(position), pytest.raises(torch.OutOfMemoryError):
            make_state(optimizer)
        assert len(optimizer.state) == 0


def test_somebody_elses_optimizer_is_left_alone():
    """Nothing is assumed about classes of others, also where they inherit from torch's."""

    class Mine(torch.optim.Adam):
        pass

    parameter = nn.Parameter(torch.ones(2))
    parameter.sum().backward()
    optimizer = Mine([parameter])
    assert make_state(optimizer) == []
    assert not optimizer.state
