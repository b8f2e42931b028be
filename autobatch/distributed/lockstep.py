"""Runs the passes of a sharded model in lockstep: every rank ends a forward or backward pass, or all drop it.

``fully_shard`` gathers parameters inside each pass, so a rank that stops in the middle would leave the others waiting.
Instead it takes part in the rest of the pass with zeros. Then all say how the pass went, and if one rank ran out of
memory, all drop the pass. In a pass that is not known yet, the ranks ask each other before each collective. A rank
whose pass differs from the known one drops it the same way.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from torch import nn

from autobatch._user_errors import contextmanager
from autobatch.distributed.channel import Channel
from autobatch.distributed.pass_record import is_recorded, record_of
from autobatch.distributed.sharding import divisor_of, param_groups, reset
from autobatch.distributed.sharding_limits import refuse_changed_settings
from autobatch.distributed.step_agreement import StepAgreement, name_error
from autobatch.errors import AutobatchError, DoesNotFit, InvalidArgument, RankFailed, RankLost
from autobatch.memory.oom import describe_error, is_oom
from autobatch.undo.interrupts import deferred_interrupts

__all__ = ["DIFFERS", "ONE_SAMPLE", "Lockstep", "OtherRankShort", "RunAgain"]

DIFFERS = "the pass differs"
ONE_SAMPLE = "the model refuses one sample"
"""Why a pass is run again in which no memory has ended."""


class OtherRankShort(DoesNotFit):
    """Memory has ended on another rank, in a pass that all have to end together."""


class RunAgain(AutobatchError):
    """All ranks drop a pass and run it again, though no memory has ended in it."""


class Lockstep:
    """One model's passes on every rank.

    Attributes:
        running: The pass that has begun and of which the ranks have not said how it went.
        causes: Why the pass that was dropped last is run again, as any rank has said: ``DIFFERS``, ``ONE_SAMPLE``, or
            ``"short"``.
        divisor: What torch divides the sum of the ranks' gradients by.
    """

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        """Nothing is recorded outside of a step."""
        self.running: Literal["forward", "backward"] | None = None
        self.causes: frozenset[str] = frozenset()
        self._model, self._channel, self._record = model, channel, record_of(model)
        self._groups = param_groups(model)
        self._factor: float | None = self._groups[0].gradient_divide_factor
        self.divisor = divisor_of(model)
        self._agreement: StepAgreement | None = None
        self._blocks = 0

    def begin(self, agreement: StepAgreement) -> None:
        """A step begins, in which all ranks run the same number of micro-batches.

        Raises:
            InvalidArgument: A setting was changed that cannot be run, or gradients wait to be summed over the ranks.
        """
        self._agreement, self.running = agreement, None
        self._settle()

    def _settle(self) -> None:
        """Make the passes begin as they always do: one that ran between two steps leaves parameters gathered."""
        refuse_changed_settings(self._model, self._groups, self._factor)
        if not all(map(is_recorded, self._groups)):
            raise InvalidArgument(
                "set_custom_all_gather() or set_custom_reduce_scatter() was called after Runner() was made: call it "
                "before"
            )
        reset(self._model)

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
            self._record.check_end()
            self._ask(None)
            self._record.end()
            self.running, self._record.ask = None, None

    def drop(self, *, short: str | None = None, again: str | None = None) -> None:
        """Drop the pass that is running, which all ranks will run again; ``causes`` says why.

        Args:
            short: Why memory ended in it here, after which this rank still takes part in the rest of the pass.
            again: Why else it has to be run again: ``DIFFERS`` or ``ONE_SAMPLE``. Neither: another rank has said it.

        Raises:
            RankFailed: Another rank has failed in it, in another way.
            RankLost: Memory ended here in the rest of the pass, too.
        """
        assert self._agreement is not None and self.running is not None  # noqa: S101, PT018 - narrows for mypy
        name = self.running
        if short is not None or again is not None:
            reset(self._model)  # first: it gives memory back, which the rest of the pass takes
            self._play_rest()
            said = {"short": short} if short is not None else {"again": again}
            self._hear(self._agreement.meet(name, **said))
        if DIFFERS in self.causes:
            self._record.forget(name)
        self._clear()

    def _play_rest(self) -> None:
        """Take part in the rest of the pass with zeros.

        Raises:
            RankLost: There is no memory for the zeros, so the others wait for this rank.
        """
        reason = ""
        for _ in range(2):
            try:
                self._record.play_rest()
            except Exception as error:
                if isinstance(error, RankLost) or not is_oom(error):
                    raise
                reason = describe_error(error)
            else:
                return
            gc.collect()
        raise self._channel.give_up(f"memory ended while it took part in the rest of a pass with zeros: {reason}")

    def abandon(self, error: BaseException) -> None:
        """Tell the others of an error that ends the step here, unless all know; nothing is raised."""
        with suppress(Exception):  # the error that is on its way says more
            if self._agreement is not None and not self._agreement.is_over and not isinstance(error, RankLost):
                if self.running is not None:
                    self._play_rest()
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
        try:
            self._settle()
            self._begin_pass("forward")
            self._record.begin("")  # of which nothing is ever known: each collective is asked for
            yield
            self._ask(None)
        except BaseException as error:
            try:
                _report(agreement, error)
            finally:
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
        self._hear(heard)
        short = {rank: one["short"] for rank, one in enumerate(heard) if "short" in one}
        if short:
            listed = "; ".join(f"rank {self._channel.members[rank]}: {reason}" for rank, reason in short.items())
            raise OtherRankShort(f"memory ended on another rank ({listed})")
        if self.causes:
            raise RunAgain(f"another rank runs this pass again ({', '.join(self.causes)})")
        if any(one["next"] != collective for one in heard):
            raise self._agreement.refuse(
                RankFailed("the ranks' passes differ: each has to run the same sharded modules in the same order")
            )

    def _hear(self, heard: Sequence[Mapping[str, Any]]) -> None:
        """Note why any rank drops this pass."""
        again = {one["again"] for one in heard if "again" in one}
        self.causes = frozenset([*again, *(["short"] if any("short" in one for one in heard) else [])])


def _report(agreement: StepAgreement, error: BaseException) -> None:
    """Tell the others what has ended a block here, unless they said it.

    Raises:
        RankFailed: Memory has ended here, and another rank has failed in another way: there is no next block.
        RankLost: Another rank is gone.
    """
    if isinstance(error, OtherRankShort):
        return
    if isinstance(error, DoesNotFit) or is_oom(error):
        agreement.meet("forward", short=name_error(error))
    else:
        agreement.fail(error)
