"""What a runner tells of a step that failed: our own words, the user's error by its type alone."""

from __future__ import annotations

import pytest
import torch
from plans import make_plan, make_rank_plans
from torch import nn

import autobatch
from autobatch.errors import CannotRetry, DoesNotFit, InvalidArgument
from autobatch.testing import FakeDevice
from autobatch.training.step_events import StepEvents


@pytest.fixture(scope="module")
def plan():
    """Any plan."""
    model = nn.Linear(3, 1)
    gpu = FakeDevice(lambda samples: 1000 + 50 * samples, total_bytes=4000)
    return autobatch.fit(model, 8, batch=torch.ones(8, 3), step=lambda m, b: m(b).mean(), device=gpu, progress=False)


@pytest.mark.parametrize(
    ("error", "reason", "out_of_memory"),
    [
        (DoesNotFit("no room\nfor one sample"), "DoesNotFit: no room", True),
        (CannotRetry("parameters moved"), "CannotRetry: parameters moved", True),
        (InvalidArgument(""), "InvalidArgument: ", False),
        (RuntimeError("a secret in the data"), "RuntimeError", False),
        (KeyError(), "KeyError", False),
    ],
    ids=repr,
)
def test_a_failed_step_is_told_without_the_users_words(plan, error, reason, out_of_memory):
    """The first line of an error of ours, which may have none."""
    events = []
    StepEvents(plan, [events.append]).report_failed(3, error)
    [event] = events
    assert (event.step, event.reason, event.out_of_memory) == (3, reason, out_of_memory)


def test_a_share_of_another_size_is_reported_with_its_rank():
    """Where there are several; the plan of one process names none."""
    events = []
    for plan in (*make_rank_plans((6, 6), 5), make_plan(12, 5)):
        StepEvents(plan, [events.append]).report_size(3, 4, can_run=True)
    found = [(event.samples, event.planned, event.target_batch, event.rank, event.world_size) for event in events]
    assert found == [(4, 6, 12, 0, 2), (4, 6, 12, 1, 2), (4, 12, 12, 0, 1)]


class Unspeakable(autobatch.AutobatchError):
    """Cannot even be printed."""

    def __str__(self):
        raise TypeError("no words")


def test_telling_never_replaces_the_error(plan):
    """An error that cannot be printed is the user's problem, and stays the one that is raised."""
    StepEvents(plan, []).report_failed(0, Unspeakable())
