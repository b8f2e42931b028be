"""Compares many samples where a few have split exactly: a step may depend on how many samples its micro-batch has.

Covers one more comparison, of the whole target or batch in the plan's own division, or of as many samples as fit at
once: choosing the 20 hardest samples of a micro-batch shows with more than 20 of them only. Memory that ends here leads
to fewer samples, and the verdict says how many were compared. Does not cover the comparison itself (``check``).
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, replace

import torch

from autobatch.errors import AutobatchError, DoesNotFit
from autobatch.exactness.compare_split import Check, NoMemoryError
from autobatch.exactness.divisions import Sizes, divide_at_full_size, wholes_of
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import Verdict

__all__ = ["FullSize"]

_log = logging.getLogger("autobatch")


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

    def extend(self, check: Check, verdict: Verdict) -> Verdict:
        """The verdict of a few samples, together with that of many.

        Args:
            check: What has given the verdict.
            verdict: Of a few samples; returned as it is where it is not that their split is exact.

        Raises:
            AutobatchError: The step or ``weigh`` is used wrongly, which only many samples show. Not after trials.
        """
        if not verdict.exact:
            return verdict
        started = time.perf_counter()
        with torch.enable_grad():
            found = self._compare(replace(check, exact_at=verdict.samples), verdict)
        return found.model_copy(update={"seconds": verdict.seconds + time.perf_counter() - started})

    def _compare(self, check: Check, verdict: Verdict) -> Verdict:
        reason = "no more fit in memory"
        for whole in wholes_of(self.target, self.size, self.most, verdict.samples):
            sizes = divide_at_full_size(self.target, self.size, whole, self.smallest)
            if not sizes:
                break
            found, ended = self._try(check, sizes)
            check.device.reclaim()  # only now, after the ``except`` block, are a failed attempt's frames gone
            if found is None:
                reason = ended or reason
            elif found.unchecked:
                reason = found.unchecked
            else:
                return self._join(verdict, found, sizes, reason)
        return verdict.model_copy(update={"not_compared": self._spell(verdict.samples, reason)})

    def _try(self, check: Check, sizes: Sizes) -> tuple[Verdict | None, str]:
        """The verdict, or ``None`` and the reason; an empty reason means that memory ended."""
        handled = sys.exc_info()[1]
        try:
            return check.compare(sum(sizes), (sizes,)), ""
        except (DoesNotFit, NoMemoryError):
            return None, ""
        except Exception as error:
            if is_oom(error, handled=handled):
                return None, ""
            if isinstance(error, AutobatchError) and not check.after_trials:
                raise
            # Fewer samples have run; and the text of the user's error may be anything.
            _log.info("autobatch: %d samples at once could not be compared: %s", sum(sizes), describe_error(error))
            return None, f"more of them raise {type(error).__name__}; its text is in the log"

    def _join(self, few: Verdict, many: Verdict, sizes: Sizes, reason: str) -> Verdict:
        not_compared = self._spell(sum(sizes), reason)
        if not many.exact:
            return many.model_copy(update={"not_compared": not_compared})
        found = {
            "relative_error": max(few.relative_error, many.relative_error),
            "larger_partition": sizes,
            "not_compared": not_compared,
        }
        return few.model_copy(update=found)

    def _spell(self, compared: int, reason: str) -> str:
        if compared >= self.target:
            return ""
        return f"at most {compared} of {self.target} samples were compared at once: {reason}"
