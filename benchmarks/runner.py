"""What ``Runner`` costs beside a hand-written accumulation loop, in time and in memory.

    python benchmarks/runner.py [--seconds 6]

Steps of about 5 and 50 ms, within the default budget and within a passed one, which a CPU enforces in every step;
and the peak of four kinds of model. On a GPU the allocator enforces both for free.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from models import Batch, Training, classify, make_mlp, make_trainings
from quiet import undisturbed
from tables import Goal, Table, judge
from torch import nn

import autobatch
from autobatch.memory.cpu import CpuDevice

__all__ = [
    "CASES",
    "Case",
    "Comparison",
    "compare",
    "fit_plan",
    "make_batch",
    "measure_peaks",
    "measure_times",
    "pair_up",
]

_MICRO_BATCHES = 4
_SECONDS = 6.0
"""For one case: 600 pairs of 5 ms, 60 of 50 ms."""
_WARM_PAIRS = 6
"""Left out: in the first steps the optimizer makes its state and the runner counts in any case."""

_CALIBRATION = 40
"""Steps by which the number of samples is chosen."""

_SHORT_MS, _LONG_MS = 5, 50
_WANTED = {_SHORT_MS: 1.08, _LONG_MS: 1.01}
"""By the length of the step, within the default budget. To enforce one that was passed costs what it costs."""


@dataclass(frozen=True)
class Case:
    """An MLP of ``depth`` layers, and how long one step of the hand-written loop is to take."""

    width: int
    depth: int
    milliseconds: float
    passed: bool


CASES = tuple(
    Case(width, depth, milliseconds, passed)
    for passed in (False, True)
    for width, depth, milliseconds in ((256, 2, _SHORT_MS), (512, 10, 1.2 * _LONG_MS))
)


@dataclass(frozen=True)
class Comparison:
    """Pairs of one step of each, in seconds: ``(by hand, runner)``."""

    pairs: Sequence[tuple[float, float]]

    @property
    def hand_ms(self) -> float:
        """The hand-written loop's step, the median."""
        return 1000 * statistics.median(by_hand for by_hand, _ in self.pairs)

    @property
    def ratios(self) -> list[float]:
        """The runner's time over the loop's, pair by pair, ascending."""
        return sorted(ours / by_hand for by_hand, ours in self.pairs)

    @property
    def ratio_of_sums(self) -> float:
        """All of the runner's time over all of the loop's: also of the few that were interrupted."""
        by_hand, ours = map(sum, zip(*self.pairs, strict=True))
        return ours / by_hand

    def quartiles(self) -> tuple[float, float, float]:
        """A quarter, half and three quarters of the ratios are at most these."""
        lower, median, upper = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return lower, median, upper

    def interval(self) -> tuple[float, float]:
        """Between these lies the true median in 95 of 100 runs, by the binomial law of ranks."""
        count = len(self.pairs)
        reach = 0.98 * math.sqrt(count)
        return self.ratios[max(0, math.floor(count / 2 - reach))], self.ratios[min(count - 1, int(count / 2 + reach))]


def measure_times(cases: Sequence[Case] = CASES, seconds: float = _SECONDS) -> Table:
    """Each case, for so many seconds, as a table with the goals of its length of step."""
    compared = [(case, compare(case, round(500 * seconds / case.milliseconds))) for case in cases]
    return Table(
        "Time: Runner beside a hand-written loop",
        f"MLPs of Linear and GELU, AdamW, {_MICRO_BATCHES} micro-batches; {torch.get_num_threads()} thread(s). The "
        f"number of samples is chosen on the spot so that the loop takes as long as the case asks. Both run in turn in "
        f"one process, every other pair in the opposite order, and the ratio is taken in each pair. A CPU "
        f"enforces a budget that was passed in each step, by counting what every operator returns.",
        (
            *("step by hand", "budget", "pairs", "runner / by hand, median", "quartiles"),
            *("95 % interval of the median", "of the sums"),
        ),
        [_row(case, comparison) for case, comparison in compared],
        [_goal(comparison) for case, comparison in compared if not case.passed],
    )


def compare(case: Case, pairs: int) -> Comparison:
    """Time the loop and the runner in turn on the same model and batch."""
    torch.manual_seed(0)
    model = make_mlp(case.width, case.depth)
    # A rate that leaves the weights be: what is timed must not drift towards tiny numbers, which are slow.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-7)
    with undisturbed():
        batch = make_batch(case, model, optimizer)
    plan = fit_plan(model, optimizer, batch, passed=case.passed)
    runner = autobatch.Runner(plan, model, step=classify, optimizer=optimizer)
    by_hand = write_loop(model, optimizer, batch)
    with undisturbed():
        pairs_timed = pair_up(by_hand, lambda: runner.step(batch), pairs + _WARM_PAIRS)
    last = runner.step(batch)
    if last.retries or len(last.micro_batch_sizes) != _MICRO_BATCHES:
        raise RuntimeError(f"the runner did other work than the loop: {last.micro_batch_sizes}, {last.retries} retries")
    return Comparison(pairs_timed[_WARM_PAIRS:])


