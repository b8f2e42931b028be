"""Decides how often gradients of sharded parameters are summed in a step, from trials, free memory and shortages.

1. A step sums as rarely as the plan says, if the curve and the trials say that this fits beside its micro-batches.
2. If memory ran out, the step is run again with sums in each micro-batch, and so are the next steps: 20, 40, 80, ...

All ranks take the least that any of them can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autobatch.planning.pacing import CLEAN_STEPS, LONGEST_WAIT
from autobatch.planning.plan_record import PlanRecord
from autobatch.records import IN_EACH, SUMMINGS, Summing, Trial

_NOISE = 1.1  # rarer sums may measure so many times slower: fewer collectives are hardly ever slower
_GAIN = 1.02  # parameters that stay gathered have to pay for their memory


@dataclass(frozen=True)
class SummingPace:
    """How often the next step sums; every transition returns a new value."""

    planned: Summing
    extra_bytes: Mapping[Summing, int]  # beside what sums in each micro-batch need
    wait: int = 0  # steps after the last shortage
    left: int = 0  # of them still to come

    @classmethod
    def of(cls, plan: PlanRecord) -> SummingPace:
        """Return the pace of the first step."""
        return cls(plan.summing, {summing: plan.extra_bytes(summing) for summing in SUMMINGS})

    def choose(self, need_bytes: int, most_bytes: int | None) -> Summing:
        """Choose for a step that needs so many bytes with sums in each micro-batch and may have ``most_bytes``."""
        if self.left:
            return IN_EACH
        possible = SUMMINGS[: SUMMINGS.index(self.planned) + 1]
        fitting = [one for one in possible if most_bytes is None or need_bytes + self.extra_bytes[one] <= most_bytes]
        return fitting[-1] if fitting else IN_EACH

    def after_shortage(self) -> SummingPace:
        """Wait twice as long as after the last shortage."""
        wait = min(max(2 * self.wait, CLEAN_STEPS), LONGEST_WAIT)
        return replace(self, wait=wait, left=wait)

    def after_step(self) -> SummingPace:
        """Count a finished step."""
        return replace(self, left=self.left - 1) if self.left else self


def choose_summing(trials: Mapping[Summing, Trial]) -> Summing:
    """Choose by trials of one size: the rarest sums that fit and are no slower than others that take less memory."""
    chosen = IN_EACH
    for summing in SUMMINGS[1:]:
        if summing in trials and trials[summing].outcome == "fits":
            slowest = trials[chosen].seconds * (_NOISE if chosen == IN_EACH else 1 / _GAIN)
            chosen = summing if trials[summing].seconds <= slowest else chosen
    return chosen
