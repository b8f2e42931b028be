"""Maps a function over a batch or over many samples, in the largest pieces that fit the device.

1. ``samples`` decides what the samples are: those of one batch, of an iterable, or of each batch of a loader.
2. ``piece`` runs the function on the next samples that fit, and again on fewer if memory runs out. Every piece is kept.
3. Results are joined to one (a batch), yielded in the order of the samples, or handed to ``on_result``.

An error carries the samples and results that were not handed over.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from autobatch._arguments import check_count, check_switch
from autobatch._formatting import format_bytes, name_type, show_value
from autobatch._user_errors import contextmanager
from autobatch.batch.lengths import ByLength
from autobatch.batch.samples import Layout, describe, refuse_meta
from autobatch.batch.tree import count_bytes, leaves_of
from autobatch.distributed.ranks import world_size
from autobatch.distributed.sharded import is_sharded
from autobatch.errors import DoesNotFit, InvalidArgument
from autobatch.events import Event, PieceRetried
from autobatch.inference.piece import PieceRunner
from autobatch.inference.results import Indices, Joined, count_entries, describe_entries, rows_of
from autobatch.inference.samples import (
    BatchSamples,
    Collate,
    LengthsOf,
    SingleSamples,
    Waiting,
    are_samples,
    count_samples,
    iterate,
    read_lengths,
    set_attributes,
)
from autobatch.memory.device import Device
from autobatch.memory.devices import device_for, find_allowance, is_here, open_device, refuse_meta_model
from autobatch.memory.oom import try_twice
from autobatch.planning.piece_size import PieceSizes
from autobatch.step.default_step import call_model
from autobatch.step.reachable import MOST_OBJECTS, find_modules

logger = logging.getLogger("autobatch")

OnResult = Callable[["range | list[int]", Any], object]


def map(  # noqa: A001 - autobatch.map, as the builtin
    fn: Callable[[Any], Any],
    batch: Any,
    *,
    device: torch.device | str | Device | None = None,
    budget: int | str | None = None,
    headroom: float | str | None = None,
    max_piece: int | None = None,
    cut: ByLength | None = None,
    collate: Collate | None = None,
    to: torch.device | str | None = None,
    on_result: OnResult | None = None,
    progress: bool = True,
) -> Any:
    """Call a function on many samples, in the largest pieces that fit, and return its results in order.

    Nothing is searched for beforehand: each piece is work that is kept, and its memory decides the size of the next.
    A piece that runs out of memory is run again in smaller ones. ``fn`` runs without gradients, and modules that it
    reaches are in eval mode meanwhile. Both are restored between pieces.

    Errors of ``fn`` come out as they were raised. Each error has three more attributes. ``sample_index`` is the sample
    that raised it, or ``None``. ``done`` has the indices of finished samples that were not handed over, and ``results``
    has their results. Ctrl-C has none of these.

    Args:
        fn: ``fn(piece) -> result`` with one entry a sample: a tensor or array with as many rows, a list as long,
            ``None``, or several of these in a tuple, dict or dataclass. A module is called as ``fit`` does without a
            ``step``: a mapping gives its keyword arguments. It is called again on samples that ran out of memory.
        batch: One batch, which is cut along its samples: a tensor, an array, a tuple, a mapping, a dataclass, an object
            of a registered type. Or samples, which are collated: a list, a Dataset, or any other iterable, which is
            read when its samples are needed. Or a DataLoader, whose batches are cut but not joined.
        device: Device that runs the pieces. Default: that of the modules, else that of the batch.
        budget: Bytes that this process may hold, also as ``"8GiB"``. Default: the free bytes and those that it holds.
        headroom: Part of the budget left free when a size is chosen: bytes, a text, or a fraction. Default: 5 %.
        max_piece: Most samples in a piece.
        cut: ``autobatch.by_length`` of one int a sample, of ``length_of(sample)``, or for one batch or a loader of
            ``length_of(batch)``, which returns one int a sample. Pieces then have samples of like length, the longest
            first, and as many as their length allows. The order of results stays. Single samples are sorted a window at
            a time: 256, or as many as 16 pieces have. ``fn`` or ``collate`` trims padding.
        collate: Makes a batch of a list of samples. Default: torch's ``default_collate``.
        to: Device of the results' tensors, such as ``"cpu"``. Default: they stay where ``fn`` left them.
        on_result: ``on_result(indices, result)`` is called with the result of each piece, in the order in which they
            ran, and nothing is kept. Each sample is in one of them.
        progress: Write at most one line a second to stderr, if that is a terminal.

    Returns:
        For one batch: the result of ``fn`` for the whole of it. For samples and loaders: an iterator with the result of
        each sample, whose tensors are rows of the piece's. With ``on_result``: ``None``, when all are done.

    Raises:
        DoesNotFit: One sample alone runs out of memory, or the results do not fit.
        InvalidArgument: An argument cannot be used, the batch cannot be counted, or ``fn`` did not return one entry a
            sample.
    """
    check_switch("progress", progress)
    _check_functions(fn, batch, collate, on_result)
    modules = _find_runnable(fn)
    # The samples. One batch is described now; a stream or a loader is read when its samples are needed.
    whole = None if are_samples(batch) else _describe(batch)
    count = count_samples(batch) if whole is None else whole.count
    lengths = read_lengths(cut, count, of_each=whole is None and not isinstance(batch, DataLoader))
    samples = _open(batch, collate or default_collate, lengths) if whole is None else [BatchSamples(whole, lengths)]
    # The memory. Weights and the batch are counted before the budget is found, since they hold a part of it.
    given = [] if whole is None else whole.tensors()
    memory = _find_device(device, modules, given)
    memory.watch([*(tensor for module in modules for tensor in _tensors_of(module)), *given])
    allowance = find_allowance(memory, budget, headroom)
    for warning in allowance.warnings:
        logger.warning("map: %s", warning)
    runner = PieceRunner(
        (lambda piece: call_model(fn, piece)) if isinstance(fn, nn.Module) else fn,
        modules,
        memory,
        allowance,
        PieceSizes(None if max_piece is None else check_count("max_piece", max_piece), memory.measures),
        _read_target(to),
        (_Progress(),) if progress and sys.stderr is not None and sys.stderr.isatty() else (),
    )
    # The results.
    if on_result is not None:
        return _hand_over(runner, samples, on_result)
    return _yield_rows(runner, samples) if whole is None else _join(runner, samples, whole.count)


def _open(samples: Any, collate: Collate, lengths_of: LengthsOf | None) -> Iterator[Waiting]:
    if not isinstance(samples, DataLoader):
        yield SingleSamples(iterate(samples), collate, lengths_of)
        return
    lists, first = None, 0
    for batch in samples:
        layout = describe(batch, lists)
        yield BatchSamples(layout, lengths_of, first)
        first, lists = first + layout.count, layout.lists


@contextmanager
def _reported(runner: PieceRunner, left: Callable[[], tuple[list[int], Any]]) -> Iterator[None]:
    """Report what was done; put on an error the samples and results that were not handed over."""
    ends_python = sys.is_finalizing  # an iterator left unfinished is closed last of all, when modules are empty
    try:
        yield
    except Exception as error:
        done, results = left()
        set_attributes(error, done=done, results=results, sample_index=getattr(error, "sample_index", None))
        raise
    finally:
        if not ends_python():
            runner.report()


def _join(runner: PieceRunner, several: Iterable[Waiting], samples: int) -> Any:
    """Return the results of one batch as one."""
    joined = Joined(samples)

    def add(indices: Indices, result: Any) -> None:
        with runner.device.limit(runner.allowance.budget_bytes):
            joined.add(indices, result)

    with _reported(runner, lambda: (joined.done, joined.partial())):
        for indices, result in runner.run(several):
            try:
                try_twice(runner.device.reclaim, "putting results together", add, indices, result)
            except DoesNotFit as shortage:
                whole = format_bytes(count_bytes(result) * samples // len(indices))
                advice = ", or to='cpu'" if runner.may_send_results else ""
                raise DoesNotFit(
                    f"the results of all {samples} samples, about {whole}, do not fit a budget of "
                    f"{format_bytes(runner.allowance.budget_bytes)}: pass on_result=, or a larger budget={advice}"
                ) from shortage
            del result  # not held while the next piece runs, here and below
        return joined.result()


def _yield_rows(runner: PieceRunner, several: Iterable[Waiting]) -> Iterator[Any]:
    """Yield the result of each sample, as soon as all before it are there."""
    following, early = 0, dict[int, Any]()
    with _reported(runner, lambda: ([*early], [*early.values()])):
        for indices, result in runner.run(several):
            early.update(zip(indices, rows_of(result, len(indices)), strict=True))
            del result
            while following in early:
                yield early.pop(following)
                following += 1


def _hand_over(runner: PieceRunner, several: Iterable[Waiting], on_result: OnResult) -> None:
    with _reported(runner, lambda: ([], [])):
        for indices, result in runner.run(several):
            on_result(indices, result)
            del result


class _Progress:
    """A hook that writes at most one line a second."""

    def __init__(self) -> None:
        self._written = time.monotonic()

    def __call__(self, event: Event) -> None:
        if time.monotonic() - self._written >= 1 or isinstance(event, PieceRetried):
            self._written = time.monotonic()
            sys.stderr.write(f"autobatch: {event}\n")


# ---------------------------------------------------------------------------------------- the arguments


def _check_functions(fn: Any, batch: Any, collate: Any, on_result: Any) -> None:
    """Refuse what cannot be called, and a ``collate`` where there is nothing to collate."""
    for name, value in (("fn", fn), ("collate", collate), ("on_result", on_result)):
        if not callable(value) and (value is not None or name == "fn"):
            raise InvalidArgument(f"{name}={show_value(value)} must be a function")
    if isinstance(fn, type) and issubclass(fn, nn.Module):
        raise InvalidArgument(f"fn={name_type(fn)} has no weights yet: pass an instance of it")
    if collate is not None and (isinstance(batch, DataLoader) or not are_samples(batch)):
        raise InvalidArgument(f"collate= is for samples, and {name_type(batch)} has batches: leave it out")


def _describe(batch: Any) -> Layout:
    """Take one batch apart; refuse one without samples by what was passed."""
    empty = [describe_entries(leaf) for leaf in leaves_of(batch) if count_entries(leaf) == 0]
    if not empty and isinstance(batch, Mapping | tuple) and not batch:
        empty = [f"an empty {type(batch).__name__}"]
    if empty:
        raise InvalidArgument(
            f"map() got a batch without samples, {empty[0]}: pass at least one, or a list of samples, of which none "
            f"gives no result"
        )
    return describe(batch)


def _find_runnable(fn: Any) -> Sequence[nn.Module]:
    """Return the modules that a function reaches; refuse those that cannot be run piece by piece."""
    modules = find_modules(fn, _warn_of_more_objects)
    name = next((type(module).__name__ for module in modules if is_sharded(module)), None)
    if name is not None and world_size() > 1:
        raise InvalidArgument(
            f"map() cannot run {name}, whose parameters are sharded: ranks gather them together in each forward pass, "
            f"and each would run another number of pieces: map in one process with the whole weights, or call the "
            f"model on equally many batches on each rank"
        )
    # A model without values, unless hooks may bring them in for each pass, as those of accelerate do. A function may
    # call its model with weights from elsewhere.
    if isinstance(fn, nn.Module) and {tensor.is_meta for tensor in _tensors_of(fn)} == {True}:
        has_hooks = any(one._forward_pre_hooks or "forward" in vars(one) for one in fn.modules())  # noqa: SLF001
        if not has_hooks:
            refuse_meta_model(type(fn).__name__)
    return modules


@cache  # once: a loop may map thousands of batches
def _warn_of_more_objects() -> None:
    logger.warning(
        "map: fn reaches more than %s objects, and the rest was not searched for modules: any there keeps "
        "its mode, also train mode; pass the module itself as fn, hold fewer objects beside it, or call .eval() on it",
        f"{MOST_OBJECTS:,}",
    )


def _find_device(device: Any, modules: Iterable[nn.Module], tensors: Iterable[torch.Tensor]) -> Device:
    """Return the device of the pieces: the given one, else that of the modules, else that of the batch."""
    samples = [*tensors]
    for tensor in samples:
        refuse_meta(tensor)
    if device is not None:
        return open_device(device)
    own = [(tensor.device, module) for module in modules for tensor in _tensors_of(module)]
    homes = [home for home, _ in own if home.type != "meta"]
    if own and not homes:
        raise InvalidArgument(
            f"device= is needed: {type(own[0][1]).__name__} is on the meta device, which does not say where its passes "
            f"run; pass the device that its weights are brought to"
        )
    homes += [tensor.device for tensor in samples]
    return device_for(homes[0] if homes else torch.device("cpu"))


def _tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _read_target(to: Any) -> torch.device | None:
    """Return the device of the results; ``None``: they stay where they are."""
    if to is None:
        return None
    try:
        device = torch.device(to)
    except (RuntimeError, TypeError):
        raise InvalidArgument(f"to={show_value(to)} is no device: pass one such as 'cpu', or leave it out") from None
    if device.type == "meta":
        raise InvalidArgument(f"to={show_value(to)} would drop all values: pass a device with memory, such as 'cpu'")
    if not is_here(device):
        raise InvalidArgument(f"to={show_value(to)} is not here: torch has no memory of it in this process")
    return device
