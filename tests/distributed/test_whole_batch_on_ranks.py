"""The loss of ``WholeBatch`` over the samples of several ranks is that of one process, in float64 to rounding."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders.plans import SMALL, make_rank_plans
from builders.ranks import run_ranks, values_of
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autobatch
from autobatch.errors import DoesNotFit, InvalidArgument, RankFailed
from autobatch.testing import oom_at

SAMPLES, WIDTH = 12, 6


class Pair(nn.Module):
    """Two towers with dropout, a count that moves, and parameters of the loss."""

    def __init__(self, dropout=0.3):
        super().__init__()
        torch.manual_seed(1)
        self.image = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 5))
        self.text = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 5))
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-1.0))
        self.double()


def represent(model, batch):
    images, texts = batch[0], batch[1]
    return {
        "image": F.normalize(model.image(images), dim=-1),
        "text": F.normalize(model.text(texts), dim=-1),
        "label": (images[:, 0] > 0),
    }


def make_step(model):
    """CLIP's loss with labels: the bias counts pairs of one kind."""

    def loss(rows, _):
        scores = model.scale.exp() * rows["image"] @ rows["text"].T
        scores = scores + model.bias * (rows["label"][:, None] == rows["label"])
        labels = torch.arange(len(scores))
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2

    return autobatch.WholeBatch(represent, loss)


def make_local_step(model, state="Mean"):
    """CLIP's loss as this rank's part: its rows against those of all ranks."""

    def loss(rows, batch):
        own, count = getattr(batch, "own_rows", slice(None)), len(rows["image"])
        labels = torch.arange(count)[own]
        parts = []
        for one, other in (("image", "text"), ("text", "image")):
            scores = model.scale.exp() * rows[one][own] @ rows[other].T
            scores = scores + model.bias * (rows["label"][own, None] == rows["label"])
            parts.append(F.cross_entropy(scores, labels, reduction="mean" if state == "Mean" else "sum") / 2)
        return getattr(autobatch, state)(sum(parts), len(labels))

    return autobatch.WholeBatch(represent, loss)


def make_batch():
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))


def part_of(shares, rank):
    start = sum(shares[:rank])
    return tuple(one[start : start + shares[rank]] for one in make_batch())


def run_as_one(shares, sizes):
    """The oracle: one graph over the micro-batches of all ranks, each rank's draws from its own seed."""
    model = Pair()
    rows = []
    for rank, its_sizes in enumerate(sizes):
        torch.manual_seed(100 + rank)
        batch, start = part_of(shares, rank), 0
        for size in its_sizes:
            rows.append(represent(model, tuple(one[start : start + size] for one in batch)))
            start += size
    joined = {name: torch.cat([one[name] for one in rows]) for name in rows[0]}
    loss = make_step(model).loss(joined, None)
    loss.backward()
    return loss.detach(), [one.grad for one in model.parameters()]


def _apart(parameter, gradient):
    return float((parameter.grad - gradient).norm() / gradient.norm())


def bind(shares, size, step=make_step, optimizer=None):
    inner = Pair()
    model = DistributedDataParallel(inner)
    fields = {**SMALL, "budget_bytes": 2**30}
    plan = make_rank_plans(shares, size=size, **fields)[dist.get_rank()]
    made = None if optimizer is None else torch.optim.SGD(inner.parameters(), lr=0.1)
    return inner, autobatch.Runner(plan, model, step(inner), made)


def accumulate(shares, size, step=make_step):
    rank = dist.get_rank()
    inner, runner = bind(shares, size, step=step)
    torch.manual_seed(100 + rank)
    result = runner.accumulate(part_of(shares, rank))
    sizes = [None] * len(shares)
    dist.all_gather_object(sizes, result.micro_batch_sizes)
    loss, gradients = run_as_one(shares, sizes)
    apart = [
        float((one.grad - its).norm() / its.norm()) for one, its in zip(inner.parameters(), gradients, strict=True)
    ]
    return max(apart), float(abs(result.loss - loss)), sizes


@pytest.mark.parametrize("size", [2, SAMPLES], ids=["in parts", "whole"])
@pytest.mark.parametrize("shares", [(6, 6), (9, 3), (4, 4, 4), (1, 6, 5)], ids=str)
def test_the_gradient_is_that_of_one_process(shares, size):
    """With dropout on, for equal and unequal shares, with the parameters of the loss."""
    for apart, missed, sizes in values_of(run_ranks(accumulate, shares, size, size=len(shares))):
        assert apart < 1e-13
        assert missed < 1e-13
        assert max(map(max, sizes)) == min(size, max(shares))


