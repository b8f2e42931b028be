"""The search's promises: few trials, exact to the sample, and never an answer that has not run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.planning.division import useful_sizes
from autobatch.planning.next_trial import (
    Question,
    choose_size,
    fits,
    most_trials,
    next_size,
    next_smaller_size,
)
from autobatch.records import Outcome, Trial

pytestmark = pytest.mark.quick

Memory = Callable[[int], int]
MIB = 2**20


def measure(size: int, limit: int, peak: int, resident: int = 0) -> Trial:
    """What a probe hands back on a device where a step at this size holds ``peak`` bytes."""
    held = min(peak, limit)
    outcome: Outcome = "fits" if peak <= limit else "oom"
    return Trial(
        micro_batch_size=size,
        outcome=outcome,
        peak_allocated=held,
        peak_reserved=held,
        resident_bytes=min(resident, held),
    )


def search(question: Question, run: Callable[[int], Trial], trials: Sequence[Trial] = ()) -> list[Trial]:
    done = [*trials]
    while (size := next_size(question, done)) is not None:
        assert 1 <= size <= question.bound
        assert size not in {trial.micro_batch_size for trial in done}
        done.append(run(size))
        assert len(done) <= len(trials) + most_trials(question)
    return done


def search_memory(question: Question, memory: Memory, resident: int = 0) -> list[Trial]:
    """Search on a device whose memory is this function of the size."""
    return search(question, lambda size: measure(size, question.limit_bytes, memory(size), resident))


def search_outcomes(question: Question, outcome: Callable[[int], Outcome]) -> list[Trial]:
    """Search on a device that tells nothing but how a trial ended."""
    return search(question, lambda size: Trial(micro_batch_size=size, outcome=outcome(size)))


def true_answer(question: Question, memory: Memory) -> int | None:
    return max((size for size in question.sizes if memory(size) <= question.limit_bytes), default=None)


def out_of_memory(trials: Sequence[Trial]) -> int:
    return sum(trial.outcome == "oom" for trial in trials)


def staircase(memory: Memory, step: int, offset: int = 0) -> Memory:
    """What an allocator holds that takes whole segments."""
    return lambda size: -(-(memory(size) + offset) // step) * step


bounds = st.one_of(st.integers(1, 40), st.integers(1, 10_000), st.sampled_from([4096, 8191, 8192, 10_000]))


@st.composite
def candidates(draw: st.DrawFn, bound: int) -> tuple[int, ...]:
    """Every size, or those that a balanced plan of some share can have."""
    return useful_sizes(draw(st.integers(bound, 3 * bound)), bound) if draw(st.booleans()) else ()


@st.composite
def linear(draw: st.DrawFn) -> tuple[Question, Memory, int]:
    """A question on memory ``base + slope * n`` of which at least two samples fit, and what is resident."""
    bound = draw(bounds)
    base = draw(st.integers(0, 10**10))
    slope = draw(st.integers(0, 10**8))
    limit = base + slope * draw(st.one_of(st.integers(2, 20), st.integers(2, 12_000)))
    question = Question(
        bound=bound, limit_bytes=limit + draw(st.integers(0, slope)), candidates=draw(candidates(bound))
    )
    return question, lambda size: base + slope * size, draw(st.integers(0, base))


@st.composite
def convex(draw: st.DrawFn) -> tuple[Question, Memory]:
    """A question on the maximum of a few lines."""
    bound = draw(bounds)
    lines = draw(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**8)), min_size=1, max_size=5))
    limit = draw(st.integers(0, 2 * 10**10))
    question = Question(bound=bound, limit_bytes=limit, candidates=draw(candidates(bound)))
    return question, lambda size: max(base + slope * size for base, slope in lines)


@st.composite
def monotone(draw: st.DrawFn) -> tuple[Question, Memory]:
    """A question on memory that jumps up at arbitrary sizes, by arbitrary amounts."""
    bound = draw(bounds)
    slope = draw(st.integers(0, 1000))
    jumps = draw(st.lists(st.tuples(st.integers(1, bound), st.integers(1, 10**6)), max_size=8))

    def memory(size: int) -> int:
        return slope * size + sum(jump for at, jump in jumps if size >= at)

    limit = memory(draw(st.integers(1, bound))) + draw(st.integers(-1, 1000))
    return Question(bound=bound, limit_bytes=max(limit, 0), candidates=draw(candidates(bound))), memory


# ------------------------------------------------------------------------------------------------- memory that is a
# line


@given(linear())
def test_linear_memory_takes_four_trials_and_no_oom(case):
    """Memory that grows linearly is answered exactly within four trials, none of which runs out of memory."""
    question, memory, resident = case
    trials = search_memory(question, memory, resident)
    assert len(trials) <= 4
    assert out_of_memory(trials) == 0
    assert choose_size(question, trials) == true_answer(question, memory)


@given(linear(), st.integers(0, 10**10))
def test_the_optimizers_plateau_does_not_hide_the_slope(case, plateau):
    """Where the optimizer's step holds more than the backward of small sizes, the backward's own bytes lead."""
    question, memory, resident = case
    plateau = min(plateau, question.limit_bytes)

    def run(size: int) -> Trial:
        trial = measure(size, question.limit_bytes, max(memory(size), plateau), resident)
        backward = min(memory(size), question.limit_bytes)
        return trial.model_copy(
            update={"optimizer_peak": plateau, "backward_allocated": backward, "backward_reserved": backward}
        )

    trials = search(question, run)
    assert len(trials) <= 4
    assert out_of_memory(trials) == 0
    assert choose_size(question, trials) == true_answer(question, memory)


# ------------------------------------------------------------------------------------------------- any memory that
# grows


@given(convex())
def test_convex_memory_is_exact(case):
    """On memory that is the maximum of lines the answer is that of trying every size, ``None`` included."""
    question, memory = case
    trials = search_memory(question, memory)
    assert choose_size(question, trials) == true_answer(question, memory)


def on_one_line(question: Question, trials: Sequence[Trial], following: int) -> bool:
    """Whether some line through two measured sizes meets all of them, and is over the limit at ``following``."""
    points = {t.micro_batch_size: t.peak_reserved for t in trials if t.outcome == "fits"}
    answer = choose_size(question, trials)
    if len(points) < 3 and not set(range(question.smallest_probe, answer + 1)) <= set(points):
        return False
    if len(points) > 3:
        points.pop(1, None)
    tolerance = question.limit_bytes / 200 + 1
    for first, second in combinations(points, 2):
        slope = (points[second] - points[first]) / (second - first)
        close = all(abs(points[size] - points[first] - slope * (size - first)) <= tolerance for size in points)
        if close and points[first] + slope * (following - first) > question.limit_bytes:
            return True
    return False


def check_exact(question: Question, trials: Sequence[Trial]) -> None:
    """The answer fits, and something measured says that the next candidate does not."""
    answer = choose_size(question, trials)
    outcomes = {trial.micro_batch_size: trial.outcome for trial in trials}
    following = min((size for size in question.sizes if size > (answer or 0)), default=None)
    assert answer is None or outcomes[answer] == "fits"
    if following is not None and outcomes.get(following) != "oom":
        assert answer is not None
        assert any(outcome == "oom" for size, outcome in outcomes.items() if answer < size <= following) or on_one_line(
            question, trials, following
        )


@given(monotone())
def test_monotone_memory_is_exact_within_the_bound_on_trials(case):
    """On any memory that grows ``floor(log2(bound)) + 4`` trials are enough for an answer with a proof."""
    question, memory = case
    trials = search_memory(question, memory)  # counts the trials
    assert most_trials(question) == question.bound.bit_length() - 1 + 4
    check_exact(question, trials)


@given(linear(), st.sampled_from([2 * MIB, 20 * MIB]), st.integers(0, 20 * MIB))
def test_an_allocators_staircase_costs_at_most_what_counts_as_straight(case, step, offset):
    """Reserved bytes in steps of segments are answered to within 1/200 of the limit, and one size."""
    question, memory, resident = case
    stairs = staircase(memory, step, offset)
    trials = search_memory(question, stairs, resident)
    check_exact(question, trials)
    answer, truth = choose_size(question, trials), true_answer(question, stairs)
    assert (answer is None) == (truth is None)
    if answer is not None:
        following = min((size for size in question.sizes if size > answer), default=question.bound + 1)
        assert memory(truth) - memory(min(truth, following)) <= 3 * question.limit_bytes // 200 + step


RESNET18_ADAMW = {1: 223.6, 2: 224.2, 4: 254.7, 8: 334.8, 16: 501.7, 32: 835.5, 4096: 835.5 + 4064 * 21_876_736 / MIB}


def resnet18(size: int) -> int:
    """Peak bytes of ResNet-18 with AdamW, traced at these sizes: flat under the optimizer's step, then bending up."""
    ends = next(ends for ends in pairwise(RESNET18_ADAMW.items()) if size <= ends[1][0])
    (low, below), (high, above) = ends
    return int(MIB * (below + (above - below) * (size - low) / (high - low)))


