"""Defines ``Runner``, the public one: that of ``training``, and one call that fits and binds.

It lies above ``fitting``, of which the steps themselves know nothing. Covers ``Runner.fit``; everything else is in
``training.runner``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from autobatch.batch.chosen_groups import CutFunction
from autobatch.batch.lengths import LengthOf, Lengths
from autobatch.distributed.ranks import find_ranks, several_blocks
from autobatch.events import Hook
from autobatch.fitting.fit import fit
from autobatch.fitting.loader_sizes import ForRun
from autobatch.memory.device import Device
from autobatch.planning.planner import Objective
from autobatch.planning.shares import Share
from autobatch.step.workload import Step, Weigh
from autobatch.training.given_backward import Backward
from autobatch.training.runner import StepRunner
from autobatch.undo.undo import StepState
from autobatch.undo.user_objects import check_objects

__all__ = ["Runner"]


class Runner(StepRunner):
    """Runs optimizer steps in the plan's micro-batches, exactly, and goes on with less when memory ends.

    Attributes:
        plan: What it was given.
        steps: How many steps (or accumulations) have been committed.
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
        weigh: Weigh | None = None,
        lengths: Lengths | LengthOf | None = None,
        device: torch.device | str | Device | None = None,
        budget: int | str | None = None,
        headroom: float | str | None = None,
        max_micro_batch: int | None = None,
        objective: Objective = "throughput",
        accumulate_in_float32: bool = True,
        check: Literal["warn", "raise"] | None = "warn",
        reuse: bool = True,
        progress: bool = True,
        share: Share = "equal",
        cut: CutFunction | None = None,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        scheduler: Any | None = None,
        hooks: Iterable[Hook] = (),
        keep: Sequence[Any] = (),
        backward: Backward | None = None,
    ) -> Runner:
        """Fit a plan and bind it in one call: ``autobatch.fit`` and then ``autobatch.Runner``.

        Example:
            >>> runner = autobatch.Runner.fit(model, 256, batch=loader, step=step, optimizer=sgd)  # doctest: +SKIP
            >>> for result in runner.run(loader):  # doctest: +SKIP
            ...     print(result.loss)

        Args:
            model: As in both.
            target_batch: As in ``fit``, and so are ``batch``, ``budget``, ``headroom``, ``max_micro_batch``,
                ``objective``, ``accumulate_in_float32``, ``check``, ``reuse``, ``progress`` and ``share``.
            batch: An example batch, or a Dataset or DataLoader. The loader may have any batch size: ``run`` joins and
                cuts its batches.
            step: As in both.
            optimizer: As in both.
            weigh: As in both.
            lengths: As in both.
            device: As in both.
            budget: What this process may hold.
            headroom: Left free of it.
            max_micro_batch: Never more samples than this in a micro-batch.
            objective: What is chosen.
            accumulate_in_float32: Whether gradients narrower than float32 are added up in it.
            check: What to do where splitting is not exact.
            reuse: Whether a remembered plan may be confirmed by one trial.
            progress: Whether each trial is a line on a terminal.
            share: How several ranks divide the target.
            cut: As in ``Runner``, and so are all that follow.
            scaler: Scales each loss.
            max_grad_norm: Clip the gradients' norm.
            scheduler: Stepped after each step.
            hooks: Called with every event.
            keep: Objects outside the model that the step changes. Trials run the step too, and after them these objects
                are as before.
            backward: In place of ``loss.backward()``.

        Returns:
            A Runner whose ``plan`` is new.

        Raises:
            NeedsBatch: As ``fit``, and so are ``DoesNotFit`` and ``InexactSplit``.
            InvalidArgument: An argument cannot mean anything.
        """
        with several_blocks(find_ranks(model), "Runner.fit()"):
            objects = StepState(nn.Module(), torch.device("cpu"), check_objects(keep), records=False).begin()
            try:
                plan = fit(
                    model,
                    target_batch,
                    batch=ForRun(batch),
                    step=step,
                    optimizer=optimizer,
                    weigh=weigh,
                    lengths=lengths,
                    device=device,
                    budget=budget,
                    headroom=headroom,
                    max_micro_batch=max_micro_batch,
                    objective=objective,
                    accumulate_in_float32=accumulate_in_float32,
                    check=check,
                    reuse=reuse,
                    progress=progress,
                    share=share,
                )
            finally:
                objects.restore()
        return cls(
            plan,
            model,
            step,
            optimizer,
            weigh=weigh,
            lengths=lengths,
            device=device,
            cut=cut,
            scaler=scaler,
            max_grad_norm=max_grad_norm,
            scheduler=scheduler,
            hooks=hooks,
            keep=keep,
            backward=backward,
        )
