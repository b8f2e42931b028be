"""Plants each bug by itself and runs the tests that must find it: ``make bugs``, or with words of some bugs' names."""
# ruff: noqa: T201 - a script: it talks to a person

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from planted_bugs import NAME_IN_ENVIRONMENT, Bug, all_bugs, find

ROOT = Path(__file__).parents[2]
AT_ONCE = 3  # ranks wait for each other: on two cores a third process has time

_IMPORTING = Lock()  # two threads that import modules of one package at once can deadlock


def run_tests(tests: Sequence[str], *options: str, bug: str = "") -> subprocess.CompletedProcess[str]:
    """Run tests with a bug planted; one seed, so that a bug is found in each run or in none."""
    paths = [ROOT, ROOT / "tests", ROOT / "tests" / "builders"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), NAME_IN_ENVIRONMENT: bug}
    command = [sys.executable, "-m", "pytest", "-p", "planted_bugs.plugin", "-q"]
    command += ["-p", "no:cacheprovider", "--randomly-seed=0", *options, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def try_bug(bug: Bug) -> bool:
    """Return whether a test finds the bug, and print which one."""
    started, found_by = time.perf_counter(), ""
    try:
        with _IMPORTING:
            find(bug)
    except (LookupError, ImportError) as error:
        reason = str(error)
    else:
        done = run_tests(bug.tests, "-x", "--timeout=60", bug=bug.name)
        failed = re.search(r"^FAILED \S*?(tests/\S+)", done.stdout, re.MULTILINE)
        # 1: tests were run and some failed. Anything else, such as an import error, would be no proof.
        found_by = failed[1] if failed is not None and done.returncode == 1 else ""
        reason = f"pytest ended with {done.returncode}"
    state = "found    " if found_by else "NOT FOUND"
    print(f"{state} {bug.name}: {found_by or reason}, {time.perf_counter() - started:.1f} s", flush=True)
    return bool(found_by)


def main(words: Sequence[str]) -> int:
    """Try all bugs, or those whose names contain all words; return 1 if one is not found, 2 if there is none."""
    bugs = [bug for bug in all_bugs() if all(word in bug.name for word in words)]
    if not bugs:
        print(f"no planted bug has all of these words in its name: {' '.join(words)}")
        return 2
    tests = sorted({test for bug in bugs for test in bug.tests})
    done = run_tests(tests, f"--numprocesses={AT_ONCE}", "--dist=loadfile")
    if done.returncode != 0:
        print(done.stdout[-3000:] + done.stderr[-1000:])
        print("the tests fail without a planted bug")
        return 1
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = sum(pool.map(try_bug, bugs))
    print(f"{found} of {len(bugs)} planted bugs are found")
    return 0 if found == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
