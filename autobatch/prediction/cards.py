"""Lists cards that people train on, and finds the one that is meant: by name, or by its memory alone.

Covers what each has in total, and what a process takes of it before its first tensor, of whole cards as CUDA (or HIP)
reports them on Linux. Does not cover MIG slices, cards on Windows, where the driver reports all of the memory, laptops'
cards of the same name, nor the card of this machine, which only torch knows.

``total_bytes`` is what ``torch.cuda.get_device_properties(0).total_memory`` returns, and "total capacity" in an out of
memory error: less than on the box, and less than ``nvidia-smi`` shows, which counts what the driver reserves. It varies
by about a percent with the driver, and more with ECC: each row has the smallest total that was found (the A40's and the
RTX 6000 Ada's say which of the two), and where that was reported in GiB, half of the last decimal less.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from typing import Annotated, Any

from autobatch._arguments import read_bytes
from autobatch._bounds import LISTED, Bytes, Count, Text
from autobatch._formatting import format_bytes, show_value
from autobatch.errors import InvalidArgument
from autobatch.records import Record

__all__ = ["COMMONEST", "GPUS", "Gpu", "explain_choice", "find_gpu", "make_gpu"]

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


_FITTED = "fitted to published peaks of training steps on a 40 GB card (make accuracy)"
_CONTEXTS = {  # MiB, where that was found, and whether on such a card
    "sm_80": (
        1711,
        f"{_FITTED}, with what that process took beside torch; CUDA that loads kernels lazily takes less",
        False,
    ),
    "sm_86": (256, "RTX 3090, torch 2.7.1 with CUDA 12.8, kernels loaded lazily", True),
    "sm_89": (426, "RTX 6000 Ada, torch 2.10 with CUDA 13.0, in unsloth-zoo #1053", True),
    "unknown": (
        616,
        "none for this architecture: the most that was reported where kernels are loaded lazily, in LMCache #4019",
        False,
    ),
}
_LARGE_WORKSPACE = 4096 * 8 * 1024
_SMALL_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
# torch's aten/src/ATen/cuda/CublasHandlePool.cpp. Before it named Blackwell beside Hopper, sm_100 and sm_120 had the
# small one; the larger is taken, also for a card of which nothing is known.
_WORKSPACES = {
    **dict.fromkeys(("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89"), _SMALL_WORKSPACE),
    **dict.fromkeys(("sm_90", "sm_100", "sm_120", "unknown"), _LARGE_WORKSPACE),
    "gfx942": 128 * 1024 * 1024,
}

_THREADS = {  # of one multiprocessor at once, by the CUDA programming guide's table of compute capabilities
    **dict.fromkeys(("sm_60", "sm_70", "sm_80", "sm_90", "sm_100", "unknown", "gfx942"), 2048),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 1536),
    "sm_75": 1024,
}
_MULTIPROCESSORS = 132
"""Of a card of which nothing is known: an H100's. More take larger buffers, so this is seldom too low."""


def make_gpu(
    name: str,
    total_bytes: int,
    architecture: str = "unknown",
    *aliases: str,
    multiprocessors: int = _MULTIPROCESSORS,
    source: str,
    measured: bool = True,
) -> Gpu:
    """A card with what is known of its architecture."""
    context_mebibytes, context_source, context_measured = _CONTEXTS.get(architecture, _CONTEXTS["unknown"])
    return Gpu(
        name=name,
        aliases=aliases,
        total_bytes=total_bytes,
        multiprocessors=multiprocessors,
        architecture=architecture,
        context_bytes=context_mebibytes * _MIB,
        cublas_workspace_bytes=_WORKSPACES[architecture],
        source=source,
        measured=measured,
        context_source=context_source,
        context_measured=context_measured,
    )


