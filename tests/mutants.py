"""Bugs planted on purpose: each must turn a fast test red, or the tests prove less than they say.

A script (``make mutants``). Covers the promises of a training step: what is undone, weighed, kept, and done once; of a
prediction and of a remembered plan. Does not cover planning and memory, whose tests are tables and properties of their
own.
"""
# ruff: noqa: T201 - a script: it talks to a person

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MUTANTS", "Mutant"]

ROOT = Path(__file__).parent.parent

TRANSACTION = "autobatch/accumulation/transaction.py"
PIECES = "autobatch/accumulation/pieces.py"
PROGRESS = "autobatch/accumulation/progress.py"
SHARES = "autobatch/accumulation/shares.py"
UPDATE = "autobatch/update.py"
GRADIENTS = "autobatch/state/gradients.py"
REWIND_POINT = "autobatch/state/rewind_point.py"
RANDOM = "autobatch/state/random_state.py"
STEP = "autobatch/step/workload.py"
LOOP_GUARD = "autobatch/step/loop_guard.py"

RECOLLECTION = "autobatch/planning/recollection.py"
SEARCH = "autobatch/size_search.py"
KEEPING = "autobatch/ledger/keeping.py"
STORE = "autobatch/ledger/store.py"
PREDICTION = "autobatch/prediction/"

ACCUMULATION_TESTS = ("tests/test_accumulation.py",)
RUNNER_TESTS = ("tests/test_runner.py",)
FAULT_TESTS = ("tests/test_faults.py",)
LOOP_GUARD_TESTS = ("tests/test_loop_guard.py",)


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    Attributes:
        name: What is wrong with it.
        file: Where, from the root of the repository.
        old: Text that occurs exactly once in it.
        new: What stands there instead.
        tests: The files of which one test must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ACCUMULATION_TESTS


