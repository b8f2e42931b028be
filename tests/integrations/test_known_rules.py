"""Which batches are of one kind, and which of a kind are compared."""

from __future__ import annotations

import torch

from autobatch.integrations.transformers.loss_rule import KnownRules, kind_of

ROWS = torch.ones(3, 4, dtype=torch.long)


def test_kinds_differ_by_what_a_batch_shows():
    """Names, dimensions, texts, padding and unequal numbers of labels; not values, and not the number of samples."""
    batches = [
        {"x": ROWS},
        {"x": ROWS[0]},
        {"x": ROWS, "labels": ROWS},
        {"x": ROWS, "labels": ROWS.masked_fill(torch.eye(3, 4, dtype=torch.bool)[[0, 0, 1]] * (ROWS > 2), 0)},
        {"x": ROWS, "labels": ROWS.tril(-1) - 100 * ROWS.triu()},
        {"x": ROWS, "task": "one"},
        {"x": ROWS, "task": "other"},
        {"x": ROWS, "attention_mask": ROWS},
        {"x": ROWS, "attention_mask": ROWS.tril()},
    ]
    kinds = [kind_of(batch, 3, set()) for batch in batches]
    assert kinds[2] == kinds[3]
    assert len(set(kinds)) == len(kinds) - 1
    assert kind_of({"x": ROWS[:2]}, 2, set()) == kinds[0]
    assert kind_of((ROWS, ROWS), 3, set()) == kind_of((ROWS,), 3, set())


def test_batches_1_2_4_8_of_each_kind_are_compared():
    """Whatever comes between them."""
    known = KnownRules("Trainer")
    due = {"one": [], "other": []}
    for number in range(20):
        task = "one" if number % 4 else "other"
        kind, _ = known.find({"task": task}, 1)
        due[task].append(known.is_due(kind))
    assert [number for number, is_due in enumerate(due["one"], 1) if is_due] == [1, 2, 4, 8]
    assert [number for number, is_due in enumerate(due["other"], 1) if is_due] == [1, 2, 4]


def find(known, rule, **texts):
    """The rule for a batch with these texts; where there is none, this one from now on."""
    kind, found = known.find(texts, 1)
    if found is None:
        known.add(kind, rule)
    return found


def test_a_text_with_many_values_that_change_nothing_is_ignored(caplog):
    """Once it has eight, with one warning; a text by which rules differ, and the dataset's name, never are."""
    known = KnownRules("Trainer")
    for number in range(8):
        for task in ("mean", "sum"):
            find(known, task, file=f"{number}.txt", task=task)
    assert find(known, "", file="new.txt", task="sum") == "sum"
    assert find(known, "", file="new.txt", task="mean") == "mean"
    for number in range(20):
        assert find(known, "mean", dataset_name=f"{number}") is None
        assert find(known, f"{number}", numbered=f"{number}") is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the text 'file' of a batch has had 8 values" in line
    assert "name it 'dataset_name'" in line
