"""Lets Lightning's ``Trainer`` run its optimizer steps in micro-batches that fit, with the whole batch's gradient.

    from autobatch.integrations.lightning import Autobatch

    trainer = L.Trainer(callbacks=[Autobatch(target_batch=256)])

Covers automatic optimization under both package names, ``lightning`` and ``pytorch_lightning``, on one device or with
``DDPStrategy``. ``training_step`` runs once a micro-batch; clipping, precision, optimizer, schedulers, callbacks,
logging and checkpoints stay Lightning's. Does not cover manual optimization, which is a loop of the user's own, nor
strategies that own the passes: ``refusals``.
"""

from __future__ import annotations

from autobatch.integrations.lightning.callback import Autobatch

__all__ = ["Autobatch"]
