"""Compares many samples where a few have split exactly: a step may depend on how many samples its micro-batch has.

Covers one more comparison, of the whole target or batch in the plan's own partition, or of as many samples as fit at
once: choosing the 20 hardest samples of a micro-batch shows with more than 20 of them only. If memory ends, fewer
samples are compared, and the verdict says how many. Does not cover the comparison itself (``compare_split``).
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, replace

import torch

from autobatch._bounds import LONGEST_LIST
from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.compare_split import NoMemoryError, SplitComparison
from autobatch.exactness.measurement import Sizes
from autobatch.memory.oom import describe_error, is_oom
from autobatch.planning.planner import balance
from autobatch.records import Verdict

__all__ = ["FullSize", "divide_at_full_size", "halvings", "wholes_of"]

_log = logging.getLogger("autobatch")

_SMALLEST_HALVED = 16
"""A part of so many samples is not halved again: the comparison of a few samples has looked at smaller ones."""


@dataclass(frozen=True)
class FullSize:
    """What a step runs at its real size.

    Attributes:
        target: Samples of the step.
        size: Samples of its micro-batches; they have run, or are known to be wanted.
        most: Samples that should fit at once; fewer are compared where they do not.
        smallest: The fewest samples that the model can run.
    """

    target: int
    size: int
    most: int
    smallest: int = 1

    def extend(self, comparison: SplitComparison, verdict: Verdict) -> Verdict:
        """The verdict of a few samples together with that of many, or as it is where it was not exact.

        Raises AutobatchError, except after trials, where the step is used wrongly, which only many samples show.
        """
        if not verdict.exact:
            return verdict
        started = time.perf_counter()
        with torch.enable_grad():
            found = self._compare(replace(comparison, exact_at=verdict.samples), verdict)
        return found.model_copy(update={"seconds": verdict.seconds + time.perf_counter() - started})

    def _compare(self, comparison: SplitComparison, few: Verdict) -> Verdict:
        reason = "no more fit in memory"
        for whole in wholes_of(self.target, self.size, self.most, few.samples):
            sizes = divide_at_full_size(self.target, self.size, whole, self.smallest)
            if not sizes:
                break
            many, failed = _try(comparison, sizes)
            comparison.device.reclaim()  # only now, after the ``except`` block, are a failed attempt's frames gone
            if many is not None and not many.unchecked:
                return self._join(few, many, sizes, reason)
            reason = (failed if many is None else many.unchecked) or reason
        return few.model_copy(update={"not_compared": self._explain_uncompared(few.samples, reason)})

    def _join(self, few: Verdict, many: Verdict, sizes: Sizes, reason: str) -> Verdict:
        not_compared = self._explain_uncompared(sum(sizes), reason)
        if not many.exact:
            return many.model_copy(update={"not_compared": not_compared})
        error = max(few.relative_error, many.relative_error)
        found = {"relative_error": error, "larger_partition": sizes, "not_compared": not_compared}
        return few.model_copy(update=found)

    def _explain_uncompared(self, compared: int, reason: str) -> str:
        if compared >= self.target:
            return ""
        return f"at most {compared} of {self.target} samples were compared at once: {reason}"


def _try(comparison: SplitComparison, sizes: Sizes) -> tuple[Verdict | None, str]:
    """The verdict; or ``None``, and why where it was not that memory ended."""
    handled = sys.exc_info()[1]
    try:
        return comparison.compare(sum(sizes), (sizes,)), ""
    except (DoesNotFit, NoMemoryError):
        return None, ""
    except Exception as error:
        if is_oom(error, handled=handled):
            return None, ""
        if isinstance(error, AutobatchError) and not comparison.after_trials:
            raise
        # Fewer samples have run; and the text of the user's error may be anything.
        _log.info("autobatch: %d samples at once could not be compared: %s", sum(sizes), describe_error(error))
        return None, f"more of them raise {type(error).__name__}; its text is in the log"


def wholes_of(target: int, size: int, most: int, compared: int) -> Sizes:
    """How many samples to compare at once, the best choice first and then what to try where memory ends.

    ``compared`` samples were compared before; fewer than these show nothing new. The rest as in ``FullSize``.
    """
    wholes, fewer = [min(target, most)], min(size, target)
    while fewer > compared:
        wholes.append(fewer)
        fewer //= 2
    return tuple(dict.fromkeys(whole for whole in wholes if whole > compared))


def divide_at_full_size(target: int, size: int, whole: int, smallest: int) -> Sizes:
    """The one partition of ``whole`` samples that is compared; it may leave out a remainder of them.

    The plan's own partition, where the whole target is compared; planned micro-batches, where at least two fit at once;
    else what retries would run. Arguments as in ``FullSize``.
    """
    if whole < 2 * size:
        return balance(target, size, smallest) if whole == target > size else halvings(whole, smallest)
    sizes = balance(target, size, smallest) if whole == target else (size,) * (whole // size)
    return sizes[:LONGEST_LIST]  # more than a verdict can list


def halvings(samples: int, smallest: int) -> Sizes:
    """A half, a quarter, an eighth and so on, to see a dependence on any size in one pass; empty without two parts."""
    rest = samples
    sizes: list[int] = []
    while rest >= 2 * smallest and (rest > _SMALLEST_HALVED or not sizes):
        sizes.append(rest - rest // 2)
        rest //= 2
    return (*sizes, rest) if sizes else ()
