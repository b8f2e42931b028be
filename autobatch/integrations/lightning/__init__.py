"""Lets Lightning's ``Trainer`` run its optimizer steps in micro-batches that fit, with the whole batch's gradient.

    from autobatch.integrations.lightning import Autobatch

    trainer = L.Trainer(callbacks=[Autobatch(target_batch=256)])

``training_step`` runs once a micro-batch. Clipping, precision, optimizer, schedulers, callbacks, logging and
checkpoints stay Lightning's.
"""

from __future__ import annotations

from autobatch.integrations.lightning.callback import Autobatch

__all__ = ["Autobatch"]
