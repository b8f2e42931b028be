"""How the search goes: autobatch beside the real code of others, where so many samples fit and 8192 are asked for.

    python benchmarks/search.py

Covers trials, out-of-memory errors, the size found and the work done, for pytorch-lightning (both modes), accelerate,
toma and torch-max-mem as released; one that is not installed is named with what to install. Does not cover what a trial
takes on a real device: all meet the same error, raised in the training step of a small model beyond the chosen size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from models import classify
from peers import FEATURES, PEERS, Memory, Peer, import_peers
from quiet import undisturbed
from tables import Goal, Table, judge
from torch import nn

import autobatch
from autobatch.testing import FakeDevice

__all__ = ["ASKED", "FITS", "measure", "with_autobatch"]

ASKED = 8192
FITS = (37, 300, 5000)
_OURS = (  # name, headroom, how far memory bends from a line
    ("autobatch", None, 0.0),
    ("autobatch, headroom=0", 0, 0.0),
    ("autobatch, headroom=0, memory no line", 0, 1.0),
)
_JUDGED = "autobatch, headroom=0"
"""With headroom the size found is smaller on purpose."""

_EXPLANATION = (
    "*Fits*: the most samples for which there is room. *Micro-batches*: those of the found size that the samples asked "
    "for take. *Trials*: sizes tried. *Steps*: micro-batches begun, those that ran out among them; *samples*: theirs "
    "together. There is no GPU in this: everybody's own code runs, unchanged, with a training step of a small model on "
    "the CPU, and beyond the size that fits this step raises `torch.OutOfMemoryError` with the text of CUDA's "
    "allocator, before it does anything. Lightning may grow to the size asked for, runs three steps a trial and takes "
    "5 % off after bisection; accelerate, toma and torch-max-mem start from that size and run the function once a "
    "trial, here one training step. autobatch asks its device, which the others do not: `FakeDevice`, whose memory "
    "is a line of which 30 % is there without a batch, or, where that is said, one that bends upwards (samples to the "
    "power of 1.5). It runs two micro-batches a trial and one to warm up, and leaves 5 % of the budget free unless "
    "told otherwise."
)


def measure(fits: Sequence[int] = FITS, asked: int = ASKED, peers: Sequence[Peer] | None = None) -> Table:
    """Everybody's search in each memory.

    Args:
        fits: How many samples there is room for, memory by memory.
        asked: The target batch, or where a peer starts or ends.
        peers: Whom to compare with; ``None``: all.
    """
    peers = PEERS if peers is None else peers
    import_peers(peers)
    rows: list[tuple[str, ...]] = []
    goals: list[Goal] = []
    with undisturbed():
        for room in fits:
            for name, memory, found in _try_ours(room, asked):
                rows.append(_row(name, memory, found, asked))
                goals += _goals(memory, found, asked) if name == _JUDGED else []
            rows += [_try_peer(peer, Memory(room), asked) for peer in peers]
    columns = (
        "who",
        "fits",
        "found",
        "micro-batches",
        "largest that ran",
        "trials",
        "out of memory",
        "steps",
        "samples",
    )
    return Table(f"Search: {asked} asked for", _EXPLANATION, columns, rows, goals)


def with_autobatch(memory: Memory, asked: int, headroom: float | None, bend: float = 0.0) -> int:
    """``fit`` on a device whose memory is a formula and ends after ``memory.fits`` samples.

    Args:
        memory: Takes note of what was tried.
        asked: The target batch.
        headroom: As ``fit`` takes it.
        bend: 0 for a line; 1 for samples to the power of 1.5.

    Returns:
        The plan's micro-batch size.
    """
    bytes_of = lambda samples: int(1e6 * samples ** (1 + bend / 2))  # noqa: E731 - a formula
    resident = bytes_of(memory.fits) * 3 // 7
    device = FakeDevice(lambda samples: resident + bytes_of(samples), resident + bytes_of(memory.fits))
    model = nn.Linear(FEATURES, 2)
    plan = autobatch.fit(
        model,
        asked,
        batch=(torch.randn(8, FEATURES), torch.zeros(8, dtype=torch.long)),
        step=classify,
        optimizer=torch.optim.AdamW(model.parameters()),
        device=device,
        headroom=headroom,
        progress=False,
    )
    memory.sizes += device.ran_sizes
    memory.trials = len(plan.trials)
    memory.shortages = sum(trial.outcome == "oom" for trial in plan.trials)
    return plan.micro_batch_size


def _try_ours(room: int, asked: int) -> Iterator[tuple[str, Memory, int]]:
    for name, headroom, bend in _OURS:
        memory = Memory(room)
        yield name, memory, with_autobatch(memory, asked, headroom, bend)


def _try_peer(peer: Peer, memory: Memory, asked: int) -> tuple[str, ...]:
    try:
        return _row(peer.name, memory, peer.search(memory, asked), asked)
    except ImportError as error:
        reason = f"not run ({error}): `pip install {peer.distribution}`, or `make bench`"
        return (peer.name, str(memory.fits), reason, *("",) * 6)


def _row(name: str, memory: Memory, found: int, asked: int) -> tuple[str, ...]:
    largest = max((size for size in memory.sizes if size <= memory.fits), default=0)
    numbers = (memory.trials, memory.shortages, len(memory.sizes), sum(memory.sizes))
    return (
        name,
        str(memory.fits),
        str(found),
        str(-(-asked // found)),
        f"{largest}{'' if found <= largest else ': **found never ran**'}",
        *(str(number) for number in numbers),
    )


def _goals(memory: Memory, found: int, asked: int) -> list[Goal]:
    needed, ran = -(-asked // memory.fits), any(found <= size <= memory.fits for size in memory.sizes)
    pieces = -(-asked // found)
    return [
        Goal(f"search, {memory.fits} fit: out of memory", "0", str(memory.shortages), judge(memory.shortages == 0)),
        Goal(
            f"search, {memory.fits} fit: micro-batches for {asked}",
            f"{needed}, the fewest that fit, of a size that ran",
            f"{pieces}{'' if ran else ', never ran'}",
            judge(ran and pieces == needed),
        ),
    ]


def main() -> None:
    """The table."""
    print(measure())


if __name__ == "__main__":
    main()
