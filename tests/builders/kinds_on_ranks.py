"""Trains on batches of several tasks, on two ranks with autobatch; started by torchrun with a folder for the results.

A script. Of each step both ranks have a batch of nine points, which may be of different tasks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tasks import BatchesOfTasks, Points, collate_tasks, linear_tasks
from trainers import train, trainer_of
from transformers import Trainer

CASES = {
    "means of two tasks": [(0, 9), (20, 30), (210, 40), (50, 220), (60, 70)],
    "a sum on both ranks": [(0, 9), (20, 30), (110, 120), (50, 60), (130, 140)],
    "a mean and a sum in one step": [(0, 9), (20, 30), (40, 110), (50, 60)],
    "one that compares samples": [(0, 9), (20, 30), (40, 310), (50, 60)],
}
"""For each step the first point of each rank's batch: below 100 of a mean, then of a sum, a mean, a spread."""


class _WholeBatches(Trainer):
    """Steps whose loss is the mean of what two ranks would have, or their sum where they add up."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """Of each half."""
        loss = sum(model(**half)["loss"] for half in inputs["halves"])
        return loss if all(half["task"] == "sum" for half in inputs["halves"]) else loss / 2


def options_of(name: str) -> dict[str, Any]:
    """Arguments of the Trainer."""
    chosen = {"remove_unused_columns": False, "learning_rate": 0.01, "max_grad_norm": 0.0}
    return {**chosen, "max_steps": len(CASES[name]), "per_device_train_batch_size": 9}


def whole_batches(folder: Path, name: str) -> Trainer:
    """One process, whose batches are those of both ranks."""
    batches = [[*range(one, one + 9), *range(other, other + 9)] for one, other in CASES[name]]

    def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"halves": [collate_tasks(samples[:9]), collate_tasks(samples[9:])]}

    class Whole(_WholeBatches, BatchesOfTasks):
        pass

    kind: Any = partial(Whole, batches=batches)
    return trainer_of(folder, linear_tasks, Points(), collate=collate, kind=kind, **options_of(name))


def on_rank(folder: Path, name: str, rank: int) -> Trainer:
    """The batches of one rank."""
    batches = [[*range(firsts[rank], firsts[rank] + 9)] for firsts in CASES[name]]
    kind: Any = partial(BatchesOfTasks, batches=batches)
    options = {**options_of(name), "ddp_backend": "gloo"}
    return trainer_of(folder, linear_tasks, Points(), collate=collate_tasks, kind=kind, **options)


def main(folder: Path) -> None:
    """Write the first rank's weights, and with which error each case has ended on both."""
    torch.set_num_threads(1)
    logging.getLogger("autobatch").setLevel(logging.ERROR)
    rank, found = int(os.environ["RANK"]), {}
    for name in CASES:
        make = partial(on_rank, folder / f"output {rank}", name, rank)
        said = ""
        try:
            trained = train(make, attached={})
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, said)
        found[name] = everyone
        if rank == 0 and not said:
            torch.save(trained.model.state_dict(), folder / f"{name}.pt")
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
