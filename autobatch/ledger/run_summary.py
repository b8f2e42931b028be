"""Adds up a run's steps and setbacks in memory, and knows which part of that is not stored yet.

Covers cutting an error's text to a line without the user's paths. Does not cover when and where it is written
(``run_recorder``, ``store``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autobatch._bounds import Count
from autobatch.events import Retried, SizeChanged
from autobatch.events.rank_step import RankStep
from autobatch.events.run_history import Outcome, RankTotal, Run, Setback, StepRange

__all__ = ["RunUpdate", "Tally", "shorten_reason"]

_MOST_ROWS = 4096
"""Ranges of a run, and its setbacks. A run that retries every few steps for weeks is stored in full for so long; after
that its steps add up in the last range and further setbacks are only counted there, as retries."""


class RunUpdate(Run):
    """What is new of a run: its own fields, its ranks, and its ranges and setbacks from these positions, from 0 on.

    What the ledger has there is replaced, so the last range can grow, and writing twice does no harm.
    """

    first_range: Count = 0
    first_setback: Count = 0


@dataclass
class _Sum:
    """A ``StepRange`` that still grows."""

    first_step: int
    last_step: int
    micro_batch_size: int = 0
    retries: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0
    samples: int = 0


@dataclass
class _RankSum:
    """A ``RankTotal`` that still grows."""

    steps: int = 0
    samples: int = 0
    micro_batch_size: int = 0
    retries: int = 0
    peak_bytes: int = 0
    seconds: float = 0.0


class Tally:
    """Steps and setbacks of one run; those that were stored are dropped, all but the last range."""

    def __init__(self, size: int) -> None:
        """Nothing has happened; ``size`` is the plan's micro-batch size."""
        self._pace = self._last_pace = size  # the most samples allowed in a micro-batch, now and in the last range
        self._sums: list[_Sum] = []
        self._first_range = 0
        self._setbacks: list[Setback] = []
        self._first_setback = 0
        self._ranks: list[_RankSum] = []

    def add_step(  # noqa: PLR0917 - as the recorder has them
        self,
        step: int,
        sizes: Sequence[int],
        retries: int,
        peak_bytes: int,
        seconds: float,
        ranks: Sequence[RankStep] = (),
    ) -> None:
        """Count a step: with the last ones, or in a new range where the pace, or having retries, changed."""
        self._add_ranks(ranks)
        # By the pace, not by the largest micro-batch that came of it: with batches of any length that is another one
        # in each step, and each step would be a range.
        total = self._sums[-1] if self._sums else None
        alike = total is not None and self._last_pace == self._pace and (total.retries > 0) == (retries > 0)
        is_full = self._first_range + len(self._sums) >= _MOST_ROWS
        if total is None or step != total.last_step + 1 or not (alike or is_full):
            total, self._last_pace = _Sum(step, step), self._pace
            self._sums.append(total)
        total.last_step = step
        total.micro_batch_size = max(total.micro_batch_size, *sizes) if sizes else total.micro_batch_size
        total.retries += retries
        total.peak_bytes = max(total.peak_bytes, peak_bytes)
        total.seconds += seconds
        total.samples += sum(sizes)

    def _add_ranks(self, ranks: Sequence[RankStep]) -> None:
        self._ranks = self._ranks or [_RankSum() for _ in ranks]
        for total, one in zip(self._ranks, ranks, strict=False):
            total.steps += 1
            total.samples += one.samples
            total.micro_batch_size = max(total.micro_batch_size, one.micro_batch_size)
            total.retries += one.retries
            total.peak_bytes = max(total.peak_bytes, one.peak_bytes)
            total.seconds += one.seconds

    def add_setback(self, event: Retried | SizeChanged) -> None:
        """Note that less memory was free, or more again."""
        self._pace = event.new_size
        if self._first_setback + len(self._setbacks) >= _MOST_ROWS:
            return
        setback = Setback(
            step=event.step,
            kind="retry" if isinstance(event, Retried) else "size",
            old_size=event.failed_size if isinstance(event, Retried) else event.old_size,
            new_size=event.new_size,
            used_bytes=event.used_bytes if isinstance(event, Retried) else 0,
            reason=shorten_reason(event.reason),
        )
        self._setbacks.append(setback)

    def unwritten(self, run: Run, now: float, outcome: Outcome, reason: str) -> RunUpdate:
        """What is not stored yet of this run; the last range is among it as long as it may grow."""
        news = {
            "last_seen_at": now,
            "outcome": outcome,
            "reason": reason,
            "first_range": self._first_range,
            "ranges": tuple(StepRange(**vars(total)) for total in self._sums),
            "first_setback": self._first_setback,
            "setbacks": tuple(self._setbacks),
            "ranks": tuple(RankTotal(**vars(total)) for total in self._ranks),
        }
        return RunUpdate.model_validate({**dict(run), **news})

    def drop_written(self) -> None:
        """What ``unwritten`` returned last is in the ledger."""
        self._first_range += max(len(self._sums) - 1, 0)
        self._sums = self._sums[-1:]
        self._first_setback += len(self._setbacks)
        self._setbacks = []


_LONGEST_REASON = 300
_LONGEST_SEARCH = 2000
"""Some errors print a whole tensor in one line, and looking for paths takes the square of its length."""

_QUOTED_PATH = re.compile(r"""(['"])[^'"]*[/\\][^'"]*\1""")  # in quotes a path may hold blanks
_PATH = re.compile(
    r"""
    (?<![\w<])                                        # samples/s is no path, nor is what was already taken out
    (?: (?:[A-Za-z]+:|~\w*|\.{1,2})? [/\\]+ [^\s'",;:)\]]+    # /home/a, ~/a, ./a, C:\a, file:///a
      | [\w.-]+ (?:[/\\][\w.-]+){2,}                  # data/private/a
      | [\w.-]+ [/\\] [\w-]+ \.\w{1,5} \b             # data/a.csv
    )
    """,
    re.VERBOSE,
)


def shorten_reason(text: str) -> str:
    """The first line of an error's text that is not blank, without paths, of at most 300 characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = _PATH.sub("<path>", _QUOTED_PATH.sub("<path>", line[:_LONGEST_SEARCH]))
    if len(line) > _LONGEST_REASON:
        line = f"{line[: _LONGEST_REASON - 3]}..."
    return line.encode("utf-8", "replace").decode()  # a lone surrogate cannot be written: nothing of the run would be
