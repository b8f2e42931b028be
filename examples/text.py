"""Texts of unequal length, exactly: a small GPT learns Python from the standard library's own source.

    python examples/text.py

Each sample is one function, as bytes. A batch is padded to its longest function, so the loss is a mean over bytes and
not over samples: ``weigh`` counts them, and the micro-batches then add up to the gradient of the whole batch. ``fit``
tries the loader's longest functions. The loader yields half a target batch at a time, and ``run`` makes one step of
two. All of it runs inside a budget in which the target batch does not fit.
"""

from __future__ import annotations

import ast
import logging
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from tqdm import tqdm

import autobatch

TARGET_BATCH = 64
LOADER_BATCH = 32
STEPS = 30
BYTES_OF_FUNCTION = range(48, 257)
VOCABULARY = 128  # ASCII
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 256 if DEVICE.type == "cuda" else 64  # on a GPU the allocator's 20 MiB segments would hide a tiny model
HEADS = WIDTH // 16
BUDGET_SHARE = 0.22  # of what the whole target batch needs
IGNORED = -100  # cross_entropy's own default for "no target here"


class Batch(NamedTuple):
    """``inputs`` and ``targets``, both int64 [samples, longest]: each byte has to tell the next one."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Block(nn.Module):
    """Causal attention, then two linear layers, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.mixer = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[samples, length, width] to the same."""
        heads = self.queries_keys_values(self.attention_norm(hidden)).unflatten(-1, (3, HEADS, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        # Causal and padded on the right: no byte sees padding, so a sample's loss does not hang on its neighbours.
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.attended(seen.transpose(1, 2).flatten(-2))
        return hidden + self.mixer(hidden)


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(BYTES_OF_FUNCTION.stop, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[samples, length] to [samples, length, 128]."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        return self.head(self.blocks(self.byte(inputs) + self.position(positions)))


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss over the bytes that count."""
    return functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)


def weigh(batch: Batch) -> torch.Tensor:
    """What that mean is over."""
    return (batch.targets != IGNORED).sum()


def functions_of(file: Path) -> Iterator[bytes]:
    """Each function in a source file, as its lines stand there, if it is ASCII and its length suits."""
    source = file.read_bytes()
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            text = b"".join(lines[node.lineno - 1 : node.end_lineno])
            if text.isascii() and len(text) in BYTES_OF_FUNCTION:
                yield text


def load_functions() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Functions to learn from and functions to judge by, the same ones on each run of one Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    texts = dict.fromkeys(text for file in files for text in functions_of(file))  # each once: no text is in both parts
    samples = [torch.tensor(list(text)) for text in texts]
    judging = samples[::10]
    del samples[::10]
    return samples, judging


def collate(texts: list[torch.Tensor]) -> Batch:
    """Padded on the right to the longest; what is padding has no target."""
    return Batch(
        pad_sequence([text[:-1] for text in texts], batch_first=True),
        pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED),
    )


@torch.no_grad()
def bits_per_byte(model: nn.Module, judging: list[torch.Tensor]) -> float:
    """How many bits the model needs for a byte of functions it has never seen; 7 is no idea at all."""
    batches = [Batch(*(part.to(DEVICE) for part in batch)) for batch in DataLoader(judging, 8, collate_fn=collate)]
    nats = sum(float(step(model, batch) * weigh(batch)) for batch in batches)
    return nats / sum(float(weigh(batch)) for batch in batches) / math.log(2)


def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same weights each time."""
    torch.manual_seed(0)
    model = Gpt().to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=4e-3)


def find_tight_budget(loader: DataLoader[Batch]) -> int:
    """A part of what the whole target batch needs, as a plan with all the memory there is has measured it."""
    model, optimizer = build_model()
    roomy = autobatch.fit(model, TARGET_BATCH, batch=loader, step=step, optimizer=optimizer, weigh=weigh)
    return int(roomy.peak_bytes * BUDGET_SHARE)


def train(runner: autobatch.Runner, loader: DataLoader[Batch]) -> list[autobatch.StepResult]:
    """Run this many steps, over as many passes as they need."""
    results = []
    with tqdm(range(STEPS), desc="steps", file=sys.stderr) as bar:
        for _, result in zip(bar, runner.run(loader, epochs=STEPS, drop_last=True), strict=False):
            results.append(result)
            bar.set_postfix(loss=f"{result.loss.item():.3f}")
    return results


def main() -> int:
    """Fit, train, and say whether what this example claims is so."""
    logging.basicConfig(level=logging.WARNING, format="  %(name)s: %(message)s")
    started = time.perf_counter()
    learning, judging = load_functions()
    loader = DataLoader(learning, LOADER_BATCH, shuffle=True, collate_fn=collate)
    budget = find_tight_budget(loader)
    model, optimizer = build_model()
    runner = autobatch.Runner.fit(
        model, TARGET_BATCH, batch=loader, step=step, optimizer=optimizer, weigh=weigh, budget=budget
    )
    plan = runner.plan
    print(f"{len(learning)} functions to learn from, {len(judging)} to judge by\n{plan}")
    for warning in plan.warnings:
        print(f"  ! {warning}")
    before = bits_per_byte(model, judging)
    results = train(runner, loader)
    after = bits_per_byte(model, judging)
    largest_peak = max(result.peak_bytes for result in results)
    print(f"\n{'bits per byte, unseen':<24}{before:>8.2f} -> {after:.2f}")
    print(f"{'largest peak, MiB':<24}{largest_peak / 2**20:>8.1f} of {budget / 2**20:.1f}")
    print(f"{'micro-batches':<24}{', '.join(map(str, results[-1].micro_batch_sizes)):>8}")
    print(f"{'retries':<24}{sum(result.retries for result in results):>8}")
    print(f"{'seconds':<24}{time.perf_counter() - started:>8.1f}")
    learned = after < 0.6 * before
    split = largest_peak <= budget and plan.accumulation_steps > 1
    print(f"\nLearned, in pieces, within the budget: {'yes' if learned and split else 'NO'}")
    return 0 if learned and split else 1


if __name__ == "__main__":
    sys.exit(main())
