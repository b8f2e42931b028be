"""Ends on the weights of several_gpus.py: ``accelerate launch --multi_gpu --num_processes 2 with_accelerate.py``."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autobatch


def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The mean over the samples of a micro-batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


accelerator = Accelerator(cpu=not torch.cuda.is_available())
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.as_tensor(images / 16), torch.as_tensor(labels))
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
model, optimizer = accelerator.prepare(network, optimizer)  # not the loader: its batches would be divided again
runner = autobatch.Runner.fit(model, 256, batch=dataset, step=step, optimizer=optimizer)
loader = DataLoader(dataset, batch_sampler=autobatch.ShareSampler(runner.plan, dataset))
for result in runner.run(loader, epochs=3):  # in place of accelerator.backward()
    loss = result.loss
accelerator.print(f"loss {loss:.12f}, weights {sum(p.abs().sum() for p in network.parameters()):.12f}")
accelerator.end_training()
