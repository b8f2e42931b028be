"""The decorator that finds a batch size, beside accelerate's own, with accelerate's prepared objects."""

from __future__ import annotations

import functools
import random
import warnings
from collections import deque

import accelerate
import numpy as np
import pytest
import torch
from accelerate.utils import find_executable_batch_size as accelerates_own
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from workloads import bits_of, differences

from autobatch.errors import InvalidArgument
from autobatch.integrations.accelerate import find_executable_batch_size
from autobatch.memory.devices import device_for
from autobatch.testing import FakeDevice

SAMPLES = 512
INPUTS = torch.randn(SAMPLES, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(0, 4, (SAMPLES,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_accelerator_before():
    """Begin without what accelerate remembers for the whole process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make_model():
    """A model of 0.3 MiB whose activations take 6 KiB a sample."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Linear(32, 64), *hidden, nn.Linear(64, 4)).double()


def batches(batch_size, steps):
    """So many batches of so many samples."""
    for step in range(steps):
        rows = (torch.arange(batch_size) + step) % SAMPLES
        yield INPUTS[rows], TARGETS[rows]


class Training:
    """Makes functions to decorate, and writes down the sizes of their calls and those that ran out of memory."""

    def __init__(self, steps=4):
        self.steps, self.sizes, self.shortages = steps, [], []

    def run(self, batch_size, model, optimizer):
        """A plain loop."""
        self.sizes.append(batch_size)
        try:
            for inputs, targets in batches(batch_size, self.steps):
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        except torch.OutOfMemoryError:
            self.shortages.append(batch_size)
            raise
        return batch_size

    def function(self):
        """A function that names the loop as a method of an object."""

        def train(batch_size, model, optimizer):
            return self.run(batch_size, model, optimizer)

        return train


def make_all(optimizer=torch.optim.AdamW):
    """Model and optimizer, which stand outside of the function."""
    model = make_model()
    return model, optimizer(model.parameters(), lr=0.01)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("budget", [2 * 2**20, 4 * 2**20])
def test_it_finds_more_in_fewer_calls_than_accelerates_own(budget, optimizer):
    """At most five calls, none out of memory, and the weights of a fresh run with the size that was found."""
    ours, own, fresh = Training(), Training(), Training()
    model, adam = make_all(optimizer)
    decorated = find_executable_batch_size(ours.function(), SAMPLES, budget=budget)
    size = decorated(model, adam)
    assert (len(ours.sizes) <= 5, ours.shortages, ours.sizes[-1]) == (True, [], size)
    expected, its = make_all(optimizer)
    fresh.run(size, expected, its)
    assert not differences(bits_of(model, adam), bits_of(expected, its))

    def limited(batch_size):
        outside = make_all(optimizer)
        cpu = device_for(torch.device("cpu"))
        cpu.watch(outside[0].parameters())
        with cpu.limit(budget - budget // 20):
            return own.run(batch_size, *outside)

    its_size = accelerates_own(limited, SAMPLES)()
    assert len(own.shortages) > 3
    assert its_size <= size < SAMPLES


def test_the_largest_size_is_run_where_it_fits():
    """By a call that is kept; its weights are those of a run with that size."""
    ours, (model, adam) = Training(), make_all()
    assert find_executable_batch_size(ours.function(), 64, budget="1GiB")(model, adam) == 64
    assert len(ours.sizes) <= 3
    expected, its = make_all()
    Training().run(64, expected, its)
    assert not differences(bits_of(model, adam), bits_of(expected, its))


def test_the_size_holds_for_later_calls():
    """As with accelerate's own: nothing is searched for a second time."""
    ours = Training()
    decorated = find_executable_batch_size(ours.function(), SAMPLES, budget="3MiB")
    size = decorated(*make_all())
    del ours.sizes[:]
    assert decorated(*make_all()) == size
    assert ours.sizes == [size]


def test_it_is_a_decorator_with_and_without_arguments():
    """As accelerate's; the function's name stays."""

    @find_executable_batch_size
    def by_itself(batch_size):
        return batch_size

    @find_executable_batch_size(starting_batch_size=16)
    def with_arguments(batch_size):
        return batch_size

    assert (by_itself(), with_arguments()) == (128, 16)
    assert (by_itself.__name__, with_arguments.__name__) == ("by_itself", "with_arguments")


def prepare(scaled):
    """Model, optimizer, scheduler, loader from ``accelerator.prepare``, the scaler as on a card."""
    accelerator = accelerate.Accelerator(cpu=True)
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def state_of(accelerator, model, optimizer, scheduler):
    """Everything that a step changes, and how much accelerate holds."""
    scaler = accelerator.scaler
    return {
        **bits_of(model, optimizer.optimizer),
        "scheduler": scheduler.scheduler.state_dict(),
        "scaler": None if scaler is None else (scaler.state_dict(), len(scaler._per_optimizer_states)),
        "held": (len(accelerator._models), len(accelerator._dataloaders), accelerator.step),
        "loaders": len(accelerate.state.GradientState().dataloader_references),
        "skipped": optimizer.step_was_skipped,
        "random": torch.get_rng_state(),
    }


def train_prepared(batch_size, accelerator, model, optimizer, scheduler):
    """A loop as in accelerate's documentation."""
    loader = accelerator.prepare(DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=batch_size))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return batch_size


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_prepared_objects_are_put_back_between_calls(scaled):
    """After the search all is as after one run with the size: weights, scaler, scheduler, accelerate's own lists."""
    ours, expected = prepare(scaled), prepare(scaled)
    torch.manual_seed(5)
    size = find_executable_batch_size(train_prepared, 128, budget="1.5MiB")(*ours)
    assert 1 < size < 128
    found = state_of(*ours)
    torch.manual_seed(5)
    train_prepared(size, *expected)
    assert not differences(found, state_of(*expected))


def test_what_the_function_names_is_put_back():
    """Globals and the closure, as in a script that passes nothing."""
    model, adam = make_all()

    @find_executable_batch_size(starting_batch_size=SAMPLES, budget="3MiB")
    def train(batch_size):
        return Training().run(batch_size, model, adam)

    size = train()
    expected, its = make_all()
    Training().run(size, expected, its)
    assert not differences(bits_of(model, adam), bits_of(expected, its))


def test_memory_that_ends_later_is_answered_as_accelerate_does():
    """A tenth less, from the beginning: a run that failed in its fourth step has left nothing."""
    model, adam = make_all()
    failed = []

    @find_executable_batch_size(starting_batch_size=SAMPLES, budget="3MiB")
    def train(batch_size, model, optimizer):
        for step, (inputs, targets) in enumerate(batches(batch_size, 4)):
            if step == 3 and not failed:
                failed.append(batch_size)
                torch.empty(2**20, dtype=torch.float64)
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    size = train(model, adam)
    assert size == int(failed[0] * 0.9)
    expected, its = make_all()
    Training().run(size, expected, its)
    assert not differences(bits_of(model, adam), bits_of(expected, its))


def test_sizes_are_the_users_where_a_function_gives_them():
    """None that is measured to be too large is tried, and none that the function does not give."""
    ours, allowed = Training(), [512, 384, 256, 160, 96, 64, 32, 16, 8]
    left = iter(allowed[1:])
    decorated = find_executable_batch_size(ours.function(), 512, lambda: next(left), budget="3MiB")
    size = decorated(*make_all())
    assert ours.shortages == []
    assert size in allowed
    assert ours.sizes[-1] == size
    following = find_executable_batch_size(Training().function(), 512, budget="3MiB")(*make_all())
    assert size == max(one for one in allowed if one <= following)


class RunsOut(Training):
    """Has memory for 100 samples."""

    def run(self, batch_size, model, optimizer):
        """A loop."""
        self.sizes.append(batch_size)
        if batch_size > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        for inputs, targets in batches(batch_size, self.steps):
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return batch_size


class Evaluates(RunsOut):
    """Steps nothing."""

    def run(self, batch_size, model, optimizer):
        """Scores."""
        self.sizes.append(batch_size)
        if batch_size > 100:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return model(INPUTS[:batch_size]).shape[0]


class Hides(RunsOut):
    """Steps by a name that no code shows."""

    def function(self):
        """A function that looks up what it calls."""

        def train(batch_size, model, optimizer):
            return getattr(self, "ru" + "n")(batch_size, model, optimizer)

        return train


class FailsSmall(RunsOut):
    """Accumulates, and cannot with fewer than 32 samples."""

    def run(self, batch_size, model, optimizer):
        """Divides by a number that may be 0."""
        if not 256 // (batch_size // 32):
            optimizer.step()
        return super().run(batch_size, model, optimizer)


def run_both(kind, **options):
    """The sizes of the calls, and what came of them, of both decorators."""
    found = []
    for decorator, given in ((find_executable_batch_size, options), (accelerates_own, {})):
        training = kind()
        found.append((decorator(training.function(), 256, **given)(*make_all()), training.sizes))
    return found


BLIND = FakeDevice(lambda n: n, total_bytes=1000, measures=False)


@pytest.mark.parametrize(
    ("kind", "options", "processes"),
    [(Evaluates, {}, 1), (Hides, {}, 1), (RunsOut, {"device": BLIND}, 1), (RunsOut, {}, 2)],
    ids=["no step", "a step that is hidden", "a device without numbers", "two processes"],
)
def test_where_nothing_can_be_measured_it_does_as_accelerate_does(kind, options, processes, monkeypatch):
    """The same calls with the same sizes."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    ours, its = run_both(kind, **options)
    assert ours == its
    assert len(its[1]) > 5


def test_an_error_with_few_samples_is_no_answer(caplog):
    """The calls of accelerate's own follow, and the log says why."""
    ours, its = run_both(FailsSmall)
    assert ours == its
    assert "train() with a batch size of 2: ZeroDivisionError" in caplog.text
    assert "begins with 256 instead" in caplog.text


def test_an_error_of_the_users_own_comes_out():
    """As it was raised, also where it arises in the call that is kept."""

    @find_executable_batch_size(starting_batch_size=64, budget="1GiB")
    def train(batch_size, model, optimizer):
        Training().run(batch_size, model, optimizer)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(*make_all())


def test_nothing_that_fits_is_an_error_in_accelerates_words():
    """When not even one sample fits."""
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        find_executable_batch_size(Training().function(), 64, budget="256KiB")(*make_all())


def test_a_batch_size_that_is_given_is_refused():
    """The decorator gives it."""
    with pytest.raises(
        TypeError, match=r"train\(\) gets its batch size from the decorator: call it with at most 2 arg"
    ):
        find_executable_batch_size(Training().function())(64, *make_all())


@pytest.mark.parametrize("size", [2.5, "64", None, True, float("nan")])
def test_a_largest_size_that_is_no_number_of_samples_is_refused(size):
    """Before anything is called."""
    with pytest.raises(InvalidArgument, match=r"^starting_batch_size=.* must be an int: it counts samples$"):
        find_executable_batch_size(Training().function(), size)(*make_all())


class TrainingObject:
    """It trains when it is called."""

    def __init__(self):
        self.training = Training()

    def __call__(self, batch_size, *given):
        return self.training.run(batch_size, *given)


def make_partial():
    """The same, with a function that has no name."""
    made = TrainingObject()
    return functools.partial(made.training.function()), made.training


def make_object():
    """An object, and its record."""
    made = TrainingObject()
    return made, made.training


@pytest.mark.parametrize("budget", ["1GiB", "4MiB"])
@pytest.mark.parametrize("make", [make_partial, make_object])
def test_what_has_no_name_of_a_function_is_measured_too(make, budget):
    """Where all fits, and where the size is looked for."""
    called, training = make()
    size = find_executable_batch_size(called, SAMPLES, budget=budget)(*make_all())
    assert (training.sizes[0], training.sizes[-1], training.shortages) == (2, size, [])


@pytest.mark.parametrize("size", [None, 2.5, "8", True])
def test_a_next_size_that_is_no_number_of_samples_is_refused(size):
    """With what the function gave."""
    decorated = find_executable_batch_size(Training().function(), 4096, lambda: size, budget="1MiB")
    with pytest.raises(InvalidArgument, match=r"^reduce_batch_size_fn\(\) returned .*: return an int, the next size$"):
        decorated(*make_all())
    with pytest.raises(InvalidArgument, match=r"^reduce_batch_size_fn=5 must be a function$"):
        find_executable_batch_size(Training().function(), 64, 5)(*make_all())


def test_a_function_without_a_batch_size_is_refused():
    """It has nowhere to put it."""
    with pytest.raises(TypeError, match=r"^<lambda>\(\) takes no argument, and its first is to be the batch size$"):
        find_executable_batch_size(lambda: None)()


def test_the_end_of_a_measured_call_cannot_be_stopped():
    """By a bare ``except``: the call ends at its next step, and counts as measured."""
    seen = []

    @find_executable_batch_size(starting_batch_size=SAMPLES, budget="3MiB")
    def train(batch_size, model, optimizer):
        done = 0
        for inputs, targets in batches(batch_size, 6):
            try:
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            except torch.OutOfMemoryError:
                raise
            except:  # noqa: E722 - what is shown
                pass
            else:
                done += 1
            optimizer.zero_grad()
        seen.append((batch_size, done))
        return batch_size

    model, adam = make_all()
    size = train(model, adam)
    assert seen[-1] == (size, 6)
    assert all(done == 1 for _, done in seen[:-1])
    expected, its = make_all()
    Training(6).run(size, expected, its)
    assert not differences(bits_of(model, adam), bits_of(expected, its))


@pytest.mark.parametrize("steps", [1, 2])
def test_functions_of_few_steps(steps):
    """They come to their end in each call, and the last one counts."""
    ours, (model, sgd) = Training(steps), make_all(torch.optim.SGD)
    size = find_executable_batch_size(ours.function(), SAMPLES, budget="3MiB")(model, sgd)
    assert (ours.shortages, ours.sizes[-1]) == ([], size)
    assert size > 64
    expected, its = make_all(torch.optim.SGD)
    Training(steps).run(size, expected, its)
    assert not differences(bits_of(model, sgd), bits_of(expected, its))


def test_a_device_that_stands_in():
    """Its formula decides, and the largest size within its limit is the answer."""
    gpu = FakeDevice(lambda n: 1000 + 10 * n, total_bytes=2000)

    @find_executable_batch_size(starting_batch_size=256, device=gpu, headroom=0)
    def train(batch_size, model, optimizer):
        for inputs, targets in batches(batch_size, 3):
            with gpu.micro_batch(batch_size):
                F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    assert train(*make_all()) == 100


def test_two_optimizers():
    """The steps of the first one are counted: between two of them both have stepped."""
    counts = []

    @find_executable_batch_size(starting_batch_size=SAMPLES, budget="3MiB")
    def train(batch_size):
        one, two = make_all(), make_all(torch.optim.SGD)
        counts.append([batch_size, 0])
        for inputs, targets in batches(batch_size, 4):
            for model, optimizer in (one, two):
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
                counts[-1][1] += 1
        return batch_size

    assert train() == counts[-1][0]
    assert counts[-1][1] == 8
    assert all(steps == 2 for _, steps in counts[:-1])


DRAWS = {
    "torch": (lambda: torch.Generator().manual_seed(3), lambda made, n: torch.randperm(SAMPLES, generator=made)[:n]),
    "Python": (lambda: random.Random(3), lambda made, n: torch.tensor(made.sample(range(SAMPLES), n))),
    "NumPy": (lambda: np.random.default_rng(3), lambda made, n: torch.from_numpy(made.permutation(SAMPLES)[:n])),
    "NumPy, old": (lambda: np.random.RandomState(3), lambda made, n: torch.from_numpy(made.permutation(SAMPLES)[:n])),
}


@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "named"])
def test_generators_are_put_back(kind, is_given):
    """The order of the data is that of one run with the size, whether they are given or named."""
    make, draw = DRAWS[kind]
    ends = []
    for decorator in (find_executable_batch_size, accelerates_own):
        (model, sgd), made = make_all(torch.optim.SGD), make()

        def train(batch_size, *given, model=model, sgd=sgd, named=None if is_given else made):
            for _ in range(4):
                rows = draw(given[0] if given else named, batch_size)
                F.cross_entropy(model(INPUTS[rows]), TARGETS[rows]).backward()
                sgd.step()
                sgd.zero_grad()

        torch.manual_seed(7)
        decorator(train, 64)(*([made] if is_given else []))
        ends.append(bits_of(model, sgd))
    assert not differences(*ends)


def test_a_loader_with_a_generator_has_the_same_order():
    """Of a loader that is made in the function, with a generator from outside."""
    orders = []
    for decorator in (find_executable_batch_size, accelerates_own):
        (model, sgd), generator, seen = make_all(torch.optim.SGD), torch.Generator().manual_seed(3), {}

        @decorator(starting_batch_size=64)
        def train(batch_size, model=model, sgd=sgd, generator=generator, seen=seen):
            seen[batch_size] = order = []
            for inputs, targets in DataLoader(
                TensorDataset(INPUTS, TARGETS), batch_size, shuffle=True, generator=generator
            ):
                order.append(targets)
                F.cross_entropy(model(inputs), targets).backward()
                sgd.step()
                sgd.zero_grad()
            return batch_size

        orders.append(torch.cat(seen[train()]))
    assert torch.equal(*orders)


@pytest.mark.parametrize("in_place", [True, False], ids=["written into", "replaced"])
def test_tensors_in_containers_are_put_back(in_place):
    """An average of the weights in a dict, and a tensor by itself, are those of one run, and the same objects."""
    ends = []
    for decorator in (find_executable_batch_size, accelerates_own):
        model, sgd = make_all(torch.optim.SGD)
        averages = {name: value.detach().clone() for name, value in model.named_parameters()}
        before, count, recent = dict(averages), torch.zeros(()), deque([torch.zeros(())], maxlen=2)

        @decorator(starting_batch_size=64)
        def train(batch_size, *, model=model, sgd=sgd, averages=averages, count=count, recent=recent):
            for inputs, targets in batches(batch_size, 4):
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()
                sgd.step()
                sgd.zero_grad()
                count.data.add_(1)
                recent.append(loss.detach())
                for name, value in model.named_parameters():
                    if in_place:
                        averages[name].mul_(0.9).add_(value.detach(), alpha=0.1)
                    else:
                        averages[name] = 0.9 * averages[name] + 0.1 * value.detach()
            return batch_size

        torch.manual_seed(7)
        train()
        assert all((averages[name] is value) == in_place for name, value in before.items())
        ends.append({"count": count, "recent": [*recent], "before": before, **averages})
    assert not differences(*ends)


def test_what_an_iterator_gave_is_gone():
    """Documented: each call goes on where the last one ended, as with accelerate's own."""
    given = []
    stream = iter(range(1000))

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size, model, optimizer, stream):
        for inputs, targets in batches(batch_size, 4):
            given.append(next(stream))
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    train(*make_all(), stream)
    assert given == [*range(len(given))]