@pytest.mark.parametrize("gibibytes", [1, 2, 4, 8, 16, 24, 40, 80])
def test_a_network_whose_memory_bends(gibibytes):
    """ResNet-18's bends (its first two sizes lie on a plateau) cost at most one trial and one OOM more than a line."""
    question = Question(bound=4096, limit_bytes=gibibytes * 2**30, candidates=useful_sizes(4096, 4096))
    trials = search_memory(question, resnet18, resident=int(134 * MIB))
    assert choose_size(question, trials) == true_answer(question, resnet18)
    assert len(trials) <= 5
    assert out_of_memory(trials) <= 1


@pytest.mark.parametrize("peak_of_one", [80_050, 80_150, 70_000])
def test_an_odd_single_sample_does_not_spoil_the_proof(peak_of_one):
    """With three other sizes on a line, one sample elsewhere neither tilts that line nor costs an OOM."""
    question = Question(bound=8192, limit_bytes=100_000)
    trials = search_memory(question, lambda size: peak_of_one if size == 1 else 80_000 + 100 * size)
    assert 1 in {trial.micro_batch_size for trial in trials}  # what makes this case hard
    assert out_of_memory(trials) == 0
    assert choose_size(question, trials) == 200


@given(convex(), st.integers(0, 10**10))
def test_one_sample_may_be_another_program(case, peak_of_one):
    """However odd a single sample is, the answer is exact when it is at least three, and never untried."""
    question, memory = case
    trials = search_memory(question, lambda size: min(peak_of_one, memory(1)) if size == 1 else memory(size))
    answer, truth = choose_size(question, trials), true_answer(question, memory)
    if truth is not None and truth >= 3 and 3 in question.sizes and 3 in {trial.micro_batch_size for trial in trials}:
        assert answer == truth
    assert answer is None or answer <= max(truth or 0, 1)


