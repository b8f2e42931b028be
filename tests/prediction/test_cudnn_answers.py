"""cuDNN's answers: asked once, in a process that may die; and the rule where there is none to ask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autobatch.prediction import workspaces as answers
from autobatch.prediction.cudnn import Convolution
from autobatch.prediction.workspaces import Answers, ask_cudnn, estimate_workspace, find_libraries

VERSION = 92000


def make(samples: int = 8, **changes) -> Convolution:
    """A convolution of 3 x 3 on 56 x 56 points."""
    plain = Convolution("forward", (samples, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1), (1, 1))
    return plain._replace(**changes)


class Process:
    """In place of cuDNN's process: a convolution takes a byte a sample; it dies at some of them."""

    def __init__(self, *fatal: Convolution) -> None:
        self.fatal, self.asked = fatal, []

    def __call__(self, _card, convolutions):
        said = [VERSION]
        for convolution in convolutions:
            self.asked.append(convolution)
            if convolution in self.fatal:
                return said
            said.append(convolution.inputs[0])
        return said


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    files = tmp_path / "libcudnn.so.9", tmp_path / "libcublasLt.so.13"
    for file in files:
        file.write_text("a library")
    monkeypatch.setattr(answers, "find_libraries", lambda: files)
    return files


@pytest.fixture
def process(monkeypatch):
    made = Process()
    monkeypatch.setattr(answers, "_run", made)
    return made


def test_each_convolution_is_asked_once(libraries, process):
    """Equal ones have one answer."""
    assert ask_cudnn([make(8), make(16), make(8)], "sm_80", 108) == Answers(VERSION, {make(8): 8, make(16): 16})
    assert process.asked == [make(8), make(16)]


def test_what_ends_the_process_has_no_answer_and_the_others_do(libraries, monkeypatch):
    """It is not asked again in this call."""
    process = Process(make(3))
    monkeypatch.setattr(answers, "_run", process)
    wanted = [make(n) for n in (1, 2, 3, 4, 5)]
    assert ask_cudnn(wanted, "sm_80", 108).workspaces == {make(n): n for n in (1, 2, 4, 5)}
    assert process.asked == wanted


def test_a_cudnn_that_always_dies_is_left_alone(libraries, monkeypatch):
    """After three processes; nothing hangs and nothing is raised."""
    wanted = [make(n) for n in range(1, 9)]
    process = Process(*wanted)
    monkeypatch.setattr(answers, "_run", process)
    assert ask_cudnn(wanted, "sm_80", 108).workspaces == {}
    assert len(process.asked) == 3


@pytest.mark.parametrize("architecture", ["gfx942", "unknown"])
def test_a_card_that_cudnn_does_not_know_is_not_asked_for(architecture, libraries, process):
    """AMD's cards, and those that have just a size."""
    assert ask_cudnn([make()], architecture, 108) == Answers(0, {})
    assert not process.asked


def test_without_cudnn_there_is_no_answer(monkeypatch):
    """As with a build of torch for CPUs."""
    monkeypatch.setattr(answers, "find_libraries", lambda: None)
    assert ask_cudnn([make()], "sm_80", 108) == Answers(0, {})


def test_both_libraries_are_needed(tmp_path, monkeypatch):
    """A process in which cuDNN does not find cuBLASLt is ended by it."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    cudnn = tmp_path / "nvidia/cudnn/lib/libcudnn.so.9"
    cudnn.parent.mkdir(parents=True)
    cudnn.touch()
    assert find_libraries() is None
    cublas = tmp_path / "nvidia/cu13/lib/libcublasLt.so.13"
    cublas.parent.mkdir(parents=True)
    cublas.touch()
    assert find_libraries() == (cudnn, cublas)


def test_a_process_that_cannot_load_cudnn_says_nothing(libraries):
    """Here the real process runs, on files that are no libraries."""
    assert ask_cudnn([make()], "sm_80", 108) == Answers(0, {})


@given(
    size=st.integers(5, 40),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    space=st.integers(2, 3),
)
def test_the_sizes_of_the_output_are_torchs(size, kernel, stride, padding, space):
    """In two and three dimensions."""
    inputs, weight = torch.empty(2, 4, *[size] * space, device="meta"), torch.empty(6, 4, *[kernel] * space)
    run = torch.nn.functional.conv2d if space == 2 else torch.nn.functional.conv3d
    outputs = run(inputs, weight.to("meta"), stride=stride, padding=padding)
    described = Convolution(
        "forward", tuple(inputs.shape), tuple(weight.shape), (stride,) * space, (padding,) * space, (1,) * space
    )
    assert described.outputs == tuple(outputs.shape)


@pytest.mark.parametrize(
    ("changes", "architecture", "expected"),
    [
        ({"tf32": False}, "sm_80", "nothing"),
        ({}, "sm_75", "nothing"),
        ({"dtype": "float64"}, "sm_80", "nothing"),
        ({"channels_last": True, "dtype": "float16"}, "sm_80", "nothing"),
        ({}, "sm_80", "input and weight"),
        ({"kind": "weight gradient"}, "sm_80", "all"),
        ({"dtype": "bfloat16"}, "sm_80", "all"),
        ({"weight": (64, 64, 1, 1), "padding": (0, 0)}, "sm_80", "input and weight"),
        ({"weight": (64, 64, 1, 1), "padding": (0, 0)}, "sm_86", "nothing"),
        ({"weight": (64, 16, 3, 3)}, "sm_80", "all"),
        ({"inputs": (8, 64, 1, 1)}, "sm_80", "nothing"),
    ],
)
def test_the_rule_counts_copies(changes, architecture, expected):
    """Of what tensor cores want laid out otherwise."""
    convolution = make(**changes)
    inputs, outputs, weight = convolution.byte_counts()
    sizes = {"nothing": 0, "input and weight": inputs + weight, "all": inputs + outputs + weight}
    assert estimate_workspace(convolution, architecture) == sizes[expected]
