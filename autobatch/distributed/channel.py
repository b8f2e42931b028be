"""Exchanges messages of a few hundred bytes among all ranks, beside the process group that trains.

The group is gloo's, since it lives on the host: an exchange waits for no device. A peer whose process is gone ends it
at once, as the kernel closes its sockets. NCCL would wait for its timeout.
"""
# ruff: noqa: SLF001 - torch has no public name for a group's timeout

from __future__ import annotations

import atexit
import ctypes
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from autobatch.distributed.roll_call import Process, RollCall, find_process, in_words
from autobatch.errors import RankLost
from autobatch.undo.interrupts import deferred_interrupts

__all__ = ["Channel", "open_channel"]

_SLOT = 1024
"""Bytes of each rank in one exchange; what is longer takes a second one."""

_HEAD = 8
_UNKNOWN_TIMEOUT = timedelta(minutes=30)
"""torch's own default (``default_pg_timeout`` in torch/distributed/constants.py), where a group's cannot be read."""

_REPORTED = "_autobatch_reported"

_channels: WeakKeyDictionary[dist.ProcessGroup, Channel] = WeakKeyDictionary()
_opened: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()  # how often, as each rank counts it
_open: WeakSet[Channel] = WeakSet()


class Channel:
    """Exchanges among the ranks of a process group, one at a time.

    Attributes:
        rank: Of this process, within the group.
        size: Ranks of the group.
        members: Their ranks in the default process group, which is how messages name them.
        timeout: How long an exchange waits for the others.
        agreed: How many blocks all ranks have done together.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Make the group on the host. Collective: every rank of ``group`` makes its own at the same point.

        Raises:
            RankLost: A rank did not come.
        """
        self.members: list[int] = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.rank, self.size = dist.get_rank(group), len(self.members)
        self.timeout = _timeout_of(group)
        own: Any = group or dist.group.WORLD
        self._name, self._lost, self._exchanges = own.group_name, "", 0
        self.agreed, self._blocks = 0, 0
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._roll_call = RollCall(self.members, self.rank, self._name)
        self._group = self._open_group(own)
        _open.add(self)
        self._roll_call.processes = [Process(*said) for said in self.exchange(find_process())]

    def exchange(self, message: Any) -> list[Any]:
        """Say something that JSON can hold; returns what each rank said, by rank.

        Raises:
            RankLost: A rank is gone, or did not come within the timeout. Every later exchange raises it again.
        """
        if self._lost:
            raise RankLost(self._lost)
        if not dist.is_initialized():
            raise RankLost(
                "the process group was destroyed: make one again, wrap the model in it, and make the Runner anew"
            )
        self._exchanges += 1
        content = json.dumps(message).encode()
        try:
            # A budget counts the step's tensors, not these; an interrupt must not end one of two gathers.
            with deferred_interrupts(), _disable_current_modes():
                rows = self._gather(content[: _SLOT - _HEAD], len(content), _SLOT)
                longest = max(length for length, _ in rows)
                if longest > _SLOT - _HEAD:
                    rows = self._gather(content, len(content), longest + _HEAD)
        except RuntimeError as error:  # gloo has no type of its own for a peer that is gone
            reason = _first_line(error)
        else:
            return [json.loads(body) for _, body in rows]
        raise self.lose(reason)

    def begin_block(self) -> None:
        """Whatever is raised from now on is news to the other ranks, be it an error that was reported before."""
        self._blocks += 1

    def note_reported(self, error: BaseException) -> None:
        """All ranks have heard of this error, which is on its way out here: it must not be reported again.

        Noted on the error, since another one may get its ``id`` when it is gone, and a reference would hold its frames.
        """
        vars(error)[_REPORTED] = self._now()

    def was_reported(self, error: BaseException) -> bool:
        """Whether all ranks have heard of this error, or of one that it was raised in place of."""
        return any(vars(one).get(_REPORTED) == self._now() for one in _with_causes(error))

    def _now(self) -> tuple[str, int, int]:
        """Until the next block or exchange."""
        return self._name, self._blocks, self._exchanges

    def close(self) -> None:
        """End the threads of the group on the host; every later exchange raises ``RankLost``.

        Not where a rank is lost: gloo may wait for it in vain.
        """
        if self._lost:
            return
        self._lost = "the channel between the ranks is closed: this process ends"
        del self._group  # its last reference joins the threads

    def lose(self, reason: str) -> RankLost:
        """The error of a collective that broke off, here or in the group that trains, with who is gone."""
        self._lost = self._lost or self._roll_call.find_lost(reason, self._exchanges, self.timeout)
        return RankLost(self._lost)

    def give_up(self, reason: str) -> RankLost:
        """The error of this rank where others wait for it in vain; they find the reason when they no longer wait."""
        own = f"{self._roll_call.name(self.rank)} could not go on: {reason}"
        if not self._lost:
            self._roll_call.publish(own)
        self._lost = self._lost or own
        return RankLost(self._lost)

    def _open_group(self, own: dist.ProcessGroup) -> Any:
        """The group on the host.

        Not by ``dist.new_group``: where some ranks make one, each looks for the others under a name that has in it how
        many groups this rank is in by itself, and another may be in more (torch 2.13).
        """
        number = _opened[own] = _opened.get(own, 0) + 1
        c10d: Any = dist.distributed_c10d
        store = c10d.PrefixStore(f"autobatch/{self._name}/{number}", c10d._get_default_store())
        try:
            store.set(f"came/{self.rank}", "here")
            return c10d.ProcessGroupGloo(store, self.rank, self.size, timeout=self.timeout)
        except RuntimeError as error:
            raise RankLost(
                f"{self._roll_call.name_absent(store)} did not come to the same call within {in_words(self.timeout)} "
                f"({_first_line(error)})"
            ) from error

    def _gather(self, content: bytes, length: int, slot: int) -> list[tuple[int, bytes]]:
        """Each rank's full length and the bytes of it that are in its slot.

        Every rank sends its own to every other: gloo's gather goes round in a ring, which took 1.4 to 2 times as long
        on 2 to 4 ranks, and there a rank that is gone is noticed by its neighbours only.
        """
        row = (length.to_bytes(_HEAD, "big") + content).ljust(slot, b"\0")
        sent, heard = self._buffers_for(slot)
        ctypes.memmove(sent.data_ptr(), row * self.size, slot * self.size)
        self._group.alltoall_base(heard, sent, [], []).wait()
        rows = ctypes.string_at(heard.data_ptr(), slot * self.size)  # bytes(storage) takes 3 ms
        found = []
        for start in range(0, len(rows), slot):
            length = int.from_bytes(rows[start : start + _HEAD], "big")
            found.append((length, rows[start + _HEAD : start + min(slot, _HEAD + length)]))
        return found

    def _buffers_for(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent and what is heard, of bytes.

        Kept from one exchange to the next: gloo's thread lets go of them some time after it, and where it is the last
        one to do so it has to wait for the interpreter.
        """
        size = slot * self.size
        if self._buffers is None or len(self._buffers[0]) != size:
            with torch.inference_mode(mode=False):  # else they could be written in no other mode
                sent, heard = (torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(2))
            self._buffers = sent, heard
        return self._buffers


def open_channel(group: dist.ProcessGroup | None) -> Channel:
    """Return the one channel of a process group. Collective the first time."""
    own: Any = group or dist.group.WORLD
    if own not in _channels:
        with deferred_interrupts():  # the others have theirs when this rank has it
            _channels[own] = Channel(group)
    return _channels[own]


@atexit.register
def _close_all() -> None:
    """Before the interpreter ends: a thread of gloo that then still holds a message's tensors would abort the process.

    It lets go of them some time after the exchange, needs the interpreter for that, and is ended by ``pthread_exit``
    inside a destructor (https://github.com/pytorch/pytorch/issues/38228, https://github.com/pytorch/pytorch/pull/179291).
    """
    for channel in list(_open):
        channel.close()


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """Return the process group's own timeout: ``new_group`` would take half an hour, whatever that is."""
    try:
        own: Any = group or dist.group.WORLD
        found: timedelta = own._get_backend(own._device_types[0]).options._timeout
    except (AttributeError, RuntimeError, IndexError):
        return _UNKNOWN_TIMEOUT
    return found


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those in whose place it was raised, the last one first."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__context__ if following.__cause__ is None else following.__cause__


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().partition("\n")[0]
