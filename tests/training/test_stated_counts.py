"""Counts that a step states have to add up: one that is kept from 0 makes the gradient too small."""

import logging
import random

import pytest
import torch
from sampling import sample
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from workloads import bits_of, differences, full_batch_gradient, gradients_of, relative_error

import autobatch
from autobatch.batch.samples import describe
from autobatch.errors import InvalidArgument
from autobatch.training.stated_counts import StatedCounts, find_doubtful, read_stated

EMPTY = [0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0, 0]
"""Boxes of each image: the last four have none."""

FULL = [1, 3, 2, 5, 1, 2, 4, 1] * 2


def images(boxes):
    """One image for each number, with so many boxes, as a list."""
    generator = torch.Generator().manual_seed(len(boxes) + sum(boxes))

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return [{"x": draw(5, 6), "boxes": draw(count, 4)} for count in boxes]


def texts(tokens):
    """One text for each number, with so many labels that count, as tensors."""
    generator = torch.Generator().manual_seed(len(tokens))
    labels = torch.full((len(tokens), 8), -100)
    for row, count in zip(labels, tokens, strict=True):
        row[:count] = torch.randint(4, (count,), generator=generator)
    return {"x": torch.randn(len(tokens), 8, 6, dtype=torch.float64, generator=generator), "labels": labels}


def box_losses(model, batch):
    """The sum over boxes, and how many these are."""
    losses = [(model(image["x"])[: len(image["boxes"])] - image["boxes"]).abs().sum() for image in batch]
    return torch.stack(losses).sum(), sum(len(image["boxes"]) for image in batch)


def token_losses(model, batch):
    """The sum over labels, and how many count."""
    losses = F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return losses, (batch["labels"] != -100).sum()


def stated(count, *, losses=box_losses, form="Mean"):
    """A step that states what ``count`` makes of the number of boxes."""

    def step(model, batch):
        loss, number = losses(model, batch)
        over = count(number)
        made = autobatch.Sum(loss, over) if form == "Sum" else autobatch.Mean(loss / over, count=over)
        if form == "dict":
            return {"boxes": made, "decay": autobatch.PerStep(0.01 * model.weight.square().sum())}
        return (made, {"boxes": number}) if form == "aux" else made

    return step


def at_least(least):
    return lambda number: number.clamp(min=least) if isinstance(number, torch.Tensor) else max(number, least)


KEPT_FROM_0 = {
    "Mean": (stated(at_least(1)), images),
    "Sum": (stated(at_least(1), form="Sum"), images),
    "a term of a dict": (stated(at_least(1), form="dict"), images),
    "beside aux": (stated(at_least(1), form="aux"), images),
    "a tensor": (stated(lambda n: torch.tensor(float(n)).clamp(min=1.0)), images),
    "at least 3": (stated(at_least(3)), images),
    "plus 1": (stated(lambda number: number + 1), images),
    "tokens": (stated(at_least(1), losses=token_losses), texts),
}

ADD_UP = {
    "Sum": (stated(float, form="Sum"), images),
    "a term of a dict": (lambda model, batch: {"boxes": stated(float, form="Sum")(model, batch)}, images),
    "tokens": (stated(int, losses=token_losses, form="Sum"), texts),
    "plus a tiny number": (stated(lambda number: number + 1e-8), images),
    "a loss that is 0": (lambda model, batch: autobatch.Sum(model(batch["x"]).sum() * 0, len(batch["x"])), texts),
}


