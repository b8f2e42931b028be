"""Records the collectives of a sharded model's passes, so that a failed rank can take part in the rest."""
# ruff: noqa: SLF001 - torch can set a module's collectives, but has no public name to read the present ones

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autobatch.distributed.channel import uninterrupted
from autobatch.distributed.sharded.model import param_groups
from autobatch.errors import AutobatchError

_REPEATS = 3  # equal passes that are needed after one that differed; each difference doubles them


class Collective(NamedTuple):
    """One gather or scatter."""

    kind: str  # "gather" or "scatter"
    place: int  # in the model's param_groups
    outputs: int  # numbers in the result
    inputs: int  # numbers sent
    dtype: torch.dtype
    device: torch.device
    call: Callable[[torch.Tensor, torch.Tensor], Any]  # with the output and the input

    def describe(self) -> list[Any]:
        """Return what is the same on each rank."""
        return [self.kind, self.place, self.outputs, self.inputs, str(self.dtype)]


class PassDiffers(AutobatchError):
    """This pass differs from the known one that the other ranks run: all drop it and agree on each collective next."""

    def __init__(self) -> None:
        super().__init__("this pass gathers or scatters other parameters than the one before")


class PassRecord:
    """The collectives of one model's passes.

    A pass is known once it has finished on every rank; after one that differed, only after a few equal ones. In an
    unknown pass the ranks agree on each collective.

    Attributes:
        agree: Called before a collective of a pass that is not known; raises if another rank will not take part.
            ``None`` outside a pass.
        collective: Makes the block of one collective, from its name.
    """

    def __init__(self) -> None:
        """Know no pass yet."""
        self.agree: Callable[[list[Any]], None] | None = None
        self.collective: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._known: dict[str, Sequence[Collective]] = {}
        self._latest: dict[str, Sequence[Collective]] = {}
        self._repeats: dict[str, int] = {}
        self._needed: dict[str, int] = {}
        self._name, self._now, self._is_followed = "", list[Collective](), False

    def begin(self, name: str) -> None:
        """Begin a pass."""
        self._name, self._now = name, []
        self._is_followed = name in self._known

    def check_end(self) -> None:
        """Raise PassDiffers if the known pass, which the other ranks run, has more collectives."""
        if self._is_followed and len(self._now) < len(self._known[self._name]):
            raise PassDiffers

    def end(self) -> None:
        """End a pass that has finished on every rank; the next one of its name is expected to be equal.

        After a pass that differed, more repeats are needed each time.
        """
        if self._is_followed:
            return
        name, latest = self._name, self._latest.get(self._name)
        is_repeated = latest is not None and [c.describe() for c in latest] == [c.describe() for c in self._now]
        self._repeats[name] = self._repeats.get(name, 0) + 1 if is_repeated else 0
        self._latest[name] = tuple(self._now)
        if self._repeats[name] >= self._needed.get(name, 0):
            self._known[name] = self._latest[name]

    def forget(self, name: str) -> None:
        """Forget a pass that differed on some rank: every rank agrees on each collective again."""
        if self._known.pop(name, None) is not None:
            self._needed[name] = 2 * self._needed.get(name, 0) + _REPEATS
            self._latest.pop(name, None)

    def take_part(self, collective: Collective, output: torch.Tensor, given: torch.Tensor) -> Any:
        """Run a collective of the pass; raise PassDiffers if the known pass has another one here."""
        if self.agree is None:
            return collective.call(output, given)
        if not self._is_followed:
            self.agree(collective.describe())
        elif not self._is_expected(collective):
            raise PassDiffers
        return self._call(collective, output, given)

    def _call(self, collective: Collective, output: torch.Tensor, given: torch.Tensor) -> Any:
        with self.collective(f"a {collective.kind}"):
            work = collective.call(output, given)
            self._now.append(collective)
            return work

    def _is_expected(self, collective: Collective) -> bool:
        place, known = len(self._now), self._known[self._name]
        return place < len(known) and known[place].describe() == collective.describe()

    @torch.no_grad()
    def play_rest(self) -> None:
        """Take part in the rest of the pass with zeros: every rank drops its results.

        A second call continues after the last collective of the first one.
        """
        if not self._is_followed:  # the other ranks agree on each collective, and learn there that this rank fails
            return
        with uninterrupted():
            for collective in self._known[self._name][len(self._now) :]:
                given, output = (
                    torch.zeros(count, dtype=collective.dtype, device=collective.device)
                    for count in (collective.inputs, collective.outputs)
                )
                work = self._call(collective, output, given)
                if isinstance(work, dist.Work):
                    work.wait()


class _Recorded:
    """A module's collective with a record of each call."""

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
    """Return the record of a sharded model, made with the first call. Outside a pass it changes nothing."""
    groups = param_groups(model)
    records = [group._all_gather_comm.record for group in groups if is_recorded(group)]
    record = records[0] if records else PassRecord()
    for place, group in enumerate(groups):
        if not is_recorded(group):
            group._all_gather_comm = _Recorded("gather", place, group._all_gather_comm, record)
            group._reduce_scatter_comm = _Recorded("scatter", place, group._reduce_scatter_comm, record)
    return record


def is_recorded(group: Any) -> bool:
    """Return whether the collectives of one of the model's ``param_groups`` are recorded."""
    return isinstance(group._all_gather_comm, _Recorded) and isinstance(group._reduce_scatter_comm, _Recorded)
