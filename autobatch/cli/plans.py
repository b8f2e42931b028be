"""``autobatch plans``: what was kept, a line each.

Covers the list. Does not cover one plan's story (``show``, ``report``) nor how plans are kept (``ledger``). Nothing
here imports torch.
"""

from __future__ import annotations

import argparse
import time

from autobatch._formatting import format_bytes, plural
from autobatch.cli.ledger_access import open_store
from autobatch.cli.output import Answer, read_count
from autobatch.events.run_history import Run
from autobatch.plan import Plan

__all__ = ["configure", "run"]


def configure(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.add_argument("--model", metavar="TEXT", help="only those whose model's class has this in its name")
    command.add_argument("--device", metavar="TEXT", help="only those for a device with this in its name")
    command.add_argument("--limit", type=read_count, default=20, metavar="N", help="at most so many (20)")


def run(options: argparse.Namespace) -> Answer:
    """Read the ledger, the newest first."""
    with open_store() as store:
        found = [(plan, store.runs_of(plan.id)) for plan in store.plans(options.model, options.device, options.limit)]
    data = [{"plan": plan, "runs": runs} for plan, runs in found]
    if not found:
        return Answer("no such plan is kept; autobatch fit MODULE:FUNCTION --target N makes one", data)
    head = f"{'id':<13} {'made':<17} {'model':<20} {'device':<20} {'plan':<18} {'peak':>10}  runs"
    more = [f"the newest {len(found)}; --limit shows more"] if len(found) == options.limit else []
    return Answer("\n".join([head, *(_show(plan, runs) for plan, runs in found), *more]), data)


def _show(plan: Plan, runs: list[Run]) -> str:
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(plan.made_at))
    division = f"{plan.target_batch} = {plan.accumulation_steps} x {plan.micro_batch_size}"
    peak = format_bytes(plan.peak_bytes) if plan.peak_bytes else "-"
    steps, retries = sum(run.steps for run in runs), sum(run.retries for run in runs)
    went = f"{len(runs)}: {plural(steps, 'step')}, {plural(retries, 'retry', 'retries')}" if runs else "none"
    if runs and runs[0].outcome == "running":  # perhaps killed: what it did since then is not known
        went += f", last heard of {time.strftime('%Y-%m-%d %H:%M', time.localtime(runs[0].last_seen_at))}"
    return (
        f"{plan.id:<13} {made:<17} {_cut(plan.model, 20):<20} {_cut(plan.device.name, 20):<20} {division:<18} "
        f"{peak:>10}  {went}"
    )


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