def make_runner(step, batch, largest=4, model=None, check=None, **options):
    """A runner of steps of 16 samples in micro-batches of at most so many."""
    torch.manual_seed(0)
    model = model() if model else nn.Linear(6, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = {"max_micro_batch": largest, "reuse": False, "check": check, **options}
    plan = autobatch.fit(model, 16, batch=batch, step=step, optimizer=optimizer, **settings)
    return autobatch.Runner(plan, model, step, optimizer, **options)


@pytest.mark.parametrize("largest", sample([1, 3, 4], 3), ids="micro-batches of {}".format)
@pytest.mark.parametrize("name", KEPT_FROM_0)
def test_a_count_that_is_kept_from_0_is_refused(name, largest):
    """In the first batch that has such samples, among the first and every second, fourth, eighth; nothing moves."""
    step, make = KEPT_FROM_0[name]
    is_shown = name in ("at least 3", "plus 1")  # by the example already
    runner = make_runner(step, make(FULL), largest, check=None if is_shown else "raise")
    model = runner._workload.model
    before = bits_of(model)
    with pytest.raises(InvalidArgument, match="keep a count from 0") as caught:
        runner.accumulate(make(EMPTY))
    assert "\n" not in str(caught.value)
    assert differences(bits_of(model), before) == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_share_of_the_step_is_no_count_that_is_kept_from_0(caplog):
    """A loss that was divided by the whole step's boxes may be 0 in a micro-batch, and has its share of the samples."""

    def step(model, batch):
        losses, _ = box_losses(model, batch)
        return autobatch.Sum(losses / sum(EMPTY), count=len(batch) / 16)

    runner = make_runner(step, images(FULL), 4, check="raise")
    model = runner._workload.model
    expected = full_batch_gradient(model, lambda m, b: box_losses(m, b)[0] / sum(EMPTY), images(EMPTY))
    runner.accumulate(images(EMPTY))
    assert relative_error(gradients_of(model), expected) < 1e-12
    assert not caplog.records


@pytest.mark.parametrize("at", [2, 4, 8])
def test_later_batches_are_asked_too(at):
    """The first ones have boxes in all images."""
    runner = make_runner(KEPT_FROM_0["Mean"][0], images(FULL), check="raise")
    for _ in range(at - 1):
        runner.step(images(FULL))
    with pytest.raises(InvalidArgument, match="keep a count from 0"):
        runner.step(images(EMPTY))
    assert runner.steps == at - 1


WRONG_FOR_THE_CHECK = {
    **{name: step for name, (step, make) in KEPT_FROM_0.items() if make is images},
    "at least 3": stated(at_least(3)),
    "plus 1": stated(lambda number: number + 1),
    **{f"always {number}": stated(lambda _, number=number: number) for number in (1, 7.5, torch.tensor(16))},
    "always 16, as a sum": stated(lambda _: 16, form="Sum"),
}


@pytest.mark.parametrize("name", sample(WRONG_FOR_THE_CHECK, 3))
def test_the_check_finds_counts_that_do_not_add_up(name):
    """With samples for which nothing counts; those that are the same for every part with any samples."""
    model = nn.Linear(6, 4, dtype=torch.float64)
    assert not autobatch.verify(model, images(EMPTY), WRONG_FOR_THE_CHECK[name]).exact
    with pytest.raises(autobatch.InexactSplit):
        make_runner(WRONG_FOR_THE_CHECK[name], images(EMPTY), check="raise")


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_weight_that_is_kept_from_0_is_refused_in_later_batches_too(at):
    """``weigh=`` was asked in the first batch alone."""

    def step(model, batch):
        loss, boxes = box_losses(model, batch)
        return loss / max(boxes, 1)

    def weigh(batch):
        return max(sum(len(image["boxes"]) for image in batch), 1)

    runner = make_runner(step, images(FULL), weigh=weigh)
    for _ in range(at - 1):
        runner.step(images(FULL))
    with pytest.raises(InvalidArgument, match="not additive"):
        runner.step(images(EMPTY))


@pytest.mark.parametrize("largest", [1, 3, 4], ids="micro-batches of {}".format)
@pytest.mark.parametrize("name", ADD_UP)
def test_counts_that_add_up_are_exact(name, largest):
    """Also those of parts without a box, and where a loss is 0 that something counts for."""
    step, make = ADD_UP[name]
    runner = make_runner(step, make(FULL), largest)
    model, batch = runner._workload.model, make(EMPTY)
    runner.accumulate(batch)
    found = gradients_of(model)

    def whole(model, batch):
        made = step(model, batch)
        made = made["boxes"] if isinstance(made, dict) else made
        return made.loss / made.count if isinstance(made, autobatch.Sum) else made.loss

    expected = full_batch_gradient(model, whole, batch)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-12) for name in expected)


def draw_of_one(batch):
    """One sample counts or not: the two counts are equally frequent, which is the worst."""
    return torch.cat([torch.rand(1) < 0.5, torch.ones(len(batch) - 1, dtype=torch.bool)])


def draw_after_dropout(batch):
    """The parts do not draw what the whole draws, from the same state of the generator."""
    F.dropout(batch)
    return torch.rand(len(batch)) < 0.5


def draw_normal(batch):
    """As above, for torch draws 16 and more numbers of this kind in another way."""
    return torch.randn(len(batch), 12)[:, 0] < 0


OWN = torch.Generator().manual_seed(0)
DRAWS = {
    "uniform": lambda batch: torch.rand(len(batch)) < 0.5,
    "seldom": lambda batch: torch.rand(len(batch)) < 0.97,
    "one of them": draw_of_one,
    "after a dropout": draw_after_dropout,
    "normal": draw_normal,
    "random": lambda batch: torch.tensor([random.random() < 0.5 for _ in batch]),
    "own generator": lambda batch: torch.rand(len(batch), generator=OWN) < 0.5,
}


