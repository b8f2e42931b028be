"""A prediction says where the search begins, and trials have the last word."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from bisect import bisect_right
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import GPT, ConvNet, images, step, tokens
from sampling import sample
from torch import nn
from workloads import Plain, make_batch, mean_step

import autobatch
from autobatch.batch.samples import describe
from autobatch.planning.division import useful_sizes
from autobatch.planning.next_trial import Question, choose_size, most_trials, next_size
from autobatch.prediction.cards import make_gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.prior import Expectation, FirstStep, TrialReplay, expect_largest
from autobatch.prediction.timeline import combine
from autobatch.prediction.tracing.trace import trace, trace_timeline
from autobatch.records import Trial
from autobatch.step.workload import Workload
from autobatch.testing import FakeDevice

SEGMENT = 20 * 2**20

NETS = {
    "convolutions": (ConvNet, images),
    "transformer": (GPT, tokens),
    "linear layers": (lambda: Plain(torch.float32), lambda: make_batch(2)),
}


class FakeCard(FakeDevice):
    """A fake device that says it is a card."""

    def describe(self):
        return super().describe().model_copy(update={"kind": "cuda"})


def workload_of(name):
    make_model, make = NETS[name]
    model = make_model()
    run = mean_step if name == "linear layers" else step
    return make(), Workload(model, run, None, torch.optim.AdamW(model.parameters()))


def on_any_card(timeline):
    """What is taken for a card of which nothing is known."""
    card = make_gpu("any", 0, source="")
    return Estimate(timeline).on_card(card)


@pytest.mark.predicts
@pytest.mark.parametrize("name", sample(NETS, 3))
def test_on_a_card_the_search_begins_at_a_quarter_of_the_prediction(name):
    """And the plan is of a size that ran."""
    batch, workload = workload_of(name)
    timeline = run_apart(lambda: trace_timeline(workload, describe(batch)))
    estimate = Estimate(timeline, 4096 * 8 * 1024)
    total = estimate.reserved(100) + 2**20
    card = FakeCard(lambda n: 2**20 + 2**18 * n, total)
    plan = autobatch.fit(
        workload.model, 256, batch=batch, step=workload.step, optimizer=workload.optimizer, device=card, headroom=0
    )
    expected = expect_largest(workload, describe(batch), total, useful_sizes(256, 256)).largest
    assert expected // 6 <= plan.trials[0].micro_batch_size <= expected // 4
    assert plan.micro_batch_size in {trial.micro_batch_size for trial in plan.trials}


def search_a_card(draw):
    """One search on a card whose reserved memory goes in segments, with a prediction that is up to 15 % off."""
    limit = int(draw.choice([8, 16, 24, 40, 80]) * 0.95 * 2**30)
    base, target = draw.uniform(0.02, 0.5) * limit, draw.choice([64, 256, 1000, 4096, 8192])
    slope, error = (limit - base) / draw.uniform(2, 1.5 * target), draw.uniform(0.85, 1.15)

    def reserve(size):
        return -(-int(base + slope * size) // SEGMENT) * SEGMENT

    sizes = useful_sizes(target, target)
    expected = max((size for size in sizes if error * reserve(size) <= limit), default=0)
    question = Question(bound=target, limit_bytes=limit, candidates=sizes, expected=expected)
    trials = []
    while (size := next_size(question, trials)) is not None:
        peak = reserve(size)
        outcome = "oom" if peak > 1.05 * limit else "fits"
        trials.append(
            Trial(
                micro_batch_size=size,
                outcome=outcome,
                peak_allocated=int(base + slope * size),
                peak_reserved=peak,
                resident_bytes=int(0.8 * base),
            )
        )
    best = max((size for size in sizes if reserve(size) <= limit), default=None)
    return trials, choose_size(question, trials) == best


def test_with_a_prediction_a_card_takes_three_trials_and_no_oom():
    """In 99 of 100 of a thousand cards and steps, and the answer is the largest size in as many."""
    draw = random.Random(0)
    searches = [search_a_card(draw) for _ in range(1000)]
    assert sum(len(trials) > 3 for trials, _ in searches) <= 10
    assert sum(any(trial.outcome == "oom" for trial in trials) for trials, _ in searches) <= 10
    assert sum(not is_best for _, is_best in searches) <= 10


@pytest.mark.predicts
@pytest.mark.parametrize("gibibytes", sample([8, 24, 80], 3))
@pytest.mark.parametrize("name", NETS)
def test_each_net_takes_three_trials_and_no_oom(name, gibibytes):
    """On cards of that size whose allocator holds what the trace says, or a tenth less or more than was predicted."""
    batch, workload = workload_of(name)
    timeline = run_apart(lambda: trace_timeline(workload, describe(batch)))
    reserve = cache(Estimate(timeline, 4096 * 8 * 1024).reserved)
    total = gibibytes * 2**30
    for target, error in itertools.product([256, 1000, 4096, 20_000, 100_000], [0.9, 1.0, 1.1]):
        sizes = useful_sizes(target, target)
        limit = int(0.95 * total)
        expected = sizes[bisect_right(sizes, limit, key=reserve) - 1]
        question = Question(bound=target, limit_bytes=limit, candidates=sizes, expected=expected)
        trials = []
        while (size := next_size(question, trials)) is not None:
            peak = int(error * reserve(size))
            outcome = "fits" if peak <= total else "oom"
            trials.append(Trial(micro_batch_size=size, outcome=outcome, peak_allocated=peak, peak_reserved=peak))
        assert len(trials) <= 3, (target, error, trials)
        assert all(trial.outcome == "fits" for trial in trials), (target, error, trials)
        fitting = bisect_right(sizes, limit, key=lambda size: int(error * reserve(size)))
        # What the allocator reserves for convolutions' workspaces is no line: there it may be the next smaller one.
        assert choose_size(question, trials) in sizes[fitting - (2 if name == "convolutions" else 1) : fitting]


def test_what_cannot_be_predicted_is_measured():
    """A step that needs values is searched for as if nothing had been asked."""

    def run(model, batch):
        loss = mean_step(model, batch)
        return loss if loss.item() > 0 else loss * 2

    model = Plain(torch.float32)
    assert expect_largest(Workload(model, run), describe(make_batch(2)), 2**30, (1, 2, 3, 4, 5)) == Expectation()
    card = FakeCard(lambda n: 1000 + 50 * n, total_bytes=4000)
    plan = autobatch.fit(model, 256, batch=make_batch(2), step=run, device=card, headroom=0)
    assert plan.micro_batch_size == 52
    assert plan.out_of_memory_trials == 0


@pytest.mark.parametrize("error", [OSError("no process"), KeyError("anything"), MemoryError()])
def test_whatever_goes_wrong_the_trials_do_not_need_it(monkeypatch, error):
    """An expectation that cannot be had is none."""

    def fail(*_):
        raise error

    monkeypatch.setattr("autobatch.prediction.prior.run_apart", fail)
    assert (
        expect_largest(Workload(Plain(), mean_step), describe(make_batch(2)), 2**30, (1, 2, 3, 4, 5)) == Expectation()
    )


@given(
    base=st.integers(0, 1000),
    slope=st.integers(1, 100),
    limit=st.integers(1, 20_000),
    expected=st.integers(0, 600),
    target=st.integers(1, 500),
)
def test_whatever_is_expected_the_answer_is_the_same(base, slope, limit, expected, target):
    """A wrong prediction costs trials, never the answer; there are never more than a search may take."""
    sizes = useful_sizes(target, target)
    question = Question(bound=target, limit_bytes=limit, candidates=sizes, expected=expected)
    trials = []
    while (size := next_size(question, trials)) is not None:
        peak = base + slope * size
        outcome = "fits" if peak <= 2 * limit else "oom"
        trials.append(Trial(micro_batch_size=size, outcome=outcome, peak_allocated=peak, peak_reserved=peak))
    assert len(trials) <= most_trials(question)
    assert len({trial.micro_batch_size for trial in trials}) == len(trials)
    fitting = [size for size in sizes if base + slope * size <= limit]
    assert choose_size(question, trials) == max(fitting, default=None)


def test_on_a_cpu_nothing_is_predicted():
    """There a trial is cheaper than a trace: nothing of the simulator is even imported."""
    program = (
        "import sys, torch, autobatch; autobatch.fit(torch.nn.Linear(4, 4), 16, max_micro_batch=4); "
        "sys.exit(any(name.startswith('autobatch.prediction') for name in sys.modules))"
    )
    environment = {**os.environ, "AUTOBATCH_LEDGER": "off"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=200)


@given(target=st.integers(6, 10_000), share=st.floats(0, 1))
def test_whatever_is_expected_at_most_half_of_it_is_tried_first(target, share):
    """Or two samples, where half would be one, which is another program."""
    sizes = useful_sizes(target, target)
    expected = sizes[round(share * (len(sizes) - 1))]
    question = Question(bound=target, limit_bytes=2**40, candidates=sizes, expected=expected)
    assert next_size(question, []) <= max(expected // 2, 2)


@pytest.mark.slow
@pytest.mark.predicts
def test_the_limit_is_compared_with_what_that_allocator_holds(monkeypatch):
    """A size that fits where one kind of segments is used does not fit where the other is, which holds more of it."""
    batch, workload = workload_of("linear layers")
    timeline = run_apart(lambda: trace_timeline(workload, describe(batch)))
    card = make_gpu("any", 0, source="")
    estimates = [Estimate(timeline, expandable_segments=which).on_card(card) for which in (False, True)]
    fixed, expandable = (TrialReplay.of(estimate).reserved(500_000) for estimate in estimates)
    assert abs(fixed - expandable) >= 2**20
    sizes, limit = useful_sizes(10**6, 10**6), max(fixed, expandable) - 1
    # Then what the environment says counts, of which torch keeps a copy otherwise.
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    for setting, held in (("False", fixed), ("True", expandable)):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{setting}")
        expected = expect_largest(workload, describe(batch), limit, sizes).largest
        assert (expected == 500_000) == (held <= limit)
        assert expected <= 500_000


@pytest.mark.slow
@pytest.mark.predicts
def test_a_first_step_that_holds_what_was_predicted_confirms_it():
    """To a sixteenth of its tensors; where cuBLAS has its two workspaces already they are not counted twice."""
    batch, workload = workload_of("transformer")
    trial = TrialReplay.of(on_any_card(run_apart(lambda: trace_timeline(workload, describe(batch)))))
    left, tensors = trial.forward
    sizes, limit, before = useful_sizes(256, 256), 2**28, trial.resident_bytes + 2**26 + 2 * (left - tensors)

    def expect(forward_bytes):
        forecast = expect_largest(workload, describe(batch), limit, sizes, FirstStep(before, forward_bytes)).forecast
        size, held = forecast.points[0]
        return forecast.is_confirmed, held - trial.reserved(size)

    others = before - trial.resident_bytes
    assert expect(left) == expect(left + tensors // 20) == (True, others)
    assert expect(left + tensors // 10) == expect(None) == expect(0) == (False, others)
    assert expect(tensors) == (True, 2**26)


@pytest.mark.slow
@pytest.mark.predicts
def test_other_tensors_of_the_process_are_counted():
    """A batch or a second model that is on the card takes from what trials may hold."""
    batch, workload = workload_of("transformer")
    sizes, limit = useful_sizes(256, 256), 2**28
    alone, beside = (
        expect_largest(workload, describe(batch), limit, sizes, FirstStep(held)).largest for held in (0, 2**26)
    )
    assert beside < alone


@pytest.mark.predicts
def test_nothing_is_expected_beyond_what_was_traced():
    """Where all samples are compared with all, memory grows with the square, and a line beyond a trace is too low."""

    def run(model, batch):
        outputs = model(batch)
        return (outputs @ outputs.T).mean()

    workload = Workload(nn.Linear(2, 2), run)
    expected = expect_largest(workload, describe(torch.zeros(2, 2)), 2**40, useful_sizes(10**6, 10**6))
    assert 2 < expected.largest < 10_000
    assert expected.knows_no_larger


def _pad_to_128(model, batch):
    return model(nn.functional.pad(batch, (0, 0, 0, -len(batch) % 128))).square().mean()


@pytest.mark.slow
@pytest.mark.predicts
def test_an_expectation_is_put_to_the_test_at_its_own_size():
    """Padding to 128 looks as if any number of samples fitted."""
    workload, layout = (
        Workload(nn.Sequential(nn.Linear(16, 4096), nn.Linear(4096, 16)), _pad_to_128),
        describe(torch.zeros(2, 16)),
    )
    limit, sizes = 140 * 2**20, useful_sizes(8192, 8192)
    expected = expect_largest(workload, layout, limit, sizes).largest
    assert 256 < expected < 4096
    traced = run_apart(lambda: trace(workload, layout, expected))
    assert 0.7 * limit < on_any_card(combine([traced])).reserved(expected) <= limit
