"""How much a step may still take, now that others may have come.

Covers the difference between the trials and today: bytes in tensors that were not there, and what the host or the card
has left. Does not cover what is done about it (``runner``).
"""

from __future__ import annotations

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


@dataclass
class FreeMemory:
    """The room of one plan's steps on one device, in bytes.

    Attributes:
        is_counted: Whether the step under way is counted. One that is not was found to fit together with its update.
    """

    plan: Plan
    workload: Workload
    device: Device
    is_counted: bool = True
    _state_is_made: bool = False
    _update_bytes: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Read once what is asked for in every step."""
        self._update_bytes = max((trial.optimizer_peak for trial in self.plan.trials), default=0)

    def left(self) -> int | None:
        """What a step should stay within, counted as the trials counted; ``None`` where nothing was measured."""
        there = self.there()
        return None if there is None else max(there - self.plan.headroom_bytes, 0)

    def there(self) -> int | None:
        """What a step could reach at most: as ``left``, and the headroom."""
        if not self.device.measures or not self.plan.trials:
            return None
        return max(self._budget() - self._newcomers(1), 0)

    def check_update(self) -> None:
        """Before the update, while the step can still be undone: is there room for what the optimizer's step took?

        Raises:
            DoesNotFit: There is not, even with all caches given back.
        """
        need = self._update_bytes
        if (
            not self.is_counted
            or not need
            or not self.device.measures
            or not self.device.needs_limit(need, self.plan.budget_bytes)
        ):
            return
        newcomers, budget = self._newcomers(2), self._budget()
        if need + newcomers > budget:
            self.device.reclaim()
            newcomers, budget = self._newcomers(2), self._budget()
        if need + newcomers > budget:
            raise DoesNotFit(
                f"there is no room for the update: the optimizer's step took {format_bytes(need)} in the trials, "
                f"{format_bytes(newcomers)} are held by others, and {format_bytes(budget)} are there; everything is "
                f"as before the step: free memory or give fit() a larger budget="
            )

    def _budget(self) -> int:
        return self.device.limit_bytes(self.plan.budget_bytes)

    def _newcomers(self, steps: int) -> int:
        """Bytes in tensors that were not there in the trials.

        Args:
            steps: Of how many the model may hold activations: in the update of its own, and those of the step before,
                which would have to be put back.
        """
        to_be_made = 0 if self._state_is_made else max(self.plan.state_bytes - self.workload.state_bytes(), 0)
        self._state_is_made = to_be_made == 0  # from the first update on; reading it is the dearest part
        there = max(trial.resident_bytes + steps * trial.held_bytes for trial in self._trials()) - to_be_made
        gradients = sum(bytes_of(p.grad) for p in self.workload.parameters() if p.grad is not None)
        return max(self.device.usage().allocated - there - gradients, 0)

    def _trials(self) -> Sequence[Trial]:
        """Those of the plan's size and less: of a larger one more activations were held."""
        size = self.plan.micro_batch_size
        return [trial for trial in self.plan.trials if trial.micro_batch_size <= size] or self.plan.trials
