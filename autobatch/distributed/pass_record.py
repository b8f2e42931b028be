"""Records the collectives of a sharded model's passes, so that a rank that fails can take part in the rest of one."""
# ruff: noqa: SLF001 - torch has no public name for the collectives that a module uses now

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autobatch.distributed.sharding import param_groups
from autobatch.errors import AutobatchError
from autobatch.undo.interrupts import deferred_interrupts

__all__ = ["Collective", "PassDiffers", "PassRecord", "is_recorded", "record_of"]

_DIFFERS = "this pass gathers or scatters other parameters than the one before"

_REPEATS = 3
"""How often a pass has to repeat after one that differed before it is known again; doubled each time."""


class Collective(NamedTuple):
    """One gather or scatter.

    Attributes:
        kind: ``"gather"`` or ``"scatter"``.
        place: Whose: of the model's ``param_groups``, which are the same on each rank.
        outputs: How many numbers it gives.
        inputs: How many it takes.
        dtype: Of both.
        device: Of both.
        call: Does it again: with output, input.
    """

    kind: str
    place: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    device: torch.device
    call: Callable[[torch.Tensor, torch.Tensor], Any]

    def describe(self) -> list[Any]:
        """What is the same on each rank."""
        return [self.kind, self.place, self.outputs, self.inputs, str(self.dtype)]


class PassDiffers(AutobatchError):
    """This pass is another than the known one, in which the other ranks are: all drop it, and ask in the next."""


class PassRecord:
    """What one model's passes consist of.

    Attributes:
        ask: Called before a collective of a pass that is not known; raises where another rank will not come.
            ``None`` outside of a pass.
        lose: Makes the error of a collective that broke off, from its reason.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.ask: Callable[[list[Any]], None] | None = None
        self.lose: Callable[[str], BaseException] = RuntimeError
        self._known: dict[str, Sequence[Collective]] = {}
        self._latest: dict[str, Sequence[Collective]] = {}
        self._repeats: dict[str, int] = {}
        self._needed: dict[str, int] = {}
        self._name, self._now, self._is_followed = "", list[Collective](), False

    def begin(self, name: str) -> None:
        """A pass begins."""
        self._name, self._now = name, []
        self._is_followed = name in self._known

    def check_end(self) -> None:
        """Ask whether the pass may end here.

        Raises:
            PassDiffers: The known one has more collectives, in which the other ranks are.
        """
        if self._is_followed and len(self._now) < len(self._known[self._name]):
            raise PassDiffers(_DIFFERS)

    def end(self) -> None:
        """The pass has run to its end, on each rank: the next one of its name is expected to be the same.

        After one that differed it has to repeat a few times before, and more often each time.
        """
        name, latest = self._name, self._latest.get(self._name)
        if self._is_followed:
            return
        is_repeated = latest is not None and _describe(latest) == _describe(self._now)
        self._repeats[name] = self._repeats.get(name, 0) + 1 if is_repeated else 0
        self._latest[name] = tuple(self._now)
        if self._repeats[name] >= self._needed.get(name, 0):
            self._known[name] = self._latest[name]

    def forget(self, name: str) -> None:
        """A pass of this name differed on a rank, as all have heard: each asks before every collective again."""
        if self._known.pop(name, None) is not None:
            self._needed[name] = 2 * self._needed.get(name, 0) + _REPEATS
            self._latest.pop(name, None)

    def take_part(self, collective: Collective, output: torch.Tensor, given: torch.Tensor) -> Any:
        """Do a collective of the pass.

        Raises:
            PassDiffers: Another one is known to come next. What follows ``ask``: its errors.
        """
        if self.ask is None:
            return collective.call(output, given)
        if not self._is_followed:
            self.ask(collective.describe())
        elif not self._is_expected(collective):
            raise PassDiffers(_DIFFERS)
        # Neither a budget nor an interrupt may end it: the others are in it.
        with deferred_interrupts(), _disable_current_modes():
            return self._call(collective, output, given)

    def _call(self, collective: Collective, output: torch.Tensor, given: torch.Tensor) -> Any:
        try:
            work = collective.call(output, given)
        except RuntimeError as error:
            reason = f"a {collective.kind} broke off: {error}".strip().partition("\n")[0]
            raise self.lose(reason) from error
        self._now.append(collective)
        return work

    def _is_expected(self, collective: Collective) -> bool:
        place, known = len(self._now), self._known[self._name]
        return place < len(known) and known[place].describe() == collective.describe()

    @torch.no_grad()
    def play_rest(self) -> None:
        """Take part in what is left of the pass with zeros, as its results are dropped on every rank.

        A second call goes on where the first has failed.
        """
        if not self._is_followed:  # the others ask before each: they hear
            return
        with deferred_interrupts(), _disable_current_modes():
            for collective in self._known[self._name][len(self._now) :]:
                self._play(collective)

    def _play(self, collective: Collective) -> None:
        given, output = (
            torch.zeros(count, dtype=collective.dtype, device=collective.device)
            for count in (collective.inputs, collective.outputs)
        )
        work = self._call(collective, output, given)
        if isinstance(work, dist.Work):
            work.wait()


class _Recorded:
    """A module's collective as it was, with a record of each call."""

    def __init__(self, kind: str, place: int, inner: Any, record: PassRecord) -> None:
        self.kind, self.place, self.inner, self.record = kind, place, inner, record

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        memory: torch.Tensor = self.inner.allocate(*arguments, **options)
        return memory

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        def call(output: torch.Tensor, given: torch.Tensor) -> Any:
            return self.inner(output_tensor=output, input_tensor=given, **options)

        sizes = output_tensor.numel(), input_tensor.numel()
        collective = Collective(self.kind, self.place, *sizes, output_tensor.dtype, output_tensor.device, call)
        return self.record.take_part(collective, output_tensor, input_tensor)


def record_of(model: nn.Module) -> PassRecord:
    """The record of a sharded model; made with the first call. Outside of a pass it changes nothing."""
    groups = param_groups(model)
    records = [group._all_gather_comm.record for group in groups if is_recorded(group)]
    record = records[0] if records else PassRecord()
    for place, group in enumerate(groups):
        if not is_recorded(group):
            group._all_gather_comm = _Recorded("gather", place, group._all_gather_comm, record)
            group._reduce_scatter_comm = _Recorded("scatter", place, group._reduce_scatter_comm, record)
    return record


def is_recorded(group: Any) -> bool:
    """Whether the collectives of one of the model's ``param_groups`` are written down."""
    return isinstance(group._all_gather_comm, _Recorded) and isinstance(group._reduce_scatter_comm, _Recorded)


def _describe(collectives: Sequence[Collective]) -> list[list[Any]]:
    return [collective.describe() for collective in collectives]
