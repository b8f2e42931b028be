"""The real search code of others, each in a memory that is pretended.

Covers pytorch-lightning (both modes), accelerate, toma and torch-max-mem as released and unchanged; none of them is
needed until its search is called. Does not cover what they do with the size that they found.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module, metadata

import torch
from models import classify
from torch import nn

__all__ = ["FEATURES", "PEERS", "Memory", "Peer", "describe_peers", "import_peers"]

FEATURES = 4
"""Of one sample."""


@dataclass
class Memory:
    """Memory for so many samples, and what was tried in it.

    Attributes:
        fits: The most samples for which there is room.
        sizes: Of each micro-batch that was begun, in order.
        trials: Sizes that were tried.
        shortages: How often memory ended.
    """

    fits: int
    sizes: list[int] = field(default_factory=list)
    trials: int = 0
    shortages: int = 0

    def take(self, samples: int) -> None:
        """Begin a micro-batch, or run out, in words that all the others know for an out-of-memory error."""
        self.sizes.append(samples)
        if samples > self.fits:
            self.shortages += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has 1.00 GiB in total.")

    def try_once(self, samples: int) -> int:
        """A trial for those that take any function: one training step."""
        self.trials += 1
        self.take(samples)
        model = nn.Linear(FEATURES, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        classify(model, (torch.randn(samples, FEATURES), torch.zeros(samples, dtype=torch.long))).backward()
        optimizer.step()
        return samples


@dataclass(frozen=True)
class Peer:
    """Somebody else's search: ``search(memory, asked)`` returns the size it found."""

    name: str
    distribution: str
    search: Callable[[Memory, int], int]


def _with_lightning(mode: str) -> Callable[[Memory, int], int]:
    def search(memory: Memory, asked: int) -> int:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            return _scale_with_lightning(mode, memory, asked, folder)

    return search


def _scale_with_lightning(mode: str, memory: Memory, asked: int, folder: str) -> int:
    import pytorch_lightning as lightning  # noqa: PLC0415 - a peer may be missing
    from pytorch_lightning.tuner import Tuner  # noqa: PLC0415

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = nn.Linear(FEATURES, 2), 2

        def on_train_start(self) -> None:
            memory.trials += 1

        def training_step(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
            memory.take(len(batch[1]))
            return classify(self.model, (batch[0], batch[1]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> torch.utils.data.DataLoader[tuple[torch.Tensor, ...]]:
            # Three steps of the largest size: it stops growing where the data set does.
            rows = torch.randn(3 * asked, FEATURES), torch.zeros(3 * asked, dtype=torch.long)
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=self.batch_size)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    return Tuner(trainer).scale_batch_size(Module(), mode=mode, max_val=asked)


def _with_accelerate(memory: Memory, asked: int) -> int:
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - a peer may be missing

    return find_executable_batch_size(memory.try_once, starting_batch_size=asked)()


def _with_toma(memory: Memory, asked: int) -> int:
    from toma import NoBatchsizeCache, toma  # noqa: PLC0415 - a peer may be missing

    return toma.batch(memory.try_once, initial_batchsize=asked, cache_type=NoBatchsizeCache)()


def _with_torch_max_mem(memory: Memory, asked: int) -> int:
    from torch_max_mem import maximize_memory_utilization  # noqa: PLC0415 - a peer may be missing

    def train(batch_size: int) -> int:
        return memory.try_once(batch_size)

    return maximize_memory_utilization()(train)(batch_size=asked)


PEERS = (
    Peer("Lightning `BatchSizeFinder`, power", "pytorch-lightning", _with_lightning("power")),
    Peer("Lightning `BatchSizeFinder`, binsearch", "pytorch-lightning", _with_lightning("binsearch")),
    Peer("accelerate `find_executable_batch_size`", "accelerate", _with_accelerate),
    Peer("toma `toma.batch`", "toma", _with_toma),
    Peer("torch-max-mem `maximize_memory_utilization`", "torch-max-mem", _with_torch_max_mem),
)


def import_peers(peers: Sequence[Peer] = PEERS) -> None:
    """Import those that are installed: seconds that belong to no search."""
    for peer in peers:
        with suppress(ImportError):
            import_module(peer.distribution.replace("-", "_"))


def describe_peers(peers: Sequence[Peer] = PEERS) -> dict[str, str]:
    """The version of each peer's distribution, or that it is missing."""
    versions = {}
    for peer in peers:
        try:
            versions[peer.distribution] = metadata.version(peer.distribution)
        except metadata.PackageNotFoundError:
            versions[peer.distribution] = "not installed"
    return versions
