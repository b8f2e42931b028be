"""Lets all ranks try the same sizes if parameters are sharded, with one outcome of each trial for all.

Without sharded parameters a rank tries sizes alone, and nothing here does anything.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autobatch.distributed.ranks import Ranks
from autobatch.distributed.sharding import gathered_tensors, unsharded_parameters
from autobatch.records import Trial

__all__ = ["SharedTrials"]

_LARGEST = (
    *("peak_allocated", "peak_reserved", "optimizer_peak", "alloc_retries", "seconds", "backward_allocated"),
    *("backward_reserved", "resident_bytes", "held_bytes"),
)
_WORST = ("fits", "thrash", "oom")


class SharedTrials:
    """What the ranks share in their trials.

    Attributes:
        are_shared: Whether they do, as parameters are sharded.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        """``None``: this process is alone."""
        self._ranks, self._lockstep = ranks, None if ranks is None else ranks.lockstep
        self.are_shared = self._lockstep is not None

    def block(self) -> AbstractContextManager[None]:
        """A part of a trial, with passes; raises DoesNotFit where memory has ended on another rank."""
        return nullcontext() if self._lockstep is None else self._lockstep.block("trial")

    def gathered_tensors(self) -> list[torch.Tensor]:
        """Memory into which parameters are gathered, and which is freed between passes."""
        return gathered_tensors(self._ranks.model) if self._ranks is not None and self.are_shared else []

    def unsharded_parameters(self) -> list[torch.Tensor]:
        """What stands for parameters in a graph, where they are sharded."""
        return unsharded_parameters(self._ranks.model) if self._ranks is not None and self.are_shared else []

    def agree(self, trial: Trial) -> Trial:
        """The trial as the worst rank has measured it."""
        heard = [Trial.model_validate(one) for one in self._hear(trial.model_dump())]
        worst = max(heard, key=lambda one: _WORST.index(one.outcome))
        largest = {name: max(getattr(one, name) or 0 for one in heard) for name in _LARGEST}
        return worst.model_copy(update=largest)

    def smallest(self, limit_bytes: int) -> int:
        """The smallest limit of all ranks; 0 stands for none."""
        return min((limit for limit in self._hear(limit_bytes) if limit), default=0)

    def any(self, flag: bool) -> bool:  # noqa: FBT001 - as the builtin
        """Whether it is true on any rank."""
        return any(self._hear(flag))

    def _hear(self, value: Any) -> list[Any]:
        if self._ranks is None or self._lockstep is None:
            return [value]
        with self._ranks.all_or_none("fit(), a trial") as said:
            said.append(value)
        return said
