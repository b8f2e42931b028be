"""The divisors of losses: every case that others weigh wrongly, against float64."""

from __future__ import annotations

import pytest
import torch
from retrying import halve, retrying
from sampling import sample
from torch import nn
from torch.nn import functional as F
from workloads import Plain, bits_of, differences, full_batch_gradient, gradients_of, make_batch, relative_error

import autobatch
from autobatch.batch.samples import describe
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.memory.cpu import CpuDevice
from autobatch.step.losses import Mean, PerStep, Sum
from autobatch.step.workload import Workload
from autobatch.testing import oom_at

pytestmark = pytest.mark.quick

CLASS_WEIGHTS = torch.tensor([0.1, 3.0, 1.0, 0.5], dtype=torch.float64)


def make_tasks(samples: int = 23):
    """``(inputs, labels, second labels)``; a third of the first and most of the second are ignored (-100)."""
    inputs, labels = make_batch(samples, torch.float64)
    first, second = labels.clone(), labels.flip(0).clone()
    first[::3] = -100
    second[: samples - 5] = -100
    return inputs, first, second


def penalise(model: nn.Module) -> torch.Tensor:
    return sum(parameter.square().sum() for parameter in model.body.parameters())


def ce(model, batch, *, task: int = 1, **options):
    """Cross entropy of one of the two tasks; -100 is left out."""
    return F.cross_entropy(model(batch[0]), batch[task], ignore_index=-100, **options)


def count(batch, task: int = 1):
    return (batch[task] != -100).sum()


def plain(model, batch):
    """The truth of most cases: the mean over labels that count."""
    return ce(model, batch)


def both(model, batch):
    """Two tasks, each the mean over its own labels, and a regulariser once."""
    return ce(model, batch) + 0.3 * ce(model, batch, task=2) + 0.01 * penalise(model)


SAMPLES, LABELS = 23, 15
"""Samples in the whole batch, and labels of the first task that count: known before its first micro-batch."""


