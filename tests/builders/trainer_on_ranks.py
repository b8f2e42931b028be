"""Trains Trainers on two ranks with autobatch; started by torchrun with a folder for the results.

A script. First each of some Trainers: each rank has memory for another number of samples, and the second runs out of
memory in two of the steps. Then on batches of several tasks: each rank has a batch of nine points, which may be of
different tasks.
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
from trainers import Classes, Interrupted, bert, small_device, train, trainer_of
from transformers import Trainer
from trl_trainers import embedder, reward, sft


def own_negatives(folder: Path, **options: Any) -> Any:
    """Texts that are compared with those of their rank; in one process, with those of their half of the batch."""
    trainer = embedder(folder, "MultipleNegativesRankingLoss", **options)
    if "RANK" not in os.environ:
        compare = trainer.loss.compute_loss_from_embeddings
        trainer.loss.compute_loss_from_embeddings = lambda embeddings, labels: (
            sum(compare([*halves], labels) for halves in zip(*[one.chunk(2) for one in embeddings], strict=True)) / 2
        )
    return trainer


def gathered_negatives(folder: Path, **options: Any) -> Any:
    """Texts that are compared with those of all ranks."""
    trainer = embedder(folder, "CachedMultipleNegativesRankingLoss", **options)
    trainer.loss.loss.gather_across_devices = "RANK" in os.environ
    return trainer


CASES = {
    "GPT-2": partial(trainer_of),
    "BERT for classes": partial(trainer_of, model=bert, data=Classes()),
    "SFT": sft,
    "reward": partial(
        reward, max_steps=5
    ),  # the last batch is not full, and accelerate fills it up with samples of the first
    "each rank's negatives": own_negatives,
    "all ranks' negatives": gathered_negatives,
}


KINDS = {
    "means of two tasks": [(0, 9), (20, 30), (210, 40), (50, 220), (60, 70)],
    "a sum on both ranks": [(0, 9), (20, 30), (110, 120), (50, 60), (130, 140)],
    "a mean and a sum in one step": [(0, 9), (20, 30), (40, 110), (50, 60)],
    "one that compares samples": [(0, 9), (20, 30), (40, 310), (50, 60)],
}
"""For each step the first point of each rank's batch: below 100 of a mean, then of a sum, a mean, a spread."""


class _WholeBatches(Trainer):
    """Steps whose loss is the mean of two ranks' losses, or their sum if they add up."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss = sum(model(**half)["loss"] for half in inputs["halves"])
        return loss if all(half["task"] == "sum" for half in inputs["halves"]) else loss / 2


def _kind_options(name: str) -> dict[str, Any]:
    chosen = {"remove_unused_columns": False, "learning_rate": 0.01, "max_grad_norm": 0.0}
    return {**chosen, "max_steps": len(KINDS[name]), "per_device_train_batch_size": 9}


def whole_batches(folder: Path, name: str) -> Trainer:
    """One process, whose batches are those of both ranks."""
    batches = [[*range(one, one + 9), *range(other, other + 9)] for one, other in KINDS[name]]

    def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"halves": [collate_tasks(samples[:9]), collate_tasks(samples[9:])]}

    class Whole(_WholeBatches, BatchesOfTasks):
        pass

    kind: Any = partial(Whole, batches=batches)
    return trainer_of(folder, linear_tasks, Points(), collate=collate, kind=kind, **_kind_options(name))


def _kind_on_rank(folder: Path, name: str, rank: int) -> Trainer:
    batches = [[*range(firsts[rank], firsts[rank] + 9)] for firsts in KINDS[name]]
    kind: Any = partial(BatchesOfTasks, batches=batches)
    options = {**_kind_options(name), "ddp_backend": "gloo"}
    return trainer_of(folder, linear_tasks, Points(), collate=collate_tasks, kind=kind, **options)


def _train_cases(folder: Path, rank: int) -> dict[str, Any]:
    found = {}
    for name, make in CASES.items():
        trained = train(
            lambda make=make: make(folder / f"output {rank}", per_device_train_batch_size=16, ddp_backend="gloo"),
            attached={"device": small_device(1700 if rank else 1400)},
            around=Interrupted({2: [60], 3: [200]}) if rank else None,
        )
        found[name] = {"ran": _gather((trained.sizes, trained.retries)), "logs": trained.recorder.logs}
        if rank == 0:
            torch.save(trained.model.state_dict(), folder / f"{name}.pt")
    return found


def _train_kinds(folder: Path, rank: int) -> dict[str, Any]:
    found = {}
    for name in KINDS:
        said = ""
        try:
            trained = train(partial(_kind_on_rank, folder / f"output {rank}", name, rank), attached={})
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        found[name] = _gather(said)
        if rank == 0 and not said:
            torch.save(trained.model.state_dict(), folder / f"{name}.pt")
    return found


def _gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, value)
    return everyone


def main(folder: Path) -> None:
    """Write the first rank's weights and logs, what both have run, and how each kind ended on both."""
    torch.set_num_threads(1)
    logging.getLogger("autobatch").setLevel(logging.ERROR)
    rank = int(os.environ["RANK"])
    own_negatives(folder / f"output {rank}", ddp_backend="gloo")  # writes the encoder that both losses train
    found = _train_cases(folder, rank) | _train_kinds(folder, rank)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
