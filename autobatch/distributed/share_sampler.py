"""Gives each rank its share of the target batches of one process, and resumes in the middle of an epoch.

It is the ``batch_sampler`` of a ``DataLoader`` over a map-style dataset. Each rank computes the same order from the
seed and the epoch, so the ranks send nothing.
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
from autobatch.planning.plan_record import PlanRecord
from autobatch.planning.shares import share_batch

__all__ = ["ShareSampler", "make_loader"]


class ShareSampler(Sampler[list[int]]):
    """Yields this rank's samples of each target batch, which are those of one process whatever the number of ranks.

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
        """Take the shares from the plan, and from the dataset only its length.

        Args:
            plan: This rank's plan, from ``fit``: its target batch, shares and rank are used.
            dataset: A map-style dataset, with ``len()`` and ``dataset[index]``.
            shuffle: Whether each epoch has an order of its own.
            seed: Of these orders; the same on every rank.
            drop_last: Whether a last batch smaller than the target is left out. It is shared in proportion otherwise.

        Raises:
            InvalidArgument: An argument cannot mean anything, the last batch has too few samples for the ranks, or
                ``drop_last`` leaves nothing.
        """
        if not isinstance(plan, PlanRecord):
            raise InvalidArgument(f"plan is {name_type(plan)}: pass what fit() returned, or Plan.load(path)")
        check_switch("shuffle", shuffle)
        check_switch("drop_last", drop_last)
        self._target = plan.target_batch
        self._rank = plan.rank
        self._shares = _shares_of(plan)
        self._shuffle = shuffle
        self._seed = _check_whole("seed", seed, 0, LARGEST)
        self._samples = _count_samples(dataset)
        self._batches = _count_batches(self._samples, self._shares, drop_last=drop_last)
        self._epoch = 0
        self._first_batch = 0
        self._begun_at = 0  # the first batch of the latest iteration

    @property
    def epoch(self) -> int:
        """The epoch whose order the next iteration has."""
        return self._epoch

    @property
    def first_batch(self) -> int:
        """The batch of the epoch with which the next iteration begins: 0, but for the first one after a resume."""
        return self._first_batch

    @property
    def sampler(self) -> ShareSampler:
        """Itself: trainers such as Lightning's call ``set_epoch`` of a batch sampler's ``sampler``."""
        return self

    def __len__(self) -> int:
        """Batches of a whole epoch, also where one is resumed in the middle."""
        return self._batches

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank's samples, a list for each target batch."""
        return self._remaining(self._epoch, self._first_batch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; call it before each epoch, on every rank.

        Another epoch begins with its first batch. For the one that was resumed nothing changes.

        Args:
            epoch: Counted from 0.

        Raises:
            InvalidArgument: It is no int of at least 0.
        """
        chosen = _check_whole("epoch", epoch, 0, LARGEST)
        if chosen != self._epoch:
            self._epoch, self._first_batch, self._begun_at = chosen, 0, 0

    def state_dict(self, batches_done: int) -> dict[str, int | bool]:
        """Which batch of which epoch comes next; the same on every rank, and good for another number of ranks.

        A ``DataLoader`` with workers asks for batches ahead of the training, so only the training knows how many it has
        done.

        Args:
            batches_done: Batches of this epoch whose step is done, counted from the epoch's first one also after a
                resume.

        Raises:
            InvalidArgument: The epoch has not so many batches, or fewer than those from before the resume.
        """
        least, most = self._begun_at, self._batches
        done = _check_whole("batches_done", batches_done, least, most, ", counted from the epoch's first batch")
        epochs, batch = divmod(done, self._batches)
        return {"epoch": self._epoch + epochs, "batch": batch, **self._order_key()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration where ``state_dict`` was; those after it begin with the first batch.

        Args:
            state: From a sampler of the same seed, dataset and target batch, on any number of ranks.

        Raises:
            InvalidArgument: It is no such state, or one of other batches; nothing has changed.
        """
        expected = self._order_key()
        if not isinstance(state, Mapping) or set(state) != {"epoch", "batch", *expected}:
            raise InvalidArgument(f"state={show_value(state)}: pass what state_dict() of a ShareSampler returned")
        for name, value in expected.items():
            if type(state[name]) is not type(value) or state[name] != value:
                raise InvalidArgument(
                    f"the state is of batches with {name}={show_value(state[name])}, and this sampler has "
                    f"{name}={value}: make it with the former, or begin an epoch anew with set_epoch()"
                )
        epoch = _check_whole("state['epoch']", state["epoch"], 0, LARGEST)
        epochs, batch = divmod(_check_whole("state['batch']", state["batch"], 0, self._batches), self._batches)
        self._epoch, self._first_batch, self._begun_at = epoch + epochs, batch, batch

    def _order_key(self) -> dict[str, int | bool]:
        """What decides which samples the batch of a number has."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "samples": self._samples,
            "target_batch": self._target,
        }

    def _remaining(self, epoch: int, first_batch: int) -> Iterator[list[int]]:
        # Noted with the first batch, not by iter(): a loader with workers calls that twice, and uses the second one.
        if (self._epoch, self._first_batch) == (epoch, first_batch):
            self._begun_at, self._first_batch = first_batch, 0
        order = self._order(epoch)
        for batch in range(first_batch, self._batches):
            yield order[self._own_part(batch)].tolist()

    def _order(self, epoch: int) -> torch.Tensor:
        """The dataset's indices as this epoch has them; 8 bytes each, where a list has 36."""
        if not self._shuffle:
            return torch.arange(self._samples, device="cpu")
        digest = hashlib.sha256(f"{self._seed} {epoch}".encode()).digest()  # sums would be the same for many pairs
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        return torch.randperm(self._samples, generator=generator, device="cpu")

    def _own_part(self, batch: int) -> slice:
        """Where this rank's samples of a batch are in the epoch's order."""
        begin = batch * self._target
        samples = min(self._target, self._samples - begin)
        shares = self._shares if samples == self._target else share_batch(samples, self._shares)
        begin += sum(shares[: self._rank])
        return slice(begin, begin + shares[self._rank])


def make_loader(
    plan: PlanRecord, dataset: Any, options: Mapping[str, Any], *, shuffle: bool, seed: int, drop_last: bool
) -> DataLoader[Any]:
    """Make a DataLoader whose batches are what one step of this rank has; the arguments are ``Plan.loader``'s.

    Raises:
        InvalidArgument: An option is the plan's to choose, or the dataset cannot be shared by the ranks.
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
    return DataLoader(dataset, batch_size=plan.target_batch, shuffle=order, drop_last=drop_last, **options)


def _shares_of(plan: PlanRecord) -> tuple[int, ...]:
    """By rank, the whole target for one."""
    if plan.world_size > 1 and not plan.shares:
        raise InvalidArgument(
            f"the plan is for {plan.world_size} ranks and does not say what each one's share of "
            f"target_batch={plan.target_batch} is: plan with fit() on these ranks"
        )
    return plan.shares or (plan.target_batch,)


def _count_samples(dataset: Any) -> int:
    """Its length, or ``InvalidArgument`` where indices mean nothing to it."""
    has_indices = is_instance_with(dataset, "__len__", "__getitem__")
    try:
        samples = len(dataset) if has_indices and not isinstance(dataset, IterableDataset | Mapping) else None
    except (TypeError, NotImplementedError):  # of a dataset that wraps one without a length
        samples = None
    if samples is None:
        raise InvalidArgument(
            f"dataset is {name_type(dataset)}, whose samples have no indices to share: pass a map-style dataset, with "
            f"len() and dataset[index]"
        )
    if not samples:
        raise InvalidArgument(f"dataset is {name_type(dataset)} without samples: pass one that has some")
    return samples


def _count_batches(samples: int, shares: tuple[int, ...], *, drop_last: bool) -> int:
    """Of an epoch, each with a sample for every rank."""
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