MUTANTS = (
    Mutant("no dirty check", TRANSACTION, "if stamps.unchanged() and self._holds(here):", "if self._holds(here):"),
    Mutant(
        "a piece is kept that drew from NumPy", REWIND_POINT, "self._is_whole or self.random.host.is_current()", "True"
    ),
    Mutant("generators are not restored", REWIND_POINT, "        self.random.restore()\n", ""),
    Mutant("buffers are not restored", REWIND_POINT, "                buffer.copy_(value)\n", "                pass\n"),
    Mutant(
        "NumPy's generator is forgotten",
        RANDOM,
        '            sys.modules["numpy.random"].set_state(self.numpy)\n',
        "            pass\n",
        ("tests/test_random_state.py", *ACCUMULATION_TESTS),
    ),
    Mutant(
        "weigh is ignored",
        STEP,
        "        if self.weigh is None:\n",
        "        if True:\n",
    ),
    Mutant("gradients are not cleared on a restart", TRANSACTION, "                stamps.clear()\n", ""),
    Mutant(
        "the loss of a failed attempt is kept",
        PROGRESS,
        "        self.loss, self.counted, self.unit = None, 0.0, None\n",
        "",
        (*RUNNER_TESTS, *FAULT_TESTS),
    ),
    Mutant("a piece that counts for nothing is run", TRANSACTION, "        if not piece.counts:", "        if False:"),
    Mutant("earlier gradients are lost", TRANSACTION, "            aside.add()\n", ""),
    Mutant(
        "earlier gradients are not put back",
        GRADIENTS,
        "            parameter.grad = gradient\n",
        "            pass\n",
    ),
    Mutant(
        "a batch may be written into",
        TRANSACTION,
        "        if [tensor._version for tensor in tensors] != versions:",
        "        if False:",
    ),
    Mutant(
        "each micro-batch weighs the same",
        SHARES,
        "term.divide(piece.weights[name], self.weights[name])",
        "term.divide(piece.size, piece.size * -(-self.samples // piece.size))",
    ),
    Mutant(
        "the last piece is dropped",
        PIECES,
        "        start += size\n    return pieces\n",
        "        start += size\n    return pieces[:-1] or pieces\n",
    ),
    Mutant("weights need not add up", TRANSACTION, "        check_additive(progress.todo, smaller)\n", ""),
    Mutant(
        "the scaler is updated twice",
        UPDATE,
        "        self.scaler.update()\n",
        "        self.scaler.update()\n        self.scaler.update()\n",
        RUNNER_TESTS,
    ),
    Mutant(
        "the scheduler steps when the optimizer did not",
        UPDATE,
        "self.scheduler is not None and (self.scaler is None or self.scaler.get_scale() >= scale)",
        "self.scheduler is not None",
        RUNNER_TESTS,
    ),
    Mutant(
        "the optimizer steps twice",
        UPDATE,
        "            self.optimizer.step()\n",
        "            self.optimizer.step()\n            self.optimizer.step()\n",
        RUNNER_TESTS,
    ),
    Mutant(
        "each micro-batch is clipped",
        TRANSACTION,
        "        progress.finish(piece.size, share, output.aux)\n",
        "        torch.nn.utils.clip_grad_norm_(self.workload.parameters(), 0.1)\n"
        "        progress.finish(piece.size, share, output.aux)\n",
    ),
    Mutant(
        "gradients are clipped before they are unscaled",
        UPDATE,
        "self.scaler.unscale_(self.optimizer)",
        "nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]['params'], self.max_grad_norm or 1e9)",
        RUNNER_TESTS,
    ),
    Mutant(
        "a term of the step counts by samples",
        SHARES,
        "term.multiply(self._part_of(piece))",
        "term.multiply(piece.size / self.samples)",
        ("tests/test_shares.py",),
    ),
    Mutant(
        "a buffer stays where it was put",
        REWIND_POINT,
        "                buffer.data = alias\n",
        "                pass\n",
        ("tests/test_rewind_point.py", *ACCUMULATION_TESTS),
    ),
    Mutant(
        "an update's gradients come back after it",
        GRADIENTS,
        "self._gradients, self._is_spent, self.is_final = without, True, True",
        "self._is_spent, self.is_final = True, True",
        RUNNER_TESTS,
    ),
    Mutant(
        "an update is never past the turn",
        TRANSACTION,
        "            aside.spend()\n",
        "",
        RUNNER_TESTS,
    ),
    Mutant(
        "parameters that nobody knows are trained",
        TRANSACTION,
        "                self.workload.check_leaves(share.loss)\n",
        "",
    ),
    Mutant("a batch's graph is cut in silence", TRANSACTION, "            refuse_graphs(tensors)\n", ""),
    Mutant(
        "autocast keeps old weights",
        UPDATE,
        "            torch.clear_autocast_cache()\n",
        "            pass\n",
        RUNNER_TESTS,
    ),
    Mutant(
        "state made for an undone update stays",
        UPDATE,
        "                forget_state(self.optimizer, made)\n",
        "                pass\n",
        FAULT_TESTS,
    ),
    Mutant(
        "a remembered plan may need more than there is",
        RECOLLECTION,
        "    if plan.peak_bytes > limit:",
        "    if False:",
        ("tests/test_recollection.py",),
    ),
    Mutant(
        "a remembered plan may answer another question",
        RECOLLECTION,
        "if not plan.predicted and _asks_the_same(plan, wanted)]",
        "if not plan.predicted]",
        ("tests/test_recollection.py",),
    ),
    Mutant(
        "a trial that differs confirms a plan",
        SEARCH,
        "return [trial], None if changed else plan",
        "return [trial], plan",
        ("tests/test_reuse.py",),
    ),
    Mutant(
        "a forked child writes its parent's run",
        KEEPING,
        "if self._over or os.getpid() != self._pid or self._run is None:",
        "if self._over or self._run is None:",
        ("tests/test_ledger_keeping.py",),
    ),
    Mutant(
        "what is written is not committed",
        STORE,
        '            self._connection.execute("COMMIT")\n',
        '            self._connection.execute("ROLLBACK")\n',
        ("tests/test_ledger_store.py",),
    ),
    Mutant(
        "a prediction forgets the margin",
        f"{PREDICTION}sizing.py",
        "int(gpu.total_bytes / (1 + margin))",
        "gpu.total_bytes",
        ("tests/test_sizing.py", "tests/test_prediction.py"),
    ),
    Mutant(
        "freed neighbours are not merged",
        f"{PREDICTION}allocator/block_pool.py",
        "        before = self._ending.pop(start, 0)\n",
        "        before = 0\n",
        ("tests/test_allocator.py",),
    ),
    Mutant(
        "one cuBLAS workspace instead of two",
        f"{PREDICTION}estimate.py",
        "_HANDLES = 2\n",
        "_HANDLES = 1\n",
        ("tests/test_estimate.py",),
    ),
    Mutant(
        "sizes grow from another sample on",
        f"{PREDICTION}timeline.py",
        "size - slope * first.samples for",
        "size - slope * (first.samples - 1) for",
        ("tests/test_timeline.py",),
    ),
    Mutant(
        "what lies beyond the largest trace is judged",
        f"{PREDICTION}estimate.py",
        "return self.timeline.traced[-1].samples if self.timeline.interpolated else None",
        "return None",
        ("tests/test_sizing.py", "tests/test_estimate.py"),
    ),
    Mutant(
        "half an optimizer's state is left to the next trial",
        "autobatch/probe.py",
        "                self.state.reset_optimizer()\n",
        "",
        ("tests/test_fitting.py",),
    ),
    Mutant(
        "a plan that runs is deleted",
        STORE,
        "WHERE NOT EXISTS (SELECT 1 FROM runs WHERE plan_id = plans.id) AND rowid IN ",
        "WHERE rowid IN ",
        ("tests/test_ledger_store.py",),
    ),
    Mutant(
        "a smaller plan hides a better one",
        RECOLLECTION,
        "plan.micro_batch_size if fewest_steps else 0",
        "0",
        ("tests/test_recollection.py",),
    ),
    Mutant(
        "a backward pass inside the step is not noticed",
        LOOP_GUARD,
        "            _watch_gradients(stack, watched, refused)\n",
        "",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "a step may step an optimizer that it holds",
        LOOP_GUARD,
        "_is_optimizer(v) and _holds_any(v, known)",
        "False",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "an optimizer inside a wrapper may be stepped",
        LOOP_GUARD,
        "    yield from vars(value).values()\n",
        "    yield from ()\n",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "a refusal that the step caught is forgotten",
        LOOP_GUARD,
        "        if refused:\n            raise InvalidStep(refused[0])\n",
        "",
        LOOP_GUARD_TESTS,
    ),
    Mutant(
        "a prediction that knows no larger size ends a search",
        "autobatch/planning/search.py",
        "    if question.expects_no_more and 0 <",
        "    if 0 <",
        ("tests/test_expecting.py",),
    ),
    Mutant(
        "a prediction spares the trial of a size whatever was measured",
        "autobatch/planning/search.py",
        "    if line.reach(question.limit_bytes) >= following:\n        return False\n",
        "",
        ("tests/test_expecting.py",),
    ),
)


