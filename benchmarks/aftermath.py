"""What a search, or an error in training, leaves behind: autobatch beside Lightning, accelerate and transformers.

    PYTHONPATH=. python benchmarks/aftermath.py

Covers the state of model and random generators after a search, the samples of one optimizer step after an error in
training, and what two ranks do if one of them runs out. Everybody's own released code runs on a CPU, with an
out-of-memory error raised in the training step. Does not cover the search itself (``search``) nor Composer, which
refuses the CPU.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tables import Table, write_part
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autobatch
from autobatch.testing import FakeDevice, oom_at

__all__ = ["measure"]

_PAGE = Path(__file__).resolve().with_name("RESULTS.md")
_NAMES = ("torch", "pytorch-lightning", "accelerate", "transformers")
_FEATURES = 4


def _fail(samples: int, fits: int) -> None:
    if samples > fits:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


class _Net(nn.Module):
    """Has weights, and a buffer that each forward pass counts up and no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_FEATURES, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = self.layer(inputs + torch.rand(1))
        return outputs


def _compare(model: _Net, before: tuple[torch.Tensor, ...]) -> tuple[str, ...]:
    pairs = zip(_take(model), before, strict=True)
    return tuple("as before" if torch.equal(left, right) else "changed" for left, right in pairs)


def _take(model: _Net) -> tuple[torch.Tensor, ...]:
    weights = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    return weights, model.calls.clone(), torch.get_rng_state()


def _search_with_autobatch(model: _Net, data: torch.Tensor) -> None:
    def step(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(batch).square().mean()
        return loss

    gpu = FakeDevice(lambda samples: 1000 + 100 * samples, total_bytes=5000)
    optimizer = torch.optim.AdamW(model.parameters())
    autobatch.fit(model, 64, batch=data[:64], step=step, optimizer=optimizer, device=gpu, reuse=False)


def _search_with_lightning(model: _Net, data: torch.Tensor) -> int:
    import pytorch_lightning as lightning  # noqa: PLC0415 - a peer may be missing
    from pytorch_lightning.tuner import Tuner  # noqa: PLC0415

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batch_size = model, 2

        def training_step(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
            _fail(len(batch[0]), 40)
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
            return DataLoader(TensorDataset(data), batch_size=self.batch_size)

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        Tuner(trainer).scale_batch_size(Module(), mode="power", max_val=64)
    return trainer.accumulate_grad_batches


def _search_with_accelerate(model: _Net, data: torch.Tensor) -> None:
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - a peer may be missing

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        for size in (batch_size // 2, batch_size):  # a step that fits, then one that may not
            _fail(size, 40)
            model(data[:size]).square().mean().backward()
            optimizer.step()

    train()


def _samples_a_step_with_autobatch() -> tuple[int, int]:
    model = _Net()

    def step(net: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(batch).square().mean()
        return loss

    gpu, batch = FakeDevice(lambda samples: 1000 + 100 * samples, total_bytes=3000), torch.randn(32, _FEATURES)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = autobatch.fit(model, 32, batch=batch, step=step, optimizer=optimizer, device=gpu, reuse=False)
    runner = autobatch.Runner(plan, model, step=step, optimizer=optimizer, device=gpu)
    with oom_at(8):
        return 32, sum(runner.step(batch).micro_batch_sizes)


def _samples_a_step_with_transformers() -> tuple[int, int, int, bool]:
    """Samples of a step before and after an error in the third step; at which step it goes on, and whether trained."""
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - a peer may be missing

    sizes: list[int] = []
    starts: list[tuple[int, torch.Tensor]] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _Net()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            sizes.append(len(x))
            if sizes.count(16) == 5 and len(x) == 16:
                _fail(1, 0)
            return {"loss": self.net(x).square().mean()}

    class Watched(Trainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            if not starts or (len(starts) == 1 and sizes.count(16) == 5):
                starts.append((self.state.global_step, _take(self.model.net)[0]))
            loss: torch.Tensor = super().training_step(*arguments, **keywords)
            return loss

    data = [{"x": torch.randn(_FEATURES)} for _ in range(512)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            auto_find_batch_size=True,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            max_steps=6,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        Watched(model=Model(), args=arguments, train_dataset=data).train()
    (_, fresh), (restarted_at, trained) = starts
    return 2 * sizes[0], 2 * sizes[-1], restarted_at, not torch.equal(fresh, trained)


def _sizes_on_two_ranks() -> tuple[int, ...]:
    """What accelerate's decorator returns in two processes of one gloo group, the second of which has less memory."""
    with tempfile.TemporaryDirectory() as folder, torch.multiprocessing.get_context("spawn").Pool(2) as pool:
        return tuple(pool.starmap(_size_on_rank, [(rank, f"{folder}/meeting") for rank in (0, 1)], chunksize=1))


def _size_on_rank(rank: int, meeting: str) -> int:
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - a peer may be missing

    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        _fail(batch_size, (16, 10)[rank])
        return batch_size

    size: int = train()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return size


@contextmanager
def _quiet() -> Iterator[None]:
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    logging.getLogger("autobatch").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measure() -> list[Table]:
    """State after a search; samples of a step after an error."""
    rows, accumulated = [], 0
    with _quiet():
        for name, search in _SEARCHES:
            torch.manual_seed(0)
            model, data = _Net(), torch.randn(256, _FEATURES)
            before = _take(model)
            accumulated = search(model, data) or accumulated
            rows.append((name, *_compare(model, before)))
        asked, ours = _samples_a_step_with_autobatch()
        first, last, restarted_at, trained = _samples_a_step_with_transformers()
        ranks = _sizes_on_two_ranks()
    state = Table(
        "State after a search",
        "64 samples are asked for and 40 fit. The model has a buffer that each forward pass counts up and that is not "
        "in its state dict; its forward pass draws a random number. `accumulate_grad_batches` of Lightning's Trainer "
        f"is 2 before the search and {accumulated} after it.",
        ("who", "weights", "non-persistent buffer", "random generator"),
        rows,
    )
    weights = "already trained" if trained else "as at the start"
    later = Table(
        "Samples of one optimizer step before and after an out-of-memory error",
        f"The Trainer has 16 samples x 2 accumulation steps and meets the error in its third optimizer step; it then "
        f"continues at step {restarted_at} with weights that are {weights}. Two ranks use accelerate's decorator; 16 "
        f"samples fit the first and 10 the second, and they continue with {ranks[0]} and {ranks[1]}.",
        ("who", "before", "after"),
        [("autobatch `Runner`", str(asked), str(ours)), ("Trainer, `auto_find_batch_size`", str(first), str(last))],
    )
    return [state, later]


_SEARCHES = (
    ("autobatch `fit`", _search_with_autobatch),
    ("Lightning `BatchSizeFinder`", _search_with_lightning),
    ("accelerate `find_executable_batch_size`", _search_with_accelerate),
)


if __name__ == "__main__":
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _NAMES)
    found = "\n".join(map(str, measure()))
    write_part(
        _PAGE,
        "peers",
        f"# What others leave behind\n\nMeasured by `python benchmarks/aftermath.py`, with {versions}.\n\n{found}",
    )
    print(found)
