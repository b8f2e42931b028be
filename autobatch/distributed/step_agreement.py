"""Makes the ranks of one step succeed or fail together.

They meet at fixed places. A rank that fails takes part in the next meeting with its reason, so all ranks stop and none
waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from autobatch.distributed.channel import Channel
from autobatch.errors import AutobatchError, CannotRetry, RankFailed, RankLost
from autobatch.undo.interrupts import deferred_interrupts

__all__ = ["Place", "StepAgreement", "name_error"]

Place = Literal["batches", "open", "micro-batches", "forward", "backward", "rewind", "ready", "clip", "update", "done"]
"""All ranks meet before the first micro-batch (``"open"``); when the gradient is there (``"ready"``); when nothing is
left that could fail before the optimizer's step (``"update"``); and after it. The others are for sharded parameters
only: before micro-batches are run, at the end of each pass, after a pass that was dropped, and to clip. Before a step
of ``run`` each rank says how many samples its loader has (``"batches"``)."""

_LONGEST_REASON = 2000


class StepAgreement:
    """One step's meetings.

    Attributes:
        step: Which step of the Runner this is; all ranks must be in the same.
        action: ``"step"`` or ``"accumulate"``; all must do the same.
        is_over: Whether all ranks have come to an end, by success or failure.
    """

    def __init__(self, channel: Channel, runner: int, step: int, action: str) -> None:
        """Nothing is said yet; ``runner`` is the number of the Runner, as every rank counts them."""
        self.step, self.action, self._runner = step, action, runner
        self._channel, self.is_over = channel, False
        self._last: Place | None = None

    def meet(self, place: Place, **said: Any) -> list[dict[str, Any]]:
        """Say that this rank is there, and more; returns what each rank said, by rank.

        Raises:
            RankFailed: Another rank has failed, or is elsewhere.
            CannotRetry: Another rank has failed in the update.
            RankLost: Another rank is gone or did not answer.
        """
        # All note the same of what all have heard: an interrupt in between would leave this rank in another place.
        with deferred_interrupts():
            return self._meet(place, said)

    def _meet(self, place: Place, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        heard = self._exchange(place, said)
        failed = {rank: message["error"] for rank, message in enumerate(heard) if "error" in message}
        if failed:
            raise self.refuse(self._explain(failed))
        places = [message.get("call") or message["place"] for message in heard]
        if len(set(places)) > 1:
            listed = "; ".join(f"{self._name(rank)}: {at}" for rank, at in enumerate(places))
            raise self.refuse(
                RankFailed(
                    f"the ranks are not at the same place ({listed}): make the same calls in the same order on each, "
                    f"and as many of them"
                )
            )
        self._last, self.is_over = place, place == "done"
        return heard

    def refuse(self, error: AutobatchError) -> AutobatchError:
        """An error that every rank raises, since all have heard the same."""
        self.is_over = True
        self._channel.note_reported(error)
        return error

    def end(self) -> None:
        """There is no further meeting: every rank has come to the same end."""
        self.is_over = True

    def fail(self, error: BaseException) -> None:
        """Tell the others where they meet next that this rank goes no further; nothing is raised here.

        Nothing is said where all have heard of the end already.
        """
        if self.is_over or isinstance(error, RankLost):
            return
        self.is_over = True
        with suppress(RankLost):  # the error that is on its way says more
            self._exchange(self._last or "open", {"error": name_error(error)})
        self._channel.note_reported(error)

    def _exchange(self, place: Place, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        where = f"{self.action} {self.step} of Runner {self._runner}, {place!r}"
        return self._channel.exchange({"place": where, **said})

    def _explain(self, failed: Mapping[int, str]) -> AutobatchError:
        listed = "; ".join(f"{self._name(rank)}: {reason}" for rank, reason in failed.items())
        if self._last == "update":
            return CannotRetry(
                f"the update of step {self.step} failed on one rank, so parameters may differ between the ranks now: "
                f"load your last checkpoint on each ({listed})"
            )
        return RankFailed(
            f"{self.action} {self.step} was undone on every rank, as it could not be done on one: {listed}"
        )

    def _name(self, rank: int) -> str:
        return f"rank {self._channel.members[rank]}"


def name_error(error: BaseException) -> str:
    """The error's type and the first line of what it says; the type alone where its text cannot be had."""
    name = type(error).__name__
    try:
        text = f"{error}".strip()
    except Exception:  # noqa: BLE001 - of the user's __str__: the others wait to hear of the error
        return name
    return f"{name}: {text}".partition("\n")[0][:_LONGEST_REASON] if text else name
