"""``Plan``: printed, explained, saved, loaded, translated."""

from __future__ import annotations

import os
import re
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import GIB, L4, make_plan, make_rank_plans, make_trial
from pydantic import ValidationError

import autobatch
from autobatch.errors import InvalidArgument
from autobatch.plan import Plan
from autobatch.records import Tenant


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "autobatch: 256 = 6 x 43 (two of 42) on NVIDIA L4; peak 18.7 of 21.6 GiB; 3 trials, 0 out of memory, 1.2 s",
        ),
        (
            {"target": 86},
            "autobatch: 86 = 2 x 43 on NVIDIA L4; peak 18.7 of 21.6 GiB; 3 trials, 0 out of memory, 1.2 s",
        ),
        (
            {"trials": (make_trial(43), make_trial(44, outcome="oom"))},
            "autobatch: 256 = 6 x 43 (two of 42) on NVIDIA L4; peak 18.7 of 21.6 GiB; 2 trials, 1 out of memory, 1.2 s",
        ),
        (
            {"predicted": True, "trials": ()},
            (
                "autobatch: 256 = 6 x 43 (two of 42) on NVIDIA L4; predicted peak 18.7 of 21.6 GiB beside CUDA's own; "
                "nothing was run, 1.2 s"
            ),
        ),
        (
            {"peak_bytes": 5 * 2**20},
            (
                "autobatch: 256 = 6 x 43 (two of 42) on NVIDIA L4; peak 5.0 MiB of 21.6 GiB; 3 trials, 0 out of "
                "memory, 1.2 s"
            ),
        ),
        (
            {"target": 512, "world_size": 2},
            (
                "autobatch: 256 = 6 x 43 (two of 42) on each of 2 ranks, 512 in all on NVIDIA L4; peak 18.7 of 21.6 "
                "GiB; 3 trials, 0 out of memory, 1.2 s"
            ),
        ),
    ],
)
def test_a_plan_prints_as_one_line(changes, line):
    """The line of the contract, for whole, ragged, predicted and shared targets."""
    assert str(make_plan(**changes)) == line


@given(target=st.integers(1, 3000), size=st.integers(1, 500))
def test_the_printed_sizes_are_the_planned_ones(target, size):
    """The line's numbers rebuild the sizes: steps x largest, less what the ragged ones lack."""
    plan = make_plan(target, size)
    total, steps, largest = map(int, re.match(r"autobatch: (\d+) = (\d+) x (\d+)", str(plan)).groups())
    assert (total, steps, largest) == (target, plan.accumulation_steps, plan.micro_batch_size)
    assert sum(plan.micro_batch_sizes) == target
    assert max(plan.micro_batch_sizes) - min(plan.micro_batch_sizes) <= 1


def test_a_notebook_shows_a_plan_in_its_own_corner():
    """A fragment with pictures and the plan's numbers, not a document; names stay text."""
    shown = make_plan(model="<script>")._repr_html_()
    assert shown.startswith('<div class="autobatch-report">')
    assert "256 = 6 x 43 (two of 42)" in shown
    assert shown.count(' role="img"') == 3
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown
    assert "<html" not in shown


def test_a_plan_that_cannot_be_written_names_the_users_path(tmp_path):
    """Not the draft beside it, which the user has never heard of."""
    path = tmp_path / "no such folder" / "plan.json"
    with pytest.raises(FileNotFoundError) as caught:
        make_plan().save(path)
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{path}'"


def test_a_plan_is_saved_and_loaded(tmp_path):
    """The file is whole or not there: no draft is left behind."""
    plan, path = make_plan(), tmp_path / "plan.json"
    plan.save(path)
    plan.save(str(path))
    assert autobatch.Plan.load(path) == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


