"""Where in a trial memory ended: found from what happened, said in the refusal, with what would help there."""

from __future__ import annotations

import pytest
import torch
from sampling import sample
from torch import nn
from torch.nn import functional as F
from workloads import make_batch

import autobatch
from autobatch.batch.samples import describe
from autobatch.errors import DoesNotFit
from autobatch.fitting.probe import Probe
from autobatch.step.workload import Workload
from autobatch.testing import FakeDevice, oom_at
from autobatch.undo.training_state import TrainingState

ROOMY = 10**9


class ByHand(torch.optim.Optimizer):
    """Makes its state inside its own step, as optimizers from elsewhere do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            state["mean"].lerp_(parameter.grad, 0.1)
            parameter.sub_(state["mean"] * 0.1)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, foreach=False),
    "by hand": ByHand,
}


def spy(optimizer, log):
    """Note the beginning of each step of the optimizer, and what state there is."""
    step = optimizer.step

    def noted(closure=None):
        log.append(("optimizer", sum(len(state) for state in optimizer.state.values())))
        return step()

    optimizer.step = noted
    return optimizer


def run_with_oom(make, position, resumed=False):
    """One trial in which memory ends at that operation, and what had begun by then, in order."""
    torch.manual_seed(0)
    log = []
    model = nn.Linear(6, 4, bias=False)
    optimizer = OPTIMIZERS[make](model.parameters())
    if resumed:
        F.cross_entropy(model(make_batch(4)[0]), make_batch(4)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def step(model, batch):
        log.append(("forward", 0))
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.register_hook(lambda _: log.append(("backward", 0)))
        return loss

    workload, device = Workload(model, step, None, spy(optimizer, log)), FakeDevice(lambda n: n, ROOMY)
    with TrainingState(model, optimizer, torch.device("cpu"), host_bytes=ROOMY) as state:
        probe = Probe(workload, describe(make_batch(8)), device, ROOMY, state)
        with oom_at(position) as planned:
            try:
                trial = probe.run(4)
            except torch.OutOfMemoryError:  # in what stands around a trial: values that are put back
                trial = None
    return trial, log, planned


def expect(log, make, resumed):
    """The phases that may be meant, by the last thing that had begun."""
    if not log or log[-1][0] == "forward":
        return {"forward", "backward"}  # the loss's own gradient is made before its hook runs
    if log[-1][0] == "backward":
        return {"backward", "optimizer state"} if make == "AdamW" else {"backward"}
    is_first = sum(kind == "optimizer" for kind, _ in log) == 1
    makes_state = make in ("momentum", "by hand") and not resumed
    return {"optimizer state"} if makes_state and is_first else {"update"}


@pytest.mark.parametrize(("make", "resumed"), [*((make, False) for make in OPTIMIZERS), ("momentum", True)])
def test_the_phase_is_the_one_in_which_memory_ended(make, resumed):
    """At every operation of a trial: what had begun last is what is named, and each phase comes in its turn."""
    _, _, planned = run_with_oom(make, 10**9, resumed)
    seen = []
    for position in range(1, planned.operations + 1):
        trial, log, planned = run_with_oom(make, position, resumed)
        if trial is None:
            continue
        assert trial.outcome == "oom"
        assert trial.ended_in in expect(log, make, resumed), (position, log[-1:], trial.ended_in, planned.raised)
        seen.append(trial.ended_in)
    order = [phase for index, phase in enumerate(seen) if index == 0 or seen[index - 1] != phase]
    first = {"AdamW": ["optimizer state", "update"], "SGD": ["update"]}.get(make, ["optimizer state"])
    later = ["forward", "backward", "forward", "backward", "update"]
    assert order == ["forward", "backward", *(["update"] if resumed else first), *later]


def test_a_trial_that_fits_ended_in_nothing():
    """Nor does one whose outcome is only that the allocator had to give memory back."""
    trial, _, _ = run_with_oom("AdamW", 10**9)
    assert (trial.outcome, trial.ended_in) == ("fits", None)


class Deep(nn.Module):
    """Many parameters, few activations."""

    def __init__(self, width=128, layers=6):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, inputs):
        return self.layers(inputs).sum()


def refuse(budget_in_models, make):
    """The refusal of a budget of so many times the parameters' bytes."""
    torch.manual_seed(0)
    model = Deep()
    own = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = make(model.parameters())
    budget = int(budget_in_models * own)
    with pytest.raises(DoesNotFit) as caught:
        autobatch.fit(model, 8, batch=torch.randn(2, 128), optimizer=optimizer, budget=budget, headroom=0)
    return str(caught.value)


