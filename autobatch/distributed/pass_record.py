"""The collectives of a sharded model's forward and backward passes, written down as they happen.

Covers which they are and in which order, taking part in the rest of a pass without running it, and asking before each
collective of a pass that nobody has seen. Does not cover who asks, nor what the ranks say (``lockstep``).
"""
# ruff: noqa: SLF001 - torch has no public name for the collectives that a module uses now

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from autobatch.distributed.interrupts import deferred_interrupts
from autobatch.distributed.sharding import sharded_modules

__all__ = ["Collective", "PassRecord", "record_of"]


class Collective(NamedTuple):
    """One gather or scatter.

    Attributes:
        kind: ``"gather"`` or ``"scatter"``.
        outputs: How many numbers it gives.
        inputs: How many it takes.
        dtype: Of both.
        device: Of both.
        call: Does it again: with output, input.
    """

    kind: str
    outputs: int
    inputs: int
    dtype: torch.dtype
    device: torch.device
    call: Callable[[torch.Tensor, torch.Tensor], Any]

    def describe(self) -> list[Any]:
        """What is the same on each rank."""
        return [self.kind, self.outputs, self.inputs, str(self.dtype)]


class PassRecord:
    """What one model's passes consist of.

    Attributes:
        ask: Called before a collective that is not known to come next; raises where another rank will not come.
            ``None`` outside of a pass.
        lose: Makes the error of a collective that broke off, from its reason.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.ask: Callable[[list[Any]], None] | None = None
        self.lose: Callable[[str], BaseException] = RuntimeError
        self._known: dict[str, Sequence[Collective]] = {}
        self._varying: set[str] = set()
        self._name, self._now, self._is_followed = "", list[Collective](), False

    def begin(self, name: str) -> None:
        """A pass begins."""
        self._name, self._now = name, []
        self._is_followed = name in self._known

    def end(self) -> None:
        """The pass has run to its end, on each rank: the next one of its name is expected to be the same.

        A pass that differs once is asked for in full from then on.
        """
        if self._name in self._varying:
            return
        known = self._known.get(self._name)
        if known is not None and _describe(known) != _describe(self._now):
            del self._known[self._name]
            self._varying.add(self._name)
        elif known is None:
            self._known[self._name] = tuple(self._now)

    def take_part(self, collective: Collective, output: torch.Tensor, given: torch.Tensor) -> Any:
        """Do a collective of the pass."""
        if self.ask is None:
            return collective.call(output, given)
        if not self._is_expected(collective):
            self._is_followed = False
            self.ask(collective.describe())
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
        place = len(self._now)
        known = self._known.get(self._name, ()) if self._is_followed else ()
        return place < len(known) and known[place].describe() == collective.describe()

    @torch.no_grad()
    def play_rest(self) -> None:
        """Take part in what is left of the pass with zeros, as its results are dropped on every rank."""
        if not self._is_followed:  # the others ask before each: they hear
            return
        with deferred_interrupts(), _disable_current_modes():
            for collective in self._known[self._name][len(self._now) :]:
                given, output = (
                    torch.zeros(count, dtype=collective.dtype, device=collective.device)
                    for count in (collective.inputs, collective.outputs)
                )
                work = self._call(collective, output, given)
                if isinstance(work, dist.Work):
                    work.wait()


class _Recorded:
    """A module's collective as it was, with a record of each call."""

    def __init__(self, kind: str, inner: Any, record: PassRecord) -> None:
        self.kind, self.inner, self.record = kind, inner, record

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        memory: torch.Tensor = self.inner.allocate(*arguments, **options)
        return memory

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        def call(output: torch.Tensor, given: torch.Tensor) -> Any:
            return self.inner(output_tensor=output, input_tensor=given, **options)

        collective = Collective(
            self.kind, output_tensor.numel(), input_tensor.numel(), output_tensor.dtype, output_tensor.device, call
        )
        return self.record.take_part(collective, output_tensor, input_tensor)


def record_of(model: nn.Module) -> PassRecord:
    """The record of a sharded model; made with the first call. Outside of a pass it changes nothing."""
    modules = sharded_modules(model)
    record: PassRecord | None = None
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            record = getattr(group._all_gather_comm, "record", record)
    record = record or PassRecord()
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if not isinstance(group._all_gather_comm, _Recorded):
                module.set_custom_all_gather(_Recorded("gather", group._all_gather_comm, record))
                module.set_custom_reduce_scatter(_Recorded("scatter", group._reduce_scatter_comm, record))
    return record


def _describe(collectives: Sequence[Collective]) -> list[list[Any]]:
    return [collective.describe() for collective in collectives]
