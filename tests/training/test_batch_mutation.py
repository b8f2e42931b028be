"""A step that writes into its batch is refused wherever it is run, and the batch is put back."""

import copy

import numpy as np
import pytest
import torch
from sampling import sample
from splits import small
from torch.nn import functional as F
from workloads import bits_of, differences, make_batch, mean_step

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.exactness.verification import verify
from autobatch.testing import oom_at
from autobatch.training.misuse import WROTE_INTO_BATCH


def write_by_method(batch):
    batch[0].mul_(2)


def write_into_view(batch):
    batch[0][:, :2].zero_()


def write_labels(batch):
    batch[1].clamp_(0, 2)


def write_without_grad(batch):
    with torch.no_grad():
        batch[0].add_(torch.randn_like(batch[0]))


def write_by_index(batch):
    batch[0][batch[0] > 0.5] = 0.5


def write_through_out(batch):
    torch.mul(batch[0].detach(), 2, out=batch[0].detach())


def write_through_data(batch):
    batch[0].data.mul_(2)


COUNTED = [write_by_method, write_into_view, write_labels, write_without_grad, write_by_index, write_through_out]
WRITES = [*COUNTED, write_through_data]


def writing(write):
    def step(model, batch):
        write(batch)
        return mean_step(model, batch)

    return step


def train(step, batch, *, run=1):
    """A Runner's steps in micro-batches of 4."""
    torch.manual_seed(0)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    plan = autobatch.fit(model, 8, batch=make_batch(8), step=mean_step, optimizer=optimizer, max_micro_batch=4)
    runner = autobatch.Runner(plan, model, step, optimizer)
    for _ in range(run):
        before = bits_of(model, optimizer)
        try:
            runner.step(batch)
        except Exception:
            assert differences(bits_of(model, optimizer), before) == []
            raise


ASKED = {
    "fit": lambda step, batch: autobatch.fit(small(), 16, batch=batch, step=step, max_micro_batch=4),
    "verify": lambda step, batch: verify(small(), batch, step),
    "runner": train,
    "predict": lambda step, batch: autobatch.predict(small(), batch, step, gpu="24GiB", target_batch=16),
}


@pytest.mark.parametrize("asked", ["fit", "verify", "runner", pytest.param("predict", marks=pytest.mark.predicts)])
@pytest.mark.parametrize("write", sample(COUNTED, 2))
def test_a_write_into_the_batch_is_refused_by_all_alike(asked, write):
    """fit, verify, Runner and predict say the same, and the user's batch is as it was."""
    batch = make_batch(8)
    before = copy.deepcopy(batch)
    with pytest.raises(InvalidArgument) as caught:
        ASKED[asked](writing(write), batch)
    assert str(caught.value) == WROTE_INTO_BATCH
    assert all(torch.equal(*pair) for pair in zip(batch, before, strict=True))


@pytest.mark.parametrize("write", WRITES)
def test_everything_is_as_before_a_refused_step(write):
    """Batch, parameters, optimizer and generators; also where torch does not count the write."""
    batch = make_batch(8)
    batch[0][3, 3] = torch.nan
    before = copy.deepcopy(batch)
    with pytest.raises(InvalidArgument, match="wrote into its batch"):
        train(writing(write), batch)
    assert torch.equal(batch[0].view(torch.int32), before[0].view(torch.int32))
    assert torch.equal(batch[1], before[1])


def test_memory_that_runs_out_after_a_write_is_no_retry_on_it():
    """The step is refused, and the batch is as it was."""
    batch, seen = make_batch(8), []
    before = copy.deepcopy(batch)

    def step(model, part):
        seen.append(part[0].clone())
        if len(seen) == 1:
            part[0].zero_()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return mean_step(model, part)

    with pytest.raises(InvalidArgument, match="wrote into its batch"):
        train(step, batch)
    assert torch.equal(batch[0], before[0])


def test_memory_that_ends_after_a_write_that_stays_is_no_retry():
    """The Runner must not train on samples that were written into and not copied."""
    batch, calls = make_batch(8), []

    def step(model, part):
        calls.append(1)
        if len(calls) == 5:
            part[0].mul_(2)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return mean_step(model, part)

    with pytest.raises(InvalidArgument, match="wrote into its batch"):
        train(step, batch, run=3)
    assert len(calls) == 5


def make_arrays(samples=8):
    """A batch of NumPy arrays, one of them with nan."""
    inputs, labels = make_batch(samples)
    arrays = {"inputs": inputs.numpy().copy(), "labels": labels.numpy().copy(), "weight": np.full(samples, np.nan)}
    return {**arrays, "names": np.array([f"n{row}" for row in range(samples)])}


def array_step(model, batch):
    return F.cross_entropy(model(torch.tensor(batch["inputs"])), torch.tensor(batch["labels"]))


