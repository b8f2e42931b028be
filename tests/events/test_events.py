"""Events: the line and level of each, and hooks that cannot harm a step."""

from __future__ import annotations

import logging
import weakref

import pytest

from autobatch import events
from autobatch.events import (
    BatchDiffers,
    Event,
    GradientsFound,
    MapFinished,
    PieceFinished,
    PieceRetried,
    PlanDiffers,
    PlanMade,
    PlanRecalled,
    PlanRefused,
    Retried,
    SizeChanged,
    StageBegan,
    StepFailed,
    StepFinished,
    SteppedTwice,
    StepSkipped,
    TrialFinished,
    emit,
)
from autobatch.events.rank_step import RankStep, find_slowest_step
from autobatch.events.runner_events import step_metrics
from autobatch.records import Trial

pytestmark = pytest.mark.quick

GIB = 1024**3

TRIAL = Trial(micro_batch_size=43, outcome="fits", peak_reserved=18 * GIB, seconds=0.316)
RETRIED = Retried(
    step=120,
    failed_size=43,
    new_size=22,
    used_bytes=3 * GIB,
    budget_bytes=8 * GIB,
    reason="OutOfMemoryError: CUDA out of memory.",
)
RANKS = (
    RankStep(rank=0, samples=256, micro_batch_size=86, retries=0, peak_bytes=7 * GIB, seconds=0.5),
    RankStep(rank=1, samples=256, micro_batch_size=86, retries=1, peak_bytes=5 * GIB, seconds=0.2),
)
FINISHED = StepFinished(step=7, micro_batch_sizes=(86, 85, 85), retries=1, peak_bytes=5 * GIB, seconds=0.2)
MAPPED = MapFinished(
    samples=3000,
    pieces=13,
    smallest=2,
    largest=287,
    shortages=0,
    peak_bytes=GIB,
    budget_bytes=2 * GIB,
    device="NVIDIA L4",
    seconds=2.04,
)

