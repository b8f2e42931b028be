"""``step_over``: several batches are one step, and small ones fill micro-batches of the plan's size."""

import copy
from functools import cache

import pytest
import torch
from builders.plans import SMALL, make_rank_plans
from hypothesis import given
from hypothesis import strategies as st
from sampling import sample
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.testing import FakeDevice, oom_at


def token_step(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=3)


def count_tokens(batch):
    return (batch[1] != 3).sum()


def stated_step(model, batch):
    """Counts that are known after the step, and a term that counts once a step."""
    outputs = model(batch[0])
    return {
        "mean": autobatch.Mean(F.cross_entropy(outputs, batch[1]), count=len(batch[1])),
        "sum": autobatch.Sum(outputs.square().sum(), len(batch[1])),
        "weights": autobatch.PerStep(0.01 * model.head.weight.square().sum()),
    }


STEPS = {"mean": (mean_step, None), "tokens": (token_step, count_tokens), "stated": (stated_step, None)}


def make_device():
    return FakeDevice(lambda n: 10 + n, total_bytes=1000)


@cache
def make_plan(step, weigh, target, largest):
    """The same for each model of the kind."""
    return autobatch.fit(
        Plain(torch.float64),
        target,
        batch=make_batch(8, torch.float64),
        step=step,
        weigh=weigh,
        max_micro_batch=largest,
        check=None,
        device=make_device(),
    )


