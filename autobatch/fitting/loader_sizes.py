"""Warns if a loader's batches, or the samples of a dataset, do not make up the target batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from autobatch._formatting import plural
from autobatch.batch.example import is_source
from autobatch.distributed.share_sampler import ShareSampler


@dataclass(frozen=True)
class ForRun:
    """An example that ``Runner.run`` joins and cuts in training, so that its batch size does not matter."""

    source: Any


def source_of(given: Any) -> Any:
    return given.source if isinstance(given, ForRun) else given


def warn_of_loader(given: Any, target: int, share: int, world_size: int) -> Iterator[str]:
    """Yield a sentence for each reason why steps on this loader or dataset would miss the target.

    A step has ``target`` samples over all ranks, and ``share`` on this one.
    """
    source = source_of(given)
    if not is_source(source):
        return
    size = source.batch_size if isinstance(source, DataLoader) else None
    if size is not None and size != share and not isinstance(given, ForRun):
        planned = f"a step has {share}" if world_size == 1 else f"this rank's share of {target} is {share}"
        yield (
            f"the loader has batch_size={size}, and {planned}: train with runner.run(loader), which joins and cuts its "
            f"batches, or give the loader batch_size={share}"
        )
    # A sampler of the user's may be one rank's.
    is_whole = world_size == 1 or isinstance(getattr(source, "batch_sampler", None), ShareSampler)
    samples, needed = _count_samples(source), target if is_whole else share
    if samples is not None and samples < needed:
        step = "a step" if needed == target else "a step on this rank"
        yield (
            f"the data has {plural(samples, 'sample')}, fewer than the {needed} of {step}: no step can have "
            f"target_batch={target}; take a smaller target_batch, or more data"
        )


def _count_samples(source: Any) -> int | None:
    """Count the samples of one pass; return ``None`` for a stream or a batch sampler of the user's."""
    if isinstance(source, DataLoader):
        sampler = source.batch_sampler
        if type(sampler) is not BatchSampler and not isinstance(sampler, ShareSampler):
            return None
        source = sampler.sampler if type(sampler) is BatchSampler else source.dataset
    try:
        return len(source)
    except Exception:  # noqa: BLE001 - of the user's __len__, which nothing else here needs
        return None