CASES = {
    "mean over tokens, stated": (lambda m, b: Mean(ce(m, b), count=count(b)), None, plain),
    "mean over tokens, stated and counted before": (lambda m, b: Mean(ce(m, b), count=count(b)), count, plain),
    "mean over tokens, weighed": (ce, count, plain),
    "sum over tokens, stated": (lambda m, b: Sum(ce(m, b, reduction="sum"), count(b)), None, plain),
    "sum over tokens, counted before": (lambda m, b: Sum(ce(m, b, reduction="sum"), count(b)), count, plain),
    "sum over samples": (
        lambda m, b: Sum(m(b[0]).square().sum(), len(b[0])),
        None,
        lambda m, b: m(b[0]).square().sum() / len(b[0]),
    ),
    "class weights": (
        lambda m, b: Mean(ce(m, b, weight=CLASS_WEIGHTS), count=CLASS_WEIGHTS[b[1].clamp(min=0)][b[1] != -100].sum()),
        None,
        lambda m, b: ce(m, b, weight=CLASS_WEIGHTS),
    ),
    "regulariser in a mean": (
        lambda m, b: m(b[0]).square().mean() + 0.01 * penalise(m),
        None,
        lambda m, b: m(b[0]).square().mean() + 0.01 * penalise(m),
    ),
    "regulariser beside a sum": (
        lambda m, b: {"ce": Sum(ce(m, b, reduction="sum"), count(b)), "l2": PerStep(0.01 * penalise(m))},
        None,
        lambda m, b: ce(m, b) + 0.01 * penalise(m),
    ),
    "two tasks with sparse labels": (
        lambda m, b: {
            "first": Mean(ce(m, b), count=count(b)),
            "second": Mean(0.3 * ce(m, b, task=2), count=count(b, 2)),
            "l2": PerStep(0.01 * penalise(m)),
        },
        lambda b: {"first": count(b), "second": count(b, 2)},
        both,
    ),
    "two tasks, means by name": (
        lambda m, b: {"first": ce(m, b), "second": 0.3 * ce(m, b, task=2), "l2": PerStep(0.01 * penalise(m))},
        lambda b: {"first": count(b), "second": count(b, 2)},
        both,
    ),
    "two terms with one count": (
        lambda m, b: {"a": Mean(ce(m, b), count=count(b)), "b": Sum(ce(m, b, reduction="sum"), count(b))},
        None,
        lambda m, b: 2 * ce(m, b),
    ),
    "two terms over samples": (
        lambda m, b: {"a": m(b[0]).square().mean(), "b": m(b[0]).abs().mean()},
        None,
        lambda m, b: m(b[0]).square().mean() + m(b[0]).abs().mean(),
    ),
    "divided by a constant": (
        lambda m, b: Sum(m(b[0]).square().sum(), count=len(b[0]) * 19),
        None,
        lambda m, b: m(b[0]).square().sum() / (SAMPLES * 19),
    ),
    "divided by the step's count before": (
        lambda m, b: Sum(ce(m, b, reduction="sum") / LABELS, count=len(b[0]) / SAMPLES),
        None,
        plain,
    ),
    "divided before, multiplied back": (
        lambda m, b: Sum(ce(m, b, reduction="sum") / LABELS * LABELS, count=count(b)),
        None,
        plain,
    ),
    "divided before, and weighed": (
        lambda m, b: Sum(ce(m, b, reduction="sum") / LABELS, count=len(b[0]) / SAMPLES),
        lambda b: len(b[0]) / SAMPLES,
        plain,
    ),
    "divided before, beside a regulariser": (
        lambda m, b: {
            "ce": Sum(ce(m, b, reduction="sum") / LABELS, count=len(b[0]) / SAMPLES),
            "l2": PerStep(0.01 * penalise(m)),
        },
        None,
        lambda m, b: ce(m, b) + 0.01 * penalise(m),
    ),
    "divided before, beside a mean over samples": (
        lambda m, b: {
            "ce": Sum(ce(m, b, reduction="sum") / LABELS * SAMPLES, count=len(b[0])),
            "mean": m(b[0]).square().mean(),
            "l2": PerStep(0.01 * penalise(m)),
        },
        None,
        lambda m, b: ce(m, b) + m(b[0]).square().mean() + 0.01 * penalise(m),
    ),
    "divided before, beside terms that are counted before": (
        lambda m, b: {
            "divided": Sum(m(b[0]).square().sum() / 7, count=len(b[0]) / SAMPLES),
            "first": Mean(ce(m, b), count=count(b)),
            "second": 0.3 * m(b[0]).abs().mean(),
        },
        lambda b: {"divided": len(b[0]) / SAMPLES, "first": count(b), "second": len(b[0])},
        lambda m, b: m(b[0]).square().sum() / 7 + ce(m, b) + 0.3 * m(b[0]).abs().mean(),
    ),
    "a regulariser alone": (lambda m, b: PerStep(penalise(m)), None, lambda m, b: penalise(m)),
}


@pytest.mark.parametrize("largest", [1, 4, 7, 22, 23])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_and_the_loss_are_the_full_batchs(name, largest):
    """Ragged, with micro-batches whose labels are all ignored, with earlier gradients: to 1e-12 in float64."""
    step, weigh, truth = CASES[name]
    model, batch = Plain(), make_tasks()
    for parameter in model.body.parameters():
        parameter.grad = torch.ones_like(parameter)
    expected = full_batch_gradient(model, truth, batch)
    loss = truth(model, batch).item()
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            expected[parameter_name] = expected[parameter_name] + 1
    done = retrying(Workload(model, step, weigh), CpuDevice(), halve).run([describe(batch)], largest)
    assert relative_error(gradients_of(model), expected) <= 1e-12
    assert float(done.loss.value) == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("name", sample(CASES, 3))
def test_a_retry_keeps_the_gradient_exact(name):
    """Memory that ends in forward or backward changes no denominator."""
    step, weigh, truth = CASES[name]
    batch = make_tasks()
    expected = full_batch_gradient(make_model(), truth, batch)
    retries = 0
    for position in range(3, 90, 12):
        model = make_model()
        try:
            with oom_at(position):
                done = retrying(Workload(model, step, weigh), CpuDevice(), halve).run([describe(batch)], 8)
        except (torch.OutOfMemoryError, DoesNotFit):  # in weigh() itself, or after the last backward: nothing happened
            assert all(parameter.grad is None for parameter in model.parameters())
            continue
        retries += done.retries
        assert relative_error(gradients_of(model), expected) <= 1e-12
    assert retries >= 3


