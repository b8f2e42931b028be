"""The table of cards and how one is found: by any of its names, or by its memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.errors import InvalidArgument
from autobatch.prediction.cards import (
    _FAMILIES,
    COMMONEST,
    GPUS,
    Gpu,
    _simplify,
    _without_socket,
    explain_choice,
    find_gpu,
)

GIB, MIB = 2**30, 2**20

# What is on the box, in GiB.
NOMINAL = {
    "T4": 16,
    "RTX 2080 Ti": 11,
    "A30": 24,
    "A10": 24,
    "A10G": 24,
    "A40": 48,
    "RTX A5000": 24,
    "RTX A6000": 48,
    "RTX 3070": 8,
    "RTX 3090": 24,
    "RTX 3090 Ti": 24,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "RTX 6000 Ada": 48,
    "RTX 4060": 8,
    "RTX 4070": 12,
    "RTX 4080": 16,
    "RTX 4080 SUPER": 16,
    "RTX 4090": 24,
    "H200": 141,
    "B200": 180,
    "RTX 5080": 16,
    "RTX 5090": 32,
    "RTX PRO 6000 Blackwell": 96,
    "MI300X": 192,
}


def nominal_bytes(gpu: Gpu) -> int:
    """What is on the box: it is in the name, or above."""
    in_name = re.search(r"(\d+)GB", gpu.name)
    return (int(in_name[1]) if in_name else NOMINAL[gpu.name]) * GIB


by_card = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)


def test_there_are_many_cards():
    """At least 25, each once."""
    assert len(GPUS) >= 25
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


def test_no_name_is_two_cards():
    """Names and aliases differ in more than case, brand and separators."""
    simple = [_simplify(name) for gpu in GPUS for name in (gpu.name, *gpu.aliases)]
    assert sorted(simple) == sorted(set(simple))
    assert all(simple)


@by_card
def test_a_card_reports_a_little_less_than_is_on_the_box(gpu):
    """At most an eighth less, and nothing more; only the 180 GB of the B200 are rounded down."""
    assert gpu.total_bytes > 0.87 * nominal_bytes(gpu)
    assert gpu.total_bytes < nominal_bytes(gpu)


@by_card
def test_every_number_has_a_source(gpu):
    """Where total and context were found, in words and not as an address; what was not read on a card says so."""
    for source in (gpu.source, gpu.context_source):
        assert len(source) > 10
        assert "http" not in source
    assert gpu.measured == (not gpu.source.startswith("nominal"))
    assert gpu.context_measured == (not gpu.context_source.startswith(("none for this architecture", "fitted")))
    assert gpu.total_bytes % MIB == 0


@by_card
def test_what_cuda_takes_follows_from_the_architecture(gpu):
    """The same for cards of one architecture; a context that was read somewhere is under 1 GiB."""
    alike = [other for other in GPUS if other.architecture == gpu.architecture]
    assert len({(other.context_bytes, other.cublas_workspace_bytes) for other in alike}) == 1
    assert 128 * MIB < gpu.context_bytes < (2 * GIB if gpu.context_source.startswith("fitted") else GIB)


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
    ],
)
def test_what_people_write_is_the_card_they_mean(asked, name):
    """Short names, the driver's names, and a name with memory but no socket: the one of those that reports less."""
    found = find_gpu(asked)
    assert found.name == name
    same = [gpu for gpu in GPUS if _simplify(gpu.name).startswith(_simplify(asked))]
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


def test_a_card_of_a_size_is_named_after_it():
    """Its name has its memory."""
    assert find_gpu("24GiB").name == "24.0 GiB card"


MEMORY = "such as '24GiB'"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            "A110",
            f"gpu='A110' is not known; did you mean A10 or A10G? For any other card pass its memory, {MEMORY}",
        ),
        (
            "RTX A4000",
            "gpu='RTX A4000' is not known; did you mean RTX A6000, RTX A5000 or A40? For any other card pass its "
            "memory, " + MEMORY,
        ),
        ("Voodoo", f"gpu='Voodoo' is not known; for any other card pass its memory, {MEMORY}"),
        ("", f"gpu='' is not known; for any other card pass its memory, {MEMORY}"),
        ("NVIDIA", f"gpu='NVIDIA' is not known; for any other card pass its memory, {MEMORY}"),
        ("1.2.3GiB", f"gpu='1.2.3GiB' is not known; for any other card pass its memory, {MEMORY}"),
        ("24 GiB please", f"gpu='24 GiB please' is not known; for any other card pass its memory, {MEMORY}"),
        (None, f"gpu=None is no card: pass a name such as 'A100-80GB', or its memory, {MEMORY}"),
        (True, f"gpu=True is no card: pass a name such as 'A100-80GB', or its memory, {MEMORY}"),
        (-5, f"gpu=-5 is no card: pass a name such as 'A100-80GB', or its memory, {MEMORY}"),
        (
            24,
            "gpu=24 is 24 bytes, less than CUDA may take for itself; pass all of the card's memory, in bytes or as a "
            "text " + MEMORY,
        ),
        (
            "512MiB",
            "gpu='512MiB' is 512.0 MiB, less than CUDA may take for itself; pass all of the card's memory, in bytes or "
            "as a text " + MEMORY,
        ),
    ],
)
def test_what_is_no_card_is_refused(asked, message):
    """The message carries the user's own words, the cards that are close, and what works for any card."""
    with pytest.raises(InvalidArgument) as caught:
        find_gpu(asked)
    assert str(caught.value) == message


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
    ],
)
def test_of_cards_with_one_name_the_commonest_is_meant_and_that_is_said(asked, name, said):
    """In one sentence with the others."""
    assert find_gpu(asked).name == name
    assert explain_choice(asked) == (f"gpu={asked!r} is taken for the commonest of that name: {said}",)


@pytest.mark.parametrize("asked", ["H100-PCIe", "H100-NVL", "H100-SXM", "P100", "RTX 5060 Ti", "RTX 3060", "GH200"])
def test_a_name_of_which_the_table_has_one_is_that_card(asked):
    """Nothing needs to be said: the prediction names it with its memory."""
    assert find_gpu(asked)
    assert explain_choice(asked) == ()


def test_every_name_that_several_cards_share_has_a_commonest():
    """It is one of them, and all that share a name differ by their memory or their socket."""
    for family, cards in _FAMILIES.items():
        if len({_without_socket(card) for card in cards}) > 1:
            [chosen] = [name for shared, name in COMMONEST.items() if _simplify(shared) == family]
            assert find_gpu(chosen) in cards
            assert find_gpu(family) is find_gpu(chosen)


@by_card
def test_a_card_named_in_full_needs_no_word(gpu):
    """Nor does a size, or what is no card."""
    for asked in (gpu.name, *gpu.aliases, "24GiB", 2**34, None, "Voodoo", ""):
        assert explain_choice(asked) == ()


def test_a_list_of_cards_is_no_longer_than_can_be_read():
    """Where a few letters begin many names, eight of them are shown."""
    with pytest.raises(InvalidArgument) as caught:
        find_gpu("A")
    assert str(caught.value).count(",") == 8


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.none(), st.binary(max_size=4)))
def test_anything_is_a_card_or_refused(value):
    """Whatever is passed gives a card with memory, or our own error with the user's words, never another one."""
    try:
        found = find_gpu(value)
    except InvalidArgument as error:
        found = str(error)
    assert found.startswith(f"gpu={value!r} ") if isinstance(found, str) else found.total_bytes >= GIB
