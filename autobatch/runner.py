"""Defines the public ``Runner``, which adds to ``training.runner`` one call that fits and binds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autobatch.distributed.ranks import find_ranks, several_blocks
from autobatch.fitting.fit import fit
from autobatch.fitting.loader_sizes import ForRun
from autobatch.fitting.options import (
    FitAndRunOptions,
    FitOptions,
    RunnerOptions,
    names_of,
    refuse_unknown,
    select,
)
from autobatch.step.workload import Step
from autobatch.training.runner import StepRunner
from autobatch.undo.undo import Undo
from autobatch.undo.user_objects import check_objects

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Runner"]


class Runner(StepRunner):
    """Runs optimizer steps in the plan's micro-batches, exactly, and retries with less when memory runs out.

    Attributes:
        plan: Plan that the steps follow.
        steps: Number of committed steps (or accumulations).
    """

    @classmethod
    def fit(
        cls,
        model: nn.Module,
        target_batch: int,
        *,
        batch: Any | None = None,
        step: Step | None = None,
        optimizer: Any | None = None,
        **options: Unpack[FitAndRunOptions],
    ) -> Runner:
        """Fit a plan and bind it in one call: ``autobatch.fit`` and then ``autobatch.Runner``.

        Example:
            >>> runner = autobatch.Runner.fit(model, 256, batch=loader, step=step, optimizer=sgd)  # doctest: +SKIP
            >>> for result in runner.run(loader):  # doctest: +SKIP
            ...     print(result.loss)

        Args:
            model: As in both.
            target_batch: As in ``fit``.
            batch: An example batch, or a Dataset or DataLoader. The loader may have any batch size: ``run`` joins and
                cuts its batches.
            step: As in both.
            optimizer: As in both.
            **options: Those of ``fit``: ``budget``, ``headroom``, ``max_micro_batch``, ``objective``,
                ``accumulate_in_float32``, ``check``, ``reuse``, ``progress``, ``share``. Those of ``Runner``:
                ``scaler``, ``max_grad_norm``, ``scheduler``, ``hooks``, ``keep``, ``backward``. And those of both:
                ``weigh``, ``cut``, ``device``.

        Returns:
            A Runner whose ``plan`` is new.

        Raises:
            NeedsBatch: As ``fit``, and so are ``DoesNotFit`` and ``InexactSplit``.
            InvalidArgument: An argument is unknown or cannot be used.
        """
        refuse_unknown("Runner.fit()", options, ["batch", "step", "optimizer", *names_of(FitAndRunOptions)])
        with several_blocks(find_ranks(model), "Runner.fit()"):
            # Trials run the step too, which changes these objects.
            objects = Undo(None, torch.device("cpu"), keep=check_objects(options.get("keep", ())))
            try:
                plan = fit(
                    model,
                    target_batch,
                    batch=ForRun(batch),
                    step=step,
                    optimizer=optimizer,
                    **select(options, FitOptions),
                )
            finally:
                objects.restore()
        return cls(plan, model, step, optimizer, **select(options, RunnerOptions))
