"""How long a step on texts of different lengths takes: padded to the longest, and with ``by_length``.

    python benchmarks/lengths.py [--pairs 5]

Covers a GPT-2 of two layers on 64 texts, log-normal from 16 to 1024 tokens, in a budget into which they do not fit at
once; both plans are ``fit``'s own. Does not cover other models, nor batches that are sorted by length before.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from quiet import undisturbed
from runner import pair_up
from tables import Goal, Table, judge
from torch import nn
from torch.nn.functional import cross_entropy

import autobatch

__all__ = ["draw_lengths", "make_batch", "make_model", "measure"]

TEXTS, LONGEST, BUDGET = 64, 1024, "96MiB"
_WORDS = 1000
_WANTED = 0.25


def draw_lengths(texts: int, longest: int, seed: int) -> list[int]:
    """Lengths from 16 on, the median an eighth of the longest; the first text is the longest there may be."""
    draw = random.Random(seed)
    drawn = [int(draw.lognormvariate(math.log(longest / 8), 0.9)) for _ in range(texts - 1)]
    return [longest, *(max(16, min(longest, length)) for length in drawn)]


def make_batch(lengths: Sequence[int], seed: int) -> dict[str, torch.Tensor]:
    """Texts padded on the right to the longest."""
    generator, longest = torch.Generator().manual_seed(seed), max(lengths)
    tokens = torch.randint(1, _WORDS, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def make_model(longest: int) -> nn.Module:
    """A GPT-2 of two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - seconds, which the other benchmarks spare

    torch.manual_seed(0)
    sizes = {"vocab_size": _WORDS, "n_positions": longest, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 0}
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    return model


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over tokens that count."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    logits = model(**inputs, use_cache=False).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def count_labels(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tokens that the mean is over."""
    return (batch["labels"][:, 1:] != -100).sum()


def length_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Tokens of each text."""
    return batch["attention_mask"].sum(1)


def measure(
    pairs: int = 5, seeds: Sequence[int] = (0, 1, 2), texts: int = TEXTS, longest: int = LONGEST, budget: str = BUDGET
) -> Table:
    """Steps of both plans, pair by pair.

    Args:
        pairs: Of each batch.
        seeds: One batch each.
        texts: In a batch.
        longest: Tokens of the longest text.
        budget: Of both plans.
    """
    model = make_model(longest)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = [make_batch(draw_lengths(texts, longest, seed), seed) for seed in seeds]
    rows, ratios = [], []
    with undisturbed():
        runners, searches = [], []
        for options in ({}, {"cut": autobatch.by_length(length_of)}):
            given: dict[str, Any] = {"step": step, "optimizer": optimizer, "weigh": count_labels, **options}
            limits = {"budget": budget, "reuse": False, "progress": False}
            plan = autobatch.fit(model, texts, batch=batches[0], **given, **limits)
            runners.append(autobatch.Runner(plan, model, **given))
            searches.append(f"{len(plan.trials)} ({plan.out_of_memory_trials} out of memory)")
        for seed, batch in zip(seeds, batches, strict=True):
            results = [runner.step(batch) for runner in runners for _ in range(4)]  # counted, far from steady
            padded, sorted_ = results[3], results[7]
            timed = pair_up(lambda b=batch: runners[0].step(b), lambda b=batch: runners[1].step(b), pairs=pairs)
            ratios += [ours / padded_seconds for padded_seconds, ours in timed]
            rows.append(_row(seed, batch, padded, sorted_, timed))
    median = statistics.median(ratios)
    return Table(
        "Texts of different lengths",
        f"A GPT-2 of two layers (64 wide) on {texts} texts, log-normal, 16 to {longest} tokens, the median an eighth "
        f"of the longest, AdamW, in a budget of {budget}. *Padded*: `fit` and `Runner` on the batch as it is. "
        "*Sorted*: the same with `by_length`. Each row is one batch; times are medians of steps that run in turn. "
        "Tokens: those that run, padding among them, for each that counts. "
        f"Trials of `fit`: padded {searches[0]}, sorted {searches[1]}.",
        ("batch", "padded", "sorted", "sorted / padded", "micro-batches", "tokens run, padded", "tokens run, sorted"),
        rows,
        [
            Goal(
                f"time of a step on {texts} texts of 16 to {longest} tokens with by_length(), beside all padded",
                f"at most {_WANTED}",
                f"{median:.2f}",
                judge(median <= _WANTED),
            )
        ],
    )


def _row(
    seed: int,
    batch: dict[str, torch.Tensor],
    padded: autobatch.StepResult,
    sorted_: autobatch.StepResult,
    timed: Sequence[tuple[float, float]],
) -> tuple[str, ...]:
    lengths = length_of(batch).tolist()
    run = sum(len(rows) * max(lengths[row] for row in rows) for rows in sorted_.samples)
    ratio = statistics.median(ours / theirs for theirs, ours in timed)
    return (
        str(seed),
        f"{statistics.median(theirs for theirs, _ in timed):.2f} s",
        f"{statistics.median(ours for _, ours in timed):.2f} s",
        f"{ratio:.2f}",
        f"{len(padded.micro_batch_sizes)} and {len(sorted_.micro_batch_sizes)}",
        f"{len(lengths) * max(lengths) / sum(lengths):.2f}",
        f"{run / sum(lengths):.2f}",
    )


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=5, help="steps of either side on each batch")
    torch.set_num_threads(1)
    table = measure(arguments.parse_args().pairs)
    print(table)
    print(table.goals[0])


if __name__ == "__main__":
    main()
