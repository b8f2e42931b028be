"""Lists cards that people train on (``cards.csv``), with what a process takes of each before its first tensor.

Covers whole cards as CUDA (or HIP) reports them on Linux: NVIDIA's for data centres and GeForce cards since Volta, and
AMD's Instinct cards, which nothing here was tried on. Does not cover MIG slices, cards on Windows, where the driver
reports all of the memory, laptops' cards of the same name, nor the card of this machine, which only torch knows.

``total_bytes`` is what ``torch.cuda.get_device_properties(0).total_memory`` returns, and "total capacity" in an out of
memory error: less than on the box, and less than ``nvidia-smi`` shows, which counts what the driver reserves. It varies
by up to three percent with the driver, and more with ECC: each row has the smallest total that was found (the A40's and
the RTX 6000 Ada's say which of the two), and where that was reported in GiB, half of the last decimal less. Where none
was found the total is nominal: that of a card with as much memory, whichever reports least; the source says which.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated

from pydantic import BeforeValidator, Field

from autobatch._bounds import LISTED, Bytes, Count, Text
from autobatch.prediction.contexts import Chip, choose_context, read_table
from autobatch.records import Record

__all__ = ["COMMON", "GPUS", "Gpu", "known_cards", "make_gpu"]

_MIB = 2**20


class Gpu(Record):
    """A card, or one that has just a size.

    Attributes:
        name: What it is called here, and by ``find_gpu``.
        aliases: Other names, among them the driver's where brand and separators do not make up the difference.
        total_bytes: All memory that CUDA reports.
        multiprocessors: How many it has, by the maker's data sheet; of an unknown card as many as large ones have.
        architecture: ``"sm_90"``, or AMD's name of it; ``"unknown"`` for a card that has just a size.
        context_bytes: What a process takes outside the allocator: the CUDA context with the kernels that were loaded.
        cublas_workspace_bytes: What one cuBLAS handle takes inside the allocator, for good.
        source: Where the total was found.
        measured: Whether CUDA reported it on such a card; else it is nominal, by the rule that the source states.
        context_source: Where the context's size was found.
        context_measured: Whether that was read on a card of this architecture.
    """

    name: Text
    aliases: Annotated[tuple[Text, ...], LISTED] = ()
    total_bytes: Bytes
    multiprocessors: Count
    architecture: Text
    context_bytes: Bytes
    cublas_workspace_bytes: Bytes
    source: Text
    measured: bool
    context_source: Text
    context_measured: bool

    @property
    def resident_threads(self) -> int:
        """Threads that it runs at once, which share the large sums."""
        return self.multiprocessors * _THREADS[self.architecture]


class _Row(Record):
    """One line of the table, in text."""

    name: Text
    mebibytes: Annotated[int, Field(gt=0)]
    multiprocessors: Annotated[int, Field(gt=0)]
    architecture: Text
    common: bool  # whether predictions list it unasked
    aliases: Annotated[tuple[Text, ...], BeforeValidator(lambda text: text.split(";")), LISTED] = ()
    source: Text


_LARGE_WORKSPACE = 4096 * 8 * 1024
_SMALL_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
# torch's aten/src/ATen/cuda/CublasHandlePool.cpp. Before it named Blackwell beside Hopper, sm_100, sm_103 and sm_120
# had the small one; the larger is taken, also for a card of which nothing is known.
_WORKSPACES = {
    **dict.fromkeys(("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89"), _SMALL_WORKSPACE),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "unknown"), _LARGE_WORKSPACE),
    **dict.fromkeys(("gfx942", "gfx950"), 128 * 1024 * 1024),
}

_THREADS = {  # of one multiprocessor at once, by the CUDA programming guide's table of compute capabilities
    **dict.fromkeys(("sm_60", "sm_70", "sm_80", "sm_90", "sm_100", "sm_103", "unknown"), 2048),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 1536),
    "sm_75": 1024,
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), 2048),  # 32 wavefronts of 64
}
_MULTIPROCESSORS = 132
"""Of a card of which nothing is known: an H100's. More take larger buffers, so this is seldom too low."""

_WORDS = {
    "{log}": "the first line of a training log of Ultralytics, which prints total_memory, with",
    "{properties}": "torch.cuda.get_device_properties in a public repository",
    "{rocm}": "ROCm is unproven, as nothing else here was tried on it",
}
"""What sources have in common, as the table abbreviates it."""

_ROWS = read_table("cards.csv", _Row)
_CHIPS = {
    row.name: Chip(row.architecture, row.multiprocessors, row.multiprocessors * _THREADS[row.architecture])
    for row in _ROWS
}


def make_gpu(
    name: str,
    total_bytes: int,
    architecture: str = "unknown",
    *aliases: str,
    multiprocessors: int = _MULTIPROCESSORS,
    source: str,
    measured: bool = True,
    cuda: str | None = None,
) -> Gpu:
    """A card with what is known of its architecture; ``cuda`` is the version that torch was built with, if any."""
    chip = Chip(architecture, multiprocessors, multiprocessors * _THREADS[architecture])
    context = choose_context(chip, cuda, _CHIPS)
    return Gpu(
        name=name,
        aliases=aliases,
        total_bytes=total_bytes,
        multiprocessors=multiprocessors,
        architecture=architecture,
        context_bytes=context.byte_count,
        cublas_workspace_bytes=_WORKSPACES[architecture],
        source=source,
        measured=measured,
        context_source=context.source,
        context_measured=context.measured,
    )


@cache
def known_cards(cuda: str | None) -> tuple[Gpu, ...]:
    """Every card that is known by name, with what a process of torch built with this CUDA takes of it."""
    return tuple(_make_card(row, cuda) for row in _ROWS)


def _make_card(row: _Row, cuda: str | None) -> Gpu:
    return make_gpu(
        row.name,
        row.mebibytes * _MIB,
        row.architecture,
        *row.aliases,
        multiprocessors=row.multiprocessors,
        source=_spell_out(row.source),
        measured=not row.source.startswith("nominal"),
        cuda=cuda,
    )


def _spell_out(source: str) -> str:
    for short, words in _WORDS.items():
        source = source.replace(short, words)
    return source


GPUS = known_cards(None)
"""Every card that is known by name, whatever the version of CUDA."""

COMMON = frozenset(row.name for row in _ROWS if row.common)
"""Those that a prediction lists unasked: what clouds rent and many people own."""
