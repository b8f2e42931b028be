"""Makes a plan for this machine: the options and the answer of ``autobatch fit``."""

from __future__ import annotations

import argparse
from typing import Any

from autobatch.cli.model_source import KNOWN, add_source, load, take
from autobatch.cli.output import Answer, check_folder, read_count, save_plan
from autobatch.errors import InvalidArgument
from autobatch.fitting.fit import fit

__all__ = ["configure_fit"]


def configure_fit(command: argparse.ArgumentParser) -> None:
    """Add the options."""
    command.description = "Runs a few sizes for real, inside the budget, and plans the target batch."
    add_source(command)
    command.add_argument("--target", type=read_count, metavar="N", help="samples that one optimizer step should see")
    command.add_argument("--budget", metavar="SIZE", help="what the process may hold, such as 8GiB; default: all free")
    command.add_argument("--headroom", metavar="SIZE", help="left free of it: a size, or a fraction such as 0.1")
    command.add_argument("--max-micro-batch", type=read_count, metavar="N", help="never try more samples than this")
    command.add_argument(
        "--objective",
        choices=("throughput", "memory"),
        help="the fewest steps, or the smallest micro-batch within 2 percent of the best rate",
    )
    command.add_argument("--no-reuse", action="store_true", help="search, even if an earlier plan could be confirmed")
    command.add_argument("--explain", action="store_true", help="the whole story instead of one line")
    command.add_argument("--save", metavar="FILE", help="write the plan as JSON")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> Answer:
    check_folder("--save", options.save)
    arguments = take(load(options.source), KNOWN, options.source)
    arguments.update(_read_options(options))
    if "target_batch" not in arguments:
        raise InvalidArgument(f"say --target: {options.source!r} returned no 'target_batch'")
    plan = fit(**arguments)
    if options.save:
        save_plan(plan, options.save)
    lines = [plan.explain()] if options.explain else [str(plan), *(f"! {warning}" for warning in plan.warnings)]
    return Answer("\n".join(lines), plan)


def _read_options(options: argparse.Namespace) -> dict[str, Any]:
    asked = {
        "target_batch": options.target,
        "budget": options.budget,
        "headroom": _read_headroom(options.headroom),
        "max_micro_batch": options.max_micro_batch,
        "objective": options.objective,
        "reuse": False if options.no_reuse else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _read_headroom(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
