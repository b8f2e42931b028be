"""Lists, shows, compares and deletes stored plans: ``autobatch plans``, ``show``, ``diff``, ``report`` and ``forget``.

Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from autobatch._formatting import format_bytes, plural, show_value
from autobatch.cli.output import DONE, NO, Answer, Table, check_folder, refusals_of, text_width
from autobatch.errors import InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger.ledger import find_home, is_enabled
from autobatch.ledger.store import PlanHead, Store, read_plans, runs_id
from autobatch.plan import Plan
from autobatch.report.difference import diff_plans, diff_plans_data
from autobatch.report.text import show_plan

_DAY_S = 24 * 60 * 60


def list_plans(model: str | None, device: str | None, limit: int) -> Answer:
    with open_store() as store:
        groups = _group(store.heads(model, device))
        shown = []
        for group in groups[:limit]:
            for plan in islice(read_plans(path for path, _ in group), 1):  # the newest that can be read
                ids = [head.id for _, head in group]
                shown.append((plan, ids, [run for one in ids for run in store.runs_of(one)]))
    data = [
        {"plan": plan, "earlier": [one for one in ids if one != plan.id], "runs": runs} for plan, ids, runs in shown
    ]
    if not data:
        return Answer(["no such plan is stored; autobatch fit MODULE:FUNCTION --target N makes one"], data)
    headings = ("id", "made", "model", "device", "plan", "peak", "confirmed", "runs")
    more = [f"the newest {limit} of {len(groups)}; --limit shows more"] if len(groups) > limit else []
    rows = [_plan_row(plan, len(ids) - 1, runs) for plan, ids, runs in shown]
    return Answer([Table(rows, headings, right={5}), *more], data)


def _group(found: Iterable[tuple[str, PlanHead]]) -> list[list[tuple[str, PlanHead]]]:
    """Join each plan, the newest first, with the plans that it confirms."""
    groups: list[list[tuple[str, PlanHead]]] = []
    group_of: dict[str, list[tuple[str, PlanHead]]] = {}
    for path, head in found:
        group = group_of.get(head.id) or group_of.get(head.confirms)
        if group is None:
            groups.append(group := [])
        group.append((path, head))
        if head.confirms:
            group_of[head.confirms] = group
    return groups


def _plan_row(plan: Plan, times: int, runs: Sequence[Run]) -> Sequence[str]:
    division = f"{plan.target_batch} = {plan.accumulation_steps} x {plan.micro_batch_size}"
    if plan.world_size > 1:
        division = f"{plan.target_batch} on {plan.world_size} ranks"
    peak_bytes = max((one.peak_bytes for one in plan.ranks), default=plan.peak_bytes)
    peak = format_bytes(peak_bytes) if peak_bytes else "-"
    confirmed = f"{times} x" if times else "-"
    steps, retries = sum(run.steps for run in runs), sum(run.retries for run in runs)
    went = f"{len(runs)}: {plural(steps, 'step')}, {plural(retries, 'retry', 'retries')}" if runs else "none"
    if runs and runs[0].outcome == "running":  # perhaps killed
        went += f", last written {_format_date(runs[0].last_seen_at)}"
    return plan.id, _format_date(plan.made_at), plan.model, plan.device.name, division, peak, confirmed, went


def _format_date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def show_stored(name: str) -> Answer:
    plan, runs = _find_plan(name)
    return Answer([show_plan(plan, runs, text_width())], {"plan": plan, "runs": runs})


def compare(first: str, second: str) -> Answer:
    (a, _), (b, _) = _find_plan(first), _find_plan(second)
    data = diff_plans_data(a, b)
    differ = data["fields"] or data["trials"] or data["curve"]
    return Answer([diff_plans(a, b, text_width())], data, NO if differ else DONE)


def write_report(name: str, output: str | None) -> Answer:
    from autobatch.report.html import render_report  # noqa: PLC0415 - no other command needs the templates

    if output != "-":
        check_folder("--output", output)
    plan, runs = _find_plan(name)
    page = render_report(plan, runs)
    if output == "-":
        return Answer([page], {"page": page})
    path = Path(output or f"autobatch-{plan.id or Path(name).stem}.html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--output {path} cannot be written: {error}") from error
    return Answer([f"written to {path}"], {"written": str(path.absolute())})


def delete(ids: Sequence[str], days: float | None, *, everything: bool) -> Answer:
    if bool(ids) + (days is not None) + everything != 1:
        raise InvalidArgument("forget takes ids, --older-than DAYS or --all: one of them")
    if days is not None and not (math.isfinite(days) and days > 0):
        raise InvalidArgument(f"--older-than {days:g} must be a number of days above 0")
    seconds = None if days is None else days * _DAY_S
    with open_store() as store:
        count = store.forget(ids or None, older_than_seconds=seconds, everything=everything)
    return Answer([f"{plural(count, 'plan')} forgotten"], {"forgotten": count})


@contextmanager
def open_store() -> Iterator[Store]:
    """Yield the ledger's files.

    Raises:
        InvalidArgument: The ledger is turned off, or its folder cannot be used.
    """
    if not is_enabled():
        raise InvalidArgument("plans are not stored: AUTOBATCH_LEDGER turns the ledger off; unset it")
    try:
        home = find_home()
    except OSError as error:
        raise InvalidArgument(str(error)) from error
    try:
        with suppress(FileNotFoundError):  # nothing is stored yet
            os.scandir(home).close()
        yield Store(home)
    except OSError as error:
        raise InvalidArgument(
            f"the ledger in {home} cannot be used ({type(error).__name__}: {error}); AUTOBATCH_HOME moves it"
        ) from error


def find_fault() -> tuple[str, str]:
    """Return where plans are stored, empty if they are not, and why they cannot be, empty if they can."""
    if not is_enabled():
        return "", ""
    home = ""
    try:
        home = str(find_home())
        with open_store() as store:
            store.check_writable()
    except (OSError, InvalidArgument) as error:
        return home or "no folder", str(error)
    return home, ""


def _find_plan(name: str) -> tuple[Plan, list[Run]]:
    """Return a plan and its stored runs, oldest first, by the beginning of its id or by a file of ``Plan.save``."""
    if not name.strip():
        raise InvalidArgument(
            f"{name!r} names no plan: pass the beginning of a plan's id, or a file that Plan.save wrote"
        )
    path = Path(name)
    with refusals_of(show_value(name)):
        is_folder = path.is_dir()
        is_file = path.exists() and not is_folder  # or a pipe, such as /dev/stdin
        plan = Plan.load(name) if is_file else None
    if plan is not None:
        try:
            with open_store() as store:
                return plan, store.runs_of(runs_id(plan))[::-1]
        except InvalidArgument:  # the plan itself could be read, and that was asked for
            return plan, []
    if is_folder or name.endswith(".json"):
        fault = f"{name} is a folder" if is_folder else f"no file {name}"
        raise InvalidArgument(f"{fault}: name a file that Plan.save wrote, or the beginning of a plan's id")
    with open_store() as store:
        plan = store.find_plan(name)
        return plan, store.runs_of(runs_id(plan))[::-1]
