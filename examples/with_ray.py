"""Ends on the weights of several_gpus.py, in two workers of Ray Train: ``python examples/with_ray.py``."""

import ray.train.torch
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autobatch


def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """The mean over the samples of a micro-batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def train() -> str:
    """What each worker runs."""
    images, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.as_tensor(images / 16), torch.as_tensor(labels))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    runner = autobatch.Runner.fit(model, 256, batch=dataset, step=step, optimizer=optimizer)
    sampler = autobatch.ShareSampler(runner.plan, dataset)
    loader = DataLoader(dataset, batch_sampler=sampler)  # not in prepare_data_loader(): it would share again
    for result in runner.run(loader, epochs=3):
        loss = result.loss
    return f"loss {loss:.12f}, weights {sum(p.abs().sum() for p in network.parameters()):.12f}"


ray.init(include_dashboard=False)
workers = ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available())
print(ray.train.torch.TorchTrainer(train, scaling_config=workers).fit().return_value)
