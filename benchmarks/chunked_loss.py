"""Memory and time of a cross entropy over many classes: plainly, in chunks, and by PyTorch's own function.

    PYTHONPATH=. python benchmarks/chunked_loss.py

Each way runs in a process of its own, whose resident memory is read (Linux): a forward and backward pass beside hidden
states, the weight and its earlier gradient. The new gradient of the weight is in the peak. Times are the shortest of
four, on one thread; errors are those of the gradients in float64 at a smaller size.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe_machine
from tables import Table
from torch.nn import functional as F

from autobatch.strategies.chunked_logits import chunked_losses

__all__ = ["measure"]

_REPEATS = 4
_HERE = Path(__file__).parent

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels)


def _in_chunks(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return chunked_losses(hidden, weight, None, labels).mean()


def _by_torch(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **options: object) -> torch.Tensor:
    return F.linear_cross_entropy(hidden, weight, labels, options=torch.nn.LinearCrossEntropyOptions(**options))


def _by_torch_in_large_chunks(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _by_torch(hidden, weight, labels, chunking_method=None, batch_chunk_size=128)


WAYS: dict[str, Loss] = {
    "plain": _plain,
    "`chunk_loss`": _in_chunks,
    "`linear_cross_entropy`, its own chunks": _by_torch,
    "`linear_cross_entropy`, 128 rows": _by_torch_in_large_chunks,
}


def _make(rows: int, width: int, classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, width, dtype=dtype), torch.randn(classes, width, dtype=dtype) / width
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(classes, (rows,))


def run_alone(name: str, rows: int, width: int, classes: int) -> None:
    """Print the peak, the seconds and the error of one way."""
    loss, ends = WAYS[name], []
    for one in (_plain, loss):
        hidden, weight, labels = _make(64, 32, 1000, torch.float64)
        one(hidden, weight, labels).backward()
        ends.append(torch.cat([hidden.grad.flatten(), weight.grad.flatten()]))
    error = float((ends[1] - ends[0]).norm() / ends[0].norm())
    hidden, weight, labels = _make(rows, width, classes, torch.float32)
    hidden.grad, weight.grad = torch.ones_like(hidden), torch.ones_like(weight)
    Path("/proc/self/clear_refs").write_text("5")
    before, seconds = _read_peak(), float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        loss(hidden, weight, labels).backward()
        seconds = min(seconds, time.perf_counter() - started)
    print(json.dumps({"peak": (_read_peak() - before) / 1024, "seconds": seconds, "error": error}))


def _read_peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(rows: int = 1024, width: int = 768, classes: int = 50257) -> Table:
    """Run each way once."""
    found = []
    for name in WAYS:
        if name.startswith("`linear") and not hasattr(F, "linear_cross_entropy"):
            continue
        program = f"import torch; torch.set_num_threads(1); import chunked_loss; chunked_loss.run_alone({name!r}, "
        ran = subprocess.run(  # noqa: S603 - a function of this file
            [sys.executable, "-c", f"{program}{rows}, {width}, {classes})"],
            capture_output=True,
            text=True,
            check=True,
            cwd=_HERE,
        )
        found.append((name, json.loads(ran.stdout)))
    plain = found[0][1]["seconds"]
    return Table(
        "A loss in chunks of its classes",
        f"{rows} rows of {width}, {classes} classes, float32. {describe_machine()}.",
        ("loss", "peak", "time", "gradient off in float64"),
        [
            (name, f"{one['peak']:.0f} MiB", f"{one['seconds'] / plain:.2f}", f"{one['error']:.0e}")
            for name, one in found
        ],
    )


if __name__ == "__main__":
    print(measure())
