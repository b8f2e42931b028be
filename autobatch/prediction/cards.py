"""Finds the card that is meant: by its name, or by its memory alone.

Covers names as people and drivers write them, and which of several cards of one name is meant. Does not cover what is
known of a card (``card_table``), nor the card of this machine, which only torch knows.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from typing import Any

from autobatch._arguments import read_bytes
from autobatch._formatting import format_bytes, show_value
from autobatch.errors import InvalidArgument
from autobatch.prediction.card_table import GPUS, Gpu, known_cards, make_gpu

__all__ = ["COMMONEST", "GPUS", "Gpu", "explain_choice", "find_gpu", "known_cards", "make_gpu"]

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
"""Which is meant by a name under which cards of several sizes are sold: what most clouds and shops have of it."""

_BRANDS = re.compile(r"nvidia|geforce|(?<!titan)(?<!titan.)rtx|gtx|tesla|amd|instinct|[^a-z0-9]")
_LEAST_BYTES = 2**30
_MOST_NAMES = 8
_LEAST_SHARE = 0.87
"""Of the memory on the box, that a driver reports."""
_WITH_MEMORY = re.compile(r"(.+?)[^a-z0-9]+([1-9][0-9]{0,3})[ _-]?g(?:i?b)?$")
_MEMORY = re.compile(r"[- ]\d+GB")
_LIKE_SIZE = re.compile(r"\s*[-+]?[\d.,]*\d\s*([kmgtp]i?[a-z]{0,2})?\s*", re.IGNORECASE)
_SOCKET = re.compile(r"-(PCIe|SXM|NVL)$")


def _simplify(name: str) -> str:
    return _BRANDS.sub("", name.lower())


_BY_NAME = {_simplify(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}


def find_gpu(gpu: Any, cuda: str | None = None) -> Gpu:
    """The card that is meant.

    A name is read in any case, with any separators, with its brand or without: ``"A100-80GB-SXM"``, ``"NVIDIA
    A100-SXM4-80GB"``, ``"rtx4090"``, ``"4090"``, and with the memory on its box: ``"rtx4090-24gb"``. A name with its
    memory but without its socket (``"H100-80GB"``) is the one of those cards that reports less; they differ by a few
    hundredths of a percent. A name under which cards with different memory are sold (``"A100"``) is the commonest of
    them, and ``explain_choice`` says so.

    Args:
        gpu: A name; or the card's memory, as CUDA reports it, as a text with a unit (``"24GiB"``) or an int of bytes.
        cuda: The version of CUDA that torch was built with, where what it takes for itself depends on that.

    Raises:
        InvalidArgument: It is no known card's name, or several cards'; or no memory that a card could have.
    """
    simple = _simplify(gpu) if isinstance(gpu, str) else ""
    known = _BY_NAME.get(simple) or _find_family(simple) or (_find_by_memory(gpu) if simple else None)
    if known:
        return known_cards(cuda)[GPUS.index(known)]
    return _make_sized(gpu, simple, cuda)


def _make_sized(gpu: Any, simple: str, cuda: str | None) -> Gpu:
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
    return make_gpu(f"{format_bytes(size)} card", size, source="given by the user", measured=False, cuda=cuda)


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


def _find_by_memory(gpu: str) -> Gpu | None:
    """The card of this name, where the memory that is said after it is on its box; ``None`` where it is not."""
    said = _WITH_MEMORY.match(gpu.strip().lower())
    found = _BY_NAME.get(_simplify(said[1])) if said else None
    return found if said and found and _LEAST_SHARE < found.total_bytes / (int(said[2]) * 2**30) < 1 else None


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
