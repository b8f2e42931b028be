"""Synchronizes one step over the ranks: the totals of all, the sum of all gradients, and one moment to update."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from autobatch.distributed.data_parallel import SharedBuffers, broadcast_buffers_of, undisturbed
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.reduction import GradientSlot, LossSlot
from autobatch.distributed.step_agreement import StepAgreement
from autobatch.distributed.value_digest import digest_values
from autobatch.errors import InvalidArgument
from autobatch.events.rank_step import RankStep
from autobatch.undo.interrupts import deferred_interrupts

__all__ = ["OTHERS_TRAINED", "SharedStep", "describe_slots", "find_wanted", "make_slots"]

OTHERS_TRAINED = "the ranks train different parameters: make and freeze the same ones on each"

_MOST_RATES = 16
_RATES_DIFFER_BY = 1e-9


class SharedStep:
    """One step, on every rank.

    Attributes:
        weights: The total of each term over all ranks, from ``open`` on.
        samples: Of all ranks.
    """

    def __init__(self, ranks: Ranks, step: int, action: str, optimizer: Any | None = None) -> None:
        """Nothing is said before ``open``; ``optimizer``: whose step is the update."""
        self.weights: Mapping[str, float] = {}
        self.samples = 0
        self._ranks, self._agreement = ranks, StepAgreement(ranks.channel, ranks.number, step, action)
        self._optimizer, self._is_open, self._block = optimizer, False, ExitStack()
        self._own_samples = 0

    def begin(self) -> None:
        """Keep the wrapper from talking by itself, until ``close``."""
        self._block.enter_context(undisturbed(self._ranks.wrapper))

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error that ended this rank's step, unless they know."""
        self._agreement.fail(error)

    def close(self) -> None:
        """The wrapper may talk again."""
        self._block.close()

    def open(self, weights: Mapping[str, float], samples: int, earlier: Sequence[torch.Tensor | None]) -> None:
        """Say what this rank's samples count for; a second call of the same step says nothing.

        Args:
            weights: The total of each term on this rank; the name ``""`` stands for every term.
            samples: Of this rank; may be 0.
            earlier: Gradients from before the step, a parameter each, which must be the same on each rank.

        Raises:
            InvalidArgument: They are not, or ``weigh`` names other terms elsewhere. Raised on every rank.
        """
        if self._is_open:
            return
        meeting = self._agreement
        said = meeting.meet("open", weights=dict(weights), samples=samples, earlier=self._describe(earlier))
        if len({one["earlier"] for one in said}) > 1:
            raise meeting.refuse(
                InvalidArgument(
                    "there are gradients from before the step, and they differ between the ranks, so that the "
                    "optimizer would move the parameters apart: call optimizer.zero_grad() before runner.step()"
                )
            )
        named = [one["weights"] for one in said if one["samples"]]
        if any(one.keys() != named[0].keys() for one in named):
            raise meeting.refuse(
                InvalidArgument(
                    f"weigh() names other terms on other ranks ({[sorted(one) for one in named]}): name the same terms "
                    f"on each, with 0 where there is nothing to count"
                )
            )
        self.weights = {name: math.fsum(one[name] for one in named) for name in (named[0] if named else {"": 0.0})}
        self.samples, self._is_open = sum(one["samples"] for one in said), True
        self._own_samples = samples
        self._ranks.own_time.start()

    def _describe(self, earlier: Sequence[torch.Tensor | None]) -> str:
        """What differs where the ranks' earlier gradients do."""
        return digest_values(earlier)

    def combine(
        self,
        parameters: Sequence[torch.Tensor],
        sums: MutableMapping[torch.Tensor, torch.Tensor],
        loss: torch.Tensor | None,
        *,
        counted: float,
        unit: float | None,
    ) -> torch.Tensor | None:
        """Make every ``.grad`` the sum over all ranks.

        Args:
            parameters: The same on each rank.
            sums: Gradients that were added up in float32, by parameter; empty afterwards.
            loss: This rank's running loss; ``None`` where none of its samples counts.
            counted: What its losses were divided by ``unit`` for.
            unit: ``None`` where the totals were known.

        Returns:
            The loss of all ranks; ``None`` where no sample of any counts, so that nothing has happened.

        Raises:
            InvalidArgument: A gradient is sparse, or the ranks' steps are not alike.
            RankLost: A rank is gone.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        slots = make_slots(trained, sums)
        # Before the others hear that this rank is ready: here memory may end.
        self._ranks.reduction.reserve(trained)
        results = {
            dtype: torch.empty((), dtype=dtype, device=parameters[0].device) for dtype in (torch.float32, torch.float64)
        }
        with deferred_interrupts():  # from the others' point of view this rank is in the sum now
            trains = "".join("01"[parameter.requires_grad] for parameter in parameters)
            wanted, total, is_wide = self._get_ready(slots, trains, loss, counted, unit)
            if not wanted:
                self._agreement.end()
                return None
            last = LossSlot(loss, results[torch.float64 if is_wide else torch.float32])
            self._ranks.reduction.sum([*wanted, last], 1.0 if unit is None else unit / total)
        sums.clear()
        return last.result

    def _get_ready(
        self, slots: Sequence[GradientSlot], trains: str, loss: torch.Tensor | None, counted: float, unit: float | None
    ) -> tuple[list[GradientSlot], float, bool]:
        """Those of which any rank has a gradient, what all have counted, and whether the loss is summed in float64."""
        self._ranks.own_time.stop()
        said = self._agreement.meet(
            "ready",
            gradients=describe_slots(slots),
            trains=f"{len(trains)} {int(trains or '0', 2):x}",
            counted=None if unit is None else counted,
            runs=loss is not None,
            wide=loss is not None and loss.dtype is torch.float64,
        )
        stated = self._read_counts(said)
        return find_wanted(slots, said), math.fsum(one or 0.0 for one in stated), any(one["wide"] for one in said)

    def _read_counts(self, said: Sequence[dict[str, Any]]) -> list[float | None]:
        """What the ranks that ran anything have counted: each a number, or none does."""
        if len({one["trains"] for one in said}) > 1:
            raise self._agreement.refuse(InvalidArgument(OTHERS_TRAINED))
        stated = [one["counted"] for one in said if one["runs"]]
        if len({one is None for one in stated}) > 1:
            raise self._agreement.refuse(
                InvalidArgument("step() states a count (Mean, Sum) on one rank and none on another: always state it")
            )
        return stated

    def agree_on_update(self) -> None:
        """Wait until no rank has anything left that could fail before the optimizer's step.

        Buffers become those of the first rank now, and not when the step begins as in DistributedDataParallel: a step
        that is run again would undo it.

        Raises:
            InvalidArgument: The ranks' models have different buffers, or their optimizers different rates.
        """
        buffers = SharedBuffers(broadcast_buffers_of(self._ranks.wrapper))
        with deferred_interrupts():
            said = self._meet_to_update(buffers=buffers.description)
            if len({one["buffers"] for one in said}) > 1:
                raise self._agreement.refuse(
                    InvalidArgument(
                        "the ranks have different buffers: make them in __init__ and in the same shapes, or pass "
                        "broadcast_buffers=False to DistributedDataParallel"
                    )
                )
            buffers.take_first(self._ranks.wrapper.process_group, self._ranks.channel)

    def _meet_to_update(self, **said: Any) -> list[dict[str, Any]]:
        """The last meeting before the update, to which each rank says its learning rates.

        A scheduler may have set them by what only this rank knows, such as the loss of its own validation samples.
        """
        heard = self._agreement.meet("update", rates=_read_rates(self._optimizer), **said)
        if not all(_are_close(one["rates"], heard[0]["rates"]) for one in heard):
            named = zip(self._ranks.channel.members, heard, strict=True)
            listed = "; ".join(f"rank {rank}: {', '.join(map(str, one['rates']))}" for rank, one in named)
            raise self._agreement.refuse(
                InvalidArgument(
                    f"the learning rates differ between the ranks ({listed}), so that the optimizer would move the "
                    f"parameters apart: set the same on each, as a scheduler does that is given a number of all ranks"
                )
            )
        return heard

    def end(self, *, micro_batch_size: int, retries: int, peak_bytes: int) -> tuple[RankStep, ...]:
        """After the update, on every rank; or where no sample of any counted. Interrupts then wait for ``close``.

        Returns:
            What each rank says of itself, by rank; nothing where no sample counted.
        """
        if self._agreement.is_over:
            return ()
        self._block.enter_context(deferred_interrupts())  # once all have ended the step, so has this rank
        own = {"micro_batch_size": micro_batch_size, "retries": retries, "peak_bytes": peak_bytes}
        said = self._agreement.meet(
            "done", did={**own, "samples": self._own_samples, "seconds": self._ranks.own_time.read()}
        )
        return tuple(RankStep(rank=rank, **one["did"]) for rank, one in enumerate(said))


def _read_rates(optimizer: Any | None) -> list[float]:
    """The first few of its learning rates, each once; not those in tensors, for which a device would be waited for."""
    rates = [group.get("lr") for group in optimizer.param_groups] if optimizer is not None else []
    return list(dict.fromkeys(float(rate) for rate in rates if isinstance(rate, int | float)))[:_MOST_RATES]


def _are_close(rates: Sequence[float], others: Sequence[float]) -> bool:
    """Whether they are equal but for the last bits, in which two processors may differ."""
    return len(rates) == len(others) and all(map(partial(math.isclose, rel_tol=_RATES_DIFFER_BY), rates, others))


def make_slots(
    parameters: Sequence[torch.Tensor], sums: MutableMapping[torch.Tensor, torch.Tensor]
) -> list[GradientSlot]:
    """The parameters' gradients, to be summed.

    Raises:
        InvalidArgument: One is sparse.
    """
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters):
        raise InvalidArgument("sparse gradients are not summed over ranks: use nn.Embedding(sparse=False)")
    return [GradientSlot(parameter, sums) for parameter in parameters]


def describe_slots(slots: Sequence[GradientSlot]) -> str:
    """Which of them this rank has a gradient of."""
    bits = "".join("1" if slot.has_any() else "0" for slot in slots)
    return f"{int(bits or '0', 2):x}"


def find_wanted(slots: Sequence[GradientSlot], said: Sequence[Mapping[str, Any]]) -> list[GradientSlot]:
    """Those of which any rank has said that it has a gradient."""
    union = 0
    for one in said:
        union |= int(one["gradients"], 16)
    digits = f"{union:b}".zfill(len(slots))
    return [slot for slot, digit in zip(slots, digits, strict=False) if digit == "1"]
