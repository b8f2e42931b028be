"""Defines ``Autobatch``, the callback of Lightning's Trainer.

Covers its arguments, when it comes into effect, and what is in checkpoints. What it does with a batch: ``training``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autobatch._arguments import check_target
from autobatch.fitting.options import IntegrationOptions, Options, names_of, refuse_unknown
from autobatch.integrations.lightning.framework import callback_bases
from autobatch.integrations.lightning.refusals import refuse_optimizer, refuse_unsupported
from autobatch.integrations.lightning.training import Optimization
from autobatch.plan import Plan
from autobatch.result import StepResult
from autobatch.runner import Runner
from autobatch.step.workload import Weigh

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Autobatch"]


class Autobatch(*callback_bases()):  # type: ignore[misc] # which of two packages it is shows only at run time
    """Runs each batch of the loader as one optimizer step in micro-batches that fit.

    ``Trainer(callbacks=[Autobatch(target_batch=256)])``, with a loader of ``batch_size=256`` (its share, with several
    ranks). On the first batch ``fit`` finds the size on the module's own ``training_step``. A step that runs out of
    memory goes on with less, as in ``Runner``; steps, epochs and learning rates are those of the whole batch.
    """

    def __init__(
        self,
        target_batch: int | None = None,
        *,
        weigh: Weigh | None = None,
        **options: Unpack[IntegrationOptions],
    ) -> None:
        """Check the arguments; the first batch uses them.

        Args:
            target_batch: Samples one optimizer step should see, over all ranks; default: what the loader gives, times
                the ranks.
            weigh: What the loss of ``training_step`` is a mean over, and with it the values that it logs without a
                ``batch_size=``: ``weigh(micro_batch) -> float``. Default: samples.
            **options: ``budget``, ``headroom``, ``max_micro_batch``, ``objective``, ``accumulate_in_float32``,
                ``reuse`` and ``progress`` as in ``fit``; ``hooks`` as in ``Runner``; and these:
                ``check``: what to do if the loss cannot be split exactly. ``"raise"`` is the default, ``"warn"`` adds a
                warning to the plan, ``None`` compares no gradients. How the loss and logged values are put together is
                measured in any case.
                ``device``: the device's memory; default: where the module is.
                ``keep``: objects outside the module that the step changes, as in ``Runner``, such as a metric in a
                list. Metrics that are attributes of the module need not be named.

        Raises:
            InvalidArgument: An argument is unknown or cannot be used.

        ``Trainer.fit`` then raises what ``fit`` and ``Runner`` raise; ``InexactSplit`` for a loss that compares
        samples; ``InvalidArgument`` for a training that cannot be supported, and what to do instead.
        """
        refuse_unknown("Autobatch()", options, ["target_batch", "weigh", *names_of(IntegrationOptions)])
        target = None if target_batch is None else check_target(target_batch)
        self._optimization: Optimization | None = None
        self._options = Options.read(options, target=target, weigh=weigh)

    @property
    def plan(self) -> Plan | None:
        """Made on the first batch; ``None`` before."""
        return None if self._optimization is None else self._optimization.plan

    @property
    def runner(self) -> Runner | None:
        """Runs the batches of the current ``Trainer.fit``."""
        return None if self._optimization is None else self._optimization.runner

    @property
    def result(self) -> StepResult | None:
        """Of the last step."""
        return None if self._optimization is None else self._optimization.result

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot be exact, and take the place of the loop's ``run``."""
        if stage == "fit":
            refuse_unsupported(trainer, pl_module)
            self._optimization = Optimization(trainer, pl_module, self._options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse optimizers that cannot be stepped once a batch; Lightning has made them by now."""
        for optimizer in trainer.optimizers:
            refuse_optimizer(optimizer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the place back; plan and result can still be read."""
        if self._optimization is not None:
            self._optimization.release()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the place back."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """Plan and size, for a checkpoint."""
        return {} if self._optimization is None else self._optimization.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; Lightning calls it before the first batch."""
        if self._optimization is not None:
            self._optimization.saved = state_dict
