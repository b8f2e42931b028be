"""Hugging Face Trainers with random weights on real text: the sources of Python's standard library."""

from __future__ import annotations

import contextlib
import json
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import autobatch
from autobatch.integrations.attributes import replaced
from autobatch.integrations.transformers import TrainingStep, attach
from autobatch.testing import FakeDevice, oom_at

TARGET = 32
STEPS = 6
SEVEN_FIT = 1700
"""Bytes of a device on which 7 samples fit, of 32 in five micro-batches: 7, 7, 6, 6, 6."""


def small_device(total_bytes: int = SEVEN_FIT) -> FakeDevice:
    """A device of 1000 bytes and 100 more for each sample."""
    return FakeDevice(lambda samples: 1000 + 100 * samples, total_bytes=total_bytes)


@cache
def lines(count: int = 192, longest: int = 48) -> tuple[str, ...]:
    """Pieces of source text of 6 to ``longest`` characters."""
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text("utf-8")
    text, draw = "".join(filter(str.isascii, source)), random.Random(1)
    lengths = [max(6, min(longest, int(draw.lognormvariate(2.8, 0.6)))) for _ in range(count)]
    starts = [draw.randrange(len(text) - longest) for _ in range(count)]
    return tuple(text[start : start + length] for start, length in zip(starts, lengths, strict=True))


class Texts(Dataset):
    """Texts as bytes, with labels for a language model."""

    def __init__(self, count: int = 192) -> None:
        self.texts = [list(line.encode()) for line in lines(count)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.texts[index], "labels": list(self.texts[index])}


class Classes(Texts):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.texts[index], "labels": sum(self.texts[index]) % 2}


class Numbers(Texts):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.texts[index], "labels": float(sum(self.texts[index]) % 7)}


class Packed(Texts):
    """Texts that all have one length, so that every sample has equally many labels, but for the last few."""

    def __init__(self, count: int = 192, ragged_from: int = 10**9) -> None:
        super().__init__(count)
        source = b"".join(map(bytes, self.texts))
        sizes = [24 if index < ragged_from else 8 + index % 16 for index in range(count)]
        self.texts = [list(source[7 * index : 7 * index + size]) for index, size in enumerate(sizes)]


class Stream(IterableDataset):
    """The texts one after another: without a length, and none can be asked for."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([Texts()[index] for index in range(192)])


class OwnLoader(Trainer):
    """A subclass whose loader does not ask the Trainer's collate function."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=pad))


def pad(samples: list[dict[str, Any]], side: str = "right") -> dict[str, torch.Tensor]:
    """A batch of texts, padded to the longest; labels that are lists, with them."""
    width = max(len(sample["input_ids"]) for sample in samples)

    def padded(values: list[int], value: int) -> list[int]:
        padding = [value] * (width - len(values))
        return values + padding if side == "right" else padding + values

    batch = {
        "input_ids": [padded(sample["input_ids"], 0) for sample in samples],
        "attention_mask": [padded([1] * len(sample["input_ids"]), 0) for sample in samples],
        "labels": [
            padded(sample["labels"], -100) if isinstance(sample["labels"], list) else sample["labels"]
            for sample in samples
        ],
    }
    return {name: torch.tensor(values) for name, values in batch.items()}


def pad_masked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of a masked language model, whose collate function draws the masks."""
    batch = pad([{**sample, "labels": list(sample["input_ids"])} for sample in samples])
    is_masked = (torch.rand(batch["labels"].shape) < 0.3) & batch["attention_mask"].bool()
    batch["labels"] = batch["labels"].masked_fill(~is_masked, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(is_masked, 1)}


left_padded = partial(pad, side="left")


def gpt2(dropout: float = 0.0, **options: Any) -> Any:
    """A language model of two small layers, in float64."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **{"vocab_size": 256, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, **options},
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config).double()


