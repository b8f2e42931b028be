"""The loops of other libraries with strategies=: blocks are recomputed in training too, with the same weights."""

from __future__ import annotations

from functools import partial

import lightning_runs
import pytest
import torch
import trainers
from text_blocks import make_model, make_texts, step
from torch.utils.data import TensorDataset

ROOM = 2**32


@torch.no_grad()
def differ(one, other) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((left - right).norm() / left.norm()) for left, right in pairs)


def test_a_trainer_trains_where_not_one_sample_fits_plainly(tmp_path):
    """In float64 with dropout: as it trains in micro-batches of one sample with more memory."""
    model = partial(trainers.gpt2, 0.1, n_layer=4, n_positions=64, n_embd=16)
    make = partial(trainers.trainer_of, tmp_path, model, max_steps=2, per_device_train_batch_size=4)
    options = {"device": None, "max_micro_batch": 1, "reuse": False, "check": None, "progress": False}
    plain = trainers.train(make, attached={**options, "budget": ROOM})
    plan = plain.step.plan
    resident = plan.trials[0].resident_bytes
    tight = resident + int(0.7 * (plan.peak_bytes - resident))
    for strategies, is_as_planned, most in (
        (["checkpoint"], lambda plan: plan.checkpointing is not None, 1e-12),
        ("auto", lambda plan: plan.chunked_loss is not None, 1e-7),  # plainly its loss is in float32
    ):
        found = trainers.train(make, attached={**options, "budget": tight, "strategies": strategies})
        assert is_as_planned(found.step.plan)
        assert found.step.runner.steps == 2
        assert differ(plain.model, found.model) <= most


def test_lightning_trains_where_not_one_sample_fits_plainly():
    """As the Trainer of Hugging Face does."""
    pl = lightning_runs.load()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model(torch.float64)

        def training_step(self, batch, batch_idx):
            return step(self.net, batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    options = {"device": None, "max_micro_batch": 1, "reuse": False, "check": None}
    texts = TensorDataset(make_texts(8))
    train = partial(lightning_runs.train, batch_size=4, dataset=texts)
    plain = train(module=Module(), attached={**options, "budget": ROOM})
    tight = int(0.7 * plain.callback.plan.peak_bytes)
    found = train(module=Module(), attached={**options, "budget": tight, "strategies": "auto"})
    assert found.callback.plan.checkpointing is not None
    assert found.sizes == [(1, 1, 1, 1)] * 2
    assert differ(plain.module, found.module) <= 1e-12


def test_the_frameworks_refuse_an_unknown_strategy(tmp_path):
    """At once, as fit does."""
    with pytest.raises(trainers.autobatch.InvalidArgument, match="strategies="):
        trainers.train(partial(trainers.trainer_of, tmp_path), attached={"strategies": "offload"})
    with pytest.raises(trainers.autobatch.InvalidArgument, match="strategies="):
        lightning_runs.train(attached={"strategies": "offload"})