@pytest.mark.parametrize("state", ["Mean", "Sum"])
@pytest.mark.parametrize("size", [2, SAMPLES], ids=["in parts", "whole"])
@pytest.mark.parametrize("shares", [(6, 6), (9, 3), (1, 6, 5)], ids=str)
def test_a_loss_in_parts_is_that_of_one_process(shares, size, state):
    """Each rank compares its own rows with those of all, and the gradient reaches the rows of the other ranks."""
    step = partial(make_local_step, state=state)
    for apart, missed, _ in values_of(run_ranks(accumulate, shares, size, step, size=len(shares))):
        assert apart < 1e-13
        assert missed < 1e-13


def accumulate_with_shortage(place, rank_that_fails, make=make_step):
    """Memory ends on one rank: in the first pass, in the loss, or in the second pass."""
    shares, rank = (6, 6), dist.get_rank()
    inner, runner = bind(shares, 6)
    runner.accumulate(part_of(shares, rank))
    inner.zero_grad(set_to_none=True)
    seen = []

    def fail_once(step):
        def run(name, function):
            def call(*arguments):
                seen.append(name)
                if rank == rank_that_fails and seen == place:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
                return function(*arguments)

            return call

        return autobatch.WholeBatch(run("represent", step.represent), run("loss", step.loss))

    inner, runner = bind(shares, 6, step=lambda model: fail_once(make(model)))
    torch.manual_seed(100 + rank)
    result = runner.accumulate(part_of(shares, rank))
    sizes = [None] * len(shares)
    dist.all_gather_object(sizes, result.micro_batch_sizes)
    _, gradients = run_as_one(shares, sizes)
    apart = [
        float((one.grad - its).norm() / its.norm()) for one, its in zip(inner.parameters(), gradients, strict=True)
    ]
    return max(apart), result.retries, sizes, [one.retries for one in result.ranks]


def accumulate_without_columns():
    def step(model):
        made = make_step(model)
        return autobatch.WholeBatch(
            lambda model, batch: {**represent(model, batch), "none": batch[0][:, :0]}, made.loss
        )

    shares, rank = (9, 3), dist.get_rank()
    _, runner = bind(shares, 2, step=step)
    return float(runner.accumulate(part_of(shares, rank)).loss)


def test_representations_without_columns_are_gathered():
    """Such as optional features of which there are none."""
    one, other = values_of(run_ranks(accumulate_without_columns))
    assert one == other


PLACES = {
    "first pass": ["represent"],
    "loss": ["represent", "loss"],
    "second pass": ["represent", "loss", "represent"],
}


@pytest.mark.parametrize("make", [make_step, make_local_step])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_ends_on_one_rank(place, rank, make):
    """All run the step again, or that rank alone: the gradient is that of the micro-batches that ran in the end."""
    answers = values_of(run_ranks(accumulate_with_shortage, PLACES[place], rank, make))
    for index, (apart, retries, sizes, _) in enumerate(answers):
        assert apart < 1e-13
        assert sizes[rank] != (6,)
        assert sizes[1 - rank] == (6,)
        assert retries == int(index == rank)


def raise_on_one_rank(place, error, make=make_step):
    shares, rank = (6, 6), dist.get_rank()
    seen = []

    def failing(model):
        step = make(model)

        def run(name, function):
            def call(*arguments):
                seen.append(name)
                if rank == 1 and seen[: len(place)] == place and (error is ZeroDivisionError or name == place[-1]):
                    raise error("CUDA out of memory. Tried to allocate 1 GiB")
                return function(*arguments)

            return call

        return autobatch.WholeBatch(run("represent", step.represent), run("loss", step.loss))

    inner, runner = bind(shares, 6, step=failing)
    before = [one.detach().clone() for one in inner.parameters()]
    try:
        runner.accumulate(part_of(shares, rank))
    except (RankFailed, DoesNotFit, ZeroDivisionError) as raised:
        found = type(raised).__name__
    else:
        found = ""
    assert all(torch.equal(one, its) for one, its in zip(inner.parameters(), before, strict=True))
    assert all(one.grad is None for one in inner.parameters())
    return found


@pytest.mark.parametrize("make", [make_step, make_local_step])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_on_one_rank_is_raised_on_all(place, make):
    """The user's own there, RankFailed on the others; nothing has happened."""
    assert values_of(run_ranks(raise_on_one_rank, PLACES[place], ZeroDivisionError, make)) == [
        "RankFailed",
        "ZeroDivisionError",
    ]


