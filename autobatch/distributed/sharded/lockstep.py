"""Runs the passes of a sharded model in lockstep: every rank ends a forward or backward pass, or all drop it.

``fully_shard`` gathers parameters inside each pass, so a rank that stops in the middle would leave the others waiting.

1. A pass is a list of collectives. In an unknown pass the ranks agree before each one; a known pass they just run.
2. A rank that fails takes part in the rest of a known pass with zeros.
3. At the end of a pass all ranks exchange how it went. If one ran out of memory, all drop the pass and run it again.
4. If a known pass differs on one rank, all drop it too, and agree on each collective again.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autobatch._user_errors import contextmanager
from autobatch.distributed.agreement import Agreement, name_error
from autobatch.distributed.channel import Channel, uninterrupted
from autobatch.distributed.sharded.internals import (
    collectives_of,
    param_groups,
    replicas_of,
    set_collectives,
    set_replicas,
    sums_are_narrow,
)
from autobatch.distributed.sharded.model import refuse_changed_settings, reset
from autobatch.distributed.sharded.passes import Passes, PassName
from autobatch.errors import AutobatchError, DoesNotFit, InvalidArgument, RankFailed, RankLost
from autobatch.memory.oom import describe_error, is_oom
from autobatch.records import IN_EACH, SUMMINGS, Summing
from autobatch.undo.interrupts import deferred_interrupts

# Causes of another run of a pass that did not run out of memory.
DIFFERS = "the pass differs"
ONE_SAMPLE = "the model refuses one sample"


class PassDropped(DoesNotFit):
    """Another rank drops a pass that all ranks end together, and all will run it again."""


class PassDiffers(AutobatchError):
    """This pass differs from the known one that the other ranks run."""

    def __init__(self) -> None:
        super().__init__("this pass gathers or scatters other parameters than the one before")


Kind = Literal["gather", "scatter", "sum"]


class Collective(NamedTuple):
    """One gather or scatter, or a sum over the replicas of a shard."""

    kind: Kind
    place: int  # in the model's param_groups
    outputs: int  # numbers in the result
    inputs: int  # numbers sent
    dtype: torch.dtype
    device: torch.device
    call: Callable[[torch.Tensor, torch.Tensor], Any]  # with the output and the input

    def describe(self) -> list[Any]:
        """Return what is the same on each rank."""
        return [self.kind, self.place, self.outputs, self.inputs, str(self.dtype)]


@dataclass
class KnownPass:
    """The collectives of the latest passes of one name: known if enough of them were equal.

    The first pass is enough. After a known pass that differed 4 are needed, then 10, 22 and so on.
    """

    collectives: Sequence[Collective] = ()
    equal: int = 0
    needed: int = 1

    @property
    def is_known(self) -> bool:
        """Whether the next pass is expected to be equal."""
        return self.equal >= self.needed

    def note(self, collectives: Sequence[Collective]) -> None:
        """Note a pass that all ranks have finished."""
        is_repeated = [one.describe() for one in self.collectives] == [one.describe() for one in collectives]
        self.collectives, self.equal = collectives, self.equal + 1 if is_repeated else 1

    def forget(self) -> None:
        """Forget a pass that differed on some rank."""
        self.equal, self.needed = 0, 2 * self.needed + 2


class Lockstep(Passes):
    """Passes that all ranks can run again, because a rank that fails in one still ends it with them."""

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        """Take part in nothing outside a step."""
        super().__init__(model, channel)
        self._groups = param_groups(model)
        self._factor: float | None = self._groups[0].gradient_divide_factor
        self.most = IN_EACH if any(map(sums_are_narrow, self._groups)) else SUMMINGS[-1]
        self._left, self._sums, self._stays = 0, True, False
        # Without a sum, or with parameters that stayed gathered, a pass has other collectives.
        self._passes: defaultdict[tuple[PassName, bool], KnownPass] = defaultdict(KnownPass)
        self._pass, self._now, self._is_followed = KnownPass(), list[Collective](), False
        for place, group in enumerate(self._groups):
            if not _is_watched(group):
                gather, scatter = collectives_of(group)
                watched = _WatchedCollective("gather", place, gather), _WatchedCollective("scatter", place, scatter)
                set_collectives(group, *watched)
                replicas = replicas_of(group)
                if replicas is not None and not isinstance(replicas, _WatchedReplicas):
                    set_replicas(group, _WatchedReplicas(replicas, watched[1]))

    def begin(self, agreement: Agreement) -> None:
        """Begin a step, in which all ranks run the same number of micro-batches."""
        super().begin(agreement)
        refuse_changed_settings(self._model, self._groups, self._factor)
        if not all(map(_is_watched, self._groups)):
            raise InvalidArgument(
                "set_custom_all_gather() or set_custom_reduce_scatter() was called after Runner() was made: call it "
                "before"
            )
        for group in self._groups:
            for watched in collectives_of(group):
                watched.lockstep = self
        reset(self._model)  # a pass between two steps leaves parameters gathered

    def expect(self, micro_batches: int, summing: Summing) -> None:
        """Expect so many micro-batches until the step ends; ``summing`` says in which of them gradients are summed."""
        self.summing, self._left = summing, micro_batches
        self._set(sums=True, stays=False)

    def begin_micro_batch(self) -> None:
        """Begin one of them: gradients stay on this rank until the last one, if they are summed once."""
        self._left -= 1
        waits = self._left > 0 and self.summing != IN_EACH
        self._set(sums=not waits, stays=waits and self.summing == SUMMINGS[-1])

    def leave(self) -> None:
        """End the step; gradients are summed in each pass outside it."""
        super().leave()
        self._set(sums=True, stays=False)

    def start(self, name: PassName) -> None:
        """End the pass before and begin another one; a second call in a pass does nothing."""
        if self.running == name:
            return
        with deferred_interrupts():  # the other ranks rely on this one to be in the new pass
            self.finish()
            differs = self._stays
            if name == "forward":
                self.begin_micro_batch()
            else:
                differs = not self._sums
            self._begin_pass(name, self._passes[name, differs])

    def finish(self) -> None:
        """End the running pass, if any; raise PassDropped if another rank drops it."""
        if self.running is None:
            return
        with deferred_interrupts():
            if self._is_followed and len(self._now) < len(self._pass.collectives):
                raise PassDiffers
            self._agree(None)
            if not self._is_followed:
                self._pass.note(self._now)
            self.running = None

    def take_part(self, collective: Collective, output: torch.Tensor, given: torch.Tensor) -> Any:
        """Run a collective of the running pass; raise PassDiffers if the known pass has another one here."""
        if self.running is None:
            return collective.call(output, given)
        if not self._is_followed:
            self._agree(collective.describe())
        else:
            expected = self._pass.collectives[len(self._now) :][:1]
            if [one.describe() for one in expected] != [collective.describe()]:
                raise PassDiffers
        return self._call(collective, output, given)

    def exchange(self, point: str, value: Any) -> list[Any]:
        """Return the value of each rank at a point of an unknown pass; raise PassDropped if another rank drops it."""
        return [values["value"] for values in self._agree([point], value=value)]

    def drop(self, *, short: str | None = None, again: str | None = None) -> None:
        """Drop the running pass, which all ranks will run again for the ``causes``.

        Args:
            short: Out-of-memory error of this rank, which still takes part in the rest of the pass.
            again: ``DIFFERS`` or ``ONE_SAMPLE``, if that is this rank's cause. Neither: another rank has a cause.
        """
        if short is not None or again is not None:
            reset(self._model)  # first: it frees memory that the rest of the pass needs
            self._play_rest()
            self._gather(**({"short": short} if short is not None else {"again": again}))
        if DIFFERS in self.causes:
            self._pass.forget()
        self._clear()

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
            self._begin_pass("forward", KnownPass())  # which is not known, and will not be
            yield
            self._agree(None)
        except BaseException as error:
            try:
                if isinstance(error, DoesNotFit) or is_oom(error):
                    if not isinstance(error, PassDropped):  # which came from the others
                        agreement.gather("forward", short=name_error(error))
                else:
                    agreement.fail(error)
            finally:
                self._clear()
            raise
        finally:
            self.leave()

    def _set(self, *, sums: bool, stays: bool) -> None:
        if sums != self._sums:
            self._model.set_requires_gradient_sync(sums)  # type: ignore[operator]
        if stays != self._stays:
            self._model.set_reshard_after_backward(not stays)  # type: ignore[operator]
        self._sums, self._stays = sums, stays

    def _begin_pass(self, name: PassName, known: KnownPass) -> None:
        self.running, self._pass, self._now, self._is_followed = name, known, [], known.is_known

    def _play_rest(self) -> None:
        """Take part in the rest of the pass with zeros; raise RankLost if they do not fit in memory.

        In an unknown pass the others learn from the next exchange that this rank fails.
        """
        reason = ""
        for _ in range(2):  # the second time from the collective at which memory ran out
            try:
                with torch.no_grad(), uninterrupted():
                    for collective in self._pass.collectives[len(self._now) :] if self._is_followed else ():
                        work = self._call(collective, *_make_zeros(collective))
                        if isinstance(work, dist.Work):
                            work.wait()
            except Exception as error:
                if isinstance(error, RankLost) or not is_oom(error):
                    raise
                reason = describe_error(error)
            else:
                return
            gc.collect()
        raise self._channel.give_up(f"ran out of memory for the zeros of a pass that other ranks run: {reason}")

    def _call(self, collective: Collective, output: torch.Tensor, given: torch.Tensor) -> Any:
        with self._channel.collective(f"a {collective.kind}"):
            work = collective.call(output, given)
            self._now.append(collective)
            return work

    def _clear(self) -> None:
        self.running = None
        reset(self._model)

    def _agree(self, collective: list[Any] | None, **values: Any) -> list[dict[str, Any]]:
        """Exchange which collective comes next, and values; ``None``: the pass is over."""
        gathered = self._gather(next=collective, **values)
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
        return gathered

    def _gather(self, **values: Any) -> list[dict[str, Any]]:
        """Exchange values in the running pass, and note the causes of all ranks to drop it."""
        assert self._agreement is not None and self.running is not None  # noqa: S101, PT018 - narrows for mypy
        gathered = self._agreement.gather(self.running, **values)
        again = {values["again"] for values in gathered if "again" in values}
        self.causes = frozenset(again | {"short" for values in gathered if "short" in values})
        return gathered


class _WatchedCollective:
    """A module's collective, of which each call is given to the lockstep of the latest step."""

    lockstep: Lockstep | None = None

    def __init__(self, kind: Kind, place: int, inner: Any) -> None:
        self.kind, self.place, self.inner = kind, place, inner

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        memory: torch.Tensor = self.inner.allocate(*arguments, **options)
        return memory

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        def call(output: torch.Tensor, given: torch.Tensor) -> Any:
            return self.inner(output_tensor=output, input_tensor=given, **options)

        return self.give(self.kind, call, output_tensor, input_tensor)

    def give(
        self, kind: Kind, call: Callable[[torch.Tensor, torch.Tensor], Any], output: torch.Tensor, given: torch.Tensor
    ) -> Any:
        """Let the lockstep run a collective of this kind, if there is one."""
        if self.lockstep is None:
            return call(output, given)
        sizes = output.numel(), given.numel()
        collective = Collective(kind, self.place, *sizes, output.dtype, output.device, call)
        return self.lockstep.take_part(collective, output, given)


class _WatchedReplicas(dist.ProcessGroup):
    """The process group of a shard's replicas, in which torch sums what it has scattered, and nothing else."""

    def __init__(self, inner: dist.ProcessGroup, scatter: _WatchedCollective) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub lacks this one
        self._inner, self._scatter = inner, scatter

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> None:  # type: ignore[override]
        def call(output: torch.Tensor, _: torch.Tensor) -> None:
            self._inner.allreduce([output], opts).wait()

        (tensor,) = tensors
        self._scatter.give("sum", call, tensor, tensor[:0])


def _is_watched(group: Any) -> bool:
    """Return whether the collectives of one of the model's ``param_groups`` are watched."""
    return all(isinstance(one, _WatchedCollective) for one in collectives_of(group))


def _make_zeros(collective: Collective) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output and an input of a collective whose results every rank drops."""
    output, given = (
        torch.zeros(count, dtype=collective.dtype, device=collective.device)
        for count in (collective.outputs, collective.inputs)
    )
    return output, given
