"""Finds choices of blocks that may make a step faster where its micro-batches fit plainly, without torch.

1. Recomputed blocks leave room for more samples in a micro-batch. That pays if each micro-batch has a fixed cost
   that is larger than the cost of recomputation.
2. ``read_costs`` draws a line through the times of two plain trials. It says what a micro-batch and a sample cost.
3. ``faster_choices`` yields, for each larger size, the choice with the least recomputation whose predicted peak fits.
   Those whose predicted step is faster are worth a trial, the fastest first.

A prediction is only a filter: ``saved_time`` compares measured times, and decides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from autobatch._bounds import SHORTEST
from autobatch.records import Trial, Way
from autobatch.strategies.choice import BlockRun, Ways, again_seconds, choices, predict_peak

MARGIN = 0.05
"""Part of a step's time that recomputation has to save: less is within the noise of a few trials."""


class StepCosts(NamedTuple):
    """Predicted time of a micro-batch: so many seconds whatever its samples are, and so many for each sample."""

    fixed: float
    each: float

    def predict(self, size: int) -> float:
        return self.fixed + self.each * size


class FasterChoice(NamedTuple):
    """A larger micro-batch with recomputed blocks, and the predicted time of a step in such micro-batches."""

    size: int
    ways: Ways
    seconds: float


def read_costs(trials: Sequence[Trial], size: int) -> StepCosts:
    """Return the costs that trials of ``size`` and of the largest size up to half of it have shown.

    Without a smaller one a micro-batch is taken to have a fixed cost alone.
    """
    times: dict[int, float] = {}
    for trial in trials:
        if trial.outcome == "fits":
            known = times.get(trial.micro_batch_size, trial.pass_seconds)
            times[trial.micro_batch_size] = min(known, trial.pass_seconds)
    smaller = max((one for one in times if 2 * one <= size), default=0)
    more = max(times[size] - times[smaller], 0.0) if smaller else 0.0
    each = min(more / (size - smaller), times[size] / size)
    return StepCosts(fixed=times[size] - each * size, each=each)


def faster_choices(
    runs: Sequence[BlockRun],
    allowed: Collection[Way],
    costs: StepCosts,
    *,
    head_bytes: int,
    room: int,
    sizes: Sequence[int],
    measured_size: int,
    samples: int,
    seconds: float,
) -> list[FasterChoice]:
    """Return choices whose step of so many samples is predicted to take less than these seconds, the fastest first.

    ``runs`` and ``head_bytes`` are of a micro-batch of ``measured_size``; ``room`` is what its activations may take.
    """
    found, reached = list[FasterChoice](), 0
    for chosen in choices(runs, allowed):
        peak = max(predict_peak(runs, chosen, head_bytes), 1)
        reach = max((size for size in sizes if size * peak <= room * measured_size), default=0)
        if reach <= reached:
            continue
        reached = reach
        more = again_seconds(runs, chosen) / max(costs.predict(measured_size), SHORTEST)
        then = count_micro_batches(samples, reach) * costs.predict(reach) * (1 + more)
        if then < seconds:
            found.append(FasterChoice(size=reach, ways=chosen, seconds=then))
    return sorted(found, key=lambda one: one.seconds)


def count_micro_batches(samples: int, size: int) -> int:
    return -(-samples // size)


def saved_time(plain: Trial, trial: Trial, samples: int) -> float:
    """Return the part of a plain step's time that a step in the other trial's micro-batches saves, as measured.

    A last smaller micro-batch counts in proportion in the plain step, and whole in the other one.
    """
    before = samples / plain.micro_batch_size * plain.pass_seconds
    return 1 - count_micro_batches(samples, trial.micro_batch_size) * trial.pass_seconds / max(before, SHORTEST)