NONSENSE = [
    ("target_batch", {"target_batch": 0}),
    ("target_batch", {"target_batch": -256}),
    ("world_size", {"world_size": 0}),
    ("micro_batch_size", {"micro_batch_size": 0}),
    ("micro_batch_size", {"micro_batch_size": 44}),
    ("micro_batch_size", {"micro_batch_size": 42}),
    ("accumulation_steps", {"accumulation_steps": 5}),
    ("accumulation_steps", {"accumulation_steps": 0}),
    ("micro_batch_sizes", {"micro_batch_sizes": ()}),
    ("micro_batch_sizes", {"micro_batch_sizes": (43, 43, 43, 43, 43, 43, -2), "accumulation_steps": 7}),
    ("micro_batch_sizes", {"micro_batch_sizes": (43, 43, 43, 43, 42, 41)}),
    ("micro_batch_sizes", {"target_batch": 255}),
    ("micro_batch_sizes", {"world_size": 2}),
    ("micro_batch_sizes", {"target_batch": 514, "world_size": 2}),
    ("headroom_bytes", {"headroom_bytes": -1}),
    ("headroom_bytes", {"headroom_bytes": 22 * GIB}),
    ("budget_bytes", {"budget_bytes": -5, "headroom_bytes": -6}),
    ("peak_bytes", {"peak_bytes": -1}),
    ("rank", {"rank": 1}),
    ("rank", {"rank": -1}),
    ("rank", {"rank": 2, "world_size": 2, "shares": (256, 256), "target_batch": 512}),
    ("shares", {"shares": (128, 128)}),
    ("shares", {"shares": (256, 100), "world_size": 2}),
    ("shares", {"shares": (256, 0), "world_size": 2}),
    ("micro_batch_sizes", {"shares": (255, 1), "world_size": 2}),
    ("micro_batch_sizes", {"shares": (256, 255), "world_size": 2, "target_batch": 511, "rank": 1}),
]


@pytest.mark.parametrize(("field", "changes"), NONSENSE)
def test_a_plan_that_contradicts_itself_is_refused(tmp_path, field, changes):
    """Counts, sums and bytes that cannot be, made here or read from a file, are named by their field."""
    path = tmp_path / "plan.json"
    path.write_text(make_plan().model_copy(update=changes).model_dump_json())
    with pytest.raises(InvalidArgument, match=rf"not a plan that this version reads \((the file: )?{field}"):
        Plan.load(path)
    with pytest.raises(ValidationError, match=field):
        Plan(**{**dict(make_plan()), **changes})


@pytest.mark.parametrize("shares", [(64,), (11, 5), (6, 5, 5), (1, 2, 3, 94)])
def test_a_plan_with_shares_is_for_its_own_rank(shares, tmp_path):
    """Each rank's micro-batches sum to its own share, and the shares survive a file."""
    for rank, plan in enumerate(make_rank_plans(shares)):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        assert (plan.rank, plan.shares, sum(plan.micro_batch_sizes)) == (rank, shares, shares[rank])


def test_a_plan_is_frozen():
    """A plan is a value: it cannot be changed after it was measured."""
    with pytest.raises(ValidationError):
        make_plan().micro_batch_size = 5


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("huggingface", {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 8}),
        ("lightning", {"batch_size": 32, "accumulate_grad_batches": 8}),
        ("accelerate", {"batch_size": 32, "gradient_accumulation_steps": 8}),
        (
            "deepspeed",
            {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 32, "gradient_accumulation_steps": 8},
        ),
        ("torchtitan", {"local_batch_size": 32, "global_batch_size": 256}),
        ("megatron", {"micro_batch_size": 32, "global_batch_size": 256}),
    ],
)
def test_settings_speak_other_frameworks_words(framework, expected):
    """Each framework's own names, with the largest exact divisor of 256 that is at most 43."""
    assert make_plan().settings(framework) == expected


@pytest.mark.parametrize("length", [0, -1, 2.5, True, "2048"])
def test_a_length_in_tokens_is_a_count(length):
    """Anything else is refused with its own value."""
    with pytest.raises(InvalidArgument, match="sequence_length"):
        make_plan().settings("torchtitan", sequence_length=length)


