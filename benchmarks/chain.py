"""What a step and a fit cost where the model has many modules: a chain of tiny blocks.

    python benchmarks/chain.py [--pairs 14]

Everything that ``Runner`` does for each module and parameter weighs most here.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from models import Batch, classify
from quiet import undisturbed
from runner import pair_up, write_loop
from tables import Goal, Table, judge
from torch import nn

import autobatch

__all__ = ["DEPTHS", "MOST_ADDED_MS", "Chain", "Costs", "make_chain", "measure", "measure_chain"]

DEPTHS = (4, 32, 128, 512)
"""Numbers of blocks: 22, 162, 642 and 2,562 modules."""

MOST_ADDED_MS = {642: 4.0, 2562: 16.0}
"""Goals, by number of modules."""

_MOST_FIT_STEPS = 25.0
_WIDTH, _SAMPLES, _SIZE = 32, 64, 16
_PAIRS = 14
_WARM_PAIRS = 6


class Block(nn.Module):
    """A tiny residual block that keeps a container, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(_WIDTH), nn.GELU()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.config = {"sizes": [1, 2]}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Add what the block computes."""
        summand: torch.Tensor = self.second(self.act(self.first(self.norm(rows))))
        return rows + summand


class Chain(NamedTuple):
    """A model with its optimizer and a batch for it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Batch


class Costs(NamedTuple):
    """What was measured of one chain.

    Attributes:
        modules: Number of modules.
        hand_ms: Time of a step of the hand-written loop, the median.
        added_ms: What the Runner's step takes more, the median of the pairs.
        ratio: The Runner's time over the loop's, the median of the pairs.
        fit_steps: Time of a fit in steps of the loop.
        unchecked_steps: Time of a fit with ``check=None``.
    """

    modules: int
    hand_ms: float
    added_ms: float
    ratio: float
    fit_steps: float
    unchecked_steps: float


def measure(depths: Sequence[int] = DEPTHS, pairs: int = _PAIRS) -> Table:
    """Each chain as a row, with goals for the large ones."""
    measured = [measure_chain(depth, pairs) for depth in depths]
    return Table(
        "Many modules: a step and a fit of a chain of tiny blocks",
        f"Blocks of LayerNorm, Linear, GELU, Linear of width {_WIDTH}; SGD, {_SAMPLES} samples in {_SAMPLES // _SIZE} "
        f"micro-batches; {torch.get_num_threads()} thread(s). A step of the Runner and one of the hand-written loop "
        f"run in turn; added is the median of the differences. The process has fitted before.",
        ("modules", "step by hand", "added", "runner / by hand", "fit", "fit with check=None"),
        [_row(costs) for costs in measured],
        [goal for costs in measured for goal in _goals(costs)],
    )


def make_chain(depth: int) -> Chain:
    """Make a chain of so many blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(depth)), nn.Linear(_WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    return Chain(model, optimizer, (torch.randn(_SAMPLES, _WIDTH), torch.randint(10, (_SAMPLES,))))


def measure_chain(depth: int, pairs: int) -> Costs:
    """Time steps of both in turn, then a fit with and without its check."""
    chain = make_chain(depth)
    model, optimizer, batch = chain
    with undisturbed():
        plan = _fit(chain, check=None)
        runner = autobatch.Runner(plan, model, step=classify, optimizer=optimizer)
        by_hand = write_loop(model, optimizer, batch)
        timed = pair_up(by_hand, lambda: runner.step(batch), pairs + _WARM_PAIRS)[_WARM_PAIRS:]
        hand_s = statistics.median(hand for hand, _ in timed)
        fits = [_seconds_of_fit(chain, check=check) / hand_s for check in ("warn", None)]
    return Costs(
        modules=len([*model.modules()]),
        hand_ms=1000 * hand_s,
        added_ms=1000 * statistics.median(ours - hand for hand, ours in timed),
        ratio=statistics.median(ours / hand for hand, ours in timed),
        fit_steps=fits[0],
        unchecked_steps=fits[1],
    )


def _fit(chain: Chain, *, check: str | None) -> autobatch.Plan:
    return autobatch.fit(
        chain.model,
        _SAMPLES,
        batch=chain.batch,
        step=classify,
        optimizer=chain.optimizer,
        max_micro_batch=_SIZE,
        check=check,
        reuse=False,
        progress=False,
    )


def _seconds_of_fit(chain: Chain, *, check: str | None) -> float:
    started = time.perf_counter()
    _fit(chain, check=check)
    return time.perf_counter() - started


def _row(costs: Costs) -> tuple[str, ...]:
    fits = (f"{costs.fit_steps:.0f} steps", f"{costs.unchecked_steps:.0f} steps")
    times = (f"{costs.hand_ms:.1f} ms", f"{costs.added_ms:.2f} ms", f"{costs.ratio:.3f}")
    return (f"{costs.modules:,}", *times, *fits)


def _goals(costs: Costs) -> list[Goal]:
    most = MOST_ADDED_MS.get(costs.modules)
    if most is None:
        return []
    return [
        Goal(
            f"time added to a step of {costs.hand_ms:.0f} ms by a model of {costs.modules:,} modules",
            f"at most {most:.0f} ms",
            f"{costs.added_ms:.1f} ms",
            judge(costs.added_ms <= most),
        ),
        Goal(
            f"time of a fit of {costs.modules:,} modules, in steps by hand",
            f"at most {_MOST_FIT_STEPS:.0f}",
            f"{costs.fit_steps:.0f}",
            judge(costs.fit_steps <= _MOST_FIT_STEPS),
        ),
    ]


def main() -> None:
    """All chains."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=_PAIRS, help="steps of each side")
    torch.set_num_threads(1)
    print(measure(pairs=arguments.parse_args().pairs))


if __name__ == "__main__":
    main()
