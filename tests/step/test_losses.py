"""What a step may return, read into terms."""

from __future__ import annotations

import pytest
import torch

from autobatch.step.losses import Mean, PerStep, Sum, read_terms

pytestmark = pytest.mark.quick


def make_loss(value: float = 3.0) -> torch.Tensor:
    return torch.tensor(value, requires_grad=True) * 1


@pytest.mark.parametrize(
    ("returned", "kind", "count"),
    [
        (lambda loss: loss, "mean", None),
        (lambda loss: Mean(loss, count=7), "mean", 7.0),
        (lambda loss: Mean(loss.reshape(1, 1), count=torch.tensor(7)), "mean", 7.0),
        (lambda loss: Sum(loss, 2.5), "sum", 2.5),
        (lambda loss: Sum(loss, count=torch.tensor([4])), "sum", 4.0),
        (PerStep, "per step", None),
    ],
)
def test_each_kind_is_read(returned, kind, count):
    """A tensor of one element of any shape, and a count that is any number."""
    [term] = read_terms(returned(make_loss()))
    assert (term.name, term.kind, term.count) == ("", kind, count)
    assert term.loss.shape == ()
    assert term.loss.requires_grad


def test_a_dict_is_read_entry_by_entry():
    """In its order, with its keys as names."""
    terms = read_terms({"ce": Mean(make_loss(), 5), "l2": PerStep(make_loss()), 3: make_loss()})
    assert [(term.name, term.kind) for term in terms] == [("ce", "mean"), ("l2", "per step"), ("3", "mean")]


def test_what_counts_for_nothing_needs_no_graph():
    """Without a label there is often no loss but a constant zero."""
    [term] = read_terms(Sum(torch.tensor(0.0), 0))
    assert term.count == 0