@pytest.mark.parametrize("name", sample(DRAWS, 4))
def test_a_count_that_is_drawn_at_random_is_not_refused(name):
    """It is another one for the same samples, however they are cut."""

    def step(model, batch):
        chosen = DRAWS[name](batch["x"])
        return autobatch.Sum(model(batch["x"])[chosen].square().sum(), chosen.sum())

    batch = {"x": torch.zeros(4, 8, 6, dtype=torch.float64)}
    runner = make_runner(step, batch, 2)
    torch.manual_seed(0)
    random.seed(0)
    for _ in range(600 if name == "one of them" else 200):
        runner._accumulation._stated = StatedCounts()  # so that each is compared
        runner.accumulate(batch)
        runner._workload.model.zero_grad()


@pytest.mark.parametrize("name", KEPT_FROM_0)
def test_a_step_of_one_micro_batch_adds_up_nothing(name):
    """It is exact with any count: nothing is split, and nothing is run again."""
    step, make = KEPT_FROM_0[name]
    calls = []

    def watched(model, batch):
        calls.append(batch)
        return step(model, batch)

    runner = make_runner(watched, make(FULL), 16)
    for count in range(1, 5):
        del calls[:]
        assert runner.step(make([0] * 16 if count == 2 else EMPTY)).micro_batch_sizes == (16,)
        assert len(calls) == 1


def test_a_smaller_neighbour_is_counted_as_it_was_cut():
    """One sample, which has no halves, beside two."""
    step, make = KEPT_FROM_0["plus 1"]
    runner = make_runner(step, make(FULL), 2, check=None)
    with pytest.raises(InvalidArgument, match="add up"):
        runner.accumulate(make([*FULL[:14], 0]))


@pytest.mark.parametrize("largest", sample([1, 3, 4], 3), ids="micro-batches of {}".format)
@pytest.mark.parametrize("number", [1, 7.5, torch.tensor(16)], ids=str)
@pytest.mark.parametrize("form", ["Mean", "Sum", "dict"])
def test_a_count_that_does_not_depend_on_the_part_is_named_so(form, number, largest):
    """Such as that of the whole batch, which the step has from outside."""
    runner = make_runner(stated(lambda _: number, form=form), images(FULL), largest, check=None)
    with pytest.raises(InvalidArgument, match="the same for every part") as caught:
        runner.accumulate(images(FULL))
    assert "keep a count from 0" not in str(caught.value)


@pytest.mark.parametrize("is_empty", [False, True])
def test_what_cannot_be_compared_is_warned_of_once_where_a_loss_of_0_counts(is_empty, caplog):
    """A gradient penalty has no value where no graph is recorded."""

    def step(model, batch):
        x = batch["x"].clone().requires_grad_()
        counts = (batch["labels"] != -100).double()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        losses = (slope.square().sum(-1) + model(x).square().sum(-1)) * counts
        return autobatch.Mean(losses.sum() / counts.sum().clamp(min=1), count=counts.sum().clamp(min=1))

    runner = make_runner(step, texts(FULL), 4)
    with caplog.at_level(logging.WARNING, "autobatch"):
        for _ in range(4):
            runner.step(texts(EMPTY if is_empty else FULL))
    assert len([record for record in caplog.records if "exactly 0" in record.getMessage()]) == is_empty


