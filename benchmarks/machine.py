"""The machine that a benchmark ran on, in words.

A card that is only simulated (tests/card) is called so wherever its name is written.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["describe_card", "describe_machine", "is_simulated"]


def describe_machine() -> str:
    """Processor, cores this process may use, threads of torch, load of everybody, system."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    return (
        f"{_read_processor()}, {usable} cores, torch on {torch.get_num_threads()} thread(s){load}, {platform.system()}"
    )


def is_simulated() -> bool:
    """Whether the card stands in for a real one and computes nothing (tests/card/run)."""
    return "libcard.so" in os.environ.get("LD_PRELOAD", "")


def describe_card(name: str) -> str:
    """``a simulated A100-SXM4-40GB``, or the name of a card that is there."""
    return f"a simulated {name.removeprefix('NVIDIA ')}" if is_simulated() else name


def _read_processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