@given(target=st.integers(1, 4000), size=st.integers(1, 300), world=st.integers(1, 8))
def test_settings_give_the_target_exactly(target, size, world):
    """Size x accumulation x ranks is the target, or it is refused; never a rounded one."""
    plan = make_plan(target, size, world)
    if target % world:
        with pytest.raises(InvalidArgument, match=f"cannot be shared equally by {world} ranks"):
            plan.settings("huggingface")
        return
    settings = plan.settings("huggingface")
    each, steps = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    assert each * steps * world == target
    assert each <= plan.micro_batch_size
    for framework, local in (("torchtitan", "local_batch_size"), ("megatron", "micro_batch_size")):
        settings = plan.settings(framework)  # which divide by size x ranks themselves, and refuse a remainder
        assert divmod(settings["global_batch_size"], settings[local] * world) == (steps, 0)
    tokens = plan.settings("torchtitan", sequence_length=96)  # of torchtitan 0.4: it divides in the same way
    assert tokens.keys() == {"num_tokens_per_train_step", "num_tokens_per_microbatch_per_dp_rank"}
    whole, each_tokens = tokens["num_tokens_per_train_step"], tokens["num_tokens_per_microbatch_per_dp_rank"]
    assert (whole, each_tokens) == (96 * target, 96 * each)
    assert divmod(whole, each_tokens * world) == (steps, 0)


@pytest.mark.parametrize("framework", ["deepspeed", "torchtitan", "megatron"])
def test_settings_refuse_what_a_framework_cannot_say(framework):
    """A target that ranks cannot share, shares that differ, and a share of which no divisor may run."""
    with pytest.raises(
        InvalidArgument, match=rf"settings\('{framework}'\): a target batch of 256 .* equally by 3 ranks"
    ):
        make_plan(256, 43, 3).settings(framework)
    with pytest.raises(InvalidArgument, match=r"the ranks have different shares, .* plan with share='equal'"):
        make_rank_plans((100, 156))[0].settings(framework)
    with pytest.raises(InvalidArgument, match=r"251 samples have no divisor from 2 to 42"):
        make_plan(251, 43, smallest_micro_batch=2).settings(framework)


def test_explain_tells_the_whole_story():
    """Budget, trials, breakdown, curve, advice and warnings, with the plan's own numbers and nothing wider than 120."""
    tenants = (Tenant(pid=4711, used_bytes=2 * GIB, name="python"),)
    device = L4.model_copy(update={"tenants": tenants})
    story = make_plan(device=device, warnings=("splitting is not exact here",)).explain()
    for part in (
        "21.6 GiB   what this process may hold on NVIDIA L4",
        "20.6 GiB   what a trial had to stay within",
        "process 4711 (python) holds 2.0 GiB",
        "Each trial: two micro-batches",
        "The curve puts the largest size within the limit at 49 of 256.",
        "the whole 256 at once would need about 103.4 GiB",
        "! splitting is not exact here",
    ):
        assert part in story, part
    assert [line.split()[0] for line in story.splitlines() if " fits " in line] == ["2", "21", "43"]
    assert max(map(len, story.splitlines())) <= 120


@pytest.mark.parametrize(("target", "size"), [(48, 12), (48, 48), (49, 7)])
def test_explain_gives_no_advice_where_the_whole_batch_would_fit(target, size):
    """Where the user's own bound made it small, less memory a sample would change nothing."""
    story = make_plan(target, size).explain()
    assert "at once would need" not in story
    assert "checkpointing" not in story
    beyond = make_plan(50, size).explain()
    assert "the whole 50 at once would need about 21.0 GiB" in beyond
    assert "checkpointing" in beyond


def test_saving_goes_through_a_link_and_replaces_no_device(tmp_path):
    """Whoever names ``/dev/null`` wants nothing written, and needs it afterwards."""
    (tmp_path / "store").mkdir()
    real, link, pipe = tmp_path / "store" / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("{}")
    link.symlink_to(real)
    plan = make_plan()
    plan.save(link)
    assert link.is_symlink()
    assert Plan.load(real) == plan
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        plan.save(pipe)
        assert os.read(reader, 10**6).decode() == plan.model_dump_json(indent=2) + "\n"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [*tmp_path.glob("**/*.draft")] == []
