"""``run``: every step has the target's samples, whatever sizes the loader's batches have."""

from __future__ import annotations

import copy
import json
from collections import UserDict
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset
from workloads import Plain, bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.batch.lengths import ByLength
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.testing import FakeDevice, oom_at


def weighted_step(model, batch):
    """The mean over weights, of which samples have different ones."""
    weights = batch[1] + 1.0
    return (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * weights).sum() / weights.sum()


def sum_weights(batch):
    return (batch[1] + 1.0).sum()


def stated_step(model, batch):
    """Counts that are known after the step, and a term that counts once a step."""
    outputs = model(batch[0])
    return {
        "mean": autobatch.Mean(F.cross_entropy(outputs, batch[1]), len(batch[1])),
        "sum": autobatch.Sum(outputs.square().sum(), len(batch[1])),
        "weights": autobatch.PerStep(0.01 * model.head.weight.square().sum()),
    }


def whole_stated_step(model, batch):
    outputs = model(batch[0])
    mean = F.cross_entropy(outputs, batch[1]) + outputs.square().sum() / len(batch[1])
    return mean + 0.01 * model.head.weight.square().sum()


STEPS = {
    "mean": (mean_step, None, mean_step),
    "weighted": (weighted_step, sum_weights, weighted_step),
    "stated": (stated_step, None, whole_stated_step),
}


def make_device():
    return FakeDevice(lambda n: 10 + n, total_bytes=1000)


@cache
def make_plan(target, largest, step, make_example, **options):
    """The same for each model of the kind."""
    return autobatch.fit(
        Plain(torch.float64),
        target,
        batch=make_example(*make_batch(8, torch.float64)),
        step=step,
        max_micro_batch=largest,
        check=None,
        device=make_device(),
        **options,
    )


def pair(x, y):
    return x, y


