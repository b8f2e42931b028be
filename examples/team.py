"""The service of a team with some plans, runs and predictions in it, for a look at its pages.

    python examples/team.py            # or: make serve

Nothing is trained: the numbers are made up. Four runs are live while the server is up. Ctrl-C ends it; nothing is kept.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from autobatch.planning.curve import fit_curve
from autobatch.planning.division import balance
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import DeviceInfo, Trial
from autobatch.service.records import CardReading, PlanIn, PredictedPoint, PredictionIn, RunEnd, RunIn, RunSummary
from autobatch.service.server import serve
from autobatch.service.state import Service, Settings
from autobatch.service.store import Store

GIB = 2**30
CARDS = {"NVIDIA L4": 22 * GIB, "NVIDIA A100-SXM4-80GB": 79 * GIB, "NVIDIA H100 80GB HBM3": 79 * GIB}
JOBS = (
    # model, host, user, card, largest micro-batch, bytes of one sample, bytes without any
    ("GPT2LMHeadModel", "node1", "ada", "NVIDIA H100 80GB HBM3", 96, 0.72 * GIB, 6 * GIB),
    ("ViTForImageClassification", "node1", "bob", "NVIDIA H100 80GB HBM3", 192, 0.35 * GIB, 4 * GIB),
    ("UNet2DConditionModel", "node2", "ada", "NVIDIA A100-SXM4-80GB", 24, 2.9 * GIB, 7 * GIB),
    ("T5ForConditionalGeneration", "node3", "eve", "NVIDIA L4", 43, 0.41 * GIB, 2 * GIB),
)


def fill(store: Store) -> None:
    """Store a plan, a prediction, a run that has ended and one that is live for each job."""
    now = time.time()
    for index, (model, host, user, card, size, sample, base) in enumerate(JOBS):
        step, total = f"{index:016x}", CARDS[card]
        points = [PredictedPoint(size=n, reserved_bytes=int(base + n * sample)) for n in (1, 2, size // 2, size)]
        prediction = PredictionIn(
            id=f"prediction{index}",
            made_at=now - 90000,
            model=model,
            step=step,
            card=card,
            total_bytes=total,
            context_bytes=GIB // 2,
            target_batch=512,
            micro_batch_size=size,
            points=tuple(points),
        )
        store.add_prediction(prediction)
        store.add_plan(PlanIn(id=f"plan{index}", host=host, step=step, plan=make_plan(model, card, size, sample, base)))
        for ended in (True, False):
            run = RunIn(
                id=f"run{index}{'old' if ended else ''}",
                plan_id=f"plan{index}",
                host=host,
                user=user,
                pid=1000 + index,
                started_at=now - (80000 if ended else 3000),
                model=model,
                step=step,
                target_batch=512,
                micro_batch_size=size,
                limit_bytes=int(total * 0.95),
                cards=(read_card(index, card, 0.9),),
            )
            store.add_run(run)
        store.end_run(f"run{index}old", RunEnd(at=now - 40000, outcome="finished"))


def make_plan(model: str, card: str, size: int, sample: float, base: float) -> PlanRecord:
    """A plan as fit() makes it."""
    tried = [(n, int((base + n * sample) * random.uniform(0.97, 1.02))) for n in (2, size // 2, size)]
    trials = tuple(
        Trial(micro_batch_size=n, outcome="fits", peak_allocated=peak, peak_reserved=peak, seconds=n / 100)
        for n, peak in tried
    )
    sizes = balance(512, size)
    return PlanRecord(
        target_batch=512,
        world_size=1,
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        budget_bytes=CARDS[card],
        headroom_bytes=CARDS[card] // 20,
        peak_bytes=tried[-1][1],
        curve=fit_curve(trials),
        trials=trials,
        device=DeviceInfo(kind="cuda", name=card, total_bytes=CARDS[card]),
        version="0.1.0",
        model=model,
        made_at=time.time() - 86000,
        fingerprint=f"{hash(model) % 16**16:032x}",
    )


def read_card(index: int, card: str, share: float) -> CardReading:
    """A reading of a card that has only this run on it."""
    own = int(CARDS[card] * share)
    return CardReading(
        uuid=f"GPU-{index}", name=card, total_bytes=CARDS[card], free_bytes=CARDS[card] - own, own_bytes=own
    )


def go_on(store: Store) -> None:
    """Hand in a summary of each live run every two seconds."""
    shrunk = False
    for number in range(10**6):
        for index, (_, _, _, card, size, sample, base) in enumerate(JOBS):
            shrunk = shrunk or number > 10
            now_size = size // 2 if index == 2 and shrunk else size
            held = int((base + now_size * sample) * random.uniform(0.95, 1.02))
            summary = RunSummary(
                number=number,
                at=time.time(),
                steps=40 * number,
                samples=40 * 512 * number,
                seconds=30.0 * number,
                retries=1 if index == 2 and shrunk else 0,
                micro_batch_size=now_size,
                peak_bytes=int(held * 0.97),
                held_bytes=held,
                cards=(read_card(index, card, held / CARDS[card]),),
            )
            store.add_summary(f"run{index}", summary)
        time.sleep(2)


def announce(service: Service, address: str) -> None:
    """Fill the database and print the address."""
    fill(service.store)
    threading.Thread(target=go_on, args=(service.store,), daemon=True).start()
    print(f"autobatch: serving on {address}, to anyone on this machine; Ctrl-C ends it", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        port = int(sys.argv[1]) if len(sys.argv) > 1 else 8765
        serve(f"sqlite:///{Path(folder) / 'team.db'}", Settings(port=port, is_open=True), announce)