ARRAY_WRITES = {
    "by NumPy": lambda batch: np.multiply(batch["inputs"], 2, out=batch["inputs"]),
    "by torch": lambda batch: torch.from_numpy(batch["inputs"]).mul_(2),
    "labels": lambda batch: batch["labels"].__setitem__(0, 3 - batch["labels"][0]),
    "nan": lambda batch: batch["weight"].__setitem__(0, 1.0),
    "texts": lambda batch: batch["names"].__setitem__(0, "x"),
}


@pytest.mark.parametrize("asked", ["fit", "verify", "runner"])
@pytest.mark.parametrize("write", ARRAY_WRITES)
def test_numpy_arrays_are_watched_the_same_way(asked, write):
    """A write that torch cannot count is refused all the same, and undone."""
    batch = make_arrays()
    before = copy.deepcopy(batch)

    def step(model, part):
        ARRAY_WRITES[write](part)
        return array_step(model, part)

    with pytest.raises(InvalidArgument, match="wrote into its batch"):
        ASKED[asked](step, batch)
    assert all(batch[name].tobytes() == before[name].tobytes() for name in batch)


@pytest.mark.parametrize("asked", ["fit", "verify", "runner"])
def test_arrays_that_are_only_read_are_left_alone(asked):
    """Read-only arrays and arrays of objects raise nothing."""
    batch = make_arrays()
    batch["inputs"].flags.writeable = False
    batch["objects"] = np.array([{"row": row} for row in range(8)], dtype=object)
    ASKED[asked](array_step, batch)


@pytest.mark.predicts
def test_what_only_looks_like_a_write_is_accepted():
    """A tensor of its own, a changed container, metadata."""

    def step(model, batch):
        inputs = batch[0].detach().clone().mul_(2)
        batch[0].requires_grad_()
        return mean_step(model, (inputs, batch.__class__(batch)[1]))

    for ask in ASKED.values():
        ask(step, make_batch(8))


@pytest.mark.predicts
def test_predict_lets_a_step_write_into_what_is_copied_to_the_card():
    """A batch in host memory beside a model elsewhere is copied in training, and the copy may be written into."""
    model = small().to("meta")
    autobatch.predict(model, make_batch(8), writing(write_by_method), gpu="24GiB", target_batch=16)


def test_wherever_memory_ends_the_batch_is_as_it_was():
    """Before the copy, in it, or after the write."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = autobatch.fit(model, 8, batch=make_batch(8), step=mean_step, optimizer=optimizer, max_micro_batch=4)
    for position in range(1, 16):
        batch = make_batch(8)
        before = copy.deepcopy(batch)
        runner = autobatch.Runner(plan, model, writing(write_by_method), optimizer)
        with oom_at(position), pytest.raises(InvalidArgument, match="wrote into its batch"):
            runner.step(batch)
        assert torch.equal(batch[0], before[0])


GIVEN_FUNCTIONS = {
    "weigh": lambda change: {"weigh": lambda batch: change(batch) or len(batch["inputs"])},
    "cut": lambda change: {"cut": lambda batch, largest: change(batch) or [[*range(len(batch["inputs"]))]]},
    "length_of": lambda change: {
        "cut": autobatch.by_length(lambda batch: change(batch) or (batch["inputs"] != 0).any(2).sum(1))
    },
}


def ask_about(name, change):
    """A batch, and what runs a step of it in one micro-batch with a function that changes it."""
    torch.manual_seed(0)
    batch = {"inputs": torch.randn(4, 5, 3), "labels": torch.randn(4, 5, 1), "notes": {"ids": torch.arange(4)}}
    batch["inputs"][3, 3:] = batch["labels"][3, 3:] = 0
    model, changes = torch.nn.Linear(3, 1), []

    def step(model, batch):
        return F.mse_loss(model(batch["inputs"]), batch["labels"], reduction="sum")

    options = GIVEN_FUNCTIONS[name](lambda batch: change(batch) if changes else None)
    plan = autobatch.fit(model, 4, batch=batch, step=step, max_micro_batch=4, check=None, **options)
    runner = autobatch.Runner(plan, model, step, None, **options)
    changes.append(True)
    return batch, runner


def take_apart(batch):
    """Out of the containers; what is left are the inputs."""
    del batch["labels"]
    batch["notes"].pop("ids")
    batch["more"] = None


def double(batch):
    batch["inputs"].mul_(2)


@pytest.mark.parametrize("name", GIVEN_FUNCTIONS)
def test_a_function_that_is_asked_about_a_batch_gets_containers_of_its_own(name):
    """Also where one micro-batch is the whole batch."""
    batch, runner = ask_about(name, take_apart)
    assert runner.accumulate(batch).micro_batch_sizes == (4,)
    assert (sorted(batch), sorted(batch["notes"])) == (["inputs", "labels", "notes"], ["ids"])


@pytest.mark.parametrize("name", GIVEN_FUNCTIONS)
def test_a_function_that_is_asked_about_a_batch_may_not_write_into_it(name):
    """The step would see other samples than the user gave."""
    batch, runner = ask_about(name, double)
    with pytest.raises(InvalidArgument, match=rf"{name}\(\) wrote into its batch in place"):
        runner.accumulate(batch)
