"""More parameters are trained than when the plan was made: the update either fits, or is refused before it begins."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import autobatch

INPUT, TARGET = torch.randn(256, 64), torch.randint(3, (256,))
ENOUGH, FEW = "8MiB", {"AdamW": "1.75MiB", "AdamW at once": "1.6MiB"}


class Staged(nn.Module):
    """A head on a backbone, which is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
        self.head = nn.Linear(256, 3)
        self.backbone.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(rows))


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def add_group(model: Staged, optimizer: Any) -> None:
    model.backbone.requires_grad_(True)
    optimizer.add_param_group({"params": [*model.backbone.parameters()], "lr": 1e-4})


def unfreeze(model: Staged, optimizer: Any) -> None:
    """The optimizer has held them from the beginning."""
    model.backbone.requires_grad_(True)


def widen_head(model: Staged, optimizer: Any) -> None:
    """As many parameters as before, and larger ones: the head gets more classes."""
    model.head = nn.Linear(256, 400)
    optimizer.param_groups[0]["params"][:] = model.head.parameters()


CHANGES = {
    "a group is added": ((lambda model: model.head.parameters()), add_group),
    "held ones are unfrozen": ((lambda model: model.parameters()), unfreeze),
    "one is replaced": ((lambda model: model.head.parameters()), widen_head),
}
OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "AdamW at once": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
}


def make(change: str, optimizer: str, budget: str) -> tuple[Staged, Any, autobatch.Plan]:
    """A model whose head is trained, and its plan."""
    torch.manual_seed(0)
    model = Staged()
    held = OPTIMIZERS[optimizer](CHANGES[change][0](model))
    plan = autobatch.fit(
        model, 256, batch=(INPUT, TARGET), step=cross_entropy, optimizer=held, budget=budget, max_micro_batch=64,
        reuse=False, check=None,
    )  # fmt: skip
    return model, held, plan


@pytest.mark.parametrize("is_bound_later", [False, True])
@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW at once"])
@pytest.mark.parametrize("change", CHANGES)
def test_an_update_that_does_not_fit_is_refused_before_it_begins(
    change: str, optimizer: str, is_bound_later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """No weight has moved and no state was made; the log says once what has grown. Frozen again, the model trains."""
    model, held, plan = make(change, optimizer, FEW[optimizer])
    runner = None if is_bound_later else autobatch.Runner(plan, model, cross_entropy, held)
    if runner is not None:
        runner.step((INPUT, TARGET))
    CHANGES[change][1](model, held)
    runner = runner or autobatch.Runner(plan, model, cross_entropy, held)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    entries = len(held.state)
    with caplog.at_level(logging.WARNING, "autobatch"):
        for _ in range(2):
            with pytest.raises(autobatch.DoesNotFit, match="optimizer trains") as caught:
                runner.step((INPUT, TARGET))
    assert "\n" not in str(caught.value)
    assert sum("when the plan was made" in record.getMessage() for record in caplog.records) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(held.state) == entries
    if change != "one is replaced":
        model.backbone.requires_grad_(False)
        assert runner.step((INPUT, TARGET)).micro_batch_sizes


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("change", CHANGES)
def test_an_update_that_fits_is_made(change: str, optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    """The step is that of the whole batch; the log says that the plan is not of this training any more."""
    model, held, plan = make(change, optimizer, ENOUGH)
    runner = autobatch.Runner(plan, model, cross_entropy, held)
    torch.manual_seed(1)
    CHANGES[change][1](model, held)
    whole, plain, _ = make(change, optimizer, ENOUGH)
    torch.manual_seed(1)
    CHANGES[change][1](whole, plain)
    with caplog.at_level(logging.WARNING, "autobatch"):
        runner.step((INPUT, TARGET))
    assert any("when the plan was made" in record.getMessage() for record in caplog.records)
    cross_entropy(whole, (INPUT, TARGET)).backward()
    plain.step()
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_step_that_is_not_counted_says_that_the_training_has_grown(caplog: pytest.LogCaptureFixture) -> None:
    """Of a CPU's default budget the first two steps are counted alone; later the plan may be too old as well."""
    torch.manual_seed(0)
    model = Staged()
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (INPUT[:8], TARGET[:8])
    plan = autobatch.fit(model, 8, batch=batch, step=cross_entropy, optimizer=held, check=None)
    runner = autobatch.Runner(plan, model, cross_entropy, held)
    for _ in range(3):
        runner.step(batch)
    unfreeze(model, held)
    with caplog.at_level(logging.WARNING, "autobatch"):
        for _ in range(2):
            runner.step(batch)
    assert sum("when the plan was made" in record.getMessage() for record in caplog.records) == 1


def test_a_larger_state_that_is_loaded_is_refused_before_the_update() -> None:
    """Four tensors a parameter where the trials had two."""
    model, held, plan = make("held ones are unfrozen", "AdamW", "1.2MiB")
    held.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    runner = autobatch.Runner(plan, model, cross_entropy, held)
    runner.step((INPUT, TARGET))
    held.state[model.head.weight]["more"] = torch.zeros(300_000)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(autobatch.DoesNotFit):
        runner.step((INPUT, TARGET))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("change", ["held ones are unfrozen", "a group is added"])
def test_what_was_frozen_since_is_not_reported(change: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fewer trained parameters take less."""
    model, held, plan = make(change, "AdamW", ENOUGH)
    runner = autobatch.Runner(plan, model, cross_entropy, held)
    model.head.bias.requires_grad_(False)
    with caplog.at_level(logging.WARNING, "autobatch"):
        runner.step((INPUT, TARGET))
    assert not [record for record in caplog.records if "when the plan was made" in record.getMessage()]


def test_a_plan_without_the_count_checks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A plan that was written by hand has none."""
    model, held, plan = make("held ones are unfrozen", "AdamW", ENOUGH)
    assert plan.trained > 0
    kept = autobatch.Plan.model_validate({**plan.model_dump(), "trained": 0})
    model.backbone.requires_grad_(True)
    runner = autobatch.Runner(kept, model, cross_entropy, held)
    with caplog.at_level(logging.WARNING, "autobatch"):
        runner.step((INPUT, TARGET))
    assert not [record for record in caplog.records if "trains" in record.getMessage()]
