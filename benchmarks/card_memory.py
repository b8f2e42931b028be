"""Compares what training reserves on this machine's card with what is predicted for it, to the byte.

    python benchmarks/card_memory.py [--models gpt2 bert] [--sizes 2 32 100]

Covers two optimizer steps of two micro-batches in a plain loop, bfloat16 gradients added up in float32 as the Runner
does, each size in a cache that was emptied; fixed and expandable segments. No time is measured, so a card that stands
in for a real one serves as well: sizes are torch's own allocator's. Does not cover what lies outside of the allocator,
nor steps that the Runner records: under their dispatch mode torch copies where it else writes in place.
"""
# ruff: noqa: SLF001 - torch has no public name to drop cuBLAS's workspaces

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import child
import torch
from card_models import TRAININGS, Training
from machine import describe_card
from tables import Table
from torch import nn

from autobatch.batch.samples import describe
from autobatch.batch.tree import map_tensors
from autobatch.memory.cuda import uses_expandable_segments
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.prior import read_card
from autobatch.prediction.tracing.trace import trace_timeline
from autobatch.step.workload import Workload
from autobatch.undo.gradients import Float32Sums

__all__ = ["Cell", "measure", "measure_cells"]

_SIZES = (2, 32, 100, 1000)
_MOST_BYTES = 12 * 2**30
_CONFIGURATION = "PYTORCH_ALLOC_CONF"


class Cell(NamedTuple):
    """One model at one size."""

    model: str
    size: int
    segments: str
    allocated: int
    predicted_allocated: int
    reserved: int
    predicted_reserved: int

    @property
    def error(self) -> float:
        """Of the reserved bytes, as a fraction of the real ones."""
        return self.predicted_reserved / self.reserved - 1


def measure_cells(names: Sequence[str], sizes: Sequence[int] = _SIZES) -> Iterator[Cell]:
    """Each model at each size that takes at most 12 GiB, with the segments that this process's environment asks for."""
    segments = "expandable" if uses_expandable_segments() else "fixed"
    for name in names:
        training = TRAININGS[name]
        estimate = _predict(training)
        for size in sizes:
            if estimate.reserved(size) > _MOST_BYTES:
                break
            real = _train(training, size)
            yield Cell(name, size, segments, real[0], estimate.allocated(size), real[1], estimate.reserved(size))


def _predict(training: Training) -> Estimate:
    model, card = training.make_model(), read_card()
    workload = Workload(model, training.step, None, training.make_optimizer(model))
    timeline = run_apart(lambda: trace_timeline(workload, describe(training.make_batch(2))))
    estimate = Estimate(timeline, expandable_segments=uses_expandable_segments())
    return estimate.on_card(card)


def _train(training: Training, size: int) -> tuple[int, int]:
    """Most bytes allocated and reserved, from a card without this process's tensors on."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _run_steps(training, size)
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def _run_steps(training: Training, size: int) -> None:
    model = training.make_model().cuda()
    optimizer, sums = training.make_optimizer(model), Float32Sums()
    for _ in range(2):
        sums.begin([*model.parameters()])
        for _ in range(2):
            _run_micro_batch(training, model, size)
        sums.write()
        sums.end()
        optimizer.step()
        optimizer.zero_grad()


def _run_micro_batch(training: Training, model: nn.Module, size: int) -> None:
    """A function of its own: what it made is gone when the next one begins."""
    batch = map_tensors(training.make_batch(size), torch.Tensor.cuda)
    loss = training.step(model, batch)
    loss.backward(torch.full_like(loss, 0.5))  # as the Runner divides


def _show(cells: Sequence[Cell]) -> Table:
    rows = [
        (cell.model, str(cell.size), cell.segments, f"{cell.reserved:,}", f"{cell.error:+.1%}" if cell.error else "0")
        for cell in cells
    ]
    card = describe_card(torch.cuda.get_device_name())
    errors = [abs(cell.error) for cell in cells]
    exact = sum(cell.predicted_reserved == cell.reserved for cell in cells)
    explanation = (
        f"Two optimizer steps of two micro-batches on {card} with torch {torch.__version__}. "
        f"Of {len(cells)} cells {exact} are exact; the error is {statistics.mean(errors):.2%} in the mean and "
        f"{max(errors):.1%} at most."
    )
    columns = ("model", "samples", "segments", "reserved, bytes", "predicted")
    return Table(f"Reserved on {card}, beside the prediction", explanation, columns, rows)


def measure(models: Sequence[str] = tuple(TRAININGS), sizes: Sequence[int] = _SIZES) -> Table:
    """Each model at each size, with fixed and with expandable segments."""
    return _show([cell for segments in ("fixed", "expandable") for cell in _measure_apart(segments, models, sizes)])


def _measure_apart(segments: str, models: Sequence[str], sizes: Sequence[int]) -> list[Cell]:
    """In a process of its own: torch's allocator reads its settings once."""
    settings = {_CONFIGURATION: f"expandable_segments:{segments == 'expandable'}"}
    lines = child.read_lines(__file__, "--cells", "--models", *models, "--sizes", *sizes, **settings)
    cells = [line.split() for line in lines]
    return [Cell(cell[0], int(cell[1]), cell[2], *map(int, cell[3:])) for cell in cells]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--models", nargs="+", default=[*TRAININGS], choices=[*TRAININGS])
    parser.add_argument("--sizes", nargs="+", type=int, default=[*_SIZES])
    parser.add_argument("--cells", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cells:
        for cell in measure_cells(arguments.models, arguments.sizes):
            print(*cell)
        child.end()
    print(measure(arguments.models, arguments.sizes))


if __name__ == "__main__":
    _main()
