"""How near predictions come to peaks of training steps that others measured.

    make accuracy TABLE=path/to/table.csv [MODELS=100]

Covers a table with the columns ``model, batch, peak_mib``: peaks of a card's memory in training steps of timm models
in float32 with SGD and momentum, whole process. The table is not part of this repository. What a process takes outside
the allocator is not known for its card, so it is one constant, fitted on one half of the models together with the rule
for convolutions and scored on the other half, by a hash of the model's name. Does not cover other optimizers and
precisions, which the table has not.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from tables import Table, write_part
from torch import nn

from autobatch.errors import CannotPredict
from autobatch.prediction.estimate import COPIES, Estimate
from autobatch.prediction.isolation import run_apart
from autobatch.prediction.timeline import Timeline
from autobatch.prediction.tracing.trace import Circumstances, trace_timeline
from autobatch.workload.batches import describe
from autobatch.workload.step import Workload

__all__ = ["Cell", "Constants", "fit_constants", "measure", "score"]

_MIB = 2**20
_FULL_CARD_MIB = 38_500
"""Peaks of the table's 40 GB card near its end are cut off there."""
_MARGINS = (0.0, 0.05, 0.10, 0.15)


@dataclass(frozen=True)
class Cell:
    """One measured peak, and what the simulation knows of it; sizes in MiB."""

    model: str
    batch: int
    peak: float
    reserved: float
    convolution: float
    grouped: bool
    seconds: float


@dataclass(frozen=True)
class Constants:
    """MiB outside the allocator, and copies of the largest convolution's input and output."""

    outside: float
    copies: float

    def predict(self, cell: Cell) -> float:
        """The whole process's peak, in MiB."""
        return self.outside + cell.reserved + self.copies * cell.convolution


def is_held_out(model: str) -> bool:
    """Half of all models, by a hash of the name: the same ones always."""
    return hashlib.sha256(model.encode()).digest()[-1] % 2 == 1


