"""A Trainer whose batches are of several tasks, each with a loss of its own, in an order that is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer

_TASKS = ("mean", "sum", "hinge", "spread")


class Points(Dataset):
    """Four hundred points with a number each; a hundred of each task."""

    def __len__(self) -> int:
        return 100 * len(_TASKS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        values = torch.randn(6, generator=draw, dtype=torch.float64)
        return {"x": values[:5], "labels": values[5], "index": index}


def collate_tasks(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A batch of the task of its first point; of the last two tasks the first eight points count for nothing."""
    task = _TASKS[samples[0]["index"] // 100]
    counts = [float(task in ("mean", "sum") or sample["index"] % 100 >= 8) for sample in samples]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "labels")}
    return {**batch, "counts": torch.tensor(counts, dtype=torch.float64), "task": task}


def collate_files(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """With a text besides that differs in each batch."""
    return {**collate_tasks(samples), "source": f"file-{samples[0]['index']}.txt"}


def collate_datasets(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """With the name of a dataset besides, of which there are many."""
    return {**collate_tasks(samples), "dataset_name": f"set-{samples[0]['index']}"}


class LinearTasks(nn.Module):
    """A number from five, with the loss of the batch's task."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(5, 1).double()

    def forward(self, x: Any, labels: Any = None, counts: Any = None, task: str = "mean", **_: Any) -> dict[str, Any]:
        numbers = self.line(x).squeeze(-1)
        errors = (numbers - labels) ** 2 * counts
        if task == "spread":
            return {"loss": errors.mean() + (numbers * counts).var(correction=0)}
        return {"loss": errors.sum() if task.startswith("sum") else errors.mean()}


def linear_tasks() -> LinearTasks:
    """The model, with the same weights each time."""
    return LinearTasks()


class _GivenBatches:
    batch_size, drop_last = 9, False

    def __init__(self, batches: Sequence[Sequence[int]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Sequence[int]]:
        return iter(self._batches)


class BatchesOfTasks(Trainer):
    def __init__(self, *arguments: Any, batches: Sequence[Sequence[int]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._batches = batches

    def get_train_dataloader(self) -> Any:
        batches: Any = _GivenBatches(self._batches)
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
