"""Gives each rank its share of the target batches of one process, and resumes in the middle of an epoch.

Each rank computes the same order from the seed and the epoch, so the ranks exchange nothing.
"""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from autobatch._arguments import check_switch, is_instance_with
from autobatch._bounds import LARGEST
from autobatch._formatting import name_type, plural, show_value
from autobatch.errors import InvalidArgument
from autobatch.planning.division import share_batch
from autobatch.planning.plan_record import PlanRecord


class ShareSampler(Sampler[list[int]]):
    """Yields this rank's samples of each target batch, as the ``batch_sampler`` of a ``DataLoader``.

    The samples of all ranks together are the target batch of one process, for any number of ranks.

    Example:
        >>> sampler = autobatch.ShareSampler(plan, dataset)  # doctest: +SKIP
        >>> loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)  # doctest: +SKIP
        >>> for epoch in range(sampler.epoch, epochs):  # doctest: +SKIP
        ...     sampler.set_epoch(epoch)
        ...     for done, batch in enumerate(loader, start=sampler.first_batch + 1):
        ...         runner.step(batch)
        ...     torch.save(sampler.state_dict(done), "sampler.pt")
    """

    def __init__(
        self, plan: PlanRecord, dataset: Any, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        """Take the shares from the plan, and the number of samples from the dataset.

        Args:
            plan: This rank's plan, from ``fit``.
            dataset: A map-style dataset, with ``len()`` and ``dataset[index]``.
            shuffle: Whether each epoch has another order.
            seed: Seed of these orders, the same on every rank.
            drop_last: Leave out a last batch smaller than the target. Otherwise it is shared in proportion.

        Raises:
            InvalidArgument: An argument is not valid, the last batch has too few samples for the ranks, or
                ``drop_last`` leaves no batch.
        """
        if not isinstance(plan, PlanRecord):
            raise InvalidArgument(f"plan is {name_type(plan)}: pass what fit() returned, or Plan.load(path)")
        check_switch("shuffle", shuffle)
        check_switch("drop_last", drop_last)
        self._target, self._rank, self._shares = plan.target_batch, plan.rank, _shares_of(plan)
        self._shuffle, self._seed = shuffle, _check_whole("seed", seed, 0, LARGEST)
        self._samples = _count_samples(dataset)
        self._batches = _count_batches(self._samples, self._shares, drop_last=drop_last)
        self._epoch = self._first_batch = 0
        self._begun_at = 0  # first batch of the latest iteration

    @property
    def epoch(self) -> int:
        """Epoch of the next iteration."""
        return self._epoch

    @property
    def first_batch(self) -> int:
        """First batch of the next iteration: 0, except right after a resume."""
        return self._first_batch

    @property
    def sampler(self) -> ShareSampler:
        """This sampler: trainers such as Lightning's call ``set_epoch`` of a batch sampler's ``sampler``."""
        return self

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, also after a resume."""
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, a list for each target batch."""
        return self._remaining(self._epoch, self._first_batch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it before each epoch, on every rank.

        Another epoch begins with its first batch. The epoch of a resume keeps its position.

        Args:
            epoch: Number of the epoch, from 0.

        Raises:
            InvalidArgument: ``epoch`` is not an int of at least 0.
        """
        chosen = _check_whole("epoch", epoch, 0, LARGEST)
        if chosen != self._epoch:
            self._epoch, self._first_batch, self._begun_at = chosen, 0, 0

    def state_dict(self, batches_done: int) -> dict[str, int | bool]:
        """Return the next batch and its epoch; the same on every rank, and valid for another number of ranks.

        A ``DataLoader`` with workers asks for batches ahead of the training, so pass the number that the training has
        done.

        Args:
            batches_done: Batches of this epoch whose step is done, counted from the epoch's first batch.

        Raises:
            InvalidArgument: The epoch has fewer batches, or the resume began after that batch.
        """
        least, most = self._begun_at, self._batches
        done = _check_whole("batches_done", batches_done, least, most, ", counted from the epoch's first batch")
        epochs, batch = divmod(done, self._batches)
        return {"epoch": self._epoch + epochs, "batch": batch, **self._order_key()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at the batch of a state; later iterations begin with the first batch.

        Args:
            state: From a sampler of the same seed, dataset and target batch, on any number of ranks.

        Raises:
            InvalidArgument: The state is not valid or belongs to other batches; nothing has changed.
        """
        expected = self._order_key()
        if not isinstance(state, Mapping) or set(state) != {"epoch", "batch", *expected}:
            raise InvalidArgument(f"state={show_value(state)}: pass what state_dict() of a ShareSampler returned")
        for name, value in expected.items():
            if type(state[name]) is not type(value) or state[name] != value:
                raise InvalidArgument(
                    f"the state is of batches with {name}={show_value(state[name])}, and this sampler has "
                    f"{name}={value}: make it with the former, or begin another epoch with set_epoch()"
                )
        epoch = _check_whole("state['epoch']", state["epoch"], 0, LARGEST)
        epochs, batch = divmod(_check_whole("state['batch']", state["batch"], 0, self._batches), self._batches)
        self._epoch, self._first_batch, self._begun_at = epoch + epochs, batch, batch

    def _order_key(self) -> dict[str, int | bool]:
        """Return what decides the samples of a batch, except for the epoch."""
        order = {"seed": self._seed, "shuffle": self._shuffle}
        return {**order, "samples": self._samples, "target_batch": self._target}

    def _remaining(self, epoch: int, first_batch: int) -> Iterator[list[int]]:
        # Noted with the first batch, not in iter(): a loader with workers calls that twice, and uses the second result.
        if (self._epoch, self._first_batch) == (epoch, first_batch):
            self._begun_at, self._first_batch = first_batch, 0
        order = self._order(epoch)
        for batch in range(first_batch, self._batches):
            yield order[self._own_part(batch)].tolist()

    def _order(self, epoch: int) -> torch.Tensor:
        """Return the dataset's indices in the order of an epoch; 8 bytes each, where a list has 36."""
        if not self._shuffle:
            return torch.arange(self._samples, device="cpu")
        digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()  # a sum is the same for many pairs
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        return torch.randperm(self._samples, generator=generator, device="cpu")

    def _own_part(self, batch: int) -> slice:
        """Return the positions of this rank's samples of a batch in the epoch's order."""
        begin = batch * self._target
        samples = min(self._target, self._samples - begin)
        shares = self._shares if samples == self._target else share_batch(samples, self._shares)
        begin += sum(shares[: self._rank])
        return slice(begin, begin + shares[self._rank])


def make_loader(
    plan: PlanRecord, dataset: Any, options: Mapping[str, Any], *, shuffle: bool, seed: int, drop_last: bool
) -> DataLoader[Any]:
    """Make a DataLoader whose batches are this rank's steps; the arguments are those of ``Plan.loader``.

    Raises:
        InvalidArgument: The plan chooses one of the options, or the ranks cannot share the dataset.
    """
    chosen = {"batch_size", "batch_sampler"} | ({"sampler"} if plan.world_size > 1 else set())
    for name in sorted(chosen & options.keys()):
        raise InvalidArgument(
            f"plan.loader(): {name}= is chosen by the plan; make a DataLoader yourself and pass it to runner.run()"
        )
    check_switch("shuffle", shuffle)
    check_switch("drop_last", drop_last)
    if plan.world_size > 1:
        sampler = ShareSampler(plan, dataset, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return DataLoader(dataset, batch_sampler=sampler, **options)
    is_ordered = isinstance(dataset, IterableDataset) or options.get("sampler") is not None
    order = None if is_ordered else shuffle
    if not is_ordered:
        _count_samples(dataset)
    elif not isinstance(dataset, IterableDataset) and not is_instance_with(dataset, "__getitem__"):
        raise InvalidArgument(_explain_no_indices(dataset))  # DataLoader would fail at its first batch
    return DataLoader(dataset, batch_size=plan.target_batch, shuffle=order, drop_last=drop_last, **options)


def _shares_of(plan: PlanRecord) -> tuple[int, ...]:
    """Return the samples of each rank; one rank has the whole target."""
    if plan.world_size > 1 and not plan.shares:
        raise InvalidArgument(
            f"the plan is for {plan.world_size} ranks and does not say what each one's share of "
            f"target_batch={plan.target_batch} is: plan with fit() on these ranks"
        )
    return plan.shares or (plan.target_batch,)


def _count_samples(dataset: Any) -> int:
    """Return the length of a dataset, or raise InvalidArgument if it has no indices."""
    has_indices = is_instance_with(dataset, "__len__", "__getitem__")
    try:
        samples = len(dataset) if has_indices and not isinstance(dataset, IterableDataset | Mapping) else None
    except (TypeError, NotImplementedError):  # a dataset may wrap one without a length
        samples = None
    if samples is None:
        raise InvalidArgument(_explain_no_indices(dataset))
    if not samples:
        raise InvalidArgument(f"dataset is {name_type(dataset)} without samples: pass one that has some")
    return samples


def _explain_no_indices(dataset: Any) -> str:
    return (
        f"dataset is {name_type(dataset)}, whose samples have no indices: pass a map-style dataset, with len() and "
        f"dataset[index]"
    )


def _count_batches(samples: int, shares: tuple[int, ...], *, drop_last: bool) -> int:
    """Return the number of batches in an epoch, each with a sample for every rank."""
    target = sum(shares)
    batches, left = divmod(samples, target)
    if drop_last and not batches:
        raise InvalidArgument(
            f"drop_last=True leaves no batch: the dataset has {plural(samples, 'sample')}, fewer than "
            f"target_batch={target}; pass drop_last=False, or plan for a smaller target_batch"
        )
    if not drop_last and 0 < left < len(shares):
        raise InvalidArgument(
            f"the last batch of an epoch has {plural(left, 'sample')} for {len(shares)} ranks, as the dataset has "
            f"{samples} and target_batch={target}: pass drop_last=True, or plan for a target_batch that leaves none or "
            f"at least {len(shares)}"
        )
    return batches + (left > 0 and not drop_last)


def _check_whole(name: str, value: Any, least: int, most: int, about: str = "") -> int:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise InvalidArgument(f"{name}={show_value(value)} must be an int from {least} to {most}{about}")
    return int(value)