def make_runner(target=16, largest=5, step=mean_step, make_example=pair, *, weigh=None, cut=None, **options):
    """A model in float64, and a Runner that cuts its batches."""
    torch.manual_seed(2)
    model = Plain(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    planned = {"cut": cut} if isinstance(cut, ByLength) else {}
    plan = make_plan(target, largest, step, make_example, weigh=weigh, **planned)
    options |= {"weigh": weigh, "cut": cut, "device": make_device()}
    return model, optimizer, autobatch.Runner(plan, model, step, optimizer, **options)


def split(batch, sizes):
    return [*zip(*(tensor.split(sizes) for tensor in batch), strict=True)]


def train_by_hand(samples, target, step=mean_step, passes=1, *, drop_last=False):
    """The weights after a loop over whole targets."""
    torch.manual_seed(2)
    model = Plain(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(passes):
        for whole in zip(*(tensor.split(target) for tensor in samples), strict=True):
            if len(whole[0]) < target and drop_last:
                continue
            optimizer.zero_grad()
            step(model, whole).backward()
            optimizer.step()
    return model


def assert_same_weights(model, expected, tolerance=1e-12):
    for (name, found), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, other, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("kind", STEPS)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    target=st.integers(1, 30),
    largest=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_steps_are_those_of_whole_targets(kind, sizes, target, largest, drop_last):
    """Batches of any sizes, empty ones too: the weights of the loop over whole targets, to rounding."""
    step, weigh, whole_step = STEPS[kind]
    samples = make_batch(sum(sizes), torch.float64)
    model, _, runner = make_runner(target, largest, step, weigh=weigh)
    results = [*runner.run(split(samples, sizes), drop_last=drop_last)]
    full, left = divmod(sum(sizes), target)
    expected = [target] * full + ([left] if left and not drop_last else [])
    assert [sum(result.micro_batch_sizes) for result in results] == expected
    assert all(max(result.micro_batch_sizes) <= largest for result in results)
    assert_same_weights(model, train_by_hand(samples, target, whole_step, drop_last=drop_last))
    assert runner.steps == len(expected)


@dataclass
class Pair:
    """A batch in a class of the user's."""

    x: Any
    y: Any


class Rows:
    def __init__(self, x, y):
        self.x, self.y = x, y


autobatch.batches.register(
    Rows, count=lambda rows: len(rows.x), take=lambda rows, index: Rows(rows.x[index], rows.y[index])
)


def pair_step(model, batch):
    return F.cross_entropy(model(torch.as_tensor(batch.x)), torch.as_tensor(batch.y))


KINDS = {
    "tuple": (lambda x, y: (x, y), mean_step),
    "list": (lambda x, y: [x, y], mean_step),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda model, batch: mean_step(model, (batch["x"], batch["y"]))),
    "user's dict": (lambda x, y: UserDict(x=x, y=y), lambda model, batch: mean_step(model, (batch["x"], batch["y"]))),
    "dataclass": (Pair, pair_step),
    "registered": (Rows, pair_step),
    "arrays": (lambda x, y: Pair(x.numpy(), y.numpy()), pair_step),
    "samples in a list": (
        lambda x, y: (x, [{"label": label} for label in y]),
        lambda model, batch: mean_step(model, (batch[0], torch.stack([one["label"] for one in batch[1]]))),
    ),
    "a number beside them": (lambda x, y: (x, y, 7), None),
    "two tags for all": (lambda x, y: (x, y, ["a", "b"]), None),
    "gradients wanted": (lambda x, y: (x.clone().requires_grad_(), y), mean_step),
}
"""How batches may look; those with a third field go through ``first_two``."""


def first_two(model, batch):
    assert len(batch) == 3
    return mean_step(model, batch[:2])


def penalty_step(model, batch):
    inputs = batch[0]
    assert inputs.requires_grad
    assert inputs.is_leaf
    slope = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)[0]
    return mean_step(model, batch) + slope.square().sum() / len(inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_may_be_in_any_container(kind):
    """They are joined and cut by the rules of ``step``."""
    make, step = KINDS[kind]
    step = penalty_step if kind == "gradients wanted" else step or first_two
    whole = make_batch(37, torch.float64)
    batches = [make(*part) for part in split(whole, [10, 3, 20, 4])]
    model, _, runner = make_runner(12, 5, step, make)
    assert [sum(result.micro_batch_sizes) for result in runner.run(batches)] == [12, 12, 12, 1]

    def by_hand(model, batch):
        return step(model, make(*batch))

    assert_same_weights(model, train_by_hand(whole, 12, by_hand))


def find_lengths(batch):
    """Numbers that are not 0, of which padding is made."""
    return (batch[0] != 0).sum(1)


def shorten(whole):
    """Samples of 1 to 6 numbers."""
    inputs, labels = whole
    widths = torch.arange(len(labels)) % 6 + 1
    return inputs * (torch.arange(6) < widths[:, None]), labels


def sum_step(model, batch):
    """Padding is put back where it was trimmed."""
    return mean_step(model, (F.pad(batch[0], (0, 6 - batch[0].shape[1])), batch[1]))


def threes(batch, _):
    return [*torch.arange(len(batch[0])).split(3)]


def test_samples_may_have_lengths_or_a_cut_of_the_users():
    """The division is that of one batch of the target."""
    whole = shorten(make_batch(26, torch.float64))
    for options in ({"cut": autobatch.by_length(find_lengths)}, {"cut": threes}):
        model, _, runner = make_runner(12, 5, sum_step, lambda x, y: shorten((x, y)), **options)
        results = [*runner.run(split(whole, [9, 9, 8]))]
        assert [sum(result.micro_batch_sizes) for result in results] == [12, 12, 2]
        assert_same_weights(model, train_by_hand(whole, 12))


def test_nothing_is_carried_from_one_pass_into_the_next():
    """The last, smaller step runs at the end of each pass."""
    whole = make_batch(20, torch.float64)
    model, _, runner = make_runner(12)
    loader = DataLoader(TensorDataset(*whole), batch_size=7)
    sizes = [sum(result.micro_batch_sizes) for result in runner.run(loader, epochs=2)]
    sizes += [sum(result.micro_batch_sizes) for result in runner.run(loader)]
    assert sizes == [12, 8] * 3
    assert_same_weights(model, train_by_hand(whole, 12, passes=3))
    assert runner.passes == 3


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*make_batch(30, torch.float64), strict=True)


