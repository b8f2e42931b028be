"""Batches divided by length: the same gradient, nothing untried, and all or nothing where a step runs out of memory."""

import copy
import json
from functools import cache

import pytest
import torch
from sampling import sample
from texts import LENGTHS, Reader, count_tokens, length_of, make_texts, read_step
from torch.nn import functional as F
from workloads import bits_of, differences

import autobatch
from autobatch import by_length
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.records import Padding, SizeAtLength
from autobatch.testing import FakeDevice, oom_at

pytestmark = pytest.mark.usefixtures("quiet_log")

DIMS = {'batch["tokens"]': (1,), 'batch["mask"]': (1,), 'batch["labels"]': (1,)}
SIZES = (
    SizeAtLength(length=6, micro_batch_size=4),
    SizeAtLength(length=12, micro_batch_size=3),
    SizeAtLength(length=24, micro_batch_size=2),
)


@pytest.fixture
def quiet_log(caplog):
    caplog.set_level("CRITICAL", logger="autobatch")


@cache
def make_plan(side="right", sizes=SIZES):
    model = Reader()
    plan = autobatch.fit(
        model,
        len(LENGTHS),
        batch=make_texts(left=side == "left"),
        step=read_step,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        weigh=count_tokens,
        cut=by_length(length_of),
        max_micro_batch=2,
        check=None,
    )
    assert plan.padding == Padding(dims=DIMS, side=side)
    return plan.model_copy(update={"lengths": sizes, "padding": plan.padding})


def make_runner(*, plan=None, step=read_step, model=None, **options):
    """A runner on a new model, and the model."""
    torch.manual_seed(3)
    model = model or Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"weigh": count_tokens, "cut": by_length(length_of), **options}
    return autobatch.Runner(plan or make_plan(), model, step, optimizer, **given), model


def padded_gradient(model, batch, step=read_step):
    model.zero_grad()
    step(model, batch).backward()
    return [p.grad.clone() for p in model.parameters()]


def far(found, expected):
    return max(
        float((one - other).detach().norm() / other.detach().norm().clamp_min(1e-30))
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.quick
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("padded", [0, 30])
def test_the_gradient_is_that_of_the_padded_whole(side, padded):
    """In float64 to 1e-12, on either side, padded to the longest or further."""
    runner, model = make_runner(plan=make_plan(side))
    batch = make_texts(left=side == "left", padded=padded)
    expected = padded_gradient(model, batch)
    model.zero_grad()
    result = runner.accumulate(batch)
    assert far([p.grad for p in model.parameters()], expected) < 1e-12
    assert float(result.loss) == pytest.approx(float(read_step(model, batch).detach()), abs=1e-12)


def test_no_micro_batch_is_more_than_was_tried():
    """Shapes as the step sees them: at most as many as ran at the length above, and no padding beyond the longest."""
    shapes = []

    def step(model, batch):
        shapes.append((*batch["tokens"].shape, int(batch["mask"].sum(1).max())))
        return read_step(model, batch)

    runner, _ = make_runner(step=step)
    result = runner.step(make_texts())
    assert sorted(row for rows in result.samples for row in rows) == list(range(len(LENGTHS)))
    for samples, length, longest in shapes:
        assert length == longest
        assert samples <= next(size for size in SIZES if size.length >= length).micro_batch_size
    assert [len(rows) for rows in result.samples] == list(result.micro_batch_sizes) == [shape[0] for shape in shapes]


def test_several_batches_are_counted_on():
    """Rows of the second one follow those of the first; each is sorted alone."""
    runner, model = make_runner()
    halves = [make_texts(LENGTHS[:6]), make_texts(LENGTHS[6:], seed=1)]
    torch.manual_seed(3)
    other = copy.deepcopy(model)
    result = runner.step_over(halves)
    assert sorted(row for rows in result.samples for row in rows) == list(range(12))
    assert all(max(rows) < 6 or min(rows) >= 6 for rows in result.samples)
    counts = [count_tokens(half) for half in halves]
    for half, count in zip(halves, counts, strict=True):
        (read_step(other, half) * count / sum(counts)).backward()
    torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9).step()
    assert far(model.parameters(), list(other.parameters())) < 1e-12


LARGER = (
    SizeAtLength(length=6, micro_batch_size=12),
    SizeAtLength(length=12, micro_batch_size=8),
    SizeAtLength(length=24, micro_batch_size=6),
)


