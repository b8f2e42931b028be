"""Defines ``Autobatch``, the callback of Lightning's Trainer.

Lightning is published as ``lightning`` and as ``pytorch_lightning``. The two hold the same classes twice, and a Trainer
takes only its own, so nothing of Lightning is imported by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from autobatch._arguments import check_target
from autobatch.errors import InvalidArgument
from autobatch.fitting.options import IntegrationOptions, Options, names_of, refuse_unknown
from autobatch.integrations.lightning.training import Optimization, refuse_accumulation
from autobatch.plan import Plan
from autobatch.result import StepResult
from autobatch.runner import Runner
from autobatch.step.workload import Weigh, Workload

if TYPE_CHECKING:
    from typing_extensions import Unpack

_STRATEGIES = frozenset(("SingleDeviceStrategy", "DDPStrategy"))
_CHANGES_THE_TARGET = {
    "BatchSizeFinder": "changes the target batch; leave it out, autobatch replaces it",
    "GradientAccumulationScheduler": "changes the target batch while training; leave it out",
}
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def callback_bases() -> tuple[Any, ...]:
    """Return ``Callback`` of each package that was imported before, or else of each that is installed.

    Raises:
        InvalidArgument: Neither is installed.
    """
    imported = [name for name in _PACKAGES if name in sys.modules]
    names = imported or [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0])]
    if not names:
        raise InvalidArgument(
            "autobatch.integrations.lightning needs Lightning, and neither lightning nor pytorch_lightning is "
            "installed: pip install lightning"
        )
    return tuple(importlib.import_module(name).Callback for name in names)


class Autobatch(*callback_bases()):  # type: ignore[misc] # which of two packages it is shows only at run time
    """Runs each batch of the loader as one optimizer step in micro-batches that fit.

    ``Trainer(callbacks=[Autobatch(target_batch=256)])``, with a loader of ``batch_size=256`` (its share, with several
    ranks). On the first batch ``fit`` finds the size on the module's own ``training_step``. A step that runs out of
    memory is retried with less, as in ``Runner``. Steps, epochs and learning rates are those of the whole batch.
    """

    def __init__(
        self, target_batch: int | None = None, *, weigh: Weigh | None = None, **options: Unpack[IntegrationOptions]
    ) -> None:
        """Check the arguments; the first batch uses them.

        Args:
            target_batch: Samples that one optimizer step should see, over all ranks. Default: what the loader gives,
                times the ranks.
            weigh: ``weigh(micro_batch) -> float`` counts the units of which the loss of ``training_step`` is a mean. It
                weighs values that are logged without a ``batch_size=``, too. Default: samples.
            **options: ``budget``, ``headroom``, ``max_micro_batch``, ``objective``, ``accumulate_in_float32``,
                ``reuse``, ``progress`` and ``strategies`` as in ``fit``; ``hooks`` as in ``Runner``; and these:
                ``check``: what to do if the loss cannot be split exactly. ``"raise"`` is the default, ``"warn"`` warns,
                ``None`` compares no gradients and takes the loss as a mean.
                ``device``: the device's memory; default: where the module is.
                ``keep``: objects outside the module that the step changes, as in ``Runner``, such as a metric in a
                list. Metrics that are attributes of the module need not be named.

        Raises:
            InvalidArgument: An argument is unknown or cannot be used.

        ``Trainer.fit`` then raises the errors of ``fit`` and ``Runner``: ``InexactSplit`` for a loss that compares
        samples or is a sum, and ``InvalidArgument`` for an unsupported training, with advice.
        """
        refuse_unknown("Autobatch()", options, ["target_batch", "weigh", *names_of(IntegrationOptions)])
        target = None if target_batch is None else check_target(target_batch)
        self._optimization: Optimization | None = None
        self._options = Options.read(options, target=target, weigh=weigh)

    @property
    def plan(self) -> Plan | None:
        """The plan, made on the first batch; ``None`` before."""
        return None if self._optimization is None else self._optimization.plan

    @property
    def runner(self) -> Runner | None:
        """The Runner of the current ``Trainer.fit``."""
        return None if self._optimization is None else self._optimization.runner

    @property
    def result(self) -> StepResult | None:
        """The result of the last step."""
        return None if self._optimization is None else self._optimization.result

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be exact, and replace the loop's ``run``."""
        if stage == "fit":
            refuse_unsupported(trainer, pl_module)
            self._optimization = Optimization(trainer, pl_module, self._options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse optimizers that cannot step once a batch; Lightning has made them by now."""
        for optimizer in trainer.optimizers:
            refuse_optimizer(optimizer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the loop's ``run``; plan and result can still be read."""
        if self._optimization is not None:
            self._optimization.release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the loop's ``run``."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """Return plan and size, for a checkpoint."""
        return {} if self._optimization is None else self._optimization.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take plan and size of a checkpoint; Lightning calls it before the first batch."""
        if self._optimization is not None:
            self._optimization.saved = state_dict


def refuse_unsupported(trainer: Any, module: Any) -> None:
    """Raise InvalidArgument for a training whose steps cannot run in micro-batches of any size."""
    strategy, reason = type(trainer.strategy).__name__, ""
    changing = [kind for kind in (type(one).__name__ for one in trainer.callbacks) if kind in _CHANGES_THE_TARGET]
    if not module.automatic_optimization:
        reason = (
            "manual optimization: your training_step owns the loop; let Lightning step the optimizer "
            "(automatic_optimization = True), or leave this callback out and use autobatch.Runner in training_step"
        )
    elif "dataloader_iter" in inspect.signature(module.training_step).parameters:
        reason = (
            "training_step(dataloader_iter) fetches its own batches, which cannot be divided; take (batch, batch_idx)"
        )
    elif "DeepSpeed" in strategy:
        reason = f"{strategy} owns the backward pass and counts its calls; use plan.settings('deepspeed')"
    elif "FSDP" in strategy or "ModelParallel" in strategy:
        reason = (
            f"{strategy} gathers parameters inside the passes, where ranks that run different micro-batches would wait "
            f"for each other; use strategy='ddp'"
        )
    elif strategy not in _STRATEGIES:
        reason = f"{strategy} is not supported; use one device or strategy='ddp', or plan.settings('lightning')"
    elif changing:
        reason = f"{changing[0]} {_CHANGES_THE_TARGET[changing[0]]}"
    if reason:
        raise InvalidArgument(f"{type(module).__name__}: {reason}")
    refuse_accumulation(trainer, module)


def refuse_optimizer(optimizer: Any, module: Any) -> None:
    """Raise InvalidArgument for an optimizer that runs several closures or inside the backward pass, and for none."""
    name = type(module).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            f"{name}: LBFGS runs training_step several times in a step, with parameters that move; choose another "
            f"optimizer"
        )
    if type(optimizer).__name__ == "_MockOptimizer":  # Lightning's own, where there is none
        raise InvalidArgument(f"{name}.configure_optimizers() returned no optimizer: there is no step to divide")
    Workload(module, module.training_step)  # refuses hooks on gradients