def few_labels(rows: tuple[int, ...]):
    """A batch of 8 of which only these rows have a label."""
    inputs, labels = make_batch(8, torch.float64)
    kept = torch.full_like(labels, -100)
    kept[list(rows)] = labels[list(rows)]
    return inputs, kept


@pytest.mark.parametrize("rows", [(0, 1), (0, 7), (3,), (2, 3, 4, 5, 6)])
@pytest.mark.parametrize("weigh", [count, lambda b: {"ce": count(b)}], ids=["one count", "counts by name"])
def test_a_term_of_the_step_counts_once_also_when_a_retry_leaves_parts_out(weigh, rows):
    """In smaller micro-batches some hold no label and are not run: the others' shares of a ``PerStep`` still make 1."""

    def step(model, part):
        return {"ce": ce(model, part), "l2": PerStep(penalise(model))}

    batch = few_labels(rows)
    expected = full_batch_gradient(make_model(), lambda m, b: ce(m, b) + penalise(m), batch)
    retries = 0
    for positions in ((4,), (4, 12), (20,), (30, 45)):
        model = make_model()
        with oom_at(*positions):
            done = retrying(Workload(model, step, weigh), CpuDevice(), halve).run([describe(batch)], 8)
        retries += done.retries
        assert relative_error(gradients_of(model), expected) <= 1e-12
        assert float(done.loss.value) == pytest.approx((ce(model, batch) + penalise(model)).item(), rel=1e-12)
    assert retries >= 4


def make_model() -> Plain:
    torch.manual_seed(5)
    return Plain()


@pytest.mark.parametrize("stated", [False, True])
def test_labels_that_are_all_ignored_change_nothing(stated):
    """No mean, no step: parameters, buffers, generators, earlier gradients are as before."""
    model, (inputs, labels, _) = Plain(), make_tasks()
    batch = (inputs, torch.full_like(labels, -100))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = bits_of(model)

    def step(model, part):
        torch.rand(1)
        return Mean(ce(model, part), count=count(part))

    workload = Workload(model, step, None if stated else count)
    assert retrying(workload, CpuDevice(), halve).run([describe(batch)], 4) is None
    assert not differences(bits_of(model), before)


def test_many_bfloat16_micro_batches_keep_their_gradient():
    """256 micro-batches: summed in bfloat16 most of the gradient is lost, in float32 it is that of one batch."""
    errors = {}
    for in_float32 in (True, False):
        torch.manual_seed(1)
        model = nn.Linear(6, 1).bfloat16()
        batch = torch.rand(256, 6) + 0.5
        wide = nn.Linear(6, 1)
        wide.load_state_dict(model.state_dict())
        expected = full_batch_gradient(wide, lambda m, b: m(b).square().mean(), batch)

        def step(model, part):
            return model(part.bfloat16()).float().square().mean()

        accumulation = retrying(Workload(model, step), CpuDevice(), halve, in_float32=in_float32)
        accumulation.run([describe(batch)], 1)
        errors[in_float32] = relative_error(gradients_of(model), expected)
        assert model.weight.grad.dtype is torch.bfloat16
    assert errors[True] < 0.01
    assert errors[False] > 5 * errors[True]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")], ids=repr
)
@pytest.mark.parametrize("times", [1, 2, 10**9])
@pytest.mark.parametrize("divided_anew", [False, True])
def test_memory_that_ends_while_counting(error, times, divided_anew):
    """Once it is asked again with caches given back; for good it is DoesNotFit, and everything is as before."""
    model, batch, calls = make_model(), make_tasks(8), []

    def weigh(part):
        calls.append(1)
        first = 5 if divided_anew else 1  # the whole, its two halves, then those of a half
        if first <= len(calls) < first + times:
            raise error
        return count(part)

    workload = Workload(model, plain, weigh)
    expected = full_batch_gradient(model, plain, batch)
    with oom_at(30 if divided_anew else 10**9):
        if times == 1:
            retrying(workload, CpuDevice(), halve).run([describe(batch)], 4)
            assert relative_error(gradients_of(model), expected) <= 1e-12
        else:
            with pytest.raises(DoesNotFit, match=r"weigh\(\).*out of memory"):
                retrying(workload, CpuDevice(), halve).run([describe(batch)], 4)
            assert all(parameter.grad is None for parameter in model.parameters())
    assert len(calls) > 5 if divided_anew else calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weigh", [None, lambda b: len(b[0])], ids=["samples", "weighed"])
