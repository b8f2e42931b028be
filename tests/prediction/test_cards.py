"""The table of cards and how one is found: by any of its names, or by its memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import sample

from autobatch.errors import InvalidArgument
from autobatch.prediction.cards import (
    _FAMILIES,
    COMMON,
    COMMONEST,
    GPUS,
    Gpu,
    _simplify,
    _without_socket,
    explain_choice,
    find_gpu,
    make_gpu,
)

GIB, MIB = 2**30, 2**20

# What is on the box of those whose name does not say it, in GiB; A16: of each of its four, MI250: of each half.
BOXES = {
    4: "GTX 1650",
    6: "GTX 1660, GTX 1660 SUPER, GTX 1660 Ti",
    8: (
        "RTX 2060 SUPER, RTX 2070, RTX 2070 SUPER, RTX 2080, RTX 2080 SUPER, RTX 3060 Ti, RTX 3070, RTX 3070 "
        "Ti, RTX 4060, RTX 5050, RTX 5060"
    ),
    11: "RTX 2080 Ti",
    12: "TITAN V, RTX 3080 Ti, RTX 4070, RTX 4070 SUPER, RTX 4070 Ti, RTX 5070",
    16: ("T4, Quadro RTX 5000, A2, A16, RTX A4000, RTX 4070 Ti SUPER, RTX 4080, RTX 4080 SUPER, RTX 5070 Ti, RTX 5080"),
    20: "RTX 4000 Ada",
    24: "TITAN RTX, A30, A10, A10G, RTX A5000, RTX A5500, RTX 3090, RTX 3090 Ti, L4, RTX 4090 D, RTX 4090",
    32: "RTX 5090",
    48: "Quadro RTX 8000, A40, RTX A6000, L40, L40S, RTX 6000 Ada",
    64: "MI210, MI250, MI250X",
    96: "RTX PRO 6000 Blackwell",
    128: "MI300A",
    141: "H200",
    180: "B200",
    186: "GB200",
    192: "MI300X",
    256: "MI325X",
    288: "B300, MI350X, MI355X",
}
NOMINAL = {name: size for size, names in BOXES.items() for name in names.split(", ")}

ARCHITECTURES = {  # by the first letters of a name, NVIDIA's list of compute capabilities and AMD's of its GPUs
    "sm_60": "P100",
    "sm_70": "V100|TITAN V",
    "sm_75": r"T4$|TITAN RTX|Quadro RTX [58]000|RTX 20|GTX 16",
    "sm_80": "A30$|A100|A800",
    "sm_86": r"A2$|A10G?$|A16|A40$|RTX A[2-6]|RTX 30",
    "sm_89": "L4$|L40|RTX [46]000 Ada|RTX 40[6-9]0",
    "sm_90": "H20|H100|H800|GH200",
    "sm_100": "B200|GB200",
    "sm_103": "B300",
    "sm_120": "RTX PRO|RTX 50",
    "gfx90a": "MI2",
    "gfx942": "MI30|MI325",
    "gfx950": "MI35",
}


def nominal_bytes(gpu: Gpu) -> int:
    """What is on the box: it is in the name, or above."""
    in_name = re.search(r"(\d+)GB", gpu.name)
    return (int(in_name[1]) if in_name else NOMINAL[gpu.name]) * GIB


by_card = pytest.mark.parametrize("gpu", sample(GPUS, 8), ids=lambda gpu: gpu.name)


def test_there_are_many_cards():
    """At least 90, each once; a prediction lists a third of them unasked, and a page has the rest."""
    assert len(GPUS) >= 90
    assert 25 <= len(COMMON) <= 35
    assert {gpu.name for gpu in GPUS} > COMMON
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


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


@by_card
def test_a_card_reports_a_little_less_than_is_on_the_box(gpu):
    """At most an eighth less, and nothing more; only the 180 GB of the B200 are rounded down."""
    assert gpu.total_bytes > 0.87 * nominal_bytes(gpu)
    assert gpu.total_bytes < nominal_bytes(gpu)


@by_card
def test_every_number_has_a_source(gpu):
    """Where the total was found, in words and not as an address; a total that was not read on a card says so."""
    assert len(gpu.source) > 10
    assert "http" not in gpu.source
    assert gpu.measured == (not gpu.source.startswith("nominal"))
    assert "{" not in gpu.source
    assert gpu.total_bytes % MIB == 0


@by_card
def test_a_card_is_of_the_architecture_of_its_family(gpu):
    """And of that one alone; AMD's are unproven, and say so."""
    assert [name for name, family in ARCHITECTURES.items() if re.match(family, gpu.name)] == [gpu.architecture]
    assert ("ROCm is unproven" in gpu.source) == gpu.architecture.startswith("gfx")
    assert not (gpu.measured and gpu.architecture.startswith("gfx"))


@by_card
def test_a_card_of_which_no_total_was_found_has_the_least_of_those_with_as_much_memory(gpu):
    """Of all totals that were read on cards with the same box; the source says whose."""
    named = re.findall(r"as the (.+?) reports it", gpu.source)
    for name in named:
        alike = [other for other in GPUS if other.measured and nominal_bytes(other) == nominal_bytes(gpu)]
        assert not gpu.measured
        assert gpu.total_bytes == find_gpu(name).total_bytes == min(other.total_bytes for other in alike)
    assert bool(named) == ("which has as much" in gpu.source and not gpu.architecture.startswith("gfx"))


@by_card
def test_what_cuda_takes_grows_with_the_card(gpu):
    """Of cards of one architecture."""
    alike = [other for other in GPUS if other.architecture == gpu.architecture]
    smaller = [other for other in alike if other.multiprocessors <= gpu.multiprocessors]
    assert gpu.context_bytes >= max(other.context_bytes for other in smaller)
    assert 128 * MIB < gpu.context_bytes < (2 * GIB if gpu.architecture == "sm_80" else GIB)
    assert len({other.cublas_workspace_bytes for other in alike}) == 1


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


def test_a_card_of_a_size_is_named_after_it():
    """Its name has its memory."""
    assert find_gpu("24GiB").name == "24.0 GiB card"


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


@pytest.mark.parametrize("asked", ["H100-PCIe", "H100-NVL", "H100-SXM", "P100", "A800", "H20", "RTX 3060 Ti"])
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
