"""Errors of the user's functions pass unchanged, with one note that says where, and few of our frames."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import autobatch
from autobatch.testing import oom_at

BATCH = torch.linspace(-1, 1, 64).reshape(16, 4)


class Mine(Exception):
    """An ordinary error of the user."""


class Slotted(Exception):
    __slots__ = ("code",)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int = 3


class Mute(Exception):
    """Refuses notes in whatever way they are added."""

    def __setattr__(self, name, value):
        raise RuntimeError("no")

    def add_note(self, note):
        raise RuntimeError("no")


class OddNotes(Exception):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.__notes__ = None


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, error):
        ctx.error = error
        return values.sum()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


class Case:
    """A model, an optimizer and a step; each function of the user raises ``error`` once it is set."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        case = self

        class Stepped(torch.optim.SGD):
            def step(self, closure=None):
                case.fail("optimizer")
                return super().step(closure)

        self.optimizer = Stepped(self.model.parameters(), lr=0.1)
        self.error, self.where, self.samples = None, "", 0

    def fail(self, where: str) -> None:
        if self.error is not None and where == self.where:
            raise self.error if isinstance(self.error, BaseException) else self.error()

    def step(self, model, batch):
        self.samples = len(batch)
        self.fail("step")
        if self.error is not None and self.where == "backward":
            return FailsBackward.apply(model(batch), self.error)
        return model(batch).square().mean()

    def weigh(self, batch):
        self.fail("weigh")
        return float(len(batch))

    def length_of(self, batch):
        self.fail("length_of")
        return [4] * len(batch)

    def cut(self, batch, largest):
        self.fail("cut")
        return [[*range(start, min(start + largest, len(batch)))] for start in range(0, len(batch), largest)]

    def fit(self, **options):
        options = {"weigh": self.weigh, "budget": "64MiB", "max_micro_batch": 5, "progress": False, **options}
        return autobatch.fit(self.model, 16, batch=BATCH, step=self.step, optimizer=self.optimizer, **options)

    def runner(self, **options):
        error, self.error = self.error, None
        plan = self.fit()
        made = autobatch.Runner(plan, self.model, step=self.step, optimizer=self.optimizer, weigh=self.weigh, **options)
        self.error = error
        return made

    def run_fit(self):
        self.fit()

    def run_bound_fit(self):
        options = {"weigh": self.weigh, "budget": "64MiB", "max_micro_batch": 5, "progress": False}
        given = {"model": self.model, "step": self.step, "optimizer": self.optimizer, "target_batch": 16}
        autobatch.Runner.fit(**given, batch=BATCH, **options)

    def run_step(self):
        self.runner().step(BATCH)

    def run_step_over(self):
        self.runner().step_over([BATCH[:7], BATCH[7:]])

    def run_accumulate(self):
        self.runner().accumulate(BATCH)

    def run_verify(self):
        autobatch.verify(self.model, BATCH, self.step, self.weigh)

    def run_cut(self):
        self.runner(cut=self.cut).step(BATCH)

    def run_lengths(self):
        self.fit(cut=autobatch.by_length(self.length_of))

    def raised(self, entry: str, where: str, error: BaseException | type[BaseException]) -> BaseException:
        """Return the entry's error if this function raises that error, or a new one of that class each time."""
        self.error, self.where = error, where
        try:
            getattr(self, entry)()
        except BaseException as raised:
            return raised
        return pytest.fail("nothing was raised")


def notes_of(error: BaseException) -> list[str]:
    """Its notes; none before Python 3.11."""
    return list(getattr(error, "__notes__", None) or [])


has_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")

ENTRIES = {
    "run_fit": "autobatch.fit",
    "run_bound_fit": "autobatch.fit",
    "run_step": "autobatch.Runner",
    "run_step_over": "autobatch.Runner",
    "run_accumulate": "autobatch.Runner",
    "run_verify": "autobatch.verify",
}


@has_notes
@pytest.mark.parametrize("where", ["step", "backward", "optimizer", "weigh"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_an_error_of_the_users_says_which_function_raised_it_and_who_called_that(entry: str, where: str) -> None:
    """The same object comes out, with one note: the function, its number of samples, and our call."""
    if where == "optimizer" and entry in {"run_accumulate", "run_verify"}:
        return  # which step no optimizer
    case = Case()
    error = Mine("mine")
    assert case.raised(entry, where, error) is error
    (note,) = notes_of(error)
    assert "\n" not in note
    assert {"step": "your step(", "backward": "backward pass", "optimizer": "optimizer.step(", "weigh": "weigh("}[
        where
    ] in note
    assert ENTRIES[entry] in note
    if where in {"step", "backward"}:
        assert f" {case.samples} sample" in note


@has_notes
@pytest.mark.parametrize(("entry", "where"), [("run_cut", "cut"), ("run_lengths", "length_of")])
def test_an_error_of_a_function_that_divides_names_it(entry: str, where: str) -> None:
    """``cut`` and ``length_of`` are the user's, too."""
    error = Mine("mine")
    assert Case().raised(entry, where, error) is error
    (note,) = notes_of(error)
    assert f"your {where}(" in note


@pytest.mark.parametrize("kind", [Slotted, Frozen, Mute, OddNotes, StopIteration])
@pytest.mark.parametrize("where", ["step", "backward", "optimizer", "weigh"])
@pytest.mark.parametrize("entry", ["run_fit", "run_step", "run_verify"])
def test_whatever_its_class_is_the_error_comes_out_itself(entry: str, where: str, kind: type[Exception]) -> None:
    """Same object, even where its class refuses notes or attributes; nothing else is added to it."""
    if where == "optimizer" and entry == "run_verify":
        return  # which steps no optimizer
    error = kind()
    assert Case().raised(entry, where, error) is error
    assert error.__context__ is None
    assert error.__cause__ is None


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_interrupt_before_the_update_gets_no_note(entry: str) -> None:
    """Ctrl-C is nobody's fault."""
    for kind in (KeyboardInterrupt, SystemExit):
        error = kind()
        assert Case().raised(entry, "step", error) is error
        assert not notes_of(error)


def test_an_out_of_memory_error_that_is_retried_gets_no_note_and_is_let_go() -> None:
    """Nothing holds it, or the tensors of the step in which it was raised, once the step is done."""
    case = Case()
    runner = case.runner()
    shortages = []

    class Held(torch.OutOfMemoryError):
        """Can be referred to weakly."""

    def step(model, batch):
        if not shortages:
            error = Held("CUDA out of memory. Tried to allocate 2 GiB")
            shortages.append((weakref.ref(error), error.__class__))
            raise error
        return model(batch).square().mean()

    case.step = step
    runner = autobatch.Runner(runner.plan, case.model, step=step, optimizer=case.optimizer, weigh=case.weigh)
    result = runner.step(BATCH)
    gc.collect()
    assert result.retries == 1
    assert shortages[0][0]() is None
    with oom_at(5):
        assert runner.step(BATCH).retries == 1
