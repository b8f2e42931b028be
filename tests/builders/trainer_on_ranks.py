"""Trains each of some Trainers on two ranks with autobatch; started by torchrun with a folder for the results.

A script. Each rank has memory for another number of samples, and on the second memory ends in two of the steps.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from trainers import Classes, Interrupted, bert, small_device, train, trainer_of
from trl_trainers import reward, sft

CASES = {
    "GPT-2": partial(trainer_of),
    "BERT for classes": partial(trainer_of, model=bert, data=Classes()),
    "SFT": sft,
    "reward": partial(
        reward, max_steps=5
    ),  # the last batch is not full, and accelerate fills it up with samples of the first
}


def main(folder: Path) -> None:
    """Write the first rank's weights and logs, and what both have run."""
    torch.set_num_threads(1)
    logging.getLogger("autobatch").setLevel(logging.ERROR)
    rank = int(os.environ["RANK"])
    found = {}
    for name, make in CASES.items():
        trained = train(
            lambda make=make: make(folder / f"output {rank}", per_device_train_batch_size=16, ddp_backend="gloo"),
            attached={"device": small_device(1700 if rank else 1400)},
            around=Interrupted({2: [60], 3: [200]}) if rank else None,
        )
        everyone = [None, None]
        dist.all_gather_object(everyone, (trained.sizes, trained.retries))
        found[name] = {"ran": everyone, "logs": trained.recorder.logs}
        if rank == 0:
            torch.save(trained.model.state_dict(), folder / f"{name}.pt")
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
