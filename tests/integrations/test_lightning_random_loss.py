"""Lightning modules whose loss draws random numbers."""

from __future__ import annotations

import os
import random

import pytest
import torch
from lightning_runs import load, silent
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from autobatch.errors import InexactSplit

SAMPLES = 16


def draws_a_time(self, inputs):
    """A diffusion's: each sample is noisy by a time of its own and weighed by 1/t, so that a few make up the mean."""
    times = torch.rand(len(inputs), dtype=inputs.dtype).clamp(min=0.001)
    noisy = inputs + times[:, None] * torch.randn_like(inputs)
    return self.net(noisy).square().mean(1) / times


def drops(self, inputs):
    """Dropout by a layer and by a function."""
    return F.dropout(self.net(F.dropout(inputs, 0.5)), 0.5).square().sum(1)


def draws_a_sign(self, inputs):
    return self.net(inputs).mean(1) + torch.randn(len(inputs), dtype=inputs.dtype)


def draws_on_the_host(self, inputs):
    weights = torch.tensor([1 / max(random.random(), 0.01) for _ in inputs], dtype=inputs.dtype)
    return self.net(inputs).square().mean(1) * weights


def draws_from_the_system(self, inputs):
    times = torch.tensor([(byte + 1) / 256 for byte in os.urandom(len(inputs))], dtype=inputs.dtype)
    return self.net(inputs).square().mean(1) / times


class Run:
    """One update of whole batches of 16, in micro-batches of at most 5: what it took and what its parts were."""

    def __init__(self, seed, loss, check, **options):
        from autobatch.integrations.lightning import Autobatch

        pl, parts, found = load(), [], {}

        class Net(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)).double()
                self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

            def training_step(self, batch, batch_idx):
                returned = loss(self, batch[0]) * self.scale
                parts.append((len(batch[0]), float(returned.detach())))
                self.log("logged", returned)
                return returned

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.0)

            def on_before_optimizer_step(self, optimizer):
                found["gradient"] = float(self.scale.grad)  # the loss is linear in it, and it is 1

            def on_train_batch_end(self, outputs, batch, batch_idx):
                found["loss"] = float(outputs["loss"])

        torch.manual_seed(seed)
        random.seed(seed)
        data = TensorDataset(torch.randn(SAMPLES, 4, dtype=torch.float64))
        callback = Autobatch(check=check, max_micro_batch=5, progress=False, reuse=False, **options)
        with silent():
            trainer = pl.Trainer(
                max_steps=1,
                callbacks=[callback],
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(Net(), DataLoader(data, SAMPLES))
        count = len(callback.result.micro_batch_sizes)
        assert count > 3
        self.parts = parts[-count:]
        self.loss, self.gradient = found["loss"], found["gradient"]
        self.logged = float(trainer.callback_metrics["logged"])

    def expect_mean(self):
        """Loss, gradient and what is logged are the mean of the parts by their samples."""
        expected = sum(size / SAMPLES * loss for size, loss in self.parts)
        assert self.loss == pytest.approx(expected, rel=1e-9)
        assert self.gradient == pytest.approx(expected, rel=1e-9)
        assert self.logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("losses", [draws_a_time, drops, draws_a_sign, draws_on_the_host])
def test_a_mean_is_a_mean_and_a_sum_is_refused_whatever_they_draw(losses, sign):
    """The check gives each sample the same numbers in the whole and in its part."""
    Run(0, lambda self, inputs: sign * losses(self, inputs).mean(), "raise").expect_mean()
    with pytest.raises(InexactSplit, match="sum"):
        Run(0, lambda self, inputs: sign * losses(self, inputs).sum(), "raise")


@pytest.mark.parametrize("check", ["warn", None])
def test_what_nobody_can_draw_again_is_a_mean_with_one_warning(check, caplog):
    """A warning of the check, where there is one."""
    Run(0, lambda self, inputs: draws_from_the_system(self, inputs).mean(), check).expect_mean()
    texts = [record.getMessage() for record in caplog.records if "not exact" in record.getMessage()]
    assert len(texts) == (check == "warn")


def test_what_nobody_can_draw_again_is_refused_where_it_has_to_be_checked():
    """By default nothing is trained that could not be compared."""
    with pytest.raises(InexactSplit):
        Run(0, lambda self, inputs: draws_from_the_system(self, inputs).mean(), "raise")
