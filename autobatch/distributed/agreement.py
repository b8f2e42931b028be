"""Lets a call succeed on all ranks, or raise on all.

All ranks exchange messages at the same points of a call. A rank that fails sends its error at the next point, so all
ranks stop and none waits. After the last point of a step no rank waits for another. A rank that fails there sends its
error in place of its next message, in whichever call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from autobatch.distributed.channel import Channel
from autobatch.errors import AutobatchError, CannotRetry, InvalidArgument, RankFailed, RankLost
from autobatch.undo.interrupts import deferred_interrupts

_LONGEST_REASON = 2000


class Agreement:
    """One call that every rank makes, also a block whose error is sent to the other ranks.

    Calls may be nested. The channel knows whether other ranks wait for this one: an error is sent once.
    """

    def __init__(self, channel: Channel, name: str, runner: int | None = None) -> None:
        """Send nothing yet; ``runner`` is the number of the Runner that was called, the same on all ranks."""
        self._channel, self._name, self._runner = channel, name, runner
        self._call = name if runner is None else f"{name} of Runner {runner}"
        channel.is_over = False

    def __enter__(self) -> Agreement:
        """Begin the block."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Send the error that ended the block, if any."""
        if error is not None:
            self.fail(error)

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended the call, by success or failure."""
        return self._channel.is_over

    def gather(self, point: str, numbers: Mapping[str, float] | None = None, **values: Any) -> list[dict[str, Any]]:
        """Exchange values and numbers at a point of the call; return those of each rank, by rank.

        Values that differ between ranks take a second round of messages, numbers do not.

        Raises:
            RankFailed: Another rank has failed, or is at another point.
            CannotRetry: A rank has failed in an update that the others have made.
            RankLost: Another rank is gone or did not answer.
        """
        with deferred_interrupts():  # every rank notes the same of this exchange
            numbers = numbers or {}
            message = {"call": f"{self._call}, {point}", "numbers": [*numbers], **values}
            messages, rows = self._send(message, [*numbers.values()])
            while self._give_update(messages):
                messages, rows = self._send(message, [*numbers.values()])
            failures = {rank: message for rank, message in enumerate(messages) if "error" in message}
            if failures:
                raise self.refuse(self._explain(failures))
            calls = {rank: message["call"] for rank, message in enumerate(messages)}
            if len(set(calls.values())) > 1:
                raise self.refuse(
                    RankFailed(
                        f"the ranks made different calls ({self._channel.list_by_rank(calls)}): make the same calls in "
                        f"the same order on every rank"
                    )
                )
            self._channel.is_over = False
            return [one | dict(zip(one["numbers"], row, strict=False)) for one, row in zip(messages, rows, strict=True)]

    def refuse(self, error: AutobatchError) -> AutobatchError:
        """Return an error that every rank raises, as each has the same messages."""
        self.end()
        return error

    def refuse_unlike(self, values: Sequence[Any], message: str) -> None:
        """Raise InvalidArgument on every rank if the ranks' values differ."""
        if any(value != values[0] for value in values):
            raise self.refuse(InvalidArgument(message))

    def list_unlike(self, texts: Mapping[int, str]) -> str:
        """Show the first of these ranks, and the first one whose text differs from its text."""
        first, *others = texts
        unlike = next((rank for rank in others if texts[rank] != texts[first]), first)
        return self._channel.list_by_rank({rank: texts[rank] for rank in (first, unlike)})

    def end(self) -> None:
        """Note that every rank ends the call here, without another exchange."""
        self._channel.is_over = True

    def fail(self, error: BaseException) -> None:
        """Send this rank's error at the next point of the other ranks, unless the call is over; raise nothing."""
        if self.is_over or isinstance(error, RankLost):
            return
        with suppress(RankLost):  # the first error says more
            messages, _ = self._send({"error": name_error(error)})
            self._give_update(messages)  # the other ranks ask, if this one's last message was that it lacks an update
        self.end()

    def owe(self, error: BaseException) -> None:
        """Keep an error in the update, which other ranks make, for this rank's next message."""
        self._channel.owed = {"error": name_error(error), "update": self._name}

    def take_update(self, error: BaseException, longest_wait: timedelta) -> int | None:
        """Wait for the other ranks' next call, and copy the update, which failed here, from one of them.

        Returns:
            Rank that gave it; ``None`` if none could. The other ranks know of the error in any case.
        """
        if self._runner not in self._channel.updates:
            self.owe(error)
            return None
        message = {"error": name_error(error), "update": self._name, "lacks": self._runner}
        try:
            messages, _ = self._channel.exchange(message, longest_wait=longest_wait)
            return _find_giver(messages) if self._give_update(messages, is_lacking=True) else None
        except (RankLost, TimeoutError):
            return None
        finally:
            self.end()

    def _give_update(self, messages: Sequence[Mapping[str, Any]], *, is_lacking: bool = False) -> bool:
        """Send the update to the ranks that lack it; return whether all ranks have it now."""
        others = [one for one in messages if "lacks" not in one]
        runners = {one["lacks"] for one in messages if "lacks" in one}
        if len(runners) != 1 or not others or any("error" in one for one in others):
            return False
        has_raised = not is_lacking and "lacks" in messages[self._channel.rank]  # it had waited for long
        update = None if has_raised else self._channel.updates.get(runners.pop())
        have, _ = self._channel.exchange(update is not None)  # the optimizer of one rank may have hooks
        if update is None or not all(have):
            return False
        return bool(update.copy(self._channel, _find_giver(messages), is_lacking=is_lacking))

    def _send(
        self, message: dict[str, Any], numbers: Sequence[float] = ()
    ) -> tuple[list[dict[str, Any]], list[Sequence[float]]]:
        owed, self._channel.owed = self._channel.owed, None
        messages, rows = self._channel.exchange(owed or message, numbers)
        if all("update" in one for one in messages):  # every rank has raised the error of its own update
            messages, rows = self._channel.exchange(message, numbers)
        return messages, rows

    def _explain(self, failures: Mapping[int, Mapping[str, str]]) -> AutobatchError:
        listed = self._channel.list_by_rank({rank: failure["error"] for rank, failure in failures.items()})
        for updated in (failure["update"] for failure in failures.values() if "update" in failure):
            return CannotRetry(
                f"the update of {updated} failed on one rank ({listed}), so parameters may differ between the ranks: "
                f"load your last checkpoint on every rank"
            )
        return RankFailed(f"{self._name} was undone on every rank, because it failed on one: {listed}")


def _find_giver(messages: Sequence[Mapping[str, Any]]) -> int:
    return next(rank for rank, one in enumerate(messages) if "lacks" not in one)


def name_error(error: BaseException) -> str:
    """Return the type of an error and the first line of its text, if it has one."""
    name = type(error).__name__
    try:
        text = f"{error}".strip()
    except Exception:  # noqa: BLE001 - the user's __str__ may raise anything, and other ranks wait for the name
        return name
    return f"{name}: {text}".partition("\n")[0][:_LONGEST_REASON] if text else name
