"""Lightning's Trainer where memory ends: in the passes, in what is logged, in clipping, and in the update."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from lightning_runs import Made, apart, bit_for_bit, load, logs_apart, train
from sampling import IN_PROOF, sample
from torch.nn import functional as F

from autobatch.errors import CannotRetry, DoesNotFit
from autobatch.testing import oom_at


def test_steps_that_run_out_of_memory_end_exactly(caplog):
    """In forward, in backward, at once, and while clipping: weights, logs, rates, hooks are those of whole batches."""
    whole, split = train(), train(attached={}, faults={2: [335], 4: [20, 100], 5: [40], 6: [70]})
    assert split.retries == 4
    assert sum("running the step again" in record.getMessage() for record in caplog.records) == 1
    assert apart(whole, split) < 1e-12
    assert logs_apart(whole, split) < 1e-12
    assert split.module.calls == whole.module.calls


def test_a_step_that_fails_at_one_sample_is_not_run_again(caplog):
    """Each smaller size runs once, and one sample once."""
    tried = []

    def step(self, batch, batch_idx):
        if batch_idx == 2:
            tried.append(len(batch[0]))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.cross_entropy(self.net(batch[0]), batch[1])

    with pytest.raises(DoesNotFit):
        train(made=Made(changes={"training_step": step}), attached={"check": None})
    assert tried[-1] == 1
    assert tried == sorted({*tried}, reverse=True)
    assert "running the step again" not in caplog.text


def test_a_retried_step_is_bit_for_bit_the_planned_one():
    """With dropout and AdamW in bfloat16: a step in the final sizes from the start draws and logs the same."""
    made = Made(dropout=0.2, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    fit = partial(train, made=made, attached={"check": None}, limit_train_batches=2, precision="bf16-mixed")
    retried = fit(faults={1: [40]})
    assert retried.retries == 1
    planned = fit(callbacks=(_go_on_from({**retried.callback.runner.state_dict(), "steps": 1}, batch=1),))
    assert planned.retries == 0
    assert planned.sizes == retried.sizes
    assert bit_for_bit(retried, planned)
    assert planned.logs == retried.logs


def _go_on_from(state: Any, batch: int) -> Any:
    class Smaller(load().Callback):
        def on_train_batch_start(self, trainer, module, _, batch_idx):
            if batch_idx == batch:
                (ours,) = [one for one in trainer.callbacks if type(one).__name__ == "Autobatch"]
                ours.runner.load_state_dict(state)

    return Smaller()


class Sweep:
    """Runs one batch again and again, each time with memory that ends at another operation."""

    def __init__(self) -> None:
        self.exact, self.refused, self.wrong = [], [], []

    def callback(self) -> Any:
        """Takes the place of the loop's ``run`` in the third batch."""
        sweep = self

        class Sweeping(load().Callback):
            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                if batch_idx == 2:
                    loop = trainer.fit_loop.epoch_loop.automatic_optimization
                    vars(loop)["run"] = partial(sweep.run, trainer, module, loop, loop.run)

        return Sweeping()

    def run(self, trainer, module, loop, inner, *arguments):
        (ours,) = [one for one in trainer.callbacks if type(one).__name__ == "Autobatch"]
        before = _take(trainer, module, ours)

        def attempt(position):
            _put(trainer, module, ours, before)
            with oom_at(position) as planned:
                outputs = inner(*arguments)
            return planned.operations, _observe(trainer, module, outputs)

        operations, expected = attempt(10**9)
        for position in sample(range(1, operations + 1), 17):
            try:
                _, found = attempt(position)
            except CannotRetry as refused:
                assert "inside the optimizer's step" in str(refused)  # noqa: PT017 - one of many outcomes
                self.refused.append(position)
                continue
            difference = max(abs(a - b) for a, b in zip(expected, found, strict=True))
            (self.exact if difference < 1e-12 else self.wrong).append((position, difference))
        _put(trainer, module, ours, before)
        vars(loop)["run"] = inner
        return inner(*arguments)


def _take(trainer, module, ours):
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
    results = {key: (metric, dict(vars(metric))) for key, metric in trainer._results.items()}
    states = module.state_dict(), trainer.optimizers[0].state_dict(), vars(module.accuracy)
    return copy.deepcopy([*states, progress.state_dict(), ours.runner.state_dict()]), results


def _put(trainer, module, ours, taken):
    (weights, optimizer, accuracy, progress, runner), results = taken[0], taken[1]
    module.load_state_dict(weights)
    trainer.optimizers[0].load_state_dict(copy.deepcopy(optimizer))
    metric_state = copy.deepcopy({name: accuracy[name] for name in ("tp", "fp", "tn", "fn", "_update_count")})
    vars(module.accuracy).update({**metric_state, "_computed": None})
    trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.load_state_dict(progress)
    ours.runner.load_state_dict(runner)
    trainer._results.clear()
    for key, (metric, attributes) in results.items():
        vars(metric).clear()
        vars(metric).update(attributes)
        trainer._results[key] = metric


def _observe(trainer, module, outputs):
    """Weights, momentum, what was logged, the metric's counts, the Trainer's count of steps, and what the hooks get."""
    found = [*module.parameters(), *(state["momentum_buffer"] for state in trainer.optimizers[0].state.values())]
    found += [metric.value for metric in trainer._results.values() if isinstance(metric.value, torch.Tensor)]
    found += [metric._forward_cache for metric in trainer._results.values() if metric.meta.on_step]
    found += [module.accuracy.tp, module.accuracy.fn, *outputs.values(), torch.tensor(trainer.global_step)]
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in found]).tolist()


def test_memory_that_ends_at_every_operation_of_a_batch(quiet_log):
    """From zero_grad to the update: exact, or refused in words where parameters may have moved; never anything else."""
    sweep = Sweep()
    undisturbed, swept = train(attached={}), train(attached={}, callbacks=(sweep.callback(),))
    assert sweep.wrong == []
    assert len(sweep.exact) > (300 if IN_PROOF else 15)
    assert len(sweep.refused) <= 4 * 3  # of each parameter, what SGD with momentum does with it
    assert apart(undisturbed, swept) < 1e-12
    assert logs_apart(undisturbed, swept) < 1e-12
