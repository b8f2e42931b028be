"""Says what kernels take for themselves on one card: workspaces of cuBLAS and cuDNN, and buffers of sums.

cuDNN is asked in a process of its own, since it may abort, about the sizes that count: a question takes 13 ms. The
nearest of its answers serves other sizes. Without cuDNN a rule says which kernels work on copies of their tensors. It
is fitted to cuDNN 9.20 for 21 networks on five cards: 0 to 5 % of the process off in the median, at worst 15 % low.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from autobatch.prediction.cudnn import DEVICES, Convolution
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
        # By depth; in float32 and channels first torch's own kernels take none.
        is_large = max(convolution.weight[2:]) >= 7 and convolution.kind == "weight gradient"
        factor = 4.6 * is_large if convolution.channels_last else float(is_half)
        return round(factor * (inputs + outputs))
    if convolution.groups > 1:
        return inputs + outputs + weight
    if convolution.channels_last:
        return 0
    if max(convolution.weight[2:]) > 1 or architecture in _WIDE_POINTS:
        reads_all = is_half or convolution.kind != "forward"
        return inputs + weight + (outputs if reads_all else 0)
    return inputs + outputs + weight if is_half and convolution.kind == "weight gradient" else 0


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
    counted. The card runs ``resident_threads`` at once; the results are in float32.
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


# ------------------------------------------------------------------------------------------------ asking cuDNN

_MOST_SECONDS = 60.0  # for all questions of one call: a question takes 13 ms
_MOST_PROCESSES = 3  # after as many aborts the other questions have no answer


class Answers(NamedTuple):
    """What cuDNN answered."""

    version: int  # 92000 for 9.20.0; 0 without cuDNN
    workspaces: dict[Convolution, int]  # bytes of each convolution that it can plan


def ask_cudnn(convolutions: Iterable[Convolution], architecture: str, multiprocessors: int) -> Answers:
    """Ask this machine's cuDNN for the workspaces of convolutions on a card.

    After an abort it is asked again, without the convolution that it aborted at.
    """
    files, left = find_libraries(), [*dict.fromkeys(convolutions)]
    version, found = 0, dict[Convolution, int]()
    if files is None or architecture not in DEVICES:
        return Answers(version, found)
    for _ in range(_MOST_PROCESSES):
        said = _run([*map(str, files), architecture, str(multiprocessors)], left)
        if not said:
            break
        version, answers = said[0] or 0, said[1:]
        found |= {convolution: size for convolution, size in zip(left, answers, strict=False) if size is not None}
        if len(answers) == len(left):
            break
        left = left[len(answers) + 1 :]
    return Answers(version, found)


def _run(arguments: Sequence[str], convolutions: Sequence[Convolution]) -> list[int | None]:
    """Read the version and the answers of one process; an answer is ``None`` if cuDNN has no plan."""
    questions = "".join(f"{json.dumps(convolution)}\n" for convolution in convolutions).encode()
    command = [sys.executable, "-m", "autobatch.prediction.cudnn", *arguments]
    said: list[int | None] = []
    try:
        output = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
            command, input=questions, capture_output=True, timeout=_MOST_SECONDS, check=False
        ).stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    for line in output.splitlines():
        try:
            said.append(json.loads(line))
        except ValueError:  # half a line, of a process that was killed
            break
    return said


_CUDNN = ("nvidia/cudnn/lib/libcudnn.so.9", "torch/lib/libcudnn.so.9")
_CUBLAS = (
    "nvidia/cu13/lib/libcublasLt.so.13",
    "nvidia/cublas/lib/libcublasLt.so.13",
    "nvidia/cublas/lib/libcublasLt.so.12",
    "torch/lib/libcublasLt.so.13",
    "torch/lib/libcublasLt.so.12",
)


def find_libraries() -> tuple[Path, Path] | None:
    """Find the files of cuDNN 9 and cuBLASLt; ``None`` if one is missing, since cuDNN aborts without cuBLASLt."""
    cudnn, cublas = _find_first(_CUDNN), _find_first(_CUBLAS)
    return None if cudnn is None or cublas is None else (cudnn, cublas)


def _find_first(names: tuple[str, ...]) -> Path | None:
    places = (Path(folder, name) for name in names for folder in sys.path if folder)
    return next((place for place in places if place.exists()), None)
