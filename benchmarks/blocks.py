"""A 24-block transformer whose single sample does not fit: the blocks that ``fit`` recomputes, beside all of them.

    PYTHONPATH=. python benchmarks/blocks.py

Budgets are parts of what one sample needs plainly. Times are of one forward and backward pass without a budget, in
turn, the shortest of several, on one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from machine import describe_machine
from quiet import undisturbed
from tables import Table
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.step.workload import Workload
from autobatch.strategies.checkpointing import recompute

__all__ = ["measure"]

_BUDGETS = (0.9, 0.7, 0.5, 0.35)
_REPEATS = 4
_WORDS = 500


Step = Callable[[nn.Module, Any], Any]


class _Texts(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True) for _ in range(blocks)
        )
        self.head = nn.Linear(width, _WORDS)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(texts)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _step(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(texts).flatten(0, 1), texts.flatten())


def _plan(model: nn.Module, texts: torch.Tensor, **options: Any) -> autobatch.Plan:
    settled = {"headroom": 0, "check": None, "reuse": False, "progress": False, "max_micro_batch": 1, **options}
    return autobatch.fit(model, len(texts), batch=texts, step=_step, **settled)


def _time(ways: dict[str, Step], model: nn.Module, texts: torch.Tensor) -> dict[str, float]:
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(_REPEATS):
        for name, step in ways.items():
            started = time.perf_counter()
            step(model, texts).backward()
            seconds[name] = min(seconds[name], time.perf_counter() - started)
    return seconds


def measure(blocks: int = 24, width: int = 64, length: int = 128) -> Table:
    """Fit at each budget; a budget in which no choice fits is refused."""
    torch.manual_seed(0)
    model, texts = _Texts(blocks, width), torch.randint(_WORDS, (2, length))
    with undisturbed():
        need = _plan(model, texts, budget="64GiB").peak_bytes
        plans = {part: _fit(model, texts, int(part * need)) for part in _BUDGETS}
        workload, every = Workload(model, _step), [f"blocks.{number}" for number in range(blocks)]
        chosen = {str(part): plan.checkpointing.blocks for part, plan in plans.items() if plan is not None}
        ways = {"plain": _step, **{name: recompute(workload, taken).step for name, taken in chosen.items()}}
        ways["every block"] = recompute(workload, every).step
        seconds = _time(ways, model, texts[:1])
    rows, most = [], 0
    for part, plan in plans.items():
        if plan is None:
            rows.append((f"{part}", "none fits", "", "", "", ""))
            continue
        found, slower = plan.checkpointing, seconds[str(part)] / seconds["plain"]
        most = min((one.peak_reserved for one in plan.trials if one.outcome == "fits"), default=0)
        peak, said = f"{plan.peak_bytes / need:.2f}", f"{1 + found.slowdown:.2f}"
        rows.append((f"{part}", f"{len(found.blocks)}", peak, f"{slower:.2f}", said, f"{len(plan.trials)}"))
    slower = seconds["every block"] / seconds["plain"]
    rows.append(("every block", f"{blocks}", f"{most / need:.2f}", f"{slower:.2f}", "", ""))
    return Table(
        "Blocks that are recomputed",
        f"A transformer of {blocks} blocks; one sample needs {need / 2**20:.0f} MiB plainly. Budgets, peaks and times "
        f"are parts of the plain ones. {describe_machine()}.",
        ("budget", f"blocks of {blocks}", "peak", "time", "time by the plan", "trials"),
        rows,
    )


def _fit(model: nn.Module, texts: torch.Tensor, budget: int) -> autobatch.Plan | None:
    try:
        return _plan(model, texts, budget=budget, strategies="auto")
    except autobatch.DoesNotFit:
        return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure())
