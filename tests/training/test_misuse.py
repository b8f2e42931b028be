"""Warnings of what a loop around a Runner does otherwise than planned: sizes, and things that are stepped twice."""

import copy
import io
import logging

import pytest
import torch
from plans import make_plan, make_rank_plans
from sampling import sample
from torch import nn
from torch.optim import lr_scheduler
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.events import BatchDiffers, SteppedTwice
from autobatch.testing import FakeDevice, oom_at
from autobatch.training.misuse import StepSizes
from autobatch.training.step_events import StepEvents

TARGET = 8


def make_device():
    return FakeDevice(lambda n: 10 + n, total_bytes=1000)


@pytest.fixture(scope="module")
def plan():
    return autobatch.fit(
        Plain(torch.float64),
        TARGET,
        batch=make_batch(TARGET, torch.float64),
        step=mean_step,
        max_micro_batch=4,
        check=None,
        device=make_device(),
    )


def batch_of(samples):
    """In float64."""
    return make_batch(samples, torch.float64)


class Training:
    """A Runner, what it steps, and the warnings that were logged."""

    def __init__(self, plan, optimizer=torch.optim.Adam, scheduler=None, scaler=None, model=None, **options):
        self.events = []
        self.model = model or Plain(torch.float64)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01) if isinstance(optimizer, type) else optimizer
        self.scheduler = scheduler and scheduler(self.optimizer)
        self.scaler = scaler
        self.runner = autobatch.Runner(
            plan,
            self.model,
            mean_step,
            self.optimizer,
            scheduler=self.scheduler,
            scaler=scaler,
            device=make_device(),
            hooks=[self.events.append],
            **options,
        )

    def warnings(self, kind):
        """Warnings of one kind; each is logged at WARNING and in one line."""
        found = [event for event in self.events if isinstance(event, kind)]
        assert all(event.level == logging.WARNING and "\n" not in str(event) for event in found)
        return found


SIZES = {
    "full": ([8, 8, 8], None),
    "smaller from the first": ([3, 3, 3], 3),
    "one at the end": ([8, 8, 5], None),
    "one at the end of each epoch": ([8, 8, 5, 8, 8, 5, 8, 2], None),
    "two smaller ones in a row": ([8, 8, 5, 4, 3], 4),
    "a dataset smaller than the target": ([5], 5),
    "larger": ([8, 9], 9),
    "larger from the first": ([16, 16], 16),
    "smaller, then larger": ([8, 7, 12], 12),
    "full after a smaller one": ([2, 8, 8], 2),
}


def call_step(runner, samples):
    runner.step(batch_of(samples))


