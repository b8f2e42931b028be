"""Says what convolutions take on one card: what cuDNN answered, else what follows from its answers, else a rule.

Covers sizes that were not asked about, which are judged by the nearest one that was: a question takes 13 ms, a network
has some fifty convolutions, and a search looks at many sizes. Where cuDNN cannot be asked, the rule says which kernels
work on copies of their tensors in another layout. It is a fit to what cuDNN 9.20 answers for 21 networks of timm and
torchvision on five cards: of the process's whole memory it is off by 0 to 5 % in the median, by 15 % below at worst.
Does not cover which sizes have to be exact (``estimate``). Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autobatch.prediction.cudnn.answers import ask_cudnn, find_libraries
from autobatch.prediction.cudnn.convolution import Convolution
from autobatch.prediction.cudnn.graph_api import DEVICES

__all__ = ["Workspaces", "estimate_workspace"]


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


_WIDE_POINTS = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "unknown")
"""Cards on which a kernel of size 1 is run on copies, too."""

_NO_TF32 = ("sm_60", "sm_70", "sm_75")


def estimate_workspace(convolution: Convolution, architecture: str) -> int:
    """Bytes of the workspace on a card of this architecture, ``"sm_80"`` for instance.

    Tensor cores want the channels last: what is laid out otherwise is copied, once each tensor that is read, and the
    result once more in half precision. Half of the largest of a step's comes on top, see ``estimate``.
    """
    inputs, outputs, weight = convolution.byte_counts()
    is_half = convolution.dtype in ("float16", "bfloat16")
    has_tf32 = convolution.tf32 and convolution.dtype == "float32" and architecture not in _NO_TF32
    if not (is_half or has_tf32) or max(convolution.inputs[2:]) == 1:  # one point of space: a product of matrices
        return 0
    if convolution.groups == convolution.inputs[1] > 1:
        return _estimate_depthwise(convolution, inputs + outputs, is_half=is_half)
    if convolution.groups > 1:
        return inputs + outputs + weight
    if convolution.channels_last:
        return 0
    if max(convolution.weight[2:]) > 1 or architecture in _WIDE_POINTS:
        reads_all = is_half or convolution.kind != "forward"
        return inputs + weight + (outputs if reads_all else 0)
    return inputs + outputs + weight if is_half and convolution.kind == "weight gradient" else 0


def _estimate_depthwise(convolution: Convolution, tensor_bytes: int, *, is_half: bool) -> int:
    """In float32 and channels first torch has kernels of its own, which take none."""
    is_large = max(convolution.weight[2:]) >= 7
    if convolution.channels_last and is_large and convolution.kind == "weight gradient":
        return round(4.6 * tensor_bytes)
    return 0 if not is_half or convolution.channels_last else tensor_bytes
