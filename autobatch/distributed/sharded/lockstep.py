"""Runs the passes of a sharded model in lockstep: every rank ends a forward or backward pass, or all drop it.

``fully_shard`` gathers parameters inside each pass, so a rank that stops in the middle would leave the others waiting.

1. A rank that fails takes part in the rest of its pass with zeros.
2. At the end of a pass all ranks exchange how it went. If one ran out of memory, all drop the pass and run it again.
3. Before each collective of an unknown pass the ranks agree. If a known pass differs on one rank, all drop it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

from torch import nn

from autobatch._user_errors import contextmanager
from autobatch.distributed.agreement import Agreement, name_error
from autobatch.distributed.channel import Channel
from autobatch.distributed.sharded.model import divisor_of, param_groups, refuse_changed_settings, reset
from autobatch.distributed.sharded.pass_record import is_recorded, record_of
from autobatch.errors import DoesNotFit, InvalidArgument, RankFailed, RankLost
from autobatch.memory.oom import describe_error, is_oom
from autobatch.undo.interrupts import deferred_interrupts

# Causes of another run of a pass that did not run out of memory.
DIFFERS = "the pass differs"
ONE_SAMPLE = "the model refuses one sample"


class PassDropped(DoesNotFit):
    """Another rank drops a pass that all ranks end together, and all will run it again."""


class Lockstep:
    """One model's passes on every rank.

    Attributes:
        running: The pass that has begun and that the ranks have not ended yet.
        causes: Causes of any rank to run the last dropped pass again: ``DIFFERS``, ``ONE_SAMPLE``, ``"short"``.
        divisor: Number by which torch divides the sum of the ranks' gradients.
    """

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        """Record no pass outside a step."""
        self.running: Literal["forward", "backward"] | None = None
        self.causes: frozenset[str] = frozenset()
        self._model, self._channel, self._record = model, channel, record_of(model)
        self._groups = param_groups(model)
        self._factor: float | None = self._groups[0].gradient_divide_factor
        self.divisor = divisor_of(model)
        self._agreement: Agreement | None = None

    def begin(self, agreement: Agreement) -> None:
        """Begin a step, in which all ranks run the same number of micro-batches."""
        self._agreement, self.running = agreement, None
        refuse_changed_settings(self._model, self._groups, self._factor)
        if not all(map(is_recorded, self._groups)):
            raise InvalidArgument(
                "set_custom_all_gather() or set_custom_reduce_scatter() was called after Runner() was made: call it "
                "before"
            )
        reset(self._model)  # a pass between two steps leaves parameters gathered

    def leave(self) -> None:
        """End the step."""
        self._agreement, self.running, self._record.agree = None, None, None

    def start(self, name: Literal["forward", "backward"]) -> None:
        """End the pass before and begin another one; a second call in a pass does nothing."""
        if self.running == name:
            return
        with deferred_interrupts():  # the other ranks rely on this one to be in the new pass
            self.finish()
            self._begin_pass(name, name)

    def _begin_pass(self, kind: Literal["forward", "backward"], name: str) -> None:
        self.running = kind
        self._record.begin(name)
        self._record.agree, self._record.collective = self._agree, self._channel.collective

    def finish(self) -> None:
        """End the running pass, if any; raise PassDropped if another rank drops it."""
        if self.running is None:
            return
        with deferred_interrupts():
            self._record.check_end()
            self._agree(None)
            self._record.end()
            self.running, self._record.agree = None, None

    def drop(self, *, short: str | None = None, again: str | None = None) -> None:
        """Drop the running pass, which all ranks will run again for the ``causes``.

        Args:
            short: Out-of-memory error of this rank, which still takes part in the rest of the pass.
            again: ``DIFFERS`` or ``ONE_SAMPLE``, if that is this rank's cause. Neither: another rank has a cause.
        """
        name = self.running
        assert name is not None  # noqa: S101 - narrows for mypy
        if short is not None or again is not None:
            reset(self._model)  # first: it frees memory that the rest of the pass needs
            self._play_rest()
            self._gather(**({"short": short} if short is not None else {"again": again}))
        if DIFFERS in self.causes:
            self._record.forget(name)
        self._clear()

    def _play_rest(self) -> None:
        """Take part in the rest of the pass with zeros; raise RankLost if there is no memory for them."""
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
        raise self._channel.give_up(f"ran out of memory for the zeros of a pass that other ranks run: {reason}")

    def abandon(self, error: BaseException) -> None:
        """Send the error that ends this rank's step to the others, unless they know it; raise nothing."""
        with suppress(Exception):  # the first error says more
            if self._agreement is not None and not self._agreement.is_over and not isinstance(error, RankLost):
                if self.running is not None:
                    self._play_rest()
                self._agreement.fail(error)
        with suppress(Exception):
            self._clear()

    @contextmanager
    def block(self, call: str) -> Iterator[None]:
        """Block whose passes all ranks run together, and that ends on all if one runs out of memory."""
        agreement = Agreement(self._channel, call)
        try:
            self.begin(agreement)
            self._begin_pass("forward", "")  # a pass without a name is never known
            yield
            self._agree(None)
        except BaseException as error:
            try:
                _report(agreement, error)
            finally:
                self._clear()
            raise
        finally:
            self.leave()

    def _clear(self) -> None:
        self.running, self._record.agree = None, None
        reset(self._model)

    def _agree(self, collective: list[Any] | None) -> None:
        """Exchange which collective comes next; ``None``: the pass is over."""
        gathered = self._gather(next=collective)
        short = {rank: values["short"] for rank, values in enumerate(gathered) if "short" in values}
        if short:
            raise PassDropped(f"another rank ran out of memory ({self._channel.list_by_rank(short)})")
        if self.causes:
            raise PassDropped(f"another rank runs this pass again ({', '.join(self.causes)})")
        if any(values["next"] != collective for values in gathered):
            assert self._agreement is not None  # noqa: S101 - narrows for mypy
            raise self._agreement.refuse(
                RankFailed("the ranks' passes differ: run the same sharded modules in the same order on every rank")
            )

    def _gather(self, **values: Any) -> list[dict[str, Any]]:
        """Exchange values in the running pass, and note the causes of all ranks to drop it."""
        assert self._agreement is not None and self.running is not None  # noqa: S101, PT018 - narrows for mypy
        gathered = self._agreement.gather(self.running, **values)
        causes = [values["again"] for values in gathered if "again" in values]
        causes += ["short" for values in gathered if "short" in values]
        self.causes = frozenset(causes)
        return gathered


def _report(agreement: Agreement, error: BaseException) -> None:
    """Send the error that has ended a block here to the others, unless it came from them."""
    if isinstance(error, PassDropped):
        return
    if isinstance(error, DoesNotFit) or is_oom(error):
        agreement.gather("forward", short=name_error(error))
    else:
        agreement.fail(error)