def _row(
    name: str,
    mebibytes: int,
    multiprocessors: int,
    architecture: str,
    source: str,
    *aliases: str,
    measured: bool = True,
) -> Gpu:
    size = mebibytes * _MIB
    return make_gpu(
        name, size, architecture, *aliases, multiprocessors=multiprocessors, source=source, measured=measured
    )


_PROPERTIES = "torch.cuda.get_device_properties in a public repository"
_LOG = "the first line of a training log of Ultralytics, which prints total_memory, with"

GPUS = (
    _row("P100-16GB", 16269, 56, "sm_60", f"{_LOG} torch 2.11", "P100", "P100-PCIE-16GB"),
    _row("V100-16GB", 16130, 80, "sm_70", f"{_LOG} torch 1.7; others 16160 MiB", "V100-SXM2-16GB", "V100-PCIE-16GB"),
    _row("V100-32GB", 32494, 80, "sm_70", f"{_LOG} torch 2.6; others 32501 MiB", "V100-SXM2-32GB", "V100-PCIE-32GB",
         "V100S-PCIE-32GB"),
    _row("T4", 14912, 40, "sm_75", f"{_LOG} torch 2.2; on Colab 15095 to 15110 MiB"),
    _row("RTX 2080 Ti", 10825, 68, "sm_75", f"{_LOG} torch 2.6; others 11009 to 11020 MiB"),
    _row("A30", 24089, 56, "sm_80", "23.53 GiB in google/RB-Modulation #5; 24164 MiB in a YOLO log with torch 2.8"),
    _row("A100-40GB-PCIe", 40326, 108, "sm_80", f"{_PROPERTIES}, torch 1.9", "A100-40GB", "A100-PCIE-40GB"),
    _row("A100-40GB-SXM", 40441, 108, "sm_80", f"{_LOG} torch 2.11; others 40507 to 40654 MiB", "A100-SXM4-40GB"),
    _row("A100-80GB-PCIe", 81154, 108, "sm_80", f"{_LOG} torch 2.6"),
    _row("A100-80GB-SXM", 81038, 108, "sm_80", f"{_LOG} torch 2.3; others 81153 and 81251 MiB", "A100-80GB",
         "A100-SXM4-80GB"),
    _row("A10", 22512, 72, "sm_86", "21.99 GiB on Lambda in zai-org/CogVLM #236"),
    _row("A10G", 22587, 80, "sm_86", _PROPERTIES),
    _row("A40", 45416, 84, "sm_86", f"{_PROPERTIES}; 48688 MiB in a YOLOv5 log, without ECC"),
    _row("RTX A5000", 24114, 64, "sm_86", f"{_PROPERTIES}; another 24138 MiB"),
    _row("RTX A6000", 48676, 84, "sm_86", _PROPERTIES),
    _row("RTX 3060 12GB", 11904, 28, "sm_86", "11.63 GiB in an error message; logs 11910 to 12045 MiB", "RTX 3060"),
    _row("RTX 3070", 7753, 46, "sm_86", f"{_LOG} torch 2.6; others 7842 and 7973 MiB"),
    _row("RTX 3080 10GB", 10002, 68, "sm_86", f"{_LOG} torch 2.6; others 10009 MiB", "RTX 3080"),
    _row("RTX 3090", 24124, 82, "sm_86", f"{_LOG} torch 2.13; others 24139 to 24268 MiB"),
    _row("RTX 3090 Ti", 24214, 84, "sm_86", f"{_LOG} torch 2.1"),
    _row("L4", 22563, 58, "sm_89", f"{_LOG} torch 2.11; others 22693 MiB"),
    _row("L40", 45414, 142, "sm_89", "44.4 GiB, printed by a program on the card"),
    _row("L40S", 45495, 142, "sm_89", f"{_LOG} torch 2.2; get_device_properties elsewhere 45589 MiB"),
    _row("RTX 6000 Ada", 48539, 142, "sm_89", f"{_LOG} torch 2.4; with ECC 44.43 GiB in DINGYANB/MTVCrafter #21",
         "RTX 6000 Ada Generation"),
    _row("RTX 4060", 7807, 24, "sm_89", f"{_LOG} torch 2.5"),
    _row("RTX 4060 Ti 8GB", 7806, 34, "sm_89", f"{_LOG} torch 2.12"),
    _row("RTX 4060 Ti 16GB", 15938, 34, "sm_89", "15.57 GiB in a report of runs on the card; another 15.60 GiB"),
    _row("RTX 4070", 11832, 46, "sm_89", "11.56 GiB in an error message; logs 11994 and 12002 MiB"),
    _row("RTX 4080", 15945, 76, "sm_89", f"cuDeviceTotalMem in a log of hashcat; {_PROPERTIES} 16049 MiB"),
    _row("RTX 4080 SUPER", 15944, 80, "sm_89", f"{_LOG} torch 2.12"),
    _row("RTX 4090", 24079, 128, "sm_89", "23.52 GiB in pytorch/torchchat #1341; logs 24081 to 24217 MiB"),
    _row("H100-80GB-PCIe", 81008, 114, "sm_90", _PROPERTIES, "H100-80GB", "H100 PCIe"),
    _row("H100-80GB-SXM", 81082, 132, "sm_90", f"{_PROPERTIES}; others 81089 and 81090 MiB", "H100-SXM", "H100-SXM5",
         "H100 80GB HBM3"),
    _row("H100-94GB-NVL", 95226, 132, "sm_90", "93.00 GiB in ali-vilab/VACE #56; a log 95320 MiB", "H100 NVL"),
    _row("H200", 143156, 132, "sm_90", _PROPERTIES, "H200-141GB"),
    _row("GH200-96GB", 96716, 132, "sm_90", "nominal: 94.5 GiB in an owner's description; nvidia-smi shows 97871 MiB",
         "GH200", "GH200 480GB", measured=False),
    _row("B200", 182631, 148, "sm_100", f"{_PROPERTIES}; another 182642 MiB"),
    _row("RTX 5060 Ti 16GB", 15848, 36, "sm_120", f"{_LOG} torch 2.12"),
    _row("RTX 5080", 15840, 84, "sm_120", f"{_LOG} the version left out"),
    _row("RTX 5090", 32102, 170, "sm_120", f"{_LOG} torch 2.12; others 32120 MiB"),
    _row("RTX PRO 6000 Blackwell", 97250, 188, "sm_120", f"{_PROPERTIES}, on the Server Edition", "RTX PRO 6000",
         "RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Workstation Edition"),
    _row("MI300X", 196592, 304, "gfx942",
         f"nominal: {_PROPERTIES}, torch 2.3 for ROCm, which nothing else here was tried on", measured=False),
)  # fmt: skip
"""Every card that is known by name."""

