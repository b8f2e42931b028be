"""The examples, run as a stranger runs them: they end well, and what they show is what they claim."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from sampling import sample

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(400)


class Ran(NamedTuple):
    code: int
    output: str
    errors: str

    def numbers(self, row: str) -> list[float]:
        """The numbers behind the title of a row."""
        found = re.search(rf"^{re.escape(row)} (.*)$", self.output, flags=re.MULTILINE)
        assert found, f"no row {row!r} in:\n{self.output}"
        return [float(number) for number in re.findall(r"[\d.]+", found[1])]

    def plans(self) -> list[list[int]]:
        """Target, accumulation steps and micro-batch size of each plan that was printed."""
        found = re.findall(r"^autobatch: (\d+) = (\d+) x (\d+)", self.output, flags=re.MULTILINE)
        return [[int(part) for part in plan] for plan in found]


def run(name: str) -> Ran:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        # Threads that wait asleep: those that spin cost several times the time where other work runs beside them.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture(scope="module")
def digits() -> Ran:
    """What ``make demo`` shows."""
    return run("digits.py")


@pytest.fixture(scope="module")
def text() -> Ran:
    return run("text.py")


@pytest.fixture(scope="module")
def embed() -> Ran:
    """The one that maps a function over a corpus."""
    return run("embed.py")


@pytest.fixture(scope="module")
def gan() -> Ran:
    return run("gan.py")


@pytest.mark.parametrize("name", sample(["digits", "text", "embed", "gan"], 4))
def test_an_example_ends_well(name: str, request: pytest.FixtureRequest) -> None:
    """It exits with 0 and its last line says yes."""
    ran = request.getfixturevalue(name)
    assert ran.code == 0, ran.output + ran.errors
    assert ran.output.rstrip().endswith(": yes")


def test_digits_learns_as_well_in_a_budget_as_without_one(digits: Ran) -> None:
    """Both runs pass 97 % on images they have never seen, within a point of each other."""
    whole, tight = digits.numbers("test accuracy")
    assert min(whole, tight) > 97
    assert abs(whole - tight) <= 1


def test_digits_stays_within_its_budget(digits: Ran) -> None:
    """The largest peak of each run is below its budget, and the budget is one in which the other run would not fit."""
    peaks, budgets = digits.numbers("largest peak, MiB"), digits.numbers("budget, MiB")
    assert 0 < peaks[0] <= budgets[0]
    assert 0 < peaks[1] <= budgets[1] < peaks[0]


def test_digits_keeps_its_target_in_pieces(digits: Ran) -> None:
    """The same 256 samples a step, at once where there is room and in several pieces where there is not."""
    (whole_target, whole_steps, _), (tight_target, tight_steps, _) = digits.plans()[-2:]
    assert whole_target == tight_target == 256
    assert whole_steps == 1 < tight_steps


def test_digits_makes_room_for_the_tenant(digits: Ran) -> None:
    """Another tenant arrives, the next step has smaller pieces without running out, and the log says so."""
    assert digits.numbers("retries") == [0, 0]
    assert digits.errors.index("another tenant takes") < digits.errors.index("less memory is free than that size needs")
    assert "ran out of memory at" not in digits.errors


@pytest.mark.slow
def test_text_learns(text: Ran) -> None:
    """A byte of unseen functions costs far fewer bits after training than before."""
    before, after = text.numbers("bits per byte, unseen")
    assert 6 < before < 9
    assert after < 0.6 * before


@pytest.mark.slow
def test_text_runs_in_pieces_within_the_budget(text: Ran) -> None:
    """The pieces of the last step sum to the target, none is above the plan's size, and the peak is in the budget."""
    [[target, steps, size]] = text.plans()
    pieces = text.numbers("micro-batches")
    peak, budget = text.numbers("largest peak, MiB")
    assert sum(pieces) == target
    assert max(pieces) <= size < target
    assert steps > 1
    assert 0 < peak <= budget


@pytest.mark.slow
def test_text_meets_no_longer_sample_than_it_was_tried_with(text: Ran) -> None:
    """The plan was made with the loader's longest texts, so training never runs out of memory."""
    assert text.numbers("retries") == [0]


@pytest.mark.slow
def test_embed_runs_a_corpus_in_a_small_budget(embed: Ran) -> None:
    """Every text has its vector, no piece ran out of memory, and short texts ran in larger pieces."""
    [texts, _] = [float(number) for number in re.findall(r"\d+", embed.output)]
    found = re.search(
        r"map: (\d+) samples in (\d+) pieces of 2 to (\d+) on CPU; .* of 16\.0 MiB; 0 out of memory", embed.errors
    )
    assert found, embed.errors
    samples, pieces, largest = map(int, found.groups())
    assert samples == texts > 500
    assert largest > 1.3 * samples / pieces


@pytest.mark.slow
def test_gan_updates_two_networks_in_pieces_of_their_own(gan: Ran) -> None:
    """Both targets are whole, and the generator, whose loss goes through the critic, has more pieces."""
    found = re.search(r"^micro-batches (\(.+\)) and (\(.+\)); distance", gan.output, flags=re.MULTILINE)
    assert found, gan.output
    critic, generator = (ast.literal_eval(sizes) for sizes in found.groups())
    assert sum(critic) == sum(generator) == 256
    assert 1 < len(critic) < len(generator)
