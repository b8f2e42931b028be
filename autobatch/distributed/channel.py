"""Exchanges small messages among all ranks, beside the process group that trains.

The channel is a gloo group. It lives on the host, so an exchange waits for no device. If a peer's process is gone, the
kernel closes its sockets and the exchange ends at once, while NCCL would wait for its timeout.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes  # torch has no public way to pause a budget's mode

from autobatch._user_errors import contextmanager
from autobatch.distributed.lost_ranks import LostRanks, Process, find_process, show_seconds
from autobatch.errors import RankLost
from autobatch.undo.interrupts import deferred_interrupts

_SLOT_BYTES = 1024  # of each rank in one exchange; a longer message takes a second one
_HEAD_BYTES = 8  # of a slot, for the message's length
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
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Make the gloo group. Collective: every rank of ``group`` makes its own at the same point."""
        owner: Any = group or dist.group.WORLD
        self.members: list[int] = dist.get_process_group_ranks(owner)
        self.rank, self.size = dist.get_rank(group), len(self.members)
        self.timeout, self.exchanges, self.is_over = _timeout_of(owner), 0, True
        self.owed: dict[str, Any] | None = None
        self._name, self._loss = owner.group_name, ""
        self._memory: list[tuple[bytearray, torch.Tensor]] = []
        self._lost_ranks = LostRanks(self.members, self.rank, self._name)
        self._group = self._open_group(owner)
        _open.add(self)
        self._lost_ranks.processes = [Process(*fields) for fields in self.exchange(find_process())]

    def exchange(self, message: Any) -> list[Any]:
        """Send a message that JSON can hold to all ranks; return the message of each rank, by rank.

        Raises:
            RankLost: A rank is gone or did not answer within the timeout. Every later exchange raises it again.
        """
        if self._loss:
            raise RankLost(self._loss)
        if not dist.is_initialized():
            raise RankLost(
                "the process group was destroyed: initialize it again, wrap the model in it, and make a new Runner"
            )
        self.exchanges += 1
        content = json.dumps(message).encode()
        with self.collective("an exchange of messages"):
            rows = self._gather(content[: _SLOT_BYTES - _HEAD_BYTES], len(content), _SLOT_BYTES)
            longest = max(length for length, _ in rows) + _HEAD_BYTES
            if longest > _SLOT_BYTES:
                rows = self._gather(content, len(content), longest)
        return [json.loads(body) for _, body in rows]

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
        if not self._loss:  # else gloo may wait for the lost rank
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

    def _gather(self, content: bytes, length: int, slot: int) -> list[tuple[int, bytes]]:
        """Return each rank's full length and the bytes of its message that fit its slot.

        Every rank sends its message to every other one. gloo's gather goes round in a ring: it took 1.4 to 2 times as
        long on 2 to 4 ranks, and only the neighbours of a lost rank notice it.
        """
        row = (length.to_bytes(_HEAD_BYTES, "big") + content).ljust(slot, b"\0")
        (to_send, sent), (received_bytes, received) = self._find_memory(slot * self.size)
        to_send[:] = row * self.size
        self._group.alltoall_base(received, sent, [], []).wait()
        found = []
        for start in range(0, slot * self.size, slot):
            body = start + _HEAD_BYTES
            length = int.from_bytes(received_bytes[start:body], "big")
            found.append((length, bytes(received_bytes[body : min(start + slot, body + length)])))
        return found

    def _find_memory(self, size: int) -> list[tuple[bytearray, torch.Tensor]]:
        """Return memory to send and to receive, each as bytes and as a tensor on them.

        It is kept for the next exchange. gloo's thread drops its references some time later; dropping the last one
        needs the interpreter's lock.
        """
        if not self._memory or len(self._memory[0][0]) != size:
            with torch.inference_mode(mode=False):  # an inference tensor could not be written in another mode
                parts = [bytearray(size) for _ in range(2)]
                self._memory = [(part, torch.frombuffer(part, dtype=torch.uint8)) for part in parts]
        return self._memory


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