def bert(kind: str = "BertForSequenceClassification", **options: Any) -> Any:
    """A model of two small layers with a head, in float64."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return getattr(transformers, kind)(config).double()


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logs: list[dict[str, float]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.calls.append("step begin")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("substep end")

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.calls.append("before the update")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.calls.append("step end")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.calls.append("evaluated")

    def on_save(self, *_: Any, **__: Any) -> None:
        self.calls.append("saved")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        timings = ("runtime", "per_second", "total_flos", "preparation_time")
        self.logs.append({k: v for k, v in logs.items() if not any(part in k for part in timings)})


@dataclass
class Trained:
    trainer: Any
    recorder: Recorder
    step: TrainingStep | None
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    retries: int = 0

    @property
    def model(self) -> Any:
        return self.trainer.model


def arguments(folder: Path, kind: Any = TrainingArguments, **options: Any) -> Any:
    """Six steps of a whole batch of 32, on the CPU, with clipping and a schedule that warms up."""
    chosen = {
        "output_dir": str(folder),
        "per_device_train_batch_size": TARGET,
        "max_steps": STEPS,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": 7,
    }
    return kind(**{**chosen, **options})


def train(
    make: Callable[[], Any],
    *,
    attached: dict[str, Any] | None = None,
    around: Callable[[Any], Any] | None = None,
    resume: str | None = None,
    target: int | None = None,
) -> Trained:
    """Train; with ``attached``, those arguments go to ``attach``."""
    trainer, recorder = make(), Recorder()
    trainer.add_callback(recorder)
    trained = Trained(trainer, recorder, None)
    if attached is not None:
        options = {"device": small_device(), "headroom": 0, **attached}
        trained.step = attach(trainer, target, **options, hooks=[partial(_note, trained)])
    if around is not None:
        around(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trained


def _note(trained: Trained, event: Any) -> None:
    if isinstance(event, autobatch.events.StepFinished):
        trained.sizes.append(event.micro_batch_sizes)
        trained.retries += event.retries


def trainer_of(
    folder: Path,
    model: Callable[[], Any] = gpt2,
    data: Any = None,
    *,
    collate: Callable[..., Any] = pad,
    kind: type[Trainer] = Trainer,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Trainer:
    """A plain Trainer or a subclass, with these training arguments."""
    dataset = Texts() if data is None else data
    return kind(
        model=model(), args=arguments(folder, **options), train_dataset=dataset, data_collator=collate, **(given or {})
    )


def apart(one: Any, other: Any) -> float:
    """The largest difference of weights, relative to the largest weight of its tensor.

    A bias of attention's keys has no gradient, so that it holds nothing but rounding.
    """
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1e-6)) for a, b in pairs if a.is_floating_point())


def bit_for_bit(one: Any, other: Any) -> bool:
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def logs_apart(one: Trained, other: Trained, names: Iterable[str] | None = None) -> float:
    """The largest difference of anything that was logged, relative to it; infinite where other things were."""
    worst = 0.0
    if [set(log) for log in one.recorder.logs] != [set(log) for log in other.recorder.logs]:
        return float("inf")
    for log, its in zip(one.recorder.logs, other.recorder.logs, strict=True):
        for name in log if names is None else set(names) & set(log):
            worst = max(worst, abs(log[name] - its[name]) / max(abs(log[name]), 1e-9))
    return worst


def count_labels(inputs):
    return (inputs["labels"] != -100).sum()


def count_shifted(inputs):
    """The same of a causal model, which shifts the labels by one."""
    return (inputs["labels"][:, 1:] != -100).sum()


def mean_loss(outputs, labels, num_items_in_batch=None):
    """A common loss: a mean over the labels that are there."""
    return cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class OwnLoss(Trainer):
    """A subclass with its own loss, metric, and work around the step."""

    seen = 0
    steps_done = 0

    def training_step(self, *arguments, **options):
        self.steps_done += 1
        return super().training_step(*arguments, **options)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        self.seen = self.seen + len(labels)
        loss = mean_loss(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class Interrupted:
    """Memory that ends at these operations of the Runner in these calls of ``training_step``; the plan is made before.

    Not in what is compared before: where memory ends in that, the step runs without it. In the first call, which makes
    the Runner, they are operations of all of it.
    """

    def __init__(self, operations):
        self.operations = operations

    def __call__(self, trainer):
        inner, calls = trainer.training_step, []

        def step(model, inputs, num_items_in_batch=None):
            calls.append(1)
            positions = self.operations.get(len(calls))
            if not positions or inner.runner is None:
                with oom_at(*positions) if positions else contextlib.nullcontext():
                    return inner(model, inputs, num_items_in_batch)
            with replaced(inner.runner, "accumulate", partial(fail, positions, inner.runner.accumulate)):
                return inner(model, inputs, num_items_in_batch)

        def fail(positions, accumulate, batch):
            with oom_at(*positions):
                return accumulate(batch)

        trainer.training_step = step


def saved_state(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's ``trainer_state.json``."""
    return json.loads((folder / "trainer_state.json").read_text("utf-8"))
