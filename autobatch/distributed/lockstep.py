"""Runs the passes of a sharded model in lockstep: every rank ends a forward or backward pass, or all of them drop it.

Parameters that are sharded (``fully_shard``) are gathered inside each pass, so a rank that stopped in the middle of one
would leave the others waiting. Here it takes part in the rest of the pass with zeros, all say how it went, and where
memory has ended on one, all drop the pass and go on together. In a pass that nobody has seen yet they ask each other
before each collective instead.

Covers single passes, and blocks of several that are dropped as a whole. Does not cover which micro-batches are run
again (``training.lockstep_accumulation``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from torch import nn

from autobatch.distributed.channel import Channel
from autobatch.distributed.interrupts import deferred_interrupts
from autobatch.distributed.pass_record import record_of
from autobatch.distributed.sharding import reset
from autobatch.distributed.step_agreement import StepAgreement, name_error
from autobatch.errors import DoesNotFit, RankFailed, RankLost
from autobatch.memory.oom import is_oom

__all__ = ["Lockstep", "OtherRankShort"]


class OtherRankShort(DoesNotFit):
    """Memory has ended on another rank, in a pass that all have to end together."""


class Lockstep:
    """One model's passes on every rank.

    Attributes:
        running: The pass that has begun and of which the ranks have not said how it went.
    """

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        """Nothing is recorded outside of a step."""
        self.running: Literal["forward", "backward"] | None = None
        self._model, self._channel, self._record = model, channel, record_of(model)
        self._agreement: StepAgreement | None = None
        self._blocks = 0

    def begin(self, agreement: StepAgreement) -> None:
        """A step begins, in which all ranks run the same number of micro-batches."""
        self._agreement, self.running = agreement, None

    def leave(self) -> None:
        """The step is over."""
        self._agreement, self.running, self._record.ask = None, None, None

    def start(self, name: Literal["forward", "backward"]) -> None:
        """A pass begins; the one before ends. A forward pass may be said to begin twice.

        Raises:
            OtherRankShort: Memory has ended on another rank in the one before.
        """
        if self.running == name:
            return
        with deferred_interrupts():  # the others take this rank's word for where it is
            self.finish()
            self._begin_pass(name)

    def _begin_pass(self, name: Literal["forward", "backward"]) -> None:
        self.running = name
        self._record.begin(name)
        self._record.ask, self._record.lose = self._ask, self._channel.lose

    def finish(self) -> None:
        """End the pass that is running, if one is.

        Raises:
            OtherRankShort: Memory has ended on another rank in it.
            RankFailed: Another rank has failed in it.
        """
        if self.running is None:
            return
        with deferred_interrupts():
            self._ask(None)
            self._record.end()
            self.running, self._record.ask = None, None

    def drop(self, reason: str | None) -> str:
        """Drop the pass that is running: memory has ended in it, here or on another rank.

        Args:
            reason: Why it ended here, after which this rank still takes part in the rest of the pass; ``None`` where
                another rank has said that it ended there.

        Returns:
            Which pass it was.

        Raises:
            RankFailed: Another rank has failed in it, in another way.
        """
        assert self._agreement is not None and self.running is not None  # noqa: S101, PT018 - narrows for mypy
        name = self.running
        if reason is not None:
            reset(self._model)  # first: it gives memory back, which the rest of the pass takes
            self._record.play_rest()
            self._agreement.meet(name, short=reason)
        self._clear()
        return name

    def abandon(self, error: BaseException) -> None:
        """Tell the others of an error that ends the step here, unless all know; nothing is raised."""
        with suppress(Exception):  # the error that is on its way says more
            if self._agreement is not None and not self._agreement.is_over and not isinstance(error, RankLost):
                if self.running is not None:
                    self._record.play_rest()
                self._agreement.fail(error)
        with suppress(Exception):
            self._clear()

    @contextmanager
    def block(self, call: str) -> Iterator[None]:
        """A block whose passes all ranks run alike, and that ends for all where memory ends on one.

        Raises:
            OtherRankShort: Memory has ended on another rank.
            RankFailed: Another rank has failed.
        """
        self._blocks += 1
        agreement = self._agreement = StepAgreement(self._channel, self._channel.agreed, self._blocks, call)
        self._begin_pass("forward")
        self._record.begin("")  # of which nothing is ever known: each collective is asked for
        try:
            yield
            self._ask(None)
        except BaseException as error:
            _report(agreement, error)
            self._clear()
            raise
        finally:
            self.leave()

    def _clear(self) -> None:
        self.running, self._record.ask = None, None
        reset(self._model)

    def _ask(self, collective: list[Any] | None) -> None:
        """Say what comes next here, or that the pass is over."""
        assert self._agreement is not None and self.running is not None  # noqa: S101, PT018 - narrows for mypy
        heard = self._agreement.meet(self.running, next=collective)
        short = {rank: one["short"] for rank, one in enumerate(heard) if "short" in one}
        if short:
            listed = "; ".join(f"rank {self._channel.members[rank]}: {reason}" for rank, reason in short.items())
            raise OtherRankShort(f"memory ended on another rank ({listed})")
        if any(one["next"] != collective for one in heard):
            raise self._agreement.refuse(
                RankFailed("the ranks' passes differ: each has to run the same sharded modules in the same order")
            )


def _report(agreement: StepAgreement, error: BaseException) -> None:
    """Tell the others what has ended a block here, unless they said it."""
    if isinstance(error, OtherRankShort):
        return
    if isinstance(error, DoesNotFit) or is_oom(error):
        with suppress(RankFailed, RankLost):
            agreement.meet("forward", short=name_error(error))
    else:
        agreement.fail(error)