class Moving(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.drop, self.norm = nn.Linear(6, 4).double(), nn.Dropout(0.5), nn.BatchNorm1d(8).double()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.line(self.drop(self.norm(x)))


def test_asking_leaves_no_trace(monkeypatch):
    """Steps with and without it are the same, bit for bit: statistics, generators, attributes, memory outside."""
    found = []
    for asks in (True, False):
        if not asks:
            monkeypatch.setattr(StatedCounts, "begin", lambda self: None)
        outside, calls = torch.zeros(1), []

        def step(model, batch, outside=outside, calls=calls):
            calls.append(len(batch["x"]))
            outside.add_(1)
            return autobatch.Sum(*token_losses(model, batch))

        runner = make_runner(step, texts(FULL), model=Moving)
        del calls[:]
        torch.manual_seed(5)
        outside.zero_()
        for _ in range(3):
            runner.step(texts(FULL))
        found.append((bits_of(runner._workload.model), outside.clone(), torch.rand(3), len(calls)))
    (bits, outside, drawn, calls), (other_bits, other_outside, other_drawn, other_calls) = found
    assert differences(bits, other_bits) == []
    assert torch.equal(outside, other_outside)
    assert torch.equal(drawn, other_drawn)
    assert calls == other_calls + 2 * 2  # two halves in each of the first two steps


def test_a_comparison_that_fails_does_not_end_the_step():
    """Such as memory that ends in it, or a step that cannot run without a graph."""

    def step(model, batch):
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return autobatch.Sum(*token_losses(model, batch))

    runner = make_runner(step, texts(FULL), 4)
    assert runner.step(texts(FULL)).micro_batch_sizes == (4, 4, 4, 4)


def test_casts_of_a_comparison_are_not_kept():
    """An autocast block around the loop keeps casts of weights, which have no graph where nothing records one."""

    def step(model, batch):
        return autobatch.Sum(*token_losses(model, {**batch, "x": batch["x"].float()}))

    runner = make_runner(step, texts(FULL), model=lambda: nn.Linear(6, 4))
    model = runner._workload.model
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            before = model.weight.detach().clone()
            runner.step(texts(FULL))
            assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(("zero", "count", "warns"), [(False, 1, False), (True, 1, True), (True, 1 / 8, False)])
def test_among_several_ranks_a_loss_of_0_that_counts_is_warned_of(zero, count, warns, caplog):
    """The others wait for this one: it runs nothing again. A share of the step may have a loss of 0."""
    counts = StatedCounts()
    runner = make_runner(ADD_UP["tokens"][0], texts(FULL), 4)
    progress = runner._accumulation.begin([describe(texts(FULL))], 4, runner._accumulation.record())
    with caplog.at_level(logging.WARNING, "autobatch"):
        for _ in range(2):
            counts.begin()
            loss = autobatch.Mean(torch.tensor(0.0 if zero else 0.5), count=count)
            stated = [one for micro_batch in progress.micro_batches for one in read_stated(micro_batch, loss)]
            counts.warn_of_zero_loss(find_doubtful(stated))
    assert len(caplog.records) == warns


@pytest.mark.parametrize("is_whole", [True, False], ids=["all of it", "one micro-batch"])
def test_a_bad_batch_is_skipped_by_a_sum_that_counts_nothing(is_whole):
    """Nothing moves where all of it is bad; else the step is the mean over the other micro-batches."""

    def step(model, batch):
        if not batch["x"].isfinite().all():
            return autobatch.Sum(torch.zeros(()), 0)
        losses, count = token_losses(model, batch)
        return autobatch.Mean(losses / count, count=count)

    runner = make_runner(step, texts(FULL), 4)
    model, batch = runner._workload.model, texts(FULL)
    good = {name: values[4:] for name, values in batch.items()}
    batch["x"][slice(None) if is_whole else slice(4)] = torch.nan
    before = model.weight.detach().clone()
    if is_whole:
        model.weight.grad = torch.ones_like(model.weight)
        result = runner.step(batch)
        assert result.skipped
        assert runner.steps == 0
        assert torch.equal(model.weight, before)
        assert torch.equal(model.weight.grad, torch.ones_like(model.weight))
    else:
        runner.accumulate(batch)
        expected = full_batch_gradient(model, lambda m, b: step(m, b).loss, good)
        assert relative_error(gradients_of(model), expected) < 1e-12


def test_a_sum_that_counts_nothing_beside_a_mean_over_samples_is_refused():
    """The mean of the others would be over the skipped samples too."""

    def step(model, batch):
        if not batch["x"].isfinite().all():
            return autobatch.Sum(torch.zeros(()), 0)
        return model(batch["x"]).square().mean()

    for at in (slice(4), slice(12, 16)):
        runner, batch = make_runner(step, texts(FULL), 4), texts(FULL)
        batch["x"][at] = torch.nan
        with pytest.raises(InvalidArgument, match="always state it"):
            runner.step(batch)
        assert runner.steps == 0


def test_a_step_that_returns_none_is_told_how_to_skip():
    """The message names what does."""
    runner = make_runner(ADD_UP["tokens"][0], texts(FULL), 4)
    plan, model = runner.plan, runner._workload.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(InvalidArgument, match=r"autobatch\.Sum\(torch\.zeros\(\(\)\), 0\)"):
        autobatch.Runner(plan, model, lambda model, batch: None, optimizer).step(texts(FULL))


@pytest.mark.parametrize("at", sample([0, 7, 40], 3))
@pytest.mark.parametrize("name", ["Mean", "Sum"])
def test_the_smallest_sample_of_a_dataset_is_compared(name, at):
    """One image without a box among forty: the check finds it, the trials run the largest ones."""
    dataset = images([3] * at + [0] + [3] * (40 - at))
    loader = DataLoader(dataset, batch_size=8, collate_fn=list)
    for (step, _), is_exact in ((KEPT_FROM_0[name], False), (ADD_UP["Sum"], True)):
        seen = []

        def watched(model, batch, step=step, seen=seen):
            seen.append(min(len(image["boxes"]) for image in batch))
            return step(model, batch)

        verdict = make_runner(watched, loader, check="warn").plan.verdict
        assert verdict.exact == is_exact
        assert is_exact or "count" in str(verdict)
        assert autobatch.verify(nn.Linear(6, 4, dtype=torch.float64), loader, step).exact == is_exact
        without = []
        make_runner(lambda m, b, step=step, seen=without: seen.append(b) or step(m, b), loader)
        assert all(len(image["boxes"]) == 3 for batch in without for image in batch)