LOADERS = {
    "a list": lambda data: split(data.tensors, [9, 9, 9, 3]),
    "a generator": lambda data: (batch for batch in split(data.tensors, [9, 9, 9, 3])),
    "a loader": lambda data: DataLoader(data, batch_size=9),
    "workers": lambda data: DataLoader(data, batch_size=9, num_workers=1),
    "single samples": lambda data: DataLoader(data, batch_size=1),
    "larger batches": lambda data: DataLoader(data, batch_size=30),
    "a batch sampler": lambda data: DataLoader(data, batch_sampler=BatchSampler(range(30), 11, drop_last=False)),
    "batches from the dataset": lambda data: DataLoader(split(data.tensors, [9, 9, 9, 3]), batch_size=None),
    "a stream": lambda _: DataLoader(Stream(), batch_size=4),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_loaders_of_any_kind(kind):
    """All that can be iterated over."""
    whole = make_batch(30, torch.float64)
    model, _, runner = make_runner(12)
    assert [sum(result.micro_batch_sizes) for result in runner.run(LOADERS[kind](TensorDataset(*whole)))] == [12, 12, 6]
    assert_same_weights(model, train_by_hand(whole, 12))


class Ordered:
    def __init__(self, order=()):
        self.order, self.epochs = order, []

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class OrderedData(Ordered):
    def __getitem__(self, index):
        return self.order[index]


def test_each_epoch_is_told_to_what_orders_the_samples():
    """Sampler, batch sampler, its sampler, dataset, and a loader of the user's: each once an epoch."""
    samples = [*zip(*make_batch(12, torch.float64), strict=True)]
    data, sampler = OrderedData(samples), Ordered(range(12))
    batches, inner = Ordered([[0, 1, 2], [3, 4]]), Ordered(range(12))
    own = Ordered(split(make_batch(12, torch.float64), [6, 6]))
    loaders = {
        DataLoader(data, batch_size=5, sampler=sampler): [data, sampler],
        DataLoader(samples, batch_sampler=batches): [batches],
        DataLoader(samples, batch_sampler=BatchSampler(inner, 5, drop_last=False)): [inner],
        own: [own],
    }
    for loader, ordering in loaders.items():
        _, _, runner = make_runner(4)
        assert [*runner.run(loader, epochs=3)]
        assert [one.epochs for one in ordering] == [[0, 1, 2]] * len(ordering)
        [*runner.run(loader)]
        assert [one.epochs for one in ordering] == [[0, 1, 2]] * len(ordering), "without epochs= it is the user's"


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, inputs):
        return self.body(inputs)


class Training:
    """The objects of a program, in the first run and in one that is resumed."""

    def __init__(self, make_loader):
        torch.manual_seed(5)
        self.model = Dropping()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        device = make_device()
        plan = autobatch.fit(
            self.model,
            12,
            batch=make_batch(8),
            step=mean_step,
            optimizer=self.optimizer,
            max_micro_batch=5,
            check=None,
            device=device,
        )
        self.runner = autobatch.Runner(plan, self.model, mean_step, self.optimizer, device=device)
        self.loader = make_loader(plan)

    def state(self):
        kept = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        runner = json.loads(json.dumps(self.runner.state_dict()))
        return copy.deepcopy({**kept, "runner": runner, "random": torch.get_rng_state()})

    def load(self, state):
        """A copy: training continues in the loaded tensors."""
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.runner.load_state_dict(state["runner"])
        torch.set_rng_state(state["random"])


class Shuffled(RandomSampler):
    """An order of its own in each epoch, as DistributedSampler has."""

    def __init__(self, data):
        super().__init__(data, generator=torch.Generator())
        self.set_epoch(0)

    def set_epoch(self, epoch):
        self.generator.manual_seed(100 + epoch)


DATA = TensorDataset(*make_batch(31))
RESUMED = {
    "in order": lambda _: DataLoader(DATA, batch_size=7),
    "a sampler with epochs": lambda _: DataLoader(DATA, batch_size=7, sampler=Shuffled(DATA)),
    "larger batches": lambda _: DataLoader(DATA, batch_size=31, sampler=Shuffled(DATA)),
    "shares": lambda plan: DataLoader(DATA, batch_sampler=autobatch.ShareSampler(plan, DATA)),
}


@pytest.mark.parametrize("after", range(1, 6))
@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_is_resumed_bit_for_bit(kind, after):
    """From the state after any step, also with random numbers in the step, whatever was read ahead."""
    first = Training(RESUMED[kind])
    saved, losses = None, []
    for result in first.runner.run(first.loader, epochs=2):
        losses.append(result.loss)
        if first.runner.steps == after:
            saved = first.state()
    assert len(losses) == 6
    assert (saved["runner"]["passes"], saved["runner"]["pass_samples"]) == (
        (after > 3),
        min(after * 12, 31) if after <= 3 else after * 12 - 36,
    )
    again = Training(RESUMED[kind])
    again.load(saved)
    found = [result.loss for result in again.runner.run(again.loader, epochs=2)]
    assert [*map(float, found)] == [*map(float, losses[after:])]
    assert not differences(bits_of(again.model, again.optimizer), bits_of(first.model, first.optimizer))
    assert again.runner.passes == 2


