"""A 24-block transformer whose single sample does not fit: the blocks that ``fit`` recomputes, beside all of them.

    PYTHONPATH=. python benchmarks/blocks.py

A second table is of wide blocks, which may keep their matrix products: all ways beside whole blocks only.

Budgets are parts of what one sample needs plainly. Times are of one forward and backward pass without a budget, in
turn, the shortest of several, on one thread. PyTorch's own ways run in processes of their own: Auto-SAC's estimator,
which may end its process, and ``activation_memory_budget`` with ``torch.compile``, at the same parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from quiet import undisturbed
from tables import Goal, Table, judge
from torch import nn
from torch.nn import functional as F

import autobatch
from autobatch.step.workload import Workload
from autobatch.strategies.checkpointing import recompute
from autobatch.strategies.choice import whole

__all__ = ["measure", "measure_ways"]

_BUDGETS = (0.9, 0.7, 0.5, 0.35)
_WIDE_BUDGETS = (0.9, 0.8, 0.7, 0.6)  # parameters and their gradients are 0.4
_WAYS = "checkpoint", "selective"
_REPEATS = 4
_OFF = 0.1  # parts of the plain time
_WORDS = 500
_HERE = Path(__file__).parent


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


def compile_with_budget(blocks: int, width: int, length: int, part: float) -> None:
    """Print what PyTorch's memory budget keeps, its time and the change of the gradient; in its own process."""
    import torch._functorch.config as functorch  # noqa: PLC0415

    found = []
    for budget in (1.0, part):
        torch.compiler.reset()
        functorch.activation_memory_budget = budget
        torch.manual_seed(0)
        model, texts = _Texts(blocks, width), torch.randint(_WORDS, (1, length))
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        _step(compiled, texts).backward()
        seconds = _time({"": _step}, compiled, texts)[""]
        model.zero_grad()
        torch.manual_seed(1)
        kept: dict[int, torch.Tensor] = {}  # memory is not counted inside compiled code: what it saves is
        with torch.autograd.graph.saved_tensors_hooks(partial(_keep, kept), lambda one: one):
            loss = _step(compiled, texts)
        held = {one.data_ptr() for one in model.parameters()}
        byte_count = sum(one.untyped_storage().nbytes() for at, one in kept.items() if at not in held)
        loss.backward()
        found.append((byte_count, seconds, torch.cat([one.grad.flatten() for one in model.parameters()]), float(loss)))
    (plain_kept, plain_seconds, plain, loss), (kept_bytes, seconds, gradient, other) = found
    error = float((gradient - plain).norm() / plain.norm())
    ratios = {"kept": kept_bytes / plain_kept, "time": seconds / plain_seconds, "loss": abs(other / loss - 1)}
    print(json.dumps({**ratios, "error": error}))


