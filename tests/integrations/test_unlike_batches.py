"""Batches of several kinds, and batches in which nothing can be compared, beside whole batches in float64."""

from __future__ import annotations

import logging
from functools import partial

import pytest
from tasks import (
    BatchesOfTasks,
    Points,
    collate_datasets,
    collate_files,
    collate_tasks,
    linear_tasks,
)
from trainers import apart, bit_for_bit, train, trainer_of

from autobatch.errors import InexactSplit
from autobatch.integrations.transformers import training

MEAN, SUM, HINGE = range(40), range(100, 140), range(200, 240)
"""Points of three tasks: a mean, a sum, and a mean whose first eight points count for nothing."""


def tasks_of(folder, *batches, collate=collate_tasks, **options):
    """A Trainer whose batches are these, in order."""
    kind = partial(BatchesOfTasks, batches=[[*batch] for batch in batches])
    chosen = {
        "remove_unused_columns": False,
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "max_steps": len(batches),
        **options,
    }
    return trainer_of(folder, linear_tasks, Points(), collate=collate, kind=kind, **chosen)


@pytest.fixture
def searched(monkeypatch):
    """The batches whose rule was looked for, as often as it was."""
    found, find_rule = [], training.find_rule
    monkeypatch.setattr(training, "find_rule", lambda *a, **k: found.append(a[3]["task"]) or find_rule(*a, **k))
    return found


CASES = {
    "one sample": (MEAN[:9], SUM[:1], SUM[1:10], MEAN[9:18], SUM[10:19]),
    "one sample at first": (SUM[:1], SUM[1:10], SUM[10:19]),
    "two samples that are alike": (MEAN[:9], [100, 100], SUM[1:10], MEAN[9:18], SUM[10:19]),
    "a gradient of zero": (MEAN[:9], HINGE[:8], HINGE[8:17], MEAN[9:18], HINGE[17:26]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kind_that_begins_with_nothing_to_compare_is_compared_later(name, tmp_path):
    """Its first batch is divided as those before were, and the next is compared, whatever its number."""
    make = partial(tasks_of, tmp_path, *CASES[name])
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert max(map(len, split.sizes)) > 1


@pytest.mark.parametrize("first", ["one sample", "a gradient of zero"])
def test_a_kind_that_begins_so_is_refused_where_its_samples_are_compared(first, tmp_path):
    """What was taken for want of a comparison is not taken for exact."""
    begin = [300] if first == "one sample" else [*range(300, 308)]
    with pytest.raises(InexactSplit, match="no way was found to split this loss exactly"):
        train(partial(tasks_of, tmp_path, MEAN[:9], begin, range(308, 317)), attached={})


def test_a_batch_that_could_not_be_compared_is_named_once(tmp_path, caplog):
    """One warning for all of its kind: training goes on, and each later batch is asked until one can tell."""
    make = partial(tasks_of, tmp_path, MEAN[:9], HINGE[:8], HINGE[:8], HINGE[:8], HINGE[8:17])
    train(make, attached={})
    said = [record for record in caplog.records if "could not be compared" in record.getMessage()]
    assert len(said) == 1
    assert said[0].levelno == logging.WARNING
    assert "count for nothing" in said[0].getMessage()


def test_a_resumed_training_compares_what_was_not(tmp_path):
    """The checkpoint was saved after a batch of one sample: the batch after it is compared first."""
    make = partial(tasks_of, tmp_path, MEAN[:9], SUM[:1], SUM[1:10], SUM[10:19], save_strategy="steps", save_steps=2)
    whole, undisturbed = train(make), train(make, attached={})
    resumed = train(make, attached={}, resume=str(tmp_path / "checkpoint-2"))
    assert bit_for_bit(undisturbed, resumed)
    assert apart(whole, resumed) < 1e-12


def test_a_text_that_differs_in_each_batch_makes_no_kinds(tmp_path, caplog, searched):
    """After eight values that changed no rule it is left out, with one warning; other texts still tell kinds."""
    batches = [range(first := 4 * (index // 2) + 100 * (index % 2), first + 9) for index in range(24)]
    make = partial(tasks_of, tmp_path, *batches, collate=collate_files)
    whole, split = train(make), train(make, attached={})
    assert apart(whole, split) < 1e-12
    assert len(searched) <= 10
    said = [record.getMessage() for record in caplog.records if "source" in record.getMessage()]
    assert len(said) == 1
    assert "dataset_name" in said[0]


def test_a_dataset_name_always_tells_kinds(tmp_path, searched):
    """However many there are: a loss may be chosen by it."""
    batches = [range(first, first + 9) for first in range(12)]
    train(partial(tasks_of, tmp_path, *batches, collate=collate_datasets), attached={})
    assert len(searched) == 12
