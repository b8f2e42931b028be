"""Lists NVIDIA's cards and the host's memory, and which processes use it: ``autobatch devices``.

Does not cover other vendors' cards. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from autobatch._formatting import format_bytes
from autobatch.cli.environment import read_cards
from autobatch.cli.output import Answer
from autobatch.memory.host_limit import HostMemory, read_host_memory
from autobatch.memory.nvml import CardReading

__all__ = ["configure_devices"]


def configure_devices(command: argparse.ArgumentParser) -> None:
    """Describe the command."""
    command.description = "Cards as NVIDIA's driver sees them, and the memory that this container may use."
    command.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> Answer:
    host = read_host_memory()
    cards, missing = read_cards()
    lines = [*_show_cards(cards, missing), _show_host(host)]
    return Answer("\n".join(lines), {"cards": cards, "no_cards_because": missing, "cpu": host})


def _show_cards(cards: tuple[CardReading, ...], missing: str) -> Iterator[str]:
    if not cards:
        yield f"no NVIDIA card: {missing or 'the driver has none'}"
    for card in cards:
        free = f"{format_bytes(card.free_bytes)} free of {format_bytes(card.total_bytes)}"
        slices = ", divided into MIG slices" if card.divided else ""
        yield f"{card.name:<28} {free}{slices}; driver {card.driver or 'unknown'}; {card.uuid}"
        for tenant in card.tenants:
            yield f"  {format_bytes(tenant.used_bytes):>10}   process {tenant.pid} {tenant.name}".rstrip()


def _show_host(host: HostMemory) -> str:
    free = f"{format_bytes(host.available_bytes)} free of {format_bytes(host.total_bytes)}"
    return f"{'CPU':<28} {free}; the limit is the {host.source}'s"
