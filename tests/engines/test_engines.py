"""The examples of other engines, started as a user starts them: each ends on the weights of the torchrun script."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile

import pytest
from launches import ROOT, launch, torchrun
from sampling import sample

EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def expected():
    needs("sklearn")
    (ran,) = launch(torchrun(str(EXAMPLES / "several_gpus.py")))
    return ran.line("loss ")


def needs(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-engines")


def run(*arguments, **environment):
    """What a Python program prints of its loss and weights; none of its processes is left."""
    (ran,) = launch([sys.executable, *map(str, arguments)], limit_seconds=300.0, **environment)
    line = ran.line("loss ")
    assert ran.left_behind == []
    return line


@pytest.mark.parametrize("name", ["accelerate", "lightning", "ray"])
def test_an_example_is_read_at_one_glance(name):
    """At most forty lines, of which none starts a process group or divides anything by hand."""
    assert len((EXAMPLES / f"with_{name}.py").read_text("utf-8").splitlines()) <= 40


def test_accelerate_launch_ends_on_the_same_weights(expected):
    """The model and the optimizer come from ``accelerator.prepare``."""
    needs("accelerate")
    options = ["--multi_gpu", "--num_processes=2", "--main_process_port=0"]
    assert run("-m", "accelerate.commands.launch", *options, EXAMPLES / "with_accelerate.py") == expected


@pytest.mark.parametrize("package", sample(["lightning.pytorch", "pytorch_lightning"], 2))
def test_lightnings_trainer_ends_on_the_same_weights(package, expected, tmp_path):
    """Under both of its names; its trainer starts the second process, wraps the model and counts the epochs."""
    needs(package.partition(".")[0])
    script = tmp_path / "train.py"
    text = (EXAMPLES / "with_lightning.py").read_text("utf-8")
    script.write_text(text.replace("from lightning.pytorch import", f"from {package} import"), encoding="utf-8")
    assert run(script) == expected


@pytest.mark.slow
def test_ray_train_ends_on_the_same_weights(expected):
    """Two workers on loopback, without the dashboard and without usage statistics."""
    needs("ray")
    alone = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the latter: on 127.0.0.1
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # near the root: names of its sockets have 107 characters
        assert run(EXAMPLES / "with_ray.py", RAY_TMPDIR=folder, **alone) == expected


@pytest.mark.slow
def test_ray_data_embeds_a_corpus():
    """Each block in pieces that fit 16 MiB, in an actor; one vector for each text."""
    needs("ray")
    assert len((EXAMPLES / "embed_with_ray.py").read_text("utf-8").splitlines()) <= 40
    alone = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        program = [sys.executable, str(EXAMPLES / "embed_with_ray.py")]
        (ran,) = launch(program, limit_seconds=300.0, RAY_TMPDIR=folder, **alone)
    found, expected = map(int, re.findall(r"(\d+) of (\d+) vectors, all finite: True", ran.output)[0])
    assert found == expected > 1000
    assert ran.left_behind == []
