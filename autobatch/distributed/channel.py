"""Exchanges small messages among all ranks, beside the process group that trains.

1. Every rank gets one row of a fixed size from each: a hash of its message, and a few numbers.
2. Only if two hashes differ, every rank sends its message to every other one.

Few ranks send their rows to each other. Many pass on in rounds what they have, which doubles from round to round, so
1,024 ranks send ten messages each. All see the same rows, so messages follow on all ranks or on none.

The channel is a gloo group. It lives on the host, so an exchange waits for no device. If a peer's process is gone, the
kernel closes its sockets and the exchange ends at once, while NCCL would wait for its timeout.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes  # torch has no public way to pause a budget's mode

from autobatch._user_errors import contextmanager
from autobatch.distributed.lost_ranks import LostRanks, Process, find_process, show_seconds
from autobatch.errors import RankLost
from autobatch.undo.interrupts import deferred_interrupts

_NUMBERS = 8  # of a row, which those of ``SharedStep.agree`` fill; more of them go with the message
_ROW = struct.Struct(f"=16sQ{_NUMBERS}d")  # the message's hash and length, and the numbers
_NO_HASH = bytes(16)  # of a rank whose row did not come
_MOST_DIRECT = 16  # ranks that send rows at once: 2 ranks took 0.5 ms, and 4 ms in rounds, on two busy cores
_UNKNOWN_TIMEOUT = timedelta(minutes=30)  # torch's default_pg_timeout, if a group's own cannot be read

_channels: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()
_opened: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # number of channels made for each group
_open: WeakSet[Channel] = WeakSet()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Block that other ranks wait for: neither an interrupt nor a memory budget may end it in the middle."""
    with deferred_interrupts(), _disable_current_modes():
        yield


