"""Divides PyTorch optimizer steps into micro-batches that fit in memory, with the gradient of the whole batch.

Say how many samples one optimizer step should see; ``fit`` finds what fits the device, and ``Runner`` splits the rest
into accumulation steps, runs them exactly, survives running out of memory, and reports what it did.

The names here are the public ones; nothing is imported before it is used, so ``import autobatch`` costs no torch.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING

from autobatch._version import __version__
from autobatch.torch_internals import import_torch

if TYPE_CHECKING:
    from autobatch import batches, hooks, testing
    from autobatch.batch.lengths import by_length
    from autobatch.distributed.share_sampler import ShareSampler
    from autobatch.errors import (
        AutobatchError,
        CannotRetry,
        DoesNotFit,
        InexactSplit,
        InvalidArgument,
        NeedsBatch,
        RankFailed,
        RankLost,
    )
    from autobatch.exactness.verification import verify
    from autobatch.fitting.fit import fit
    from autobatch.inference.mapping import map  # noqa: A004 - autobatch.map, as the builtin
    from autobatch.memory.oom import is_oom
    from autobatch.plan import Plan
    from autobatch.planning.curve import MemoryCurve
    from autobatch.prediction.predict import predict
    from autobatch.prediction.prediction import Prediction
    from autobatch.records import DeviceInfo, Trial, Verdict
    from autobatch.result import StepResult
    from autobatch.runner import Runner
    from autobatch.step.losses import Mean, PerStep, Sum
    from autobatch.step.whole_batch import WholeBatch

__all__ = [
    "AutobatchError",
    "CannotRetry",
    "DeviceInfo",
    "DoesNotFit",
    "InexactSplit",
    "InvalidArgument",
    "Mean",
    "MemoryCurve",
    "NeedsBatch",
    "PerStep",
    "Plan",
    "Prediction",
    "RankFailed",
    "RankLost",
    "Runner",
    "ShareSampler",
    "StepResult",
    "Sum",
    "Trial",
    "Verdict",
    "WholeBatch",
    "__version__",
    "batches",
    "by_length",
    "fit",
    "hooks",
    "is_oom",
    "map",
    "predict",
    "testing",
    "verify",
]

_MODULES = {
    "batches": "autobatch.batches",
    "hooks": "autobatch.hooks",
    "testing": "autobatch.testing",
    "DeviceInfo": "autobatch.records",
    "Mean": "autobatch.step.losses",
    "MemoryCurve": "autobatch.planning.curve",
    "PerStep": "autobatch.step.losses",
    "Plan": "autobatch.plan",
    "Prediction": "autobatch.prediction.prediction",
    "Runner": "autobatch.runner",
    "ShareSampler": "autobatch.distributed.share_sampler",
    "StepResult": "autobatch.result",
    "Sum": "autobatch.step.losses",
    "Trial": "autobatch.records",
    "Verdict": "autobatch.records",
    "WholeBatch": "autobatch.step.whole_batch",
    "by_length": "autobatch.batch.lengths",
    "fit": "autobatch.fitting.fit",
    "is_oom": "autobatch.memory.oom",
    "map": "autobatch.inference.mapping",
    "predict": "autobatch.prediction.predict",
    "verify": "autobatch.exactness.verification",
}

_WITHOUT_TORCH = {
    "autobatch.errors",
    "autobatch.hooks",
    "autobatch.plan",
    "autobatch.planning.curve",
    "autobatch.prediction.prediction",
    "autobatch.records",
}

_LOGGER = logging.getLogger("autobatch")


class _LastResort(logging.Handler):
    """Writes warnings to stderr with the logger's name, unless any other handler gets them.

    Python's own handler of last resort prints the message alone.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        others = [*_LOGGER.handlers, *(logging.getLogger().handlers if _LOGGER.propagate else ())]
        if sys.stderr is not None and not any(handler is not self for handler in others):
            sys.stderr.write(f"{self.format(record)}\n")


_LOGGER.addHandler(_LastResort())


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'autobatch' has no attribute {name!r}")
    source = _MODULES.get(name, "autobatch.errors")
    if source not in _WITHOUT_TORCH:
        import_torch()
    module = importlib.import_module(source)
    return module if source == f"autobatch.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    """The public names."""
    return list(__all__)
