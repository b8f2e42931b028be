"""Programs that torchrun starts and restarts: the same weights on any ranks and nodes, also after one is lost."""

import os
import re

import pytest
from launches import ROOT, launch, launch_nodes, torchrun

EXAMPLE = str(ROOT / "examples" / "several_gpus.py")
RESTARTING = str(ROOT / "examples" / "restarting.py")
LOSE_A_RANK = str(ROOT / "tests" / "builders" / "lose_a_rank.py")
# The examples' own data take long to import; tests/engines runs one of them with these.
DATA = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "builders" / "digits_at_once"), str(ROOT)])}
OWN_STORE = {**DATA, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it a restart on gloo fails now and then, also of a script without autobatch."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]


@pytest.fixture(scope="module")
def undisturbed():
    """The output of one rank, and of any number of them."""
    (ran,) = launch(torchrun(EXAMPLE, ranks=1), **DATA)
    return ran.line("loss ")


def weights_in(line):
    return float(re.fullmatch(r".*weights (\S+)", line)[1])


def test_the_number_of_ranks_does_not_change_the_weights(undisturbed):
    """Each target batch is that of one process, shared."""
    two, three = launch(torchrun(EXAMPLE), torchrun(EXAMPLE, ranks=3), **DATA)
    assert two.line("loss ") == undisturbed == three.line("loss ")


def test_two_nodes_train_as_one_machine_does(undisturbed):
    """Two torchruns that meet, each with one rank."""
    ran = launch_nodes(["--nnodes=2", EXAMPLE], **DATA)
    assert [one.code for one in ran] == [0, 0], [one.errors for one in ran]
    assert sorted(one.output.strip() for one in ran) == ["", undisturbed]


def test_a_killed_rank_costs_the_steps_since_the_checkpoint(undisturbed, tmp_path):
    """In the middle of the second epoch: all are started again, and end on the weights of a run that lost none."""
    command = torchrun("--max-restarts=1", LOSE_A_RANK, "rank", "12", RESTARTING, str(tmp_path / "saved.pt"))
    (ran,) = launch(command, **OWN_STORE)
    assert ran.line("weights ") == "weights " + undisturbed.partition("weights ")[2]
    for rank in range(2):  # both write at once, so one line may hold both
        assert f"rank {rank} of 2 goes on with batch 3 of epoch 1" in ran.output
    assert "(exitcode: -9)" in ran.errors
    assert ran.left_behind == []


def test_fewer_ranks_go_on_from_a_checkpoint(undisturbed, tmp_path):
    """Three ranks lose one and end; two finish the epoch, on the same weights to rounding."""
    saved = str(tmp_path / "saved.pt")
    (ended,) = launch(torchrun(LOSE_A_RANK, "rank", "12", RESTARTING, saved, ranks=3), **DATA)
    assert ended.code > 0
    assert "weights" not in ended.output
    (resumed,) = launch(torchrun(RESTARTING, saved), **DATA)
    assert resumed.line("rank 0") == "rank 0 of 2 goes on with batch 3 of epoch 1"
    assert weights_in(resumed.line("weights ")) == pytest.approx(weights_in(undisturbed), rel=1e-12)


def test_a_node_goes_on_alone_when_the_other_is_lost(undisturbed, tmp_path):
    """Its torchrun starts it again on the ranks that are left; its first start ends with the number of the lost one."""
    # The first node waits so long for the second, and after the loss for another one.
    waits = "--rdzv-conf=is_host=0,last_call_timeout=15,keep_alive_interval=2,keep_alive_max_attempt=3"
    script = [LOSE_A_RANK, "node", "12", RESTARTING, str(tmp_path / "saved.pt")]
    ran = launch_nodes(["--nnodes=1:2", waits, "--max-restarts=1", *script], **OWN_STORE)
    lost, survivor = sorted(ran, key=lambda one: one.code)
    assert lost.code == -9, lost.errors
    assert survivor.line("rank") == "rank 0 of 1 goes on with batch 3 of epoch 1"
    assert "RankLost: rank 1 of 2 is gone" in survivor.errors
    assert weights_in(survivor.line("weights ")) == pytest.approx(weights_in(undisturbed), rel=1e-12)