# ------------------------------------------------------------------------------------------------- outcomes alone


@given(bounds, st.data())
def test_outcomes_alone_are_bisected(bound, data):
    """Without measurements any monotone memory is answered exactly in ``floor(log2(bound)) + 1`` trials."""
    truth = data.draw(st.integers(0, bound))
    question = Question(bound=bound, limit_bytes=0, measures=False, candidates=data.draw(candidates(bound)))
    trials = search_outcomes(question, lambda size: "fits" if size <= truth else "oom")
    assert choose_size(question, trials) == max((size for size in question.sizes if size <= truth), default=None)
    assert len(trials) <= bound.bit_length()


@given(bounds, st.booleans(), st.data())
def test_arbitrary_outcomes_end_in_an_answer_that_ran(bound, measures, data):
    """Memory that follows no rule still ends in time, tries no size twice and answers only what has run and fits."""
    question = Question(bound=bound, limit_bytes=1000, measures=measures, candidates=data.draw(candidates(bound)))
    draws = st.builds(
        Trial,
        micro_batch_size=st.just(1),
        outcome=st.sampled_from(["fits", "oom", "thrash"]),
        peak_reserved=st.integers(0, 1500),
        resident_bytes=st.integers(0, 1500),
        backward_reserved=st.none() | st.integers(0, 1500),
        backward_allocated=st.none() | st.integers(0, 1500),
        optimizer_peak=st.integers(0, 1500),
    )
    trials = search(question, lambda size: data.draw(draws).model_copy(update={"micro_batch_size": size}))
    answer = choose_size(question, trials)
    fitting = [trial.micro_batch_size for trial in trials if fits(question, trial)]
    assert answer is None or answer in fitting
    assert answer is not None or not set(fitting).intersection(question.sizes)
    following = min((size for size in question.sizes if size > (answer or 0)), default=None)
    if not measures and following is not None:
        assert following in {trial.micro_batch_size for trial in trials} - set(fitting)


