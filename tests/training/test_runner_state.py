"""A Runner that is resumed from its state ends bit for bit where the undisturbed one ends."""

import copy
import io
import json
import pickle
from functools import cache

import pytest
import torch
from torch import nn
from workloads import Everything, Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.events import SizeChanged, StepFinished
from autobatch.testing import FakeDevice, oom_at

TARGET = 24


@cache
def make_plan():
    """24 samples in four pieces of six."""
    model = Everything()
    return autobatch.fit(
        model,
        TARGET,
        batch=make_batch(8),
        step=mean_step,
        optimizer=torch.optim.AdamW(model.parameters()),
        device=FakeDevice(lambda n: 10 + n, total_bytes=1000),
        max_micro_batch=6,
        check=None,
    )


class Training:
    """Model, optimizer, scheduler, scaler and Runner from one seed."""

    def __init__(self, seed=0, **options):
        torch.manual_seed(seed)
        self.model = Everything()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        self.events = []
        self.runner = autobatch.Runner(
            make_plan(),
            self.model,
            mean_step,
            self.optimizer,
            scaler=self.scaler,
            scheduler=self.scheduler,
            max_grad_norm=0.5,
            hooks=[self.events.append],
            device=FakeDevice(lambda n: 10 + n, total_bytes=1000),
            **options,
        )
        torch.manual_seed(seed)  # the first one has made the plan

    def save(self):
        content = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "seen": self.model.seen,
                "calls": self.model.calls,
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "scaler": self.scaler.state_dict(),
                "generator": torch.get_rng_state(),
                "runner": self.runner.state_dict(),
            },
            content,
        )
        return content.getvalue()

    def load(self, content, *, sizes=True):
        saved = torch.load(io.BytesIO(content), weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.model.seen.copy_(saved["seen"])
        self.model.calls = saved["calls"]
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.scaler.load_state_dict(saved["scaler"])
        if sizes:
            self.runner.load_state_dict(saved["runner"])
        torch.set_rng_state(saved["generator"])

    def state(self):
        bits = {key: value for key, value in bits_of(self.model, self.optimizer).items() if "gradient" not in key}
        return {**bits, "scaler": self.scaler.state_dict(), "scheduler": self.scheduler.state_dict()}


SHORTAGES = {
    "none": {},
    "in the step before": {3: 40},
    "twice in one step": {3: (30, 45)},
    "at the size that came back": {1: 40, 2: 40, 3: 40},
    "in a step after it, too": {3: 40, 5: 60},
}


def oom_positions(shortages):
    """Each a tuple, as ``oom_at`` takes them."""
    return {number: at if isinstance(at, tuple) else (at,) for number, at in shortages.items()}


@pytest.mark.parametrize("shortages", SHORTAGES.values(), ids=SHORTAGES)
def test_a_resumed_run_is_the_undisturbed_one(shortages, quiet_log):
    """Sizes and every bit, with dropout, BatchNorm, a scaler and a scheduler; steps are counted on."""
    whole = Training()
    expected = run(whole, range(9), shortages)
    first = Training()
    run(first, range(4), shortages)
    content = first.save()
    second = Training(seed=99)
    second.load(content)
    assert run(second, range(4, 9), shortages) == expected[4:]
    assert not differences(second.state(), whole.state())
    assert (second.runner.steps, second.runner.micro_batch_size) == (9, whole.runner.micro_batch_size)
    assert second.runner.state_dict() == whole.runner.state_dict()
    assert [event.step for event in second.events if isinstance(event, StepFinished)] == [4, 5, 6, 7, 8]


def run(training, steps, shortages):
    sizes, positions = [], oom_positions(shortages)
    for number in steps:
        with oom_at(*positions.get(number, (10**9,))):
            sizes.append(training.runner.step(make_batch(TARGET, seed=number)).micro_batch_sizes)
    return sizes


def test_without_its_state_the_sizes_would_be_others(quiet_log):
    """So the test above can fail."""
    first = Training()
    run(first, range(4), SHORTAGES["in the step before"])
    content = first.save()
    second, third = Training(), Training()
    second.load(content)
    third.load(content, sizes=False)
    assert run(second, [4], {}) != run(third, [4], {})
    assert differences(second.state(), third.state())


def test_the_state_is_plain_json(quiet_log):
    """And the same after it was written and read."""
    training = Training()
    run(training, range(4), SHORTAGES["at the size that came back"])
    state = training.runner.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert state["ceiling"]
    assert state["size"] < 6
    other = Training()
    other.runner.load_state_dict(json.loads(json.dumps(state)))
    assert other.runner.state_dict() == state
    assert [type(event) for event in other.events] == [SizeChanged]


def test_the_fewest_samples_that_a_model_can_run_are_remembered():
    """A plan without trials does not know that BatchNorm refuses one sample."""
    plan = make_plan().model_copy(update={"trials": (), "micro_batch_sizes": (6,) * 4, "smallest_micro_batch": 1})
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    runner = autobatch.Runner(plan, model, mean_step, torch.optim.SGD(model.parameters()), device=device)
    runner.load_state_dict({**runner.state_dict(), "smallest_micro_batch": 2})
    assert min(runner.step(make_batch(7)).micro_batch_sizes) >= 2  # as 6 + 1 one would be alone
    assert runner.state_dict()["smallest_micro_batch"] == 2


def changed(**changes):
    return lambda state: {**state, **changes}


CEILING = {"ran": 3, "failed": 6, "wait": 1, "left": 1, "is_doubted": False}

REFUSED = {
    "no dict": (lambda state: [state], r"^state=.* pass what state_dict\(\) of a Runner returned"),
    "another's": (lambda state: {"state": {}, "param_groups": []}, r"pass what state_dict\(\) of a Runner returned"),
    "a later version": (changed(version=2), "of version 2, and this one reads version 1"),
    "a version that is none": (changed(version=True), "of version True"),
    "another target": (changed(target_batch=256), "target_batch=256, and this Runner's has target_batch=24: make"),
    "another size": (changed(micro_batch_size=8), "micro_batch_size=8, and this Runner's has micro_batch_size=6"),
    "another rank's": (changed(rank=1), "with rank=1, and this Runner's has rank=0"),
    "a size above the plan's": (changed(size=7), "a size of 7, where micro_batch_size=6"),
    "no size": (changed(size=0), "size=0 must be at least 1"),
    "a flag for a number": (changed(steps=True), "steps=True must be a valid integer"),
    "negative steps": (changed(steps=-1), "steps=-1 must be at least 0"),
    "an unknown field": (changed(more=1), "more is not known"),
    "an unknown reason": (changed(reason="luck"), "reason='luck' must be"),
    "a ceiling out of order": (changed(ceiling={**CEILING, "failed": 2}), "ran must be less than failed"),
    "a ceiling above the plan's": (changed(ceiling={**CEILING, "failed": 9}), "a size of 9, where"),
    "an endless wait": (changed(ceiling={**CEILING, "left": 10**9}), "left=1000000000 must be"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_state_of_this_plan_is_refused(change, message):
    """In words, and nothing has changed."""
    runner = Training().runner
    runner.step(make_batch(TARGET))
    before = runner.state_dict()
    with pytest.raises(InvalidArgument, match=message):
        runner.load_state_dict(change(before))
    assert runner.state_dict() == before


@pytest.mark.parametrize("name", ["steps", "size", "ceiling", "batch_lists"])
def test_a_state_without_a_field_is_refused_or_takes_its_default(name):
    """What decides sizes has none."""
    runner = Training().runner
    state = runner.state_dict()
    del state[name]
    if name == "ceiling":
        runner.load_state_dict(state)
    else:
        with pytest.raises(InvalidArgument, match=f"{name} is missing"):
            runner.load_state_dict(state)


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda take: take.__name__)
def test_a_runner_is_not_copied(take):
    """A copy would shrink with the original, and not without it."""
    model = Plain()
    plan = autobatch.fit(model, 8, batch=make_batch(8, torch.float64), step=mean_step, max_micro_batch=4, check=None)
    runner = autobatch.Runner(plan, model, mean_step, None)
    with pytest.raises(InvalidArgument, match=r"^a Runner cannot be copied or pickled, .*: make one of runner\.plan"):
        take(runner)


@pytest.mark.parametrize("call", ["step", "accumulate"])
def test_a_step_that_calls_its_own_runner_is_refused(call):
    """The Runner is in the middle of a step, and everything is as before it; the next one runs."""
    model, calls = Plain(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = make_batch(8, torch.float64)
    plan = autobatch.fit(model, 8, batch=batch, step=mean_step, optimizer=optimizer, max_micro_batch=4, check=None)

    def step(model, part):
        if not calls:
            getattr(runner, call)(part)
        return mean_step(model, part)

    runner = autobatch.Runner(plan, model, step, optimizer)
    with pytest.raises(InvalidArgument, match=r"^step\(\) calls its own Runner"):
        runner.step(batch)
    assert all(p.grad is None for p in model.parameters())
    calls.append(True)
    assert runner.step(batch).micro_batch_sizes == (4, 4)


def summed_in_float16(model, batch):
    """A sum of a loss in float16; its count is of the labels that are not -100."""
    inputs, labels = batch
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")
    return autobatch.Sum(loss, (labels != -100).sum())


class SummedTraining:
    """Texts of which the first have few labels; one step's counts choose the power of two that divides the next."""

    def __init__(self):
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 40))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
        self.runner = autobatch.Runner(make_plan(), self.model, summed_in_float16, self.optimizer, device=device)

    def run(self, steps):
        for step in steps:
            texts = torch.randint(40, (TARGET, 64), generator=torch.Generator().manual_seed(step))
            labels = texts.roll(-1, 1)
            labels[:6, 1:] = -100
            self.runner.step((texts, labels))
        return self


def test_a_stated_count_in_float16_rounds_as_in_the_undisturbed_run():
    """The step before chooses the divisor of the losses, and the state has it."""
    whole, begun, resumed = SummedTraining().run(range(6)), SummedTraining().run(range(3)), SummedTraining()
    resumed.model.load_state_dict(begun.model.state_dict())
    resumed.runner.load_state_dict(json.loads(json.dumps(begun.runner.state_dict())))
    resumed.run(range(3, 6))
    assert differences(bits_of(whole.model), bits_of(resumed.model)) == []
