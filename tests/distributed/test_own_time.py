"""A rank's own time: by the clock where the host does the work, by the stream's events on CUDA, waiting for neither."""

from __future__ import annotations

import time

import pytest
import torch

from autobatch.distributed.ranks import OwnTime

pytestmark = pytest.mark.quick


def test_on_the_cpu_it_is_the_clock():
    """What lies outside the two marks does not count."""
    own = OwnTime(torch.device("cpu"))
    assert own.read() == 0.0
    began = time.perf_counter()
    own.start()
    time.sleep(0.02)
    own.stop()
    most = time.perf_counter() - began
    time.sleep(0.05)
    assert 0.02 <= own.read() <= most


class Stream:
    """A device that is behind: an event is passed when it has come so far."""

    def __init__(self):
        self.enqueued = self.passed = 0

    def make_event(self, *, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    """Its time is its place in the stream: a second each."""

    def __init__(self, stream):
        self.stream = stream

    def record(self, stream):
        assert stream is self.stream
        self.stream.enqueued += 1
        self.place = self.stream.enqueued

    def query(self):
        return self.place <= self.stream.passed

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return 1000.0 * (other.place - self.place)


def test_on_cuda_it_is_of_the_last_step_that_is_over(monkeypatch):
    """The host asks and goes on; what is not over is read in a later step."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.make_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    own, read = OwnTime(torch.device("cuda", 0)), []
    for work, passed in ((1, 0), (3, 2), (5, 3), (7, 30)):
        own.start()
        stream.enqueued += work - 1
        own.stop()
        stream.passed = passed
        read.append(own.read())
    assert read == [0.0, 1.0, 1.0, 7.0]
    assert not own._pending


def test_a_step_that_was_undone_leaves_nothing(monkeypatch):
    """It began and did not end: the next one is measured from its own beginning."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.make_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    own = OwnTime(torch.device("cuda", 0))
    own.start()
    stream.enqueued += 40
    own.start()
    stream.enqueued += 1
    own.stop()
    stream.passed = stream.enqueued
    assert own.read() == 2.0
