"""Lists the cards that ``predict`` knows (``cards.csv``), and finds the one that a name or a size means.

``total_bytes`` is ``torch.cuda.get_device_properties(0).total_memory`` on Linux: less than on the box, and less than
``nvidia-smi`` shows. Drivers differ by up to three percent, so each row has the smallest total that was found.
docs/cards.md has the sources of all numbers. AMD's cards were never tried.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections import defaultdict
from importlib.resources import files
from typing import Annotated, Any

from autobatch._arguments import read_bytes
from autobatch._bounds import LISTED, Bytes, Count, Text
from autobatch._formatting import format_bytes, show_value
from autobatch.errors import InvalidArgument
from autobatch.records import Record

_MIB = 2**20


class Gpu(Record):
    """A card, or one that has just a size.

    Attributes:
        name: Its name here, which ``find_gpu`` takes.
        aliases: Other names, such as the driver's.
        total_bytes: All memory that CUDA reports.
        multiprocessors: Their number, by the maker's data sheet.
        architecture: ``"sm_90"``, or AMD's name of it; ``"unknown"`` for a card that has just a size.
        context_bytes: Bytes of a process outside the allocator: the CUDA context with the loaded kernels.
        context_measured: Whether that was read on a card of this architecture.
        cublas_workspace_bytes: Bytes that one cuBLAS handle takes inside the allocator, for good.
        source: The source of the total.
        measured: Whether CUDA reported the total on such a card; else it is nominal, as the source explains.
    """

    name: Text
    aliases: Annotated[tuple[Text, ...], LISTED] = ()
    total_bytes: Bytes
    multiprocessors: Count
    architecture: Text
    context_bytes: Bytes
    context_measured: bool
    cublas_workspace_bytes: Bytes
    source: Text
    measured: bool

    @property
    def resident_threads(self) -> int:
        return self.multiprocessors * _THREADS[self.architecture]


_LARGE_WORKSPACE = 4096 * 8 * 1024
_SMALL_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
# torch's aten/src/ATen/cuda/CublasHandlePool.cpp. Older versions give Blackwell the small one; the large one is safe.
_WORKSPACES = {
    **dict.fromkeys(("sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89"), _SMALL_WORKSPACE),
    **dict.fromkeys(("sm_90", "sm_100", "sm_103", "sm_120", "gfx90a", "unknown"), _LARGE_WORKSPACE),
    **dict.fromkeys(("gfx942", "gfx950"), 128 * _MIB),
}
_THREADS = {  # of one multiprocessor at once: the CUDA programming guide's table of compute capabilities
    **dict.fromkeys(("sm_60", "sm_70", "sm_80", "sm_90", "sm_100", "sm_103", "unknown"), 2048),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), 1536),
    "sm_75": 1024,
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), 2048),  # 32 wavefronts of 64
}
_MULTIPROCESSORS = 132  # of an unknown card: an H100's. More take larger buffers, so this is seldom too low.


def _read_card(row: dict[str, str]) -> Gpu:
    return Gpu(
        name=row["name"],
        aliases=tuple(row["aliases"].split(";")) if row["aliases"] else (),
        total_bytes=int(row["mebibytes"]) * _MIB,
        multiprocessors=int(row["multiprocessors"]),
        architecture=row["architecture"],
        context_bytes=int(row["context_mebibytes"]) * _MIB,
        context_measured=row["context_measured"] == "yes",
        cublas_workspace_bytes=_WORKSPACES[row["architecture"]],
        source=row["source"],
        measured=not row["source"].startswith("nominal"),
    )


_ROWS = [*csv.DictReader(files("autobatch.prediction").joinpath("cards.csv").read_text(encoding="utf-8").splitlines())]
GPUS = tuple(map(_read_card, _ROWS))  # every card that is known by name
COMMON = frozenset(row["name"] for row in _ROWS if row["common"] == "yes")
"""Cards that a prediction lists unasked: what clouds rent and many people own."""


def make_gpu(
    name: str,
    total_bytes: int,
    architecture: str = "unknown",
    multiprocessors: int = _MULTIPROCESSORS,
    *,
    source: str,
    measured: bool = True,
) -> Gpu:
    """Make a card that is not in the table; CUDA takes as much of it as of the next larger one of its architecture."""
    alike = sorted((gpu for gpu in GPUS if gpu.architecture == architecture), key=lambda gpu: gpu.multiprocessors)
    # Of an unknown architecture: the most that was read on any card.
    contexts = [gpu for gpu in GPUS if gpu.context_measured]
    largest = alike[-1] if alike else max(contexts, key=lambda gpu: gpu.context_bytes)
    nearest = next((gpu for gpu in alike if gpu.multiprocessors >= multiprocessors), largest)
    return Gpu(
        name=name,
        total_bytes=total_bytes,
        multiprocessors=multiprocessors,
        architecture=architecture,
        context_bytes=nearest.context_bytes,
        context_measured=bool(alike) and nearest.context_measured,
        cublas_workspace_bytes=_WORKSPACES[architecture],
        source=source,
        measured=measured,
    )


COMMONEST = {
    "V100": "V100-16GB",
    "A100": "A100-80GB",
    "A100-PCIe": "A100-80GB-PCIe",
    "A100-SXM": "A100-80GB-SXM",
    "RTX 2060": "RTX 2060 6GB",
    "RTX A2000": "RTX A2000 12GB",
    "RTX 3050": "RTX 3050 8GB",
    "RTX 3060": "RTX 3060 12GB",
    "RTX 3080": "RTX 3080 10GB",
    "RTX 4060 Ti": "RTX 4060 Ti 8GB",
    "H100": "H100-80GB",
    "GH200": "GH200-96GB",
    "RTX 5060 Ti": "RTX 5060 Ti 8GB",
}
"""The card that a name means under which several sizes are sold: the one that most clouds and shops have."""

_BRANDS = re.compile(r"nvidia|geforce|(?<!titan)(?<!titan.)rtx|gtx|tesla|amd|instinct|[^a-z0-9]")
_LEAST_BYTES = 2**30
_MOST_NAMES = 8
_LEAST_SHARE = 0.87  # a driver reports at least this much of the memory on the box
_WITH_MEMORY = re.compile(r"(.+?)[^a-z0-9]+([1-9][0-9]{0,3})[ _-]?g(?:i?b)?$")
_MEMORY = re.compile(r"[- ]\d+GB")
_LIKE_SIZE = re.compile(r"\s*[-+]?[\d.,]*\d\s*([kmgtp]i?[a-z]{0,2})?\s*", re.IGNORECASE)
_SOCKET = re.compile(r"-(PCIe|SXM|NVL)$")


def _simplify(name: str) -> str:
    return _BRANDS.sub("", name.lower())


def _without_socket(card: Gpu) -> str:
    return _SOCKET.sub("", card.name)


def _group_families() -> dict[str, list[Gpu]]:
    families = defaultdict(list)
    for card in GPUS:
        name = _MEMORY.sub("", card.name)
        for family in {_simplify(name), _simplify(_SOCKET.sub("", name))} if name != card.name else ():
            families[family].append(card)
    return dict(families)


_BY_NAME = {_simplify(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}
_FAMILIES = _group_families()
_COMMONEST = {_simplify(family): _BY_NAME[_simplify(name)] for family, name in COMMONEST.items()}


def find_gpu(gpu: Any) -> Gpu:
    """Find a card by its memory (a text with a unit, or bytes), or by its name: in any case, with any separators.

    A name may have its brand and the memory on its box (``"NVIDIA A100-SXM4-80GB"``, ``"rtx4090-24gb"``). One without
    its socket means the card that reports less, and one that several sizes share the commonest (``explain_choice``).
    """
    simple = _simplify(gpu) if isinstance(gpu, str) else ""
    known = _BY_NAME.get(simple) or _find_family(simple) or (_find_by_memory(gpu) if simple else None)
    if known:
        return known
    # A text needs a unit here: "4090" is a card.
    size = None if isinstance(gpu, str) and not gpu.strip()[-1:].isalpha() else read_bytes(gpu)
    if size is None:
        if isinstance(gpu, str):
            raise InvalidArgument(f"gpu={show_value(gpu)} {_suggest(gpu, simple)}")
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
    """One sentence where cards with different memory share the name: the chosen one, and the others."""
    simple = _simplify(gpu) if isinstance(gpu, str) else ""
    cards = [] if simple in _BY_NAME else _FAMILIES.get(simple, [])
    names = [*dict.fromkeys(_without_socket(card) for card in cards)]
    if len(names) < 2 or len({card.total_bytes for card in cards}) < 2:
        return ()
    chosen = _without_socket(_find_family(simple) or cards[0])
    others = ", ".join(name for name in names if name != chosen)
    return (f"gpu={show_value(gpu)} is taken for the commonest of that name: {chosen}; also {others}",)


def _find_family(simple: str) -> Gpu | None:
    return _COMMONEST.get(simple) or min(_FAMILIES.get(simple, []), key=lambda card: card.total_bytes, default=None)


def _find_by_memory(gpu: str) -> Gpu | None:
    """The card of this name, if the memory that follows the name is on its box."""
    parts = _WITH_MEMORY.match(gpu.strip().lower())
    found = _BY_NAME.get(_simplify(parts[1])) if parts else None
    return found if parts and found and _LEAST_SHARE < found.total_bytes / (int(parts[2]) * 2**30) < 1 else None


def _suggest(gpu: str, simple: str) -> str:
    alike = [gpu.name for gpu in GPUS if simple and _simplify(gpu.name).startswith(simple)]
    if len(alike) > 1:
        return f"could be {_join(alike[:_MOST_NAMES])}; pass one of them, or its memory, such as '24GiB'"
    close = [_BY_NAME[name].name for name in difflib.get_close_matches(simple, _BY_NAME)]
    if not close and _LIKE_SIZE.fullmatch(gpu):
        return "is no memory that a card could have: pass bytes as an int, or a text such as '24GiB'"
    question = f"did you mean {_join([*dict.fromkeys(close)])}? For" if close else "for"
    return f"is not known; {question} any other card pass its memory, such as '24GiB'"


def _join(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