def copy_sources(folder: Path) -> None:
    """Package, tests and what pytest reads, to a folder of their own."""
    for name in ("autobatch", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(folder: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The fast tests of these files, on the package in the folder, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    # CI: the same examples are drawn each time, so that a bug is found in each run or in none.
    environment = {**os.environ, "PYTHONPATH": str(folder), "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def try_mutant(mutant: Mutant) -> bool:
    """Plant one bug, and print which test finds it; returns whether one does."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        path = folder / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            print(f"STALE     {mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.file}")
            return False
        path.write_text(text.replace(mutant.old, mutant.new))
        done = run_tests(folder, mutant.tests)
    failed = re.search(r"^FAILED \S*?(tests/\S+)", done.stdout, re.MULTILINE)
    # 1: tests were run and some failed. Anything else, such as an import error, would be no proof.
    killed = done.returncode == 1 and failed is not None
    by = failed[1] if failed else f"pytest ended with {done.returncode}"
    print(
        f"{'killed   ' if killed else 'SURVIVED '} {mutant.name}: {by}, {time.perf_counter() - started:.1f} s",
        flush=True,
    )
    return killed


def main() -> int:
    """All mutants, or those whose name contains the argument; 1 if any survives."""
    wanted = [mutant for mutant in MUTANTS if all(word in mutant.name for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as name:
        copy_sources(Path(name))
        done = run_tests(Path(name), sorted({test for mutant in wanted for test in mutant.tests}))
    if done.returncode != 0:
        print(done.stdout[-3000:] + done.stderr[-1000:])
        print("the tests fail without any planted bug")
        return 1
    killed = sum([try_mutant(mutant) for mutant in wanted])
    print(f"{killed} of {len(wanted)} planted bugs are found")
    return 0 if killed == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
