"""Trains a Lightning module on two ranks with autobatch; started by torchrun with a package and a folder for results.

A script. Each rank has memory for another number of samples, and the second runs out of memory in two of the steps.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_runs import load, small_device, train


def main(package: str, folder: Path) -> None:
    """Write the first rank's weights and logs, and what both have run."""
    torch.set_num_threads(1)
    logging.getLogger("autobatch").setLevel(logging.ERROR)
    rank = int(os.environ["RANK"])
    strategies = load(package).strategies
    trained = train(
        package,
        attached={"device": small_device(1700 if rank else 1500), "target_batch": 32},
        faults={1: [60], 2: [200]} if rank else None,
        batch_size=16,
        strategy=strategies.DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=100)),
        devices=2,
    )
    everyone = [None, None]
    dist.all_gather_object(everyone, (trained.sizes, trained.retries, trained.logs))
    if rank == 0:
        torch.save(trained.module.state_dict(), folder / "weights.pt")
        (folder / "found.json").write_text(json.dumps(everyone), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