def test_data_that_may_not_be_written_stays_as_it_is(tmp_path):
    """Arrays and tensors over a file that is open for reading are not written into."""
    path = tmp_path / "data"
    INPUTS.numpy().tofile(path)
    mapped = torch.from_file(str(path), shared=False, size=INPUTS.numel(), dtype=INPUTS.dtype).view_as(INPUTS)
    frozen = np.memmap(path, mode="r", dtype=np.float64, shape=tuple(INPUTS.shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read_only = torch.from_numpy(frozen)

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size, model, optimizer):
        for _ in range(4):
            F.cross_entropy(model(mapped[:batch_size] + read_only[:batch_size]), TARGETS[:batch_size]).backward()
            optimizer.step()
        return batch_size

    assert train(*make_all()) == 64


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize(
    ("budget", "is_named"), [("600KiB", True), ("700KiB", True), ("700KiB", False), ("900KiB", False)]
)
def test_no_jump_runs_out_where_data_is_resident(is_named, budget, optimizer):
    """Gradients are the peak at a few samples and activations later; data takes as much as the model and more."""
    named, sizes, shortages = INPUTS.clone(), [], []
    torch.manual_seed(0)
    hidden = nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(64, 4)).double()
    made = optimizer(model.parameters())

    @find_executable_batch_size(starting_batch_size=SAMPLES, budget=budget)
    def train(batch_size, *, model=model, made=made, named=named if is_named else None):
        sizes.append(batch_size)
        data = torch.zeros_like(INPUTS) if named is None else named
        try:
            for _ in range(4):
                F.cross_entropy(model(data[:batch_size].clone()), TARGETS[:batch_size]).backward()
                made.step()
                made.zero_grad()
        except torch.OutOfMemoryError:
            shortages.append(batch_size)
            raise
        return batch_size

    assert train() == sizes[-1]
    assert shortages == []
    assert len(sizes) <= (6 if is_named else 11)