@pytest.mark.parametrize("make", [make_step, make_local_step])
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_that_never_fits_ends_the_step_on_all(place, make):
    """DoesNotFit there, RankFailed on the others."""
    assert values_of(run_ranks(raise_on_one_rank, PLACES[place], torch.OutOfMemoryError, make)) == [
        "RankFailed",
        "DoesNotFit",
    ]


def step_through_faults(positions, make):
    """Memory that ends at many operations of rank 1, a step each; every committed step is right."""
    shares, rank, worst, retried = (6, 6), dist.get_rank(), 0.0, 0
    for position in positions:
        inner, runner = bind(shares, 3, step=make)
        torch.manual_seed(100 + rank)
        if rank == 1:
            with oom_at(position):
                result = runner.accumulate(part_of(shares, rank))
        else:
            result = runner.accumulate(part_of(shares, rank))
        sizes = [None] * len(shares)
        dist.all_gather_object(sizes, result.micro_batch_sizes)
        _, gradients = run_as_one(shares, sizes)
        pairs = zip(inner.parameters(), gradients, strict=True)
        worst = max(worst, *(_apart(*pair) for pair in pairs))
        retried += max(one.retries for one in result.ranks)
    return worst, retried


@pytest.mark.parametrize("make", [make_step, make_local_step])
def test_memory_that_ends_at_operations_of_either_pass(make):
    """A sample of the operations before the ranks agree on the step."""
    for worst, retried in values_of(run_ranks(step_through_faults, range(5, 270, 20), make)):
        assert worst < 1e-13
        assert retried >= 8


def fit_and_train(shares, make):
    rank, inner = dist.get_rank(), Pair()
    model, optimizer = DistributedDataParallel(inner), torch.optim.SGD(inner.parameters(), lr=0.1)
    plan = autobatch.fit(
        model,
        sum(shares),
        batch=part_of(shares, rank),
        step=make(inner),
        optimizer=optimizer,
        max_micro_batch=2,
        reuse=False,
        progress=False,
    )
    runner = autobatch.Runner(plan, model, make(inner), optimizer)
    losses = [float(runner.step(part_of(shares, rank)).loss) for _ in range(3)]
    return losses, [one.detach().clone() for one in inner.parameters()]


@pytest.mark.parametrize("make", [make_step, make_local_step])
def test_fit_plans_for_the_loss_of_all_ranks(make):
    """And the ranks stay together."""
    (losses, weights), (others, its) = values_of(run_ranks(fit_and_train, (6, 6), make))
    assert losses == others
    assert all(torch.equal(one, other) for one, other in zip(weights, its, strict=True))


def refuse(kind):
    def step(model):
        made = make_step(model)
        if kind == "batch":
            return autobatch.WholeBatch(represent, lambda rows, batch: made.loss(rows, None) * len(batch[0]))
        if kind == "kind of batch":
            return autobatch.WholeBatch(represent, lambda rows, batch: made.loss(rows, None) * isinstance(batch, tuple))
        if kind == "a part on one rank":
            return make_local_step(model) if dist.get_rank() else made
        if kind == "NumPy draws":
            return autobatch.WholeBatch(represent, lambda rows, batch: made.loss(rows, None) * (1 + np.random.rand()))
        if kind == "draws":
            return autobatch.WholeBatch(represent, lambda rows, batch: made.loss(rows, None) * (1 + torch.rand(())))
        return made

    shares = (6, 6)
    _, runner = bind(shares, 3, step=step)
    batch = part_of(shares, dist.get_rank())
    with pytest.raises((InvalidArgument, RankFailed), match="WholeBatch"):
        runner.accumulate(None if kind == "no samples" and dist.get_rank() else batch)


@pytest.mark.parametrize("kind", ["batch", "kind of batch", "draws", "NumPy draws", "no samples", "a part on one rank"])
def test_what_cannot_be_the_same_on_all_ranks_is_refused(kind):
    """A loss that reads its batch or asks what it is, draws or states a count on one rank; a rank without samples."""
    values_of(run_ranks(refuse, kind))


