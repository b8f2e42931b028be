"""Finds the card that is meant: by name, by the driver's name, or by its memory alone.

Covers texts and ints. Does not cover the card of this machine, which only torch knows.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from typing import Any

from autobatch._arguments import read_bytes
from autobatch._formatting import format_bytes, show_value
from autobatch.errors import InvalidArgument
from autobatch.prediction.card_table import COMMONEST, GPUS, Gpu, make_gpu

__all__ = ["explain_choice", "find_gpu"]

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