EVENTS = [
    pytest.param(
        StageBegan(stage="tracing the step at 67 samples"), logging.DEBUG, "tracing the step at 67 samples", id="stage"
    ),
    pytest.param(
        TrialFinished(trial=TRIAL, limit_bytes=20 * GIB),
        logging.DEBUG,
        "trial of 43 samples: fits, peak 18.0 GiB of 20.0 GiB, 0.32 s",
        id="trial",
    ),
    pytest.param(
        TrialFinished(trial=Trial(micro_batch_size=1, outcome="oom", seconds=0.1), limit_bytes=0),
        logging.DEBUG,
        "trial of 1 sample: oom, 0.10 s",
        id="trial where memory cannot be measured",
    ),
    pytest.param(PlanMade(summary="256 = 6 x 43"), logging.INFO, "256 = 6 x 43", id="plan"),
    pytest.param(
        PlanRecalled(plan_id="5f3a", micro_batch_size=43),
        logging.INFO,
        "plan 5f3a of an earlier run is for this step: one trial of 43 samples has to confirm it",
        id="remembered plan",
    ),
    pytest.param(
        PlanRefused(plan_id="5f3a", reason="43 samples ran out of memory this time"),
        logging.INFO,
        "plan 5f3a of an earlier run is not reused: 43 samples ran out of memory this time; searching again",
        id="remembered plan that does not serve",
    ),
    pytest.param(
        RETRIED,
        logging.WARNING,
        "step 120 ran out of memory at 43 samples and runs again with at most 22; "
        "3.0 GiB of 8.0 GiB held by others and us after clean-up; OutOfMemoryError: CUDA out of memory.",
        id="retry",
    ),
    pytest.param(
        BatchDiffers(step=3, samples=200, planned=256),
        logging.WARNING,
        "step 3 was given 200 samples, planned 256: use runner.run(loader), or batch_size=256",
        id="batch of another size",
    ),
    pytest.param(
        SteppedTwice(step=1, names=("StepLR", "Adam"), calls=("scheduler.step()", "optimizer.step()")),
        logging.WARNING,
        "StepLR and Adam moved between two steps of the Runner, which steps what it was given: remove "
        "scheduler.step() and optimizer.step() from the loop",
        id="stepped twice",
    ),
    pytest.param(
        PlanDiffers(plan_id="5f3a", differences=("the optimizer was AdamW, and now is SGD",)),
        logging.WARNING,
        "plan 5f3a is not of this training: the optimizer was AdamW, and now is SGD; its sizes may not fit, "
        "so run fit() again",
        id="another optimizer",
    ),
    pytest.param(
        SizeChanged(step=9, old_size=86, new_size=43, reason="less is free"),
        logging.WARNING,
        "from step 9 on at most 43 samples in a micro-batch, before 86: less memory is free than that size needs",
        id="smaller between two steps",
    ),
    pytest.param(
        SizeChanged(step=30, old_size=43, new_size=52, reason="grown back"),
        logging.INFO,
        "from step 30 on at most 52 samples in a micro-batch, before 43: the last steps had no trouble and "
        "enough memory is free",
        id="grown back",
    ),
    pytest.param(
        StepSkipped(step=4, samples=8),
        logging.WARNING,
        "step 4 was skipped: nothing counts in its 8 samples, so it has no mean; parameters, optimizer "
        "and scheduler did not change",
        id="skipped",
    ),
    pytest.param(
        GradientsFound(step=2),
        logging.WARNING,
        "step 2 began with gradients from before, which are part of its update; if they were used already, "
        "call optimizer.zero_grad() before runner.step()",
        id="gradients from before",
    ),
    pytest.param(
        StepFailed(step=4, reason="DoesNotFit: no room for one sample", out_of_memory=True),
        logging.DEBUG,
        "step 4 failed: DoesNotFit: no room for one sample",
        id="failed step",
    ),
    pytest.param(
        FINISHED,
        logging.DEBUG,
        "step 7: 3 micro-batches of at most 86, 1 retry, peak 5.0 GiB",
        id="step",
    ),
    pytest.param(
        StepFinished(step=0, micro_batch_sizes=(4,), retries=0, peak_bytes=512, seconds=0.0),
        logging.DEBUG,
        "step 0: 1 micro-batch of at most 4, 0 retries, peak 512 bytes",
        id="step in one piece",
    ),
    pytest.param(
        FINISHED.model_copy(update={"rank": 1, "world_size": 2, "ranks": RANKS}),
        logging.DEBUG,
        "rank 1 of 2: step 7: 3 micro-batches of at most 86, 1 retry, peak 5.0 GiB; the slowest rank was 0 "
        "with 0.500 s of its own work",
        id="step of several ranks",
    ),
    pytest.param(
        BatchDiffers(step=3, samples=200, planned=32, target_batch=256, can_run=False, rank=3, world_size=8),
        logging.WARNING,
        "rank 3 of 8: step 3 was given 200 samples, planned 32, this rank's share of target_batch=256: use "
        "batch_size=32",
        id="one of several ranks",
    ),
    pytest.param(
        PieceFinished(samples=8, samples_done=10, peak_bytes=GIB, budget_bytes=2 * GIB, seconds=0.126),
        logging.DEBUG,
        "map: 8 samples, 10 done, peak 1.0 GiB of 2.0 GiB, 0.13 s",
        id="piece",
    ),
    pytest.param(
        PieceRetried(samples=64, used_bytes=GIB, budget_bytes=2 * GIB, reason="OutOfMemoryError: CUDA out of memory."),
        logging.WARNING,
        "map ran out of memory at 64 samples, which are run again in smaller pieces; 1.0 GiB of 2.0 GiB "
        "held after clean-up; OutOfMemoryError: CUDA out of memory.",
        id="retried piece",
    ),
    pytest.param(
        MAPPED,
        logging.INFO,
        "map: 3000 samples in 13 pieces of 2 to 287 on NVIDIA L4; peak 1.0 GiB of 2.0 GiB; 0 out of memory, 2.0 s",
        id="map",
    ),
    pytest.param(
        MAPPED.model_copy(update={"samples": 0, "pieces": 0, "smallest": 0, "largest": 0, "peak_bytes": 0}),
        logging.INFO,
        "map: 0 samples in 0 pieces on NVIDIA L4; 0 out of memory, 2.0 s",
        id="map of nothing",
    ),
]