# ------------------------------------------------------------------------------------------------- what others get
# wrong


@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("bound", [1, 2, 3, 8, 100, 5000])
def test_a_ceiling_at_the_bound_is_answered_and_not_passed(bound, measures):
    """Where everything fits the answer is the bound, and it has run: no untested maximum is returned."""
    question = Question(bound=bound, limit_bytes=10**9, measures=measures)
    trials = search_memory(question, lambda size: 1000 + size)
    assert choose_size(question, trials) == bound
    assert max(trial.micro_batch_size for trial in trials) == bound


@pytest.mark.parametrize("measures", [True, False])
@pytest.mark.parametrize("bound", [1, 2, 3, 8, 100, 5000])
def test_nothing_fits(bound, measures):
    """Where not even one sample fits the answer is ``None``, after size 1 has failed: not 0, nothing untried."""
    question = Question(bound=bound, limit_bytes=1000, measures=measures)
    trials = search_memory(question, lambda size: 1001 + size)
    assert choose_size(question, trials) is None
    assert trials[-1].micro_batch_size == 1


def test_a_size_that_thrashes_does_not_fit():
    """A trial that ran, but made the allocator free and ask again, is as good as one that failed."""
    question = Question(bound=64, limit_bytes=100)
    trials = search(
        question,
        lambda size: measure(size, 100, min(size * 2, 100)).model_copy(
            update={"outcome": "thrash" if size > 40 else "fits"}
        ),
    )
    assert choose_size(question, trials) == 40


@pytest.mark.parametrize("kind", ["peak_reserved", "peak_allocated"])
def test_a_trial_above_the_limit_does_not_fit(kind):
    """What ran on a device that enforces nothing, but held more than the limit, is not answered."""
    question = Question(bound=64, limit_bytes=100)
    trials = search(question, lambda size: Trial(micro_batch_size=size, outcome="fits", **{kind: size * size}))
    assert max(trial.micro_batch_size for trial in trials) > 10  # what makes this case hard
    assert choose_size(question, trials) == 10


def test_batch_norm_does_not_begin_with_one_sample():
    """With ``smallest_probe=2`` the next open size is not 1 as long as 2 has not failed."""
    question = Question(bound=8, limit_bytes=100, smallest_probe=2, candidates=(1, 2, 4, 8))
    assert next_size(question, [measure(3, 100, 100)]) == 2


@given(convex())
def test_batch_norm_sees_one_sample_only_in_need(case):
    """With ``smallest_probe=2`` size 1 is tried only after 2 has failed, and the answer is still exact."""
    question, memory = case
    question = question.model_copy(update={"smallest_probe": 2})
    trials = search_memory(question, memory)
    outcomes = {trial.micro_batch_size: trial.outcome for trial in trials}
    assert 1 not in outcomes or question.bound == 1 or outcomes[2] == "oom"
    assert choose_size(question, trials) == true_answer(question, memory)


