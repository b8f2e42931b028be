"""``distributed.channel``: every rank gets all messages, and a rank that is gone is named."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from builders.ranks import run_ranks, values_of, wait_at_most
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.distributed.channel import Channel, open_channel
from autobatch.errors import RankLost


class Refuse(TorchDispatchMode):
    """A mode under which no operator may run, as a budget that is used up."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise torch.OutOfMemoryError(f"no memory for {func}")


def exchange_some():
    with torch.inference_mode():
        channel = open_channel(None)
    assert open_channel(None) is channel
    received = [
        channel.exchange({"rank": dist.get_rank(), "text": "x" * length})[0] for length in (0, 900, 1100, 70_000)
    ]
    with Refuse():
        received.append(channel.exchange(float("inf"))[0])
    return received


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_all_messages(size):
    """Short and long messages, also after one in inference mode, and while memory is at its end."""
    expected = [[{"rank": rank, "text": "x" * length} for rank in range(size)] for length in (0, 900, 1100, 70_000)]
    for received in values_of(run_ranks(exchange_some, size=size)):
        assert received == [*expected, [float("inf")] * size]


def end_one(which, how):
    """One rank ends; what the others say, and after how long."""
    channel = Channel(None)
    wait_at_most(3)
    if dist.get_rank() == which:
        os.kill(os.getpid(), how)
    began = time.monotonic()
    reported = []
    for _ in range(2):
        with pytest.raises(RankLost) as caught:
            channel.exchange("here")
        reported.append(str(caught.value))
    assert reported[0] == reported[1]
    return reported[0], time.monotonic() - began


def outlive_one(which):
    """Seconds until a rank notices that one was killed, if no rank ends before all have noticed it."""
    channel = Channel(None)
    if dist.get_rank() == which:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankLost) as caught:
        channel.exchange("here")
    seconds = time.monotonic() - began
    count_noticed(1)
    wait_for_the_others()
    return str(caught.value), seconds


def count_noticed(more):
    return dist.distributed_c10d._get_default_store().add("noticed", more)


def wait_for_the_others():
    """Stay alive until all other ranks have noticed the loss."""
    end = time.monotonic() + 60
    while count_noticed(0) < dist.get_world_size() - 1 and time.monotonic() < end:
        time.sleep(0.05)


def test_a_rank_that_was_killed_is_noticed_by_all_at_once():
    """Not by its neighbours in a ring only, whose own ends the others would have to wait for."""
    answers = run_ranks(outlive_one, 2, size=4, limit_seconds=100)
    assert answers.pop(2).end == "ended with -9"
    for text, seconds in values_of(answers):
        assert text.startswith("rank 2 of 4 is gone: its process ")
        assert seconds < 45


def test_a_rank_that_is_stopped_is_named_after_the_timeout():
    """It did not answer; the message has the reason if this machine can see it."""
    answers = run_ranks(end_one, 1, signal.SIGSTOP, size=2, limit_seconds=100)
    assert answers[1].end == "hung"
    (text, seconds) = values_of(answers[:1])[0]
    assert text.startswith("rank 1 of 2 did not answer, and its process ")
    assert " is stopped (" in text
    assert 2 < seconds < 80


def exchange_in_a_part():
    """In a group of two of three ranks."""
    part = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    channel = open_channel(part)
    return channel.members, channel.rank, channel.exchange(dist.get_rank())[0]


def test_a_group_of_some_ranks_has_a_channel_of_its_own():
    """The others take no part, and members are named by their global rank."""
    first, *others = values_of(run_ranks(exchange_in_a_part, size=3))
    assert first is None
    assert others == [([1, 2], 0, [1, 2]), ([1, 2], 1, [1, 2])]


def open_without_the_last():
    """The others' error about a rank that does not come."""
    if dist.get_rank() == dist.get_world_size() - 1:
        wait_for_the_others()
        return ""
    wait_at_most(3)
    with pytest.raises(RankLost) as caught:
        Channel(None)
    count_noticed(1)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named():
    """No rank knows the processes of the others before the channel is open."""
    *others, _ = values_of(run_ranks(open_without_the_last, size=3))
    for other in others:
        assert other.startswith("rank 2 of 3 did not make the same call within 3 s (")


def lose_one_of_a_part():
    """The error of the other member of a group of two of three ranks."""
    part = dist.new_group([1, 2], timeout=timedelta(seconds=60))
    if dist.get_rank() == 0:
        return None
    channel = Channel(part)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLost) as caught:
        channel.exchange("here")
    return str(caught.value)


def test_a_lost_rank_of_a_group_is_named_among_all_ranks():
    """As launchers and logs name it: rank 2 of 2 would be none of the group's, nor of all."""
    (own,) = values_of(run_ranks(lose_one_of_a_part, size=3)[1:2])
    assert own.startswith("rank 2 of 3 is gone: its process ")


def read_timeout():
    return open_channel(None).timeout.total_seconds()


def test_the_timeout_is_the_process_groups_own():
    """A new group would take half an hour."""
    assert values_of(run_ranks(read_timeout, timeout_seconds=17.0)) == [17.0, 17.0]


def close_beside_a_stopped_rank():
    channel = open_channel(None)
    channel.exchange("here")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    began = time.monotonic()
    channel.close()
    with pytest.raises(RankLost, match="is closed: this process ends"):
        channel.exchange("here")
    return time.monotonic() - began


def test_a_process_ends_beside_one_that_is_stopped():
    """Closing waits for no other rank."""
    first, stopped = run_ranks(close_beside_a_stopped_rank, limit_seconds=100)
    assert stopped.end == "hung"
    assert values_of([first])[0] < 20


ENDING = """
import atexit
import time
from pathlib import Path
import torch.distributed as dist

def count_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("pt_gloo") for name in names)

def wait_until_there_are(count):
    end = time.monotonic() + 20  # a thread names itself a moment after it began, and is listed a moment after its end
    while count_threads() != count and time.monotonic() < end:
        time.sleep(0.01)
    print(count_threads())

atexit.register(lambda: wait_until_there_are(AFTER))  # the first to be registered is the last to be called
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from autobatch.distributed.channel import open_channel
wait_until_there_are(2)  # gloo starts two threads a group
channel = open_channel(None)
channel.exchange("here")
wait_until_there_are(4)
"""


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10), reason="gloo's threads have no names")
@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_the_channels_threads_have_ended_before_the_interpreter_ends(end):
    """One of them aborts the process if it still holds a message's tensors by then, whatever else is alive."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", f"AFTER = {0 if end else 2}\n{ENDING}{end}"]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=200)
    counts = [line for line in ran.stdout.splitlines() if line.isdigit()]  # gloo of older torch prints there, too
    assert [*map(int, counts)] == [2, 4, 0 if end else 2]


def test_a_channel_of_a_group_that_was_destroyed_says_so():
    """A Runner is used after ``destroy_process_group``; torch's own error would name no way out."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        channel = open_channel(None)
        assert channel.exchange("here")[0] == ["here"]
    finally:
        dist.destroy_process_group()
    with pytest.raises(RankLost, match=r"^the process group was destroyed: .* make a new Runner$"):
        channel.exchange("here")
