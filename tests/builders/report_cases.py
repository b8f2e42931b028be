"""Plans and runs to report on, and reports read back: what the tests of ``report/`` share."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree import ElementTree as ET

from hypothesis import strategies as st

from autobatch.events.run_history import RankTotal, Run, Setback, StepRange
from autobatch.plan import Plan
from autobatch.planning.curve import fit_curve, ran
from autobatch.planning.division import balance
from autobatch.planning.plan_record import RankPlan
from autobatch.records import DeviceInfo, Tenant, Trial, Verdict

KIB, GIB = 2**10, 2**30
HOSTILE = "</style></pre><script>alert('1')</script>\"&amp;<b onclick='x'>\x00\x1b[31m"


def make_trial(size, allocated, reserved=None, outcome="fits", **fields):
    """A trial whose reserved bytes are its allocated ones unless given."""
    fields = {"seconds": 0.02 + 0.002 * size, "backward_allocated": allocated, **fields}
    reserved = allocated if reserved is None else reserved
    return Trial(micro_batch_size=size, outcome=outcome, peak_allocated=allocated, peak_reserved=reserved, **fields)


def make_plan(trials, size, target, budget, headroom=0, **changes):
    sizes = balance(target, size)
    measured = [trial for trial in trials if ran(trial) and trial.peak_reserved]
    peaks = [trial.peak_reserved for trial in measured if trial.micro_batch_size == max(sizes)]
    fields = {
        "target_batch": target,
        "world_size": 1,
        "micro_batch_size": max(sizes),
        "micro_batch_sizes": sizes,
        "accumulation_steps": len(sizes),
        "budget_bytes": budget,
        "headroom_bytes": headroom,
        "peak_bytes": max(peaks, default=0),
        "curve": fit_curve(measured) if measured else None,
        "trials": tuple(trials),
        "device": DeviceInfo(kind="cuda", name="NVIDIA L4", total_bytes=24 * GIB),
        "version": "0.1.0",
    }
    return Plan(**{**fields, **changes})


def card_plan(**changes):
    """A card with all outcomes, another process, warnings and a verdict."""
    trials = [
        make_trial(2, 33 * GIB // 10, 35 * GIB // 10, resident_bytes=2 * GIB, optimizer_peak=33 * GIB // 10).model_copy(
            update={"backward_allocated": 29 * GIB // 10}
        ),
        make_trial(8, 53 * GIB // 10, 58 * GIB // 10, resident_bytes=2 * GIB, optimizer_peak=33 * GIB // 10),
        make_trial(48, 20 * GIB, 206 * GIB // 10, "thrash", resident_bytes=2 * GIB, alloc_retries=3),
        make_trial(64, 19 * GIB, 20 * GIB, "oom", resident_bytes=2 * GIB, seconds=0.0),
        make_trial(43, 18 * GIB, 187 * GIB // 10, resident_bytes=2 * GIB, optimizer_peak=33 * GIB // 10),
    ]
    tenants = (Tenant(pid=4711, used_bytes=2 * GIB, name="python"),)
    fields = {
        "device": DeviceInfo(kind="cuda", name="NVIDIA L4", total_bytes=24 * GIB, tenants=tenants),
        "warnings": ("BatchNorm normalises each micro-batch by itself",),
        "verdict": Verdict(exact=False, relative_error=0.013, causes=("BatchNorm2d at 1",), samples=16, seconds=0.3),
        "state_bytes": GIB,
        "fingerprint": "3f" * 16,
        "seconds": 4.2,
        "id": "a1b2c3d4e5f6",
        "made_at": 1.79e9,
        "model": "ResNet",
    }
    return make_plan(trials, 43, 256, 216 * GIB // 10, GIB, **{**fields, **changes})


def unmeasured_plan():
    """A device that tells no bytes: sizes by running out."""
    trials = [make_trial(8, 0), make_trial(64, 0, outcome="oom", seconds=0.0), make_trial(32, 0)]
    return make_plan(trials, 32, 64, 0, device=DeviceInfo(kind="mps", name="MPS", total_bytes=0))


def with_ranks(plan, shares, hosts=("gpu-a",), own_seconds=0.31):
    """The plan of the first of several ranks; each other takes half as long as the one before, at least 1 ms."""
    own = {"micro_batch_size": plan.micro_batch_size, "accumulation_steps": plan.accumulation_steps}
    ranks = tuple(
        RankPlan(
            rank=rank,
            plan_id=f"{plan.id}{rank or ''}",
            host=hosts[rank % len(hosts)],
            device=plan.device.name,
            share=share,
            **(own if rank == 0 else {"micro_batch_size": share, "accumulation_steps": 1}),
            peak_bytes=plan.peak_bytes >> rank,
            budget_bytes=plan.budget_bytes,
            seconds=max(own_seconds / 2**rank, 0.001),
        )
        for rank, share in enumerate(shares)
    )
    fields = {"target_batch": sum(shares), "world_size": len(shares), "shares": shares, "ranks": ranks}
    return Plan(**{**dict(plan), **fields})


def make_rank_run(totals, **changes):
    """A run of ten steps on several ranks: of each its samples, retries and milliseconds of a step."""
    ranks = tuple(
        RankTotal(
            steps=10,
            samples=10 * samples,
            micro_batch_size=min(samples, 43),
            retries=retries,
            peak_bytes=(rank + 1) * GIB,
            seconds=ms / 100,
        )
        for rank, (samples, retries, ms) in enumerate(totals)
    )
    return make_run([43] * 5, ranks=ranks, **changes)


CASES = {
    "card": card_plan(),
    "predicted": card_plan(predicted=True, warnings=(), verdict=None).model_copy(update={"trials": ()}),
    "unmeasured": unmeasured_plan(),
    "from 10 KB to 200 GiB": make_plan(
        [make_trial(size, 10_000 + size * 2_000_000) for size in (1, 2, 400, 20_000, 100_000)],
        100_000,
        100_000,
        200 * GIB,
    ),
    "one trial without time": make_plan([make_trial(1, 10 * KIB, seconds=0.0)], 1, 1, 30 * KIB, KIB),
    "sizes that only ran out": make_plan(
        [make_trial(4, 2 * GIB), make_trial(5, 0, outcome="oom", seconds=0.0), make_trial(7, GIB, outcome="oom")],
        4,
        7,
        2 * GIB,
    ),
    "nothing known": make_plan([], 4, 7, 0, device=DeviceInfo(kind="xpu", name="XPU", total_bytes=0)),
    "ranks": with_ranks(card_plan(), (256, 64, 32)),
    "ranks on two hosts": with_ranks(card_plan(), (256,) * 30, hosts=("gpu-a", "gpu-b")),
    "no headroom left": make_plan([make_trial(4, GIB)], 4, 7, GIB, GIB // 2),
}


@st.composite
def plans(draw):
    """Plans of any scale: 10 KiB to 200 GiB, 1 to 100000 samples, any outcome."""
    sizes = draw(st.lists(st.integers(1, 10 ** draw(st.integers(1, 5))), min_size=1, max_size=7, unique=True))
    fixed, each = draw(st.integers(0, 2 ** draw(st.integers(10, 35)))), draw(st.integers(1, 2**21))
    chosen = min(sizes)
    trials = [
        make_trial(
            size,
            fixed + size * each,
            fixed + size * each + draw(st.integers(0, each)),
            "fits" if size == chosen else draw(st.sampled_from(["fits", "thrash", "oom"])),
            resident_bytes=draw(st.integers(0, fixed + each)),
            optimizer_peak=draw(st.integers(0, fixed + size * each)),
            seconds=draw(st.sampled_from([0.0, 1e-4 * size, 3.0])),
        )
        for size in sizes
    ]
    budget = draw(st.sampled_from([0, trials[sizes.index(chosen)].peak_reserved, 200 * GIB]))
    return make_plan(trials, chosen, chosen * draw(st.integers(1, 4)), budget, draw(st.integers(0, budget // 3)))


def make_run(sizes, retries=(), **changes):
    """A run of two steps a size; where a step was retried, a setback says so."""
    ranges = tuple(
        StepRange(
            first_step=2 * index,
            last_step=2 * index + 1,
            micro_batch_size=size,
            retries=int(index in retries),
            peak_bytes=size * GIB // 4,
            seconds=0.5,
            samples=512,
        )
        for index, size in enumerate(sizes)
    )
    setbacks = tuple(
        Setback(step=2 * index, kind="retry", old_size=sizes[index] + 1, new_size=sizes[index], reason="out of memory")
        for index in retries
    )
    fields = {"id": "f0f0f0f0f0f0", "plan_id": "a1b2c3d4e5f6", "pid": 7, "started_at": 1.79e9, "last_seen_at": 1.79e9}
    return Run(**{**fields, "ranges": ranges, "setbacks": setbacks, **changes})


class Page(HTMLParser):
    """Reads HTML into a tree, and refuses what is not balanced."""

    def __init__(self, text):
        super().__init__()
        self.builder, self.open = ET.TreeBuilder(), []
        self.handle_starttag("all", [])
        self.feed(text)
        self.close()
        assert self.open == ["all"]
        self.builder.end("all")
        self.root = self.builder.close()

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in <{tag}>"
        self.builder.start(tag, dict(attrs))
        if tag == "meta":  # the only one here without an end
            self.builder.end(tag)
        else:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.builder.end(tag)

    def handle_data(self, data):
        self.builder.data(data)

    def table(self, name):
        """The rows of a table: lists of cells."""
        (found,) = [table for table in self.root.iter("table") if table.get("aria-label") == name]
        return [list(row) for row in found.find("tbody")]
