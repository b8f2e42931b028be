"""Between two steps tensors may change kind without a new object: the next step sees them as they are."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from workloads import bits_of, differences, make_batch

import autobatch

pytestmark = pytest.mark.usefixtures("quiet_log")


class Net(nn.Module):
    """A trained layer and buffers that each forward pass changes, where they have memory of their own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("other", torch.zeros(4))
        self.register_buffer("spread", torch.zeros(1).expand(4))
        self.register_buffer("raw", nn.parameter.UninitializedBuffer())

    def forward(self, inputs):
        hidden = self.layer(inputs.to(self.layer.weight.dtype))
        for buffer in (self.mean, self.other, self.spread, self.raw):
            if not (nn.parameter.is_lazy(buffer) or buffer.is_inference()) and min(buffer.stride()):
                with torch.no_grad():
                    buffer.add_(hidden.mean(0))
        return hidden.float() + self.mean.float()


def swap_parameters(model):
    """With an attribute on the other one, which goes along."""
    other = nn.Parameter(torch.randn(4, 6))
    other.note = ["new"]
    torch.utils.swap_tensors(model.layer.weight, other)


def swap_buffer_for_a_spread_one(model):
    """From now on no copy of it can be made."""
    torch.utils.swap_tensors(model.mean, torch.zeros(1).expand(4))


def swap_spread_buffer(model):
    """From now on there has to be a copy."""
    torch.utils.swap_tensors(model.spread, torch.zeros(4))


def give_buffer_other_data(model):
    """As ``swap_buffer_for_a_spread_one``, by the attribute."""
    model.mean.data = torch.zeros(1).expand(4)


def give_spread_buffer_data(model):
    """As ``swap_spread_buffer``, by the attribute."""
    model.spread.data = torch.zeros(4)


def give_inference_data(model):
    """No writes into it are counted from now on."""
    with torch.inference_mode():
        model.other.data = torch.ones(4)


def narrow(model):
    """What ``model.bfloat16()`` does, and the gradients are summed in float32 from now on."""
    for tensor in (*model.layer.parameters(), model.mean, model.other):
        tensor.data = tensor.data.bfloat16()


def materialize(model):
    """What a lazy module's first forward pass does."""
    model.raw.materialize((4,))
    model.raw.zero_()


CHANGES = [
    swap_parameters,
    swap_buffer_for_a_spread_one,
    swap_spread_buffer,
    give_buffer_other_data,
    give_spread_buffer_data,
    give_inference_data,
    narrow,
    materialize,
]


def loss_of(model, batch):
    """A mean over samples."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@cache
def make_plan():
    """Two micro-batches of four."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"batch": make_batch(8), "step": loss_of, "optimizer": optimizer, "max_micro_batch": 4, "check": None}
    return autobatch.fit(model, 8, **options)


def prepare(change, earlier):
    """A runner that has made steps before the change, of a model that has been changed."""
    plan = make_plan()  # before the seed: made for the first time, it draws
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autobatch.Runner(plan, model, loss_of, optimizer)
    for _ in range(earlier):
        runner.step(make_batch(8))
    change(model)
    return model, optimizer, runner


@pytest.mark.parametrize("earlier", [2, 5])
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_the_change_can_be_undone(change, earlier):
    """Bit for bit, in steps that are not recorded, by an error at the end of the last micro-batch."""
    model, optimizer, runner = prepare(change, earlier)
    before, calls = bits_of(model, optimizer), []

    def step(model, batch):
        loss = loss_of(model, batch)
        model.layer.weight.note = ["step"]  # on the tensor itself
        calls.append(loss)
        if len(calls) == 2:
            raise ValueError("planned")
        return loss

    held = getattr(model.layer.weight, "note", None)
    runner._workload.__dict__["step"] = step
    with pytest.raises(ValueError, match="planned"):
        runner.step(make_batch(8))
    assert not differences(bits_of(model, optimizer), before)
    assert getattr(model.layer.weight, "note", None) is held
    runner._workload.__dict__["step"] = loss_of
    runner.step(make_batch(8))


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_the_change_is_that_of_a_new_runner(change):
    """Nothing that was found out about the tensors before is used."""
    model, _, runner = prepare(change, 3)
    fresh, fresh_optimizer, _ = prepare(change, 3)
    new = autobatch.Runner(make_plan(), fresh, loss_of, fresh_optimizer)
    assert torch.equal(runner.step(make_batch(8)).loss, new.step(make_batch(8)).loss)
    tensors = [[*net.layer.parameters(), net.mean, net.other] for net in (model, fresh)]
    assert all(map(torch.equal, *tensors))
