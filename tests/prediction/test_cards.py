"""The table of cards and how one is found: by any of its names, or by its memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import sample

from autobatch.errors import InvalidArgument
from autobatch.prediction.cards import (
    COMMON,
    GPUS,
    _simplify,
    explain_choice,
    find_gpu,
    make_gpu,
)

GIB, MIB = 2**30, 2**20


by_card = pytest.mark.parametrize("gpu", sample(GPUS, 8), ids=lambda gpu: gpu.name)


def test_the_page_has_each_card():
    """In the order of the table, with its numbers."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "cards.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| card", "| ---"))]
    assert lines == [
        f"| {f'**{gpu.name}**' if gpu.name in COMMON else gpu.name} | {gpu.total_bytes / GIB:.2f} "
        f"| {gpu.multiprocessors} | {gpu.architecture} "
        f"| {gpu.context_bytes // MIB}{'' if gpu.context_measured else ' ?'} |"
        for gpu in GPUS
    ]


def test_no_name_is_two_cards():
    """Names and aliases differ in more than case, brand and separators."""
    simple = [_simplify(name) for gpu in GPUS for name in (gpu.name, *gpu.aliases)]
    assert sorted(simple) == sorted(set(simple))
    assert all(simple)


@pytest.mark.parametrize(
    ("name", "mebibytes", "measured"),
    [
        ("T4", 158, True),
        ("A2", 220, True),  # of the next larger one of its architecture
        ("RTX 4060", 274, True),
        ("RTX 4090", 505, True),
        ("RTX 3090", 267, True),
        ("H200", 760, True),  # an H100's, which is the same chip
        ("RTX 2080 Ti", 220, False),  # more than a T4; of one that runs at least as many threads
        ("B300", 760, False),
        ("MI300X", 760, False),
        ("A100", 1711, False),
    ],
)
def test_what_cuda_takes_is_what_was_read_on_such_a_card(name, mebibytes, measured):
    """On the same architecture up to its size; else it is a guess on the safe side."""
    card = find_gpu(name)
    assert (card.context_bytes, card.context_measured) == (mebibytes * MIB, measured)


def test_what_cuda_takes_of_a_card_that_is_here_follows_from_its_size_too():
    """Not from its name, which a driver may write in any way."""
    here = make_gpu("NVIDIA Anything", GIB, "sm_89", 50, source="here")
    assert here.context_bytes == find_gpu("L4").context_bytes < find_gpu("RTX 4090").context_bytes


@pytest.mark.parametrize(
    ("name", "workspace"),
    [("T4", 8_519_680), ("A100-80GB", 8_519_680), ("RTX 4090", 8_519_680), ("H200", 32 * MIB), ("B200", 32 * MIB)],
)
def test_the_workspace_of_cublas_is_that_of_torch(name, workspace):
    """8.125 MiB, and 32 MiB from Hopper on."""
    assert find_gpu(name).cublas_workspace_bytes == workspace


