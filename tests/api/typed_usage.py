"""Uses the public names as a user's typed code does.

``make lint`` checks this file with ``mypy --strict``, and ``test_public_surface`` runs it: an argument, a field or a
return type that changes makes an error here. Nothing is imported but ``autobatch`` and ``autobatch.events``. Does not
cover what the calls return; other tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import autobatch
from autobatch.events import Event, Retried, StepFinished

Batch = tuple[Tensor, Tensor]


def step(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss."""
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


def stated_step(model: nn.Module, batch: Batch) -> dict[str, autobatch.Mean | autobatch.Sum | autobatch.PerStep]:
    """Three terms, each with its own denominator."""
    inputs, labels = batch
    outputs: Tensor = model(inputs)
    decay = torch.stack([weight.square().sum() for weight in model.parameters()]).sum()
    return {
        "mean": autobatch.Mean(cross_entropy(outputs, labels), count=len(labels)),
        "sum": autobatch.Sum(outputs.square().sum(), len(labels)),
        "decay": autobatch.PerStep(1e-4 * decay),
    }


def sum_step(model: nn.Module, batch: Batch) -> autobatch.Sum:
    """Divided by the whole step's samples."""
    return autobatch.Sum(cross_entropy(model(batch[0]), batch[1], reduction="sum") / 16, count=len(batch[1]) / 16)


def run_backward(loss: Tensor) -> None:
    """As a framework does."""
    loss.backward()


def step_with_outputs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """A loss, and what comes back as ``result.aux``."""
    outputs: Tensor = model(batch[0])
    return cross_entropy(outputs, batch[1]), outputs


def weigh(batch: Batch) -> float:
    """Samples."""
    return float(len(batch[0]))


def length_of(batch: Batch) -> Tensor:
    """How much of each sample is no padding."""
    return (batch[0] != 0).sum(1)


LENGTHS = autobatch.by_length(length_of, dims={"batch[0]": 1}, padding="right")


@dataclass
class Rows:
    """A batch of a type of one's own."""

    values: Tensor


def take_rows(batch: Rows, indices: Sequence[int]) -> Rows:
    """The rows at these indices."""
    return Rows(batch.values[list(indices)])


class Counter:
    """A hook with state."""

    def __init__(self) -> None:
        self.steps = 0
        self.retries = 0

    def __call__(self, event: Event) -> None:
        """Count steps and retries."""
        self.steps += isinstance(event, StepFinished)
        self.retries += isinstance(event, Retried)


def use_plan(plan: autobatch.Plan, folder: Path) -> None:
    """Everything that a plan offers."""
    sizes: tuple[int, ...] = plan.micro_batch_sizes
    numbers: list[int] = [plan.target_batch, plan.world_size, plan.micro_batch_size, plan.accumulation_steps]
    byte_counts: list[int] = [plan.budget_bytes, plan.headroom_bytes, plan.peak_bytes]
    curve: autobatch.MemoryCurve | None = plan.curve
    if curve is not None:
        byte_counts += [curve.peak_allocated(8), curve.peak_reserved(8)]
        largest: int = curve.largest(plan.budget_bytes)
        numbers.append(largest)
    trials: tuple[autobatch.Trial, ...] = plan.trials
    for trial in trials:
        outcome: str = trial.outcome
        byte_counts += [trial.peak_allocated, trial.peak_reserved, trial.optimizer_peak]
        assert outcome in {"fits", "oom", "thrash"}
        assert trial.seconds >= 0
        assert trial.alloc_retries >= 0
    device: autobatch.DeviceInfo = plan.device
    texts: list[str] = [str(plan), plan.explain(), device.name, plan.fingerprint, plan.version, *plan.warnings]
    settings: dict[str, int] = plan.settings("huggingface")
    plan.save(folder / "plan.json")
    assert autobatch.Plan.load(folder / "plan.json") == plan
    assert sum(sizes) == plan.target_batch
    assert all(texts[:3])
    assert settings
    assert not plan.predicted
    assert min(numbers) > 0
    assert min(byte_counts) >= 0


def use_result(result: autobatch.StepResult) -> None:
    """Everything that a step's result offers."""
    loss: Tensor = result.loss
    sizes: tuple[int, ...] = result.micro_batch_sizes
    numbers: list[int | float] = [result.retries, result.peak_bytes, result.seconds]
    metrics: dict[str, int | float | Tensor] = result.metrics()
    norm: Tensor | None = result.gradient_norm
    assert norm is None or norm.ndim == 0
    outputs: tuple[Tensor, ...] = result.aux
    assert loss.ndim == 0
    assert sizes
    assert min(numbers) >= 0
    assert metrics
    assert len(outputs) in {0, len(sizes)}
    assert not result.skipped


