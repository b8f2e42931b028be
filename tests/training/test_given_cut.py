"""``Runner(cut=)``: the user says which samples run together, and the step stays that of the whole batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import BatchSampler
from workloads import Plain, full_batch_gradient, gradients_of, make_batch, mean_step, relative_error

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.testing import FakeDevice, oom_at

PLAN = autobatch.fit(
    Plain(torch.float64),
    16,
    batch=make_batch(8, torch.float64),
    step=mean_step,
    max_micro_batch=4,
    check=None,
    device=FakeDevice(lambda n: 10 + n, total_bytes=1000),
)


def make_runner(cut, step=mean_step, optimizer=False, **options):
    """A model in float64 and its runner."""
    torch.manual_seed(2)
    model = Plain(torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer else None
    device = FakeDevice(lambda n: 10 + n, total_bytes=1000)
    return model, autobatch.Runner(PLAN, model, step, sgd, cut=cut, device=device, **options)


@st.composite
def groups_of_samples(draw):
    """All samples of a batch in any order, in groups of any size, empty ones among them."""
    order = draw(st.permutations(range(draw(st.integers(1, 20)))))
    bounds = sorted(draw(st.lists(st.integers(0, len(order)), max_size=6)))
    return [order[start:stop] for start, stop in zip([0, *bounds], [*bounds, len(order)], strict=True)]


@given(groups=groups_of_samples())
def test_any_groups_give_the_full_batchs_gradient(groups):
    """In float64; no micro-batch has samples of two groups, nor more than the plan's."""
    batch = make_batch(sum(map(len, groups)), torch.float64)
    model, runner = make_runner(lambda whole, largest: groups)
    expected = full_batch_gradient(model, mean_step, batch)
    result = runner.accumulate(batch)
    assert relative_error(gradients_of(model), expected) <= 1e-12
    assert [row for rows in result.samples for row in rows] == [row for rows in groups for row in rows]
    assert [*map(len, result.samples)] == [*result.micro_batch_sizes]
    assert max(result.micro_batch_sizes) <= 4
    assert all(any({*rows} <= {*group} for group in groups) for rows in result.samples)


FORMS = {
    "lists": lambda batch, largest: [[3, 0], [1, 2]],
    "tuples": lambda batch, largest: ((3, 0), (1, 2)),
    "a generator of tensors": lambda batch, largest: (torch.tensor(rows) for rows in ([3, 0], [1, 2])),
    "an array": lambda batch, largest: torch.tensor([[3, 0], [1, 2]]).numpy(),
    "a tensor": lambda batch, largest: torch.tensor([[3, 0], [1, 2]]),
    "a BatchSampler": lambda batch, largest: BatchSampler([3, 0, 1, 2], 2, drop_last=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_groups_may_come_in_any_form(form):
    """A sampler's lists, an array's rows, a generator."""
    _, runner = make_runner(FORMS[form])
    assert runner.accumulate(make_batch(4, torch.float64)).samples == ((3, 0), (1, 2))


def test_what_is_beside_the_loss_comes_in_the_order_of_the_groups():
    """``result.samples`` names the rows of ``result.aux``; those of a second batch are counted on."""

    def step(model, batch):
        return mean_step(model, batch), batch[0][:, 0].clone()

    whole = make_batch(10, torch.float64)
    _, runner = make_runner(
        lambda batch, largest: [range(1, len(batch[0]), 2), range(0, len(batch[0]), 2)], step, optimizer=True
    )
    result = runner.step_over([tuple(part[:4] for part in whole), tuple(part[4:] for part in whole)])
    rows = torch.tensor([row for rows in result.samples for row in rows])
    assert rows.tolist() == [1, 3, 0, 2, 5, 7, 9, 4, 6, 8]
    assert torch.equal(torch.cat(result.aux), whole[0][rows, 0])


def test_it_is_given_the_size_that_runs_now(quiet_log):
    """After a shortage the smaller one, and what is left of the groups is divided."""
    sizes = []

    def cut(batch, largest):
        sizes.append(largest)
        return [[5, 0, 3, 6], [1, 2, 4, 7]]

    batch = make_batch(8, torch.float64)
    model, runner = make_runner(cut)
    expected = full_batch_gradient(model, mean_step, batch)
    with oom_at(20):
        result = runner.accumulate(batch)
    assert relative_error(gradients_of(model), expected) <= 1e-12
    assert result.retries == 1
    assert max(result.micro_batch_sizes) < 4
    assert [row for rows in result.samples for row in rows] == [5, 0, 3, 6, 1, 2, 4, 7]
    runner.accumulate(batch)
    assert sizes == [4, 3]


@pytest.mark.parametrize(
    "groups",
    [
        [[0, 1, 2, 3], [3]],
        [[0, 1, 1, 2, 3]],
        [[0, 1], [3]],
        [],
        [[0, 1, 2, 4]],
        [[0, 1, 2, -1]],
        [[0, 1, 2, True]],
        [[0, 1, 2, 3.0]],
        [0, 1, 2, 3],
        4,
        "0123",
        [["0"]],
    ],
)
def test_a_sample_that_is_lost_or_comes_twice_is_refused(groups):
    """Before anything is run: no gradient, no step counted, and a right one runs after it."""
    given = [groups]
    model, runner = make_runner(lambda batch, largest: given[0])
    with pytest.raises(InvalidArgument, match=r"^cut\(\) "):
        runner.accumulate(make_batch(4, torch.float64))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert runner.steps == 0
    given[0] = [[0, 1, 2, 3]]
    assert runner.accumulate(make_batch(4, torch.float64)).micro_batch_sizes == (4,)


def test_a_plan_by_length_needs_its_cut():
    """Nothing is known of equal numbers of its samples."""
    model, batch = nn.Linear(6, 4), torch.randn(4, 6)
    lengths = autobatch.by_length(lambda rows: [1] * len(rows), dims={})

    def step(model, rows):
        return model(rows).square().mean()

    plan = autobatch.fit(model, 4, batch=batch, step=step, cut=lengths, check=None)
    with pytest.raises(InvalidArgument, match="pass the same cut= to both"):
        autobatch.Runner(plan, model, step, None, cut=lambda rows, largest: [range(len(rows))])