@given(convex(), st.integers(1, 10_000))
def test_a_search_goes_on_from_a_remembered_size(case, remembered):
    """A first trial at a size of the caller's, fitting or not, leaves the answer exact."""
    question, memory = case
    first = measure(
        min(remembered, question.sizes[-1]), question.limit_bytes, memory(min(remembered, question.sizes[-1]))
    )
    trials = search(question, lambda size: measure(size, question.limit_bytes, memory(size)), [first])
    assert choose_size(question, trials) == true_answer(question, memory)


def test_a_size_that_failed_once_is_not_answered():
    """A size with two outcomes counts as failed: the plan must not promise it."""
    question = Question(bound=4, limit_bytes=100)
    trials = [measure(3, 100, 30), measure(4, 100, 40), measure(4, 100, 101)]
    assert choose_size(question, trials) == 3


# ------------------------------------------------------------------------------------------------- the smallest as fast


def timed(size: int, rate: float, outcome: Outcome = "fits") -> Trial:
    """A trial of so many samples per second."""
    return Trial(micro_batch_size=size, outcome=outcome, seconds=2 * size / rate)


@pytest.mark.parametrize(
    ("rates", "answer"),
    [
        ({2: 10, 8: 40, 50: 99, 100: 100}, 50),
        ({2: 10, 8: 40, 50: 97, 100: 100}, 100),
        ({2: 10, 8: 101, 50: 99, 100: 100}, 8),
        ({100: 100}, 100),
        ({}, None),
    ],
)
def test_the_smallest_within_two_percent_of_the_best(rates, answer):
    """The smallest size that ran and loses at most 2 % of the best rate is the one that is no slower."""
    question = Question(bound=100, limit_bytes=0)
    assert choose_size(question, [timed(size, rate) for size, rate in rates.items()], "memory") == answer


def test_without_rates_the_largest_stays():
    """Where no time was taken nothing says that a smaller size is as fast, and no more sizes are asked for."""
    question = Question(bound=100, limit_bytes=0)
    trials = [Trial(micro_batch_size=size, outcome="fits") for size in (2, 100)]
    assert choose_size(question, trials, "memory") == 100
    assert next_smaller_size(question, trials) is None


def test_sizes_are_halved_until_they_are_slower():
    """From the best size down, each half is timed until one is more than 2 % slower."""
    question = Question(bound=256, limit_bytes=0, candidates=useful_sizes(256, 256))
    rate = lambda size: 100.0 if size >= 30 else 3.0 * size  # noqa: E731 # a formula
    trials = [timed(size, rate(size)) for size in (2, 8, 256)]
    while (size := next_smaller_size(question, trials)) is not None:
        trials.append(timed(size, rate(size)))
    assert [trial.micro_batch_size for trial in trials[3:]] == [128, 64, 32, 16]
    assert choose_size(question, trials, "memory") == 32


@given(bounds, st.sampled_from([1, 2]), st.data())
def test_timing_ends_among_candidates(bound, smallest_probe, data):
    """Whatever the rates, timing ends within ``log2`` of the bound, on candidates that were not tried before."""
    sizes = data.draw(candidates(bound))
    question = Question(bound=bound, limit_bytes=0, candidates=sizes, smallest_probe=smallest_probe)
    trials = [timed(question.sizes[-1], 100)]
    while (size := next_smaller_size(question, trials)) is not None:
        assert size in question.sizes
        assert smallest_probe <= size
        assert size not in {trial.micro_batch_size for trial in trials}
        trials.append(timed(size, data.draw(st.floats(1, 1000))))
    assert len(trials) <= bound.bit_length()
    assert choose_size(question, trials, "memory") in {trial.micro_batch_size for trial in trials}