SMALLER_DOES_NOT_HELP = "smaller micro-batches and activation checkpointing would not help"


def test_gradients_that_do_not_fit_are_named():
    """The parameters fit, the gradients beside them do not, whatever the batch."""
    text = refuse(1.5, lambda p: torch.optim.SGD(p, lr=0.1))
    assert text.startswith("the gradients do not fit on CPU beside the model, at any micro-batch size: memory ended in")
    assert "fewer trained parameters" in text
    assert SMALLER_DOES_NOT_HELP in text
    assert "a micro-batch of" not in text


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_state_that_does_not_fit_is_named(make):
    """Gradients fit, the optimizer's state does not."""
    text = refuse(2.3, make)
    assert text.startswith("the optimizer's state does not fit on CPU beside model and gradients, at any micro-batch")
    assert "an optimizer with less state" in text
    assert SMALLER_DOES_NOT_HELP in text


def test_an_update_that_does_not_fit_is_named():
    """State fits, the temporaries of a step over all parameters at once do not."""
    text = refuse(4.4, lambda p: torch.optim.AdamW(p, foreach=True))
    assert text.startswith("the optimizer's update does not fit on CPU beside model, gradients and its state")
    assert "foreach=False" in text
    assert "fused=True" in text
    assert SMALLER_DOES_NOT_HELP in text


class Busy(nn.Module):
    """Few parameters, many activations."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, inputs):
        hidden = (inputs * self.scale).unsqueeze(-1).expand(-1, 8, 5000)
        for _ in range(4):
            hidden = hidden.exp().neg()
        return hidden.mean()


def test_a_pass_that_does_not_fit_is_named():
    """Where the activations of one sample are too many, checkpointing and smaller inputs help."""
    with pytest.raises(DoesNotFit) as caught:
        autobatch.fit(Busy(), 8, batch=torch.randn(2, 8), budget="400KiB")
    text = str(caught.value)
    assert text.startswith("a micro-batch of 1 sample does not fit on CPU: memory ended in the forward pass")
    assert "activation checkpointing" in text
    assert SMALLER_DOES_NOT_HELP not in text


def test_a_model_that_does_not_fit_by_itself_is_named():
    """What is there before the first sample is more than the limit."""
    text = refuse(0.5, lambda p: torch.optim.SGD(p, lr=0.1))
    assert text.startswith("a micro-batch of 1 sample does not fit on CPU, as the model by itself does not")
    assert "parameters in bfloat16" in text
    assert SMALLER_DOES_NOT_HELP in text


def test_a_formula_that_does_not_fit_is_a_pass():
    """A fake device runs out where a micro-batch begins."""
    device = FakeDevice(lambda n: 50 + 60 * n, total_bytes=100)
    model = Deep(8, 1)
    with pytest.raises(DoesNotFit, match="a micro-batch of 1 sample does not fit on fake device: memory ended in the"):
        autobatch.fit(model, 8, batch=torch.randn(2, 8), device=device, headroom=0)


@pytest.mark.parametrize("steps", sample([0, 1, 3], 3))
@pytest.mark.parametrize(
    "make",
    [torch.optim.AdamW, torch.optim.Adagrad, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ByHand],
    ids=["AdamW", "Adagrad", "momentum", "by hand"],
)
def test_the_states_bytes_are_those_of_a_resumed_optimizer_too(make, steps):
    """In the plan and in its report, whether the trials made the state or an earlier run did."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = make(model.parameters())
    for _ in range(steps):
        model(torch.randn(2, 128)).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = autobatch.fit(model, 8, batch=torch.randn(2, 128), optimizer=optimizer)
    model(torch.randn(2, 128)).backward()
    optimizer.step()
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    expected = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
    assert plan.state_bytes == expected
    assert f"optimizer state ({expected / 1024:.1f} KiB)" in " ".join(plan.explain().split())


def test_state_of_which_a_part_was_there_is_counted_whole():
    """Layers that were unfrozen after a resume have none yet."""
    model = Deep()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 128)).backward()
    optimizer.step()
    optimizer.zero_grad()
    for parameter in model.layers[:3].parameters():
        del optimizer.state[parameter]
    plan = autobatch.fit(model, 8, batch=torch.randn(2, 128), optimizer=optimizer)
    steps = 12 * 4  # a count of steps for each parameter
    assert plan.state_bytes == 2 * sum(parameter.nbytes for parameter in model.parameters()) + steps
