"""What ``Runner`` costs beside a hand-written accumulation loop, in time and in memory.

    python benchmarks/runner.py [--steps 40]

Both run in turn in one process, so the ratio stands even on a noisy machine; it is the median over steps. Three cases:
far from the budget (nothing is counted), near the budget on a CPU (every operator is counted), and small layers, where
counting costs most.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import autobatch
from autobatch.memory.cpu import CpuDevice

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def make_model(width: int, depth: int) -> nn.Module:
    """Linear layers with GELU."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss that is the mean over samples."""
    return model(batch).square().mean()


def seconds_of(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare(width: int, depth: int, samples: int, micro_batch: int, steps: int, *, near: bool) -> None:
    """Print the hand-written loop's time, the ratio of the runner's, and the ratio of their peaks where counted."""
    model = make_model(width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.randn(samples, width)

    def fit(budget: int | None) -> autobatch.Plan:
        return autobatch.fit(
            model,
            samples,
            batch=batch,
            step=mean_square,
            optimizer=optimizer,
            max_micro_batch=micro_batch,
            budget=budget,
        )

    plan = fit(None)
    plan = fit(2 * plan.peak_bytes) if near else plan
    runner = autobatch.Runner(plan, model, mean_square, optimizer)

    def by_hand() -> None:
        optimizer.zero_grad()
        for part in batch.split(micro_batch):
            (mean_square(model, part) * (len(part) / samples)).backward()
        optimizer.step()

    pairs = [(seconds_of(by_hand), seconds_of(lambda: runner.step(batch))) for _ in range(steps)][5:]
    ratio = statistics.median(ours / theirs for theirs, ours in pairs)
    hand_ms = 1000 * statistics.median(theirs for theirs, _ in pairs)
    print(
        f"{depth} x {width}, {samples} in {micro_batch}s, {'near' if near else 'far from'} the budget: "
        f"{hand_ms:.1f} ms by hand, runner x {ratio:.3f}{peak_ratio(by_hand, runner, batch) if near else ''}"
    )


def peak_ratio(by_hand: Callable[[], None], runner: autobatch.Runner, batch: torch.Tensor) -> str:
    """The runner's peak over that of the hand-written loop, both counted by the same device."""
    device = CpuDevice()
    ours = runner.step(batch).peak_bytes
    with device.limit(2**62):
        device.reset_peak()
        by_hand()
        theirs = device.usage().peak_allocated
    return f", peak x {ours / theirs:.3f}"


def main() -> None:
    """All cases."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=40)
    steps = arguments.parse_args().steps
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, CPU")
    for near in (False, True):
        compare(64, 10, 64, 16, steps, near=near)
        compare(256, 10, 256, 64, steps, near=near)
        compare(512, 10, 512, 128, steps, near=near)


if __name__ == "__main__":
    main()
