"""Finds the modules of a model that repeat: a transformer's layers, a network's blocks.

Covers which of them are worth a unit of their own, to shard or to checkpoint. Does not cover what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

__all__ = ["find_units"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(model: nn.Module) -> list[nn.Module]:
    """The modules that one would call ``fully_shard`` with, one by one, before the model itself.

    Those are the children of a container (``ModuleList``, ``ModuleDict``, ``Sequential``) that are of one class and
    have modules of their own: single layers are no units. Nothing inside a unit is another one.
    """
    return [*_find(model)]


def _find(module: nn.Module) -> Iterator[nn.Module]:
    children = [*module.children()]
    blocks = [child for child in children if [*child.children()]] if isinstance(module, _CONTAINERS) else []
    kinds = [type(block) for block in blocks]
    units = [block for block in blocks if kinds.count(type(block)) > 1 and next(block.parameters(), None) is not None]
    yield from units
    chosen = set(map(id, units))
    for child in children:
        if id(child) not in chosen:
            yield from _find(child)
