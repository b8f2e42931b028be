"""The service of a team with some plans, runs and predictions in it, for a look at its pages.

    python examples/team.py [PORT]     # or: make serve

Nothing is trained: the numbers are made up. Four runs are live while the server is up. Ctrl-C ends it; nothing is kept.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from autobatch.errors import AutobatchError
from autobatch.planning.curve import fit_curve
from autobatch.planning.division import balance
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import DeviceInfo, Trial
from autobatch.service.records import (
    CardReading,
    PlanIn,
    PredictedPoint,
    PredictionIn,
    RunEnd,
    RunIn,
    RunSetback,
    RunSummary,
)
from autobatch.service.server import serve
from autobatch.service.state import Service, Settings
from autobatch.service.store import Store

GIB = 2**30
CONTEXT = GIB // 2  # what CUDA takes for itself
MINUTES = 50  # since the live runs began


class Job(NamedTuple):
    """A training, and what it takes: ``base`` without samples and ``sample`` for each."""

    model: str
    host: str
    user: str
    card: str
    total: int
    target: int
    size: int
    base: float
    sample: float
    error: float  # of its prediction
    shrinks_after: int = MINUTES + 1
    outcome: str = "finished"  # of the run before
    reason: str = ""

    @property
    def limit(self) -> int:
        """The budget less the headroom."""
        return self.total - self.total // 20

    def held(self, size: int) -> int:
        """Bytes that the allocator holds with micro-batches of this size."""
        return int(self.base + size * self.sample)


H100, A100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4"
JOBS = (
    Job("GPT2LMHeadModel", "node1", "ada", H100, 79 * GIB, 512, 86, 6 * GIB, 0.788 * GIB, 0.012),
    Job("ViTForImageClassification", "node1", "bob", H100, 79 * GIB, 512, 128, 4 * GIB, 0.453 * GIB, 0.031),
    Job(
        *("UNet2DConditionModel", "node2", "ada", A100, 79 * GIB, 64, 22, 6 * GIB, 2.75 * GIB, -0.016),
        shrinks_after=30,
        outcome="failed",
        reason="KeyError",
    ),
    Job(
        *("T5ForConditionalGeneration", "node3", "eve", L4, 22 * GIB, 256, 64, 2 * GIB, 0.225 * GIB, 0.020),
        outcome="interrupted",
    ),
)


def fill(store: Store) -> None:
    """Store a plan, a prediction, a run that has ended and one that is live for each job."""
    now = time.time()
    for index, job in enumerate(JOBS):
        step = f"{index:016x}"
        sizes = (1, 2, job.size // 2, job.size, 2 * job.size)
        prediction = PredictionIn(
            id=f"prediction{index}",
            made_at=now - 90000,
            model=job.model,
            step=step,
            card=job.card,
            total_bytes=job.total,
            context_bytes=CONTEXT,
            target_batch=job.target,
            micro_batch_size=job.size,
            points=tuple(
                PredictedPoint(size=n, reserved_bytes=int(job.held(n) * (1 + job.error * random.uniform(0.5, 1.0))))
                for n in sizes
            ),
        )
        store.add_prediction(prediction)
        store.add_plan(PlanIn(id=f"plan{index}", host=job.host, step=step, plan=make_plan(job, step)))
        for name, began in ((f"run{index}old", now - 80000), (f"run{index}", now - 60 * MINUTES)):
            run = RunIn(
                id=name,
                plan_id=f"plan{index}",
                host=job.host,
                user=job.user,
                pid=1000 + index,
                started_at=began,
                model=job.model,
                step=step,
                target_batch=job.target,
                micro_batch_size=job.size,
                limit_bytes=job.limit,
                cards=(read_card(index, job, job.held(job.size)),),
            )
            store.add_run(run)
        for minute in (0, 300, 600):
            at, held = now - 80000 + 60 * minute, int(job.held(job.size) * random.uniform(0.99, 1.0))
            store.add_summary(f"run{index}old", summarise(job, minute // 300, minute, at, held, size=job.size))
        store.end_run(f"run{index}old", RunEnd(at=now - 40000, outcome=job.outcome, reason=job.reason))


def make_plan(job: Job, step: str) -> PlanRecord:
    """A plan as fit() makes it."""
    outcomes = {2: "fits", job.size // 2: "fits", job.size: "fits", 2 * job.size: "oom"}
    peaks = {n: min(job.held(n), job.limit) for n in outcomes}
    trials = tuple(
        Trial(
            micro_batch_size=n,
            outcome=outcome,
            peak_allocated=int(peaks[n] * 0.97),
            peak_reserved=peaks[n],
            seconds=n / 100,
        )
        for n, outcome in outcomes.items()
    )
    sizes = balance(job.target, job.size)
    return PlanRecord(
        target_batch=job.target,
        world_size=1,
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        budget_bytes=job.total,
        headroom_bytes=job.total // 20,
        peak_bytes=job.held(max(sizes)),
        curve=fit_curve(trials),
        trials=trials,
        device=DeviceInfo(kind="cuda", name=job.card, total_bytes=job.total),
        version="0.1.0",
        model=job.model,
        made_at=time.time() - 86000,
        fingerprint=f"{step}{step}",
    )


def read_card(index: int, job: Job, held: int, others: int = 0) -> CardReading:
    """A reading of a card with this run on it, and perhaps processes of others."""
    own = held + CONTEXT
    return CardReading(
        uuid=f"GPU-{index}", name=job.card, total_bytes=job.total, free_bytes=job.total - own - others, own_bytes=own
    )


def summarise(job: Job, number: int, minute: float, at: float, held: int, *, size: int) -> RunSummary:
    """What a run has done so many minutes after its start: 80 steps in each of them."""
    shrank = size < job.size
    oom = "CUDA out of memory. Tried to allocate 1.38 GiB"
    setback = RunSetback(step=80 * job.shrinks_after, kind="retry", old_size=job.size, new_size=size, reason=oom)
    return RunSummary(
        number=number,
        at=at,
        steps=int(80 * minute),
        samples=int(80 * minute) * job.target,
        seconds=60 * minute,
        retries=int(shrank),
        micro_batch_size=size,
        peak_bytes=int(held * 0.97),
        held_bytes=held,
        setbacks=(setback,) if shrank and number == job.shrinks_after else (),
    )


def minutes() -> Iterator[tuple[int, float]]:
    """Numbers of summaries, each with the minutes since the start; from now on one every two seconds."""
    for minute in range(MINUTES):
        yield minute, minute
    began = time.time() - 60 * MINUTES
    for number in range(MINUTES, 10**6):
        yield number, (time.time() - began) / 60
        time.sleep(2)


def go_on(store: Store) -> None:
    """Hand in how the live runs have gone until now, and go on."""
    began = time.time() - 60 * MINUTES
    for number, minute in minutes():
        for index, job in enumerate(JOBS):
            shrank = minute >= job.shrinks_after
            size = job.size // 2 if shrank else job.size
            held = int(job.held(size) * random.uniform(0.99, 1.0))
            summary = summarise(job, number, minute, began + 60 * minute, held, size=size)
            card = read_card(index, job, held, others=30 * GIB if shrank else 0)
            store.add_summary(f"run{index}", summary.model_copy(update={"cards": (card,)}))


def announce(service: Service, address: str) -> None:
    """Fill the database and print the address."""
    fill(service.store)
    threading.Thread(target=go_on, args=(service.store,), daemon=True).start()
    print(f"autobatch: serving on {address}, to anyone on this machine; Ctrl-C ends it", flush=True)


def main() -> None:
    """Serve until Ctrl-C."""
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8765
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        try:
            serve(f"sqlite:///{Path(folder) / 'team.db'}", Settings(port=port, is_open=True), announce)
        except AutobatchError as error:
            sys.exit(f"autobatch: {error}; take another with make serve PORT={port + 1}")


if __name__ == "__main__":
    main()
