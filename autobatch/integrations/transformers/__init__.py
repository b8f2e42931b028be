"""Lets a Hugging Face ``Trainer`` run its optimizer steps in micro-batches that fit, with the whole batch's gradient.

    from autobatch.integrations.transformers import attach

    attach(trainer, target_batch=256)
    trainer.train()

The Trainer's own ``training_step`` runs once a micro-batch, up to its loss. Clipping, scaler, optimizer, scheduler,
callbacks, logging and saving stay the Trainer's.
"""

from __future__ import annotations

from autobatch.integrations.transformers.attach import attach
from autobatch.integrations.transformers.training import TrainingStep

__all__ = ["TrainingStep", "attach"]
