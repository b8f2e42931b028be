"""How long a person waits: for ``import autobatch``, for ``fit`` and for ``predict`` of the demo's model.

    python benchmarks/waiting.py

Covers fresh processes, each with the libraries of the demo imported, and the fits that the demo makes: with all the
memory there is, then inside a budget. Does not cover large models, whose trials take as long as their steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tables import Goal, Table, judge

__all__ = ["measure"]

_ROOT = Path(__file__).resolve().parent.parent
_PROCESSES = 5
_GOALS = {"import autobatch": 0.1, "fit, in a budget": 0.5}
_PROGRAM = """
import json, logging, sys, tempfile, time
began, used = time.perf_counter(), time.process_time()
import autobatch
found = {"import autobatch": (time.perf_counter() - began, time.process_time() - used)}
sys.path.insert(0, "examples")
import digits, torch
torch.set_num_threads(1)
logging.disable(logging.CRITICAL)
train_set, _ = digits.load_images()
example = tuple(part[: digits.TARGET_BATCH] for part in train_set)

def measure(name, call, **options):
    model = digits.build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    began, used = time.perf_counter(), time.process_time()
    answer = call(model, batch=example, step=digits.step, optimizer=optimizer, target_batch=256, **options)
    found[name] = (time.perf_counter() - began, time.process_time() - used)
    return answer

autobatch.fit, autobatch.predict
roomy = measure("fit, the first of the process", autobatch.fit, reuse=False)
tight = measure("fit, in a budget", autobatch.fit, budget=roomy.peak_bytes * 2 // 5, reuse=False)
assert len(tight.trials) == 4, tight
measure("predict", autobatch.predict, gpu="L4")
print(json.dumps(found))
"""


def measure(processes: int = _PROCESSES) -> Table:
    """Each wait in so many fresh processes, one after the other."""
    found = [_run() for _ in range(processes)]
    waits = {name: [run[name] for run in found] for name in found[0]}
    rows = [(name, *_show(times)) for name, times in waits.items()]
    return Table(
        "Waiting: import, fit and predict",
        f"The model and data of `make demo` (BatchNorm, dropout, 256 images in four trials; 1 thread), in {processes} "
        f"fresh processes: medians, and quartiles of the clock. *Processor*: of the process itself, not its children, "
        f"which trace for `predict`. A goal is met or missed by that: with nothing else running the two are the same, "
        f"and where the clock says much more, others had the cores.",
        ("wait", "seconds", "quartiles", "seconds of the processor"),
        rows,
        [_judge(name, most, waits[name]) for name, most in _GOALS.items()],
    )


def _run() -> dict[str, tuple[float, float]]:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-c", _PROGRAM]
    answer = subprocess.check_output(command, cwd=_ROOT, env=environment, text=True)  # noqa: S603 - our own program
    found: dict[str, tuple[float, float]] = json.loads(answer)
    return found


def _show(times: list[tuple[float, float]]) -> tuple[str, str, str]:
    clock, processor = zip(*times, strict=True)
    lower, median, upper = statistics.quantiles(clock, n=4)
    return f"{median:.3f}", f"{lower:.3f} to {upper:.3f}", f"{statistics.median(processor):.3f}"


def _judge(name: str, most: float, times: list[tuple[float, float]]) -> Goal:
    lower, median, upper = statistics.quantiles([processor for _, processor in times], n=4)
    sure = not lower <= most <= upper
    return Goal(f"seconds of {name}", f"at most {most}", f"{median:.3f}", judge(median <= most, sure=sure))


if __name__ == "__main__":
    print(measure())
