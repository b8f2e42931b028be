"""A real model on real data, at a target batch of 256, inside a memory limit in which 256 does not fit.

    python examples/digits.py            # or: make demo

Trains a small convolutional net (BatchNorm, dropout) on scikit-learn's handwritten digits, twice: with all the memory
there is, and inside a budget. Half-way through the second run somebody else takes most of that budget.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

import autobatch
from autobatch.testing import tenant

TARGET_BATCH = 256
LOADER_BATCH = 32  # any size will do
EPOCHS = 12
TENANT_SHARE = 0.6  # of the budget, taken half-way
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 256 if DEVICE.type == "cuda" else 24  # on a GPU the allocator's 20 MiB segments would hide a tiny net

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """What one training run is compared by."""

    accuracy: float
    largest_peak: int
    budget: int
    retries: int
    seconds: float


def load_images() -> tuple[Batch, Batch]:
    """1437 training and 360 test images, 8 x 8, in CPU memory."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16.0, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in split)
    return (train_x.float().view(-1, 1, 8, 8), train_y), (test_x.float().view(-1, 1, 8, 8), test_y)


def build_model() -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, padding=1),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, padding=1),
        nn.BatchNorm2d(2 * WIDTH),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(2 * WIDTH * 16, 10),
    ).to(DEVICE)


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss of a micro-batch: all that autobatch has to know."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


@torch.no_grad()
def accuracy_of(model: nn.Module, batch: Batch) -> float:
    """Share of right answers."""
    model.eval()
    images, labels = (part.to(DEVICE) for part in batch)
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def train(name: str, train_set: Batch, test_set: Batch, budget: int | None, tenant_bytes: int = 0) -> Run:
    """Fit, print the plan, train; a tenant of so many bytes arrives half-way."""
    started = time.perf_counter()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(*train_set), LOADER_BATCH, shuffle=True)
    runner = autobatch.Runner.fit(model, TARGET_BATCH, batch=loader, step=step, optimizer=optimizer, budget=budget)
    plan = runner.plan
    print(f"\n{name}\n{plan}")
    for warning in plan.warnings:
        print(f"  ! {warning}")
    largest_peak = retries = 0
    with ExitStack() as visitors, logging_redirect_tqdm(), tqdm(range(EPOCHS), desc="epochs", file=sys.stderr) as bar:
        for epoch in bar:
            if epoch == EPOCHS // 2 and tenant_bytes:
                tqdm.write(
                    f"  ... another tenant takes {tenant_bytes / 2**20:.1f} of {plan.budget_bytes / 2**20:.1f} MiB",
                    file=sys.stderr,
                )
                visitors.enter_context(tenant(tenant_bytes, DEVICE))
            for result in runner.run(loader):  # the last step of an epoch is smaller
                largest_peak = max(largest_peak, result.peak_bytes)
                retries += result.retries
            bar.set_postfix(loss=f"{result.loss.item():.3f}", micro_batch=runner.micro_batch_size)
    seconds = time.perf_counter() - started
    return Run(accuracy_of(model, test_set), largest_peak, plan.budget_bytes, retries, seconds)


def find_tight_budget(train_set: Batch) -> int:
    """40 % of what the whole batch needs, as a plan with all the memory there is has measured it."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    roomy = autobatch.fit(model, TARGET_BATCH, batch=TensorDataset(*train_set), step=step, optimizer=optimizer)
    return roomy.peak_bytes * 2 // 5


def main() -> int:
    """Both runs, then the comparison."""
    logging.basicConfig(level=logging.WARNING, format="  %(name)s: %(message)s")
    # What a plan has to say is printed beneath it; of the log only what makes pieces smaller is to be seen.
    logging.getLogger().handlers[0].addFilter(lambda record: "at most" in record.getMessage())
    train_set, test_set = load_images()
    budget = find_tight_budget(train_set)
    whole = train("With all the memory there is:", train_set, test_set, None)
    tight = train(
        "Inside a budget, and half-way somebody else takes most of it:",
        train_set,
        test_set,
        budget,
        int(budget * TENANT_SHARE),
    )
    print(f"\n{'':<22}{'unlimited':>12}{'in a budget':>14}")
    print(f"{'test accuracy':<22}{whole.accuracy:>12.1%}{tight.accuracy:>14.1%}")
    print(f"{'largest peak, MiB':<22}{whole.largest_peak / 2**20:>12.1f}{tight.largest_peak / 2**20:>14.1f}")
    print(f"{'budget, MiB':<22}{whole.budget / 2**20:>12.1f}{tight.budget / 2**20:>14.1f}")
    print(f"{'retries':<22}{whole.retries:>12}{tight.retries:>14}")
    print(f"{'seconds':<22}{whole.seconds:>12.1f}{tight.seconds:>14.1f}")
    held = tight.largest_peak <= tight.budget and min(whole.accuracy, tight.accuracy) > 0.97
    print(f"\nPeak within the budget and both over 97 %: {'yes' if held else 'NO'}")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
