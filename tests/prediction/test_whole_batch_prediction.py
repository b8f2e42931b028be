"""Predictions of steps whose loss is over the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.batch.samples import describe
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.prediction.tracing.trace import Circumstances, trace, trace_timeline, trace_whole
from autobatch.step.workload import Workload

WIDTH = 64


class Tower(nn.Module):
    def __init__(self, hidden=512):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.head, self.scale = nn.Linear(hidden, 32), nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs):
        return F.normalize(self.head(self.body(inputs)), dim=-1)


def represent(model, batch):
    return model(batch[0]), model(batch[1])


def make_step(model):
    def loss(rows, batch):
        scores, labels = model.scale.exp() * rows[0] @ rows[1].T, torch.arange(len(batch[0]), device=rows[0].device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2

    return autobatch.WholeBatch(represent, loss)


def make_batch(samples):
    return tuple(torch.randn(samples, WIDTH) for _ in range(2))


@pytest.mark.parametrize(("target", "hidden"), [(1024, 64), (256, 1024)], ids=["most is the loss", "most is the model"])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_what_is_traced_is_what_trials_measure(target, hidden, parts):
    """In one pass, in two micro-batches and in eight; trials on the CPU count the batch too."""
    size, batch = target // parts, make_batch(target)
    model = Tower(hidden)
    optimizer, step = torch.optim.AdamW(model.parameters()), make_step(model)
    plan = autobatch.fit(
        model,
        target,
        batch=batch,
        step=step,
        optimizer=optimizer,
        max_micro_batch=size,
        check=None,
        reuse=False,
        progress=False,
    )
    [measured] = [trial.backward_allocated for trial in plan.trials if trial.micro_batch_size == size]
    workload, once = Workload(model, step, None, optimizer), Circumstances(whole=target)
    traced = trace(workload, describe(batch), size, once) if parts > 1 else trace_whole(workload, describe(batch), once)
    assert traced.peak() + sum(one.nbytes for one in batch) == pytest.approx(measured, rel=0.06)


def test_sizes_between_two_traces_are_exact():
    """What the loss takes is the same at any size of the micro-batches, and so are the operators."""
    model = Tower()
    workload, layout = Workload(model, make_step(model)), describe(make_batch(8))
    timeline = trace_timeline(workload, layout, Circumstances(whole=512))
    assert not timeline.interpolated
    assert timeline.at(32).peak() == trace(workload, layout, 32, Circumstances(whole=512)).peak()


def test_a_loss_that_does_not_fit_is_named():
    """With the memory of all pairs, which no micro-batch makes smaller; a larger card takes the target in parts."""
    model = Tower()
    optimizer, options = torch.optim.AdamW(model.parameters()), {"target_batch": 8192, "progress": False}
    small = autobatch.predict(model, make_batch(8), make_step(model), optimizer, gpu="2GiB", **options)
    assert small.plan is None
    assert small.peaks_in_loss
    assert "loss" in str(small)
    large = autobatch.predict(model, make_batch(8), make_step(model), optimizer, gpu="8GiB", **options)
    assert large.plan is not None
    assert large.points[0].allocated > 4 * 4 * 8192**2


def test_a_model_that_does_not_fit_is_not_taken_for_the_loss():
    """One sample of a large model, in a small target."""
    with torch.device("meta"):
        model = Tower(16384)
    prediction = autobatch.predict(
        model, make_batch(8), make_step(model), torch.optim.AdamW(model.parameters()), target_batch=16, gpu="2GiB"
    )
    assert prediction.plan is None
    assert not prediction.peaks_in_loss


def test_other_ways_are_those_of_the_two_parts():
    """Autocast in represent and in the loss."""
    model = Tower()
    prediction = autobatch.predict(
        model, make_batch(8), make_step(model), target_batch=1024, gpu="24GiB", what_if=True, progress=False
    )
    found = {change.name: change for change in prediction.changes}
    assert not found["bfloat16 autocast"].failed
    assert found["bfloat16 autocast"].peak_bytes > 0


def test_several_ranks_are_refused():
    """Until they are traced."""
    model = Tower()
    with pytest.raises(InvalidArgument, match="WholeBatch"):
        autobatch.predict(model, make_batch(8), make_step(model), world_size=2, gpu="24GiB")


def test_fit_names_the_loss_within_a_real_budget():
    """The scores of 2048 samples take 16 MiB each; the model and one sample would fit."""
    model, batch = Tower(64), make_batch(2048)
    options = {"batch": batch, "step": make_step(model), "check": None, "reuse": False, "progress": False}
    with pytest.raises(DoesNotFit, match="the loss over the whole batch does not fit") as raised:
        autobatch.fit(model, 2048, budget="24MiB", headroom=0, **options)
    assert "target_batch=" in str(raised.value)
    assert autobatch.fit(model, 2048, budget="128MiB", headroom=0, **options).target_batch == 2048
