"""How near predictions come to peaks of training steps that others measured.

    make accuracy TABLE=path/to/table.csv [MODELS=100]

Covers the tables of it: errors with what lies outside the allocator fitted on one half of the models and scored on the
other half, by a hash of the model's name; as ``predict`` ships it, on the table's card; by family; and the worst ten.
The table of peaks is not part of this repository (``peaks``). Does not cover other optimizers and precisions, which it
has not.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from machine import describe_machine
from peaks import Cell, choose, families, read_table, simulate
from tables import Goal, Table, judge, show_goals, write_part

from autobatch.errors import InvalidArgument
from autobatch.prediction.cards import find_gpu
from autobatch.prediction.predict import MARGIN
from autobatch.prediction.workspaces import Workspaces

__all__ = ["SHIPPED", "Constants", "fit_constants", "measure", "score"]

_CARD = find_gpu("A100-40GB")
_MARGINS = (0.0, 0.05, 0.10, 0.15)
_FEWEST_OF_A_FAMILY = 3
_MOST_ERROR, _MOST_UNDER, _MOST_SECONDS, _MOST_CPU_SECONDS = 0.03, 0.05, 2.0, 2.5


@dataclass(frozen=True)
class Constants:
    """MiB outside the allocator, and whether what cuDNN takes is counted inside it."""

    outside: float
    counts_cudnn: bool = True

    def predict(self, cell: Cell) -> float:
        """The whole process's peak, in MiB."""
        return self.outside + (cell.reserved if self.counts_cudnn else cell.plain)

    def error(self, cell: Cell) -> float:
        """Relative to the measured peak; negative where too little was predicted."""
        return self.predict(cell) / cell.peak - 1

    def inner_error(self, cell: Cell) -> float:
        """The same relative to what is left of the measured peak without the part outside the allocator."""
        return (self.predict(cell) - cell.peak) / max(cell.peak - self.outside, 1.0)


SHIPPED = Constants(_CARD.context_bytes / 2**20)
"""What ``predict`` says of the table's card."""


def is_held_out(model: str) -> bool:
    """Half of all models, by a hash of the name: the same ones always."""
    return hashlib.sha256(model.encode()).digest()[-1] % 2 == 1


def fit_constants(cells: Sequence[Cell]) -> Constants:
    """The part outside with the least absolute relative error over the cells: a median, each weighed by its peak."""
    outside = sorted((cell.peak - cell.reserved, 1 / cell.peak) for cell in cells)
    half, weighed = sum(weight for _, weight in outside) / 2, accumulate(weight for _, weight in outside)
    index = next(index for index, weight in enumerate(weighed) if weight >= half)
    return Constants(outside[index][0])


def score(cells: Sequence[Cell], constants: Constants) -> tuple[str, ...]:
    """How many cells, median and 90th percentile of the error, its median inside the allocator, shares too low."""
    errors = sorted(abs(constants.error(cell)) for cell in cells)
    inner = statistics.median(abs(constants.inner_error(cell)) for cell in cells)
    return (
        str(len(cells)),
        f"{statistics.median(errors):.1%}",
        f"{errors[int(0.9 * len(errors))]:.1%}",
        f"{inner:.1%}",
        *(f"{_share_under(cells, constants, margin):.1%}" for margin in _MARGINS),
    )


def _share_under(cells: Sequence[Cell], constants: Constants, margin: float) -> float:
    return sum(constants.predict(cell) * (1 + margin) < cell.peak for cell in cells) / len(cells)


def by_family(cells: Sequence[Cell], constants: Constants) -> list[tuple[str, ...]]:
    """Errors of each family with enough models, the worst first; the other families together."""
    models = {cell.model: cell.family for cell in cells}
    counts = {family: [*models.values()].count(family) for family in {*models.values()}}
    grouped: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        grouped[cell.family if counts[cell.family] >= _FEWEST_OF_A_FAMILY else "all others"].append(cell)
    rows = []
    for family, own in grouped.items():
        errors = [constants.error(cell) for cell in own]
        rows.append((statistics.median(map(abs, errors)), family, own, statistics.median(errors)))
    return [
        (
            family,
            str(len({cell.model for cell in own})),
            str(len(own)),
            f"{median:.1%}",
            f"{bias:+.1%}",
            f"{_share_under(own, constants, MARGIN):.1%}",
        )
        for median, family, own, bias in sorted(rows, reverse=True, key=lambda row: row[0])
    ]


def worst(cells: Sequence[Cell], constants: Constants, count: int = 10) -> list[tuple[str, ...]]:
    """The models with the largest errors, one row each, with what is known of the reason."""
    by_model: dict[str, Cell] = {}
    for cell in cells:
        known = by_model.get(cell.model)
        if known is None or abs(constants.error(cell)) > abs(constants.error(known)):
            by_model[cell.model] = cell
    rows = sorted(by_model.values(), key=lambda cell: -abs(constants.error(cell)))[:count]
    return [
        (cell.model, str(cell.batch), f"{cell.peak:.0f}", f"{constants.predict(cell):.0f}", _reason(cell, cells))
        for cell in rows
    ]


