"""What is wrong with the environment of a training process is found, with what to type; what is fine is not blamed."""

from __future__ import annotations

import pytest

from autobatch.cli.doctor import examine
from autobatch.cli.environment import Environment, _shared_memory_bytes, read_environment
from autobatch.memory.host_limit import HostMemory
from autobatch.memory.nvml import CardReading
from autobatch.records import Tenant

GIB = 2**30
CARD = CardReading(uuid="GPU-1", total_bytes=24 * GIB, free_bytes=23 * GIB, driver="580.95", name="NVIDIA L4")


def found(**changes):
    """A machine with one card on which all is well, but for what is said."""
    fields = {
        "torch": "2.13.0+cu130",
        "torch_cuda": "13.0",
        "torch_hip": "",
        "cudnn": "9.20.0.48",
        "nvml": "13.615.71",
        "pynvml": "",
        "cards": (CARD,),
        "no_cards_because": "",
        "driver_cuda": (13, 0),
        "settings": {},
        "is_wsl": False,
        "host": HostMemory(total_bytes=64 * GIB, available_bytes=60 * GIB, source="RAM"),
        "shared_memory_bytes": 32 * GIB,
        "home": "/home/ada/.local/state/autobatch",
        "ledger_error": "",
    }
    return Environment(**{**fields, **changes})


def worst(**changes):
    return examine(found(**changes))[0]


def test_where_all_is_well_nothing_is_to_be_done():
    """Every finding is fine and has no advice; a CPU machine with a CPU build is as fine."""
    on_cpu = found(torch="2.13.0+cpu", torch_cuda="", cards=(), no_cards_because="no driver", driver_cuda=None)
    for environment in (found(), on_cpu):
        assert {(finding.level, finding.advice) for finding in examine(environment)} == {("fine", "")}
    assert "torch 2.13.0+cpu, built for the CPU alone" in [finding.what for finding in examine(on_cpu)]


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("9.20.0.48", "cuDNN 9.20.0.48, which predict asks what convolutions take"),
        ("9.5.1", "cuDNN 9.5.1 is older than 9.8, so predict follows a rule for what convolutions take"),
        ("", "no cuDNN that predict could ask what convolutions take (torch-autobatch[cudnn]): it follows a rule"),
    ],
)
def test_it_says_whether_cudnn_can_be_asked(version, said):
    """Training needs nothing of it, so it is fine either way."""
    [finding] = [finding for finding in examine(found(cudnn=version)) if "cuDNN" in finding.what]
    assert (finding.level, finding.what, finding.advice) == ("fine", said, "")


