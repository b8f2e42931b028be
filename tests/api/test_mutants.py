"""The list of planted bugs: each fits the present source. That tests find them is ``make mutants``."""

from __future__ import annotations

import builtins
import symtable

import pytest
from mutants import MUTANTS, ROOT


def unbound(text):
    """Names that a module reads and that are bound nowhere in it."""
    module = symtable.symtable(text, "module", "exec")
    tables = [module]
    for table in tables:
        tables += table.get_children()
    read = {
        name.get_name()
        for table in tables
        for name in table.get_symbols()
        if name.is_referenced() and (name.is_global() or table is module)
    }
    bound = {name.get_name() for name in module.get_symbols() if name.is_assigned() or name.is_imported()}
    return read - bound - vars(builtins).keys() - {"__file__", "__name__"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_fits_the_source(mutant):
    """Its text occurs exactly once, what comes instead is other Python, and its tests are there."""
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    changed = text.replace(mutant.old, mutant.new)
    assert changed != text
    compile(changed, mutant.file, "exec")
    assert unbound(changed) == set(), "a NameError would turn any test red"
    assert all((ROOT / test).is_file() for test in mutant.tests)


def test_each_planted_bug_has_its_own_name():
    """The name is what a person reads."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 14