class Resumable:
    """A runner, and what a checkpoint has of it, as it is after JSON."""

    def __init__(self, saved=None, *, sizes=True):
        torch.manual_seed(3)
        self.model = Reader()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.runner = autobatch.Runner(
            make_plan(sizes=LARGER),
            self.model,
            read_step,
            self.optimizer,
            weigh=count_tokens,
            cut=by_length(length_of),
            device=FakeDevice(lambda n: 10 + n, total_bytes=2**50),  # more than any plan leaves free
        )
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            if sizes:
                self.runner.load_state_dict(json.loads(saved["runner"]))

    def save(self):
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "runner": json.dumps(self.runner.state_dict()),
        }

    def run(self, steps, short_at):
        """The rows that run together in these steps, of which some run out of memory."""
        rows = []
        for number in steps:
            with oom_at(short_at.get(number, 10**9)):
                rows.append(self.runner.step(make_texts(seed=number)).samples)
        return rows


# In the middle of a micro-batch: whether a gradient is copied or taken, one operation more or less, is by chance.
@pytest.mark.parametrize("short_at", [{}, {2: 55}, {2: 55, 3: 55}, {1: 55, 2: 55, 4: 55}], ids=str)
def test_a_resumed_run_is_the_undisturbed_one(short_at):
    """Bit for bit, with the sizes of all lengths as a shortage has left them."""
    whole, first = Resumable(), Resumable()
    expected = whole.run(range(6), short_at)
    assert first.run(range(3), short_at) == expected[:3]
    second = Resumable(first.save())
    assert second.run(range(3, 6), short_at) == expected[3:]
    assert not differences(bits_of(second.model, second.optimizer), bits_of(whole.model, whole.optimizer))
    assert second.runner.state_dict() == whole.runner.state_dict()
    if short_at:  # so the test can fail
        assert Resumable(first.save(), sizes=False).run(range(3, 6), short_at) != expected[3:]


def test_without_lengths_results_say_nothing_of_rows():
    """Samples come in their own order."""
    model = Reader()
    plan = autobatch.fit(model, 12, batch=make_texts(), step=read_step, weigh=count_tokens, max_micro_batch=4)
    runner = autobatch.Runner(plan, model, read_step, torch.optim.SGD(model.parameters()), weigh=count_tokens)
    assert runner.step(make_texts()).samples == ()


def test_samples_in_lists_are_sorted_and_cut():
    """Nothing is trimmed: each has its own length."""
    model = Reader()
    generator = torch.Generator().manual_seed(2)
    batch = [torch.randint(1, 30, (length,), generator=generator) for length in LENGTHS]

    def step(model, texts):
        losses = [F.cross_entropy(model(text[None], torch.ones(1, len(text)))[0], text) for text in texts]
        return torch.stack(losses).mean()

    def lengths(texts):
        return [len(text) for text in texts]

    plan = autobatch.fit(model, 12, batch=batch, step=step, cut=by_length(lengths), max_micro_batch=4)
    assert plan.padding == Padding()
    runner = autobatch.Runner(plan, model, step, None, cut=by_length(lengths))
    expected = padded_gradient(model, batch, step)
    model.zero_grad()
    result = runner.accumulate(batch)
    assert far([p.grad for p in model.parameters()], expected) < 1e-12
    assert [LENGTHS[row] for rows in result.samples for row in rows] == sorted(LENGTHS, reverse=True)


def run_by_hand(model, optimizer, batch, samples):
    """The step in these micro-batches, by a loop."""
    total = float(count_tokens(batch))
    for rows in samples:
        longest = max(int(batch["mask"][row].sum()) for row in rows)
        part = {key: value[list(rows)][:, :longest] for key, value in batch.items()}
        (read_step(model, part) * (float(count_tokens(part)) / total)).backward()
    optimizer.step()


FEW = (24, 3, 12, 24, 6)


def outcome_at(position):
    """The outcome of an OOM at one operation; a wrong result fails here."""
    batch = make_texts(FEW)
    runner, model = make_runner(model=Reader(dropout=0.2))
    reference = copy.deepcopy(model)
    torch.manual_seed(7)
    with oom_at(position) as planned:
        try:
            result = runner.step(batch)
        except DoesNotFit:
            assert far(model.parameters(), list(reference.parameters())) == 0
            return "undone", planned.operations
        except autobatch.CannotRetry:
            return "reported", planned.operations
    torch.manual_seed(7)
    run_by_hand(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), batch, result.samples)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True)), position
    assert sorted(row for rows in result.samples for row in rows) == list(range(len(FEW)))
    if not result.retries:
        return "clean", planned.operations
    return "restarted", planned.operations


@pytest.mark.timeout(900)
def test_memory_may_end_at_any_operation():
    """Bit for bit the step of the micro-batches that were committed, dropout included; or nothing has happened."""
    _, operations = outcome_at(10**9)
    found = {outcome_at(position)[0] for position in sample(range(1, operations + 1), 17)}
    assert "restarted" in found
    assert found <= {"restarted", "undone", "reported", "clean"}