def test_passes_that_the_user_counts_are_resumed_too():
    """Without ``epochs=`` the state says in which pass it was, and where."""
    states = []
    first = Training(RESUMED["a sampler with epochs"])
    for epoch in range(2):
        first.loader.sampler.set_epoch(epoch)
        states += [first.state() for _ in first.runner.run(first.loader)]
        states.append(first.state())
    for saved in states:
        again = Training(RESUMED["a sampler with epochs"])
        again.load(saved)
        for epoch in range(again.runner.passes, 2):
            again.loader.sampler.set_epoch(epoch)
            for _ in again.runner.run(again.loader):
                pass
        assert not differences(bits_of(again.model, again.optimizer), bits_of(first.model, first.optimizer))


@pytest.mark.parametrize("knows_samples", [False, True])
def test_a_resumed_share_sampler_is_not_skipped_twice(knows_samples):
    """It begins where it was left, whether or not the Runner's state says the same."""
    first = Training(RESUMED["shares"])
    losses = [float(result.loss) for result in first.runner.run(first.loader)]
    again = Training(RESUMED["shares"])
    for result in again.runner.run(again.loader):
        assert float(result.loss) == losses[0]
        break
    saved, place = again.state(), again.loader.batch_sampler.state_dict(1)
    third = Training(RESUMED["shares"])
    third.load(saved)
    if not knows_samples:
        third.runner.load_state_dict({**saved["runner"], "pass_samples": 0})
    third.loader.batch_sampler.load_state_dict(place)
    found = []
    for result in third.runner.run(third.loader):
        found.append(float(result.loss))
        assert third.runner.state_dict()["pass_samples"] == min(31, 12 * (len(found) + 1))
    assert found == losses[1:]


def test_a_new_call_begins_a_new_pass():
    """Also after the loop was left, and after a step that raised; then the state says where it was."""
    whole = make_batch(30, torch.float64)
    _, _, runner = make_runner(12)
    loader = split(whole, [8, 8, 8, 6])
    for _ in runner.run(loader):
        break
    assert runner.state_dict()["pass_samples"] == 12
    assert len([*runner.run(loader)]) == 3
    assert (runner.passes, runner.state_dict()["pass_samples"]) == (1, 0)

    steps = runner.run(loader)
    next(steps)
    with oom_at(*range(1, 400)), pytest.raises(DoesNotFit):
        next(steps)
    saved = runner.state_dict()
    assert (saved["passes"], saved["pass_samples"]) == (1, 12)
    runner.load_state_dict(saved)
    assert [sum(result.micro_batch_sizes) for result in runner.run(loader)] == [12, 6]


def test_a_step_runs_when_it_is_asked_for_and_no_batch_is_read_early():
    """Nothing of a step that is over is held, and no more is read than the next step needs."""
    _, _, runner = make_runner(12)
    read = []

    def loader():
        for number, batch in enumerate(split(make_batch(30, torch.float64), [8, 8, 8, 6])):
            read.append(number)
            yield batch

    steps = runner.run(loader())
    assert not read
    next(steps)
    assert (read, runner.steps) == ([0, 1], 1)
    next(steps)
    assert (read, runner.steps) == ([0, 1, 2], 2)


