"""Compares two plans, as data and in words."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from autobatch._formatting import format_bytes, plural
from autobatch.planning.plan_record import PlanRecord, RankPlan
from autobatch.report.breakdown import held_bytes


def diff_plans_data(a: PlanRecord, b: PlanRecord) -> dict[str, Any]:
    """Return the differences from ``a`` to ``b`` for JSON: lists of fields, tried sizes and points of the curve.

    Nested fields have their path, such as ``device.name``. A size that was not tried is ``None``. The curve has no
    points if one plan has none, and ``same_workload`` is ``None`` if one has no fingerprint.
    """
    return {
        "same_workload": a.fingerprint == b.fingerprint if a.fingerprint and b.fingerprint else None,
        "fields": _differences("field", *(dict(_flatten(_comparable_fields(plan))) for plan in (a, b))),
        "trials": sorted(_differences("size", _trial_facts(a), _trial_facts(b)), key=itemgetter("size")),
        "curve": _differences("samples", *_curve_points(a, b)),
    }


def diff_plans(a: PlanRecord, b: PlanRecord, width: int = 80) -> str:
    """Return the differences from ``a`` to ``b`` in lines of at most so many columns, without a last newline."""
    data = diff_plans_data(a, b)
    lines = [
        *map(_field_line, data["fields"]),
        *(f"trial of {plural(entry['size'], 'sample')}: {_change(entry, _say_trial)}" for entry in data["trials"]),
        *(f"curve at {plural(entry['samples'], 'sample')}: {_change(entry, format_bytes)}" for entry in data["curve"]),
    ] or ["nothing else differs"]
    lines = [_WORKLOADS[data["same_workload"]], *lines]
    return "\n".join(textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


_WORKLOADS = {
    True: "the same workload on the same software and device",
    False: "not the same workload, software or device: their fingerprints differ",
    None: "not known whether this is the same workload: a fingerprint is missing",
}

_WHOLE = {"batch_lists", "batch_dims", "verdict"}
"""Fields that are compared as a whole."""

_NOT_FIELDS = {"trials", "curve", "ranks"} | {"id", "made_at", "seconds", "confirms"}
"""Fields that are compared in another way, or that differ between any two plans."""


def _differences(name: str, a: dict[Any, Any], b: dict[Any, Any]) -> list[dict[str, Any]]:
    return [{name: key, "a": a.get(key), "b": b.get(key)} for key in {**a, **b} if a.get(key) != b.get(key)]


def _comparable_fields(plan: PlanRecord) -> dict[str, Any]:
    fields = plan.model_dump(mode="json", exclude=_NOT_FIELDS)
    if plan.verdict is not None:  # what was found, and not how long it took and to which decimal
        found = plan.verdict
        fields["verdict"] = found.unchecked or ("exact" if found.exact else f"not exact: {'; '.join(found.causes)}")
    fields["ranks"] = [_say_rank(one) for one in plan.ranks]
    return fields


def _say_rank(one: RankPlan) -> str:
    """Return a rank's text without its time and its plan's id, which always differ."""
    sizes = f"{one.share} = {one.accumulation_steps} x {one.micro_batch_size}"
    peak = f"{format_bytes(one.peak_bytes)} of {format_bytes(one.budget_bytes)}"
    return f"rank {one.rank}: {sizes} on {one.device} of {one.host}, {peak}"


def _flatten(fields: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and name not in _WHOLE:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _trial_facts(plan: PlanRecord) -> dict[int, dict[str, Any]]:
    """Return the last attempt at each size, without times, which always differ."""
    return {
        trial.micro_batch_size: {
            "outcome": trial.outcome,
            "peak_bytes": held_bytes(trial),
            "alloc_retries": trial.alloc_retries,
        }
        for trial in plan.longest_trials
    }


def _curve_points(a: PlanRecord, b: PlanRecord) -> Iterator[dict[int, int]]:
    sizes = sorted({1, *(size for plan in (a, b) for size in (plan.micro_batch_size, sum(plan.micro_batch_sizes)))})
    for curve in (a.curve, b.curve):
        yield {size: curve.peak_reserved(size) for size in sizes} if curve and a.curve and b.curve else {}


def _field_line(entry: dict[str, Any]) -> str:
    field = entry["field"]
    say = _SPECIAL.get(field) or (format_bytes if field.endswith("_bytes") else _say)
    return f"{_NAMES.get(field) or field.replace('.', ' ').replace('_', ' ')}: {_change(entry, say)}"


def _change(entry: dict[str, Any], say: Callable[[Any], str]) -> str:
    before, after = entry["a"], entry["b"]
    first, second = ("none" if value in (None, "", [], {}) else say(value) for value in (before, after))
    grown = f" ({after / before - 1:+.1%})" if say is format_bytes and before and after and before != after else ""
    return f"{first} -> {second}{grown}"


def _say(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def _say_sizes(sizes: list[int]) -> str:
    return ", ".join(f"{count} x {size}" for size, count in Counter(sizes).items())


def _say_tenants(tenants: list[dict[str, Any]]) -> str:
    return ", ".join(f"process {tenant['pid']} with {format_bytes(tenant['used_bytes'])}" for tenant in tenants)


def _say_trial(trial: dict[str, Any]) -> str:
    retries = plural(trial["alloc_retries"], "allocator retry", "allocator retries")
    peak = f" with {format_bytes(trial['peak_bytes'])}" if trial["peak_bytes"] else ""
    return f"{trial['outcome']}{peak}{f' after {retries}' if trial['alloc_retries'] else ''}"


_NAMES = {
    "micro_batch_size": "micro-batch size",
    "micro_batch_sizes": "micro-batches",
    "budget_bytes": "budget",
    "headroom_bytes": "headroom",
    "peak_bytes": "peak",
    "device.name": "device",
    "device.total_bytes": "device's memory",
    "state_bytes": "optimizer state",
    "trained": "trained numbers",
    "version": "autobatch",
    "searched_bytes": "searched within",
    "verdict": "check",
}

_SPECIAL: dict[str, Callable[[Any], str]] = {"micro_batch_sizes": _say_sizes, "device.tenants": _say_tenants}
