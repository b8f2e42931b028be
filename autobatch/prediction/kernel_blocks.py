"""Says what kernels take for themselves on one card: workspaces of cuBLAS and cuDNN, and buffers of sums.

Of sums it covers ``setReduceConfig`` and ``global_memory_size`` of torch's ``aten/src/ATen/native/cuda/Reduce.cuh``
(2.13) where the dimension that lies densest in memory stays, as in a bias's gradient: several blocks of threads then
share one result, and each writes its part of every result, up to 108 x 16 x 64 KiB on an A100. Does not cover sums over
the densest dimension, whose parts are a few KiB, the semaphores of a few KiB beside them, sums in float64, nor ROCm's
other limits. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.prediction.cudnn.workspaces import Workspaces
from autobatch.prediction.timeline import TracedStep

__all__ = ["HANDLE", "buffer_bytes", "find_kernel_blocks", "unseen_handles"]

HANDLE = "cuBLAS workspace"
_HANDLES = 2
"""cuBLAS has a workspace a handle, and a handle a thread: the caller's, and autograd's for the backward pass."""

_WARP = 32
_MOST_THREADS = 512
_FEWEST_ADDENDS, _MOST_ADDENDS = 16, 256
"""Of one thread (``min_values_per_thread``, ``max_values_per_thread``)."""


def find_kernel_blocks(
    step: TracedStep, workspaces: Workspaces, workspace_bytes: int, resident_threads: int
) -> Iterator[tuple[int, int]]:
    """Which blocks of a step are a kernel's own memory, and bytes of each on one card.

    Args:
        step: What was traced.
        workspaces: What cuDNN takes there.
        workspace_bytes: Of one cuBLAS handle.
        resident_threads: Threads that the card runs at once; 0: sums take no buffers.
    """
    # By the object: equal ones are mostly one, and to compare them takes as long as to judge them.
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
    """Handles of cuBLAS that the traced operators did not take, and others may: they are there from the beginning."""
    return _HANDLES - sum(block.kind == HANDLE for block in step.blocks)


def buffer_bytes(addends: int, result_bytes: int, resident_threads: int) -> int:
    """Bytes of the buffer in which the parts of a sum wait for each other; 0 where one block adds up all.

    Args:
        addends: How many numbers are added up in each result.
        result_bytes: Bytes of all results in float32, in which they are added up.
        resident_threads: Threads that the card runs at once: multiprocessors times threads of each.
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
    """Width and height of a block (``ReduceConfig::set_block_dimension``)."""
    across, along = _power_of_two(across, most), _power_of_two(along, most)
    height = min(along, most // min(across, _WARP))
    return min(across, most // height), height


def _power_of_two(size: int, most: int) -> int:
    """The largest one up to both."""
    return min(1 << max(size, 1).bit_length() - 1, most)