def read_table(path: Path, models: int) -> dict[str, dict[int, float]]:
    """Peaks by model and batch, of so many models in the order of a hash, so that all families are among them."""
    table: defaultdict[str, dict[int, float]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if float(row["peak_mib"]) <= _FULL_CARD_MIB:
                table[row["model"]][int(row["batch"])] = float(row["peak_mib"])
    names = sorted(table, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    return {name: table[name] for name in names[:models]}


def trace_model(name: str) -> tuple[Timeline, bool, float]:
    """A timm model's step, whether it has grouped convolutions that are not depthwise, and the seconds of the trace."""
    import timm  # noqa: PLC0415 - only with the table, and after torchvision was stubbed

    model = timm.create_model(name, pretrained=False)
    size = model.pretrained_cfg.get("input_size", (3, 224, 224))
    grouped = any(isinstance(m, nn.Conv2d) and 1 < m.groups < m.in_channels for m in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    workload = Workload(model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), None, optimizer)
    layout = describe((torch.empty(2, *size), torch.zeros(2, dtype=torch.long)))
    started = time.perf_counter()
    # The table's steps are not accumulated: one micro-batch each.
    timeline = run_apart(lambda: trace_timeline(workload, layout, Circumstances(micro_batches=1)))
    return timeline, grouped, time.perf_counter() - started


def cells_of(name: str, peaks: dict[int, float], workspace_bytes: int) -> list[Cell]:
    """All measured cells of a model, simulated."""
    timeline, grouped, seconds = trace_model(name)
    started = time.perf_counter()
    estimate = Estimate(timeline, workspace_bytes)
    found = []
    for batch, peak in peaks.items():
        convolution = estimate.convolution_bytes(batch) / COPIES
        reserved = estimate.reserved(batch) - estimate.convolution_bytes(batch)
        found.append(Cell(name, batch, peak, reserved / _MIB, convolution / _MIB, grouped, seconds))
    more = (time.perf_counter() - started) / len(found)
    return [Cell(**{**cell.__dict__, "seconds": seconds + more}) for cell in found]


def fit_constants(cells: Sequence[Cell], rounds: int = 60) -> Constants:
    """Least absolute relative error over the cells, by least squares that are weighed anew in each round."""
    inputs = torch.tensor([[1.0, cell.convolution] for cell in cells], dtype=torch.float64)
    wanted = torch.tensor([cell.peak - cell.reserved for cell in cells], dtype=torch.float64)
    peaks = torch.tensor([cell.peak for cell in cells], dtype=torch.float64)
    weights = 1 / peaks
    for _ in range(rounds):
        solution = torch.linalg.lstsq(inputs * weights[:, None], (wanted * weights)[:, None]).solution[:, 0]
        errors = ((inputs @ solution - wanted) / peaks).abs() + 1e-3
        weights = 1 / (peaks * errors.sqrt())
    return Constants(float(solution[0]), float(solution[1]))


def score(cells: Sequence[Cell], constants: Constants) -> list[str]:
    """Cells, median and 90th percentile of the relative error, and the share under-estimated at each margin."""
    errors = sorted(abs(constants.predict(cell) / cell.peak - 1) for cell in cells)
    under = [
        sum(constants.predict(cell) * (1 + margin) < cell.peak for cell in cells) / len(cells) for margin in _MARGINS
    ]
    return [
        str(len(cells)),
        f"{statistics.median(errors):.1%}",
        f"{errors[int(0.9 * len(errors))]:.1%}",
        *(f"{share:.1%}" for share in under),
    ]


def worst(cells: Sequence[Cell], constants: Constants, count: int = 10) -> list[list[str]]:
    """The models with the largest errors, one row each, with what is known of the reason."""
    by_model: dict[str, Cell] = {}
    for cell in cells:
        known = by_model.get(cell.model)
        if known is None or _error(cell, constants) > _error(known, constants):
            by_model[cell.model] = cell
    rows = sorted(by_model.values(), key=lambda cell: -_error(cell, constants))[:count]
    return [
        [cell.model, str(cell.batch), f"{cell.peak:.0f}", f"{constants.predict(cell):.0f}", _reason(cell, cells)]
        for cell in rows
    ]


def _error(cell: Cell, constants: Constants) -> float:
    return abs(constants.predict(cell) / cell.peak - 1)


def _reason(cell: Cell, cells: Sequence[Cell]) -> str:
    own = sorted((other.batch, other.peak) for other in cells if other.model == cell.model)
    steps = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(own)]
    if len(steps) > 1 and max(steps) > 2 * max(min(steps), 1e-9):
        return "the measured peak is no line in the batch: a workspace that one size takes and another does not"
    return "grouped convolutions: cuDNN's workspaces for them are not known" if cell.grouped else "not known"


def measure(path: Path, models: int, workspace_bytes: int) -> tuple[Table, Table]:
    """Both tables: scores of the fitted and the held-out half, and the worst ten."""
    cells: list[Cell] = []
    failed: list[str] = []
    for name, peaks in read_table(path, models).items():
        try:
            cells += cells_of(name, peaks, workspace_bytes)
        except CannotPredict as error:
            failed.append(f"{name}: {error}")
        print(f"{name:48s}{cells[-1].seconds if cells else 0:6.1f} s", flush=True)
    fitted = [cell for cell in cells if not is_held_out(cell.model)]
    held_out = [cell for cell in cells if is_held_out(cell.model)]
    own = fit_constants(fitted)
    shipped = Constants(statistics.median(c.peak - c.reserved - COPIES * c.convolution for c in fitted), COPIES)
    plain = Constants(statistics.median(cell.peak - cell.reserved for cell in fitted), 0.0)
    rows = [
        [f"{name}: {c.outside:.0f} MiB outside, {c.copies:.2f} copies", half, *score(part, c)]
        for name, c in (("fitted", own), ("as shipped", shipped), ("without convolutions", plain))
        for half, part in (("fitted", fitted), ("held out", held_out))
    ]
    seconds = sorted({cell.model: cell.seconds for cell in cells}.values())
    accuracy = Table(
        "Prediction beside published peaks",
        f"{len({cell.model for cell in cells})} timm models, each at up to 5 batches; a prediction took "
        f"{statistics.median(seconds):.1f} s in the median and {seconds[-1]:.1f} s at most, in a child process, on "
        f"{torch.get_num_threads()} thread(s). {len(failed)} models could not be traced{': ' * bool(failed)}"
        f"{'; '.join(failed)}.",
        ("constants", "half", "cells", "median error", "90 %", *(f"under at +{margin:.0%}" for margin in _MARGINS)),
        rows,
        [],
    )
    return accuracy, Table(
        "The worst ten of all models",
        "Each at its worst batch, in MiB, with the constants fitted on one half.",
        ("model", "batch", "measured", "predicted", "reason"),
        worst(cells, own),
        [],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; with ``--output`` also write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="a CSV file with the columns model, batch, peak_mib")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.table is None or not options.table.is_file():
        sys.exit(
            f"--table={options.table}: this needs a CSV file with the columns model, batch, peak_mib (peaks of "
            f"training steps of timm models in float32 with SGD and momentum, in MiB, of the whole process on one "
            f"card), such as can be had from the tables of GPUMemNet; none is part of this repository"
        )
    import torchvision_stub  # noqa: F401, PLC0415 - timm asks for torchvision when it is imported

    tables = measure(options.table, options.models, workspace_bytes=8_519_680)
    page = "\n\n".join(str(table) for table in tables)
    print(page)
    if options.output:
        write_part(options.output, "predictions", f"# Predictions\n\nMeasured by `make accuracy`.\n\n{page}")


if __name__ == "__main__":
    main()
