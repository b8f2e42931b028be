"""Synchronizes one step over the ranks: totals of all, the sum of all gradients, and one moment to update.

1. ``open``: exchange the totals of the samples, before the first micro-batch.
2. ``sum``: exchange which gradients there are, then sum them. Nothing raises in between: the other ranks wait.
3. ``agree``: wait until nothing before the optimizer's step can fail on any rank.
4. ``end``: exchange what each rank did, after the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from autobatch.distributed.agreement import END, Agreement
from autobatch.distributed.data_parallel import SharedBuffers, broadcast_buffers_of, undisturbed
from autobatch.distributed.ranks import Ranks, digest_values
from autobatch.distributed.reduction import GradientSlot, make_loss
from autobatch.errors import InvalidArgument
from autobatch.events.runner_events import RankStep
from autobatch.torch_internals.storages import has_shards
from autobatch.undo.gradients import gradient_dtype
from autobatch.undo.interrupts import deferred_interrupts

_MOST_RATES = 16
_RATES_DIFFER_BY = 1e-9


class SharedStep:
    """One step, on every rank.

    Attributes:
        weights: Total of each term over all ranks, from ``open`` on.
        samples: Number of samples of all ranks.
    """

    def __init__(self, ranks: Ranks, step: int, action: str, optimizer: Any | None = None) -> None:
        """Send nothing before ``open``; ``action`` is ``"step"`` or ``"accumulate"``."""
        self.weights: Mapping[str, float] = {}
        self.samples = self._own_samples = 0
        self._ranks, self._agreement = ranks, Agreement(ranks.channel, f"{action} {step}", ranks.number)
        self._wrapper: Any = ranks.model
        self._optimizer, self._block = optimizer, ExitStack()

    def begin(self) -> None:
        """Keep the wrapper from communicating until ``close``."""
        self._block.enter_context(undisturbed(self._wrapper))

    def fail(self, error: BaseException) -> None:
        """Send an error that ended this rank's step to the others, unless they know it."""
        self._agreement.fail(error)

    def close(self) -> None:
        """Let the wrapper communicate again."""
        self._block.close()

    def open(self, weights: Mapping[str, float], samples: int, earlier: Sequence[torch.Tensor | None]) -> None:
        """Exchange the totals of the ranks' samples; a second call in the step does nothing.

        ``weights`` has this rank's total of each term, ``""`` means every term; ``earlier`` are gradients from before
        the step, one for each parameter.
        """
        if self.weights:
            return
        digest = digest_values(earlier)
        gathered = self._agreement.gather("open", weights=dict(weights), samples=samples, earlier=digest)
        self._agreement.refuse_unlike(
            [values["earlier"] for values in gathered],
            "gradients from before the step differ between the ranks, so the optimizer would move their parameters "
            "apart: call optimizer.zero_grad() before the step",
        )
        named = [values["weights"] for values in gathered if values["samples"]] or [{"": 0.0}]
        terms = [sorted(one) for one in named]
        self._agreement.refuse_unlike(
            terms,
            f"weigh() names different terms on different ranks ({terms}): name the same terms on each, with 0 if there "
            f"is nothing to count",
        )
        self.weights = {name: math.fsum(one[name] for one in named) for name in named[0]}
        self.samples, self._own_samples = sum(values["samples"] for values in gathered), samples
        self._ranks.own_time.start()

    @torch.no_grad()
    def sum(
        self,
        parameters: Sequence[torch.Tensor],
        sums: MutableMapping[torch.Tensor, torch.Tensor],
        loss: torch.Tensor | None,
        *,
        counted: float,
        unit: float | None,
    ) -> torch.Tensor | None:
        """Make every ``.grad`` the sum over all ranks. Backward passes have summed the sharded gradients already.

        Args:
            parameters: Parameters, the same on each rank.
            sums: Gradients that were summed in float32, by parameter; empty afterwards.
            loss: This rank's running loss; ``None`` if none of its samples counts.
            counted: Total of this rank's samples, if the step states counts.
            unit: Number by which losses were divided instead of the total; ``None`` if the total was known.

        Returns:
            The loss of all ranks; ``None`` if no sample of any rank counts, and then nothing has changed.
        """
        # All allocations come first: if memory runs out here, the other ranks do not wait in the sum yet.
        whole = [parameter for parameter in parameters if parameter.requires_grad and not has_shards(parameter)]
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in whole):
            raise InvalidArgument("sparse gradients are not summed over ranks: use nn.Embedding(sparse=False)")
        slots, total = [GradientSlot(parameter, sums) for parameter in whole], make_loss(parameters)
        total.grad = None if loss is None else loss.detach().to(total, copy=True).reshape(())
        self._ranks.reduction.reserve([*whole, total])
        with deferred_interrupts():  # from the exchange on, the other ranks wait for this one in the sum
            self._ranks.own_time.stop()
            gathered = self._agreement.gather(
                "ready",
                gradients=_pack(slot.has_any() for slot in slots),
                trains=_pack(parameter.requires_grad for parameter in parameters if not has_shards(parameter)),
                counted=None if unit is None else counted,
                unit=unit,
                runs=loss is not None,
            )
            trains = [values["trains"] for values in gathered]
            self._agreement.refuse_unlike(
                trains, "the ranks train different parameters: make and freeze the same ones on each"
            )
            running = [values for values in gathered if values["runs"]]
            if not running:
                self._agreement.end()
                return None
            self._agreement.refuse_unlike(
                [values["unit"] is None for values in running],
                "the step returns a count (Mean, Sum) on one rank and none on another: always return it",
            )
            if loss is None:  # this rank has its part of the others' sharded gradients, so it needs their unit
                unit = running[0]["unit"]
            factor = 1.0 if unit is None else unit / math.fsum(values["counted"] for values in running)
            self._ranks.reduction.sum([*_find_wanted(slots, gathered), GradientSlot(total, {})], factor)
        _correct([parameter for parameter in parameters if has_shards(parameter)], sums, factor)
        return total.grad

    def agree(self) -> None:
        """Wait until nothing before the optimizer's step can fail on any rank, and take the buffers of rank 0.

        DistributedDataParallel sends buffers when a step begins, but a step that is run again would undo that.
        """
        buffers = SharedBuffers(broadcast_buffers_of(self._wrapper))
        with deferred_interrupts():  # from the exchange on, the other ranks wait for this one in the broadcast
            gathered = self._gather_rates(buffers=buffers.description)
            self._agreement.refuse_unlike(
                [values["buffers"] for values in gathered],
                "the ranks have different buffers: make them in __init__ and in the same shapes, or pass "
                "broadcast_buffers=False to DistributedDataParallel",
            )
            buffers.take_first(self._wrapper.process_group, self._ranks.channel)

    def _gather_rates(self, **values: Any) -> list[dict[str, Any]]:
        """Exchange the learning rates, at the last point before the update.

        A scheduler may have set them by a number of one rank, such as the loss of its own validation samples.
        """
        gathered = self._agreement.gather("update", rates=_read_rates(self._optimizer), **values)
        if not all(_are_close(values["rates"], gathered[0]["rates"]) for values in gathered):
            shown = {rank: ", ".join(map(str, values["rates"])) for rank, values in enumerate(gathered)}
            raise self._agreement.refuse(
                InvalidArgument(
                    f"learning rates differ between the ranks ({self._ranks.channel.list_by_rank(shown)}), so the "
                    f"optimizer would move their parameters apart: give the scheduler the same number on every rank"
                )
            )
        return gathered

    def end(self, *, micro_batch_size: int, retries: int, peak_bytes: int, held_bytes: int) -> tuple[RankStep, ...]:
        """End the step on all ranks, after the update; return each rank's report, nothing if no sample counted."""
        if self._agreement.is_over:
            return ()
        self._block.enter_context(deferred_interrupts())  # until close(): the step has ended on all ranks
        own = {"micro_batch_size": micro_batch_size, "retries": retries}
        own |= {"peak_bytes": peak_bytes, "held_bytes": held_bytes}
        seconds = self._ranks.own_time.read()
        gathered = self._agreement.gather(END, did={**own, "samples": self._own_samples, "seconds": seconds})
        return tuple(RankStep(rank=rank, **values["did"]) for rank, values in enumerate(gathered))