def _types_of_events() -> set[type[Event]]:
    """Every event that the module makes public."""
    public = (getattr(events, name) for name in events.__all__)
    return {kind for kind in public if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event}


def test_the_table_above_has_every_event() -> None:
    """A new event cannot be added without its line being looked at here."""
    assert {type(case.values[0]) for case in EVENTS} == _types_of_events()


@pytest.mark.parametrize(("event", "level", "line"), EVENTS)
def test_each_event_is_one_log_line(event: Event, level: int, line: str, caplog: pytest.LogCaptureFixture) -> None:
    """One event costs one line on logger ``autobatch``, at its own level."""
    with caplog.at_level(logging.DEBUG, logger="autobatch"):
        emit(event)
    assert caplog.record_tuples == [("autobatch", level, line)]
    assert "\n" not in line


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """Below a warning, a program that has not set up logging sees nothing on its own streams."""
    emit(FINISHED)
    emit(PlanMade(summary="256 = 6 x 43"))
    assert capfd.readouterr() == ("", "")


def test_hooks_get_the_event_itself_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """Each hook is called once, in the order given, with the very record, after it was logged."""
    calls: list[tuple[str, Event, int]] = []
    with caplog.at_level(logging.WARNING, logger="autobatch"):
        emit(
            RETRIED,
            hooks=[
                lambda event: calls.append(("first", event, len(caplog.records))),
                lambda event: calls.append(("second", event, len(caplog.records))),
            ],
        )
    assert [name for name, _, _ in calls] == ["first", "second"]
    assert all(event is RETRIED for _, event, _ in calls)
    assert [lines for _, _, lines in calls] == [1, 1]


def test_a_hook_that_raises_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Its error is logged with its traceback and the event's name, and the hooks after it still run."""
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise ConnectionError("tracker is away")

    with caplog.at_level(logging.WARNING, logger="autobatch"):
        emit(FINISHED, hooks=[broken, seen.append])
    (line,) = caplog.records
    assert seen == [FINISHED]
    assert line.levelno == logging.ERROR
    assert "StepFinished" in line.getMessage()
    assert "broken" in line.getMessage()
    assert line.exc_info is not None
    assert str(line.exc_info[1]) == "tracker is away"


def test_a_hook_that_fails_always_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also one that nothing can refer to weakly, of either kind that Python knows."""

    class Slotted:
        __slots__ = ()

        def __call__(self, event: Event) -> None:
            raise ConnectionError("tracker is away")

    class Unhashable(Slotted):
        __hash__ = None  # type: ignore[assignment]

    hooks = [Slotted(), Slotted(), Unhashable()]
    for _ in range(5):
        emit(FINISHED, hooks)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 3


def test_nothing_is_called_when_a_hook_that_has_failed_goes() -> None:
    """What a weak reference's callback raises is printed and lost, so an interrupt would be."""

    def broken(event: Event) -> None:
        raise ConnectionError("tracker is away")

    emit(FINISHED, hooks=[broken])
    references = weakref.getweakrefs(broken)
    assert references
    assert all(reference.__callback__ is None for reference in references)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_hook_may_stop_the_program(stop: type[BaseException]) -> None:
    """Ctrl-C and exit inside a hook are the user's will and go through."""

    def leave(event: Event) -> None:
        raise stop

    with pytest.raises(stop):
        emit(FINISHED, hooks=[leave])


def test_metrics_of_several_ranks_name_the_slowest():
    """Beside this rank's own numbers; of one rank there is nothing to name."""
    own = step_metrics((86, 85, 85), 1, 5 * GIB, 0.2)
    assert step_metrics((86, 85, 85), 1, 5 * GIB, 0.2, RANKS) == {
        **own,
        "autobatch/slowest_rank": 0,
        "autobatch/slowest_rank_seconds": 0.5,
        "autobatch/largest_peak_bytes": 7 * GIB,
    }
    assert find_slowest_step(()) is None