def test_after_a_shortage_every_length_has_fewer_and_the_planned_ones_come_back():
    """One number for all: the micro-batch of short texts that failed makes those of long ones smaller too."""
    sizes = (SizeAtLength(length=6, micro_batch_size=8), SizeAtLength(length=24, micro_batch_size=4))
    calls = []

    def step(model, batch):
        calls.append(batch["tokens"].shape)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return read_step(model, batch)

    runner, _ = make_runner(plan=make_plan(sizes=sizes), step=step)
    batch = make_texts([24] * 8 + [6] * 8)
    first = runner.step(batch)
    assert first.retries == 1
    assert first.micro_batch_sizes[:2] == (3, 3)
    assert max(first.micro_batch_sizes[2:]) < 8
    second = runner.step(batch)
    assert second.micro_batch_sizes[:2] == (3, 3)
    assert runner.step(batch).micro_batch_sizes == (4, 4, 8)


def test_one_sample_that_does_not_fit_ends_the_step():
    """Nothing is left to make smaller, and everything is as before."""

    def step(model, batch):
        if batch["tokens"].shape[1] == 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return read_step(model, batch)

    runner, model = make_runner(step=step)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(DoesNotFit, match="at a micro-batch of one sample"):
        runner.step(make_texts())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


CHANGED = r"length_of\(\) gives \d+ for a sample, and gave \d+ before its padding was trimmed on the {}"


def make_padded_in_part(*, left_rows=(), seed=1):
    batch, other = make_texts(seed=seed), make_texts(left=True, seed=seed)
    for row in left_rows:
        for key, part in batch.items():
            part[row] = other[key][row]
    return batch


LATER = {
    "all of it": ("right", make_texts(left=True, seed=1)),
    "all of it, on the right": ("left", make_texts(seed=1)),
    "one text among others": ("right", make_padded_in_part(left_rows=[2])),
    "the longest of a micro-batch of short texts": ("right", make_padded_in_part(left_rows=[8])),
}


@pytest.mark.parametrize("weigh", [count_tokens, None], ids=["weighed", "not weighed"])
@pytest.mark.parametrize("name", LATER)
def test_a_later_batch_padded_on_the_other_side_is_refused(name, weigh):
    """Its texts would be cut off, in any step; nothing has run, and everything is as before."""
    side, later = LATER[name]
    calls = []

    def step(model, batch):
        calls.append(len(batch["tokens"]))
        return read_step(model, batch)

    plan = make_plan(side).model_copy(update={"weighed": weigh is not None})
    runner, model = make_runner(plan=plan, step=step, weigh=weigh)
    for seed in range(3):
        runner.step(make_texts(left=side == "left", seed=seed))
    before, calls[:] = bits_of(model), []
    with pytest.raises(InvalidArgument, match=CHANGED.format(side)):
        runner.step(later)
    assert not calls
    assert not differences(bits_of(model), before)
    runner.step(make_texts(left=side == "left"))
    assert calls


def test_what_counts_behind_what_does_not_is_not_trimmed_off():
    """A count of the other numbers is too small if the padding's number occurs inside a text."""
    runner, _ = make_runner(cut=by_length(lambda batch: (batch["tokens"] != 0).sum(1)))
    batch = make_texts([24, 24, 6])
    runner.step(batch)
    batch["tokens"][2, 1] = 0
    with pytest.raises(InvalidArgument, match=CHANGED.format("right")):
        runner.step(batch)


def test_a_batch_of_which_nothing_is_trimmed_may_be_padded_on_either_side():
    """An OOM makes its texts run apart: then the step is refused and undone."""
    short = []

    def step(model, batch):
        if short:
            raise torch.OutOfMemoryError(short.pop())
        return read_step(model, batch)

    runner, model = make_runner(plan=make_plan(sizes=LARGER), step=step)
    batch = make_texts([24, 3, 24, 4], left=True)
    expected = padded_gradient(model, batch)
    model.zero_grad()
    runner.accumulate(batch)
    assert far([p.grad for p in model.parameters()], expected) < 1e-12
    model.zero_grad()
    before = bits_of(model)
    short.append("CUDA out of memory. Tried to allocate 20.00 MiB")
    with pytest.raises(InvalidArgument, match=CHANGED.format("right")):
        runner.step(batch)
    assert not differences(bits_of(model), before)


def test_plan_and_runner_have_lengths_both_or_neither():
    """In words, before anything runs."""
    with pytest.raises(InvalidArgument, match=r"the plan was made with cut=by_length\(\), and this Runner has another"):
        make_runner(cut=None)
    plan = make_plan().model_copy(update={"lengths": ()})
    with pytest.raises(InvalidArgument, match="the plan was made without by_length"):
        make_runner(plan=plan)


def test_weights_that_count_padding_are_refused():
    """They are others once it is trimmed."""
    runner, _ = make_runner(weigh=lambda batch: batch["tokens"].numel())
    with pytest.raises(InvalidArgument, match=r"weigh\(\) is not additive"):
        runner.step(make_texts())
