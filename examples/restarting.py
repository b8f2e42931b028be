"""Goes on after a crash: ``torchrun --nproc-per-node 2 --max-restarts 3 examples/restarting.py checkpoint.pt``."""

import os
import sys
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import autobatch


def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The mean over the samples of a micro-batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


checkpoint = Path(sys.argv[1])  # in a folder that all ranks see
part = checkpoint.with_suffix(".part")
distributed.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.as_tensor(images / 16), torch.as_tensor(labels))
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double().to(device)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
runner = autobatch.Runner.fit(model, 256, batch=dataset, step=step, optimizer=optimizer)
plan, sampler = runner.plan, autobatch.ShareSampler(runner.plan, dataset)
loader = DataLoader(dataset, batch_sampler=sampler)
stateful = {"model": network, "optimizer": optimizer, "sampler": sampler}
if checkpoint.exists():  # from any number of ranks
    saved = torch.load(checkpoint, map_location=device)
    for name, thing in stateful.items():
        thing.load_state_dict(saved[name])
    print(f"rank {plan.rank} of {plan.world_size} goes on with batch {sampler.first_batch} of epoch {sampler.epoch}")
for epoch in range(sampler.epoch, 3):
    sampler.set_epoch(epoch)
    for done, _ in enumerate(runner.run(loader), start=sampler.first_batch + 1):
        if plan.rank == 0 and done % 3 == 0:
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "sampler": sampler.state_dict(done)}, part)
            part.replace(checkpoint)  # so that it is whole at any time
if plan.rank == 0:
    print(f"weights {sum(p.abs().sum() for p in network.parameters()):.12f}")
distributed.destroy_process_group()
