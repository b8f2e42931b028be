"""The planted bugs fit the package: what each replaces is there. ``make bugs`` checks that tests find them."""

import re
from pathlib import Path

import pytest
from planted_bugs import all_bugs, find

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("bug", all_bugs(), ids=lambda bug: bug.name)
def test_what_a_planted_bug_replaces_is_there(bug):
    """Its target exists and is called as the bug is; its docstring is one line; the tests that find it are there."""
    try:
        find(bug)
    except ModuleNotFoundError as missing:
        pytest.skip(f"needs {missing.name}")
    assert re.fullmatch(r"[^\n]+\.", bug.fault)
    for test in bug.tests:
        file, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text()


def test_the_planted_bugs_are_few_and_have_names():
    """The name is what a person reads; more than this would take too long to try."""
    assert 40 <= len({bug.name for bug in all_bugs()}) == len(all_bugs()) <= 80
