"""Counts that a step states: one that is kept from 0 makes the gradient too small."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from workloads import full_batch_gradient, gradients_of, relative_error

import autobatch
from autobatch.errors import InvalidArgument

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
    """Keeps a number from falling below this."""
    return lambda number: number.clamp(min=least) if isinstance(number, torch.Tensor) else max(number, least)


KEPT_FROM_0 = {
    "Mean": (stated(at_least(1)), images),
    "Sum": (stated(at_least(1), form="Sum"), images),
    "a term of a dict": (stated(at_least(1), form="dict"), images),
    "beside aux": (stated(at_least(1), form="aux"), images),
    "a tensor": (stated(lambda n: torch.tensor(float(n)).clamp(min=1.0)), images),
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


def gradient_of_parts(step, batch, whole):
    """How wrong the sum over micro-batches of four is, with what the step states."""
    torch.manual_seed(0)
    model, total, stated_total = nn.Linear(6, 4, dtype=torch.float64), 0.0, 0.0
    for start in range(0, 16, 4):
        loss, number = whole(model, batch[start : start + 4])
        total, stated_total = total + loss, stated_total + float(step(number))
    right, boxes = whole(model, batch)
    (total / stated_total).backward()
    found = gradients_of(model)
    return relative_error(found, full_batch_gradient(model, lambda *_: right / boxes, batch))


def test_a_count_that_is_kept_from_0_makes_the_gradient_too_small():
    """By hand: that is what the other tests are about."""
    assert gradient_of_parts(at_least(1), images(EMPTY), box_losses) > 0.1
    assert gradient_of_parts(float, images(EMPTY), box_losses) < 1e-12


def warnings_in(caplog):
    """Warnings of a loss of 0 that counts."""
    return [record for record in caplog.records if "exactly 0" in record.getMessage()]


@pytest.mark.parametrize("largest", [1, 3, 4], ids="micro-batches of {}".format)
@pytest.mark.parametrize("name", KEPT_FROM_0)
def test_a_count_that_is_kept_from_0_is_warned_of_once(name, largest, caplog):
    """In the first batch that has such samples, though the check had none."""
    step, make = KEPT_FROM_0[name]
    runner = make_runner(step, make(FULL), largest, check="raise")
    runner.step(make(FULL))
    assert not warnings_in(caplog)
    runner.step(make(EMPTY))
    runner.step(make(EMPTY))
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("at", [2, 4, 8])
def test_later_batches_are_looked_at_too(at, caplog):
    """The first ones have boxes in all images."""
    runner = make_runner(KEPT_FROM_0["Mean"][0], images(FULL), check="raise")
    for _ in range(at - 1):
        runner.step(images(FULL))
    runner.step(images(EMPTY))
    assert len(warnings_in(caplog)) == 1


WRONG_FOR_THE_CHECK = {
    **{name: step for name, (step, make) in KEPT_FROM_0.items() if make is images},
    "at least 3": stated(at_least(3)),
    "plus 1": stated(lambda number: number + 1),
    **{f"always {number}": stated(lambda _, number=number: number) for number in (1, 7.5, torch.tensor(16))},
    "always 16, as a sum": stated(lambda _: 16, form="Sum"),
}


@pytest.mark.parametrize("name", WRONG_FOR_THE_CHECK)
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


@pytest.mark.parametrize("at", [0, 7, 40])
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
