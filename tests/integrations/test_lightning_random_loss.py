"""How a loss that draws random numbers is read in Lightning: as the mean or the sum that it is, whatever it drew."""

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
SEEDS = range(2)
CHECKS = ["raise", "warn", None]


def draws_a_time(self, inputs):
    """A diffusion's: each sample is noisy by a time of its own and weighed by 1/t, so that a few make up the mean."""
    times = torch.rand(len(inputs), dtype=inputs.dtype).clamp(min=0.001)
    noisy = inputs + times[:, None] * torch.randn_like(inputs)
    return self.net(noisy).square().mean(1) / times


def drops(self, inputs):
    """Dropout by a layer and by a function."""
    return F.dropout(self.net(F.dropout(inputs, 0.5)), 0.5).square().sum(1)


def draws_a_sign(self, inputs):
    """The losses of samples have both signs."""
    return self.net(inputs).mean(1) + torch.randn(len(inputs), dtype=inputs.dtype)


def draws_on_the_host(self, inputs):
    """Python's generator, once a sample."""
    weights = torch.tensor([1 / max(random.random(), 0.01) for _ in inputs], dtype=inputs.dtype)
    return self.net(inputs).square().mean(1) * weights


def draws_from_the_system(self, inputs):
    """Numbers that nobody can give again."""
    times = torch.tensor([(byte + 1) / 256 for byte in os.urandom(len(inputs))], dtype=inputs.dtype)
    return self.net(inputs).square().mean(1) / times


def counts_labels(self, inputs):
    """A mean over labels, which three samples of four have not: a part without any has a loss of 0."""
    has_label = (torch.arange(len(inputs)) == 0).to(inputs.dtype) if len(inputs) > 2 else inputs.new_zeros(len(inputs))
    return self.net(inputs).square().mean(1) * has_label


def loss_of(losses, reduce, sign):
    """One number of those of the samples."""
    return sign * (losses.mean() if reduce == "mean" else losses.sum())


def warnings_of_loss(caplog):
    """What was said of the loss, and nothing of a busy machine."""
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in texts if "taken as a mean" in text or "not exact" in text]


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

    def expect(self, reduce):
        """Loss and gradient are the mean of the parts by their samples, or their sum."""
        weights = {"mean": [size / SAMPLES for size, _ in self.parts], "sum": [1.0] * len(self.parts)}[reduce]
        expected = sum(weight * loss for weight, (_, loss) in zip(weights, self.parts, strict=True))
        assert self.loss == pytest.approx(expected, rel=1e-9)
        assert self.gradient == pytest.approx(expected, rel=1e-9)
        return expected


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("losses", [draws_a_time, drops, draws_a_sign, draws_on_the_host])
def test_a_loss_is_read_as_what_it_is_whatever_it_draws(losses, reduce, sign, check, caplog):
    """A mean stays a mean and a sum a sum, for each seed and each ``check=``, and nothing is warned of."""
    for seed in SEEDS:
        run = Run(seed, lambda self, inputs: loss_of(losses(self, inputs), reduce, sign), check)
        assert run.logged == pytest.approx(run.expect(reduce), rel=1e-5)
    assert not warnings_of_loss(caplog)


@pytest.mark.parametrize("check", ["warn", None])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_what_nobody_can_draw_again_is_a_mean_with_one_warning(reduce, check, caplog):
    """Lightning's own convention; one warning, of the check where there is one, and no size of a number decides."""
    for seed in SEEDS:
        caplog.clear()
        Run(seed, lambda self, inputs: loss_of(draws_from_the_system(self, inputs), reduce, 1), check).expect("mean")
        texts = warnings_of_loss(caplog)
        assert len(texts) == 1
        assert "Net" in texts[0]
        assert "weigh=" not in texts[0]
        assert "\n" not in texts[0]


def test_what_nobody_can_draw_again_is_refused_where_it_has_to_be_checked():
    """By default nothing is trained that could not be compared."""
    with pytest.raises(InexactSplit):
        Run(0, lambda self, inputs: draws_from_the_system(self, inputs).sum(), "raise")


def test_a_part_with_a_loss_of_zero_makes_no_sum(caplog):
    """The whole has then the loss of the other part, which is their sum and no mean by samples: nothing is shown."""
    Run(0, lambda self, inputs: counts_labels(self, inputs).sum(), None).expect("mean")
    assert caplog.text.count("taken as a mean") == 1


def test_a_step_that_does_not_run_with_draws_held_still_is_trained_all_the_same(monkeypatch, caplog):
    """Such as kernels that know no float32: what the step itself shows is then compared."""

    def fail(*_, **__):
        raise RuntimeError("this kernel knows bfloat16 only")

    monkeypatch.setattr("autobatch.integrations.lightning.log_rules.deterministic", fail)
    Run(0, lambda self, inputs: self.net[0](inputs).square().sum(), None).expect("sum")
    assert not caplog.text
    Run(0, lambda self, inputs: drops(self, inputs).sum(), None).expect("mean")
    assert caplog.text.count("taken as a mean") == 1
