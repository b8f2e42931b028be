"""What a step may return, read into terms."""

from __future__ import annotations

import pytest
import torch

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.step.losses import Mean, PerStep, Sum, read_terms

pytestmark = pytest.mark.quick


def make_loss(value: float = 3.0) -> torch.Tensor:
    """A scalar with a graph."""
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


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({}, "empty dict"),
        (Mean(1.0, count=3), "returned float"),
        ({"ce": torch.ones(2, requires_grad=True) * 1}, r"term 'ce' of the step returned a loss of shape \(2,\)"),
        ({"ce": make_loss(), "accuracy": torch.tensor(0.5)}, r"term 'accuracy'.*return \(losses, aux\)"),
        (Mean(make_loss(), count=-1), r"Mean\(count=\) is -1\.0; it must be a number from 0 to 1e100"),
        (Mean(make_loss(), count=float("nan")), r"Mean\(count=\) is nan"),
        (Mean(make_loss(), count=1e308), r"Mean\(count=\) is 1e\+308"),
        ({"ce": Sum(make_loss(), "3 tokens")}, r"Sum\(count=\) of the term 'ce' is str"),
        (Sum(make_loss(), torch.ones(2)), r"Sum\(count=\) is a tensor of shape \(2,\) and torch.float32; it must"),
    ],
)
def test_what_cannot_be_read_is_refused(returned, message):
    """The message names the term and what is wrong with it."""
    with pytest.raises(InvalidArgument, match=message):
        read_terms(returned)


def test_the_public_names_are_these():
    """``autobatch.Mean``, ``Sum`` and ``PerStep``."""
    assert (autobatch.Mean, autobatch.Sum, autobatch.PerStep) == (Mean, Sum, PerStep)