def _reason(cell: Cell, cells: Sequence[Cell]) -> str:
    own = sorted((other.batch, other.peak) for other in cells if other.model == cell.model)
    steps = [(after[1] - before[1]) / (after[0] - before[0]) for before, after in pairwise(own)]
    if len(steps) > 1 and max(steps) > 2 * max(min(steps), 1e-9):
        return "the measured peak is no line in the batch: a workspace that one size takes and another does not"
    return "grouped convolutions" if cell.grouped else "not known"


def _how_cudnn_is_known() -> str:
    is_asked = Workspaces.of_card(_CARD.architecture, _CARD.multiprocessors).asks
    return "is what the cuDNN of this machine answers" if is_asked else "is said by a rule"


def measure(path: Path, models: int) -> tuple[Table, ...]:
    """All tables: scores of the fitted and the held-out half, by family, and the worst ten."""
    cells: list[Cell] = []
    failed: list[str] = []
    table, family_of = read_table(path), families()
    for name in choose(table, models, family_of):
        try:
            found = [*simulate(name, table[name], _CARD, family_of(name))]
        except InvalidArgument as error:
            failed.append(f"{name}: {error}")
            print(f"{name:48s}  could not be traced", flush=True)
            continue
        cells += found
        print(f"{name:48s}{found[0].seconds:6.1f} s", flush=True)
    return tabulate(cells, failed)


def tabulate(cells: Sequence[Cell], failed: Sequence[str]) -> tuple[Table, ...]:
    """What was found, with the goals."""
    halves = {
        half: [c for c in cells if is_held_out(c.model) == (half == "held out")] for half in ("fitted", "held out")
    }
    own = fit_constants(halves["fitted"])
    plain = Constants(statistics.median(cell.peak - cell.plain for cell in halves["fitted"]), counts_cudnn=False)
    rows = [
        (f"{name}: {c.outside:.0f} MiB outside", half, *score(part, c))
        for name, c in (("fitted", own), ("as shipped", SHIPPED), ("without cuDNN's workspaces", plain))
        for half, part in halves.items()
    ]
    seconds = sorted({cell.model: cell.seconds for cell in cells}.values())
    cpu_seconds = statistics.median({cell.model: cell.cpu_seconds for cell in cells}.values())
    accuracy = Table(
        "Prediction beside published peaks",
        f"{len(seconds)} timm models of {len({cell.family for cell in cells})} of its files, each at up to 5 batches, "
        f"on a card of 40 GB; what lies outside the allocator is fitted on one half of the models and scored on the "
        f"other. What cuDNN takes {_how_cudnn_is_known()}. *Inside*: the "
        f"error relative to the peak without the part outside the allocator. A prediction took "
        f"{statistics.median(seconds):.1f} s in the median and {seconds[-1]:.1f} s at most, and {cpu_seconds:.1f} s of "
        f"CPU in the median, in a child process on "
        f"{describe_machine()}. {len(failed)} models could "
        f"not be traced{': ' * bool(failed)}{'; '.join(failed)}.",
        ("constants", "half", "cells", "median", "90 %", "inside", *(f"under at +{margin:.0%}" for margin in _MARGINS)),
        rows,
        _goals(halves["held out"], statistics.median(seconds), cpu_seconds),
    )
    families_found = Table(
        "By family",
        f"As shipped, both halves; a family is a file of timm with at least {_FEWEST_OF_A_FAMILY} models here.",
        ("family", "models", "cells", "median", "bias", f"under at +{MARGIN:.0%}"),
        by_family(cells, SHIPPED),
    )
    worst_found = Table(
        "The worst ten of all models",
        "As shipped, each at its worst batch, in MiB.",
        ("model", "batch", "measured", "predicted", "reason"),
        worst(cells, SHIPPED),
    )
    return accuracy, families_found, worst_found


def _goals(cells: Sequence[Cell], seconds: float, cpu_seconds: float) -> list[Goal]:
    median = statistics.median(abs(SHIPPED.error(cell)) for cell in cells)
    under = _share_under(cells, SHIPPED, MARGIN)
    return [
        Goal(
            "median error, held out, as shipped",
            f"at most {100 * _MOST_ERROR:g} %",
            f"{median:.1%}",
            judge(median <= _MOST_ERROR),
        ),
        Goal(
            f"under-estimates at +{MARGIN:.0%}, held out, as shipped",
            f"at most {100 * _MOST_UNDER:g} %",
            f"{under:.1%}",
            judge(under <= _MOST_UNDER),
        ),
        Goal(
            "seconds a prediction, in the median, on 2 quiet cores",
            f"at most {_MOST_SECONDS:g}",
            f"{seconds:.1f}",
            judge(seconds <= _MOST_SECONDS),
        ),
        Goal(
            "seconds of CPU a prediction, in the median, on 2 quiet cores",
            f"at most {_MOST_CPU_SECONDS:g}",
            f"{cpu_seconds:.1f}",
            judge(cpu_seconds <= _MOST_CPU_SECONDS),
        ),
    ]


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

    tables = measure(options.table, options.models)
    page = "\n\n".join([f"# Predictions\n\nMeasured by `make accuracy`.\n\n{show_goals(tables)}", *map(str, tables)])
    print(page)
    if options.output:
        write_part(options.output, "predictions", page)


if __name__ == "__main__":
    main()
