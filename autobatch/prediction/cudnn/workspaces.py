"""Says what convolutions take on one card: what cuDNN answered, else what follows from its answers, else a rule.

Covers sizes that were not asked about, which are judged by the nearest one that was: a question takes 13 ms, a network
has some fifty convolutions, and a search looks at many sizes. Does not cover which sizes have to be exact
(``estimate``). Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autobatch.prediction.cudnn.answers import ask_cudnn
from autobatch.prediction.cudnn.convolution import Convolution
from autobatch.prediction.cudnn.described_cards import DEVICES
from autobatch.prediction.cudnn.library import find_libraries
from autobatch.prediction.cudnn.rule import estimate_workspace

__all__ = ["Workspaces"]


@dataclass(frozen=True)
class Workspaces:
    """The workspaces of one card.

    Attributes:
        architecture: ``"sm_80"``, for instance.
        multiprocessors: How many the card has.
        asks: Whether cuDNN can be asked about this card, and is.
        version: cuDNN's number of its own version; 0 before it was asked, and where it has not answered.
    """

    architecture: str
    multiprocessors: int
    asks: bool = False
    version: int = 0
    _answers: Mapping[Convolution, int] = field(default_factory=dict)
    _asked: frozenset[Convolution] = frozenset()
    _nearby: Mapping[Convolution, Mapping[int, int]] = field(default_factory=dict)

    @classmethod
    def of_card(cls, architecture: str, multiprocessors: int) -> Workspaces:
        """By cuDNN's answers, where it is installed and knows such cards."""
        return cls(architecture, multiprocessors, asks=architecture in DEVICES and find_libraries() is not None)

    def has_asked(self, convolutions: Iterable[Convolution]) -> bool:
        """Whether there is nothing more to ask about these."""
        return not self.asks or self._asked.issuperset(convolutions)

    def ask(self, convolutions: Iterable[Convolution]) -> Workspaces:
        """The same with cuDNN's answers about these; after a failure it is asked no more."""
        wanted = self._asked.union(convolutions)
        found = ask_cudnn(sorted(wanted - self._asked), self.architecture, self.multiprocessors)
        if not found.version:
            return replace(self, asks=False)
        answers = {**self._answers, **found.workspaces}
        nearby: dict[Convolution, dict[int, int]] = defaultdict(dict)
        for convolution, size in answers.items():
            nearby[_without_samples(convolution)][convolution.inputs[0]] = size
        return replace(self, version=found.version, _answers=answers, _asked=wanted, _nearby=nearby)

    def find(self, convolution: Convolution) -> int:
        """Bytes of one convolution's workspace."""
        known = self._answers.get(convolution)
        if known is not None:
            return known
        samples, nearby = convolution.inputs[0], self._nearby.get(_without_samples(convolution), {})
        if not nearby or convolution in self._asked:
            return estimate_workspace(convolution, self.architecture)
        nearest = min(nearby, key=lambda asked: abs(asked - samples))
        return nearby[nearest] * samples // max(nearest, 1)


def _without_samples(convolution: Convolution) -> Convolution:
    return convolution._replace(inputs=(0, *convolution.inputs[1:]))
