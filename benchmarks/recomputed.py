"""How many samples a step runs in all when memory ends once in it, for the ``Runner`` and three ways by hand.

    python benchmarks/recomputed.py [--every 3]

Covers one out-of-memory error at one operation after the other of an accumulation of 16 samples in micro-batches of 4,
for four models. Does not cover errors inside the optimizer's update, where nothing can be retried.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from models import Batch, Training, classify, make_trainings
from quiet import undisturbed
from tables import Goal, Table, judge
from torch import nn

import autobatch
from autobatch.testing import FakeDevice, oom_at

__all__ = ["SAMPLES", "Outcome", "begin_again", "measure", "redo_naively", "survive_everywhere"]

SAMPLES, MICRO_BATCH = 16, 4
_EVERY = 3
"""Each operation is a dispatch into Python, so one accumulation takes 30 ms and all positions take minutes."""
_EXACT = 1e-9
"""Relative difference from the whole batch's gradient, in float64."""

Step = Callable[[nn.Module, Batch], torch.Tensor]
Way = Callable[[nn.Module, Batch, Step], None]
"""Accumulates the gradient of the mean over a batch, whatever happens: ``way(model, batch, step)``."""


@dataclass(frozen=True)
class Outcome:
    """One accumulation in which memory ended once: samples run in all, and the gradient's relative error."""

    samples: int
    error: float


def begin_again(model: nn.Module, batch: Batch, step: Step) -> None:
    """Whatever failed, drop all gradients and begin with three quarters of the size."""
    done, size = 0, MICRO_BATCH
    while done < SAMPLES:
        try:
            done += _add_gradient(model, _take(batch, done, size), step)
        except torch.OutOfMemoryError:
            model.zero_grad()
            done, size = 0, size * 3 // 4


def redo_naively(model: nn.Module, batch: Batch, step: Step) -> None:
    """Go on with smaller ones, on gradients that may already have a part of the micro-batch that failed."""
    done, size = 0, MICRO_BATCH
    while done < SAMPLES:
        try:
            done += _add_gradient(model, _take(batch, done, size), step)
        except torch.OutOfMemoryError:
            size = size * 3 // 4


_BY_HAND: Mapping[str, Way] = {"restart": begin_again, "naive": redo_naively}


def bind_runner(training: Training) -> Way:
    """The ``Runner``'s way, on a device that has room for all, so that only the planned error ends its memory."""
    device = FakeDevice(lambda samples: 1 + samples, total_bytes=10**6)
    plan = autobatch.fit(
        training.model,
        SAMPLES,
        batch=training.batch,
        step=classify,
        device=device,
        max_micro_batch=MICRO_BATCH,
        progress=False,
    )

    def accumulate(model: nn.Module, batch: Batch, step: Step) -> None:
        autobatch.Runner(plan, model, step=step, optimizer=None, device=device).accumulate(batch)

    return accumulate


def survive(way: Way, training: Training, expected: Sequence[torch.Tensor], position: int) -> tuple[Outcome, int]:
    """One accumulation with an error at one operation, and how many operations it had."""
    samples = 0

    def step(model: nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal samples
        samples += len(batch[1])
        return classify(model, batch)

    training.model.zero_grad()
    with oom_at(position) as planned:
        way(training.model, training.batch, step)
    return Outcome(samples, _relative_error(training.model, expected)), planned.operations


def survive_everywhere(way: Way, training: Training, every: int = 1) -> list[Outcome]:
    """The outcomes of an error at each operation of the way's own clean accumulation, or at each so-manyth."""
    training.model.zero_grad()
    classify(training.model, training.batch).backward()
    expected = [p.grad for p in training.model.parameters() if p.grad is not None]
    clean, operations = survive(way, training, expected, position=10**9)
    if clean.samples != SAMPLES or clean.error > _EXACT:
        raise RuntimeError(
            f"{training.name}: without an error {clean.samples} samples ran, relative error {clean.error}"
        )
    return [survive(way, training, expected, position)[0] for position in range(1, operations + 1, every)]


def measure(every: int = _EVERY, trainings: Sequence[Training] = ()) -> Table:
    """Every way on every model.

    Args:
        every: Put the error at each so-manyth operation only.
        trainings: Other models than the four, in float64, with batches of ``SAMPLES``.
    """
    outcomes: dict[str, dict[str, list[Outcome]]] = {}
    with undisturbed():
        for training in trainings or make_trainings(SAMPLES, width=8, depth=1, dtype=torch.float64):
            ways = {"Runner": bind_runner(training), **_BY_HAND}
            outcomes[training.name] = {name: survive_everywhere(way, training, every) for name, way in ways.items()}
    together = {
        name: [outcome for by_way in outcomes.values() for outcome in by_way[name]] for name in ("Runner", *_BY_HAND)
    }
    rows = [(name, *map(_describe, by_way.values())) for name, by_way in {**outcomes, "all": together}.items()]
    return Table(
        "Samples run after an out-of-memory error",
        f"One error in an accumulation of {SAMPLES} samples in micro-batches of {MICRO_BATCH}, at operation 1, "
        f"{1 + every}, {1 + 2 * every} and so on, in float64; without an error {SAMPLES} samples run. Each cell: the "
        f"mean of the samples run in all, and how many gradients were *wrong*, further than a relative {_EXACT:g} from "
        "the whole batch's. Two loops by hand go on with three quarters of the size: *restart* drops all gradients, "
        "*naive* never does.",
        ("model", "Runner", *(f"by hand: {name}" for name in _BY_HAND)),
        rows,
        _judge(together["Runner"], together["restart"]),
    )


def _judge(ours: Sequence[Outcome], by_hand: Sequence[Outcome]) -> list[Goal]:
    mean, wanted = _mean(ours), _mean(by_hand)
    what = f"samples run in a step of {SAMPLES} with one error"
    return [
        Goal(
            f"{what}, beside 'restart' by hand",
            f"at most {wanted:.2f} (1 % more)",
            f"{mean:.2f}",
            judge(mean <= 1.01 * wanted),
        ),
        Goal(
            "gradients after one error in an accumulation", "0 wrong", f"{_wrong(ours)} wrong", judge(not _wrong(ours))
        ),
    ]


def _take(batch: Batch, start: int, size: int) -> Batch:
    inputs, labels = batch
    return inputs[start : start + size], labels[start : start + size]


def _add_gradient(model: nn.Module, part: Batch, step: Step) -> int:
    (step(model, part) * (len(part[1]) / SAMPLES)).backward()
    return len(part[1])


def _relative_error(model: nn.Module, expected: Sequence[torch.Tensor]) -> float:
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    distance = sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))
    return (distance / sum(float(b.square().sum()) for b in expected)) ** 0.5


def _describe(outcomes: Sequence[Outcome]) -> str:
    return f"{_mean(outcomes):.2f}, {_wrong(outcomes)} of {len(outcomes)} wrong"


def _mean(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.samples for outcome in outcomes) / len(outcomes)


def _wrong(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.error > _EXACT for outcome in outcomes)


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--every", type=int, default=_EVERY, help="put the error at each so-manyth operation only")
    print(measure(arguments.parse_args().every))


if __name__ == "__main__":
    main()
