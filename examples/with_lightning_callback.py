"""Ends on the weights of Lightning's own whole batches: ``python examples/with_lightning_callback.py``."""

import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from autobatch.integrations.lightning import Autobatch

logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("autobatch").setLevel(logging.INFO)
dataset = TensorDataset(*map(torch.as_tensor, load_digits(return_X_y=True)))


class Digits(LightningModule):
    """Optimizes automatically, and knows nothing of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 10)).double()

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.layers(batch[0] / 16), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


torch.manual_seed(0)
callback = Autobatch(target_batch=256, budget=None if torch.cuda.is_available() else "4MiB")
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = Trainer(max_epochs=3, devices=1, gradient_clip_val=1.0, callbacks=[callback], **options)
trainer.fit(digits := Digits(), DataLoader(dataset, batch_size=256, shuffle=True, drop_last=True))
print(f"loss {trainer.callback_metrics['loss']:.12f}, weights {sum(p.abs().sum() for p in digits.parameters()):.12f}")
print(f"micro-batches {callback.result.micro_batch_sizes if callback.result else ()}")
