"""Reads how much memory a step can use now, when other tensors and processes may have taken some since the trials.

Does not cover the size that is chosen for it (``planning.pacing``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from autobatch._formatting import format_bytes
from autobatch.errors import DoesNotFit
from autobatch.memory.device import Device
from autobatch.plan import Plan
from autobatch.records import Trial
from autobatch.step.workload import Workload
from autobatch.torch_internals.storages import bytes_of

__all__ = ["FreeMemory"]

_LOG = logging.getLogger("autobatch")


@dataclass
class FreeMemory:
    """The memory that steps of one plan can use on one device, in bytes.

    Attributes:
        is_counted: Whether the running step is counted. An uncounted one is known to fit together with its update.
    """

    plan: Plan
    workload: Workload
    device: Device
    is_counted: bool = True
    _state_is_made: bool = False
    _update_bytes: int = field(init=False, repr=False)
    _has_warned: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        """Read the plan's trials once."""
        self._update_bytes = max((trial.optimizer_peak for trial in self.plan.trials), default=0)

    def read(self) -> tuple[int | None, int | None]:
        """Read what a step can reach at most, and what it should stay within: that less the headroom.

        Both count as the trials did. Both are ``None`` where nothing was measured.
        """
        if not self.device.measures or not self.plan.trials:
            return None, None
        most = self._budget() - self._new_bytes(1)
        return max(most, 0), max(most - self.plan.headroom_bytes, 0)

    def check_update(self) -> None:
        """Refuse an update that does not fit, while the step can still be undone.

        Raises:
            DoesNotFit: What the optimizer's step took in the trials is not free, even with all caches given back.
        """
        need, planned = self._update_bytes, self.plan.trained
        if not need or not self.device.measures:
            return
        if planned and (trained := self.workload.count_trained()) > planned:
            self._check_grown(trained, planned)
        if not self.is_counted:
            return
        new, budget = self._new_bytes(2), self._budget()
        if need + new > budget:
            self.device.reclaim()
            new, budget = self._new_bytes(2), self._budget()
        if need + new > budget:
            raise DoesNotFit(
                f"the update does not fit: the optimizer's step took {format_bytes(need)} in the trials, other tensors "
                f"hold {format_bytes(new)}, and the budget is {format_bytes(budget)} now; everything is as before the "
                f"step: free memory or give fit() a larger budget="
            )

    def _check_grown(self, trained: int, planned: int) -> None:
        """Refuse an update of more parameters than in the trials: what theirs took, in proportion, is not free."""
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the optimizer trains %d numbers now, %d when the plan was made: whether an update fits is estimated "
                "from the measured one; run fit() again",
                trained,
                planned,
            )
        growth = trained / planned
        gradients = sum(bytes_of(p.grad) for p in self.workload.parameters() if p.grad is not None)
        held = max(trial.optimizer_peak - trial.resident_bytes - trial.held_bytes for trial in self._trials())
        temporaries = max(held - gradients / growth, 0) * growth
        missing = max(self.plan.state_bytes * growth - self.workload.state_bytes(), 0)
        need = int(temporaries + missing)
        if self.device.usage().allocated + need > self._budget():
            self.device.reclaim()
        if (used := self.device.usage().allocated) + need > self._budget():
            raise DoesNotFit(
                f"the update does not fit: the optimizer trains {trained} numbers now, {planned} when the plan was "
                f"made, so that its step needs about {format_bytes(need)} beside {format_bytes(used)}, and the budget "
                f"is {format_bytes(self._budget())} now; everything is as before the step: train fewer parameters, or "
                f"run fit() again with a larger budget="
            )

    def _budget(self) -> int:
        return self.device.limit_bytes(self.plan.budget_bytes)

    def _new_bytes(self, steps: int) -> int:
        """Bytes in tensors that did not exist in the trials.

        Args:
            steps: Of how many steps the model may hold activations: in the update of this one and of the one before,
                whose activations an undone step would restore.
        """
        to_be_made = 0 if self._state_is_made else max(self.plan.state_bytes - self.workload.state_bytes(), 0)
        self._state_is_made = to_be_made == 0  # from the first update on; reading it costs the most
        expected = max(trial.resident_bytes + steps * trial.held_bytes for trial in self._trials()) - to_be_made
        gradients = sum(bytes_of(p.grad) for p in self.workload.parameters() if p.grad is not None)
        return max(self.device.usage().allocated - expected - gradients, 0)

    def _trials(self) -> Sequence[Trial]:
        """The trials of at most the plan's size: larger ones held more activations."""
        size = self.plan.micro_batch_size
        trials = self.plan.longest_trials
        return [trial for trial in trials if trial.micro_batch_size <= size] or trials
