"""Lists, shows, compares and deletes stored plans: ``autobatch plans``, ``show``, ``diff``, ``report`` and ``forget``.

Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import math
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autobatch._formatting import format_bytes, plural, show_value
from autobatch.cli.output import DONE, NO, Answer, check_folder, find_kind, read_count, refusals_of
from autobatch.errors import AutobatchError, InvalidArgument
from autobatch.events.run_history import Run
from autobatch.ledger.home import find_home, is_enabled
from autobatch.ledger.store import Store, runs_id
from autobatch.plan import Plan
from autobatch.report.difference import diff_plans, diff_plans_data
from autobatch.report.text import show_plan

_DAY_S = 24 * 60 * 60


def configure_plans(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("--model", metavar="TEXT", help="only those whose model's class has this in its name")
    command.add_argument("--device", metavar="TEXT", help="only those for a device with this in its name")
    command.add_argument("--limit", type=read_count, default=20, metavar="N", help="at most so many (20)")
    command.set_defaults(run=_list)


def configure_show(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("plan", metavar="ID|FILE", help="the beginning of a plan's id, or a file it was saved to")
    command.set_defaults(run=_show)


def configure_diff(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "What differs between two plans. Exit code 1 if something does."
    command.add_argument("first", metavar="ID|FILE", help="as for show")
    command.add_argument("second", metavar="ID|FILE")
    command.set_defaults(run=_diff)


def configure_report(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("plan", metavar="ID|FILE", help="as for show")
    command.add_argument("-o", "--output", metavar="FILE", help="default: autobatch-ID.html; - is stdout")
    command.set_defaults(run=_report)


def configure_forget(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("plans", nargs="*", metavar="ID", help="the beginnings of their ids")
    command.add_argument("--older-than", type=float, metavar="DAYS", help="all that were not stored or used since")
    command.add_argument("--all", action="store_true", help="everything")
    command.set_defaults(run=_forget)


def _list(options: argparse.Namespace) -> Answer:
    with open_store() as store:
        found = [(plan, store.runs_of(plan.id)) for plan in store.plans(options.model, options.device, options.limit)]
    data = [{"plan": plan, "runs": runs} for plan, runs in found]
    if not data:
        return Answer("no such plan is stored; autobatch fit MODULE:FUNCTION --target N makes one", data)
    head = f"{'id':<13} {'made':<17} {'model':<20} {'device':<20} {'plan':<18} {'peak':>10}  runs"
    more = [f"the newest {len(found)}; --limit shows more"] if len(found) == options.limit else []
    return Answer("\n".join([head, *(_summarise(plan, runs) for plan, runs in found), *more]), data)


def _summarise(plan: Plan, runs: list[Run]) -> str:
    division = f"{plan.target_batch} = {plan.accumulation_steps} x {plan.micro_batch_size}"
    if plan.world_size > 1:
        division = f"{plan.target_batch} on {plan.world_size} ranks"
    peak_bytes = max((one.peak_bytes for one in plan.ranks), default=plan.peak_bytes)
    peak = format_bytes(peak_bytes) if peak_bytes else "-"
    steps, retries = sum(run.steps for run in runs), sum(run.retries for run in runs)
    went = f"{len(runs)}: {plural(steps, 'step')}, {plural(retries, 'retry', 'retries')}" if runs else "none"
    if runs and runs[0].outcome == "running":  # perhaps killed
        went += f", last written {_format_date(runs[0].last_seen_at)}"
    return (
        f"{plan.id:<13} {_format_date(plan.made_at):<17} {_cut(plan.model):<20} {_cut(plan.device.name):<20} "
        f"{division:<18} {peak:>10}  {went}"
    )


def _format_date(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _cut(text: str) -> str:
    return text if len(text) <= 20 else f"{text[:17]}..."


def _show(options: argparse.Namespace) -> Answer:
    plan, runs = _find_plan(options.plan)
    return Answer(show_plan(plan, runs), {"plan": plan, "runs": runs})


def _diff(options: argparse.Namespace) -> Answer:
    (first, _), (second, _) = _find_plan(options.first), _find_plan(options.second)
    data = diff_plans_data(first, second)
    differ = data["fields"] or data["trials"] or data["curve"]
    return Answer(diff_plans(first, second), data, NO if differ else DONE)


def _report(options: argparse.Namespace) -> Answer:
    from autobatch.report.html import render_report  # noqa: PLC0415 - no other command needs the templates

    if options.output != "-":
        check_folder("--output", options.output)
    plan, runs = _find_plan(options.plan)
    page = render_report(plan, runs)
    if options.output == "-":
        return Answer(page, {"page": page})
    path = Path(options.output or f"autobatch-{plan.id or Path(options.plan).stem}.html")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--output {path} cannot be written: {error}") from error
    return Answer(f"written to {path}", {"written": str(path.absolute())})


def _forget(options: argparse.Namespace) -> Answer:
    if bool(options.plans) + (options.older_than is not None) + options.all != 1:
        raise InvalidArgument("forget takes ids, --older-than DAYS or --all: one of them")
    days = options.older_than
    if days is not None and not (math.isfinite(days) and days > 0):
        raise InvalidArgument(f"--older-than {days:g} must be a number of days above 0")
    seconds = None if days is None else days * _DAY_S
    with open_store() as store:
        count = store.forget(options.plans or None, older_than_seconds=seconds, everything=options.all)
    return Answer(f"{plural(count, 'plan')} forgotten", {"forgotten": count})


@contextmanager
def open_store() -> Iterator[Store]:
    """Yield the ledger's files.

    Raises:
        InvalidArgument: The ledger is turned off.
        AutobatchError: The folder cannot be used.
    """
    if not is_enabled():
        raise InvalidArgument("plans are not stored: AUTOBATCH_LEDGER turns the ledger off; unset it")
    try:
        home = find_home()
    except OSError as error:
        raise AutobatchError(str(error)) from error
    try:
        yield Store(home)
    except OSError as error:
        raise AutobatchError(
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
    except (OSError, AutobatchError) as error:
        return home or "no folder", str(error)
    return home, ""


def _find_plan(name: str) -> tuple[Plan, list[Run]]:
    """Return a plan and its stored runs, oldest first, by the beginning of its id or by a file of ``Plan.save``."""
    if not name.strip():
        raise InvalidArgument(
            f"{name!r} names no plan: pass the beginning of a plan's id, or a file that Plan.save wrote"
        )
    kind = find_kind(name)
    if kind is not None and kind != stat.S_IFDIR:  # a pipe, such as /dev/stdin, is read as well
        with refusals_of(show_value(name)):
            plan = Plan.load(name)
        try:
            with open_store() as store:
                return plan, store.runs_of(runs_id(plan))[::-1]
        except AutobatchError:  # the plan itself could be read, and that was asked for
            return plan, []
    if name.endswith(".json"):
        raise InvalidArgument(f"no file {name}")
    if kind is not None:
        raise InvalidArgument(f"{name} is a folder: name a file that Plan.save wrote, or the beginning of a plan's id")
    with open_store() as store:
        plan = store.find_plan(name)
        return plan, store.runs_of(runs_id(plan))[::-1]
