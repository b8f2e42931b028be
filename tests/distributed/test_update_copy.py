"""An optimizer's step that runs out of memory on one rank: it takes the update from one that has made it."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.ranks import run_ranks, values_of
from sampling import IN_PROOF
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.distributed import shared_step
from autobatch.events import UpdateCopied
from autobatch.testing import FakeDevice, oom_at

STEPS = 5
SHARES = (8, 5, 7)


class Own(torch.optim.Adam):
    """An optimizer of another package, which may keep numbers that no state has."""


OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "one by one": partial(torch.optim.Adam, lr=0.01, foreach=False, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "own": partial(Own, lr=0.01),
}


class Training:
    """A model and its runner, whose update runs out of memory at one operation on some ranks."""

    def __init__(self, optimizer="adamw", *, fails_in=3, operation=0, on=(0,), hooked=(), **options):
        shared_step._SHORTEST_WAIT = 2.0
        torch.manual_seed(0)
        rank, shares = dist.get_rank(), SHARES[: dist.get_world_size()]
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        model = DistributedDataParallel(model.to(memory_format=torch.channels_last))
        self.optimizer = OPTIMIZERS[optimizer](model.parameters())
        if rank in hooked:
            self.optimizer.register_step_post_hook(lambda *_: None)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        if options.pop("scales", False):
            options["scaler"] = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        whole, start = make_batch(sum(shares), torch.float64, seed=1), sum(shares[:rank])
        self.batch = tuple(part[start : start + shares[rank]] for part in whole)
        self.events, self.inner, self.operation = [], model.module, operation
        self.runner = autobatch.Runner(
            make_rank_plans(shares, 4, **SMALL)[rank],
            model,
            mean_step,
            self.optimizer,
            device=FakeDevice(lambda n: 10 + n, total_bytes=1000),
            scheduler=scheduler,
            hooks=[self.events.append],
            **options,
        )
        update, apply = self.runner._update, self.runner._update.apply

        def fail(step):
            is_short = self.operation and step == fails_in and rank in on
            operation, self.operation = self.operation, 0 if is_short else self.operation
            with oom_at(operation) if is_short else nullcontext():
                apply(step)

        update.apply = fail

    def run(self, steps=STEPS):
        for _ in range(steps):
            self.runner.step(self.batch)
        return self

    def bits(self):
        scaler = self.runner._update.scaler
        scale = None if scaler is None else str(scaler.state_dict())
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return bits_of(self.inner, self.optimizer) | {"steps": self.runner.steps, "rates": rates, "scale": scale}

    def copies(self):
        return [event.giver for event in self.events if isinstance(event, UpdateCopied)]


def gather(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def run_short(optimizer, on, options, stride):
    """For each operation of an update: givers, and what differs from a run with memory enough."""
    expected, found, operation = Training(optimizer, **options).run().bits(), [], 1
    while True:
        training = Training(optimizer, operation=operation, on=on, **options).run()
        copies = training.copies()
        if not any(gather(copies)):
            return found
        found.append((copies, differences(training.bits(), expected)))
        operation += stride


@pytest.mark.parametrize(
    ("optimizer", "options", "size", "on"),
    [
        ("adamw", {}, 2, (0,)),
        ("adamw", {"scales": True}, 2, (1,)),
        ("one by one", {"max_grad_norm": 0.1}, 2, (1,)),
        ("momentum", {"fails_in": 0}, 2, (0,)),
        ("momentum", {}, 3, (0, 2)),
    ],
)
def test_every_rank_ends_with_the_update_bit_for_bit(optimizer, options, size, on):
    """Whatever operation of the optimizer's step ran out of memory; the other ranks made theirs once."""
    stride = 1 if IN_PROOF else 5
    found = values_of(run_ranks(run_short, optimizer, on, options, stride, size=size, timeout_seconds=60))
    assert len(found[0]) > (0 if optimizer == "momentum" else 1)
    for rank, outcomes in enumerate(found):
        for copies, wrong in outcomes:
            assert copies == ([min({0, 1, 2} - {*on})] if rank in on else [])
            assert wrong == []