@by_card
def test_a_card_is_found_by_each_of_its_names(gpu):
    """Name and aliases, in any case, with any separators, and as the driver writes it."""
    for name in (gpu.name, *gpu.aliases):
        for written in (name, name.lower(), name.upper(), name.replace(" ", "-"), name.replace("-", "_"), f" {name} "):
            assert find_gpu(written) is gpu
        assert find_gpu(f"NVIDIA {name}") is gpu


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("H100-80GB", "H100-80GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("A100-40GB", "A100-40GB-PCIe"),
        ("A100 80GB", "A100-80GB-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("geforce rtx 3060", "RTX 3060 12GB"),
        ("4060ti 16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("Tesla T4", "T4"),
        ("l40s", "L40S"),
        ("a6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("RTX 4090", "RTX 4090"),
        ("rtx4090-24gb", "RTX 4090"),
        ("4090_24GB", "RTX 4090"),
        ("NVIDIA L4 24 GB", "L4"),
        ("h100-80gb", "H100-80GB-PCIe"),
        ("A100 40GB", "A100-40GB-PCIe"),
        ("A800 80GB", "A800-80GB-PCIe"),
        ("H200 141GB", "H200"),
        ("NVIDIA GeForce GTX 1660 Ti", "GTX 1660 Ti"),
        ("1650", "GTX 1650"),
        ("NVIDIA TITAN RTX", "TITAN RTX"),
        ("Quadro RTX 8000", "Quadro RTX 8000"),
        ("4070 ti super", "RTX 4070 Ti SUPER"),
        ("4090D", "RTX 4090 D"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA GH200 120GB", "GH200-96GB"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("MI355X", "MI355X"),
    ],
)
def test_what_people_write_is_the_card_they_mean(asked, name):
    """Short names, the driver's names, and a name with memory but no socket: the one of those that reports less."""
    found = find_gpu(asked)
    assert found.name == name
    same = [gpu for gpu in GPUS if _simplify(gpu.name).startswith(_simplify(asked))]
    if not explain_choice(asked):
        assert found.total_bytes <= min((gpu.total_bytes for gpu in same), default=found.total_bytes)


@pytest.mark.parametrize(
    ("asked", "total"),
    [
        ("24GiB", 24 * GIB),
        (" 24 gib ", 24 * GIB),
        ("23.5GiB", 47 * GIB // 2),
        ("80GB", 80 * 10**9),
        ("40960MiB", 40 * GIB),
        (24 * GIB, 24 * GIB),
        (np.int64(24 * GIB), 24 * GIB),
        (2**30, GIB),
    ],
)
def test_a_size_is_a_card_of_that_memory(asked, total):
    """Of which nothing else is known, so that CUDA itself takes the most that was read on any card."""
    found = find_gpu(asked)
    assert found.total_bytes == total
    assert (found.architecture, found.measured, found.context_measured) == ("unknown", False, False)
    assert found.context_bytes >= max(gpu.context_bytes for gpu in GPUS if gpu.context_measured)
    assert found.cublas_workspace_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("A110", ["A10 or A10G"]),
        ("RTX A4500", ["RTX A5500, RTX A5000 or RTX A4000"]),
        ("RTX 4090 48GB", ["RTX 4060 Ti 8GB, GH200-96GB or RTX 4090"]),
        ("4090 Ti", ["RTX 4070 Ti, RTX 3090 Ti or RTX 4090"]),
        *((name, []) for name in ("Voodoo", "", "NVIDIA", "24 GiB please", None, True, -5)),
        *(
            (size, [])
            for size in ("1.2.3GiB", "9999999TiB", "24Gi", "0GiB", "-24GiB", "24,5 GiB", "80Go", "0", "24564")
        ),
        (24, ["24 bytes"]),
        ("512MiB", ["512.0 MiB"]),
    ],
)
def test_what_is_no_card_is_refused(asked, names):
    """The message carries the user's own words, the cards that are close, and what works for any card."""
    with pytest.raises(InvalidArgument) as caught:
        find_gpu(asked)
    message = str(caught.value)
    assert message.startswith(f"gpu={asked!r} ")
    assert [name for name in [*names, "'24GiB'"] if name not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize(
    ("asked", "name", "said"),
    [
        ("H100", "H100-80GB-PCIe", "H100-80GB; also H100-94GB"),
        ("NVIDIA H100", "H100-80GB-PCIe", "H100-80GB; also H100-94GB"),
        ("A100", "A100-80GB-SXM", "A100-80GB; also A100-40GB"),
        ("a100", "A100-80GB-SXM", "A100-80GB; also A100-40GB"),
        ("A100-SXM", "A100-80GB-SXM", "A100-80GB; also A100-40GB"),
        ("A100 PCIe", "A100-80GB-PCIe", "A100-80GB; also A100-40GB"),
        ("V100", "V100-16GB", "V100-16GB; also V100-32GB"),
        ("Tesla V100", "V100-16GB", "V100-16GB; also V100-32GB"),
        ("RTX 4060 Ti", "RTX 4060 Ti 8GB", "RTX 4060 Ti 8GB; also RTX 4060 Ti 16GB"),
        ("4060ti", "RTX 4060 Ti 8GB", "RTX 4060 Ti 8GB; also RTX 4060 Ti 16GB"),
        ("RTX 3060", "RTX 3060 12GB", "RTX 3060 12GB; also RTX 3060 8GB"),
        ("RTX 3080", "RTX 3080 10GB", "RTX 3080 10GB; also RTX 3080 12GB"),
        ("GH200", "GH200-96GB", "GH200-96GB; also GH200-144GB"),
    ],
)
def test_of_cards_with_one_name_the_commonest_is_meant_and_that_is_said(asked, name, said):
    """In one sentence with the others."""
    assert find_gpu(asked).name == name
    assert explain_choice(asked) == (f"gpu={asked!r} is taken for the commonest of that name: {said}",)


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.none(), st.binary(max_size=4)))
def test_anything_is_a_card_or_refused(value):
    """Whatever is passed gives a card with memory, or our own error with the user's words, never another one."""
    try:
        found = find_gpu(value)
    except InvalidArgument as error:
        found = str(error)
    assert found.startswith(f"gpu={value!r} ") if isinstance(found, str) else found.total_bytes >= GIB