CONF = "PYTORCH_CUDA_ALLOC_CONF"
TROUBLES = {
    "no torch": ({"torch": "", "torch_cuda": ""}, "wrong", "torch is not installed", "pip install torch"),
    "old torch": ({"torch": "2.7.1"}, "wrong", "torch 2.7.1 is older than 2.8", "pip install 'torch>=2.8'"),
    "torch without predict": (
        {"torch": "2.9.1+cu128", "torch_cuda": "12.8"},
        "beware",
        "torch 2.9.1+cu128 is older than 2.10: all but predict() works",
        "pip install 'torch>=2.10'",
    ),
    "cpu build": ({"torch_cuda": ""}, "wrong", "1 NVIDIA card here, but torch 2.13.0+cu130", "install the CUDA build"),
    "old driver": (
        {"driver_cuda": (12, 8)},
        "wrong",
        "torch was built for CUDA 13.0, and the driver runs CUDA up to 12.8",
        "update NVIDIA's driver, or install torch for CUDA 12",
    ),
    "no driver": (
        {"cards": (), "no_cards_because": "NVMLError: no driver", "driver_cuda": None},
        "beware",
        "no NVIDIA card: NVMLError: no driver",
        "install NVIDIA's driver, or start the container",
    ),
    "wrong pynvml": ({"pynvml": "11.5.3"}, "wrong", "the deprecated package pynvml 11.5.3", "pip uninstall -y pynvml"),
    "no nvml": ({"nvml": ""}, "beware", "nvidia-ml-py is not installed", "pip install nvidia-ml-py"),
    "another allocator": (
        {"settings": {CONF: "backend:cudaMallocAsync"}},
        "beware",
        "chooses cudaMallocAsync",
        "leave backend: out",
    ),
    "two that differ": (
        {"settings": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128", CONF: "max_split_size_mb:256"}},
        "beware",
        "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF differ",
        "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    "no caching": (
        {"settings": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}},
        "wrong",
        "torch has no allocator whose peaks could be measured",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
    ),
    "another allocator, with blanks": (
        {"settings": {CONF: "max_split_size_mb:512, backend : cudaMallocAsync"}},
        "beware",
        "chooses cudaMallocAsync",
        "leave backend: out",
    ),
    "blocking": ({"settings": {"CUDA_LAUNCH_BLOCKING": "1"}}, "beware", "makes training slow", "unset CUDA_LAUNCH"),
    "hidden cards": ({"settings": {"CUDA_VISIBLE_DEVICES": ""}}, "beware", "hides every card", "unset CUDA_VISIBLE"),
    "somebody else": (
        {"cards": (CARD.model_copy(update={"tenants": (Tenant(pid=7, used_bytes=6 * GIB, name="python"),)}),)},
        "beware",
        "1 other process hold 6.0 GiB of NVIDIA L4, process 7 python most of it",
        "kill 7",
    ),
    "Windows": ({"is_wsl": True}, "beware", "moves tensors to RAM", "Prefer No Sysmem Fallback"),
    "Windows and expandable segments": (
        {"is_wsl": True, "settings": {CONF: "expandable_segments:True"}},
        "beware",
        "asks for expandable segments, which Windows does not have",
        "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    "small shared memory": ({"shared_memory_bytes": 64 * 2**20}, "beware", "which has 64.0 MiB", "--shm-size=8g"),
    "no ledger": ({"ledger_error": "read-only"}, "beware", "plans cannot be stored in", "set AUTOBATCH_HOME"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_each_trouble_is_named_with_what_to_type(name):
    """The worst finding comes first, and it is this one."""
    changes, level, what, advice = TROUBLES[name]
    finding = worst(**changes)
    assert finding.level == level
    assert what in finding.what
    assert advice in finding.advice


@pytest.mark.parametrize(
    "changes",
    [
        {"driver_cuda": (13, 1)},
        {"torch": "2.10.0+cu128", "torch_cuda": "12.8", "driver_cuda": (13, 0)},
        {"torch": "3.0.0a0+git1234"},
        {"pynvml": "13.0.1"},
        {"settings": {CONF: "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"}},
        {"settings": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128", CONF: "max_split_size_mb:128"}},
        {"settings": {"CUDA_VISIBLE_DEVICES": "1"}},
        {"shared_memory_bytes": 0},
        {"cards": (CARD.model_copy(update={"divided": True, "tenants": ()}),)},
    ],
    ids=str,
)
def test_what_only_looks_like_trouble_is_fine(changes):
    """A newer driver, the renamed package, options with commas inside brackets, two variables that agree."""
    assert worst(**changes).level == "fine"


def test_this_machine_can_be_read():
    """Versions of what is installed, and the two texts that are handed in."""
    environment = read_environment({"CUDA_VISIBLE_DEVICES": "0", "HOME": "/root"}, "here", "broken")
    assert environment.torch
    assert environment.settings == {"CUDA_VISIBLE_DEVICES": "0"}
    assert (environment.home, environment.ledger_error) == ("here", "broken")
    assert examine(environment)


def test_what_torch_was_built_for_is_read_without_importing_it():
    """As torch itself says, once it is imported."""
    import torch

    environment = read_environment({}, "", "")
    assert environment.torch_cuda == (torch.version.cuda or "")
    assert environment.torch_hip == (torch.version.hip or "")


@pytest.mark.parametrize(
    ("kernel", "wsl"),
    [
        ("5.15.167.4-microsoft-standard-WSL2", True),
        ("4.4.0-19041-Microsoft", True),
        ("6.1.0-13-amd64", False),
        ("", False),
    ],
)
def test_windows_is_known_by_its_kernel(monkeypatch, kernel, wsl):
    """Its name is in the release; a system that names none is not Linux."""
    monkeypatch.setattr("platform.release", lambda: kernel)
    assert read_environment({}, "", "").is_wsl is wsl


def test_shared_memory_is_that_of_the_folder(tmp_path):
    """Without it, none."""
    assert _shared_memory_bytes(str(tmp_path / "nothing")) == 0
    assert _shared_memory_bytes(str(tmp_path)) > 0
