"""A plan as ``fit`` makes it, from numbers."""

from __future__ import annotations

from autobatch.plan import Plan
from autobatch.planning.curve import fit_curve
from autobatch.planning.division import balance
from autobatch.planning.plan_record import RankPlan
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


SMALL = {
    "budget_bytes": 1000,
    "headroom_bytes": 0,
    "peak_bytes": 20,
    "curve": None,
    "trials": (),
    "device": DeviceInfo(kind="cpu", name="CPU", total_bytes=1000),
}
"""Of a plan on a substitute for a device on which every size fits."""


def make_rank_plans(shares, size=43, **changes):
    """The plans of ranks that share a target so, by rank."""
    sizes = [balance(share, size) for share in shares]
    return [
        make_plan(
            target=sum(shares),
            world_size=len(shares),
            rank=rank,
            shares=shares,
            micro_batch_size=max(parts),
            micro_batch_sizes=parts,
            accumulation_steps=len(parts),
            **changes,
        )
        for rank, parts in enumerate(sizes)
    ]


def describe_ranks(plans, seconds, hosts=("here",)):
    """What each of these ranks' plans says of itself; ``hosts`` are given out in turn."""
    return tuple(
        RankPlan(
            rank=plan.rank,
            plan_id=plan.id,
            host=hosts[plan.rank % len(hosts)],
            device=plan.device.name,
            share=sum(plan.micro_batch_sizes),
            micro_batch_size=plan.micro_batch_size,
            accumulation_steps=plan.accumulation_steps,
            peak_bytes=plan.peak_bytes,
            budget_bytes=plan.budget_bytes,
            seconds=taken,
        )
        for plan, taken in zip(plans, seconds, strict=True)
    )


def make_whole_plans(shares, seconds, size=43, hosts=("here",), **changes):
    """The plans of ranks that know of each other, by rank; their ids are ``a0``, ``a1``..."""
    plans = [plan.model_copy(update={"id": f"a{plan.rank}"}) for plan in make_rank_plans(shares, size, **changes)]
    ranks = describe_ranks(plans, seconds, hosts)
    return [Plan(**{**dict(plan), "ranks": ranks}) for plan in plans]
