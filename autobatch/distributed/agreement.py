"""Makes the ranks of one step succeed or fail together.

All ranks exchange messages at fixed points of a step. A rank that fails sends its error at the next point, so all ranks
stop and none waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from autobatch.distributed.channel import Channel
from autobatch.errors import AutobatchError, CannotRetry, RankFailed, RankLost
from autobatch.undo.interrupts import deferred_interrupts

Point = Literal["batches", "open", "micro-batches", "forward", "backward", "ready", "clip", "update", "done"]
"""Points of a step, in order.

Every step has ``"open"``: before the first micro-batch; ``"ready"``: the gradient is there; ``"update"``: nothing can
fail any more before the optimizer's step; ``"done"``: after it. A step of ``run`` begins with ``"batches"``: each rank
sends the number of samples in its loader. The other points are for sharded parameters.
"""

_LONGEST_REASON = 2000


class StepAgreement:
    """Exchanges of one step.

    Attributes:
        step: Number of the step in its Runner, the same on all ranks.
        action: ``"step"`` or ``"accumulate"``, the same on all ranks.
        is_over: Whether all ranks have ended the step, by success or failure.
    """

    def __init__(self, channel: Channel, runner: int, step: int, action: str) -> None:
        """Send nothing yet; ``runner`` is the number of the Runner, the same on all ranks."""
        self.step, self.action, self._runner = step, action, runner
        self._channel, self.is_over = channel, False
        self._last: Point | None = None

    def gather(self, point: Point, **values: Any) -> list[dict[str, Any]]:
        """Exchange values at a point of the step; return those of each rank, by rank.

        Raises:
            RankFailed: Another rank has failed, or is at another point.
            CannotRetry: Another rank has failed in the update.
            RankLost: Another rank is gone or did not answer.
        """
        with deferred_interrupts():  # every rank notes the same of this exchange
            messages = self._exchange(point, values)
            if failures := find_failures(messages):
                raise self.refuse(self._explain(self._channel.list_by_rank(failures)))
            if error := compare_calls(self._channel, messages):
                raise self.refuse(error)
            self._last, self.is_over = point, point == "done"
            return messages

    def refuse(self, error: AutobatchError) -> AutobatchError:
        """Return an error that every rank raises, as each has the same messages."""
        self.is_over = True
        self._channel.note_reported(error)
        return error

    def end(self) -> None:
        """Note that every rank ends the step here, without another exchange."""
        self.is_over = True

    def fail(self, error: BaseException) -> None:
        """Send this rank's error at the next point of the other ranks, unless they know it; raise nothing."""
        if self.is_over or isinstance(error, RankLost):
            return
        self.is_over = True
        with suppress(RankLost):  # the first error says more
            self._exchange(self._last or "open", {"error": name_error(error)})
        self._channel.note_reported(error)

    def _exchange(self, point: Point, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        call = f"{self.action} {self.step} of Runner {self._runner}, {point!r}"
        return self._channel.exchange({"call": call, **values})

    def _explain(self, failures: str) -> AutobatchError:
        if self._last == "update":
            return CannotRetry(
                f"the update of step {self.step} failed on another rank ({failures}), so parameters may differ between "
                f"the ranks: load your last checkpoint on every rank"
            )
        return RankFailed(f"{self.action} {self.step} was undone on every rank, because it failed on one: {failures}")


def find_failures(messages: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """Return the errors that ranks have sent, by rank."""
    return {rank: message["error"] for rank, message in enumerate(messages) if "error" in message}


def compare_calls(channel: Channel, messages: Sequence[Mapping[str, Any]]) -> RankFailed | None:
    """Return an error if the ranks are at different calls or points."""
    calls = {rank: message["call"] for rank, message in enumerate(messages)}
    if len(set(calls.values())) == 1:
        return None
    return RankFailed(
        f"the ranks made different calls ({channel.list_by_rank(calls)}): make the same calls in the same order on "
        f"every rank"
    )


def name_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, if it has one."""
    name = type(error).__name__
    try:
        text = f"{error}".strip()
    except Exception:  # noqa: BLE001 - the user's __str__ may raise anything, and other ranks wait for the name
        return name
    return f"{name}: {text}".partition("\n")[0][:_LONGEST_REASON] if text else name
