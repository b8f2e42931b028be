"""Reads a loader as steps of a given number of samples, whatever sizes its batches have.

A pass is one iteration over the loader. Nothing is carried from one pass into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from autobatch._formatting import name_type, plural, show_value
from autobatch.batch.samples import Layout, dims_of, is_empty, is_one_batch
from autobatch.batch.tree import as_leaf, map_tensors
from autobatch.distributed.agreement import Agreement
from autobatch.distributed.ranks import Ranks
from autobatch.distributed.share_sampler import ShareSampler
from autobatch.errors import InvalidArgument
from autobatch.undo.random_state import RandomState

_COUNT = attrgetter("count")


class Progress:
    """The place of ``run`` in the loader, from which a resumed run continues.

    Attributes:
        passes: Number of finished passes.
        samples: Number of this rank's samples that committed steps of the present pass have used.
        calls: Number of calls of ``run`` that have begun.
    """

    def __init__(self) -> None:
        self.passes, self.samples, self.calls = 0, 0, 0
        self._is_resumed = False

    def resume(self, passes: int, samples: int) -> None:
        """Let the next call of ``run`` continue here."""
        self.passes, self.samples, self._is_resumed = passes, samples, True

    def begin(self, epochs: int | None) -> Iterator[int | None]:
        """Yield the epoch of each pass of one call of ``run``: ``None`` where the user sets it."""
        if not self._is_resumed:
            self.passes, self.samples = self.passes if epochs is None else 0, 0
        self._is_resumed, self.calls = False, self.calls + 1
        call = self.calls
        for epoch in [None] if epochs is None else range(self.passes, epochs):
            yield epoch
            self.check_call(call)
            self.passes, self.samples = self.passes + 1, 0

    def check_call(self, call: int) -> None:
        """Refuse to continue a call of ``run`` after another one has begun: both would count in one place."""
        if call != self.calls:
            raise InvalidArgument("another call of run() has begun since: finish one pass before the next one begins")


class Pass:
    """Reads one pass over a loader, no further ahead than the next step needs.

    Attributes:
        has_begun: Whether the loader has been started.
    """

    def __init__(
        self, loader: Iterable[Any], progress: Progress, share: int, read: Callable[[Any], Layout], device: torch.device
    ) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        self._to_skip = progress.samples
        if isinstance(sampler, ShareSampler) and sampler.first_batch:  # it was resumed, and begins there itself
            self._to_skip, progress.samples = 0, sampler.first_batch * share
        self._loader, self._share, self._read, self._device = loader, share, read, device
        self._begins_at = progress.samples
        self.has_begun, self._batches, self._samples = False, 0, 0
        self._layouts: Iterator[Layout] = iter(())
        self._rest: Layout | None = None

    def take(self) -> list[Layout]:
        """Read the samples of the next step; fewer where the loader ends."""
        if not self.has_begun:
            self._begin()
        taken, missing = list[Layout](), self._share
        while missing and (layout := self._next(missing)) is not None:
            taken.append(layout)
            missing -= layout.count
        self._samples += count_samples(taken)
        return taken

    def describe(self) -> str:
        """Say what the loader gave, of which no step was made."""
        if self._samples:
            gave = plural(self._samples, "sample")
            return f"{gave}, fewer than a step's {self._share}, and drop_last=True leaves them out"
        if self._batches:
            return f"{plural(self._batches, 'batch', 'batches')} without samples"
        once = f"; {name_type(self._loader)} can be read only once: pass a loader that begins again"
        return "no batch" + (once if isinstance(self._loader, Iterator) else "")

    def _begin(self) -> None:
        """Start the loader, and read what an earlier run has used of this pass."""
        # Loaders draw a seed when they start, and may draw more for each batch; the earlier run has done so before it
        # came to where the user's program has put the generators now.
        self.has_begun, generators = True, RandomState(self._device) if self._begins_at else None
        self._layouts = self._read_batches(iter(self._loader))
        missing = self._to_skip
        while missing:
            layout = self._next(missing)
            if layout is None:
                raise InvalidArgument(
                    f"the state says that {plural(self._to_skip, 'sample')} of this pass were used, and the loader "
                    f"ended after {self._to_skip - missing}: pass run() the loader that it had when the state was saved"
                )
            missing -= layout.count
        if generators is not None:
            generators.restore()

    def _read_batches(self, batches: Iterator[Any]) -> Iterator[Layout]:
        for batch in batches:
            self._batches += 1
            if not is_empty(batch):
                yield self._read(batch)

    def _next(self, most: int) -> Layout | None:
        """The next samples that lie in one batch, at most ``most``."""
        layout, self._rest = self._rest or next(self._layouts, None), None
        if layout is None or layout.count <= most:
            return layout
        self._rest = _cut(layout, most, layout.count)
        return _cut(layout, 0, most)


def _cut(layout: Layout, start: int, stop: int) -> Layout:
    """Samples ``start`` to ``stop`` as a batch, read as the whole is."""
    taken = layout.take(range(start, stop))
    if any(tensor.requires_grad and tensor.is_leaf for tensor in layout.tensors()):
        taken = map_tensors(taken, lambda tensor: as_leaf(tensor) if tensor.requires_grad else tensor)
    return Layout(taken, stop - start, layout.lists)


def refuse_unlike(layout: Layout, dims: Mapping[str, int]) -> Layout:
    """Return a batch of a loader, unless no tensor in it stands where one with as many dimensions was in the example.

    Such are single samples, which would be taken for batches, and the tensors of one batch, for several batches.
    """
    found = dims_of(layout)
    if found and dims and not found.items() & dims.items():
        raise InvalidArgument(
            f"run() got a batch unlike the plan's example: {_show(found)} dimensions, in the example {_show(dims)}; "
            f"pass a loader of batches, such as DataLoader(dataset, batch_size=32), not of samples; for one batch call "
            f"step()"
        )
    return layout


def _show(dims: Mapping[str, int]) -> str:
    shown = [f"{path} has {count}" for path, count in [*dims.items()][:3]]
    return ", ".join(shown) + (", ..." if len(dims) > len(shown) else "")


def count_samples(layouts: Iterable[Layout]) -> int:
    return sum(map(_COUNT, layouts))


def read_together(ranks: Ranks, step: int, reading: Pass) -> tuple[list[Layout], int]:
    """Read this rank's samples of a step; returns also how many all ranks have."""
    is_first = not reading.has_begun
    with Agreement(ranks.channel, f"step {step}", ranks.number) as agreement:
        layouts = reading.take()
        gathered = agreement.gather("batches", {"samples": count_samples(layouts)}, first=is_first)
    agreement.refuse_unlike(
        [one["first"] for one in gathered],
        "one rank begins a pass of run(loader), and another is in the middle of one: leave the loop at the same step "
        "on every rank",
    )
    return layouts, sum(int(one["samples"]) for one in gathered)


def check_loader(loader: Any, epochs: Any) -> None:
    """Refuse what gives no batches, and a number of epochs that cannot be run."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise InvalidArgument(
            f"run() takes a loader, and {name_type(loader)} is a dataset: pass plan.loader(dataset) or "
            f"DataLoader(dataset, batch_size=...)"
        )
    if is_one_batch(loader):
        raise InvalidArgument(
            f"run() takes a loader or another iterable of batches, not {name_type(loader)}: for one batch call step()"
        )
    if epochs is None:
        return
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InvalidArgument(f"epochs={show_value(epochs)} must be an int of at least 1, or None for one pass")
    if epochs > 1 and isinstance(loader, Iterator):
        raise InvalidArgument(
            f"epochs={epochs}, and {name_type(loader)} can be read only once: pass a loader that begins again"
        )


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` once of each part of the loader that has it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    ordering = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    )
    setters = {id(one): getattr(one, "set_epoch", None) for one in ordering}
    for setter in filter(callable, setters.values()):
        setter(epoch)
