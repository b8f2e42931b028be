"""With sharded parameters ranks wait for each other inside a pass; one that fails there still hangs nobody."""

import os
import signal
import time
from functools import cache

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.rank_faults import needs_sharding, shard
from builders.ranks import run_ranks, values_of, wait_at_most
from torch import nn
from workloads import bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.planning.division import spread
from autobatch.testing import FakeDevice

pytestmark = needs_sharding

SIZE = 3
TARGET = 24


class Network(nn.Sequential):
    """Three layers, and one that is called where the test says so."""

    def __init__(self):
        super().__init__(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 4))
        self.double()


class Training:
    """A sharded model, an optimizer, a batch of this rank's and its runner."""

    def __init__(self, step=mean_step, samples=8, device=None, optimizer=torch.optim.SGD, earlier_steps=0, **options):
        torch.manual_seed(0)
        self.model = shard(Network())
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.batch = make_batch(samples, torch.float64, seed=dist.get_rank())
        plan = make_rank_plans(spread(TARGET, dist.get_world_size()), 4, **SMALL)[dist.get_rank()]
        device = device or FakeDevice(lambda n: 10 + n, total_bytes=1000)
        self.runner = autobatch.Runner(plan, self.model, step, self.optimizer, device=device, **options)
        for _ in range(earlier_steps):
            self.runner.step(self.batch)

    def bits(self):
        return bits_of(self.model, self.optimizer) | {"steps": self.runner.steps}


def attempt(training, run=None):
    """The error of a step, or its sizes; and what is not as before after an error."""
    before = training.bits()
    try:
        result = (run or training.runner.step)(training.batch)
    except BaseException as error:
        changed = differences(training.bits(), before)
        return f"{type(error).__name__}: {error}", changed
    return result.micro_batch_sizes, result.retries


def arrange(training, place, action):
    """Do something once, at a place of this rank's next step."""
    done = []

    def act(*_):
        if not done:
            done.append(True)
            action()

    if place == "forward":
        training.model[2].register_forward_pre_hook(act)
    elif place == "backward":
        training.model[2].register_full_backward_hook(act)
    elif place == "between":
        training.model.register_forward_hook(act)
    else:
        training.optimizer.register_step_pre_hook(act)


def raising(error):
    def action():
        raise error

    return action


FAILURES = {
    "an error": lambda: raising(ValueError("my own bug")),
    "an interrupt": lambda: lambda: signal.raise_signal(signal.SIGINT),
    "a shortage": lambda: raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
}
PLACES = ("forward", "between", "backward")


def run_all():
    """The outcome of each way to fail, in the first step and in a later one, and of the next step."""
    rank, found = dist.get_rank(), {}

    def note(name, training, run=None):
        found[name] = attempt(training, run)
        found[f"after {name}"] = attempt(training)

    for earlier_steps in (0, 1):
        for place in PLACES:
            for name, make in FAILURES.items():
                training = Training(earlier_steps=earlier_steps)
                if rank == 1:
                    arrange(training, place, make())
                note(f"{name} in {place}, step {earlier_steps}", training)
    training = Training(weigh=lambda batch: 0.0 if rank else float(len(batch[0])))
    found["nothing counts on others"] = attempt(training)
    training = Training(weigh=lambda batch: 0.0)
    note("nothing counts", training)
    note("an error in weigh", Training(weigh=lambda batch: len(batch[0]) / (rank != 1)))
    return found


@cache
def answers():
    return run_ranks(run_all, size=SIZE, timeout_seconds=30, limit_seconds=180)


def results_of(name):
    return [value[name] for value in values_of(answers())]