class Channel:
    """Exchanges among the ranks of a process group, one at a time.

    Attributes:
        members: Ranks of the group in the default process group, which messages show.
        exchanges: Number of exchanges that have begun, the same on all ranks.
        is_over: Whether no other rank waits for this one: all have ended the last call, by success or failure.
        owed: Message about an error that the other ranks have not been sent yet.
        updates: The last update of each Runner, which another rank can take, by the Runner's number.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Make the gloo group. Collective: every rank of ``group`` makes its own at the same point."""
        owner: Any = group or dist.group.WORLD
        self.members: list[int] = dist.get_process_group_ranks(owner)
        self.rank, self.size = dist.get_rank(group), len(self.members)
        self.timeout, self.exchanges, self.is_over = _timeout_of(owner), 0, True
        self.owed: dict[str, Any] | None = None
        self.updates = WeakValueDictionary[int, Any]()  # each an ``UpdateCopy``
        self._unanswered: tuple[bytes, Callable[[timedelta], bytes]] | None = None
        self._name, self._loss = owner.group_name, ""
        self._rows, self._held = bytearray(_ROW.size * self.size), tuple[torch.Tensor, ...]()
        self._rounds = self._plan_rounds()
        self._lost_ranks = LostRanks(self.members, self.rank, self._name)
        self._group = self._open_group(owner)
        _open.add(self)
        self._lost_ranks.processes = [Process(*fields) for fields in self.exchange(find_process())[0]]

    def exchange(
        self, message: Any, numbers: Sequence[float] = (), longest_wait: timedelta = timedelta()
    ) -> tuple[list[Any], list[Sequence[float]]]:
        """Send a message that JSON can hold, and numbers, to all ranks; return those of each rank, by rank.

        Numbers may differ between ranks at no cost; different messages are sent, too. Zeros may follow the numbers.

        Raises:
            RankLost: A rank is gone or did not answer within the timeout. Every later exchange raises it again.
            TimeoutError: The other ranks did not answer within ``longest_wait``, if that is not zero. They may still
                answer: the next exchange ends this one, and sends no message of its own.
        """
        if self._loss:
            raise RankLost(self._loss)
        if not dist.is_initialized():
            raise RankLost(
                "the process group was destroyed: initialize it again, wrap the model in it, and make a new Runner"
            )
        if self._unanswered is None:
            self.exchanges += 1
            content = json.dumps([message, [*numbers[_NUMBERS:]]]).encode()
            digest = hashlib.blake2b(content, digest_size=len(_NO_HASH)).digest()
            first = [*numbers[:_NUMBERS], *[0.0] * (_NUMBERS - len(numbers))]
            row = _ROW.pack(digest, len(content), *first)
        with self.collective("an exchange of messages"):
            if self._unanswered is None:
                share = self._send_to_all if self.size <= _MOST_DIRECT else self._pass_on
                self._unanswered = content, share(row)
            content, receive = self._unanswered
            rows = [*_ROW.iter_unpack(receive(longest_wait))]
            self._unanswered = None
            if all(row[:2] == rows[0][:2] for row in rows):
                read = [json.loads(content)] * self.size
            else:
                received = self._send_to_all(content.ljust(max(row[1] for row in rows)))(timedelta())
                slot = len(received) // self.size
                read = [json.loads(received[slot * rank :][:slot]) for rank in range(self.size)]
        return [one for one, _ in read], [(*row[2:], *rest) for row, (_, rest) in zip(rows, read, strict=True)]

    def gather_bytes(self, mine: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the bytes (uint8, on the host) of each rank, by rank; ``sizes`` has their numbers.

        Raises:
            RankLost: A rank is gone or did not answer within the timeout.
        """
        with self.collective("an exchange of representations"):
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(mine)] = mine
            received = [torch.empty_like(padded) for _ in sizes]
            self._group.allgather([received], [padded]).wait()
        return [part[:size] for part, size in zip(received, sizes, strict=True)]

    def sum(self, numbers: torch.Tensor, factor: float) -> None:
        """Make a tensor on the host the sum of those of all ranks, each times its rank's factor.

        Raises:
            RankLost: A rank is gone or did not answer within the timeout.
        """
        with self.collective("the sum of representations' gradients"):
            self._group.allreduce([numbers.mul_(factor)]).wait()

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Block of one collective, here or in the training group; raises RankLost if it breaks off."""
        with uninterrupted():
            try:
                yield
            except RuntimeError as error:  # torch has no type of its own for a peer that is gone
                raise self.lose(f"{name} broke off: {_first_line(error)}") from error

    def list_by_rank(self, texts: Mapping[int, Any]) -> str:
        """Show a text of each rank in one line, for a message."""
        return "; ".join(f"rank {self.members[rank]}: {text}" for rank, text in texts.items())

    def close(self) -> None:
        """End the threads of the gloo group; every later exchange raises ``RankLost``."""
        if not self._loss and self._unanswered is None:  # else gloo may wait for the other ranks
            self._loss = "the channel between the ranks is closed: this process ends"
            del self._group  # dropping the last reference joins the threads

    def lose(self, reason: str) -> RankLost:
        """Return the error of a collective that broke off; it names the lost rank."""
        self._loss = self._loss or self._lost_ranks.find(reason, self.exchanges, self.timeout)
        return RankLost(self._loss)

    def find_loss(self, reason: str) -> RankLost | None:
        """Return the error of another rank that has given up or whose process is gone, if there is one."""
        return self.lose(reason) if self._loss or self._lost_ranks.has_lost() else None

    def give_up(self, reason: str) -> RankLost:
        """Return the error of a rank that cannot continue while others wait for it; they get the same one."""
        if not self._loss:
            self._loss = f"{self._lost_ranks.name(self.rank)} could not continue: {reason}"
            self._lost_ranks.publish(self._loss)
        return RankLost(self._loss)

    def _open_group(self, owner: dist.ProcessGroup) -> Any:
        """Make the gloo group under a name that only its own ranks share.

        ``dist.new_group`` cannot be used. Its name holds the number of groups that a rank is in, and another rank may
        be in more groups (torch 2.13).
        """
        number = _opened[owner] = _opened.get(owner, 0) + 1
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(f"autobatch/{self._name}/{number}", c10d._get_default_store())  # noqa: SLF001 - no public name
        try:
            store.set(f"came/{self.rank}", "here")
            return c10d.ProcessGroupGloo(store, self.rank, self.size, timeout=self.timeout)
        except RuntimeError as error:
            raise RankLost(
                f"{self._lost_ranks.name_absent(store)} did not make the same call within {show_seconds(self.timeout)} "
                f"({_first_line(error)})"
            ) from error

    def _wait(self, work: Any, longest_wait: timedelta) -> None:
        try:
            work.wait(longest_wait)
        except RuntimeError:
            if not longest_wait or self._lost_ranks.has_lost():
                raise
            raise TimeoutError from None

    def _send_to_all(self, content: bytes) -> Callable[[timedelta], bytes]:
        """Send as many bytes as the other ranks do to each of them; return what waits for those of all ranks, by rank.

        gloo's gather goes round in a ring. It took 1.4 to 2 times as long on 2 to 4 ranks. Only the neighbours of a
        lost rank notice it.
        """
        memory = bytearray(content * self.size), bytearray(len(content) * self.size)
        with torch.inference_mode(mode=False):  # an inference tensor could not be written in another mode
            sent, received = (torch.frombuffer(part, dtype=torch.uint8) for part in memory)
        # gloo's thread drops its references some time later; dropping the last one needs the interpreter's lock.
        self._held = sent, received
        work = self._group.alltoall_base(received, sent, [], [])

        def receive(longest_wait: timedelta) -> bytes:
            self._wait(work, longest_wait)
            return bytes(memory[1])

        return receive

    def _pass_on(self, row: bytes) -> Callable[[timedelta], bytes]:
        """Send this rank's row in rounds; return what waits for those of all ranks, by rank.

        A rank that misses rows still takes part to the end, so that all others miss them, too.
        """
        failures: list[RuntimeError] = []

        def attempt(action: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return action(*arguments)
            except RuntimeError as error:
                failures.append(error)

        self._rows[:] = row.ljust(len(self._rows), b"\0")
        works = [attempt(self._group.recv, [received], source, 0) for _, _, received, source in self._rounds]
        begun = [attempt(self._group.send, [sent], receiver, 0) for sent, receiver, _, _ in self._rounds[:1]]

        def receive(longest_wait: timedelta) -> bytes:
            for number, (sent, receiver, _, _) in enumerate(self._rounds):
                sends = attempt(self._group.send, [sent], receiver, 0) if number else begun[0]
                for work in (works[number], sends):
                    if work is not None:
                        attempt(self._wait, work, longest_wait if number == 0 else timedelta())
            rows = [*_ROW.iter_unpack(self._rows)]
            if failures or any(one[0] == _NO_HASH for one in rows):  # a rank that comes too late has all rows
                raise failures[0] if failures else RuntimeError("the row of a rank did not come")
            first = (self.size - self.rank) * _ROW.size  # the row of rank 0
            return bytes(self._rows[first:] + self._rows[:first])

        return receive

    def _plan_rounds(self) -> list[tuple[torch.Tensor, int, torch.Tensor, int]]:
        """Return for each round: rows to send, their receiver, memory for rows, their sender.

        This rank's row is the first in memory, and that of the next rank follows.
        """
        rounds, count = [], 1
        with torch.inference_mode(mode=False):  # an inference tensor could not be written in another mode
            rows = torch.frombuffer(self._rows, dtype=torch.uint8).view(self.size, _ROW.size)
            while count < self.size:
                receiver, source = (self.rank - count) % self.size, (self.rank + count) % self.size
                received = rows[count : 2 * count]
                rounds.append((rows[: len(received)], receiver, received, source))
                count *= 2
        return rounds


def open_channel(group: dist.ProcessGroup | None) -> Channel:
    """Return the one channel of a process group. Collective the first time."""
    owner: Any = group or dist.group.WORLD
    if owner not in _channels:
        with deferred_interrupts():  # all ranks have their channel, or none
            _channels[owner] = Channel(group)
    return _channels[owner]


@atexit.register
def _close_all() -> None:
    """Close all channels before the interpreter ends.

    A thread of gloo drops a message's tensors some time after the exchange. If the interpreter ends first, the thread
    is ended inside a destructor, which aborts the process (https://github.com/pytorch/pytorch/issues/38228).
    """
    for channel in list(_open):
        channel.close()


def _timeout_of(owner: Any) -> timedelta:
    """Read the timeout of a process group, for which torch has no public name."""
    try:
        found: timedelta = owner._get_backend(owner._device_types[0]).options._timeout  # noqa: SLF001
    except (AttributeError, RuntimeError, IndexError):
        return _UNKNOWN_TIMEOUT
    return found


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().partition("\n")[0]