def use_sampler(plan: autobatch.Plan, batch: Batch) -> None:
    """An epoch from its second target batch on."""
    dataset = TensorDataset(*(torch.cat([rows] * 3) for rows in batch))
    state: dict[str, int | bool] = autobatch.ShareSampler(plan, dataset, seed=1).state_dict(1)
    sampler = autobatch.ShareSampler(plan, dataset, shuffle=True, seed=1, drop_last=True)
    sampler.load_state_dict(state)
    sampler.set_epoch(sampler.epoch)
    loader = DataLoader(dataset, batch_sampler=sampler)
    done: list[int] = [index for index, _ in enumerate(loader, start=sampler.first_batch)]
    indices: list[int] = next(iter(sampler))
    ranks: tuple[int, tuple[int, ...]] = plan.rank, plan.shares
    assert done == [1, 2]
    assert len(sampler) == 3
    assert len(indices) == plan.target_batch
    assert ranks == (0, ())


def use_errors(run: Callable[[], object]) -> autobatch.AutobatchError | None:
    """Each error is a class of its own, below one base."""
    try:
        run()
    except (autobatch.NeedsBatch, autobatch.DoesNotFit, autobatch.CannotRetry, autobatch.InexactSplit) as error:
        return error
    except (autobatch.RankFailed, autobatch.RankLost) as error:
        return error
    except autobatch.InvalidArgument as error:
        as_value_error: ValueError = error
        assert str(as_value_error)
        return error
    except RuntimeError as error:
        if not autobatch.is_oom(error):
            raise
    return None


def main(folder: Path) -> None:
    """Plan, run, compare and predict, on a device that is pretended."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    batch: Batch = torch.randn(32, 8), torch.randint(4, (32,))
    gpu = autobatch.testing.FakeDevice(lambda samples: 1000 + 50 * samples, total_bytes=2000)
    plan: autobatch.Plan = autobatch.fit(
        model,
        target_batch=32,
        batch=batch,
        step=step,
        optimizer=optimizer,
        weigh=weigh,
        device=gpu,
        budget="2000B",
        headroom=0.05,
        max_micro_batch=24,
        objective="throughput",  # the other one is chosen by time, which other programs change
        check="raise",
        reuse=False,
        progress=False,
    )
    use_plan(plan, folder)
    use_sampler(plan, batch)
    counter = Counter()
    runner = autobatch.Runner(
        plan,
        model,
        step=step_with_outputs,
        optimizer=optimizer,
        weigh=weigh,
        device=gpu,
        max_grad_norm=1.0,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=10),
        hooks=[counter, autobatch.hooks.jsonl(folder / "events.jsonl"), autobatch.hooks.console()],
        keep=[torch.zeros(1)],
        backward=run_backward,
        cut=lambda batch, largest: torch.arange(len(batch[0])).split(largest),
    )
    with autobatch.testing.oom_at(8):
        use_result(runner.step(batch))
    use_result(runner.step_over([batch, batch]))
    use_result(runner.accumulate(batch))
    assert (runner.steps, counter.steps, counter.retries) == (3, 3, 1)
    bound: autobatch.Runner = autobatch.Runner.fit(
        model, 8, batch=batch, step=step, optimizer=optimizer, device=gpu, max_grad_norm=1.0, reuse=False
    )
    refused = use_errors(lambda: autobatch.Runner.fit(model, 8, max_microbatch=4))  # type: ignore[call-arg]
    assert isinstance(refused, autobatch.InvalidArgument)
    for result in bound.run([batch, batch], epochs=2, drop_last=True):
        use_result(result)
    assert bound.passes == 2
    use_plan(bound.plan, folder)
    saved: dict[str, object] = runner.state_dict()
    runner.load_state_dict(saved)
    verdict: autobatch.Verdict = autobatch.verify(model, batch=batch, step=stated_step, device="cpu")
    causes: tuple[str, ...] = verdict.causes
    assert autobatch.verify(model, batch=batch, step=sum_step, device="cpu").exact
    assert verdict.exact
    assert verdict.relative_error < 1e-5
    assert not causes
    autobatch.batches.register(Rows, count=lambda rows: len(rows.values), take=take_rows)
    fields: list[Tensor] = autobatch.batches.Fields([batch[0], batch[0]])
    samples: list[Tensor] = autobatch.batches.Samples([batch[0], batch[0]])
    assert fields == samples
    prediction: autobatch.Prediction = autobatch.predict(
        model, batch=batch, step=step, optimizer=optimizer, weigh=weigh, target_batch=64, gpu="24GiB"
    )
    predicted: autobatch.Plan | None = prediction.plan
    assert predicted is not None
    assert predicted.predicted
    assert prediction.explain()
    outputs: Tensor = autobatch.map(
        model, batch[0], budget="1GiB", cut=autobatch.by_length(lambda rows: [1] * len(rows)), progress=False
    )
    assert len(outputs) == len(batch[0])
    rows: list[Tensor] = list(autobatch.map(model, list(batch[0]), max_piece=3, to="cpu"))
    assert len(rows) == len(outputs)
    assert isinstance(use_errors(lambda: autobatch.fit(model, target_batch=0, batch=batch)), autobatch.InvalidArgument)
