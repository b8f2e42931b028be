"""Events: the line and level of each, and hooks that cannot harm a step."""

from __future__ import annotations

import logging

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
    UpdateCopied,
    emit,
)
from autobatch.events.runner_events import RankStep, find_slowest_step, step_metrics
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
    pytest.param(StageBegan(stage="tracing the step at 67 samples"), logging.DEBUG, ["67"], id="stage"),
    pytest.param(
        TrialFinished(trial=TRIAL, limit_bytes=20 * GIB),
        logging.DEBUG,
        ["43", "18.0 GiB", "20.0 GiB", "0.32 s"],
        id="trial",
    ),
    pytest.param(
        TrialFinished(trial=Trial(micro_batch_size=1, outcome="oom", seconds=0.1), limit_bytes=0),
        logging.DEBUG,
        ["1", "0.10 s"],
        id="trial where memory cannot be measured",
    ),
    pytest.param(PlanMade(summary="256 = 6 x 43"), logging.INFO, ["256", "43"], id="plan"),
    pytest.param(PlanRecalled(plan_id="5f3a", micro_batch_size=43), logging.INFO, ["5f3a", "43"], id="remembered plan"),
    pytest.param(
        PlanRefused(plan_id="5f3a", reason="43 samples ran out of memory this time"),
        logging.INFO,
        ["5f3a", "43"],
        id="remembered plan that does not serve",
    ),
    pytest.param(
        RETRIED, logging.WARNING, ["120", "43", "22", "3.0 GiB", "8.0 GiB", "OutOfMemoryError", "CUDA"], id="retry"
    ),
    pytest.param(UpdateCopied(step=3, giver=2), logging.WARNING, ["3", "rank 2"], id="update copied"),
    pytest.param(
        BatchDiffers(step=3, samples=200, planned=256),
        logging.WARNING,
        ["3", "200", "256", "batch_size=256"],
        id="batch of another size",
    ),
    pytest.param(
        SteppedTwice(step=1, names=("StepLR", "Adam"), calls=("scheduler.step()", "optimizer.step()")),
        logging.WARNING,
        ["StepLR", "Adam", "Runner", "scheduler.step()", "optimizer.step()"],
        id="stepped twice",
    ),
    pytest.param(
        PlanDiffers(plan_id="5f3a", differences=("the optimizer was AdamW, and now is SGD",)),
        logging.WARNING,
        ["5f3a", "AdamW", "SGD", "fit()"],
        id="another optimizer",
    ),
    pytest.param(
        SizeChanged(step=9, old_size=86, new_size=43, reason="less is free"),
        logging.WARNING,
        ["9", "43", "86"],
        id="smaller between two steps",
    ),
    pytest.param(
        SizeChanged(step=30, old_size=43, new_size=52, reason="grown back"),
        logging.INFO,
        ["30", "52", "43"],
        id="grown back",
    ),
    pytest.param(StepSkipped(step=4, samples=8), logging.WARNING, ["4", "8"], id="skipped"),
    pytest.param(
        GradientsFound(step=2),
        logging.WARNING,
        ["2", "optimizer.zero_grad()", "runner.step()"],
        id="gradients from before",
    ),
    pytest.param(
        StepFailed(step=4, reason="DoesNotFit: no room for one sample", out_of_memory=True),
        logging.DEBUG,
        ["4", "DoesNotFit"],
        id="failed step",
    ),
    pytest.param(FINISHED, logging.DEBUG, ["7", "3", "86", "1", "5.0 GiB"], id="step"),
    pytest.param(
        StepFinished(step=0, micro_batch_sizes=(4,), retries=0, peak_bytes=512, seconds=0.0),
        logging.DEBUG,
        ["0", "1", "4", "512"],
        id="step in one piece",
    ),
    pytest.param(
        FINISHED.model_copy(update={"rank": 1, "world_size": 2, "ranks": RANKS}),
        logging.DEBUG,
        ["1", "2", "7", "3", "86", "5.0 GiB", "0.500 s"],
        id="step of several ranks",
    ),
    pytest.param(
        BatchDiffers(step=3, samples=200, planned=32, target_batch=256, can_run=False, rank=3, world_size=8),
        logging.WARNING,
        ["3", "8", "200", "32", "target_batch=256", "batch_size=32"],
        id="one of several ranks",
    ),
    pytest.param(
        PieceFinished(samples=8, samples_done=10, peak_bytes=GIB, budget_bytes=2 * GIB, seconds=0.126),
        logging.DEBUG,
        ["8", "10", "1.0 GiB", "2.0 GiB", "0.13 s"],
        id="piece",
    ),
    pytest.param(
        PieceRetried(samples=64, used_bytes=GIB, budget_bytes=2 * GIB, reason="OutOfMemoryError: CUDA out of memory."),
        logging.WARNING,
        ["64", "1.0 GiB", "2.0 GiB", "OutOfMemoryError", "CUDA"],
        id="retried piece",
    ),
    pytest.param(
        MAPPED, logging.INFO, ["3000", "13", "2", "287", "NVIDIA", "L4", "1.0 GiB", "2.0 GiB", "2.0 s"], id="map"
    ),
    pytest.param(
        MAPPED.model_copy(update={"samples": 0, "pieces": 0, "smallest": 0, "largest": 0, "peak_bytes": 0}),
        logging.INFO,
        ["0", "NVIDIA", "L4", "2.0 s"],
        id="map of nothing",
    ),
]


def _types_of_events() -> set[type[Event]]:
    public = (getattr(events, name) for name in events.__all__)
    return {kind for kind in public if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event}


def test_the_table_above_has_every_event() -> None:
    """A new event cannot be added without its line being looked at here."""
    assert {type(case.values[0]) for case in EVENTS} == _types_of_events()


@pytest.mark.parametrize(("event", "level", "names"), EVENTS)
def test_each_event_is_one_log_line(
    event: Event, level: int, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One event costs one line on logger ``autobatch``, at its own level, with its numbers in it."""
    with caplog.at_level(logging.DEBUG, logger="autobatch"):
        emit(event)
    ((logger, logged, line),) = caplog.record_tuples
    assert (logger, logged) == ("autobatch", level)
    assert [name for name in names if name not in line] == []
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
