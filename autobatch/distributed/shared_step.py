"""Synchronizes one step over the ranks: one exchange, one sum.

1. Before it each rank does what may fail on it alone: its passes, and the room for the sum and for the update.
2. ``agree``: exchange what the samples count, and what must be equal. From here on the other ranks wait for this one.
3. ``sum``: sum the gradients, times this rank's factor, and send the buffers of rank 0, which ``settle`` takes.

If every rank holds back its last backward pass, ``agree`` comes before it, and gradients are summed in it
(``overlapped``). Then ``confirm_sum`` is a second exchange: all ranks have done it, or all run the step again.

A rank that fails before ``agree`` sends its error there, so all restore the step. A rank that fails afterwards sends
its error at its next call: the others have made the update.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch

from autobatch.distributed.agreement import Agreement
from autobatch.distributed.data_parallel import SharedBuffers, broadcast_buffers_of, undisturbed
from autobatch.distributed.overlapped_sum import SPARSE, KnownGradients, OverlappedSum
from autobatch.distributed.ranks import Ranks, are_close, digest_values, read_rates
from autobatch.distributed.reduction import IN_FLIGHT, GradientSlot, make_loss
from autobatch.distributed.shared_rows import SharedRows
from autobatch.errors import InvalidArgument, RankLost
from autobatch.events.runner_events import RankStep
from autobatch.torch_internals.storages import has_shards
from autobatch.undo.gradients import gradient_dtype
from autobatch.undo.interrupts import deferred_interrupts

_SHORTEST_WAIT = 30.0  # seconds


class SharedStep:
    """One step, on every rank, after whose sum nothing fails on one rank alone.

    Attributes:
        ranks: Report of each rank, from ``agree`` on.
        is_agreed: Whether all ranks make the step: nothing can be restored on all of them.
        overlapped: Block of the last backward pass, if gradients are summed in it.
    """

    def __init__(self, ranks: Ranks, name: str, optimizer: Any | None = None) -> None:
        """Send nothing yet.

        Args:
            ranks: The ranks.
            name: ``"step 3"`` or ``"accumulate 3"``.
            optimizer: Optimizer whose learning rates must be equal; ``None``: they are not compared.
        """
        self.ranks: tuple[RankStep, ...] = ()
        self.is_agreed = False
        self.overlapped: OverlappedSum | None = None
        self._ranks, self._agreement = ranks, Agreement(ranks.channel, name, ranks.number)
        self._wrapper: Any = ranks.model
        self._optimizer, self._block, self._interrupts = optimizer, ExitStack(), ExitStack()
        self._totals: tuple[Mapping[str, float], int] | None = None
        self._slots: Sequence[GradientSlot] = ()
        self._factor: float | None = None
        self._buffers: SharedBuffers | None = None

    def begin(self) -> None:
        """Keep the wrapper from communicating until ``close``."""
        self._block.enter_context(undisturbed(self._wrapper))
        self._ranks.own_time.start()

    def fail(self, error: BaseException) -> None:
        """Send an error that ended this rank's step to the others, unless they know it."""
        if not self.is_agreed:
            self._agreement.fail(error)
        elif not isinstance(error, RankLost):
            self._agreement.owe(error)

    def take_update(self, error: BaseException) -> int | None:
        """Copy the update from a rank that has made it; return the number of that rank, or ``None``.

        This rank waits for the others' next call, but not for long: they may wait for it in a collective of the user's.
        """
        self.is_agreed = False  # the other ranks will know of the error in any case
        wait = timedelta(seconds=max(_SHORTEST_WAIT, 10 * self._ranks.own_time.read()))
        return self._agreement.take_update(error, min(wait, self._ranks.channel.timeout))

    def share_rows(self) -> SharedRows:
        """Return what gathers the representations of this step's loss over the ranks."""
        return SharedRows(self._ranks, self._agreement)

    def close(self) -> None:
        """Let the wrapper communicate again."""
        with self._block:
            self._interrupts.close()

    def find_totals(self, weights: Mapping[str, float], samples: int) -> tuple[Mapping[str, float], int] | None:
        """Return the totals of each term, and the samples, over all ranks; ``None`` if this rank's own will do.

        Only terms with their own denominators need the totals before the first backward pass: their gradients cannot
        be separated once they are added. Whether ``weigh`` counts by term is known after the first step.
        """
        if self._totals is None and self._ranks.by_term is not False:
            with deferred_interrupts():  # every rank knows the same after this exchange
                _, self._totals = self._exchange_totals("totals", weights, samples)
                self._ranks.by_term = "" not in self._totals[0] if self._totals[1] else None
        if not self._ranks.by_term and samples and "" not in weights:
            raise InvalidArgument(
                f"weigh() gives counts for the terms {sorted(weights)} now, and gave one count before: return the same "
                f"in every step"
            )
        return self._totals if self._ranks.by_term else None

    def _exchange_totals(
        self, point: str, weights: Mapping[str, float], samples: int, **numbers: float
    ) -> tuple[list[dict[str, Any]], tuple[Mapping[str, float], int]]:
        """Exchange the numbers, too; return what each rank sent, and the totals."""
        counts = {f"count of {name}": count for name, count in weights.items()}
        gathered = self._agreement.gather(point, {**numbers, "samples": samples, **counts}, terms=sorted(weights))
        counting = [values for values in gathered if values["samples"]]
        terms = [values["terms"] for values in counting] or [[""]]
        self._agreement.refuse_unlike(
            terms,
            f"weigh() names different terms on different ranks ({terms}): name the same terms on each, with 0 if there "
            f"is nothing to count",
        )
        totals = {name: math.fsum(values[f"count of {name}"] for values in counting) for name in terms[0]}
        return gathered, (totals, sum(int(values["samples"]) for values in counting))

    def can_overlap(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether these parameters' gradients fill many buckets, and it is known which of them have one."""
        known = self._ranks.known
        return known is not None and not self._ranks.have_varied and known.are_of(_whole(parameters))

    @torch.no_grad()
    def agree(
        self,
        parameters: Sequence[torch.Tensor],
        sums: MutableMapping[torch.Tensor, torch.Tensor],
        earlier: Mapping[torch.Tensor, torch.Tensor | None],
        loss: torch.Tensor | None,
        *,
        counted: float,
        unit: float | None,
        states: bool,
        holds: bool,
        may_hold: bool,
        did: Mapping[str, int],
    ) -> bool:
        """Exchange what the step's gradients are a mean over, and make sure that all ranks can make the step.

        Args:
            parameters: Parameters, the same on each rank.
            sums: Gradients that were summed in float32, by parameter.
            earlier: Gradients from before the step, by parameter.
            loss: This rank's running loss; ``None`` if none of its samples counts.
            counted: Total of this rank's samples.
            unit: Number by which losses were divided instead of the total; ``None`` if the total was known.
            states: Whether the step states its counts itself.
            holds: Whether this rank's last backward pass is still to come.
            may_hold: Whether it could be.
            did: Samples, sizes, retries and peaks of this rank.

        Returns:
            Whether every rank has a gradient of the same parameters, or all hold back their last backward pass. If
            not, run that pass. Gradients that were missing here are zeros now: make room for their update. Then agree
            again.
        """
        # All allocations come first: if memory runs out here, the other ranks do not wait in the sum yet.
        whole = _whole(parameters)
        slots, total = [GradientSlot(parameter, sums) for parameter in whole], make_loss(parameters)
        if any(slot.is_sparse() for slot in slots):
            raise InvalidArgument(SPARSE)
        for slot in slots:
            slot.lay_out()
        if sums:  # each becomes a gradient in less memory than it takes itself, but for the first one
            largest = max(sums, key=torch.Tensor.numel)
            torch.empty_like(largest, dtype=gradient_dtype(largest))
        total.grad = None if loss is None else loss.detach().to(total, copy=True).reshape(())
        self._ranks.reduction.reserve([*whole, total])
        known = self._ranks.known
        flags = known.flags if holds and known is not None else [slot.has_any() for slot in slots]
        values = {
            "holds": holds,
            "gradients": _digest(flags),
            "trains": _digest(parameter.requires_grad for parameter in parameters if not has_shards(parameter)),
            "earlier": digest_values([*earlier.values()]),
            "states": None if loss is None else states,
            **({} if holds else {"may_hold": may_hold, **self._describe_update()}),
        }
        numbers = {**did, "counted": counted, "unit": unit or 0.0}
        self._interrupts.enter_context(deferred_interrupts())  # the other ranks wait for this one
        self._ranks.own_time.stop()
        gathered = self._agreement.gather("update", {"seconds": self._ranks.own_time.read(), **numbers}, **values)
        if any(one["holds"] != holds or (holds and one["gradients"] != values["gradients"]) for one in gathered):
            self._resume()
            return False  # a rank that holds its pass back describes less
        self._refuse_differences(gathered)
        counting = [values for values in gathered if values["states"] is not None]
        if not counting:
            self._agreement.end()
            return True
        self._refuse_counts_on_some(gathered)
        if any(values["gradients"] != gathered[0]["gradients"] for values in gathered):
            places = [place for place, slot in enumerate(slots) if slot.has_any()]
            found = {place for values in self._agreement.gather("gradients", of=places) for place in values["of"]}
            _fill(slots, [slots[place].parameter for place in found])
            return False
        # A rank without a loss has its part of the others' sharded gradients, so it needs their unit.
        unit = counting[0]["unit"] if loss is None else unit
        self._factor = unit / math.fsum(values["counted"] for values in counting) if unit else 1.0
        self._note_ranks(gathered, did)
        self._slots = [*(slot for slot, has_any in zip(slots, flags, strict=True) if has_any), GradientSlot(total, {})]
        self.overlapped = None
        if holds:
            others = [slot.parameter for slot, has_any in zip(slots, flags, strict=True) if not has_any]
            self.overlapped = OverlappedSum(
                self._ranks.reduction, self._slots, self._factor, others, self._ranks.own_time
            )
            return True
        # A few buckets are summed so fast that a second exchange, and the bookkeeping of a pass, would take longer.
        may_overlap = len(self._ranks.reduction.divide(self._slots)) > IN_FLIGHT and all(
            one["may_hold"] for one in gathered
        )
        self._ranks.known = KnownGradients(whole, flags) if may_overlap else None
        self._end()
        return True

    def _resume(self) -> None:
        """Let this rank run passes again, which an interrupt may end."""
        self._ranks.own_time.resume()
        self._interrupts.close()

    def confirm_sum(self, did: Mapping[str, int], *, is_done: bool) -> bool:
        """Return whether every rank has done its last backward pass, with the gradients that were expected.

        If not, all run the step again.
        """
        assert self.overlapped is not None  # noqa: S101 - narrows for mypy
        values = {"is_done": is_done, "varies": is_done and self.overlapped.is_doubtful}
        values |= self._describe_update() if is_done else {}
        numbers = {"seconds": self._ranks.own_time.read(), **did}
        gathered = self._agreement.gather("last backward pass", numbers, **values)
        self._ranks.have_varied |= any(one["varies"] for one in gathered)
        if any(one["varies"] or not one["is_done"] for one in gathered):
            self._slots, self.overlapped = (), None  # which hold gradients
            self._resume()
            return False
        self._refuse_differences(gathered)
        self._note_ranks(gathered, did)
        self._end()
        return True

    def _note_ranks(self, gathered: Sequence[Mapping[str, Any]], did: Mapping[str, int]) -> None:
        self.ranks = tuple(
            RankStep(rank=rank, seconds=one["seconds"], **{name: int(one[name]) for name in did})
            for rank, one in enumerate(gathered)
        )

    @torch.no_grad()
    def sum(
        self, parameters: Sequence[torch.Tensor], sums: MutableMapping[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor | None:
        """Make every ``.grad`` the sum over all ranks, and let rank 0 send its buffers.

        Backward passes have summed the sharded gradients already. This rank takes part in each collective, even if it
        fails: the others wait for it.

        Args:
            parameters: Parameters, the same on each rank.
            sums: Gradients that were summed in float32, by parameter; empty afterwards.

        Returns:
            The loss of all ranks; ``None`` if no sample of any rank counts, and then nothing has changed.
        """
        if self._factor is None:
            return None
        self._send_buffers()
        if self.overlapped is None:
            self._ranks.reduction.sum(self._slots, self._factor)
        _correct([parameter for parameter in parameters if has_shards(parameter)], sums, self._factor)
        return self._slots[-1].parameter.grad

    def settle(self) -> None:
        """Take the buffers of rank 0, right before the update.

        DistributedDataParallel sends buffers when a step begins, but a step that is run again would undo that.
        """
        if self._buffers is not None:
            self._buffers.write()

    def finish(self) -> None:
        """Note that this rank has made the update: later errors concern this rank alone."""
        self.is_agreed = False

    def _end(self) -> None:
        self._agreement.end()
        self.is_agreed = True

    def _describe_update(self) -> dict[str, Any]:
        """Copy the buffers, and return what must be equal on all ranks right before the update."""
        self._buffers = self._copy_buffers()
        description = "" if self._buffers is None else self._buffers.description
        return {"buffers": description, "rates": read_rates(self._optimizer)}

    def _send_buffers(self) -> None:
        if self._buffers is not None:
            self._buffers.send(self._wrapper.process_group, self._ranks.channel)

    def _copy_buffers(self) -> SharedBuffers | None:
        return SharedBuffers(broadcast_buffers_of(self._wrapper))

    def _refuse_counts_on_some(self, gathered: Sequence[Mapping[str, Any]]) -> None:
        by_rank = enumerate(values["states"] for values in gathered)
        texts = {rank: "a count" if its else "no count" for rank, its in by_rank if its is not None}
        shown = self._agreement.list_unlike(texts)
        message = f"the step returns a count (Mean, Sum) on some ranks only ({shown}): always return it"
        self._agreement.refuse_unlike([*texts.values()], message)

    def _refuse_differences(self, gathered: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what would move the ranks' parameters apart."""
        for name, message in _MUST_BE_EQUAL.items():
            self._agreement.refuse_unlike([values.get(name) for values in gathered], message)
        # A scheduler may have set them by a number of one rank, such as the loss of its own validation samples.
        rates = [values.get("rates", ()) for values in gathered]
        if not all(are_close(one, rates[0]) for one in rates):
            shown = {rank: ", ".join(map(str, one)) for rank, one in enumerate(rates)}
            raise self._agreement.refuse(
                InvalidArgument(
                    f"learning rates differ between the ranks ({self._ranks.channel.list_by_rank(shown)}), so the "
                    f"optimizer would move their parameters apart: give the scheduler the same number on every rank"
                )
            )


class ConfirmedStep(SharedStep):
    """One step, on every rank, that all confirm right before the update.

    Something may fail on one rank after the sum: unscaling, clipping, or hooks that a framework calls there. These may
    also set buffers and rates, so both are compared only then.
    """

    def settle(self) -> None:
        """Let all ranks make the update, or none; take the buffers of rank 0."""
        self._refuse_differences(self._confirm(**super()._describe_update()))
        super()._end()
        self._send_buffers()
        super().settle()

    def _confirm(self, **values: Any) -> list[dict[str, Any]]:
        return self._agreement.gather("after the sum", **values)

    def _describe_update(self) -> dict[str, Any]:
        return {}

    def _end(self) -> None:
        """Let ``settle`` end the call."""


_MUST_BE_EQUAL = {
    "earlier": (
        "gradients from before the step differ between the ranks, so the optimizer would move their parameters apart: "
        "call optimizer.zero_grad() before the step"
    ),
    "trains": "the ranks train different parameters: make and freeze the same ones on each",
    "buffers": (
        "the ranks have different buffers: make them in __init__ and in the same shapes, or pass "
        "broadcast_buffers=False to DistributedDataParallel"
    ),
}


def _whole(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the trained parameters that are not sharded."""
    return [parameter for parameter in parameters if parameter.requires_grad and not has_shards(parameter)]


def _fill(slots: Sequence[GradientSlot], parameters: Sequence[torch.Tensor]) -> None:
    """Make gradients of zeros for these parameters where this rank has none."""
    wanted = set(parameters)
    for slot in slots:
        parameter = slot.parameter
        if parameter in wanted and not slot.has_any():
            parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


def _correct(sharded: Sequence[torch.Tensor], sums: MutableMapping[torch.Tensor, torch.Tensor], factor: float) -> None:
    """Multiply sharded gradients by the factor; sums in float32 before they are rounded."""
    summed = set(sums)
    while sums:
        parameter, total = sums.popitem()
        parameter.grad = (total if factor == 1 else total.mul_(factor)).to(gradient_dtype(parameter))
    for parameter in sharded:
        if factor != 1 and parameter.grad is not None and parameter not in summed:
            parameter.grad.mul_(factor)


def _digest(flags: Iterable[bool]) -> str:
    return hashlib.sha256(bytes(flags)).hexdigest()[:16]
