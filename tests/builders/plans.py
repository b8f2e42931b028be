"""A plan as ``fit`` makes it, from numbers."""

from __future__ import annotations

from autobatch.plan import Plan
from autobatch.planning.curve import fit_curve
from autobatch.planning.planner import balance
from autobatch.records import DeviceInfo, Trial

GIB = 2**30


L4 = DeviceInfo(kind="cuda", name="NVIDIA L4", total_bytes=24 * GIB)


def make_trial(size, peak=None, outcome="fits"):
    """A trial on memory of 1 GiB and 0.4 GiB a sample."""
    peak = GIB + size * GIB * 2 // 5 if peak is None else peak
    return Trial(micro_batch_size=size, outcome=outcome, peak_allocated=peak, peak_reserved=peak, seconds=0.1 * size)


def make_plan(target=256, size=43, world_size=1, **changes):
    """A plan as the contract's example shows one."""
    trials = (make_trial(2), make_trial(21), make_trial(size))
    sizes = balance(-(-target // world_size), size)
    fields = {
        "target_batch": target,
        "world_size": world_size,
        "micro_batch_size": max(sizes),
        "micro_batch_sizes": sizes,
        "accumulation_steps": len(sizes),
        "budget_bytes": int(21.6 * GIB),
        "headroom_bytes": GIB,
        "peak_bytes": int(18.7 * GIB),
        "curve": fit_curve(trials),
        "trials": trials,
        "device": L4,
        "seconds": 1.2,
        "version": "0.1.0",
    }
    return Plan(**{**fields, **changes})


def make_rank_plan(target, size, rank, world_size, **changes):
    """One rank's plan of an even division, on memory in which every size fits."""
    from autobatch.planning.shares import share_target

    shares = share_target(target, "equal", [1.0] * world_size)
    sizes = balance(shares[rank], size)
    return make_plan(
        target,
        size,
        world_size,
        micro_batch_size=max(sizes),
        micro_batch_sizes=sizes,
        accumulation_steps=len(sizes),
        rank=rank,
        shares=shares,
        budget_bytes=1000,
        headroom_bytes=0,
        peak_bytes=10 + max(sizes),
        curve=None,
        trials=(),
        device=DeviceInfo(kind="cpu", name="CPU", total_bytes=1000),
        **changes,
    )
