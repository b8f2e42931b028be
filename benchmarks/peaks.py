"""Peaks of training steps that others measured, and what the simulation knows of the same steps.

Covers a table with the columns ``model, batch, peak_mib``: peaks of a card's memory in training steps of timm models
in float32 with SGD and momentum, whole process. Does not cover how near the two come (``accuracy``).
"""

from __future__ import annotations

import csv
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn

from autobatch.batch.samples import Layout, describe
from autobatch.prediction.cards import Gpu
from autobatch.prediction.child_process import run_apart
from autobatch.prediction.estimate import Estimate
from autobatch.prediction.sizing import check_timeline
from autobatch.prediction.timeline import Timeline
from autobatch.prediction.tracing.trace import Circumstances, trace_timeline
from autobatch.prediction.workspaces import Workspaces
from autobatch.step.workload import Workload

__all__ = ["Cell", "choose", "families", "read_table", "simulate"]

_MIB = 2**20
_FULL_CARD_MIB = 38_500
"""Peaks of the table's 40 GB card near its end are cut off there."""


@dataclass(frozen=True)
class Cell:
    """One measured peak, and what the simulation knows of it; sizes in MiB.

    Attributes:
        model: timm's name of it.
        family: timm's file of it.
        batch: Samples in the step.
        peak: As measured, of the whole process.
        reserved: What the allocator takes in the simulation.
        plain: The same without what cuDNN takes.
        grouped: Whether the model has grouped convolutions that are not depthwise.
        seconds: Of the prediction: the model's traces, and one simulation.
        cpu_seconds: CPU seconds of the same, child processes included.
    """

    model: str
    batch: int
    peak: float
    reserved: float
    plain: float
    grouped: bool
    seconds: float
    cpu_seconds: float
    family: str = ""


def read_table(path: Path) -> dict[str, dict[int, float]]:
    """Peaks in MiB by model and batch, up to the card's end."""
    table: defaultdict[str, dict[int, float]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if float(row["peak_mib"]) <= _FULL_CARD_MIB:
                table[row["model"]][int(row["batch"])] = float(row["peak_mib"])
    return dict(table)


def families() -> Callable[[str], str]:
    """Timm's file of each model's name: what is in one file is built alike."""
    import timm  # noqa: PLC0415 - only with the table, and after torchvision was stubbed

    by_name = {name: module for module in timm.list_modules() for name in timm.list_models(module=module)}
    return lambda name: by_name.get(name, "unknown")


def choose(table: Mapping[str, dict[int, float]], count: int, family_of: Callable[[str], str]) -> list[str]:
    """So many models, always the same: one of each family in turn, in each family in the order of a hash."""
    rows: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(table, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        rows[family_of(name)].append(name)
    rounds = zip_longest(*(rows[family] for family in sorted(rows)))
    return [name for names in rounds for name in names if name is not None][:count]


def simulate(name: str, peaks: Mapping[int, float], card: Gpu, family: str = "") -> Iterator[Cell]:
    """All measured cells of a model, simulated; a prediction's seconds are those of its trace and one simulation.

    Raises:
        InvalidArgument: The model cannot be traced.
    """
    workload, layout, grouped = _build(name)
    started = _read_clocks()
    timeline = _trace(workload, layout, max(peaks))
    traced = _read_clocks()
    estimate = Estimate(timeline).on_card(card).settle(lambda _: peaks)
    simulated = [(batch, peak, estimate.reserved(batch) / _MIB) for batch, peak in peaks.items()]
    ended = _read_clocks()
    seconds, cpu_seconds = (
        after - before + (last - after) / len(peaks) for before, after, last in zip(started, traced, ended, strict=True)
    )
    plain = estimate.changed(workspaces=Workspaces("sm_60", 0))  # in float32 nothing, there
    for batch, peak, reserved in simulated:
        yield Cell(
            name, batch, peak, reserved, plain.reserved(batch) / _MIB, grouped, seconds, cpu_seconds, family=family
        )


def _read_clocks() -> tuple[float, float]:
    """Seconds since some moment, and seconds of CPU of this process and of the children that it waited for."""
    times = os.times()
    return time.perf_counter(), times.user + times.system + times.children_user + times.children_system


def _build(name: str) -> tuple[Workload, Layout, bool]:
    """A timm model's step, two samples of it, and whether it has grouped convolutions that are not depthwise."""
    import timm  # noqa: PLC0415 - as above

    model = timm.create_model(name, pretrained=False)
    size = model.pretrained_cfg.get("input_size", (3, 224, 224))
    grouped = any(isinstance(m, nn.Conv2d) and 1 < m.groups < m.in_channels for m in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    workload = Workload(model, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), None, optimizer)
    return workload, describe((torch.empty(2, *size), torch.zeros(2, dtype=torch.long))), grouped


def _trace(workload: Workload, layout: Layout, largest: int) -> Timeline:
    """As ``predict`` does: the lines of the first traces are put to the test at the size in question."""
    circumstances = Circumstances(micro_batches=1)  # the table's steps are not accumulated
    timeline = run_apart(lambda: trace_timeline(workload, layout, circumstances))
    return run_apart(lambda: check_timeline(timeline, workload, layout, largest, circumstances)) or timeline