UNLIKE = {
    "shapes": (lambda rows: rows[:, :3], ("rank 0: rows of (5,)", "rank 2: rows of (3,)")),
    "containers": (lambda rows: {"image": [rows]}, ("rank 0: rows of (5,)", "rank 2: {'image': [rows of (5,)")),
    "graphs": (lambda rows: rows.detach(), ("rank 2: rows of (5,) torch.float64 without a graph",)),
    "None": (lambda rows: (rows, None), ("rank 2: (rows of (5,) torch.float64, None)",)),
}


def return_unlike_rows(case):
    change, _ = UNLIKE[case]

    def represent_on_rank(model, batch):
        rows = model.image(batch[0])
        return change(rows) if dist.get_rank() == 2 else rows

    def loss(rows, _):
        return rows.var()

    _, runner = bind((4, 4, 4), 4, step=lambda model: autobatch.WholeBatch(represent_on_rank, loss))
    with pytest.raises(InvalidArgument) as raised:
        runner.accumulate(part_of((4, 4, 4), dist.get_rank()))
    return str(raised.value)


@pytest.mark.parametrize("case", UNLIKE)
def test_unlike_representations_are_named_with_their_rank(case):
    """The message has shapes and containers, and the rank that differs; it is one line."""
    for message in values_of(run_ranks(return_unlike_rows, case, size=3)):
        assert all(one in message for one in UNLIKE[case][1])
        assert "rank 1" not in message
        assert "\n" not in message


def state_a_count_on_one_rank(kind):
    def step(model):
        if kind == "WholeBatch":
            return make_local_step(model) if dist.get_rank() == 2 else make_step(model)

        def mean(model, batch):
            loss = model.image(batch[0]).square().mean()
            return autobatch.Mean(loss, len(batch[0])) if dist.get_rank() == 2 else loss

        return mean

    _, runner = bind((4, 4, 4), 4, step=step)
    with pytest.raises(InvalidArgument, match="count") as raised:
        runner.accumulate(part_of((4, 4, 4), dist.get_rank()))
    return str(raised.value)


@pytest.mark.parametrize("kind", ["WholeBatch", "a mean over samples"])
def test_a_count_on_one_rank_is_named_with_the_rank(kind):
    """And with a rank that states none."""
    for message in values_of(run_ranks(state_a_count_on_one_rank, kind, size=3)):
        assert all(one in message for one in ("rank 0: no count", "rank 2: a count"))
        assert "rank 1" not in message


def step_with_nan(kind, is_scaled):
    """A step whose samples, or whose part of the loss, are not finite on rank 1."""
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger("autobatch").addHandler(handler)

    def make(model):
        if kind == "a mean over samples":
            return lambda model, batch: model.image(batch[0]).square().mean()
        made = (make_step if kind == "representations" else make_local_step)(model)
        if kind != "part of the loss":
            return made

        def loss(rows, batch):
            part = made.loss(rows, batch)
            worth = torch.nan if batch.own_rows.start else 1.0
            return autobatch.Mean(part.loss * worth, part.count)

        return autobatch.WholeBatch(represent, loss)

    rank, shares = dist.get_rank(), (6, 6)
    inner = Pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if is_scaled else None
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    plan = make_rank_plans(shares, size=3, **{**SMALL, "budget_bytes": 2**30})[rank]
    runner = autobatch.Runner(plan, DistributedDataParallel(inner), make(inner), optimizer, scaler=scaler)
    batch = part_of(shares, rank)
    if rank == 1 and kind != "part of the loss":
        batch[0][2, 0] = torch.nan
    before = [one.detach().clone() for one in inner.parameters()]
    result = runner.step(batch)
    has_nan = any(bool(one.isnan().any()) for one in inner.parameters())
    is_same = all(torch.equal(one, its) for one, its in zip(inner.parameters(), before, strict=True))
    logged = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    return bool(result.loss.isnan()), has_nan, is_same, scaler and scaler.get_scale(), logged


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("kind", ["representations", "part of the loss"])
def test_numbers_that_are_not_finite_do_what_they_do_in_any_step(kind, is_scaled):
    """All ranks get nan weights, or a scaler skips the step on all; rank 0 names the rank in one line."""
    plain = values_of(run_ranks(step_with_nan, "a mean over samples", is_scaled))
    found = values_of(run_ranks(step_with_nan, kind, is_scaled))
    assert [one[:4] for one in found] == [one[:4] for one in plain]
    assert [one[:4] for one in found] == [(True, not is_scaled, is_scaled, 2.0 if is_scaled else None)] * 2
    (message,), others = found[0][4], found[1][4]
    assert "rank 1" in message
    assert "rank 0" not in message
    assert "\n" not in message
    assert not others