def call_step_over(runner, samples):
    parts = [tensor.split(max(1, samples // 2)) for tensor in batch_of(samples)]
    runner.step_over(zip(*parts, strict=True))


def call_accumulate(runner, samples):
    runner.accumulate(batch_of(samples))


CALLS = {"step": call_step, "step_over": call_step_over, "accumulate": call_accumulate}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_step_of_another_size_is_warned_of_once(plan, call, sizes, caplog):
    """With both numbers and what to do; not of one smaller step after full ones."""
    training = Training(plan)
    given, reported = SIZES[sizes]
    with caplog.at_level(logging.WARNING, "autobatch"):
        for samples in given:
            CALLS[call](training.runner, samples)
    found = training.warnings(BatchDiffers)
    assert [event.samples for event in found] == ([] if reported is None else [reported])
    lines = [record.getMessage() for record in caplog.records if "planned" in record.getMessage()]
    assert len(lines) == len(found)
    assert all(f"{reported} samples, planned 8" in line and "batch_size=8" in line for line in lines)
    assert all("runner.run(loader)" in line for line in lines)


def test_a_runner_without_an_optimizer_is_not_advised_to_run(plan):
    """It has no ``run``."""
    training = Training(plan, optimizer=None)
    training.runner.accumulate(batch_of(3))
    [event] = training.warnings(BatchDiffers)
    assert "run(" not in str(event)


def test_run_warns_of_no_size(plan):
    """Its steps are what the user asked for, and steps after it are judged by its last one."""
    training = Training(plan)
    [*training.runner.run([batch_of(3), batch_of(8)])]
    assert not training.warnings(BatchDiffers)
    training.runner.step(batch_of(8))
    training.runner.step(batch_of(3))
    assert not training.warnings(BatchDiffers)


def test_the_first_step_after_a_resume_may_be_the_last_of_an_epoch(plan):
    """It follows full ones, in the run before."""
    training = Training(plan)
    training.runner.step(batch_of(8))
    again = Training(plan)
    again.runner.load_state_dict(training.runner.state_dict())
    again.runner.step(batch_of(3))
    assert not again.warnings(BatchDiffers)
    again.runner.step(batch_of(3))
    assert again.warnings(BatchDiffers)


def test_a_step_that_was_undone_does_not_count(plan):
    """The user may give the last batch of an epoch again."""
    training = Training(plan)
    training.runner.step(batch_of(8))
    batch = batch_of(3)
    for _ in range(2):
        with oom_at(*range(1, 300)), pytest.raises(autobatch.DoesNotFit):
            training.runner.step(batch)
    training.runner.step(batch_of(3))
    assert not training.warnings(BatchDiffers)


def test_a_step_without_samples_is_no_accident():
    """A rank whose loader has ended runs such steps until the others are done."""
    sizes = StepSizes(8)
    sizes.last = 8
    assert not sizes.surprise(0)
    assert not sizes.surprise(5)
    sizes.last = 5
    assert not sizes.surprise(0)
    assert sizes.surprise(5)


@pytest.mark.parametrize("adapter", sample(["Trainer", "Lightning"], 2))
def test_a_frameworks_loop_is_not_warned_of(plan, adapter):
    """Its sizes and schedules are the framework's: an adapter says at its start what cannot be reached."""
    events, model = [], Plain(torch.float64)
    options = {"device": make_device(), "hooks": [events.append]}
    optimizer = torch.optim.Adam(model.parameters())
    if adapter == "Trainer":
        module = pytest.importorskip("autobatch.integrations.transformers.training")
        runner = module.TrainerRunner(plan, model, mean_step, optimizer, **options)
    else:
        module = pytest.importorskip("autobatch.integrations.lightning.training")
        runner = module.LightningRunner(lambda *_: None, plan, model, mean_step, optimizer, **options)
    for samples in (3, 3, 12):
        runner.accumulate(batch_of(samples))
    assert not [event for event in events if isinstance(event, BatchDiffers)]


def sequential(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch 2.8 says so of its own SequentialLR
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("times", [1, 3])
def test_a_scheduler_that_the_loop_steps_too_is_named_once(plan, name, times):
    """The rate would decay faster than the user thinks."""
    training = Training(plan, scheduler=SCHEDULERS[name])
    for _ in range(3):
        training.runner.step(batch_of(8))
        for _ in range(times):
            training.scheduler.step()
    [event] = training.warnings(SteppedTwice)
    assert event.names == (name,)
    assert name in str(event)
    assert "remove scheduler.step() from the loop" in str(event)
    assert event.step == 1


def test_one_of_several_schedulers_is_named(plan):
    """Not the others."""
    training = Training(plan, optimizer=torch.optim.SGD)
    second = lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    both = [lr_scheduler.StepLR(training.optimizer, 3), second]
    watched = autobatch.Runner(
        plan,
        training.model,
        mean_step,
        training.optimizer,
        scheduler=both,
        device=make_device(),
        hooks=[training.events.append],
    )
    watched.step(batch_of(8))
    second.step()
    watched.step(batch_of(8))
    [event] = training.warnings(SteppedTwice)
    assert event.names == ("ExponentialLR",)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop])
def test_an_optimizer_that_the_loop_steps_too_is_named(plan, kind):
    """It moved by a gradient that the Runner does not know."""
    training = Training(plan, optimizer=kind)
    training.runner.step(batch_of(8))
    mean_step(training.model, batch_of(8)).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.runner.step(batch_of(8))
    [event] = training.warnings(SteppedTwice)
    assert event.names == (kind.__name__,)


def test_a_scaler_that_the_loop_updates_too_is_named(plan):
    """Its scale would grow faster."""
    scaler = torch.amp.GradScaler("cpu")
    training = Training(plan, scaler=scaler)
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    for _ in range(2):
        training.runner.step(batch_of(8))
        scaler.scale(other(torch.ones(2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    [event] = training.warnings(SteppedTwice)
    assert event.names == ("GradScaler",)


def saved(part):
    file = io.BytesIO()
    torch.save(part.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def load_later_states(training, plan):
    """States of a run that is one and more steps ahead."""
    ahead = Training(plan, scheduler=SCHEDULERS["StepLR"], scaler=torch.amp.GradScaler("cpu"))
    for _ in range(4):
        ahead.runner.step(batch_of(8))
        for name in ("optimizer", "scheduler", "scaler"):
            getattr(training, name).load_state_dict(saved(getattr(ahead, name)))
        training.runner.step(batch_of(8))


def load_a_runner_too(training, plan):
    ahead = Training(plan, scheduler=SCHEDULERS["StepLR"], scaler=torch.amp.GradScaler("cpu"))
    ahead.runner.step(batch_of(8))
    ahead.runner.step(batch_of(8))
    training.scheduler.load_state_dict(ahead.scheduler.state_dict())
    training.optimizer.load_state_dict(ahead.optimizer.state_dict())
    training.runner.load_state_dict(ahead.runner.state_dict())


def go_back(training, _):
    kept = copy.deepcopy([training.scheduler.state_dict(), training.optimizer.state_dict()])
    training.runner.step(batch_of(8))
    training.scheduler.load_state_dict(kept[0])
    training.optimizer.load_state_dict(kept[1])


def step_another_scheduler(training, _):
    """Once an epoch, and not given to the Runner; and one that needs a metric."""
    lr_scheduler.ExponentialLR(training.optimizer, 0.5).step()
    lr_scheduler.ReduceLROnPlateau(training.optimizer).step(1.0)


def set_a_rate(training, _):
    training.optimizer.param_groups[0]["lr"] = 0.5


def share_everything(training, plan):
    """A second Runner of the same scaler and optimizer."""
    second = Training(plan, optimizer=training.optimizer, scaler=training.scaler, model=training.model)
    for _ in range(2):
        second.runner.step(batch_of(8))
        training.runner.step(batch_of(8))
    assert not second.warnings(SteppedTwice)


def update_by_hand(training, _):
    """After ``accumulate`` the update is the user's."""
    training.runner.accumulate(batch_of(8))
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()


def fit_again(training, _):
    """Trials step the optimizer, and put it back."""
    autobatch.fit(
        training.model,
        TARGET,
        batch=batch_of(8),
        step=mean_step,
        optimizer=training.optimizer,
        device=make_device(),
        check=None,
        reuse=False,
    )


def step_what_has_no_gradient(training, _):
    """A left-over ``optimizer.step()`` after ours changes nothing."""
    training.optimizer.step()


def fail_once(training, _):
    """A step that was undone, and one with infinities, in which the scaler skips."""
    inputs, labels = batch_of(8)
    with oom_at(*range(1, 300)), pytest.raises(autobatch.DoesNotFit):
        training.runner.step((inputs, labels))
    training.runner.step((inputs * float("inf"), labels))


LEGITIMATE = [
    load_later_states,
    load_a_runner_too,
    go_back,
    step_another_scheduler,
    set_a_rate,
    share_everything,
    update_by_hand,
    fit_again,
    step_what_has_no_gradient,
    fail_once,
]


@pytest.mark.parametrize("between", LEGITIMATE)
def test_what_a_loop_may_do_is_not_warned_of(plan, between):
    """Loading states, schedulers of the user's own, a shared scaler, an update by hand."""
    training = Training(plan, scheduler=SCHEDULERS["StepLR"], scaler=torch.amp.GradScaler("cpu"))
    training.runner.step(batch_of(8))
    between(training, plan)
    training.runner.step(batch_of(8))
    between(training, plan)
    training.runner.step(batch_of(8))
    assert not training.warnings(SteppedTwice)


class Slotted:
    """A scheduler that shows nothing, and cannot be referred to weakly."""

    __slots__ = ("steps",)

    def __init__(self, _):
        self.steps = 0

    def step(self):
        self.steps += 1


class Unhashable(lr_scheduler.StepLR):
    """It is equal by what it holds."""

    __hash__ = None

    def __init__(self, optimizer):
        super().__init__(optimizer, 1)


class Answering:
    """It has every attribute that it is asked for, and none of them is a number."""

    def __init__(self, _):
        self.steps = 0

    def __getattr__(self, name):
        return object()

    def step(self):
        self.steps += 1


@pytest.mark.parametrize("kind", [Slotted, Unhashable, Answering])
def test_a_scheduler_that_cannot_be_watched_is_stepped_all_the_same(plan, kind):
    """Once a step, without an error."""
    training = Training(plan, scheduler=kind)
    for _ in range(2):
        training.runner.step(batch_of(8))
    assert not training.warnings(SteppedTwice)


def test_a_share_of_another_size_is_reported_with_its_rank():
    """Each of several ranks names itself; the plan of one process names none."""
    events = []
    for one in (*make_rank_plans((6, 6), 5), make_plan(12, 5)):
        StepEvents(one, [events.append]).report_size(3, 4, can_run=True)
    found = [(event.samples, event.planned, event.target_batch, event.rank, event.world_size) for event in events]
    assert found == [(4, 6, 12, 0, 2), (4, 6, 12, 1, 2), (4, 12, 12, 0, 1)]