def _read_rates(optimizer: Any | None) -> list[float]:
    """Return a few different learning rates; without tensors, as reading them would wait for a device."""
    rates = [group.get("lr") for group in optimizer.param_groups] if optimizer is not None else []
    return list(dict.fromkeys(float(rate) for rate in rates if isinstance(rate, int | float)))[:_MOST_RATES]


def _are_close(rates: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether rates are equal up to the last bits, which may differ between processors."""
    pairs = zip(rates, others, strict=False)
    return len(rates) == len(others) and all(math.isclose(a, b, rel_tol=_RATES_DIFFER_BY) for a, b in pairs)


def _find_wanted(slots: Sequence[GradientSlot], gathered: Sequence[Mapping[str, Any]]) -> list[GradientSlot]:
    """Return the slots for which any rank has a gradient."""
    union = 0
    for values in gathered:
        union |= int(values["gradients"], 16)
    digits = f"{union:b}"[1:]
    return [slot for slot, digit in zip(slots, digits, strict=True) if digit == "1"]


def _correct(sharded: Sequence[torch.Tensor], sums: MutableMapping[torch.Tensor, torch.Tensor], factor: float) -> None:
    """Multiply sharded gradients by the factor; sums in float32 before they are rounded."""
    summed = set(sums)
    while sums:
        parameter, total = sums.popitem()
        parameter.grad = (total if factor == 1 else total.mul_(factor)).to(gradient_dtype(parameter))
    for parameter in sharded:
        if factor != 1 and parameter.grad is not None and parameter not in summed:
            parameter.grad.mul_(factor)


def _pack(flags: Iterable[bool]) -> str:
    """Write flags as one hexadecimal number, with a leading 1 that keeps their number."""
    return f"{int('1' + ''.join('01'[flag] for flag in flags), 2):x}"
