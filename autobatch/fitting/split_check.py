"""Checks whether splitting a step into micro-batches of the size that was found is exact, and warns or raises.

Does not cover the comparison (``exactness``).
"""

from __future__ import annotations

from autobatch.errors import InexactSplit
from autobatch.exactness.updates import check_update
from autobatch.exactness.verification import check_split, check_trimming
from autobatch.fitting.size_search import SizeSearch
from autobatch.records import Verdict
from autobatch.step.batch_norm import warn_of_batch_norms

__all__ = ["Checked", "check_found"]

_NOT_CHECKED = Verdict(
    exact=False,
    relative_error=0.0,
    unchecked="parameters are sharded; run autobatch.verify() on the model in one process, before fully_shard()",
)

Checked = tuple[Verdict | None, tuple[str, ...]]
"""A verdict, ``None`` where nothing was to be checked, and warnings."""


def check_found(found: SizeSearch, target: int, check: str | None) -> Checked:
    """The verdict on the split and its warnings, after the last trial has restored the modules' modes."""
    found.finish(target)
    verdict = None
    if check is not None and target > 1:
        verdict = _NOT_CHECKED if found.shared.are_shared else _compare(found)
    return verdict, _judge(found, verdict, target, strict=check == "raise")


def _compare(found: SizeSearch) -> Verdict:
    target, memory = found.wanted.target_batch, found.memory
    sizes = {"target": target, "size": found.size, "most": found.most_at_once, "smallest": found.smallest}
    found.tell("comparing the gradients of the whole and of its parts")
    with memory.limit(found.wanted.limit_bytes):
        verdict = check_split(found.workload, found.compared, memory, found.samples, **sizes)
        if verdict.exact and found.samples is not None and found.lengths is not None:
            verdict = check_trimming(verdict, found.workload, found.samples, found.lengths, memory)
        if not verdict.exact:
            return verdict
        return check_update(verdict, found.workload, found.compared, memory, found.state)


def _judge(found: SizeSearch, verdict: Verdict | None, target: int, *, strict: bool) -> tuple[str, ...]:
    """Warnings of a split that is not exact or could not be checked, the latter also where only a retry would split.

    With ``strict`` they are raised as ``InexactSplit`` where the plan splits.
    """
    if verdict is None or verdict.exact:
        return ()
    splits = found.size < target
    known: tuple[str, ...] = ()
    if splits and not verdict.unchecked:
        known = (str(verdict),)
    elif splits and found.batch_norms:  # no check is needed to know that these are not exact
        known = (warn_of_batch_norms(found.batch_norms, found.size, target),)
    if strict and splits:
        raise InexactSplit(
            known[0]
            if known
            else f"it could not be checked whether splitting is exact: {verdict.unchecked}; check='warn' plans without"
        )
    return (*known, str(verdict)) if verdict.unchecked else known
