"""Asks whether the gradient of a sample depends on the other samples: an experiment on the whole batch alone.

Two groups of samples are changed, each by itself and both together. Where samples do not depend on each other, what
the two changes do to the gradient adds up. Only values are changed, never what the batch shows to be counted. A small
change leaves choices of the step as they are (the hardest samples, an expert, which labels count); a large one shows
them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Literal

import torch

from autobatch.batch.layout import map_tensors
from autobatch.errors import DoesNotFit
from autobatch.exactness.gradients import TOLERANCE
from autobatch.exactness.loss_weights import FILLERS, units_of
from autobatch.exactness.measurement import Measurement
from autobatch.memory.oom import is_oom

__all__ = ["find_coupling"]

_SMALL = 1e-4
"""The part of a change that is a small one: in float64 it is far above rounding."""

Coupling = Literal["by values", "by choices", "none", "unknown"]


def find_coupling(measured: Measurement) -> Coupling:
    """How samples depend on each other; unknown where no values can be changed, or the changes do nothing."""
    if "samples" in measured.layout.lists.values():
        return "unknown"  # tensors of a sample in a list have rows of their own
    numbers = range(measured.layout.count)
    # As in the sequence of Thue and Morse: it separates neighbours, and rows that are half a batch apart.
    divisions: list[Callable[[int], bool]] = [
        lambda row: row.bit_count() % 2 == 0,
        lambda row: row % 3 == 0,
        lambda row: 2 * row < len(numbers),
    ]
    found = set[bool | None]()
    for size in (_SMALL, 1.0):
        for is_first in divisions:
            interacts = _do_interact(measured, torch.tensor([*map(is_first, numbers)]), size)
            if interacts:
                return "by values" if size < 1 else "by choices"
            found.add(interacts)
            if size < 1:
                break
    return "none" if False in found else "unknown"


def _do_interact(measured: Measurement, first: torch.Tensor, size: float) -> bool | None:
    """Whether changes of the first group and of the others do not add up; ``None`` where one of them does nothing."""
    whole = measured.whole_values()
    changes: list[torch.Tensor] = []
    for rows in (first, ~first, torch.ones_like(first)):
        values = _measure_changed(measured, rows, size)
        if values is None or values.shape != whole.shape or not bool(values.isfinite().all()):
            return None
        changes.append(values - whole)
    one, other, both = changes
    least = min(float(one.norm()), float(other.norm()))
    if least <= TOLERANCE * size * float(whole.norm()):
        return None
    return float((both - one - other).norm()) > (1e-2 * size if size < 1 else TOLERANCE) * least


def _measure_changed(measured: Measurement, rows: torch.Tensor, size: float) -> torch.Tensor | None:
    """Values of the whole gradient with these rows changed; ``None`` where that changes a count, or is refused."""
    handled, layout = sys.exc_info()[1], measured.layout
    batch = map_tensors(layout.batch, lambda tensor: _change(tensor, rows, size))
    if any(unit.count(batch) != unit.count(layout.batch) for unit in units_of(layout)):
        return None
    try:
        return measured.whole_values_of(batch)
    except Exception as error:
        if isinstance(error, DoesNotFit) or is_oom(error, handled=handled):
            raise
        return None  # the step refuses such values


def _change(tensor: torch.Tensor, rows: torch.Tensor, size: float) -> torch.Tensor:
    """These rows moved towards their values in reverse order; what may be a mask, a label or a weight is left alone."""
    values = tensor.detach()
    if values.ndim == 0 or len(values) != len(rows) or values.is_complex() or values.dtype == torch.bool:
        return tensor
    if bool(((values == 0) | (values == 1)).all()) or (values.ndim == 1 and not bool((values < 0).any())):
        return tensor
    flat = values.reshape(len(values), -1)
    if values.is_floating_point():
        if size < 1 and values.dtype != torch.float64:
            return tensor
        changed = flat + size * (0.75 * flat.flip(1) - flat)
    elif values.ndim == 1 or size < 1:
        return tensor
    else:
        changed = torch.stack([_reverse(row) for row in flat])
    mixed = torch.where(rows.to(values.device)[:, None], changed, flat).view(values.shape)
    return mixed.requires_grad_(tensor.requires_grad)


def _reverse(row: torch.Tensor) -> torch.Tensor:
    """A row of tokens in reverse: fillers, and the first value, which may be no label, stay where they are."""
    is_own = torch.stack([row != filler for filler in FILLERS]).all(0)
    is_own[:1] = False
    changed = row.clone()
    changed[is_own] = row[is_own].flip(0)
    return changed
