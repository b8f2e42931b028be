"""Says what kernels take for themselves on one card: workspaces of cuBLAS and cuDNN, and buffers of sums.

cuDNN is asked about the sizes that count; the nearest of its answers serves other sizes. A question takes 13 ms, a
network has some fifty convolutions, and a search looks at many sizes. Without cuDNN a rule says which kernels work on
copies of their tensors in another layout. It is fitted to the answers of cuDNN 9.20 for 21 networks on five cards: of
the whole process it is off by 0 to 5 % in the median, and at worst 15 % too low.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from autobatch.prediction.cudnn.answers import ask_cudnn, find_libraries
from autobatch.prediction.cudnn.plans import DEVICES, Convolution
from autobatch.prediction.timeline import TracedStep

HANDLE = "cuBLAS workspace"
_HANDLES = 2  # one for the calling thread, one for autograd's


@dataclass(frozen=True)
class Workspaces:
    """The workspaces of cuDNN on one card."""

    architecture: str  # "sm_80", for instance
    multiprocessors: int
    asks: bool = False  # whether cuDNN can be asked about this card
    version: int = 0  # cuDNN's own number; 0 as long as it has not answered
    _answers: Mapping[Convolution, int] = field(default_factory=dict)
    _asked: frozenset[Convolution] = frozenset()
    _nearby: Mapping[Convolution, Mapping[int, int]] = field(default_factory=dict)

    @classmethod
    def of_card(cls, architecture: str, multiprocessors: int) -> Workspaces:
        """Ask cuDNN if it is installed and knows such cards."""
        return cls(architecture, multiprocessors, asks=architecture in DEVICES and find_libraries() is not None)

    def has_asked(self, convolutions: Iterable[Convolution]) -> bool:
        """Whether nothing is left to ask about these."""
        return not self.asks or self._asked.issuperset(convolutions)

    def ask(self, convolutions: Iterable[Convolution]) -> Workspaces:
        """Add cuDNN's answers about these; after a failure it is not asked again."""
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
"""Cards that run also a kernel of size 1 on copies."""

_NO_TF32 = ("sm_60", "sm_70", "sm_75")


def estimate_workspace(convolution: Convolution, architecture: str) -> int:
    """Bytes of the workspace by the rule.

    Tensor cores want the channels last, so each tensor that is read in another layout is copied, and in half precision
    the result too. ``Estimate`` adds half of a step's largest workspace.
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
    # In float32 and channels first torch's own kernels take none.
    is_large = max(convolution.weight[2:]) >= 7
    if convolution.channels_last and is_large and convolution.kind == "weight gradient":
        return round(4.6 * tensor_bytes)
    return 0 if not is_half or convolution.channels_last else tensor_bytes


_WARP = 32
_MOST_THREADS = 512
_FEWEST_ADDENDS, _MOST_ADDENDS = 16, 256  # of one thread (min_values_per_thread, max_values_per_thread)


def find_kernel_blocks(
    step: TracedStep, workspaces: Workspaces, workspace_bytes: int, resident_threads: int
) -> Iterator[tuple[int, int]]:
    """Yield each block that is a kernel's own memory, with its bytes on one card.

    ``workspace_bytes`` are those of one cuBLAS handle. With 0 ``resident_threads`` sums take no buffers.
    """
    # By identity: equal ones are mostly one object, and a comparison takes as long as a judgement.
    runs = {id(run): run for run in step.convolutions.values()}
    found = {key: workspaces.find(run) for key, run in runs.items()}
    for index in step.kernel_blocks:
        kind = step.blocks[index].kind
        if kind == HANDLE:
            yield index, workspace_bytes
        elif kind == "partial sums":
            yield index, buffer_bytes(step.sizes[index - 1], step.sizes[index], resident_threads)
        elif kind == "cuDNN workspace":
            yield index, found[id(step.convolutions[index])]


def unseen_handles(step: TracedStep) -> int:
    """Number of cuBLAS handles that no traced operator took; they count from the beginning."""
    return _HANDLES - sum(block.kind == HANDLE for block in step.blocks)


def buffer_bytes(addends: int, result_bytes: int, resident_threads: int) -> int:
    """Bytes of the buffer in which the parts of a sum wait for each other; 0 if one block of threads adds up all.

    ``setReduceConfig`` and ``global_memory_size`` in torch's ``aten/src/ATen/native/cuda/Reduce.cuh`` (2.13), if the
    densest dimension stays, as in a bias's gradient. Sums over the densest dimension take a few KiB, which are not
    counted.

    Args:
        addends: Numbers that are added up in each result.
        result_bytes: Bytes of all results in float32, the dtype of the sum.
        resident_threads: Threads that the card runs at once.
    """
    results = result_bytes // 4
    if not (addends and results and resident_threads):
        return 0
    vector = next(width for width in (4, 2, 1) if results % width == 0)
    width, height = _block_of_threads(results // vector, addends, _MOST_THREADS // vector)
    if addends < min(16 * height, _MOST_ADDENDS):
        return 0
    per_thread = -(-addends // height)
    blocks, most_blocks = -(-(results // vector) // width), resident_threads // (width * height)
    if per_thread < _MOST_ADDENDS or blocks > most_blocks:
        return 0
    parts = min(-(-most_blocks // blocks), -(-per_thread // _FEWEST_ADDENDS))
    parts = max(parts, -(-per_thread // _MOST_ADDENDS))
    return result_bytes * parts * width * vector if parts > 1 else 0


def _block_of_threads(across: int, along: int, most: int) -> tuple[int, int]:
    across, along = _power_of_two(across, most), _power_of_two(along, most)
    height = min(along, most // min(across, _WARP))
    return min(across, most // height), height


def _power_of_two(size: int, most: int) -> int:
    return min(1 << max(size, 1).bit_length() - 1, most)
