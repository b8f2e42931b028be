"""Ends on the weights of several_gpus.py, in two processes of Lightning: ``python examples/with_lightning.py``."""

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import autobatch

dataset = TensorDataset(*map(torch.as_tensor, load_digits(return_X_y=True)))


class Digits(LightningModule):
    """Optimizes manually: the Runner does the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()

    def compute_loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0] / 16), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        model, step = self.trainer.strategy.model, Digits.compute_loss  # this module in DistributedDataParallel
        plan = autobatch.fit(model, 256, batch=dataset, step=step, optimizer=self.optimizers())
        self.runner = autobatch.Runner(plan, model, step=step, optimizer=self.optimizers())
        return DataLoader(dataset, batch_sampler=autobatch.ShareSampler(plan, dataset))

    def training_step(self, batch: list[torch.Tensor]) -> None:
        self.loss = self.runner.step(batch).loss


torch.manual_seed(0)
trainer = Trainer(max_epochs=3, devices=2, strategy="ddp", use_distributed_sampler=False, barebones=True)
trainer.fit(digits := Digits())
trainer.print(f"loss {digits.loss:.12f}, weights {sum(p.abs().sum() for p in digits.parameters()):.12f}")