def make_runner(step=mean_step, weigh=None, *, target=32, largest=8):
    """A model in float64 and its runner."""
    torch.manual_seed(2)
    model = Plain(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = make_plan(step, weigh, target, largest)
    return model, autobatch.Runner(plan, model, step, optimizer, weigh=weigh, device=make_device())


def split(batch, sizes):
    return [*zip(*(tensor.split(sizes) for tensor in batch), strict=True)]


@pytest.mark.parametrize("kind", sample(STEPS, 2))
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_it_is_the_step_of_one_batch_with_all_samples(kind, sizes):
    """The same sizes, loss and weights in float64, however the batches come."""
    step, weigh = STEPS[kind]
    whole = make_batch(sum(sizes), torch.float64)
    reference, expected = make_runner(step, weigh)
    model, runner = make_runner(step, weigh)
    wanted, found = expected.step(whole), runner.step_over(split(whole, sizes))
    assert found.micro_batch_sizes == wanted.micro_batch_sizes
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_batches_of_one_fill_micro_batches_of_the_plans_size():
    """32 batches of one run as four micro-batches, none larger than the plan's."""
    seen = []

    def step(model, batch):
        seen.append(len(batch[0]))
        return mean_step(model, batch)

    _, runner = make_runner(step)
    seen.clear()
    result = runner.step_over(split(make_batch(32, torch.float64), [1] * 32))
    assert result.micro_batch_sizes == (8, 8, 8, 8)
    assert seen == [8, 8, 8, 8]


def test_what_cannot_be_joined_runs_by_itself():
    """Text padded to unlike lengths, and a number that may count its batch's samples."""

    def step(model, batch):
        return autobatch.Sum(model(batch["x"].sum(1)).square().sum() / 8, count=len(batch["x"]) / 8)

    torch.manual_seed(2)
    model = nn.Linear(6, 4, dtype=torch.float64)
    batches = [{"x": torch.randn(2, length, 6, dtype=torch.float64)} for length in (3, 5, 5, 3)]
    plan = autobatch.fit(model, 8, batch=batches[0], step=step, max_micro_batch=4, check=None)
    expected = copy.deepcopy(model)
    sum(step(expected, batch).loss for batch in batches).backward()
    runner = autobatch.Runner(plan, model, step, torch.optim.SGD(model.parameters(), lr=1.0))
    assert runner.step_over(batches).micro_batch_sizes == (2, 4, 2)
    torch.testing.assert_close(model.weight, expected.weight - expected.weight.grad, rtol=1e-12, atol=1e-14)
    counted = [{**batch, "count": 2} for batch in batches]
    assert runner.step_over(counted).micro_batch_sizes == (2, 2, 2, 2)


@pytest.mark.parametrize("kind", STEPS)
def test_memory_that_ends_anywhere_leaves_the_step_exact(kind, quiet_log):
    """Every few operations: weights are those of one whole batch, or nothing has happened."""
    step, weigh = STEPS[kind]
    batches = split(make_batch(12, torch.float64), [1, 2, 3, 1, 5])
    options = {"target": 12, "largest": 5}
    _, counter = make_runner(step, weigh, **options)
    with oom_at(10**9) as counted:
        counter.step_over(batches)
    outcomes = set()
    for position in range(1, counted.operations, 23):
        model, runner = make_runner(step, weigh, **options)
        reference, other = make_runner(step, weigh, **options)
        try:
            with oom_at(position):
                result = runner.step_over(batches)
        except autobatch.CannotRetry:
            continue
        except autobatch.DoesNotFit:
            result = runner.step_over(batches)
        outcomes.add(result.retries)
        assert max(result.micro_batch_sizes) <= 5
        other.step(make_batch(12, torch.float64))
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    assert 1 in outcomes


class _Largest(TorchDispatchMode):
    """Notes the rows of the largest result of a concatenation."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.cat.default:
            self.rows.append(len(result))
        return result


@pytest.mark.parametrize("kind", STEPS)
def test_no_more_than_a_micro_batch_is_copied_at_once(kind):
    """The batch of all samples is never made, nor for counting, in the first step as in later ones."""
    step, weigh = STEPS[kind]
    _, runner = make_runner(step, weigh)
    batches = split(make_batch(32, torch.float64), [3, 1, 4, 1, 5, 9, 2, 6, 1])
    for _ in range(3):
        with _Largest() as copied:
            assert runner.step_over(batches).micro_batch_sizes == (8, 8, 8, 8)
        assert copied.rows
        assert max(copied.rows) <= 8


def test_a_write_into_joined_samples_reaches_no_batch():
    """They are a copy; one into samples of a single batch is refused as ever."""

    def write(model, batch):
        batch[0].add_(1)
        return mean_step(model, batch)

    batches, model = split(make_batch(8, torch.float64), [2, 2, 2, 2]), Plain(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = autobatch.fit(model, 8, batch=batches[0], step=mean_step, optimizer=optimizer, max_micro_batch=4)
    runner, before = autobatch.Runner(plan, model, write, optimizer), copy.deepcopy(batches)
    with pytest.raises(InvalidArgument, match="wrote into its batch"):
        runner.step(batches[0])
    for _ in range(4):
        assert runner.step_over(batches).micro_batch_sizes == (4, 4)
    assert not [1 for one, other in zip(batches, before, strict=True) if not all(map(torch.equal, one, other))]


def sequence_step(model, sequences):
    return torch.stack([model(one).sum().square() for one in sequences]).mean()


def test_lists_of_one_sample_are_read_as_the_lists_before():
    """A batch with one sample in a list is one sample, also if the batch before had one, too."""
    model = nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sequences = [torch.arange(4.0 * n, dtype=torch.float64).view(-1, 4).cos() for n in (3, 5, 2)]
    plan = make_rank_plans((4,), 1, **SMALL)[0]
    runner = autobatch.Runner(plan, model, sequence_step, optimizer, device=FakeDevice(lambda n: 10 + n, 1000))
    runner.accumulate(sequences)
    for one in sequences:
        optimizer.zero_grad()
        assert runner.accumulate([one]).micro_batch_sizes == (1,)
        [expected] = torch.autograd.grad(sequence_step(model, [one]), [model.weight])
        torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_batch_after_a_plain_one_is_refused():
    """In autobatch's words, as it would be in the first step."""
    model = nn.Linear(4, 1)
    plan = make_rank_plans((4,), 2, **SMALL)[0]
    runner = autobatch.Runner(plan, model, lambda m, b: m(b["x"]).mean(), None, device=FakeDevice(lambda n: n, 1000))
    runner.accumulate({"x": torch.ones(4, 4)})
    with pytest.raises(InvalidArgument, match="nested"):
        runner.accumulate({"x": torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])})