def _keep(kept: dict[int, torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    kept[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def estimate_with_auto_sac(blocks: int, width: int, length: int) -> None:
    """Run the estimator of PyTorch's Auto-SAC, from which its solver chooses; in its own process."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415
    from torch.distributed._tools.sac_estimator import SACEstimator  # noqa: PLC0415

    with FakeTensorMode():
        model, texts = _Texts(blocks, width), torch.randint(_WORDS, (1, length))
        with SACEstimator()("operator-level-cost-model"):
            _step(model, texts).backward()


def _run_alone(function: str, *arguments: float) -> tuple[dict[str, float] | None, str]:
    """Run a function of this file in its own process; return what it printed, or how it ended."""
    program = f"import torch; torch.set_num_threads(1); import blocks; blocks.{function}{arguments}"
    ran = subprocess.run(  # noqa: S603 - a function of this file
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=_HERE
    )
    if ran.returncode == 0 and ran.stdout:
        return json.loads(ran.stdout), ""
    return None, f"ends its process here (exit code {ran.returncode})"


def measure(blocks: int = 24, width: int = 64, length: int = 128) -> Table:
    """Fit at each budget; a budget in which no choice fits is refused."""
    torch.manual_seed(0)
    model, texts = _Texts(blocks, width), torch.randint(_WORDS, (2, length))
    with undisturbed():
        need = _plan(model, texts, budget="64GiB").peak_bytes
        plans = {part: _fit(model, texts, int(part * need)) for part in _BUDGETS}
        workload, every = Workload(model, _step), [f"blocks.{number}" for number in range(blocks)]
        chosen = {str(part): plan.checkpointing.ways for part, plan in plans.items() if plan is not None}
        ways = {"plain": _step, **{name: recompute(workload, taken).step for name, taken in chosen.items()}}
        ways["every block"] = recompute(workload, whole(every)).step
        seconds = _time(ways, model, texts[:1])
    own = {part: _run_alone("compile_with_budget", blocks, width, length, part)[0] for part in _BUDGETS}
    _, ending = _run_alone("estimate_with_auto_sac", blocks, width, length)
    rows, most, off = [], 0, 0.0
    for part, plan in plans.items():
        ratios = own[part]
        theirs = ["", "", ""] if ratios is None else [f"{ratios[one]:.2f}" for one in ("kept", "time", "error")]
        if plan is None:
            rows.append((f"{part}", "none fits", "", "", "", "", *theirs))
            continue
        found, slower = plan.checkpointing, seconds[str(part)] / seconds["plain"]
        off = max(off, abs(slower - 1 - found.slowdown))
        most = min((one.peak_reserved for one in plan.trials if one.outcome == "fits"), default=0)
        peak, said = f"{plan.peak_bytes / need:.2f}", f"{1 + found.slowdown:.2f}"
        counts = f"{len(found.blocks)}", peak, f"{slower:.2f}", said, f"{len(plan.trials)}"
        rows.append((f"{part}", *counts, *theirs))
    slower = seconds["every block"] / seconds["plain"]
    rows.append(("every block", f"{blocks}", f"{most / need:.2f}", f"{slower:.2f}", *[""] * 5))
    changed = max((one["loss"] for one in own.values() if one is not None), default=0.0)
    return Table(
        "Blocks that are recomputed",
        f"A transformer of {blocks} blocks with dropout; one sample needs {need / 2**20:.0f} MiB plainly. Budgets, "
        f"peaks and times are parts of the plain ones. The last columns are torch.compile (aot_eager) with "
        f"PyTorch's activation_memory_budget, beside the same without: what it keeps, its time, and by how much the "
        f"gradient changes from the same seed, while the loss changes by {changed:.0e}. PyTorch's Auto-SAC "
        f"{ending or 'runs'}. {describe_machine()}.",
        ("budget", f"blocks of {blocks}", "peak", "time", "by the plan", "trials", "kept", "time", "gradient off"),
        rows,
        [
            Goal(
                "time of recomputed blocks by the plan, beside the measured one",
                f"at most {_OFF} off",
                f"{off:.2f}",
                judge(off <= _OFF),
            )
        ],
    )


def measure_ways(blocks: int = 6, width: int = 512, length: int = 512) -> Table:
    """Compare whole blocks alone with all ways at each budget, in one run."""
    torch.manual_seed(0)
    model, texts = _Texts(blocks, width), torch.randint(_WORDS, (2, length))
    with undisturbed():
        need = _plan(model, texts, budget="64GiB").peak_bytes
        cases = {(part, allowed): int(part * need) for part in _WIDE_BUDGETS for allowed in (_WAYS[:1], _WAYS)}
        plans = {case: _fit(model, texts, budget, case[1]) for case, budget in cases.items()}
        workload = Workload(model, _step)
        ways = {str(case): recompute(workload, one.checkpointing.ways).step for case, one in plans.items() if one}
        seconds = _time({"plain": _step, **ways}, model, texts[:1])
    rows = []
    for part in _WIDE_BUDGETS:
        row = [f"{part}"]
        for allowed in (_WAYS[:1], _WAYS):
            plan, slower = plans[part, allowed], seconds.get(str((part, allowed)), 0.0) / seconds["plain"]
            if plan is None:
                row += ["none fits", "", ""]
                continue
            selective = len(plan.checkpointing.selective)
            counts = f"{len(plan.checkpointing.blocks) - selective}" + (f" + {selective}" if selective else "")
            row += [counts, f"{plan.peak_bytes / need:.2f}", f"{slower:.2f}"]
        rows.append(tuple(row))
    return Table(
        "Blocks that are recomputed selectively",
        f"A transformer of {blocks} blocks of width {width} with dropout; a text of {length} words needs "
        f"{need / 2**20:.0f} MiB plainly. The first columns recompute whole blocks only; in the last ones a second "
        f"number is of blocks that keep their matrix products. {describe_machine()}.",
        ("budget", f"blocks of {blocks}", "peak", "time", "all ways", "peak", "time"),
        rows,
    )


def _fit(model: nn.Module, texts: torch.Tensor, budget: int, allowed: tuple[str, ...] = _WAYS) -> autobatch.Plan | None:
    try:
        return _plan(model, texts, budget=budget, strategies=allowed)
    except autobatch.DoesNotFit:
        return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(measure(), measure_ways(), sep="\n\n")