def attempt(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def fail_on_all():
    training = Training(operation=1, on=(0, 1))
    first = attempt(training.run)
    return first, attempt(lambda: training.run(1)), training.copies()


def test_no_rank_can_give_an_update_that_failed_on_all():
    """Each raises the error of its own, and all make the next step together."""
    assert values_of(run_ranks(fail_on_all, timeout_seconds=30)) == [("CannotRetry", "", [])] * 2


def call_between(is_wrong):
    training = Training(operation=1, on=(0,))
    training.run(3)
    errors, before = [attempt(lambda: training.run(1))], training.bits()
    gather("mine")
    made, model = training.runner, training.runner._ranks.model
    wrong = {"step": mean_step, "optimizer": training.optimizer, "max_grad_norm": -1.0, "device": made._device}
    is_mine = is_wrong and dist.get_rank() == 0
    call = partial(autobatch.Runner, made.plan, model, **wrong) if is_mine else partial(training.run, 1)
    errors.append(attempt(call))
    changed = differences(training.bits(), before)
    made.steps = 3  # as a checkpoint would, with the rates
    for group in training.optimizer.param_groups:
        group["lr"] = 0.01
    return errors, changed, attempt(lambda: training.run(1))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_collective_of_the_users_own_is_not_waited_for_without_end(is_wrong):
    """The rank that lacks the update raises after some seconds, and takes nothing then; the others raise later.

    Whatever the rank's next call is, and if that fails, too.
    """
    found = values_of(run_ranks(call_between, is_wrong, timeout_seconds=20, limit_seconds=50))
    error = "InvalidArgument" if is_wrong else "CannotRetry"
    assert [one[0] for one in found] == [["CannotRetry", error], ["", "CannotRetry"]]
    assert [one[1:] for one in found] == [([], "")] * 2


def end_early():
    training = Training(operation=1, fails_in=2, on=(1,))
    return attempt(lambda: training.run(3))


def test_ranks_that_have_ended_give_nothing():
    """The last step of a run has no next one."""
    assert [one.value for one in run_ranks(end_early, timeout_seconds=60, limit_seconds=50)] == ["", "CannotRetry"]


def fail_where_state_is_not_all(optimizer, hooked):
    training = Training(optimizer, operation=1, on=(0,), hooked=hooked)
    error = attempt(training.run)
    if dist.get_rank() == 0 and hooked != (1,):  # it has not waited for the other one's next call
        attempt(lambda: training.run(1))
    return error, training.copies()


@pytest.mark.parametrize(("optimizer", "hooked"), [("own", ()), ("adamw", (0, 1)), ("adamw", (0,)), ("adamw", (1,))])
def test_an_optimizers_step_may_change_more_than_its_state(optimizer, hooked):
    """That of another package, or one with hooks: the rank raises, and so do the others in their next call."""
    found = values_of(run_ranks(fail_where_state_is_not_all, optimizer, hooked, timeout_seconds=30))
    assert found == [("CannotRetry", [])] * 2


def run_two():
    """Two runners in turn: the next call is the other one's. Then a pass over a loader, and a retry meanwhile."""
    found = []
    for operation in (0, 1):
        first, second = Training(operation=operation, on=(1,)), Training("momentum")
        for _ in range(STEPS):
            first.run(1)
            second.run(1)
        loaded = Training(operation=operation, on=(0,))
        [*loaded.runner.run([loaded.batch] * STEPS)]
        short = Training(operation=operation, on=(0,)).run(3)
        dist.barrier()
        short.run(1)
        with oom_at(5) if operation and dist.get_rank() == 1 else nullcontext():
            short.run(1)
        found.append([first.bits(), second.bits(), loaded.bits()])
        copies = [one.copies() for one in (first, second, loaded, short)]
    return copies, [differences(one, other) for one, other in zip(*found, strict=True)], short.runner.micro_batch_size


def test_the_next_call_may_be_another_runners_or_that_of_a_loader():
    """Or a step that another rank runs again in smaller micro-batches."""
    first, second = values_of(run_ranks(run_two, timeout_seconds=60))
    assert first[:2] == ([[], [], [1], [1]], [[], [], []])
    assert second[:2] == ([[0], [], [], []], [[], [], []])
    assert second[2] < first[2]


def stop_in_the_middle():
    training = Training(operation=1, on=(0,)).run(3)
    update = training.runner._ranks.update

    def fail(*_):
        raise torch.OutOfMemoryError("planned")

    update._find = fail
    before = training.bits()
    return attempt(lambda: training.run(2)), differences(training.bits(), before)


def test_an_update_is_copied_to_all_or_to_none():
    """A rank without memory for new state: CannotRetry on every rank."""
    found = values_of(run_ranks(stop_in_the_middle, timeout_seconds=30))
    assert [one[0] for one in found] == ["CannotRetry"] * 2