COMMONEST = {
    "V100": "V100-16GB",
    "A100": "A100-80GB",
    "A100-PCIe": "A100-80GB-PCIe",
    "A100-SXM": "A100-80GB-SXM",
    "RTX 4060 Ti": "RTX 4060 Ti 8GB",
    "H100": "H100-80GB",
}
"""Which is meant by a name under which cards of several sizes are sold: what most clouds and shops have of it."""

_BRANDS = re.compile(r"nvidia|geforce|rtx|tesla|amd|instinct|[^a-z0-9]")
_LEAST_BYTES = 2**30
_MOST_NAMES = 8
_MEMORY = re.compile(r"[- ]\d+GB")
_SOCKET = re.compile(r"-(PCIe|SXM|NVL)$")


def _simplify(name: str) -> str:
    return _BRANDS.sub("", name.lower())


_BY_NAME = {_simplify(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}


def find_gpu(gpu: Any) -> Gpu:
    """The card that is meant.

    A name is read in any case, with any separators, with its brand or without: ``"A100-80GB-SXM"``, ``"NVIDIA
    A100-SXM4-80GB"``, ``"rtx4090"``, ``"4090"``. A name with its memory but without its socket
    (``"H100-80GB"``) is the one of those cards that reports less; they differ by a few hundredths of a percent. A name
    under which cards with different memory are sold (``"A100"``) is the commonest of them, and ``explain_choice`` says
    so. Where others were sold under it that are not in the table (``"RTX 3060"`` with 8 GB),
    the table's is meant, and the name that the prediction gives says how much it has.

    Args:
        gpu: A name; or the card's memory, as CUDA reports it, as a text with a unit (``"24GiB"``) or an int of bytes.

    Raises:
        InvalidArgument: It is no known card's name, or several cards'; or no memory that a card could have.
    """
    simple = _simplify(gpu) if isinstance(gpu, str) else ""
    known = _BY_NAME.get(simple) or _find_family(simple)
    if known:
        return known
    # A text needs a unit here: "4090" is a card.
    size = None if isinstance(gpu, str) and not gpu.strip()[-1:].isalpha() else read_bytes(gpu)
    if size is None:
        if isinstance(gpu, str):
            raise InvalidArgument(f"gpu={show_value(gpu)} {_suggest(simple)}")
        raise InvalidArgument(
            f"gpu={show_value(gpu)} is no card: pass a name such as 'A100-80GB', or its memory, such as '24GiB'"
        )
    if size < _LEAST_BYTES:
        raise InvalidArgument(
            f"gpu={show_value(gpu)} is {format_bytes(size)}, less than CUDA may take for itself; pass all of the "
            f"card's memory, in bytes or as a text such as '24GiB'"
        )
    return make_gpu(f"{format_bytes(size)} card", size, source="given by the user", measured=False)


def explain_choice(gpu: Any) -> tuple[str, ...]:
    """One sentence where the name could be cards with different memory: which one is meant, and which ones else."""
    simple = _simplify(gpu) if isinstance(gpu, str) else ""
    cards = [] if simple in _BY_NAME else _FAMILIES.get(simple, [])
    names = [*dict.fromkeys(_without_socket(card) for card in cards)]
    if len(names) < 2 or len({card.total_bytes for card in cards}) < 2:
        return ()
    chosen = _without_socket(_find_family(simple) or cards[0])
    others = ", ".join(name for name in names if name != chosen)
    return (f"gpu={show_value(gpu)} is taken for the commonest of that name: {chosen}; also {others}",)


def _find_family(simple: str) -> Gpu | None:
    """The commonest of the cards that the name without its memory could be; ``None`` where it could be none."""
    return _COMMONEST.get(simple) or min(_FAMILIES.get(simple, []), key=lambda card: card.total_bytes, default=None)


def _without_socket(card: Gpu) -> str:
    return _SOCKET.sub("", card.name)


def _group() -> dict[str, list[Gpu]]:
    """Cards by their names without the memory, with the socket and without."""
    families = defaultdict(list)
    for card in GPUS:
        name = _MEMORY.sub("", card.name)
        for family in {_simplify(name), _simplify(_SOCKET.sub("", name))} if name != card.name else ():
            families[family].append(card)
    return dict(families)


_FAMILIES = _group()
_COMMONEST = {_simplify(family): _BY_NAME[_simplify(name)] for family, name in COMMONEST.items()}


def _suggest(simple: str) -> str:
    alike = [gpu.name for gpu in GPUS if simple and _simplify(gpu.name).startswith(simple)]
    if len(alike) > 1:
        return f"could be {_join(alike[:_MOST_NAMES])}; pass one of them, or its memory, such as '24GiB'"
    close = [_BY_NAME[name].name for name in difflib.get_close_matches(simple, _BY_NAME)]
    question = f"did you mean {_join([*dict.fromkeys(close)])}? For" if close else "for"
    return f"is not known; {question} any other card pass its memory, such as '24GiB'"


def _join(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
