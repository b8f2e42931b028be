"""Plans, events and processes for the tests of the ledger; imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autobatch.events import Retried, SizeChanged, StepFailed, StepFinished
from autobatch.events.run_history import Run, StepRange
from autobatch.plan import Plan
from autobatch.planning.division import balance
from autobatch.records import DeviceInfo

ROOT = Path(__file__).resolve().parents[2]


def make_plan(name="a1", *, size=8, **changes):
    """A plan of 32 samples."""
    sizes = balance(32, size)
    fields = {
        "target_batch": 32,
        "world_size": 1,
        "micro_batch_size": max(sizes),
        "micro_batch_sizes": sizes,
        "accumulation_steps": len(sizes),
        "budget_bytes": 2**30,
        "headroom_bytes": 2**26,
        "peak_bytes": 2**29,
        "curve": None,
        "trials": (),
        "device": DeviceInfo(kind="cuda", name="NVIDIA L4", total_bytes=24 * 2**30),
        "version": "0.1.0",
        "fingerprint": "f1",
        "id": name,
        "made_at": 3e9,
        "model": "Net",
    }
    return Plan(**{**fields, **changes})


def make_run(name="r1", plan="a1", **changes):
    return Run(**{"id": name, "plan_id": plan, "pid": 7, "started_at": 3e9, "last_seen_at": 3e9, **changes})


def make_update(position, run="r1", steps=1, **changes):
    """An update of one range, which begins at this step and is ``steps`` long; each has another size and number."""
    part = StepRange(
        first_step=position,
        last_step=position + steps - 1,
        micro_batch_size=8,
        samples=32 * steps,
        allowed_size=position,
    )
    return make_run(run, **{"ranges": (part,), "line": position, **changes})


def names(plans):
    return [plan.id for plan in plans]


def add_run(store, plan, run):
    """Store a plan, and a run of it in one line."""
    store.begin_run(plan)
    store.update_run(run)


def failed(reason, step=0):
    return StepFailed(step=step, reason=reason, out_of_memory=True)


def finished(step, sizes=(8, 8, 8, 8), retries=0, peak_bytes=100, seconds=0.5):
    return StepFinished(step=step, micro_batch_sizes=sizes, retries=retries, peak_bytes=peak_bytes, seconds=seconds)


def retried(step, old=8, new=4, reason="CUDA out of memory"):
    return Retried(
        step=step,
        failed_size=old,
        new_size=new,
        used_bytes=300,
        budget_bytes=2**30,
        reason=reason,
    )


def resized(step, old=4, new=8, reason="grown back"):
    return SizeChanged(step=step, old_size=old, new_size=new, reason=reason)


def start_process(program, *arguments, **environment):
    """A Python that does not import torch; its output is text that can be read line by line."""
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'builders'}", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=variables,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_process(program, *arguments, **environment):
    """Run it to its end; its output and what it wrote on stderr."""
    process = start_process(program, *arguments, **environment)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    return output, errors
