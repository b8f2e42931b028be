"""A Trainer's refusal names the cause that is there, whichever reading of its loss was the nearest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from autobatch.errors import InexactSplit
from autobatch.integrations.transformers import attach


class Classifier(nn.Module):
    """Takes its own mean, or what the Trainer has counted."""

    def __init__(self, norm) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        logits = self.net(x)
        if isinstance(self.net[1], nn.BatchNorm1d) or num_items_in_batch is None:
            loss = nn.functional.cross_entropy(logits, labels)
        else:
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
        return {"loss": loss, "logits": logits}


class Penalised(Trainer):
    """Adds a penalty on weights once a micro-batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + 1e-2 * sum(parameter.square().sum() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "norm", "cause"),
    [
        (Trainer, nn.BatchNorm1d, "BatchNorm in train mode (net.1)"),
        (Penalised, nn.LayerNorm, "a term that does not depend on the samples"),
    ],
    ids=["BatchNorm", "a penalty"],
)
def test_the_refusal_names_the_one_cause(kind, norm, cause, tmp_path):
    """And none of a reading that is not the loss's, nor samples that depend on each other."""
    generator = torch.Generator().manual_seed(1)
    data = [
        {"x": torch.randn(8, generator=generator), "labels": torch.randint(3, (), generator=generator)}
        for _ in range(64)
    ]
    options = {"max_steps": 1, "per_device_train_batch_size": 32, "report_to": [], "disable_tqdm": True, "optim": "sgd"}
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, save_strategy="no", **options)
    trainer = kind(model=Classifier(norm), args=arguments, train_dataset=data)
    attach(trainer, target_batch=32, max_micro_batch=8, reuse=False)
    with pytest.raises(InexactSplit) as raised:
        trainer.train()
    assert cause in str(raised.value)
    for other in ("depends on the others", "is counted otherwise", "is read as a mean"):
        assert other not in str(raised.value)
