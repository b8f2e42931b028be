"""Writes the chapter "On CUDA's allocator" of the page of results: the search, what is reserved, workspaces.

    python benchmarks/card.py [--output FILE]

Covers what needs torch's CUDA build and a card, or what stands in for one (tests/card/run). Does not cover time on a
card: what is timed are cuDNN's answers, on the host.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import card_memory
import card_search
import card_workspaces
import torch
from machine import describe_card, describe_machine, is_simulated
from tables import show_goals, write_part

__all__ = ["write_chapter"]

_PAGE = Path(__file__).resolve().with_name("RESULTS.md")


def write_chapter() -> str:
    """All tables, measured now."""
    tables = [card_search.measure(), card_memory.measure(), card_workspaces.measure()]
    nothing = ", which computes nothing (`tests/card`)" if is_simulated() else ""
    where = (
        f"Measured by `python benchmarks/card.py` with torch {torch.__version__}, whose own caching allocator runs "
        f"here, on {describe_card(torch.cuda.get_device_name())}{nothing}. Machine: {describe_machine()}."
    )
    lines = [
        f"# On CUDA's allocator{', with a simulated card' if is_simulated() else ''}",
        where,
        show_goals(tables),
        *(str(table).rstrip() for table in tables),
    ]
    return "\n\n".join(lines) + "\n"


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=_PAGE)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as home:  # no plan is remembered from earlier
        os.environ["AUTOBATCH_HOME"] = home
        write_part(output, "card", write_chapter())
    print(f"written to {output}")


if __name__ == "__main__":
    _main()
