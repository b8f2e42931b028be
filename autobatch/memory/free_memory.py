"""Reads how much memory a step can use now: other tensors and processes may have taken some since the trials."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from autobatch._formatting import format_bytes
from autobatch.errors import DoesNotFit
from autobatch.memory.device import Device
from autobatch.planning.plan_record import PlanRecord
from autobatch.step.workload import Workload
from autobatch.torch_internals.storages import bytes_of

_LOG = logging.getLogger("autobatch")


@dataclass
class FreeMemory:
    """The memory that steps of one plan can use on one device, in bytes."""

    plan: PlanRecord
    workload: Workload
    device: Device
    is_counted: bool = True  # whether the device counts the running step
    _state_is_made: bool = False
    _has_warned: bool = False

    def __post_init__(self) -> None:
        """Find the most that trials held of the plan's size: larger ones held more activations."""
        trials = self.plan.longest_trials
        trials = tuple(one for one in trials if one.micro_batch_size <= self.plan.micro_batch_size) or trials
        self._resident = max((one.resident_bytes + one.held_bytes for one in trials), default=0)
        # Now the model may hold activations of this step and of the one before, and the update lets go of the latter.
        before = max((one.resident_bytes + 2 * one.held_bytes for one in trials), default=0)
        self._of_update = max((one.optimizer_peak for one in trials), default=0) - before

    def read(self) -> tuple[int | None, int | None]:
        """Return what a step can reach at most, and that less the headroom; ``None`` if nothing was measured."""
        if not self.device.measures or not self.plan.trials:
            return None, None
        expected = self._resident - self._missing_state() + self._gradient_bytes()
        used, budget = self._reading()
        most = budget - max(used - expected, 0)
        return max(most, 0), max(most - self.plan.headroom_bytes, 0)

    def check_update(self) -> None:
        """Raise DoesNotFit if the update does not fit even without caches, while the step can still be undone.

        The trials measured it. If the optimizer trains more parameters now, it needs more in proportion.
        """
        if not self.is_counted:
            return
        trained, planned = self.workload.count_trained(), self.plan.trained
        has_grown = 0 < planned < trained
        if has_grown and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the optimizer trains %d numbers now, %d when the plan was made: whether an update fits is estimated "
                "from the measured one; run fit() again",
                trained,
                planned,
            )
        if not self.device.measures or not any(one.optimizer_peak for one in self.plan.trials):
            return
        growth = trained / planned if has_grown else 1.0
        need = int(self._of_update * growth) - self._gradient_bytes() + self._missing_state(growth)
        used, budget = self._reading()
        if used + need > budget:
            self.device.reclaim()
            used, budget = self._reading()
        if used + need > budget:
            grown = f"the optimizer trains {trained} numbers now, {planned} when the plan was made, and "
            raise DoesNotFit(
                f"the update does not fit: {grown if has_grown else ''}the optimizer's step needs about "
                f"{format_bytes(max(need, 0))} beside {format_bytes(used)}, and the budget is {format_bytes(budget)} "
                f"now; the step was undone: free memory, or run fit() again with a larger budget="
            )

    def _missing_state(self, growth: float = 1.0) -> int:
        if self._state_is_made and growth == 1:
            return 0  # reading the state takes most of the time of all this
        missing = max(int(self.plan.state_bytes * growth) - self.workload.state_bytes(), 0)
        self._state_is_made = self._state_is_made or missing == 0
        return missing

    def _reading(self) -> tuple[int, int]:
        return self.device.usage().allocated, self.device.limit_bytes(self.plan.budget_bytes)

    def _gradient_bytes(self) -> int:
        return sum(bytes_of(p.grad) for p in self.workload.parameters() if p.grad is not None)