REFUSED = {
    "a tensor": lambda _: torch.zeros(4, 6),
    "a batch of tensors": lambda _: make_batch(4),
    "a dict": lambda _: {"x": torch.zeros(4, 6)},
    "a registered type": lambda _: Rows(*make_batch(4)),
    "a number": lambda _: 3,
    "nothing": lambda _: None,
    "a dataset": lambda _: TensorDataset(*make_batch(4)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_gives_no_batches_is_refused(kind):
    """At the call, before anything runs, with what to pass."""
    _, _, runner = make_runner()
    with pytest.raises(InvalidArgument, match=r"run\(\) takes a loader"):
        runner.run(REFUSED[kind](None))


def test_a_loader_of_less_than_was_used_is_refused():
    """With both numbers; no step has run."""
    _, _, runner = make_runner(12)
    runner.load_state_dict({**runner.state_dict(), "pass_samples": 24})
    with pytest.raises(InvalidArgument, match=r"24 samples.*16"):
        next(runner.run(split(make_batch(16, torch.float64), [8, 8])))
    assert runner.steps == 0


def test_errors_of_the_loader_and_of_its_batches_reach_the_user():
    """As they were raised, after the steps before them."""
    _, _, runner = make_runner(12)

    def broken(last):
        yield make_batch(14, torch.float64)
        yield last if not isinstance(last, Exception) else raise_(last)

    def raise_(error):
        raise error

    for last, expected in ((KeyError("disk"), KeyError), ((torch.zeros(2, 6), torch.zeros(3)), InvalidArgument)):
        steps = runner.run(broken(last))
        next(steps)
        with pytest.raises(expected):
            next(steps)


def make_alike():
    """Inputs and targets of one shape, which can be joined by mistake."""
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 8))
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autobatch.Runner.fit(
        model,
        32,
        batch=DataLoader(data, batch_size=8),
        step=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        optimizer=optimizer,
        max_micro_batch=16,
        reuse=False,
    )
    return runner, model, data


class Samples(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


NO_LOADERS = {
    "one batch as a list": lambda data: next(iter(DataLoader(data, batch_size=32))),
    "a list of samples": list,
    "a loader without batches": lambda data: DataLoader(data, batch_size=None),
    "a stream of samples": Samples,
    "batches of another structure": lambda data: ({"x": x, "y": y} for x, y in DataLoader(data, batch_size=8)),
}


@pytest.mark.parametrize("make", NO_LOADERS.values(), ids=NO_LOADERS)
def test_what_yields_no_batches_like_the_example_is_refused(make):
    """In one line; the rows of a sample, or the tensors of one batch, would be taken for samples."""
    runner, model, data = make_alike()
    before = model[0].weight.clone()
    with pytest.raises(InvalidArgument) as raised:
        list(runner.run(make(data)))
    assert "\n" not in str(raised.value)
    assert torch.equal(model[0].weight, before)
    assert runner.steps == 0


NO_STEPS = {
    "an empty loader": (lambda data: DataLoader([], batch_size=4), {"epochs": 2}, "the loader gave no batch"),
    "a used iterator": (lambda data: iter(()), {}, "the loader gave no batch; a tuple_iterator can be read only once"),
    "empty batches": (lambda data: [None], {}, "the loader gave 1 batch without samples"),
    "less than a step": (
        lambda data: [data[:8]],
        {"drop_last": True},
        "the loader gave 8 samples, fewer than a step's 32, and drop_last=True leaves them out",
    ),
}


@pytest.mark.parametrize("name", NO_STEPS)
def test_a_pass_without_a_step_is_a_warning(name, caplog):
    """A loop over nothing would end as one that has trained; it is named once a call."""
    runner, _, data = make_alike()
    make, options, cause = NO_STEPS[name]
    caplog.clear()
    assert not list(runner.run(make(data), **options))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "run() made no step" in warning
    assert cause in warning


def test_a_pass_that_an_earlier_run_has_finished_is_no_warning(caplog):
    """A state that was saved after the last step has nothing left to run in its pass."""
    runner, _, data = make_alike()
    loader = DataLoader(data, batch_size=8)
    for _ in runner.run(loader):
        state = runner.state_dict()
    runner.load_state_dict(state)
    caplog.clear()
    assert not list(runner.run(loader))
    assert not caplog.records


def test_a_call_does_not_continue_after_another_has_begun():
    """Both would count their samples in one place, and a resumed run would skip the wrong ones."""
    runner, _, data = make_alike()
    loader = DataLoader(data, batch_size=8)
    first = runner.run(loader)
    next(first)
    second = runner.run(loader)
    next(second)
    with pytest.raises(InvalidArgument, match="another call"):
        next(first)
    assert runner.state_dict()["pass_samples"] == 32
    assert len(list(second)) == 2


def test_training_on_no_loss_is_a_warning(caplog):
    """A forgotten step= would train on the mean of the outputs."""
    data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autobatch.Runner.fit(model, 32, batch=DataLoader(data, batch_size=8), optimizer=optimizer, reuse=False)
    assert [record for record in caplog.records if "pass step=" in record.message and record.levelname == "WARNING"]
