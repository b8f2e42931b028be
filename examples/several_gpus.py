"""Ends on the same weights with any number of ranks: ``torchrun --nproc-per-node 2 examples/several_gpus.py``."""

import os

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


distributed.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.as_tensor(images / 16), torch.as_tensor(labels))
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double().to(device)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
runner = autobatch.Runner.fit(model, 256, batch=dataset, step=step, optimizer=optimizer)  # each rank finds its own size
sampler = autobatch.ShareSampler(runner.plan, dataset)  # this rank's share of each target batch
for result in runner.run(DataLoader(dataset, batch_sampler=sampler), epochs=3):
    loss = result.loss  # of all ranks
if runner.plan.rank == 0:
    print(f"loss {loss:.12f}, weights {sum(p.abs().sum() for p in network.parameters()):.12f}")
distributed.destroy_process_group()