def pair_up(first: Callable[[], object], second: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """Seconds of each, in turn; every other pair begins with the second, so that neither always follows the other."""
    timed = []
    for pair in range(pairs):
        if pair % 2:
            late, early = _seconds_of(second), _seconds_of(first)
        else:
            early, late = _seconds_of(first), _seconds_of(second)
        timed.append((early, late))
    return timed


def write_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], None]:
    """The loop that one would write by hand for a mean over samples."""
    inputs, labels = batch
    size = -(-len(labels) // _MICRO_BATCHES)

    def by_hand() -> None:
        for part in zip(inputs.split(size), labels.split(size), strict=True):
            (classify(model, part) * (len(part[1]) / len(labels))).backward()
        optimizer.step()
        optimizer.zero_grad()  # here, not before: gradients left behind would become part of the runner's next step

    return by_hand


def measure_peaks(samples: int = 64, width: int = 32) -> Table:
    """The peak of one step of each kind of model, the loop's and the runner's, both counted by the same device."""
    with undisturbed():
        peaks = [(training.name, *_peaks_of(training)) for training in make_trainings(samples, width, depth=2)]
    worst = max(ours / by_hand for _, by_hand, ours in peaks)
    return Table(
        "Peak memory: Runner beside a hand-written loop",
        "Most bytes in tensors at once during one step with AdamW, its state there; parameters, gradients, state, "
        f"activations and the batch of {samples} samples ({_MICRO_BATCHES} micro-batches) are all counted.",
        ("model", "by hand, bytes", "runner, bytes", "runner / by hand"),
        [(name, f"{by_hand:,}", f"{ours:,}", f"{ours / by_hand:.4f}") for name, by_hand, ours in peaks],
        [Goal("peak memory beside a hand-written loop", "1.00", f"{worst:.4f}, the worst", judge(worst < 1.005))],
    )


def _peaks_of(training: Training) -> tuple[int, int]:
    model, batch, device = training.model, training.batch, CpuDevice()
    optimizer = torch.optim.AdamW(model.parameters())
    runner = autobatch.Runner(fit_plan(model, optimizer, batch, passed=True), model, step=classify, optimizer=optimizer)
    runner.step(batch)  # makes the optimizer's state
    ours = runner.step(batch).peak_bytes
    by_hand = write_loop(model, optimizer, batch)
    with device.limit(2**62):
        device.reset_peak()
        by_hand()
        return device.usage().peak_allocated, ours


def make_batch(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Batch:
    """As many samples as make the loop's step as long as is asked for; the update's share does not grow with them."""
    samples = 16 * _MICRO_BATCHES
    for _ in range(6):
        batch = torch.randn(samples, case.width), torch.randint(10, (samples,))
        by_hand = write_loop(model, optimizer, batch)
        # The median of many: a process's first steps are slower, and a step that is too short makes the ratio larger.
        milliseconds = 1000 * statistics.median(_seconds_of(by_hand) for _ in range(_CALIBRATION))
        if 1 <= milliseconds / case.milliseconds < 1.1:
            break
        grown = samples * 1.05 * case.milliseconds / milliseconds
        samples = _MICRO_BATCHES * max(1, min(2048, math.ceil(grown / _MICRO_BATCHES)))
    return batch


def fit_plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    passed: bool,
    weigh: Callable[[Batch], float] | None = None,
) -> autobatch.Plan:
    """A plan of four micro-batches, within a budget that is passed or the default."""
    samples = len(batch[1])

    def fit(budget: int | None) -> autobatch.Plan:
        return autobatch.fit(
            model,
            samples,
            batch=batch,
            step=classify,
            optimizer=optimizer,
            weigh=weigh,
            max_micro_batch=-(-samples // _MICRO_BATCHES),
            budget=budget,
            progress=False,
        )

    plan = fit(None)
    return fit(2 * plan.peak_bytes) if passed else plan


def _seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _row(case: Case, comparison: Comparison) -> tuple[str, ...]:
    lower, median, upper = comparison.quartiles()
    low, high = comparison.interval()
    return (
        f"{comparison.hand_ms:.1f} ms ({case.depth} x {case.width})",
        "passed" if case.passed else "default",
        str(len(comparison.pairs)),
        f"{median:.3f}",
        f"{lower:.3f} to {upper:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{comparison.ratio_of_sums:.3f}",
    )


def _goal(comparison: Comparison) -> Goal:
    # By what the step did take: a goal for 50 ms says nothing of a machine on which no step is as long.
    wanted = _WANTED[_LONG_MS if comparison.hand_ms >= _LONG_MS else _SHORT_MS]
    (low, high), (_, median, _) = comparison.interval(), comparison.quartiles()
    return Goal(
        f"time of a step of {comparison.hand_ms:.1f} ms beside a hand-written loop",
        f"at most {wanted:.2f}",
        f"{median:.3f}",
        judge(median <= wanted, sure=not low <= wanted <= high),
    )


def main() -> None:
    """Time and memory."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=_SECONDS, help="for a case")
    torch.set_num_threads(1)
    print(measure_times(seconds=arguments.parse_args().seconds))
    print(measure_peaks())


if __name__ == "__main__":
    main()