def undone(step):
    return f"RankFailed: step {step} was undone on every rank, because it failed on one: "


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("name", "own"), [("an error", "ValueError: my own bug"), ("an interrupt", "KeyboardInterrupt")]
)
def test_an_error_inside_a_pass_of_one_rank_undoes_the_step_on_all(name, own, place, step):
    """In a pass that is known (step 1) or not (step 0): the others get its rank and reason, and can continue."""
    for rank, (text, changed) in enumerate(results_of(f"{name} in {place}, step {step}")):
        assert text.startswith(own if rank == 1 else f"{undone(step)}rank 1: {own}")
        assert changed == []
    assert results_of(f"after {name} in {place}, step {step}") == [((4, 4), 0)] * SIZE


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("place", PLACES)
def test_a_shortage_inside_a_pass_makes_all_ranks_drop_it(place, step):
    """The rank that is short continues with smaller micro-batches, and the others with as many."""
    assert results_of(f"a shortage in {place}, step {step}") == [((2, 2, 2, 2), 1)] * SIZE
    assert results_of(f"after a shortage in {place}, step {step}") == [((2, 2, 2, 2), 0)] * SIZE


def test_an_error_outside_of_passes_undoes_the_step_too():
    """The failing rank gets its own error, the others get its rank and reason; the step is undone."""
    own = "ZeroDivisionError: "
    for rank, (text, changed) in enumerate(results_of("an error in weigh")):
        assert text.startswith(own if rank == 1 else f"{undone(0)}rank 1: {own}")
        assert changed == []


def test_a_rank_on_which_nothing_counts_runs_the_passes_of_the_others():
    """If no rank counts anything, nothing happens."""
    assert results_of("nothing counts on others") == [((4, 4), 0)] * SIZE
    assert results_of("nothing counts") == results_of("after nothing counts") == [((), 0)] * SIZE


def end_at(place, how):
    """A rank's process ends, or stops, at a place of its second step."""
    training = Training(earlier_steps=1)
    wait_at_most(100.0 if how == signal.SIGKILL else 4.0)
    before = training.bits()
    if dist.get_rank() == 1:
        arrange(training, place, lambda: os.kill(os.getpid(), how))
    began = time.monotonic()
    with pytest.raises(autobatch.errors.AutobatchError) as caught:
        training.runner.step(training.batch)
        training.runner.step(training.batch)  # a rank that ends in its update is missed here
    seconds = time.monotonic() - began
    return f"{type(caught.value).__name__}: {caught.value}", seconds, differences(training.bits(), before)


@pytest.mark.parametrize("place", [*PLACES, "update"])
def test_a_rank_that_is_killed_ends_the_step_on_the_others(place):
    """At once, with its name; before the update everything is as it was."""
    found = run_ranks(end_at, place, signal.SIGKILL, size=SIZE, timeout_seconds=90, limit_seconds=200)
    assert found.pop(1).end == "ended with -9"
    for text, seconds, changed in values_of(found):
        assert text.startswith("RankLost: ")
        assert "rank 1 of 3 is gone: its process " in text
        assert seconds < 60
        assert changed == [] or place == "update"


def test_a_rank_that_stops_answering_ends_the_step_on_the_others():
    """After the timeout of the process group that gathers, with its name."""
    found = run_ranks(end_at, "forward", signal.SIGSTOP, size=2, timeout_seconds=6, limit_seconds=100)
    assert found.pop(1).end == "hung"
    ((text, seconds, changed),) = values_of(found)
    assert text.startswith("RankLost: rank 1 of 2 did not answer, and its process ")
    assert 3 < seconds < 80
    assert changed == []


def train_a_foreign_one():
    """In its third step the user's function trains what no retry could take back, and runs out of memory."""
    foreign, is_trained = nn.Parameter(torch.zeros((), dtype=torch.float64)), []

    def step(model, batch):
        return mean_step(model, batch) + (foreign.square() if is_trained else 0)

    training = Training(step, earlier_steps=2)
    is_trained.append(True)
    if dist.get_rank() == 1:
        arrange(training, "backward", FAILURES["a shortage"]())
    return attempt(training)


def test_what_a_retry_could_not_take_back_is_found_in_it():
    """The graph is searched again, as in one process; nothing has happened on any rank."""
    for answer, changed in values_of(run_ranks(train_a_foreign_one, size=2)):
        assert "trains a parameter of shape () that is in neither the model nor the optimizer" in answer
        assert changed == []
