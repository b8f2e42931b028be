"""An accelerate script with its batch size found by measured steps: python examples/accelerate_batch_size.py."""

import logging

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from autobatch.integrations.accelerate import find_executable_batch_size  # in place of accelerate.utils

logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("autobatch").setLevel(logging.DEBUG)
accelerator = Accelerator(cpu=True)
images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.as_tensor(images / 16).float().view(-1, 1, 8, 8), torch.as_tensor(labels))


@find_executable_batch_size(starting_batch_size=1024, budget="4MiB")  # budget= stands in for a small card
def train(batch_size: int) -> str:
    """What is called with one size after another."""
    accelerator.free_memory()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.GELU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for inputs, targets in loader:
            losses.append(cross_entropy(model(inputs), targets))
            accelerator.backward(losses[-1])
            optimizer.step()
            optimizer.zero_grad()
    return f"loss {losses[0].item():.3f} to {losses[-1].item():.3f} with a batch size of {batch_size}"


print(train())