@pytest.mark.parametrize(
    "wrap", [lambda loss, n: loss, lambda loss, n: {"a": loss, "b": PerStep(0 * loss.exp())}], ids=["one", "two"]
)
def test_a_narrow_loss_is_weighed_without_rounding(dtype, weigh, wrap):
    """bfloat16 has no third: neither the loss nor each gradient is off by what it is rounded to."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def step(model, part):
        return wrap(model(part[0]).mean().to(dtype), len(part[0]))

    batch = (torch.ones(9, 1),)
    done = retrying(Workload(model, step, weigh), CpuDevice(), halve).run([describe(batch)], 3)
    assert float(done.loss.value) == pytest.approx(1, rel=1e-6)
    assert model.weight.grad.item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a regulariser"])
def test_a_narrow_loss_that_was_divided_before_is_not_rounded(dtype, beside):
    """Neither its gradient nor the sum of the losses is rounded to its dtype."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)

    def step(model, part):
        divided = Sum((model(part[0]).sum() / 16).to(dtype), count=len(part[0]) / 16)
        return {"divided": divided, "once": PerStep(model.weight.square().sum().to(dtype) / 2)} if beside else divided

    done = retrying(Workload(model, step), CpuDevice(), halve).run([describe((torch.ones(16, 1),))], 3)
    assert float(done.loss.value) == pytest.approx(1 + beside / 2, rel=1e-6)
    assert model.weight.grad.item() == pytest.approx(1 + beside, rel=1e-3 if beside else 1e-7)


def test_a_loss_that_is_kept_beside_itself_keeps_its_value():
    """The running loss is summed in place, in no tensor of the user's."""

    def step(model, part):
        loss = model(part[0]).square().sum()
        return Sum(loss, count=len(part[0]) / 8), loss.detach()

    model, batch = make_model(), make_tasks(8)
    done = retrying(Workload(model, step), CpuDevice(), halve).run([describe(batch)], 2)
    expected = [model(rows).square().sum() for rows in batch[0].split(2)]
    assert [value.item() for value in done.aux] == pytest.approx([value.item() for value in expected], rel=1e-12)
    assert float(done.loss.value) == pytest.approx(sum(expected).item(), rel=1e-12)


@pytest.mark.parametrize("before", [2048, 4])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_step_of_few_tokens_keeps_its_gradients_in_float16(weighed, before):
    """Whatever the step before had: losses divided by its many tokens would have gradients too small for float16."""
    torch.manual_seed(1)
    model = nn.Linear(16, 1, bias=False)

    def step(model, batch):
        inputs, mask = batch
        outputs = torch.matmul(inputs.half(), model.weight.half().t()).squeeze(-1)  # its backward pass is in float16
        loss = 2**-8 * (outputs.float().square() * mask).sum() / mask.sum()
        loss = loss.half() if weighed else loss
        return loss if weighed else autobatch.Mean(loss, count=mask.sum())

    def make(tokens):
        mask = torch.zeros(8, 2048)
        mask[:, :tokens] = 1
        return torch.randn(8, 2048, 16) * mask[..., None], mask

    plan = autobatch.fit(model, 8, batch=make(4), step=step, optimizer=None, max_micro_batch=2, check=None)
    runner = autobatch.Runner(plan, model, step, None, weigh=(lambda batch: batch[1].sum()) if weighed else None)
    runner.accumulate(make(before))
    model.zero_grad()
    few = make(4)
    runner.accumulate(few)
    rounded = model.weight.detach().half().double().requires_grad_()
    outputs = torch.matmul(few[0].half().double(), rounded.t()).squeeze(-1)
    (2**-8 * (outputs.square() * few[1]).sum() / few[1].sum()).backward()
    assert float((model.weight.grad - rounded.grad).norm() / rounded.grad.norm()) < 3e-3


def test_counts_by_term_for_a_loss_without_a_name_are_refused_in_words():
    """It has no name that a message could show."""
    model = nn.Linear(4, 1)
    workload = Workload(model, lambda model, rows: model(rows).mean(), lambda rows: {"tokens": len(rows)})
    with pytest.raises(InvalidArgument, match="tokens") as refused:
        retrying(workload, CpuDevice(), halve).run([describe(torch.zeros(4, 4))], 2)
    assert "''" not in str(refused.value)
