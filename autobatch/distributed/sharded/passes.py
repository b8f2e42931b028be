"""Runs the passes of a sharded model in a release of torch in which no pass can be run again.

A rank that fails inside a pass cannot take part in the rest of it, and the others wait for it there. It tells why in
the store and ends the training. The others raise the same reason: at once if its process ends, or after the process
group's timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

from torch import nn

from autobatch._user_errors import contextmanager
from autobatch.distributed.agreement import Agreement, name_error
from autobatch.distributed.channel import Channel
from autobatch.distributed.sharded.internals import TRIED_IN, find_release
from autobatch.distributed.sharded.model import divisor_of
from autobatch.errors import DoesNotFit, RankLost
from autobatch.memory.oom import is_oom
from autobatch.records import IN_EACH, Summing

_LOG = logging.getLogger("autobatch")

PassName = Literal["forward", "backward"]


class Passes:
    """One model's passes on every rank, for one runner or for the trials of one ``fit``.

    Attributes:
        running: The pass that has begun and that the ranks have not ended yet.
        causes: Causes of any rank to run the last dropped pass again: ``DIFFERS``, ``ONE_SAMPLE``, ``"short"``.
        divisor: Number by which torch divides the sum of the ranks' gradients.
        most: How rarely gradients may be summed.
        summing: How often they are in this step.
    """

    most: Summing = IN_EACH
    summing: Summing = IN_EACH

    def __init__(self, model: nn.Module, channel: Channel) -> None:
        """Take part in nothing outside a step."""
        self.running: PassName | None = None
        self.causes: frozenset[str] = frozenset()
        self.divisor = divisor_of(model)
        self._model, self._channel = model, channel
        self._agreement: Agreement | None = None

    def begin(self, agreement: Agreement) -> None:
        """Begin a step, in which all ranks run the same number of micro-batches."""
        self._agreement, self.running = agreement, None

    def expect(self, micro_batches: int, summing: Summing) -> None:
        """Expect so many micro-batches until the step ends, in each of which gradients are summed."""

    def begin_micro_batch(self) -> None:
        """Begin one of them."""

    def leave(self) -> None:
        """End the step."""
        self._agreement, self.running = None, None

    def start(self, name: PassName) -> None:
        """End the pass before and begin another one; a second call in a pass does nothing."""
        self.running = name

    def finish(self) -> None:
        """End the running pass, if any; raise PassDropped if another rank drops it."""
        self.running = None

    def exchange(self, point: str, value: Any) -> list[Any]:
        """Return the value of each rank at a point of a pass."""
        assert self._agreement is not None  # noqa: S101 - narrows for mypy
        return [values["value"] for values in self._agreement.gather(point, value=value)]

    def drop(self, *, short: str | None = None, again: str | None = None) -> None:
        """Drop the running pass, which all ranks will run again for the ``causes``.

        Args:
            short: Out-of-memory error of this rank, which still takes part in the rest of the pass.
            again: ``DIFFERS`` or ``ONE_SAMPLE``, if that is this rank's cause. Neither: another rank has a cause.
        """
        raise self._channel.give_up(_explain(short or again or "another rank"))

    def abandon(self, error: BaseException) -> RankLost | None:
        """Send the error that ends this rank's step to the others, unless they know it; raise nothing.

        Return the error of another rank, if this one is what came of it.
        """
        if self._agreement is None or self._agreement.is_over or isinstance(error, RankLost):
            return None
        if self.running is None:
            self._agreement.fail(error)
            return None
        if (lost := self._channel.find_loss(name_error(error))) is not None:
            return lost
        self._channel.give_up(_explain(name_error(error)))
        return None

    @contextmanager
    def block(self, call: str) -> Iterator[None]:
        """Block whose passes all ranks run together, and that ends on all if one runs out of memory."""
        try:
            self.begin(Agreement(self._channel, call))
            self.start("forward")
            yield
        except BaseException as error:
            if (lost := self.abandon(error)) is not None:
                raise lost from error
            if isinstance(error, DoesNotFit) or is_oom(error):  # no outcome of a trial: other ranks wait in the pass
                self.drop(short=name_error(error))
            raise
        finally:
            self.leave()


@cache
def warn_of_release() -> None:
    """Log, once, that no pass is run again in this release of torch."""
    _LOG.warning(
        "torch %s was not tried with fully_shard (tried: %s): a rank that runs out of memory inside a pass ends the "
        "training on all ranks, and no step is run again",
        find_release(),
        ", ".join(TRIED_IN),
    )


def _explain(reason: str) -> str:
    return f"failed inside a pass, which cannot be run again in torch {find_release()} ({reason})"
